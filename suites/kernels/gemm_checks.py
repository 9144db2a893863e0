"""Compare GEMM kernels on a GPU with the exact product of what their operands stand for.

Cases vary extents, tactics and spreads of operands; the product is that of decoded operands in
float64. The budget is what accumulation may add (derived below), and one rounding to BF16. D, the
padding of scale tiles and the rows after D are full of NaN before; none of it may show or vanish.
The sum over all of D is judged as well: a few wrong numbers hide in a bound for the worst case.

Shape letters: M rows of D, N columns of D, K inner, G groups of K, P = K / 2 bytes
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.formats.codec import decode_array, decode_pairs
from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div, round_up, to_layout
from degarble.harness.formats.number_formats import E2M1, E4M3, UE8M0, NibbleOrder
from degarble.kernels.gemm.problem import (
    OPERANDS,
    TACTICS,
    GemmForm,
    GemmProblem,
    choose_form,
)
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import module_of

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = CompileSettings()
TARGET = "sm_90a"
NAN_SCALE = 0x7F  # of E4M3
ROWS_BEHIND = 3
TAIL_ROWS = (1, 63, 64, 65, 127, 129)
TAIL_COLUMNS = (8, 72, 136)
SPREADS = ("ordinary", "integers", "sparse", "zeros")

# A step of a tensor core aligns its products and the sum so far to the largest of them, cuts each
# off at F fraction bits, adds, and cuts the result off (references.tensor_core): with T terms it
# loses less than (T + 1) 2**-F of the sum of magnitudes, and 2**-23 where float32 ends.
BF16_ROUNDING = 2.0**-8
LOSS_OF_STEP = {  # numbers of K in a step, what it loses
    "bf16": (16, 18 * 2.0**-25 + 2.0**-23),
    "nvfp4": (16, 18 * 2.0**-25 + 2.0**-23),
    "fp8_block": (32, 34 * 2.0**-13 + 2.0**-13),  # MMA-Sim: 13 fraction bits, 13 kept
}
NORM_ALLOWED = {"bf16": 2.0**-8, "nvfp4": 2.0**-8, "fp8_block": 2.0**-8 + 2.0**-10}


class Sides(NamedTuple):
    """What a kernel is given, and what both sides stand for in float64."""

    given: tuple[Any, ...]
    a: Tensor  # [M, K]
    b: Tensor  # [N, K]


@dataclass(frozen=True)
class Case:
    """One launch; everything follows from these facts."""

    problem: GemmProblem
    form: GemmForm
    spread: str = "ordinary"
    seed: int = 0

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        p, t = self.problem, self.form.tactic
        return (
            f"{p.operands} {p.scales} {p.rows}x{p.columns}x{p.inner} in {t.rows}x{t.columns} "
            f"{'swapped ' * t.swapped}"
            f"cluster {t.cluster_rows}x{t.cluster_columns} {self.spread} seed {self.seed}"
        )


def forms(operands: str, target: str = TARGET) -> list[GemmForm]:
    """Return every form of the table."""
    return [
        GemmForm(operands, scales, target, tactic)
        for tactic in TACTICS[target, operands]
        for scales in OPERANDS[operands].scales
    ]


def with_form(form: GemmForm, extents: tuple[int, int, int], spread: str, seed: int) -> Case:
    """Make a case for a form."""
    return Case(GemmProblem(*extents, form.operands, form.scales), form, spread, seed)


def tails(form: GemmForm, inner: int) -> list[Case]:
    """Return cases whose M and N leave tiles unfilled."""
    return [
        with_form(form, (rows, columns, inner), SPREADS[(rows + columns) % 2], rows * columns)
        for rows in TAIL_ROWS
        for columns in TAIL_COLUMNS
    ]


def fuzzed(operands: str, seed: int, count: int) -> list[Case]:
    """Draw cases: extents, form and spread."""
    drawn = random.Random(f"{operands} {seed}")
    step = OPERANDS[operands].inner_multiple
    made = []
    for _ in range(count):
        form = drawn.choice(forms(operands))
        extents = (
            drawn.choice((drawn.randint(1, 40), drawn.randint(1, 900))),
            8 * drawn.choice((drawn.randint(1, 12), drawn.randint(1, 180))),
            step * drawn.randint(1, drawn.choice((12, 3000 // step))),
        )
        made.append(with_form(form, extents, drawn.choice(SPREADS), drawn.randrange(1 << 30)))
    return made


# ---- operands ------------------------------------------------------------------------------------


def _drawn(case: Case, shape: tuple[int, ...], side: int, device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(2 * case.seed + side)
    x = torch.randn(shape, generator=generator, device=device)
    if case.spread == "integers":
        return torch.randint(-4, 5, shape, generator=generator, device=device).float()
    if case.spread == "sparse":
        return x * (x > 1)
    if case.spread == "zeros":
        x[::2] = -0.0
    return x


def _bytes(case: Case, shape: tuple[int, ...], bounds: tuple[int, int], device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(case.seed + 7919 * bounds[1])
    return torch.randint(*bounds, shape, generator=generator, device=device).to(torch.uint8)


def bf16_sides(case: Case, device: str) -> Sides:
    """Draw BF16 operands."""
    p = case.problem
    a = _drawn(case, (p.rows, p.inner), 0, device).bfloat16()
    b = _drawn(case, (p.columns, p.inner), 1, device).bfloat16()
    return Sides((a, b), a.double(), b.double())


class Nvfp4Operand(NamedTuple):
    """One operand: packed codes [rows, P], scales in 128x4 order, float32 decode scale [1]."""

    codes: Tensor
    scales: Tensor
    decode_scale: Tensor


class Fp8Operands(NamedTuple):
    """E4M3 codes as torch.float8_e4m3fn, with their block scales."""

    a: Tensor
    a_scales: Tensor
    b: Tensor
    b_scales: Tensor


NAMES = {
    "bf16": ("a", "b"),
    "fp8_block": Fp8Operands._fields,
    "nvfp4": ("a", "a_scales", "a_decode_scale", "b", "b_scales", "b_decode_scale"),
}


def nvfp4_operand(case: Case, rows: int, side: int, device: str) -> tuple[Nvfp4Operand, Tensor]:
    """Draw codes, scales among NaN padding, a decode scale; and the values without that scale."""
    blocks = case.problem.inner // 16
    codes_MP = _bytes(case, (rows, case.problem.inner // 2), (0, 256 - side), device)
    if case.spread in {"sparse", "zeros"}:
        codes_MP[:, ::3] = 0
    scales_MB = _bytes(case, (rows, blocks), (0, 0x7F - side), device)
    if case.spread == "ordinary":
        scales_MB = scales_MB % 0x20 + 0x28
    padded = torch.full(
        (round_up(rows, 128), round_up(blocks, 4)), NAN_SCALE, dtype=torch.uint8, device=device
    )
    padded[:rows, :blocks] = scales_MB
    scale = torch.full((1,), 0.01 * (side + 1.37), device=device)
    values_MK = decode_pairs(codes_MP, E2M1, NibbleOrder.LOW_EVEN, torch.float64)
    values_MK *= decode_array(scales_MB, E4M3).double().repeat_interleave(16, 1)
    storage = to_layout(padded, SWIZZLE_128X4)
    return Nvfp4Operand(codes_MP, storage, scale), values_MK


def nvfp4_sides(case: Case, device: str) -> Sides:
    """Draw NVFP4 operands."""
    a, a_MK = nvfp4_operand(case, case.problem.rows, 0, device)
    b, b_NK = nvfp4_operand(case, case.problem.columns, 1, device)
    return Sides((a, b), a_MK * a.decode_scale.double(), b_NK * b.decode_scale.double())


def fp8_sides(case: Case, device: str) -> Sides:
    """Draw E4M3 operands with block scales."""
    p = case.problem
    groups, blocks = ceil_div(p.inner, 128), ceil_div(p.columns, 128)
    a = _drawn(case, (p.rows, p.inner), 0, device).to(torch.float8_e4m3fn)
    b = _drawn(case, (p.columns, p.inner), 1, device).to(torch.float8_e4m3fn)
    scales = [
        _bytes(case, shape, bounds, device)
        for shape, bounds in (((p.rows, groups), (110, 140)), ((blocks, groups), (115, 135)))
    ]
    values = [decode_array(codes, UE8M0) for codes in scales]
    if p.scales == "float32":
        scales = values = [value * 1.37 for value in values]
    of_a = values[0].double().repeat_interleave(128, 1)[:, : p.inner]
    of_b = values[1].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    given = Fp8Operands(a, scales[0], b, scales[1])
    return Sides((given,), a.double() * of_a, b.double() * of_b[: p.columns, : p.inner])


SIDES = {"bf16": bf16_sides, "nvfp4": nvfp4_sides, "fp8_block": fp8_sides}


# ---- verdicts ------------------------------------------------------------------------------------


def named(operands: str, sides: Any) -> dict[str, Tensor]:
    """Return the operands of a product by name."""
    return dict(zip(NAMES[operands], flat(sides), strict=True))


def multiply(
    kernels: Any,
    sides: Any,
    problem: GemmProblem,
    form: GemmForm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply two sides by a module's kernel."""
    given = named(problem.operands, sides) | ({} if out is None else {"out": out})
    made: Tensor = kernels.KERNEL.run_one(problem, SETTINGS, form, **given)
    return made


