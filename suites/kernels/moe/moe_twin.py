"""Compare the grouped experts on a GPU with their definition in float64, within derived budgets.

In the twin operands are decoded by harness.formats, products are in float64 and rounded where the
references round, SwiGLU is that of references.elementary, and harness.formats requantises. What FC1
writes may differ from the twin's only where the twin's number lies as near to a rounding boundary
as three roundings to BF16 reach (gate, up, SwiGLU); such codes are counted, and few. FC2 is judged
on what FC1 did write, by the budget of every GEMM (suites/kernels/gemm_checks.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.formats.codec import decode_array, decode_pairs
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import SWIZZLE_128X4, from_layout
from degarble.harness.formats.number_formats import E2M1, E4M3, NVFP4, NibbleOrder
from degarble.harness.formats.quantise import quantise
from degarble.kernels.gemm.problem import GemmProblem
from degarble.kernels.moe.problem import BEFORE_W2, GATE_AND_UP
from degarble.references import elementary
from degarble.suites.kernels import gemm_checks
from degarble.suites.kernels.moe import moe_checks

if TYPE_CHECKING:
    from torch import Tensor

ROUNDINGS = 3 * 2.0**-8  # of BF16, between a sum and its code; relative
MOST_CODES = 5e-3  # of codes that may lie at a boundary and differ
MOST_SCALES = 5e-3


class Counted(NamedTuple):
    """What differed where it may, as shares; and what is wrong, as text."""

    codes: float
    scales: float
    wrong: str


def decoded(codes: Tensor, scales: Tensor, scale: Tensor | float) -> Tensor:
    """Return the float64 numbers [M, K] of packed codes and scale bytes [M, K / 16]."""
    values = decode_pairs(codes, E2M1, NibbleOrder.LOW_EVEN, torch.float64)
    return values * decode_array(scales, E4M3).double().repeat_interleave(16, 1) * scale


def weights_of(given: Any, matrix: tuple[int, ...]) -> Tensor:
    """Return the float64 numbers of one matrix."""
    b = given.codes[matrix]
    scales = from_layout(given.scales[matrix], SWIZZLE_128X4, b.shape[0], b.shape[1] // 8)
    return decoded(b, scales, given.decode_scale[matrix].double())


def twin_of(case: moe_checks.Case, given: Any, expert: int, slots: Tensor) -> Tensor:
    """Return what the references hand to the second quantisation, for one expert's slots."""
    p, w13 = case.problem, given.weights.w13
    x = given.x[slots // p.chosen].float()
    scale = w13.input_scale[expert]
    made = quantise(x, NVFP4, CANONICAL, decode_scale=scale)
    values = decoded(made.codes, made.block_scale.view(torch.uint8), scale.double())
    gate, up = (
        (values @ weights_of(w13, (expert, part)).T).bfloat16().float()
        for part in range(GATE_AND_UP)
    )
    out = elementary.swiglu(gate, up, p.limit)
    if p.weighting == BEFORE_W2:
        out = out * given.routing.weights.flatten()[slots, None]
    return out.bfloat16().float()


def compared(case: moe_checks.Case, given: Any, made: Any, expert: int) -> Counted:
    """Compare one expert's rows with the twin."""
    slots = moe_checks.slots_of_experts(case, given.routing)[expert]
    places = made.workspace.plan.places[slots].long()
    hidden, p = made.workspace.hidden, case.problem
    want = twin_of(case, given, expert, slots)
    scale = given.weights.w2.input_scale[expert]
    twin = quantise(want, NVFP4, CANONICAL, decode_scale=scale)
    rows = (int(places[0]), int(places[-1]) + 1)
    scales = moe_checks.scale_codes(hidden.scales, rows, p.width)
    of_twin = twin.block_scale.view(torch.uint8)
    other = scales != of_twin
    far = other & ((scales.int() - of_twin.int()).abs() > 1)
    got, twins = (
        decode_pairs(codes, E2M1, NibbleOrder.LOW_EVEN, torch.float64)
        for codes in (hidden.codes[places], twin.codes)
    )
    differs = (got != twins) & ~other.repeat_interleave(16, 1)
    unit = decode_array(scales, E4M3).double().repeat_interleave(16, 1) * scale.double()
    # A code that differs is the neighbour across the boundary, and the number lies beside that.
    middle = (got + twins) / 2 * unit
    reach = ROUNDINGS * want.double().abs() + 2.0**-20 * unit
    off = differs & ((want.double() - middle).abs() > reach)
    wrong = f"{int(far.sum())} scales and {int(off.sum())} codes far from a boundary"
    numbers = made.workspace.out[places]
    values = decoded(hidden.codes[places], scales, scale.double())
    sides = gemm_checks.Sides((), values, weights_of(given.weights.w2, (expert,)))
    extents = GemmProblem(len(slots), p.hidden, p.width, "nvfp4", "e4m3")
    of_rows = gemm_checks.difference(
        gemm_checks.Case(extents, gemm_checks.forms("nvfp4")[0]), numbers, sides
    )
    is_wrong = bool(far.any()) or bool(off.any())
    return Counted(
        float(differs.double().mean()),
        float(other.double().mean()),
        (wrong if is_wrong else "") + of_rows,
    )
