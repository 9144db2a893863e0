"""Fit gains by least squares, match them with known constants, and plant them.

A gain may apply before or after the rounding of an output (epilogue or separate pass). It is named
after a known number if that lies within NEAR of the fit, else reported as a plain gain. Whether it
explains the difference is decided by reproduction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    has_facts,
    unrounded_output,
    with_facts,
    with_outputs,
)
from degarble.harness.report.number_text import number

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

    Region = Callable[[Mapping[str, Tensor], Tensor], Tensor | None]

NEAR = 4e-3  # of a fitted gain: a spacing of BF16, should few values stand many times
LEFT = 0.25  # largest share of the difference that a gain may leave unexplained
FAINT = 0.02  # from 1: beyond, a gain stands out of the roundings of BF16
SURE = 8.0  # standard errors of a fit
FEWEST = 4  # numbers that a fit needs


class RoundingSide(Enum):
    """Whether a gain applies before or after an output's rounding."""

    FRONT = "in front"
    BEHIND = "behind"


@dataclass(frozen=True)
class FittedGain:
    """A fitted gain, and the share of the difference that it leaves; 0 if it explains all."""

    gain: float
    left: float


def slope(candidate: Tensor, expected: Tensor) -> FittedGain | None:
    """Fit candidate = gain * expected; None with too few numbers or non-finite ones."""
    c, e = candidate.double().flatten(), expected.double().flatten()
    energy = float(e @ e)
    if e.numel() < FEWEST or not energy or not math.isfinite(float(c.sum())):
        return None
    gain = float(c @ e) / energy
    apart = float((c - e).norm())
    return FittedGain(gain, float((c - gain * e).norm()) / apart if apart else 0.0)


def fitted(candidate: Tensor, expected: Tensor) -> float | None:
    """Return the gain if there is one that explains the difference."""
    gain = slope(candidate, expected)
    if gain is None or gain.left > LEFT or gain.gain == 1:
        return None
    return gain.gain


def faint(candidate: Tensor, expected: Tensor) -> float | None:
    """Fit a gain so near 1 that single elements hide it in their rounding; None if not significant.

    Return the fit with the smaller standard error: least squares suits noise of constant size; the
    mean of quotients suits noise proportional to the value, as rounding is, where least squares
    depends on a few large values.
    """
    c, e = candidate.double().flatten(), expected.double().flatten()
    e, c = e[e != 0], c[e != 0]
    if e.numel() < FEWEST or not bool(c.isfinite().all()):
        return None
    energy = float(e @ e)
    squares, quotients = float((c - e) @ e) / energy, (c - e) / e
    fits = (
        (float(((c - e - squares * e) * e).norm()) / energy, squares),
        (float(quotients.std()) / math.sqrt(e.numel()), float(quotients.mean())),
    )
    error, beside = min(fits)
    return 1 + beside if SURE * error < abs(beside) <= FAINT else None


def sharpened(
    context: ComponentContext,
    record: CallRecord,
    gain: float,
    mask: Tensor | None = None,
    side: RoundingSide = RoundingSide.FRONT,
) -> float:
    """Refine a gain: return the one with which most exact values round to the observed outputs.

    On the BEHIND side it multiplies stored values. Only one of the two sides has such a gain: on
    the other it is off by up to half a step, which is more than a faint gain.
    """
    c, exact = record.outputs["out"], record.expected["out"]
    if side is RoundingSide.FRONT and has_facts(context):
        exact = with_facts(context, unrounded_output)(context.call)(record.inputs, context.weights)[
            "out"
        ]
    if exact.shape != c.shape:
        return gain
    if mask is not None:
        c, exact = c[mask], exact[mask]
    step = torch.finfo(c.dtype).eps
    c, exact = c.double().flatten(), exact.double().flatten()
    known = c.isfinite() & (c != 0) & exact.isfinite() & (exact != 0)
    c, exact = c[known], exact[known]
    if len(c) < FEWEST:
        return gain
    # Half an ulp of each stored number; frexp's exponent is one above the IEEE exponent.
    half = torch.ldexp(torch.full_like(c, step / 2), torch.frexp(c).exponent - 1)
    # The gains with which an exact value rounds to the stored one.
    ends = torch.stack(((c - half) / exact, (c + half) / exact)).sort(0).values
    low, high = shared(*ends)
    middle = (low + high) / 2
    return middle if is_named(middle, gain) else gain


