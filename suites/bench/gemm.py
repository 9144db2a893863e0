"""Products of matrices beside cuBLAS in BF16 and copies: plain, grouped, W4A16, and on a B200."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.cli.values import settings_here
from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div
from degarble.kernels.gemm import w4a16_problem
from degarble.kernels.gemm.grouped_problem import GroupedFp8Problem, GroupedProblem
from degarble.kernels.gemm.problem import (
    BF16,
    FP8_BLOCK,
    NVFP4,
    TACTICS,
    GemmForm,
    GemmProblem,
    GemmTactic,
    choose_form,
)
from degarble.kernels.gemm.w4a16_problem import LAYOUTS, W4A16Problem
from degarble.kernels.primitives.quantise_problem import SCALES as FP8_SCALES
from degarble.kernels.primitives.quantise_problem import Fp8Problem
from degarble.kernels.rows.problem import InverseRopeProblem
from degarble.kernels.runtime.targets import SM90A, SM100A, target_of_device
from degarble.suites.bench import gpu
from degarble.suites.bench.gpu import empty, floats, integers, normal, octets
from degarble.suites.bench.runner import (
    COPY,
    TERABYTES,
    TERAFLOPS,
    US,
    US_MEDIAN,
    Arm,
    Bench,
    Claim,
    Comparison,
    copy_arm,
    share_of,
    shared,
    times,
)
from degarble.suites.kernels import sm100_checks as blackwell
from degarble.suites.kernels import sm100_table
from degarble.suites.kernels.gemm.grouped_fp8_checks import GroupedFp8Operands

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from degarble.suites.bench.runner import Reading

    Launch = Callable[[], object]

CUBLAS = "cuBLAS, BF16"
SHAPES = ((4096, 7168, 4096), (4096, 4096, 7168))
SMALL_ROWS = (1, 16, 128, 512)
FAMILIES = {SM90A.name: "sm90", SM100A.name: "sm100"}
SCALES = {BF16.name: "none", NVFP4.name: "e4m3", FP8_BLOCK.name: "float32"}
WANTED = {BF16.name: 0.85, NVFP4.name: 0.55}  # of cuBLAS in BF16
WANTED_FP8 = 1.2  # of the BF16 form


# ---- plain products ------------------------------------------------------------------------------


def tensors_of(problem: GemmProblem) -> dict[str, Any]:
    """Draw operands, and D."""
    m, n, k = problem.rows, problem.columns, problem.inner
    made: dict[str, Any] = {}
    for side, rows, scale_rows in (("a", m, m), ("b", n, ceil_div(n, 128))):
        if problem.operands == BF16.name:
            made[side] = normal(rows, k)
        elif problem.operands == FP8_BLOCK.name:
            made[side] = normal(rows, k, dtype=torch.float8_e4m3fn)
            made[f"{side}_scales"] = floats(scale_rows, ceil_div(k, 128)).abs()
        else:
            size = SWIZZLE_128X4.storage_size(rows, k // NVFP4.block)
            made[side] = octets(rows, k // 2, low=0, high=256)
            made[f"{side}_scales"] = octets(size)
            made[f"{side}_decode_scale"] = torch.ones(1, device=gpu.DEVICE)
    return made | {"out": empty(m, n)}


def cublas_arm(problem: GemmProblem, name: str = CUBLAS) -> Arm:
    """Multiply BF16 operands by torch.mm."""

    def make(_number: int) -> Launch:
        given = tensors_of(problem)
        return lambda: torch.mm(given["a"], given["b"].T, out=given["out"])

    return Arm(name, make, problem.bytes_moved, problem.operations, baseline=True)


def gemm_arm(
    name: str, problem: GemmProblem, form: Callable[[], GemmForm] | None = None, **told: Any
) -> Arm:
    """Run a kernel, in the form of its table or another one."""

    def make(_number: int) -> Launch:
        chosen = form() if form else choose_form(problem, target_of_device().name)
        kernel = gpu.module(f"{FAMILIES[chosen.target]}_gemm_{problem.operands}").KERNEL
        compiled = kernel.compile_form(chosen, settings_here())
        return partial(kernel.launch, compiled, chosen, problem, tensors_of(problem))

    return Arm(name, make, problem.bytes_moved, problem.operations, **told)


def _same(form: GemmForm) -> GemmForm:
    return form


def problems(extents: tuple[int, int, int]) -> list[GemmProblem]:
    """Return a shape in every kind of operands."""
    return [GemmProblem(*extents, operands, scales) for operands, scales in SCALES.items()]


def title_of(extents: tuple[int, int, int]) -> str:
    return "M {}, N {}, K {}".format(*extents)


def in_tactic(problem: GemmProblem, tactic: GemmTactic) -> Arm:
    name = (
        f"{problem.operands}, {tactic.rows} x {tactic.columns}{' swapped' * tactic.swapped}, "
        f"cluster {tactic.cluster_rows} x {tactic.cluster_columns}, group {tactic.group}"
    )
    form = GemmForm(problem.operands, problem.scales, SM90A.name, tactic)
    return gemm_arm(name, problem, partial(_same, form))


def gemm(options: Any) -> Iterator[Comparison]:
    """All kinds of operands at two large shapes and small ones, or all tactics at small ones."""
    columns = (US, TERAFLOPS, times(CUBLAS, "of cuBLAS"))
    claims = [
        Claim(f"{name} of cuBLAS", name, lambda of: of.times(CUBLAS), wanted)
        for name, wanted in WANTED.items()
    ]
    claims.append(Claim("fp8_block of bf16", "fp8_block", lambda of: of.times("bf16"), WANTED_FP8))
    for extents in (*SHAPES, *((rows, 7168, 4096) for rows in SMALL_ROWS)):
        small = extents not in SHAPES
        arms = [gemm_arm(problem.operands, problem) for problem in problems(extents)]
        if small and options.tactics:
            arms = [
                in_tactic(problem, tactic)
                for problem in problems(extents)
                for tactic in TACTICS[SM90A.name, problem.operands]
            ]
        turns = (cublas_arm(GemmProblem(*extents)), *arms)
        yield Comparison(title_of(extents), [turns], columns, () if small else claims)


# ---- the NVFP4 product on a B200: every tactic beside its own bound; never run yet ---------------

FEW = 32  # rows of A that swapped operands answer
SM100_SHAPES = (*sm100_table.PUBLISHED, (16, 7168, 16384), (16, 512, 7168), (16, 1536, 7168))


def tactics(rows: int) -> list[GemmForm]:
    """Return the forms that are worth a comparison at so many rows."""
    alone, pairs = blackwell.forms(), blackwell.pairs()
    if rows <= FEW:
        fit = [form for form in blackwell.swapped() if rows <= form.tactic.columns]
        return [*fit, *alone[:2]]
    clustered = [gemm_form for form in alone[2:] for gemm_form in blackwell.clustered(form)]
    of_pairs = [gemm_form for form in pairs[2:] for gemm_form in blackwell.clustered_pair(form)]
    return [*alone, *clustered, *pairs, *of_pairs]


def bound_share(problem: GemmProblem, form: GemmForm | None, reading: Reading) -> str:
    """Return what bounds a form, and the bound's time over the one that it took."""
    if form is None:
        return ""
    bound = sm100_table.bound_of(problem, form)
    return f"{bound.limit} {bound.seconds / reading.median:.2f}"


