"""Kernels over rows beside copies of as many bytes: quantiser, norms, embedding, head, router."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.cli.values import settings_here
from degarble.kernels.gemm import gemv_problem
from degarble.kernels.gemm.gemv_problem import GemvProblem
from degarble.kernels.primitives.quantise_problem import (
    LAYOUTS,
    SWIGLU,
    QuantiseProblem,
    QuantiseTactic,
    grid,
)
from degarble.kernels.rows.problem import (
    NORM_WEIGHTS,
    EmbedProblem,
    NormProblem,
    NormTactic,
    ResidualProblem,
)
from degarble.kernels.rows.router_problem import RouterProblem
from degarble.kernels.runtime.targets import target_of_device
from degarble.suites.bench import gpu
from degarble.suites.bench.gpu import floats, integers, kernel_arm, normal
from degarble.suites.bench.runner import (
    MEGABYTES,
    TERABYTES,
    US,
    Arm,
    Bench,
    Claim,
    Comparison,
    Reading,
    copy_arm,
    share_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

HEAD = (129_280, 7_168)  # rows and columns of V4-Pro's embedding and head
COLUMNS = (MEGABYTES, US, TERABYTES, share_of())
WANTED_SHARE = 0.85  # of a copy
WANTED_FUSED = 1.1  # of the plain form's time a byte
WANTED_ROWS = 0.80


def beside_copy(title: str, moved: int, arms: list[Arm], *claims: Claim) -> Comparison:
    """A table of arms and a copy of so many bytes."""
    return Comparison(title, [(copy_arm(moved), *arms)], COLUMNS, claims)


def claim_share(arm: str, wanted: float) -> Claim:
    return Claim(f"{arm}, share of copy", arm, Reading.share_of, wanted)


def over(plain: str) -> Callable[[Reading], float]:
    """Time a byte over that of a plain form."""
    return lambda reading: reading.beside[plain].share_of() / reading.share_of()


# ---- the quantiser -------------------------------------------------------------------------------


def scale(_number: int) -> Mapping[str, Any]:
    return {"decode_scale": torch.full((1,), 5 / 2688, device=gpu.DEVICE)}


def quantise_arm(name: str, problem: QuantiseProblem, tactic: QuantiseTactic | None = None) -> Arm:
    return kernel_arm(name, "simt_quantise_nvfp4", problem, scale, tactic=tactic)


def quantise(options: Any) -> Iterator[Comparison]:
    """Ways to walk down the rows, layouts, and the form behind SwiGLU."""
    columns = options.columns
    problem = QuantiseProblem(options.rows, columns)
    tactics = {walkers: QuantiseTactic(float("inf"), walkers) for walkers in (0, 6, 8, 16)}
    arms = [
        quantise_arm(f"128x4, {n or 'all'} a processor, grid {grid(problem, of, 132)[:2]}",
                     problem, of) for n, of in tactics.items()
    ]  # fmt: skip
    yield beside_copy(f"Walks, {options.rows} x {columns}", problem.bytes_moved, arms)

    for rows in (options.rows, 1, 16, 128, 1024):
        plain = {layout: QuantiseProblem(rows, columns, layout) for layout in LAYOUTS}
        arms = [quantise_arm(layout, problem) for layout, problem in plain.items()]
        fused = QuantiseProblem(rows, columns, source=SWIGLU.name, limit=10.0)
        arms.append(quantise_arm("SwiGLU, 128x4", fused))
        claims = (
            claim_share("128x4", WANTED_SHARE),
            Claim(
                "SwiGLU for its bytes over plain",
                "SwiGLU, 128x4",
                over("128x4"),
                WANTED_FUSED,
                False,
            ),
        )
        judged = claims if rows == options.rows else ()
        yield beside_copy(f"{rows} x {columns}", plain["128x4"].bytes_moved, arms, *judged)


# ---- norms ---------------------------------------------------------------------------------------


def norm_arm(name: str, problem: NormProblem, tactic: NormTactic | None = None) -> Arm:
    given = scale if problem.layout else (lambda _number: {})
    return kernel_arm(name, "simt_rmsnorm", problem, given, tactic=tactic)


def torch_norm(problem: NormProblem, _number: int) -> Callable[[], object]:
    x, weight = normal(problem.rows, problem.columns), normal(problem.columns)
    return lambda: torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)


def walks() -> Iterator[Comparison]:
    for layout in (None, "128x4"):
        problem = NormProblem(8192, 7168, layout=layout)
        arms = [
            norm_arm(f"{walkers or 'all'} a processor", problem, NormTactic(walkers))
            for walkers in (0, 2, 3, 4, 6, 8, 16)
        ]
        of = "RMSNorm" if layout is None else "RMSNorm + quantise"
        yield beside_copy(f"walks of {of}", problem.bytes_moved, arms)


def norms() -> Iterator[Comparison]:
    """Norms and the quantiser at prefill sizes and small ones."""
    for rows, columns in ((8192, 7168), (8192, 4096), (8192, 1536), (1024, 7168), (16, 7168)):
        plain = NormProblem(rows, columns)
        arms = [
            norm_arm(f"RMSNorm, {weight} weight", NormProblem(rows, columns, weight=weight))
            for weight in NORM_WEIGHTS
        ]
        arms.append(Arm("torch rms_norm", partial(torch_norm, plain), plain.bytes_moved))
        claims = [claim_share("RMSNorm, bf16 weight", WANTED_SHARE)]
        for layout in LAYOUTS:
            alone, fused = f"quantise, {layout}", f"RMSNorm + quantise, {layout}"
            arms.append(quantise_arm(alone, QuantiseProblem(rows, columns, layout)))
            arms.append(norm_arm(fused, NormProblem(rows, columns, layout=layout)))
            text = f"{fused}: over quantise, a byte"
            claims.append(Claim(text, fused, over(alone), WANTED_FUSED, False))
        keeps = NormProblem(rows, columns, layout="128x4", keeps_values=True)
        arms.append(norm_arm("RMSNorm + quantise, 128x4, values kept", keeps))
        judged = claims if (rows, columns) == (8192, 7168) else []
        yield beside_copy(f"norms, {rows} x {columns}", plain.bytes_moved, arms, *judged)


def sum_and_norm(problem: ResidualProblem, how: str, _number: int) -> Callable[[], object]:
    """torch's sum, and then our norm or torch's."""
    kernel, norm = gpu.module("simt_rmsnorm").KERNEL, problem.norm
    x, residual, total = (normal(problem.rows, problem.columns) for _ in range(3))
    given = {"values": total, "weight": normal(problem.columns)}
    tensors = gpu.drawn(kernel, norm, given)

    def run() -> None:
        torch.add(x, residual, out=total)
        if how == "ours":
            kernel.run(norm, settings_here(), **tensors)
        else:
            torch.nn.functional.rms_norm(total, given["weight"].shape, given["weight"], 1e-6)

    return run


def residuals() -> Iterator[Comparison]:
    """V3.2's sum and norm between sublayers."""
    for rows in (8192, 1024, 64, 1):
        problem = ResidualProblem(rows, 7168)
        arms = [
            kernel_arm("in one launch", "simt_residual_norm", problem),
            *(
                Arm(f"torch's sum, {how} norm", partial(sum_and_norm, problem, who),
                    problem.bytes_moved)
                for how, who in (("our", "ours"), ("torch's", "torch"))
            ),
        ]  # fmt: skip
        judged = (claim_share("in one launch", WANTED_ROWS),) if rows == 8192 else ()
        title = f"residuals: sum and norm, {rows} x 7168"
        yield beside_copy(title, problem.bytes_moved, arms, *judged)


