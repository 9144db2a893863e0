"""Compute rows of latents and heads in plain torch, in the order that their kernels state.

The factor of a row has the order of kv_problem; RoPE of its tail rounds every product and sum. The
result is at most one BF16 step from the references, everywhere.
Shape letters: T tokens, R rows, L width (512 or 128), P positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.formats.codec import value_ulp_distance
from degarble.harness.model.types import Rope, RopeEnd, RopePairing
from degarble.kernels.primitives import kv_problem as rows
from degarble.references import elementary
from degarble.references.numerics import Numerics

if TYPE_CHECKING:
    from torch import Tensor

SPREADS = ("ordinary", "wide", "tiny", "huge", "ties", "zeros", "special")
ROPE = Rope(
    theta=10_000.0, dims=rows.ROTATED, pairing=RopePairing.INTERLEAVED, end=RopeEnd.LAST, yarn=None
)
NAN_BF16 = 0x7FFF  # what a conversion to BF16 makes of a NaN; PTX ISA 9.1, cvt


def drawn(spread: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw BF16 values on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if spread == "wide":
        powers = torch.randint(-12, 4, (*shape[:-1], shape[-1] // 16), generator=generator)
        x *= torch.exp2(powers.float()).repeat_interleave(16, -1)
    if spread in {"tiny", "huge"}:
        x *= 2.0 ** (-40 if spread == "tiny" else 50)
    if spread == "ties":
        x = torch.randint(-24, 25, shape, generator=generator) * 0.25
    if spread == "zeros":
        x *= x > 1.5
        x[::3] = -0.0
    if spread == "special":
        for number in (torch.inf, -torch.inf, torch.nan):
            x[torch.rand(shape, generator=generator) < 1e-3] = number
    return x.bfloat16()


def table_of_turns(positions: int, first: int = 0) -> Tensor:
    """Return float32 cosines and sines [P, 64] of positions from `first` on, as references have."""
    numbers_P = torch.arange(first, first + positions)
    table = elementary.rotation_table(ROPE, numbers_P, Numerics.bf16())
    return torch.cat((table.cos, table.sin), dim=-1)


def factor(x_RL: Tensor, epsilon: float) -> Tensor:
    """Return each row's factor [R], summed in the order in which a warp does."""
    width = x_RL.shape[1]
    held = rows.geometry(width)
    idle = held.slots * rows.LANES * rows.HALF - width  # lanes without values hold zeros
    x = torch.nn.functional.pad(x_RL.float(), (0, idle))
    x = x.reshape(-1, held.slots, rows.LANES, rows.HALF)
    halves = [[x[:, slot, :, i] for i in range(rows.HALF)] for slot in range(held.slots)]
    sums = rows.lane_sum(halves)
    lanes = [sums[:, lane] for lane in range(rows.LANES)]
    made: Tensor = rows.row_factor(lanes, epsilon, exact_root, width)
    return made


def exact_root(x: Tensor) -> Tensor:
    """Return square roots of float32 numbers, rounded once.

    Trap: torch's own of float32 on a CPU is a step off in one of six numbers.
    """
    return x.double().sqrt().float()


def normed_rows(x_RL: Tensor, weight_L: Tensor | None, epsilon: float) -> Tensor:
    """Return float32 rows times their factors, and times a weight where there is one."""
    scale = factor(x_RL, epsilon)[:, None]
    if weight_L is None:
        return x_RL.float() * scale
    made: Tensor = rows.normed(x_RL.float(), weight_L.float(), scale)
    return made


def turned_tail(x_RL: Tensor, turns_RP: Tensor, *, back: bool = False) -> Tensor:
    """Turn the last 64 of float32 rows, round everything to BF16 once; [R, 64] has the angles."""
    pairs, plain = rows.ROTATED // 2, x_RL.shape[1] - rows.ROTATED
    cos, sin = turns_RP[:, :pairs], turns_RP[:, pairs:] * (-1.0 if back else 1.0)
    even, odd = x_RL[:, plain::2], x_RL[:, plain + 1 :: 2]
    out = x_RL.clone()
    out[:, plain::2] = even * cos - odd * sin
    out[:, plain + 1 :: 2] = even * sin + odd * cos
    return out.bfloat16()


def turns_at(table_P: Tensor, positions_R: Tensor) -> Tensor:
    """Return the angles of positions; those outside of the table are NaN."""
    inside = (positions_R >= 0) & (positions_R < table_P.shape[0])
    found = table_P[positions_R.clamp(0, table_P.shape[0] - 1)]
    return torch.where(inside[:, None], found, torch.nan)


def with_the_machines_nan(x: Tensor) -> Tensor:
    """Return BF16 values with the NaN that a processor's conversion makes."""
    return torch.where(x.isnan(), NAN_BF16, x.view(torch.int16)).to(torch.int16).view(x.dtype)


def bits(x: Tensor) -> Tensor:
    """Return BF16 values as the integers 0 to 65,535."""
    return x.view(torch.int16).to(torch.int32) & 0xFFFF


def steps_apart(got: Tensor, want: Tensor) -> int:
    """Return the most BF16 steps between two tensors; NaN has to meet NaN."""
    assert torch.equal(got.isnan(), want.isnan())
    numbers = ~want.isnan()
    return int(value_ulp_distance(got[numbers], want[numbers]).max()) if numbers.any() else 0
