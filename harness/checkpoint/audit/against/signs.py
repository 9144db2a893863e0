"""Recognise a weight whose magnitudes match the reference's but whose signs do not.

Signs may be flipped in all of it, in some rows or columns, or without a pattern. A row or column
counts as flipped if every sign in it is, and only where nearly all others keep theirs.

Shape letters: M rows, K columns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from degarble.harness.checkpoint.audit.findings import format_ranges

if TYPE_CHECKING:
    from torch import Tensor

ALIKE = 0.97  # cosine: what is left is a format's error
_SIGNS_KEPT = 0.97  # zeros have none, and small values become zeros
_TOLD_APART = 0.95  # of all rows or columns: kept or turned, and nothing between
_FEWEST = 8  # values that make a cosine of a row or column
_MOST_RUNS = 8


def cosine(ours: Tensor, theirs: Tensor) -> float:
    """Return the cosine of all values; 0 where one side is zero."""
    x, y = ours.double().flatten(), theirs.double().flatten()
    length = float(x.square().sum() * y.square().sum())
    return float((x * y).sum()) / math.sqrt(length) if length else 0.0


def signs_told(x_MK: Tensor, y_MK: Tensor, first: int = 0) -> str | None:
    """Describe what is wrong with the signs of `x_MK`, or None. `first`: number of its row."""
    if cosine(x_MK.abs(), y_MK.abs()) < ALIKE:
        return None
    if cosine(x_MK, -y_MK) >= ALIKE:
        return "is the reference's with every sign turned."
    lines = turned_lines(x_MK, y_MK, first)
    if lines is not None:
        return f"has the reference's magnitudes, and every sign turned in {lines}."
    same = float((torch.sign(x_MK) == torch.sign(y_MK)).double().mean())
    if same > _SIGNS_KEPT:
        return None
    lost = " It has no negative value." if bool((x_MK >= 0).all()) else ""
    return f"has the reference's magnitudes, and its sign in {same:.1%} of the places.{lost}"


def turned_lines(x_MK: Tensor, y_MK: Tensor, first: int = 0) -> str | None:
    """Name the rows, or else the columns, in which every sign is flipped, or None."""
    if x_MK.ndim != 2:
        return None
    for what, axis, start in (("row", 1, first), ("column", 0, 0)):
        if x_MK.shape[axis] < _FEWEST:
            continue
        turned, kept = _turned(x_MK, y_MK, axis)
        if bool(turned.any()) and float((turned | kept).double().mean()) >= _TOLD_APART:
            return _listed(what, [start + int(each) for each in turned.nonzero()])
    return None


def _turned(x_MK: Tensor, y_MK: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return masks of flipped and of kept lines; a line of zeros counts as kept."""
    x, y = x_MK.double(), y_MK.double()
    lengths = (x.square().sum(axis) * y.square().sum(axis)).sqrt()
    cosines = (x * y).sum(axis) / lengths.clamp(min=1e-300)
    return cosines <= -ALIKE, (cosines >= ALIKE) | (lengths == 0)


def _listed(what: str, numbers: list[int]) -> str:
    runs = format_ranges(numbers).split(", ")
    more = f" and {len(runs) - _MOST_RUNS} runs more" if len(runs) > _MOST_RUNS else ""
    alone = len(numbers) == 1
    told = f"{what} {runs[0]}" if alone else f"{what}s {', '.join(runs[:_MOST_RUNS])}{more}"
    return told if alone else f"{len(numbers)} {what}s ({told})"
