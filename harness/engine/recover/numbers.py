"""Name what was done to numbers, and to the places at which they stand.

Used for block scales, elements, inputs and outputs alike: a list of functions of a number, a list
of functions of a code, and a list of rules for places. None of them knows of a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.engine.recover.stated import operation
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.layouts import (
    PACKED_MN,
    SWIZZLE_8X4,
    SWIZZLE_128X4,
    offset_table,
)
from degarble.harness.formats.number_formats import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    FP16,
    INT4,
    INT8,
    UE8M0,
    UINT4,
    UINT8,
)

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.formats.layouts import ScaleLayout
    from degarble.harness.formats.number_formats import NumberFormat

Function = Callable[["Tensor"], "Tensor"]
MOST_BITS = 6  # of a mantissa that is cut
MOST_SHIFT = 4  # places next to their own
_TINY = 1e-300


class Named(NamedTuple):
    """A function with the words that end "are ..."."""

    words: str
    apply: Function


# ---- functions of a number -----------------------------------------------------------------------


@cache
def functions() -> tuple[Named, ...]:
    """Return what may be done to single numbers, simplest first."""
    found = [
        Named("0", torch.zeros_like),
        Named("1", torch.ones_like),
        Named("turned in sign", torch.neg),  # first: of negative numbers alone both are the same
        Named("without their sign", torch.abs),
        Named("0 where they are negative", torch.relu),
        Named("0 where they are positive", _negative),
        Named("rounded up to powers of two", partial(power_of_two, rounding=torch.ceil)),
        Named("rounded down to powers of two", partial(power_of_two, rounding=torch.floor)),
        Named("rounded to powers of two", partial(power_of_two, rounding=_nearest)),
        Named("divided instead of multiplied", torch.reciprocal),
        Named("applied twice", torch.square),
        Named("replaced by their root", _root),
    ]
    found += [
        Named(f"rounded to {form.name}", partial(cast_to, form=form))
        for form in (BF16, FP16, E4M3, E5M2)
    ]
    for bits in range(MOST_BITS, -1, -1):
        for rounding, words in ((torch.round, "rounded"), (torch.trunc, "cut")):
            found.append(
                Named(
                    f"{words} to {bits} bits of a mantissa",
                    partial(mantissa_cut, bits=bits, rounding=rounding),
                )
            )
    return tuple(found)


@operation
def _negative(x: Tensor) -> Tensor:
    return -torch.relu(-x)


@operation
def _root(x: Tensor) -> Tensor:
    return x.abs().sqrt()


@operation
def power_of_two(x: Tensor, rounding: Function) -> Tensor:
    """Return powers of two near to the magnitudes, with the sign; 0 stays."""
    near = torch.exp2(rounding(torch.log2(x.abs().clamp(min=_TINY))))
    return torch.where(x == 0, 0.0, torch.copysign(near, x))


@operation
def _nearest(logarithm: Tensor) -> Tensor:
    """Round to the power that is nearest as a number, not as a logarithm."""
    low = logarithm.floor()
    return torch.where(torch.exp2(logarithm - low) < 1.5, low, low + 1)


@operation
def cast_to(x: Tensor, form: NumberFormat) -> Tensor:
    """Return numbers rounded to a format, saturated."""
    return decode_array(encode_array(x.float().contiguous(), form), form).to(x.dtype)


@operation
def mantissa_cut(x: Tensor, bits: int, rounding: Function) -> Tensor:
    """Return numbers with so many bits of a mantissa."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(rounding(mantissa * 2.0 ** (bits + 1)), exponent - bits - 1)


# ---- functions of a code -------------------------------------------------------------------------


@cache
def readings(form: NumberFormat) -> tuple[Named, ...]:
    """Return how codes of a format may be read otherwise; functions of codes."""
    own = decode_array(torch.arange(form.code_count), form).double()
    others = (E2M1, INT4, UINT4) if form.bits == 4 else (E4M3, E5M2, UE8M0, INT8, UINT8)
    found = [
        Named(f"read as {other.name}", partial(_read, table=_values(other)))
        for other in others
        if other != form
    ]
    for step, words in ((1, "one code too large"), (-1, "one code too small")):
        beside = own.roll(-step)
        kept = beside.isfinite() & ((beside - own).sign() == step * (own + beside).sign())
        found.append(Named(words, partial(_read, table=torch.where(kept, beside, own))))
    return tuple(found)


def _values(form: NumberFormat) -> Tensor:
    return decode_array(torch.arange(form.code_count), form).double()


@cache
def scale_values(form: NumberFormat) -> Tensor:
    """Return the finite numbers of a format in order."""
    held = _values(form)
    found: Tensor = held[held.isfinite()].unique()
    return found


@operation
def _read(codes: Tensor, table: Tensor) -> Tensor:
    return table[codes.long()]


# ---- rules for places ----------------------------------------------------------------------------


class Places(NamedTuple):
    """A rule for places: `of(n)` says for each of n places which one's numbers it holds."""

    words: str
    of: Callable[[int], Tensor]


