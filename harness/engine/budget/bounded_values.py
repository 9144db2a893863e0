"""Values with error bounds, carried through operations and storing (interval arithmetic).

A Near pairs the exact value (float64, from the stored operands) with the largest error of correct
float32 arithmetic. Storing keeps the bound tight: a rounded value differs only where a rounding
boundary lies within its error, and then by the distance of both neighbours. Everywhere else the
error disappears.

Elementary functions count as accurate to 2 units in the last place (4 u, u = 2^-24), including
approximate reciprocals and roots of a device. Sums may be taken in any order.

Shape letters: T tokens, P pairs, D features.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.engine.budget.rules import U
from degarble.references import elementary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from degarble.harness.model.types import Rope
    from degarble.references.facts import Span
    from degarble.references.numerics import Numerics

FUNCTION = 4  # of u: an elementary function, a reciprocal or a root within 2 units


class Near(NamedTuple):
    """An exact value, and the most that float32 may differ from it."""

    value: Tensor
    error: Tensor


class Turn(NamedTuple):
    """Cosine and sine of RoPE angles [T, P], or [T, 1, P] to broadcast over heads."""

    cos: Near
    sin: Near


def exactly(x: Tensor) -> Near:
    """Return an operand without error."""
    return Near(x.double(), torch.zeros((), dtype=torch.float64))


def stored(x: Near, dtype: torch.dtype) -> Near:
    """Round to a storage dtype: an error vanishes, or becomes the distance to a neighbour."""
    if dtype is torch.float64:
        return x
    low, middle, high = (
        side.to(dtype).double() for side in (x.value - x.error, x.value, x.value + x.error)
    )
    # Rounding is monotone: equal ends mean that every value between them rounds alike.
    return Near(middle, torch.maximum(high - middle, middle - low))


def normed(
    x: Near, weight: Tensor, epsilon: float, stored_before: torch.dtype | None = None
) -> Near:
    """Return the RMS norm: a quarter of the width in same-sign additions, root and products 8 more.

    `stored_before` is the format in which rows are stored before the weight is applied, if any.
    """
    if stored_before is not None:
        plain = stored(normed(x, torch.ones(()), epsilon), stored_before)
        value = weight.double() * plain.value
        return Near(value, weight.double().abs() * plain.error + U * value.abs())
    width, square = x.value.shape[-1], x.value.square().mean(-1, keepdim=True)
    factor = (square + epsilon).rsqrt()
    # Relative change of the root by the errors of x.
    moved = (x.value.abs() * x.error).mean(-1, keepdim=True) * factor.square()
    out = weight.double() * x.value * factor
    own = weight.double().abs() * x.error * factor
    return Near(out, own + out.abs() * (moved + (width / 4 + 8) * U))


def layer_normed(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Near:
    """Return the LayerNorm of exact rows; its mean errs by u times the sum of magnitudes."""
    wide, width = x.double(), x.shape[-1]
    centred = wide - wide.mean(-1, keepdim=True)
    off = U * (wide.abs().sum(-1, keepdim=True) + centred.abs())
    square = centred.square().mean(-1, keepdim=True)
    factor = (square + epsilon).rsqrt()
    relative = (centred.abs() * off).mean(-1, keepdim=True) * factor.square()
    scaled = centred * factor * weight.double()
    out = scaled + bias.double()
    error = weight.double().abs() * factor * off + scaled.abs() * (relative + (width / 4 + 8) * U)
    return Near(out, error + U * (out.abs() + scaled.abs()))


def turn(rope: Rope, positions_T: Tensor, numerics: Numerics, heads: bool = False) -> Turn:
    """Return the angles of positions; a frequency's exponent is rounded, at a cost of ln(theta).

    The angle errs by its own rounding and by the frequency's error, sine and cosine by 2 units.
    """
    frequency_P = elementary.frequencies(rope, torch.float64, torch.device("cpu"))
    angle_TP = positions_T.cpu().double()[:, None] * frequency_P
    share = torch.arange(len(frequency_P)) / len(frequency_P)
    # frequency = theta^(-i / P): its exponent, up to ln(theta), is rounded as well.
    off_TP = U * (angle_TP * (8 + 2 * math.log(rope.theta) * share) + FUNCTION)
    if heads:
        angle_TP, off_TP = angle_TP.unsqueeze(1), off_TP.unsqueeze(1)
    parts = Near(angle_TP.cos(), off_TP), Near(angle_TP.sin(), off_TP)
    # YaRN scales cosine and sine.
    if rope.scale != 1.0:
        scale = Near(torch.tensor(rope.scale, dtype=torch.float64), torch.tensor(U * rope.scale))
        parts = _product(parts[0], scale), _product(parts[1], scale)
    if numerics.switches.rotation_in_storage_dtype:
        parts = stored(parts[0], numerics.store), stored(parts[1], numerics.store)
    return Turn(*parts)


def turned(x: Near, by: Turn, *, leading: bool = False, halves: bool = False) -> Near:
    """Rotate the last 2P features, or the leading ones, in pairs (2i, 2i+1) or (i, i+P)."""
    width = 2 * by.cos.value.shape[-1]
    value, error = (part.expand(x.value.shape) for part in x)
    rest = value.shape[-1] - width
    cuts = (width, rest) if leading else (rest, width)
    values, errors = (list(part.split(cuts, -1)) for part in (value, error))
    at = 0 if leading else 1
    values[at], errors[at] = _rotated(Near(values[at], errors[at]), by, halves)
    return Near(torch.cat(values, -1), torch.cat(errors, -1))


def _rotated(x: Near, by: Turn, halves: bool) -> Near:
    if halves:
        pairs = [Near(*part) for part in zip(*(side.chunk(2, -1) for side in x), strict=True)]
    else:
        pairs = [Near(x.value[..., i::2], x.error[..., i::2]) for i in (0, 1)]
    a, b = pairs
    first = _sum(_product(a, by.cos), _product(b, by.sin), -1)
    second = _sum(_product(a, by.sin), _product(b, by.cos), 1)
    if halves:
        return Near(*(torch.cat(sides, -1) for sides in zip(first, second, strict=True)))
    return Near(*(torch.stack(sides, -1).flatten(-2) for sides in zip(first, second, strict=True)))


def _product(a: Near, b: Near) -> Near:
    value = a.value * b.value
    return Near(value, a.error * b.value.abs() + a.value.abs() * b.error + U * value.abs())


def _sum(a: Near, b: Near, sign: int) -> Near:
    """Add two terms; fused or not, the sum is rounded once more."""
    value = a.value + sign * b.value
    return Near(value, a.error + b.error + U * value.abs())


def hadamard(x: Near) -> Near:
    """Apply the orthonormal transform: D additions, whose partial sums average half the total."""
    width = x.value.shape[-1]
    out, factor = elementary.hadamard(x.value), width**-0.5
    error = x.error.expand(x.value.shape).sum(-1, keepdim=True) * factor
    added = U * width / 2 * x.value.abs().sum(-1, keepdim=True) * factor
    return Near(out, error + added + 2 * U * out.abs())


def memories(
    spans: Sequence[Span], before: Tensor | None, made: Tensor, ratio: int
) -> list[Tensor]:
    """Return each sequence's rows, one for `ratio` tokens: of earlier calls, then of this one."""
    found, old, new = [], 0, 0
    for span in spans:
        kept, added = span.entries_before(ratio), span.entries_made(ratio)
        parts = [made[new : new + added]]
        if kept and before is not None:
            parts.insert(0, before[old : old + kept])
        found.append(torch.cat(parts))
        old, new = old + kept, new + added
    return found
