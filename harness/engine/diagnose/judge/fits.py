"""Fit candidate causes of a wrong matrix product: gains, moved tiles, missing K, wrong codes.

* A factor on a box of rows and columns, named after the operands' scales where one matches.
* Blocks of K that are missing or counted twice, by regression on the blocks of K.
* Element codes read as other values, by regression on the codes.
* Boxes that hold one constant, or the content of another box.

A fit only proposes; reproduction decides whether it explains the output.

Shape letters: M rows, K summed, N outputs, B blocks of K.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.diagnose.judge.mismatch import Explanation, Made, Part
from degarble.harness.engine.diagnose.judge.product import Operand
from degarble.harness.engine.diagnose.judge.variants import recoded
from degarble.harness.formats.codec import decode_array
from degarble.harness.formats.number_formats import E2M1
from degarble.harness.report.number_text import number, span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.engine.diagnose.judge.mismatch import Wrong
    from degarble.harness.engine.diagnose.judge.product import Product

_BLOCK = 16  # of K: the smallest piece that is searched
_FEW = 16  # elements: a number fitted to fewer explains anything
_EQUATIONS = 4  # for each unknown of a regression
_SNAP = 0.1  # largest distance of a fitted share of a block from -1, 0 or 1
_NEAR_GAIN = 2e-3  # relative distance of a fitted factor from a named one; reproduction decides
_GRIDS = ((128, 128), (128, 256), (256, 128), (64, 128), (128, 64), (64, 64), (32, 32), (16, 16))


def fits_of(wrong: Wrong) -> Iterator[Explanation]:
    """Yield the explanations fitted to the candidate."""
    yield from _constant(wrong)
    if not wrong.finite:
        return
    yield from _gains(wrong)
    yield from _moved(wrong)
    yield from _blocks_of_k(wrong)
    for name in ("w", "x"):
        yield from _recoded(wrong, name)


def _place(part: Part, shape: tuple[int, ...]) -> str:
    """Describe a box: rows, columns, or both; "the whole output" if it is everything."""
    found = [
        f"{word} {span(index.tolist(), total)}"
        for word, index, total in zip(("rows", "columns"), part, shape, strict=True)
        if len(index) < total
    ]
    return " and ".join(found) or "the whole output"


def _made(wrong: Wrong, change: Tensor, box: Part, part: Part | None) -> Made:
    """Return the twin with a box replaced; `change` holds the box in the output's dtype."""
    output = wrong.twin.clone()
    output[box.rows[:, None], box.columns[None, :]] = change.to(output.dtype)
    if part is None:
        return Made(output, wrong.budget)
    slack = wrong.budget.slack.expand(wrong.twin.shape)
    return Made(part.of(output), replace(wrong.budget, slack=part.of(slack)))


def _constant(wrong: Wrong) -> Iterator[Explanation]:
    """Yield a box that holds a single value."""
    for box in (*_boxes(wrong), wrong.box):
        held = box.of(wrong.candidate)
        if held.numel() < _FEW or not bool(wrong.beyond.any()):
            return
        value = held.reshape(-1)[0]
        if bool((held == value).all()) or bool((held.isnan() & value.isnan()).all()):
            break
    else:
        return
    if bool((box.of(wrong.twin) == value).all()):
        return
    words = f"{_place(box, tuple(wrong.twin.shape))} left at {float(value):g}"
    columns_alone = len(box.rows) == len(wrong.twin) and len(box.columns) < wrong.twin.shape[1]
    fault = "M41.columns_unwritten" if columns_alone else "M41.rows_unwritten"
    yield Explanation(
        fault, "Part of the output was never written", words,
        partial(_made, wrong, held, box), 1 if not value or not value.isfinite() else 2,
    )  # fmt: skip


def _gains(wrong: Wrong) -> Iterator[Explanation]:
    """Yield one factor on a box, by least squares: under known names first, then as a number."""
    if wrong.product.bias is not None:
        return
    shape = tuple(wrong.twin.shape)
    for part in _boxes(wrong):
        c, t = part.of(wrong.candidate.double()), part.of(wrong.exact)
        energy = float((t * t).sum()) if t.numel() >= _FEW else 0.0
        # Least squares: <c, t> / <t, t>.
        gain = float((c * t).sum()) / energy if energy else math.nan
        # A gain this near to 1 is below one BF16 rounding (2^-9).
        if not math.isfinite(gain) or not gain or abs(gain - 1) < 2.0**-12:
            continue
        whole = len(part.rows) == shape[0] and len(part.columns) == shape[1]
        place = "" if whole else f" in {_place(part, shape)}"
        fault, title = "M43.whole", "All values are wrong by one factor"
        if not whole:
            by_columns = len(part.columns) < shape[1]
            fault = _fault_of_part(by_columns, len(part.rows) < shape[0], gain)
            title = f"Some {'columns' if by_columns else 'rows'} are wrong by one factor"
        for value, word, known in (*_named(wrong.product, gain), (gain, f"{gain:.6g}", None)):
            yield Explanation(
                known if known and whole else fault, title, f"the factor {word}{place}",
                partial(_made, wrong, t * value, part), 2 if word == f"{gain:.6g}" else 1,
            )  # fmt: skip


