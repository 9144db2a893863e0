"""Compare a quantised tensor with its twin, part by part: codes, block scales, tensor scale.

Codes are read under the labels of the suspect: layout, direction and nibble order decide what a
byte means. A difference gives the count, and the first and worst element with both codes and
values.

Budget: scales must be equal, byte for byte, float32 ones within 2 ulp. A code may be the neighbour
if the scaled value lies within MIDPOINT_ULPS float32 ulps of their midpoint: at most four roundings
lie between a value and its scaled form (1/G, the product with the block scale, the reciprocal, the
last product), and an approximate reciprocal is good to 1 ulp.

Shape letters: N rows of all leading extents together, K elements, C block scales of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults.tensor_faults import (
    TensorPart,
    element_codes,
    read_scales,
    same_scales,
)
from degarble.harness.formats.codec import decode_array, encode, ulp_distance_array
from degarble.harness.formats.quantise import dequantise
from degarble.harness.report.number_text import number, span

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.formats.number_formats import ElementFormat
    from degarble.harness.formats.quantise import QuantisedTensor

MIDPOINT_ULPS = 4


@dataclass(frozen=True, eq=False)
class PartDifference:
    """One part in which suspect and twin differ beyond the budget."""

    part: TensorPart
    differing: int
    total: int
    rows: Tensor
    sentence: str  # count, where, first and worst element

    @property
    def where(self) -> str:
        """Return the rows in words."""
        return span(self.rows.nonzero().flatten().tolist(), self.rows.numel())


def compare_parts(
    suspect: QuantisedTensor, twin: QuantisedTensor, reference: Tensor
) -> tuple[PartDifference, ...]:
    """Compare every part; `reference` holds the values that both stand for."""
    found = (
        _codes_difference(suspect, twin, reference),
        _scales_difference(suspect, twin),
        _tensor_scale_difference(suspect, twin),
    )
    return tuple(difference for difference in found if difference is not None)


def _codes_difference(
    suspect: QuantisedTensor, twin: QuantisedTensor, reference: Tensor
) -> PartDifference | None:
    found, expected = element_codes(suspect), element_codes(twin)
    differs = found != expected
    at = differs.nonzero(as_tuple=True)
    differs[at] = ~_excused(found[at], expected[at], at, twin, reference)
    return _matrix_difference(TensorPart.CODES, differs, (found, expected), twin.format.element)


def _excused(
    found: Tensor,
    expected: Tensor,
    at: tuple[Tensor, ...],
    twin: QuantisedTensor,
    reference: Tensor,
) -> Tensor:
    """Mark codes of equal value, and neighbours where the scaled value is at the midpoint."""
    element = twin.format.element
    steps = ulp_distance_array(found, expected, element)
    excused = steps == 0
    # Only neighbouring codes may be excused.
    close = (steps == 1).nonzero().flatten()
    if close.numel():
        rows, columns = (index[close] for index in at)
        middle = (_values(found[close], element) + _values(expected[close], element)) / 2
        scaled = _row_major(reference)[rows, columns].double() / _scales(twin)[rows, columns]
        excused[close] = (scaled - middle).abs() <= MIDPOINT_ULPS * 2.0**-23 * middle.abs()
    return excused


def _row_major(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])


def _scales(twin: QuantisedTensor) -> Tensor:
    """Return each code's factor [N, K]: the values of a tensor of ones."""
    one = encode(1.0, twin.format.element)
    # A packed byte holds two codes.
    ones = torch.full_like(twin.codes, one | one << 4 if twin.format.packed else one)
    return _row_major(dequantise(replace(twin, codes=ones), torch.float64))


def _scales_difference(suspect: QuantisedTensor, twin: QuantisedTensor) -> PartDifference | None:
    found, expected = read_scales(suspect), read_scales(twin)
    return _matrix_difference(
        TensorPart.BLOCK_SCALE, found != expected, (found, expected), twin.format.scale
    )


def _matrix_difference(
    part: TensorPart, differs: Tensor, pair: tuple[Tensor, Tensor], fmt: ElementFormat
) -> PartDifference | None:
    count = int(differs.sum())
    if not count:
        return None
    rows_N = differs.any(dim=1)
    at = differs.nonzero()
    found, expected = (_values(codes[differs], fmt) for codes in pair)
    largest = int((found - expected).abs().nan_to_num(nan=torch.inf).argmax())
    first, worst = ((int(at[index, 0]), int(at[index, 1])) for index in (0, largest))
    rows = span(rows_N.nonzero().flatten().tolist(), rows_N.numel())
    return PartDifference(
        part,
        count,
        differs.numel(),
        rows_N,
        f"{count:,} of {differs.numel():,} {part} differ, in rows {rows}; "
        f"first at {list(first)}: {_pair(first, pair, fmt)}; "
        f"worst at {list(worst)}: {_pair(worst, pair, fmt)}.",
    )


def _values(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Decode codes to float64; scales stored as float32 are values already."""
    if codes.dtype is torch.float32:
        return codes.double()
    table = decode_array(torch.arange(fmt.code_count, dtype=torch.uint8), fmt).double()
    return table[codes.long()]


def _pair(at: tuple[int, int], pair: tuple[Tensor, Tensor], fmt: ElementFormat) -> str:
    """Format one element: code in hex and value, found and expected."""
    found, expected = (_one(codes[at], fmt) for codes in pair)
    return f"{found}, expected {expected}"


def _one(code: Tensor, fmt: ElementFormat) -> str:
    value = float(_values(code.reshape(1), fmt))
    if code.dtype is torch.float32:
        return number(value, 6)
    return f"0x{int(code):0{fmt.bits // 4}x} ({value:g})"


def _tensor_scale_difference(
    suspect: QuantisedTensor, twin: QuantisedTensor
) -> PartDifference | None:
    found, expected = suspect.tensor_scale, twin.tensor_scale
    if found is None or expected is None:
        return None
    differs = ~same_scales(found, expected)
    count = int(differs.sum())
    if not count:
        return None
    first = tuple(differs.nonzero()[0].tolist())
    rows_N = torch.ones(element_codes(twin).shape[0], dtype=torch.bool)
    return PartDifference(
        TensorPart.TENSOR_SCALE,
        count,
        differs.numel(),
        rows_N,
        f"{count:,} of {differs.numel():,} tensor scales differ; first: "
        f"{number(float(found[first]), 6)}, expected {number(float(expected[first]), 6)}.",
    )
