"""Gains: fitted by least squares, named where they are a known number, planted by one wrapper.

Owns the fit and the wrappers that multiply, in front of the rounding of an output or behind it. A
gain is a name if a known number lies within NEAR of the fit; otherwise it is said as what it is, a
gain of so much. Whether it explains is left to reproduction. Kept honest by
suites/engine/faults/test_gain_fit.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.model_faults import Way, with_outputs
from degarble.harness.engine.faults.rebinding import has_facts, unrounded_output, with_facts
from degarble.harness.report.number_text import number

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene, Sight

    Region = Callable[[Mapping[str, Tensor], Tensor], Tensor | None]

NEAR = 4e-3  # of a fitted gain: a spacing of BF16, should few values stand many times
LEFT = 0.25  # of the difference may remain behind a fitted gain, else it is no gain
FAINT = 0.02  # from 1: beyond, a gain stands out of the roundings of BF16
SURE = 8.0  # standard errors of a fit
FEWEST = 4  # numbers that a fit needs, or it says nothing


class Side(Enum):
    """Where a gain sits: in front of an output's rounding, or behind it."""

    FRONT = "in front"
    BEHIND = "behind"


@dataclass(frozen=True)
class Slope:
    """A gain, and what of the difference it leaves: 0 where it explains everything."""

    gain: float
    left: float


def slope(candidate: Tensor, expected: Tensor) -> Slope | None:
    """Fit candidate = gain * expected; None where there is too little to fit, or not a number."""
    c, e = candidate.double().flatten(), expected.double().flatten()
    energy = float(e @ e)
    if e.numel() < FEWEST or not energy or not math.isfinite(float(c.sum())):
        return None
    gain = float(c @ e) / energy
    apart = float((c - e).norm())
    return Slope(gain, float((c - gain * e).norm()) / apart if apart else 0.0)


def fitted(candidate: Tensor, expected: Tensor) -> float | None:
    """The gain, where there is one that explains the difference."""
    found = slope(candidate, expected)
    if found is None or found.left > LEFT or found.gain == 1:
        return None
    return found.gain


def faint(candidate: Tensor, expected: Tensor) -> float | None:
    """A gain so near 1 that roundings drown it in single numbers, and all of them show it.

    Of two fits the surer one: least squares, where noise is as large everywhere; and the mean of
    all quotients, where it grows with a number as roundings do, and a few large ones own the first.
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
    scene: Scene, sight: Sight, gain: float, mask: Tensor | None = None, side: Side = Side.FRONT
) -> float:
    """A gain to more digits: the one that takes most sums to the roundings that were seen.

    Behind the rounding it takes stored numbers there. Of the two sides only one has such a gain:
    the other's is off by up to half a step, which is more than a faint gain.
    """
    c, exact = sight.outputs["out"], sight.expected["out"]
    if side is Side.FRONT and has_facts(scene):
        exact = with_facts(scene, unrounded_output)(scene.call)(sight.inputs, scene.weights)["out"]
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
    half = torch.ldexp(torch.full_like(c, step / 2), torch.frexp(c).exponent - 1)
    ends = torch.stack(((c - half) / exact, (c + half) / exact)).sort(0).values
    low, high = shared(*ends)
    middle = (low + high) / 2
    return middle if is_named(middle, gain) else gain


def shared(low: Tensor, high: Tensor) -> tuple[float, float]:
    """The stretch of numbers that most of these intervals have in common."""
    ends, order = torch.cat((low, high)).sort(stable=True)
    depth = torch.where(order < len(low), 1, -1).cumsum(0)
    best = int(depth.argmax())
    return float(ends[best]), float(ends[best + 1])


def is_named(gain: float, known: float) -> bool:
    """Whether a fitted gain is a known number."""
    return abs(gain - known) <= NEAR * abs(known)


def times(out: Tensor, factor: float, where: Tensor | None = None) -> Tensor:
    """Multiply, everywhere or where `where` broadcasts to True; the dtype stays."""
    made = (out.double() * factor).to(out.dtype)
    return made if where is None else torch.where(where, made, out)


def gain_way(
    words: str,
    factor: float,
    region: Region | None = None,
    output: str = "out",
    places: Mapping[str, Any] | None = None,
) -> Way:
    """An output times a number, behind its rounding; `region` says where, given inputs and it."""

    def change(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        where = None if region is None else region(inputs, outputs[output])
        return {**outputs, output: times(outputs[output], factor, where)}

    return Way(words, with_outputs(change), dict(places or {}))


def early_gain_way(
    scene: Scene,
    words: str,
    factor: float,
    region: Region | None = None,
    places: Mapping[str, Any] | None = None,
) -> Way:
    """As gain_way on `out`, but in front of the rounding, as a kernel's epilogue has it."""
    rounded = with_facts(scene, lambda facts: facts)
    exact = with_facts(scene, unrounded_output)

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

    return Way(words, apply, dict(places or {}))


def both_gains(
    scene: Scene,
    words: str,
    factor: float,
    region: Region | None = None,
    places: Mapping[str, Any] | None = None,
    sides: Collection[Side] = tuple(Side),
) -> Iterator[Way]:
    """A gain in front of the rounding, as an epilogue has it, then one behind it: to recognise."""
    same = abs(math.frexp(factor)[0]) == 0.5
    if Side.FRONT in sides and has_facts(scene) and not same:
        yield early_gain_way(scene, words, factor, region, places)
    if Side.BEHIND in sides:
        if has_facts(scene) and not same:
            words = f"{words}, behind the rounding"
        yield gain_way(words, factor, region, places=places)


def planted_gain(
    scene: Scene,
    words: str,
    factor: float,
    region: Region | None = None,
    places: Mapping[str, Any] | None = None,
) -> Way:
    """The first of both_gains: to plant."""
    return next(both_gains(scene, words, factor, region, places))


def of_sight(sight: Sight, output: str = "out") -> float | None:
    """The gain of one output of a sight."""
    if output not in sight.outputs or output not in sight.expected:
        return None
    c, e = sight.outputs[output], sight.expected[output]
    if c.shape != e.shape or not e.dtype.is_floating_point:
        return None
    return fitted(c, e)


def told(gain: float) -> str:
    """A gain in words, with four digits; very near 1 what it is beside it, below 0 the sign."""
    if gain < 0:
        return f"a turned sign, a gain of {number(gain, 4)}"
    beside = gain - 1
    if not beside or abs(beside) >= FAINT / 2:
        return f"a gain of {number(gain, 4)}"
    return f"a gain of 1 {'+' if beside > 0 else '-'} {number(abs(beside), 3)}"