def sm100_gemm(_options: Any) -> Iterator[Comparison]:
    """The bound is that of suites/kernels/sm100_table.py: clock and bandwidth of a data sheet."""
    for extents in SM100_SHAPES:
        problem = GemmProblem(*extents, "nvfp4", "e4m3")
        forms = {blackwell.named(form): form for form in tactics(problem.rows)}
        arms = [gemm_arm(name, problem, partial(_same, form)) for name, form in forms.items()]
        turns = (cublas_arm(GemmProblem(*extents)), copy_arm(problem.bytes_moved), *arms)

        def of_bound(reading: Reading, p: Any = problem, known: Any = forms) -> str:
            return bound_share(p, known.get(reading.arm.name), reading)

        columns = (US, TERAFLOPS, TERABYTES, times(CUBLAS, "of cuBLAS, BF16"),
                   ("of the bound", of_bound))  # fmt: skip
        yield Comparison(title_of(extents), [turns], columns)


# ---- BF16 times NVFP4 ----------------------------------------------------------------------------

W4A16_SHAPES = ((7168, 4096), (8192, 8192))  # N x K
W4A16_ROWS = (1, 2, 4, 8, 16)
LARGE_COPY, LARGE = 150_000_000, "large copy"  # for which a launch costs nothing in comparison
WANTED_W4A16 = 0.6  # of both copies
WANTED_FASTER = 2.0


