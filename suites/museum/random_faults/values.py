"""Random changes of a matrix of numbers, with what they are in plain data.

Shape letters: R rows, C columns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from torch import Tensor

    Operation = Callable[[Tensor], Tensor]

_UNITS = (2, 4, 8, 16, 32)


class Change(NamedTuple):
    """What is done to numbers [R, C], and the same as plain data."""

    truth: dict[str, Any]
    apply: Operation


class Region(NamedTuple):
    """Some rows and columns of a matrix."""

    rows: slice
    columns: slice

    @property
    def truth(self) -> dict[str, Any]:
        found = {}
        for name, part in (("rows", self.rows), ("columns", self.columns)):
            if part != slice(None):
                found[name] = [part.start, part.stop, part.step or 1]
        return found


def region(drawn: random.Random, extents: tuple[int, int], *, rows_too: bool) -> Region:
    """Draw a part of a matrix: all, a line, a band, every so many lines, or a rectangle."""
    kind = drawn.choice(("all", "columns", "column", "every", "rows", "row", "block"))
    whole = slice(None)
    if kind == "all" or (kind in {"rows", "row", "block"} and not rows_too):
        return Region(whole, whole)
    if kind in {"columns", "column", "every"}:
        return Region(whole, _lines(drawn, extents[1], kind))
    if kind == "block":
        return Region(_lines(drawn, extents[0], "rows"), _lines(drawn, extents[1], "columns"))
    return Region(_lines(drawn, extents[0], kind), whole)


def _lines(drawn: random.Random, count: int, kind: str) -> slice:
    if kind in {"column", "row"}:
        at = drawn.randrange(count)
        return slice(at, at + 1, None)
    if kind == "every":
        step = min(drawn.choice(_UNITS), count)
        return slice(drawn.randrange(step), count, step)
    size = min(count, drawn.choice(_UNITS))
    begin = drawn.randrange(0, count - size + 1)
    return slice(begin, begin + size, None)


def _factor(drawn: random.Random) -> float:
    kind = drawn.randrange(4)
    if kind == 0:
        return drawn.choice((0.125, 0.25, 0.5, 2.0, 4.0, 8.0))
    if kind == 1:
        return round(drawn.uniform(0.5, 1.5), 3)
    if kind == 2:
        return drawn.choice((-1.0, 0.0))
    return round(1 + drawn.choice((-1, 1)) * drawn.uniform(0.03, 0.3), 4)


def _permutation(drawn: random.Random, count: int) -> list[int]:
    order = list(range(count))
    drawn.shuffle(order)
    return order


def cut_bits(x: Tensor, bits: int) -> Tensor:
    """Round to so many bits of mantissa."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(mantissa * 2**bits) / 2**bits, exponent)


def powers_of_two(x: Tensor) -> Tensor:
    """Round magnitudes down to powers of two."""
    exponent = torch.frexp(x)[1]
    return torch.ldexp(torch.sign(x) * 0.5, exponent)


def drawn_change(
    drawn: random.Random, like: Tensor, *, rows_too: bool, exact: bool = False
) -> Change:
    """Draw a change of numbers like these [R, C]; `exact` leaves out what codes cannot express."""
    of = region(drawn, (like.shape[0], like.shape[1]), rows_too=rows_too)
    part = like[of.rows, of.columns]
    names = ["scaled", "rolled", "permuted", "turned round", "neighbours", "copied", "magnitudes"]
    if rows_too:
        names += ["rows rolled", "rows permuted", "rows copied", "transposed"]
    if not exact:
        names += ["shifted", "bits", "clamped", "powers", "constant", "scaled", "scaled"]
    what, change = _operation(drawn, drawn.choice(names), part, like)

    def apply(x: Tensor) -> Tensor:
        made = x.clone()
        made[of.rows, of.columns] = change(x[of.rows, of.columns])
        return made

    return Change({**what, **of.truth}, apply)


def _operation(
    drawn: random.Random, name: str, part: Tensor, whole: Tensor
) -> tuple[dict[str, Any], Operation]:
    rows, columns = part.shape
    size = float(whole.abs().double().mean()) or 1.0
    moved = _moved(drawn, name, rows, columns)
    if moved is not None:
        return moved
    if name == "copied":
        return {"op": name}, lambda x: x[:, :1].expand_as(x)
    if name == "rows copied":
        return {"op": name}, lambda x: x[:1].expand_as(x)
    if name == "transposed":
        side = min(rows, columns)

        def turned(x: Tensor) -> Tensor:
            made = x.clone()
            made[:side, :side] = x[:side, :side].T
            return made

        return {"op": name, "side": side}, turned
    if name == "magnitudes":
        return {"op": name}, torch.abs
    if name == "shifted":
        by = round(drawn.choice((-1, 1)) * drawn.uniform(0.2, 2.0) * size, 5)
        return {"op": name, "by": by}, lambda x: x + by
    if name == "bits":
        bits = drawn.randint(1, 4)
        return {"op": name, "bits": bits}, lambda x: cut_bits(x, bits)
    if name == "clamped":
        limit = round(drawn.uniform(0.5, 2.0) * size, 5)
        return {"op": name, "limit": limit}, lambda x: x.clamp(-limit, limit)
    if name == "powers":
        return {"op": name}, powers_of_two
    if name == "constant":
        value = round(drawn.choice((0.0, 1.0, drawn.uniform(-2, 2))) * size, 5)
        return {"op": name, "value": value}, lambda x: torch.full_like(x, value)
    factor = _factor(drawn)
    return {"op": "scaled", "factor": factor}, lambda x: x * factor


def _moved(
    drawn: random.Random, name: str, rows: int, columns: int
) -> tuple[dict[str, Any], Operation] | None:
    """Draw another order of the same numbers; None for another kind of change."""
    if name in {"rolled", "rows rolled"}:
        axis = 0 if name.startswith("rows") else 1
        by = drawn.randrange(1, max(2, (rows, columns)[axis]))
        return {"op": name, "by": by}, lambda x: x.roll(by, axis)
    if name in {"permuted", "rows permuted"}:
        axis = 0 if name.startswith("rows") else 1
        order = _permutation(drawn, (rows, columns)[axis])
        return {"op": name, "order": order}, lambda x: x.index_select(axis, torch.tensor(order))
    if name == "turned round":
        return {"op": name}, lambda x: x.flip(1)
    if name == "neighbours":
        pairs = columns // 2 * 2

        def exchanged(x: Tensor) -> Tensor:
            made = x.clone()
            made[:, 0:pairs:2], made[:, 1:pairs:2] = x[:, 1:pairs:2], x[:, 0:pairs:2]
            return made

        return {"op": name}, exchanged
    return None


def is_finite(x: Tensor) -> bool:
    """Return whether numbers can be changed as numbers."""
    return x.is_floating_point() and x.dtype.itemsize > 1 and math.isfinite(float(x.abs().sum()))