def hopper(operands: str) -> Any:
    """Return the module of a kernel on sm_90a."""
    return import_module(module_of(f"sm90_gemm_{operands}"))


def on_device(case: Case, sides: Sides) -> Tensor:
    """Run a case; D with the rows behind it, all of them NaN before."""
    p = case.problem
    shape = (p.rows + ROWS_BEHIND, p.columns)
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=sides.a.device)
    multiply(hopper(p.operands), sides.given, p, case.form, out[: p.rows])
    return out


def mismatch(case: Case, device: str = "cuda") -> str:
    """Say how a case differs from the exact product beyond its budget; empty where it does not."""
    sides = SIDES[case.problem.operands](case, device)
    return difference(case, on_device(case, sides), sides)


def budget(case: Case, sides: Sides, want_MN: Tensor) -> Tensor:
    """Return how far each number may be: accumulation, then one rounding to BF16."""
    step, loss = LOSS_OF_STEP[case.problem.operands]
    magnitudes_MN = sides.a.abs() @ sides.b.abs().T
    inner = case.problem.inner if case.problem.operands != "fp8_block" else 128
    lost_MN = ceil_div(inner, step) * loss * magnitudes_MN
    # Scales meet the sum in float32: three products, and for FP8 a sum a stage.
    lost_MN += (3 + ceil_div(case.problem.inner, 128)) * 2.0**-24 * magnitudes_MN
    allowed_MN: Tensor = lost_MN + BF16_ROUNDING * (want_MN.abs() + lost_MN) + 2.0**-133
    return allowed_MN