def shared(low: Tensor, high: Tensor) -> tuple[float, float]:
    """Return the stretch that most of the intervals [low, high] have in common."""
    # Sweep: +1 where an interval begins, -1 where it ends; the maximum is the common part.
    ends, order = torch.cat((low, high)).sort(stable=True)
    depth = torch.where(order < len(low), 1, -1).cumsum(0)
    best = int(depth.argmax())
    return float(ends[best]), float(ends[best + 1])


def is_named(gain: float, known: float) -> bool:
    """Return whether a fitted gain matches a known number."""
    return abs(gain - known) <= NEAR * abs(known)


def times(out: Tensor, factor: float, where: Tensor | None = None) -> Tensor:
    """Multiply everywhere, or where `where` broadcasts to True; keep the dtype."""
    made = (out.double() * factor).to(out.dtype)
    return made if where is None else torch.where(where, made, out)


def gain_variant(
    words: str,
    factor: float,
    region: Region | None = None,
    output: str = "out",
    places: Mapping[str, Any] | None = None,
) -> FaultVariant:
    """Multiply an output after its rounding; `region` gets inputs and output and returns a mask."""

    def change(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        where = None if region is None else region(inputs, outputs[output])
        return {**outputs, output: times(outputs[output], factor, where)}

    return FaultVariant(words, with_outputs(change), dict(places or {}))


def early_gain_variant(
    context: ComponentContext,
    words: str,
    factor: float,
    region: Region | None = None,
    places: Mapping[str, Any] | None = None,
) -> FaultVariant:
    """Multiply `out` before its rounding, as a kernel's epilogue does."""
    rounded = with_facts(context, lambda facts: facts)
    exact = with_facts(context, unrounded_output)

    def apply(call: Any) -> Any:
        plain, fine = rounded(call), exact(call)

        def faulty(inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Any:
            outputs, exactly = plain(inputs, weights), fine(inputs, weights)
            where = None if region is None else region(inputs, outputs["out"])
            made = (exactly["out"].double() * factor).to(outputs["out"].dtype)
            if where is not None:
                made = torch.where(where, made, outputs["out"])
            return {**outputs, "out": made}

        return faulty

    return FaultVariant(words, apply, dict(places or {}))


def both_gains(
    context: ComponentContext,
    words: str,
    factor: float,
    region: Region | None = None,
    places: Mapping[str, Any] | None = None,
    sides: Collection[RoundingSide] = tuple(RoundingSide),
) -> Iterator[FaultVariant]:
    """Yield a gain before the rounding, then one after it: for recognition."""
    # A power of two commutes with rounding, so that both sides are the same way.
    same = abs(math.frexp(factor)[0]) == 0.5
    if RoundingSide.FRONT in sides and has_facts(context) and not same:
        yield early_gain_variant(context, words, factor, region, places)
    if RoundingSide.BEHIND in sides:
        if has_facts(context) and not same:
            words = f"{words}, after the rounding"
        yield gain_variant(words, factor, region, places=places)


def planted_gain(
    context: ComponentContext,
    words: str,
    factor: float,
    region: Region | None = None,
    places: Mapping[str, Any] | None = None,
) -> FaultVariant:
    """Return the first of both_gains: for planting."""
    return next(both_gains(context, words, factor, region, places))


def of_record(record: CallRecord, output: str = "out") -> float | None:
    """Return the gain of one output."""
    if output not in record.outputs or output not in record.expected:
        return None
    c, e = record.outputs[output], record.expected[output]
    if c.shape != e.shape or not e.dtype.is_floating_point:
        return None
    return fitted(c, e)


def gain_text(gain: float) -> str:
    """Write a gain with four digits; near 1 as 1 plus or minus the rest, and name a turned sign."""
    if gain < 0:
        return f"a turned sign, a gain of {number(gain, 4)}"
    beside = gain - 1
    if not beside or abs(beside) >= FAINT / 2:
        return f"a gain of {number(gain, 4)}"
    return f"a gain of 1 {'+' if beside > 0 else '-'} {number(abs(beside), 3)}"