def w4a16_tensors(problem: W4A16Problem) -> dict[str, Any]:
    codes = octets(problem.outputs, problem.columns // 2, low=0, high=256)
    scales = octets(problem.scale_bytes, low=0x30, high=0x48)
    decode_scale = torch.full((1,), 0.01, device=gpu.DEVICE)
    x, out = normal(problem.rows, problem.columns), empty(problem.rows, problem.outputs)
    scaled = {"codes": codes, "scales": scales, "decode_scale": decode_scale}
    return {"x": x, **scaled, "out": out}


def w4a16_arm(problem: W4A16Problem) -> Arm:
    """A share counts packed weights, 0.5625 bytes each."""

    def make(_number: int) -> Launch:
        tactic = w4a16_problem.choose_tactic(problem)
        form = w4a16_problem.choose_form(problem, tactic, target_of_device().name)
        kernel = gpu.module("sm90_gemm_w4a16").KERNEL
        compiled = kernel.compile_form(form, settings_here())
        return partial(kernel.launch, compiled, form, problem, w4a16_tensors(problem))

    name = f"{problem.outputs}x{problem.columns}, M = {problem.rows}"
    return Arm(name, make, problem.weight_bytes)


def bf16_weights_arm(problem: W4A16Problem) -> Arm:
    def make(_number: int) -> Launch:
        x, out = normal(problem.rows, problem.columns), empty(problem.rows, problem.outputs)
        weight = normal(problem.outputs, problem.columns)
        return lambda: torch.mm(x, weight.T, out=out)

    return Arm(CUBLAS, make, 2 * problem.outputs * problem.columns, baseline=True)


def stricter(reading: Reading) -> float:
    return min(reading.share_of(COPY), reading.share_of(LARGE))


def w4a16(options: Any) -> Iterator[Comparison]:
    """M = 1 to 16 at two shapes; targets use the stricter of both copies."""
    every = [W4A16Problem(m, *shape, options.layout) for shape in W4A16_SHAPES for m in W4A16_ROWS]
    turns = [
        (w4a16_arm(problem), copy_arm(problem.weight_bytes), copy_arm(LARGE_COPY, LARGE),
         bf16_weights_arm(problem))
        for problem in every
    ]  # fmt: skip
    claims = []
    for arm, *_ in turns:
        text = f"{arm.name}: share of the stricter copy"
        claims.append(Claim(text, arm.name, stricter, WANTED_W4A16))
        text = f"{arm.name}: times as fast as cuBLAS"
        claims.append(Claim(text, arm.name, lambda of: of.times(CUBLAS), WANTED_FASTER))

    def cublas_us(reading: Reading) -> str:
        return f"{reading.beside[CUBLAS].median * 1e6:.2f}"

    columns = (
        US, TERABYTES, share_of(COPY, "of a copy"), share_of(LARGE, "of a large one"),
        ("cuBLAS us", cublas_us), times(CUBLAS, "faster"),
    )  # fmt: skip
    yield Comparison(f"N x K, {options.layout} scales", turns, columns, claims)


# ---- grouped products: o_a with heads turned back in the product, and a float32 projection -------

POSITIONS, HEAD = 1 << 16, 512
GROUPS = {"V4-Pro": 16, "V4-Flash": 8}
COLUMNS, INNER = 1024, 4096
HIDDEN, PROJECTED = 7168, 2048


def rotation(tokens: int) -> tuple[Any, Any]:
    return floats(POSITIONS, 64), integers(0, POSITIONS, (tokens,))


def by_cublas(a: Any, b: Any, groups: int) -> Launch:
    d = normal(groups, len(a), COLUMNS)
    by_group = a.view(len(a), groups, INNER).transpose(0, 1)
    weights = b.view(groups, COLUMNS, INNER).transpose(1, 2)
    return lambda: torch.bmm(by_group, weights, out=d)


def output_launches(tokens: int, groups: int, _number: int) -> dict[str, Launch]:
    """Return the arms of o_a on buffers of their own."""
    kernel, back = gpu.module("sm90_gemm_grouped").KERNEL, gpu.module("simt_inverse_rope").KERNEL
    a, b = normal(tokens, groups * INNER), normal(groups * COLUMNS, INNER)
    turns, positions = rotation(tokens)
    heads, out = a.view(tokens, -1, HEAD), normal(tokens, groups * COLUMNS)
    fused = GroupedProblem(tokens, groups, COLUMNS, INNER, HEAD, POSITIONS)
    plain = GroupedProblem(tokens, groups, COLUMNS, INNER)
    problem = InverseRopeProblem(tokens, heads.shape[1], POSITIONS, in_place=True)

    def composed() -> None:
        back.run(problem, settings_here(), heads=heads, turns=turns, positions=positions, out=heads)
        kernel.run(plain, settings_here(), a=a, b=b, out=out)

    return {
        "turned in the product": lambda: kernel.run(
            fused, settings_here(), a=a, b=b, turns=turns, positions=positions, out=out
        ),
        "inverse_rope, then the product": composed,
        "the product alone": lambda: kernel.run(plain, settings_here(), a=a, b=b, out=out),
        CUBLAS: by_cublas(a, b, groups),
    }


class Coded(NamedTuple):
    """Buffers of o_a in FP8, and the problems of its kernels."""

    heads: Any
    quantised: Any  # codes and scales that quantise_fp8 writes, with B
    told: Fp8Problem
    alone: GroupedFp8Problem

    def quantise(self, problem: Fp8Problem, **turns: Any) -> None:
        out = {"codes": self.quantised.a, "scales": self.quantised.a_scales}
        kernel = gpu.module("simt_quantise_fp8").KERNEL
        kernel.run(problem, settings_here(), values=self.heads.a, **out, **turns)

    def turn_and_quantise(self) -> None:
        """Turn the heads back on their way to their codes."""
        turns, positions = self.heads.turns, self.heads.positions
        self.quantise(self.told, turns=turns, positions=positions)

    def turn_then_quantise(self) -> None:
        """Turn the heads back in place and quantise them."""
        each = self.heads.a.view(self.told.rows, -1, HEAD)
        back = InverseRopeProblem(self.told.rows, each.shape[1], POSITIONS, in_place=True)
        turns = {"turns": self.heads.turns, "positions": self.heads.positions}
        kernel = gpu.module("simt_inverse_rope").KERNEL
        kernel.run(back, settings_here(), heads=each, out=each, **turns)
        self.quantise(replace(self.told, turned=0, positions=0))

    def each_group(self) -> None:
        """Multiply group by group, as long as no kernel had them all: torch cuts and joins."""
        plain = gpu.module("sm90_gemm_fp8_block").KERNEL
        self.turn_then_quantise()
        groups, held = self.alone.groups, self.quantised
        one = GemmProblem(self.told.rows, COLUMNS, INNER, FP8_BLOCK.name, self.told.scales)
        of_a = (each.chunk(groups, 1) for each in (held.a, held.a_scales))
        of_b = (each.chunk(groups) for each in (held.b, held.b_scales))
        made = [
            plain.run_one(
                one,
                settings_here(),
                a=x.contiguous(),
                a_scales=of_x.contiguous(),
                b=w,
                b_scales=of_w,
            )
            for x, of_x, w, of_w in zip(*of_a, *of_b, strict=True)
        ]
        torch.cat(made, 1)


def coded_buffers(a: Any, b: Any, groups: int, kind: str) -> Coded:
    """Make codes of B, and memory for those of A."""
    quantiser = gpu.module("simt_quantise_fp8").KERNEL
    tokens, codes = len(a), b.to(torch.float8_e4m3fn)
    of_b = torch.ones(groups * COLUMNS // 128, INNER // 128, device=a.device)
    of_b = of_b if kind == "float32" else torch.full_like(of_b, 127, dtype=torch.uint8)
    turns, positions = rotation(tokens)
    problem = Fp8Problem(tokens, groups * INNER, kind, turned=HEAD, positions=POSITIONS)
    held = quantiser.allocate(problem, a.device)
    heads = GroupedFp8Operands(a, codes, of_b, turns=turns, positions=positions)
    quantised = GroupedFp8Operands(held["codes"], codes, of_b, held["scales"])
    return Coded(heads, quantised, problem, GroupedFp8Problem(tokens, groups, COLUMNS, INNER, kind))


def coded_launches(tokens: int, groups: int, kind: str, _number: int) -> dict[str, Launch]:
    """Return the arms of o_a in FP8 on buffers of their own; cuBLAS multiplies BF16."""
    kernel = gpu.module("sm90_gemm_grouped_fp8").KERNEL
    a, b = normal(tokens, groups * INNER), normal(groups * COLUMNS, INNER)
    out, held = normal(tokens, groups * COLUMNS), coded_buffers(a, b, groups, kind)
    held.turn_and_quantise()
    fused = replace(held.alone, turned=HEAD, positions=POSITIONS)

    def product() -> None:
        kernel.run(held.alone, settings_here(), **held.quantised._asdict(), out=out)

    def composed(first: Callable[[], None]) -> None:
        first()
        product()

    return {
        "turned and quantised in the product": lambda: kernel.run(
            fused, settings_here(), **held.heads._asdict(), out=out
        ),
        "turned and quantised, then the product": lambda: composed(held.turn_and_quantise),
        "inverse_rope, quantise_fp8, then the product": lambda: composed(held.turn_then_quantise),
        "the same, a product for every group": held.each_group,
        "the product alone": product,
        CUBLAS: by_cublas(a, b, groups),
    }


def projection_launches(tokens: int, _number: int) -> dict[str, Launch]:
    """Return the arms of the compressor's projection on buffers of their own."""
    kernel = gpu.module("sm90_gemm_grouped").KERNEL
    a, b = normal(tokens, HIDDEN), normal(PROJECTED, HIDDEN)
    problem = GroupedProblem(tokens, 1, PROJECTED, HIDDEN, out="fp32")
    out, rounded = floats(tokens, PROJECTED), normal(tokens, PROJECTED)
    return {
        "projection in float32": lambda: kernel.run(problem, settings_here(), a=a, b=b, out=out),
        CUBLAS: lambda: torch.mm(a, b.T, out=rounded),
    }


OUTPUT_ARMS = (
    "turned in the product", "inverse_rope, then the product", "the product alone", CUBLAS,
)  # fmt: skip
CODED_ARMS = (
    "turned and quantised in the product", "turned and quantised, then the product",
    "inverse_rope, quantise_fp8, then the product", "the same, a product for every group",
    "the product alone", CUBLAS,
)  # fmt: skip


def grouped(options: Any) -> Iterator[Comparison]:
    """All arms of a table share the buffers of a set, as the steps of a layer do."""
    for tokens in options.tokens:
        for title, problem, launches, names in grouped_tables(tokens):
            made = cache(launches)
            arms = [
                Arm(name, shared(made, name), problem.bytes_moved, problem.operations,
                    name == CUBLAS)
                for name in names
            ]  # fmt: skip
            columns = (US_MEDIAN, TERAFLOPS, times(CUBLAS, "of cuBLAS"))
            yield Comparison(f"{title}, {tokens} tokens", [tuple(arms)], columns)


def grouped_tables(tokens: int) -> Iterator[tuple[str, Any, Any, tuple[str, ...]]]:
    """Yield title, problem, launches and names of the arms of every table."""
    for name, groups in GROUPS.items():
        problem = GroupedProblem(tokens, groups, COLUMNS, INNER, HEAD, POSITIONS)
        yield f"o_a of {name}", problem, partial(output_launches, tokens, groups), OUTPUT_ARMS
    for name, groups in GROUPS.items():
        for kind in FP8_SCALES:
            coded = GroupedFp8Problem(tokens, groups, COLUMNS, INNER, kind, HEAD, POSITIONS)
            title = f"o_a of {name} in FP8, scales {kind}"
            yield title, coded, partial(coded_launches, tokens, groups, kind), CODED_ARMS
    plain = GroupedProblem(tokens, 1, PROJECTED, HIDDEN, out="fp32")
    names = ("projection in float32", CUBLAS)
    yield "compressor's projection", plain, partial(projection_launches, tokens), names


BENCHES = {
    "gemm": Bench(
        "products in BF16, NVFP4 and FP8 blocks beside cuBLAS in BF16", gemm, rounds=24,
        needs=SM90A.name, remedy="These forms are Hopper's.", options={"tactics": False},
    ),
    "grouped": Bench(
        "o_a with heads turned back in the product, and the compressor's projection", grouped,
        rounds=20, needs="gpu", options={"tokens": (8192, 64, 1)},
    ),
    "w4a16": Bench(
        "BF16 times NVFP4 beside copies of the weights and cuBLAS in BF16", w4a16, rounds=30,
        needs="gpu", options={"layout": tuple(LAYOUTS)},
    ),
    "sm100-gemm": Bench(
        "every tactic of the NVFP4 product on a B200 beside cuBLAS and its bound", sm100_gemm,
        rounds=24, needs=SM100A.name, remedy="Run it on a B200.",
    ),
}  # fmt: skip