def difference(case: Case, out: Tensor, sides: Sides) -> str:
    """Compare a result with the exact product."""
    rows = case.problem.rows
    behind = int((~out[rows:].isnan()).sum())
    if behind:
        return f"{case.name}: {behind} numbers written behind D"
    got_MN, want_MN = out[:rows].double(), sides.a @ sides.b.T
    apart_MN = (got_MN - want_MN).abs()
    wrong_MN = ~(apart_MN <= budget(case, sides, want_MN))  # NaN is wrong
    norm = float(want_MN.norm())
    relative = float(apart_MN.norm()) / norm if norm else float(apart_MN.norm())
    if not bool(wrong_MN.any()) and relative <= NORM_ALLOWED[case.problem.operands]:
        return ""
    places = wrong_MN.nonzero()
    first = tuple(places[0].tolist()) if len(places) else (0, 0)
    return (
        f"{case.name}: {len(places)} of {wrong_MN.numel()} beyond their budget, first at {first}: "
        f"got {float(got_MN[first])}, want {float(want_MN[first])}; over all {relative:.2e} "
        f"(allowed {NORM_ALLOWED[case.problem.operands]:.2e})"
    )


def rows_alone_differ(case: Case) -> list[int]:
    """Return rows that are others when the rest of A is; each is computed at its own place."""
    assert case.problem.operands == "bf16"
    sides = bf16_sides(case, "cuda")
    whole = on_device(case, sides)
    a_MK, b_NK = sides.given
    found = []
    for row in range(0, case.problem.rows, max(1, case.problem.rows // 5)):
        other = torch.full_like(a_MK, torch.nan)
        other[row] = a_MK[row]
        alone = on_device(case, sides._replace(given=(other, b_NK)))
        if not torch.equal(alone[row].view(torch.int16), whole[row].view(torch.int16)):
            found.append(row)
    return found


def table_case(operands: str, extents: tuple[int, int, int], scales: str, seed: int = 0) -> Case:
    """Make a case in the form that the table chooses."""
    problem = GemmProblem(*extents, operands, scales)
    return Case(problem, choose_form(problem, TARGET), seed=seed)


def flat(given: Any) -> list[Tensor]:
    """Return the tensors of nested tuples, in their order."""
    if isinstance(given, torch.Tensor):
        return [given]
    return [tensor for each in given for tensor in flat(each)]
