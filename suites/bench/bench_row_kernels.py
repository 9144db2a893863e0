"""Norms, fused or not, embedding, product of few rows and router against copies, on a GPU.

    python -m degarble.suites.bench.bench_row_kernels [--only PART ...] [--rounds N]

Arms are timed as in bench_quantise_kernel: graphs over several buffer sets, in turns, with a copy
of as many bytes in the same rounds. torch's own functions are timed too where there are some. Bits
are compared by suites/kernels, not here.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.kernels.gemm import gemv_problem
from degarble.kernels.gemm.gemv_problem import GemvProblem
from degarble.kernels.primitives.quantise_problem import LAYOUTS, QuantiseProblem
from degarble.kernels.rows import (
    problem as embed_problem,
)
from degarble.kernels.rows import (
    problem as residual_problem,
)
from degarble.kernels.rows import (
    problem as rmsnorm_problem,
)
from degarble.kernels.rows import (
    router_problem,
)
from degarble.kernels.rows.problem import EmbedProblem, NormProblem, NormTactic, ResidualProblem
from degarble.kernels.rows.router_problem import RouterProblem
from degarble.kernels.runtime import operands
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.targets import target_of_device
from degarble.suites.bench.bench_quantise_kernel import (
    Arm,
    captured,
    copy_arm,
    kernel_arm,
    sets_for,
    table,
)
from degarble.suites.bench.gpu import refused_here

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

SETTINGS = CompileSettings()
HEAD = (129_280, 7_168)  # rows and columns of V4-Pro's embedding and head
WANTED_NORM = 0.85
WANTED_FUSED = 1.1
WANTED_GEMV = WANTED_ROWS = 0.80
WALKERS = (0, 2, 3, 4, 6, 8, 16)


def norm_arm(name: str, problem: NormProblem, tactic: NormTactic | None = None) -> Arm:
    """Norm random rows, one buffer set after the other."""
    from degarble.kernels.rows import simt_rmsnorm as kernels  # noqa: PLC0415  needs the DSL

    form = rmsnorm_problem.choose_norm_form(problem, target_of_device().name)
    kernel = kernels.compile_form(form, SETTINGS)
    chosen = tactic or rmsnorm_problem.choose_norm_tactic(problem)
    launches = []
    for _ in range(sets_for(problem.bytes_moved)):
        x_MK = _random(problem.rows, problem.columns)
        weight = _random(problem.columns).to(operands.DTYPES[problem.weight])
        scale = torch.tensor([5 / 2688], device="cuda") if problem.layout else None
        given = {"values": x_MK, "weight": weight, "decode_scale": scale}
        tensors = given | kernels.KERNEL.allocate(problem, x_MK.device)
        launches.append(partial(kernels.KERNEL.launch, kernel, form, problem, tensors, chosen))
    return captured(name, problem.bytes_moved, launches)


def torch_norm_arm(problem: NormProblem) -> Arm:
    """Norm by torch's own function."""
    launches = []
    for _ in range(sets_for(problem.bytes_moved)):
        pair = _random(problem.rows, problem.columns), _random(problem.columns)
        launches.append(
            lambda pair=pair: torch.nn.functional.rms_norm(pair[0], pair[1].shape, pair[1], 1e-6)
        )
    return captured("torch rms_norm", problem.bytes_moved, launches)


def residual_arms(problem: ResidualProblem) -> list[Arm]:
    """Add and norm in one launch, in two of which ours is the second, and by torch in two."""
    from degarble.kernels.rows import simt_residual_norm as kernels  # noqa: PLC0415  needs the DSL
    from degarble.kernels.rows import simt_rmsnorm as plain  # noqa: PLC0415  as above

    target, norm = target_of_device().name, problem.norm
    of_both = residual_problem.choose_residual_form(problem, target)
    kernel = kernels.compile_form(of_both, SETTINGS)
    form = rmsnorm_problem.choose_norm_form(norm, target)
    compiled = plain.compile_form(form, SETTINGS)
    arms: dict[str, list[Callable[[], object]]] = {
        "in one launch": [], "torch's sum, our norm": [], "torch's sum, torch's norm": [],
    }  # fmt: skip
    for _ in range(sets_for(problem.bytes_moved)):
        x, residual = (_random(problem.rows, problem.columns) for _ in range(2))
        weight = _random(problem.columns)
        out = kernels.empty_outputs(problem, x.device)
        ours = (x, residual, weight, *out)

        def apart(t: Any = ours) -> None:
            torch.add(t[0], t[1], out=t[4])
            tensors = {"values": t[4], "weight": t[2], "normed": t[3]}
            plain.KERNEL.launch(compiled, form, norm, tensors)

        def by_torch(t: Any = ours) -> None:
            torch.add(t[0], t[1], out=t[4])
            torch.nn.functional.rms_norm(t[4], t[2].shape, t[2], 1e-6)

        named = dict(zip(("values", "residual", "weight", "normed", "total"), ours, strict=True))
        together = partial(kernels.KERNEL.launch, kernel, of_both, problem, named)
        for made, launch in zip(arms.values(), (together, apart, by_torch), strict=True):
            made.append(launch)  # type: ignore[arg-type]
    return [captured(name, problem.bytes_moved, made) for name, made in arms.items()]