# ---- the ends of a model -------------------------------------------------------------------------


def gemv(problem: GemvProblem, weights: Callable[[int], Any], number: int) -> Callable[[], object]:
    kernel = gpu.module("simt_gemv_bf16").KERNEL
    form = gemv_problem.choose_form(problem, target_of_device().name)
    tensors = {
        "x": normal(problem.rows, HEAD[1]), "weight": weights(number),
        "out": floats(problem.rows, HEAD[0]),
    }  # fmt: skip
    compiled = kernel.compile_form(form, settings_here())
    return partial(kernel.launch, compiled, form, problem, tensors)


def heads() -> Iterator[Comparison]:
    """The head of decode and the embedding, which share two weights of 1.85 GB."""
    held = cache(lambda _number: normal(*HEAD))

    def weight(number: int) -> Any:
        return held(number % 2)

    def ids(tokens: int) -> Any:
        return torch.randperm(HEAD[0], device=gpu.DEVICE)[:tokens]

    def looked_up(tokens: int, number: int) -> Mapping[str, Any]:
        return {"ids": ids(tokens), "table": weight(number)}

    def by_torch(tokens: int, number: int) -> Callable[[], object]:
        return partial(torch.nn.functional.embedding, ids(tokens), weight(number))

    def mm(rows: int, number: int) -> Callable[[], object]:
        return partial(torch.mm, normal(rows, HEAD[1]), weight(number).T)

    arms, claims = [], []
    for rows in gemv_problem.ROWS:
        problem = GemvProblem(rows, *HEAD)
        moved = problem.bytes_moved
        arms.append(Arm(f"head, M = {rows}", partial(gemv, problem, weight), moved, sets=2))
        arms.append(
            Arm(f"cuBLAS BF16, M = {rows}", partial(mm, rows), moved - 2 * rows * HEAD[0], sets=2)
        )
        claims.append(claim_share(f"head, M = {rows}", WANTED_ROWS))
    copied = GemvProblem(1, *HEAD).bytes_moved
    yield beside_copy(f"heads, {HEAD[0]} x {HEAD[1]}", copied, arms, *claims)
    for tokens in (8192, 16):
        of = EmbedProblem(tokens, *HEAD)
        arms = [
            kernel_arm("embed", "simt_embed", of, partial(looked_up, tokens)),
            Arm("torch embedding", partial(by_torch, tokens), of.bytes_moved),
        ]  # fmt: skip
        yield beside_copy(f"heads: embedding, {tokens} tokens", of.bytes_moved, arms)