@cache
def places(count: int) -> tuple[Places, ...]:
    """Return the rules that move something among so many places, simplest first."""
    found: list[Places] = []
    for by in range(1, min(MOST_SHIFT, count - 1) + 1):
        for step, side in ((by, "after"), (-by, "before")):
            words = f"those {by} {side} them"
            found += [
                Places(f"{words}, around the end", partial(_rolled, step=step)),
                Places(f"{words}, the last repeated", partial(_shifted, step=step)),
            ]
    found.append(Places("those half of all away", _half_away))
    found.append(Places("the first one's", _first))
    mask = 1
    while mask < count:
        for width in range(mask, 2 * mask) if mask < 16 else (mask, 2 * mask - 1):
            found.append(Places(_exchange(width, mask), partial(_exchanged, mask=width)))
        mask *= 2
    found.append(Places("those in reverse order", _reversed))
    for inner in _divisors(count):
        for wide in _divisors(inner):
            words = f"transposed as {wide} by {inner // wide}"
            words += "" if inner == count else f" within each {inner}"
            found.append(Places(words, partial(_transposed, inner=inner, wide=wide)))
    return tuple(found)


def rule_of(table: Tensor) -> Callable[[int], Tensor] | None:
    """Return the rule that gives a table of places; None where none does."""
    count, first = len(table), int(table[0])
    step = first if 2 * first <= count else first - count
    rules: list[Callable[[int], Tensor]] = [rule.of for rule in places(count)]
    rules = [partial(_rolled, step=step), partial(_exchanged, mask=first), *rules]
    return next((of for of in rules if torch.equal(of(count), table)), None)


@operation
def lines_by(of: Callable[[int], Tensor], dim: int, right: Tensor) -> Tensor:
    """Return a matrix whose rows or columns hold the numbers of others, by a rule."""
    return right.index_select(dim, of(right.shape[dim]))


@cache
def rotations(count: int) -> tuple[Places, ...]:
    """Return the rotations that `places` leaves out."""
    steps = (step if 2 * step <= count else step - count for step in range(1, count))
    return tuple(
        Places(
            f"those {abs(step)} {'after' if step > 0 else 'before'} them, around the end",
            partial(_rolled, step=step),
        )
        for step in steps
        if abs(step) > MOST_SHIFT and 2 * abs(step) != count
    )


def _divisors(count: int) -> Iterator[int]:
    return (n for n in range(2, count + 1) if count % n == 0 and (n & (n - 1) == 0 or n == count))


@operation
def _rolled(count: int, step: int) -> Tensor:
    return (torch.arange(count) + step) % count


@operation
def _half_away(count: int) -> Tensor:
    return _rolled(count, count // 2)


@operation
def _first(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


@operation
def _reversed(count: int) -> Tensor:
    return torch.arange(count).flip(0)


@operation
def _shifted(count: int, step: int) -> Tensor:
    return (torch.arange(count) + step).clamp(0, count - 1)


@operation
def _exchanged(count: int, mask: int) -> Tensor:
    own = torch.arange(count)
    other = own ^ mask
    return torch.where(other < count, other, own)


def _exchange(width: int, mask: int) -> str:
    if width == mask:
        return f"exchanged with those {mask} apart"
    if width == 2 * mask - 1:
        return f"reversed within each {2 * mask}"
    return f"exchanged within each {2 * mask} (place XOR {width})"


@operation
def _transposed(count: int, inner: int, wide: int) -> Tensor:
    own = torch.arange(count)
    if wide >= inner or count % inner:
        return own
    return own.reshape(-1, wide, inner // wide).transpose(1, 2).reshape(-1)


class PlaceRule(NamedTuple):
    """A rule for places in a matrix: indices into its rows laid end to end, -1 for a 0."""

    words: str
    of: Callable[[int, int], Tensor]


@cache
def grids() -> tuple[PlaceRule, ...]:
    """Return rules that move block scales as a matrix: layouts that kernels read, and shifts."""
    found = []
    for layout in (SWIZZLE_128X4, SWIZZLE_8X4, PACKED_MN):
        found += [
            PlaceRule(f"in the order {layout.name}, read row by row", partial(_as_stored, layout)),
            PlaceRule(f"row by row, read in the order {layout.name}", partial(_as_read, layout)),
            PlaceRule(f"put into the order {layout.name} twice", partial(_twice, layout)),
        ]
    found += [
        PlaceRule("in columns, read row by row", _columnwise),
        PlaceRule("row by row, read in columns", _rowwise),
    ]
    for step in (1, -1, 2, -2, 4, -4):
        side = "after" if step > 0 else "before"
        words = f"those {abs(step)} {side} them, row after row"
        found.append(PlaceRule(words, partial(_flat_shift, step=step)))
    return tuple(found)


@operation
def _as_stored(layout: ScaleLayout, rows: int, columns: int) -> Tensor:
    size = max(layout.storage_size(rows, columns), rows * columns)
    stored = torch.full((size,), -1)
    stored[offset_table(layout, rows, columns).flatten()] = torch.arange(rows * columns)
    return stored[: rows * columns]


@operation
def _as_read(layout: ScaleLayout, rows: int, columns: int) -> Tensor:
    offsets: Tensor = offset_table(layout, rows, columns).flatten()
    return torch.where(offsets < rows * columns, offsets, -1)


@operation
def _twice(layout: ScaleLayout, rows: int, columns: int) -> Tensor:
    once = _as_stored(layout, rows, columns)
    return torch.where(once >= 0, once[once.clamp(min=0)], -1)


@operation
def _columnwise(rows: int, columns: int) -> Tensor:
    return torch.arange(rows * columns).reshape(columns, rows).T.reshape(-1)


@operation
def _rowwise(rows: int, columns: int) -> Tensor:
    return _columnwise(columns, rows)


@operation
def _flat_shift(rows: int, columns: int, step: int) -> Tensor:
    return (torch.arange(rows * columns) + step) % (rows * columns)