def gemv_arms(rows: int) -> list[Arm]:
    """The head for a few rows: ours, and torch's matrix product."""
    from degarble.kernels.gemm import simt_gemv_bf16 as kernels  # noqa: PLC0415  needs the DSL

    problem = GemvProblem(rows, *HEAD)
    form = gemv_problem.choose_form(problem, target_of_device().name)
    kernel = kernels.compile_form(form, SETTINGS)
    ours: list[Callable[[], object]] = []
    theirs: list[Callable[[], object]] = []
    for weight_NK in WEIGHTS:
        x_MK = _random(rows, HEAD[1])
        out = torch.empty(rows, HEAD[0], device="cuda")
        tensors = (x_MK, weight_NK, out)
        ours.append(partial(kernels.launch, kernel, problem, tensors))
        theirs.append(partial(torch.mm, tensors[0], tensors[1].T))
    bytes_moved = problem.bytes_moved
    return [
        captured(f"head, M = {rows}", bytes_moved, ours),
        captured(f"cuBLAS BF16, M = {rows}", bytes_moved - 2 * rows * HEAD[0], theirs),
    ]


WEIGHTS: list[Tensor] = []  # of the head: 1.85 GB each, so all arms share them


def embed_arms(tokens: int) -> list[Arm]:
    """Look random ids up in the whole table: ours, and torch's embedding."""
    from degarble.kernels.rows import simt_embed as kernels  # noqa: PLC0415  needs the DSL

    problem = EmbedProblem(tokens, *HEAD)
    form = embed_problem.choose_embed_form(problem, target_of_device().name)
    kernel = kernels.compile_form(form, SETTINGS)
    ours: list[Callable[[], object]] = []
    theirs: list[Callable[[], object]] = []
    for number in range(sets_for(problem.bytes_moved)):
        id_T = torch.randperm(HEAD[0], device="cuda")[:tokens]
        out = torch.empty(tokens, HEAD[1], device="cuda", dtype=torch.bfloat16)
        table = WEIGHTS[number % len(WEIGHTS)]
        tensors = {"ids": id_T, "table": table, "out": out}
        ours.append(partial(kernels.KERNEL.launch, kernel, form, problem, tensors))
        theirs.append(partial(torch.nn.functional.embedding, id_T, table))
    return [
        captured(f"embed, {tokens} tokens", problem.bytes_moved, ours),
        captured(f"torch embedding, {tokens} tokens", problem.bytes_moved, theirs),
    ]


def router_arm(name: str, problem: RouterProblem) -> Arm:
    """Choose experts of random logits."""
    from degarble.kernels.rows import simt_router as kernels  # noqa: PLC0415  needs the DSL

    form = router_problem.choose_form(problem, target_of_device().name)
    kernel = kernels.compile_form(form, SETTINGS)
    bytes_moved = problem.tokens * (4 * problem.experts + 8 * problem.chosen)
    launches = []
    for _ in range(sets_for(bytes_moved)):
        logit_TE = torch.randn(problem.tokens, problem.experts, device="cuda")
        given = {"logits": logit_TE}
        if problem.vocabulary:
            given["ids"] = torch.randint(problem.vocabulary, (problem.tokens,), device="cuda")
            shape = (problem.vocabulary, problem.chosen)
            given["table"] = torch.randint(problem.experts, shape, device="cuda")
        else:
            given["bias"] = torch.randn(problem.experts, device="cuda")
        tensors = given | kernels.KERNEL.allocate(problem, logit_TE.device)
        launches.append(partial(kernels.KERNEL.launch, kernel, form, problem, tensors))
    return captured(name, bytes_moved, launches)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def walks(rounds: int) -> list[str]:
    """Compare ways to walk down the rows."""
    for layout in (None, "128x4"):
        problem = NormProblem(8192, 7168, layout=layout)
        arms = [copy_arm(problem.bytes_moved)]
        for walkers in WALKERS:
            tactic = NormTactic(walkers)
            arms.append(norm_arm(f"{walkers or 'all'} a processor", problem, tactic))
        table(f"Walks of {'RMSNorm' if layout is None else 'RMSNorm + quantise'}", arms, rounds)
    return []