def router_arm(name: str, problem: RouterProblem) -> Arm:
    """Choose experts of random logits, or by the table of token ids."""

    def given(_number: int) -> Mapping[str, Any]:
        if not problem.vocabulary:
            return {}
        shape = (problem.vocabulary, problem.chosen)
        return {
            "ids": integers(0, problem.vocabulary, (problem.tokens,)),
            "table": integers(0, problem.experts, shape),
        }

    moved = problem.tokens * (4 * problem.experts + 8 * problem.chosen)
    return kernel_arm(name, "simt_router", problem, given, moved=moved)


def routers() -> Iterator[Comparison]:
    for tokens in (8192, 16):
        v32 = RouterProblem(tokens, 256, 8, "sigmoid", 2.5, groups=8, groups_kept=4)
        by_table = RouterProblem(tokens, 384, 6, vocabulary=HEAD[0], scale=2.5)
        arms = [
            router_arm("V4-Pro, 384 experts, top 6", RouterProblem(tokens, 384, 6, scale=2.5)),
            router_arm("V4-Flash, 256 experts, top 6", RouterProblem(tokens, 256, 6, scale=1.5)),
            router_arm("V3.2, 256 experts in 8 groups, top 8", v32),
            router_arm("V4-Pro, by table", by_table),
        ]
        yield beside_copy(f"routers, {tokens} tokens", tokens * 384 * 4, arms)


def rows(options: Any) -> Iterator[Comparison]:
    """All parts, or those that --only names: walks norms residuals heads routers."""
    for part in (walks, norms, residuals, heads, routers):
        if not options.only or any(part.__name__ in word for word in options.only):
            yield from part()


BENCHES = {
    "quantise": Bench(
        "the quantising kernel beside a copy of as many bytes", quantise, rounds=30, needs="gpu",
        options={"rows": 8192, "columns": 7168},
    ),
    "rows": Bench(
        "norms, embedding, head and router beside copies and torch", rows, rounds=30, needs="gpu"
    ),
}  # fmt: skip