def _fault_of_part(by_columns: bool, by_rows: bool, gain: float) -> str:
    """Return the fault id: a scale is positive and covers all rows; other factors are a tile's."""
    if by_columns and (by_rows or gain < 0):
        return "M43.one_tile"
    return "M03.one_scale" if by_columns else "M43.whole"


def _named(product: Product, gain: float) -> Iterator[tuple[float, str, str | None]]:
    """Yield names of a factor: wrong use of a tensor scale, or a power of two."""
    names: list[tuple[float, str, str | None]] = []
    for side in ("x", "w"):
        factor = getattr(product, side).factor
        if factor is None or factor.numel() > 1:
            continue
        s = float(factor)
        if s > 0:
            names += [
                (1 / s, f"1 / s of {side}", "M02.missing"),
                (s, f"s of {side}", "M02.applied_twice"),
                (1 / s**2, f"1 / s^2 of {side}", "M01.inverse"),
            ]
    nearest = 2.0 ** round(math.log2(abs(gain)))
    names.append((math.copysign(nearest, gain), f"{math.copysign(nearest, gain):g}", None))
    for value, word, known in names:
        if abs(gain / value - 1) < _NEAR_GAIN:
            yield value, word, known


def _moved(wrong: Wrong) -> Iterator[Explanation]:
    """Yield a box that holds another box's content: a stale tile, a row written twice."""
    rows, columns = wrong.twin.shape
    (r0, r1), (c0, c1) = ((int(i.min()), int(i.max()) + 1) for i in wrong.box)
    most_of_it = (r1 - r0) * 2 > rows and (c1 - c0) * 2 > columns
    if most_of_it or (r1 - r0) * (c1 - c0) < _FEW:
        return
    grids = [(r1 - r0, c1 - c0), *_GRIDS]
    for high, wide in dict.fromkeys(grids):
        top, left = r0 // high * high, c0 // wide * wide
        if (high, wide) == grids[0]:
            top, left = r0, c0
        bottom, right = min(top + high, rows), min(left + wide, columns)
        if r1 > bottom or c1 > right:
            continue
        found = _other_box(wrong, (top, bottom), (left, right))
        if found is None:
            continue
        (r, c) = found
        box = Part(torch.arange(top, bottom), torch.arange(left, right))
        change = wrong.twin[r : r + bottom - top, c : c + right - left]
        words = (
            f"{_place(box, (rows, columns))} holding what belongs to row {r}, column {c} onwards"
        )
        yield Explanation(
            "M37.tile", "Part of the output holds what belongs elsewhere", words,
            partial(_made, wrong, change, box), 1,
        )  # fmt: skip
        return


def _other_box(
    wrong: Wrong, high: tuple[int, int], wide: tuple[int, int]
) -> tuple[int, int] | None:
    """Return the twin's box, on the same grid, nearest to the candidate's content."""
    rows, columns = wrong.twin.shape
    height, width = high[1] - high[0], wide[1] - wide[0]
    held = wrong.candidate[high[0] : high[1], wide[0] : wide[1]].float()
    t = wrong.twin.float()
    # Within 5 % of its length, or it is another content.
    best, at = 0.05 * float(held.norm()), None
    for r in range(high[0] % height, rows - height + 1, height):
        for c in range(wide[0] % width, columns - width + 1, width):
            distance = float((t[r : r + height, c : c + width] - held).norm())
            if distance < best and (r, c) != (high[0], wide[0]):
                best, at = distance, (r, c)
    return at


def _blocks_of_k(wrong: Wrong) -> Iterator[Explanation]:
    """Yield blocks of K that are missing from the sum, or counted twice."""
    x, w = wrong.product.x_used.values, wrong.product.w_used.values
    length = x.shape[1]
    if length % _BLOCK:
        return
    count = length // _BLOCK
    part = _equations(wrong, count)
    if len(part.rows) * len(part.columns) < 2 * count:
        return
    xs, ws = x[part.rows].double(), w[part.columns].double()
    pieces = torch.einsum(
        "mbk,nbk->mnb", xs.reshape(len(xs), count, -1), ws.reshape(len(ws), count, -1)
    ).reshape(-1, count)
    d = part.of(wrong.candidate.double() - wrong.exact).reshape(-1, 1)
    shares = torch.linalg.lstsq(pieces, d).solution.flatten()
    # -1: the block is missing from the sum; 1: it is counted twice.
    whole = shares.round().clamp(-1, 1)
    if bool((shares - whole).abs().max() > _SNAP) or not bool(whole.any()):
        return
    blocks = whole.nonzero().flatten().tolist()
    if len(blocks) == count:
        return  # this is a factor, or an output never written
    k = (whole.repeat_interleave(_BLOCK) * 1.0)[None, :]
    first, last = blocks[0] * _BLOCK, (blocks[-1] + 1) * _BLOCK - 1
    where = f"{len(blocks)} of {count} blocks of K, {first} to {last},"
    twice = bool((whole > 0).any())
    doing = f"{'counting' if twice else 'leaving out'} {where}{' twice' if twice else ''}"
    for box in _boxes(wrong):
        added = (x[box.rows].double() * k) @ w[box.columns].double().T
        place = _place(box, tuple(wrong.twin.shape))
        yield Explanation(
            "M41.repeated_k" if twice else "M41.tile_of_k",
            "Part of K is counted twice" if twice else "Part of K is left out of the sum",
            f"{doing} in {place}",
            partial(_made, wrong, box.of(wrong.exact) + added, box), 1,
        )  # fmt: skip