def norms(rounds: int) -> list[str]:
    """Norms and the quantiser at prefill sizes and small ones; the two targets."""
    missed: list[str] = []
    for rows, columns in ((8192, 7168), (8192, 4096), (8192, 1536), (1024, 7168), (16, 7168)):
        arms = [copy_arm(NormProblem(rows, columns).bytes_moved)]
        arms += [
            norm_arm(f"RMSNorm, {weight} weight", NormProblem(rows, columns, weight=weight))
            for weight in rmsnorm_problem.NORM_WEIGHTS
        ]
        arms.append(torch_norm_arm(NormProblem(rows, columns)))
        for layout in LAYOUTS:
            arms.append(kernel_arm(f"quantise, {layout}", QuantiseProblem(rows, columns, layout)))
            fused = NormProblem(rows, columns, layout=layout)
            arms.append(norm_arm(f"RMSNorm + quantise, {layout}", fused))
        keeps = NormProblem(rows, columns, layout="128x4", keeps_values=True)
        arms.append(norm_arm("RMSNorm + quantise, 128x4, values kept", keeps))
        figures = {f.arm.name: f for f in table(f"{rows} x {columns}", arms, rounds)}
        if (rows, columns) == (8192, 7168):
            copy = figures[arms[0].name]
            share = figures["RMSNorm, bf16 weight"].share_of(copy)
            missed += _judged("RMSNorm, share of copy", share, WANTED_NORM)
            for layout in LAYOUTS:
                plain = figures[f"quantise, {layout}"].share_of(copy)
                fused_share = figures[f"RMSNorm + quantise, {layout}"].share_of(copy)
                what = f"RMSNorm + quantise over quantise, {layout}, a byte"
                missed += _judged(what, plain / fused_share, WANTED_FUSED, at_least=False)
    return missed


def residuals(rounds: int) -> list[str]:
    """V3.2's sum and norm between sublayers; the target of kernels that only move numbers."""
    missed: list[str] = []
    for rows in (8192, 1024, 64, 1):
        problem = ResidualProblem(rows, 7168)
        arms = [copy_arm(problem.bytes_moved), *residual_arms(problem)]
        figures = {f.arm.name: f for f in table(f"Sum and norm, {rows} x 7168", arms, rounds)}
        if rows == 8192:
            share = figures["in one launch"].share_of(figures[arms[0].name])
            missed += _judged("sum and norm, share of copy", share, WANTED_ROWS)
    return missed


def heads(rounds: int) -> list[str]:
    """The head of decode, and the embedding; the target of the head."""
    WEIGHTS.extend(_random(*HEAD) for _ in range(2))
    missed: list[str] = []
    problem = GemvProblem(1, *HEAD)
    arms = [copy_arm(problem.bytes_moved)]
    for rows in gemv_problem.ROWS:
        arms += gemv_arms(rows)
    figures = {f.arm.name: f for f in table(f"Head, {HEAD[0]} x {HEAD[1]}", arms, rounds)}
    for rows in gemv_problem.ROWS:
        share = figures[f"head, M = {rows}"].share_of(figures[arms[0].name])
        missed += _judged(f"head, M = {rows}, share of copy", share, WANTED_GEMV)
    for tokens in (8192, 16):
        arms = [copy_arm(EmbedProblem(tokens, *HEAD).bytes_moved), *embed_arms(tokens)]
        table(f"Embedding, {tokens} tokens", arms, rounds)
    WEIGHTS.clear()
    return missed


def routers(rounds: int) -> list[str]:
    """Routers of the three models."""
    for tokens in (8192, 16):
        v32 = RouterProblem(tokens, 256, 8, "sigmoid", 2.5, groups=8, groups_kept=4)
        arms = [
            copy_arm(tokens * 384 * 4),
            router_arm("V4-Pro, 384 experts, top 6", RouterProblem(tokens, 384, 6, scale=2.5)),
            router_arm("V4-Flash, 256 experts, top 6", RouterProblem(tokens, 256, 6, scale=1.5)),
            router_arm("V3.2, 256 experts in 8 groups, top 8", v32),
            router_arm(
                "V4-Pro, by table", RouterProblem(tokens, 384, 6, vocabulary=HEAD[0], scale=2.5)
            ),
        ]
        table(f"Router, {tokens} tokens", arms, rounds)
    return []


PARTS = {
    "walks": walks, "norms": norms, "residuals": residuals, "heads": heads, "routers": routers,
}  # fmt: skip


def _judged(what: str, measured: float, wanted: float, *, at_least: bool = True) -> list[str]:
    """Print a target; return its name where it is missed."""
    print(f"{what}: {measured:.3f}, wanted {'at least' if at_least else 'at most'} {wanted}")  # noqa: T201
    met = measured >= wanted if at_least else measured <= wanted
    return [] if met else [what]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; status 1 where a target is missed, 2 where nothing can be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=30)
    settings = parser.parse_args(arguments)
    if status := refused_here():
        return status
    missed = [name for part in settings.only for name in PARTS[part](settings.rounds)]
    for name in missed:
        print(f"missed: {name}")  # noqa: T201  a script
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