def _boxes(wrong: Wrong) -> Iterator[Part]:
    """Yield the box, then its full columns and full rows: a mild fault leaves gaps."""
    rows, columns = (torch.arange(extent) for extent in wrong.twin.shape)
    hit, (tall, wide) = wrong.box, wrong.is_whole
    own = Part(rows if tall else hit.rows, columns if wide else hit.columns)
    yield own
    for box in (Part(rows, own.columns), Part(own.rows, columns)):
        if len(box.rows) > len(own.rows) or len(box.columns) > len(own.columns):
            yield box


def _equations(wrong: Wrong, unknowns: int) -> Part:
    """Return enough elements for a regression, from the box or the rows or columns it covers."""
    wanted = _EQUATIONS * unknowns
    boxes = [wrong.box, *_boxes(wrong)]
    rows, columns = next((b for b in boxes if len(b.rows) * len(b.columns) >= wanted), boxes[0])
    many = min(len(columns), max(32, math.ceil(wanted / max(1, len(rows)))))
    high = min(len(rows), math.ceil(wanted / many))
    return Part(_spread(rows, high), _spread(columns, many))


def _spread(index: Tensor, count: int) -> Tensor:
    return index[torch.linspace(0, len(index) - 1, count).long()]


def _recoded(wrong: Wrong, name: str) -> Iterator[Explanation]:
    """Yield element codes that are read as other values."""
    operand: Operand = getattr(wrong.product, name)
    tensor = operand.quantised
    if tensor is None or tensor.format.element != E2M1 or len(tensor.shape) != 2:
        return
    part = _equations(wrong, 64)
    lone = wrong.product.at(*part)
    own: Operand = getattr(lone, name)
    other = (lone.x if name == "w" else lone.w).values.double()
    codes = tensor.element_codes()[part.columns if name == "w" else part.rows]
    table = decode_array(torch.arange(16, dtype=torch.uint8), E2M1).double()
    elements = table[codes.long()]
    scales = torch.where(elements != 0, own.values.double() / elements.where(elements != 0, 1), 0)
    d = part.of(wrong.candidate.double() - wrong.exact).reshape(-1, 1)
    # Codes 0 and 8 are zeros, which no scale reveals.
    present = [code for code in range(1, 16) if code != 8 and bool((codes == code).any())]
    if not present or len(d) < 2 * len(present):
        return
    columns = [((codes == code) * scales) for code in present]
    pieces = [(other @ c.T if name == "w" else c @ other.T).reshape(-1) for c in columns]
    shift = torch.linalg.lstsq(torch.stack(pieces, 1), d).solution.flatten()
    changed: dict[int, float] = {}
    for code, step in zip(present, shift.tolist(), strict=True):
        value = float(table[code]) + step
        near = float(table[int((table - value).abs().argmin())])
        if abs(value - near) > _SNAP:
            return
        if near != float(table[code]):
            changed[code] = near
    if changed:
        yield _relabelled(wrong, name, changed)


def _relabelled(wrong: Wrong, name: str, changed: dict[int, float]) -> Explanation:
    operand: Operand = getattr(wrong.product, name)
    table = decode_array(torch.arange(16, dtype=torch.uint8), E2M1).tolist()
    to = {code: table.index(value) for code, value in changed.items()}
    tensor = operand.quantised
    changed_to = None if tensor is None else recoded(to, tensor)
    assert changed_to is not None, "asked of a tensor of E2M1 alone"
    other = wrong.product.exchanged(**{name: Operand(changed_to)})
    told = ", ".join(f"0x{code:x} as {number(value)}" for code, value in changed.items())

    def make(part: Part | None) -> Made:
        chosen = other if part is None else other.at(*part)
        return Made(chosen.expected, chosen.budget)

    return Explanation(
        "M09.decode_table", "Element codes are read as other values",
        f"reading code {told}, in {name},", make, 1,
    )  # fmt: skip
