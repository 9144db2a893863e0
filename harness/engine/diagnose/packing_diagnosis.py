"""Diagnose a quantised tensor: compare it with its twin part by part, and name the fault."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.base.sums import PairSums
from degarble.harness.engine.faults.registry import FAULTS
from degarble.harness.engine.faults.tensor_faults import (
    DifferingPart,
    TensorPart,
    element_codes,
    read_scales,
    same_scales,
    spread_rows,
)
from degarble.harness.formats.codec import decode_array, encode, ulp_distance_array
from degarble.harness.formats.number_formats import ScaleDirection
from degarble.harness.formats.quantise import dequantise, quantise, spread_blocks
from degarble.harness.report.number_text import number, span
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from degarble.harness.engine.faults.tensor_faults import Match, TensorFault
    from degarble.harness.formats.number_formats import NumberFormat
    from degarble.harness.formats.quantise import QuantisedTensor


# --------------------------------------------------------------------------------------------------
# Compare a quantised tensor with its twin, part by part: codes, block scales, tensor scale.
#
# Codes are read under the labels of the suspect: layout, direction and nibble order decide what a
# byte means. A difference gives the count, and the first and worst element with both codes and
# values.
#
# Budget: scales must be equal, byte for byte, float32 ones within 2 ulp. A code may be the
# neighbour if the scaled value lies within MIDPOINT_ULPS float32 ulps of their midpoint: at most
# four roundings lie between a value and its scaled form (1/G, the product with the block scale, the
# reciprocal, the last product), and an approximate reciprocal is good to 1 ulp.
#
# Shape letters: N rows of all leading extents together, K elements, C block scales of a row.

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
    differences = (
        _codes_difference(suspect, twin, reference),
        _scales_difference(suspect, twin),
        _tensor_scale_difference(suspect, twin),
        _zero_point_difference(suspect, twin),
    )
    return tuple(difference for difference in differences if difference is not None)


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
        if twin.zero_point is not None:
            scaled += _row_major(spread_blocks(twin, twin.zero_point))[rows, columns]
        excused[close] = (scaled - middle).abs() <= MIDPOINT_ULPS * 2.0**-23 * middle.abs()
    return excused


def _row_major(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])


def _scales(twin: QuantisedTensor) -> Tensor:
    """Return each code's factor [N, K]: the values of a tensor of ones."""
    one = encode(1.0, twin.format.element)
    # A packed byte holds two codes.
    ones = torch.full_like(twin.codes, one | one << 4 if twin.format.packed else one)
    zero_point = None if twin.zero_point is None else torch.zeros_like(twin.zero_point)
    return _row_major(dequantise(replace(twin, codes=ones, zero_point=zero_point), torch.float64))


def _scales_difference(suspect: QuantisedTensor, twin: QuantisedTensor) -> PartDifference | None:
    found, expected = read_scales(suspect), read_scales(twin)
    return _matrix_difference(
        TensorPart.BLOCK_SCALE, found != expected, (found, expected), twin.format.scale
    )


def _matrix_difference(
    part: TensorPart, differs: Tensor, pair: tuple[Tensor, Tensor], fmt: NumberFormat
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


def _values(codes: Tensor, fmt: NumberFormat) -> Tensor:
    """Decode codes to float64; scales stored as float32 are values already."""
    if codes.dtype is torch.float32:
        return codes.double()
    table = decode_array(torch.arange(fmt.code_count, dtype=torch.uint8), fmt).double()
    return table[codes.long()]


def _pair(at: tuple[int, int], pair: tuple[Tensor, Tensor], fmt: NumberFormat) -> str:
    """Format one element: code in hex and value, found and expected."""
    found, expected = (_one(codes[at], fmt) for codes in pair)
    return f"{found}, expected {expected}"


def _one(code: Tensor, fmt: NumberFormat) -> str:
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


def _zero_point_difference(
    suspect: QuantisedTensor, twin: QuantisedTensor
) -> PartDifference | None:
    if suspect.zero_point is None or twin.zero_point is None:
        return None
    pair = (
        spread_rows(suspect, suspect.zero_point),
        spread_rows(twin, twin.zero_point),
    )
    return _matrix_difference(TensorPart.ZERO_POINT, pair[0] != pair[1], pair, twin.format.element)


# --------------------------------------------------------------------------------------------------
# Diagnose a quantised tensor: check that a correct producer writes it, else name the fault.
#
# The source weight is quantised again as the suspect's labels say (the twin), and compared part by
# part. A cause is named for each part that differs, by reproduction: the fault applied to the twin
# must return the suspect's data. A part that no fault reproduces is reported with its location and
# the excluded faults.
#
# NAMED_FROM: producers of one dialect differ from each other in up to 0.56 % of codes (measured:
# exact against approximate reciprocals, several distributions). So a fault that reproduces 99 %
# leaves nothing to explain; one that reproduces less is not the cause, or not the only one.

NAMED_FROM = 0.99


@dataclass(frozen=True, eq=False)
class PackingCause:
    """A fault that reproduces one part; `alternatives` reproduce it equally well."""

    fault: TensorFault
    match: Match
    difference: PartDifference
    alternatives: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Unexplained:
    """A part that no known fault reproduces; `excluded` lists how near each came, best first."""

    difference: PartDifference
    excluded: tuple[tuple[str, float], ...]


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The diagnosis of one quantised tensor.

    `closeness` compares the suspect with the source, `floor` a correct quantisation with the
    source.
    """

    verdict: Verdict
    sentence: str
    causes: tuple[PackingCause, ...]
    unexplained: tuple[Unexplained, ...]
    closeness: PairSums
    floor: PairSums
    twin: QuantisedTensor


def diagnose(
    reference: Tensor, suspect: QuantisedTensor, faults: Iterable[TensorFault] | None = None
) -> Diagnosis:
    """Judge `suspect`, which claims to be a quantisation of `reference`."""
    if tuple(reference.shape) != suspect.shape:
        raise ShapeMismatch(
            "reference",
            tuple(reference.shape),
            f"{suspect.shape}, as the quantised tensor",
            "Give the weight that this tensor was quantised from.",
        )
    known = tuple(FAULTS.values() if faults is None else faults)
    best: tuple[QuantisedTensor, tuple[PackingCause, ...], tuple[Unexplained, ...]] | None = None
    for twin in _twins(reference, suspect):
        causes, unexplained = _explain(reference, suspect, twin, known)
        if best is None or (len(unexplained), len(causes)) < (len(best[2]), len(best[1])):
            best = (twin, causes, unexplained)
        if not causes and not unexplained:
            break
    assert best is not None
    twin, causes, unexplained = best
    return Diagnosis(
        Verdict.DIFFERS if causes or unexplained else Verdict.AGREES,
        _sentence(causes, unexplained, suspect),
        causes,
        unexplained,
        PairSums.of(dequantise(suspect, torch.float64), reference),
        PairSums.of(dequantise(twin, torch.float64), reference),
        twin,
    )


def _twins(reference: Tensor, suspect: QuantisedTensor) -> Iterator[QuantisedTensor]:
    """Yield correct quantisations: by the values' own amax, then by the stored scale.

    A stored scale may legally differ from that of the amax: fused partners share theirs.
    """
    by_values = _labelled(quantise(reference, suspect.format, suspect.dialect), suspect)
    yield by_values
    stored, own = suspect.tensor_scale, by_values.tensor_scale
    if stored is None or own is None or torch.equal(stored, own):
        return
    if not bool((stored.isfinite() & (stored > 0)).all()):
        return
    for amax in _amax_candidates(reference, suspect):
        twin = quantise(reference, suspect.format, suspect.dialect, amax=amax)
        yield _labelled(twin, suspect)
    if suspect.direction is ScaleDirection.DECODE:
        twin = quantise(reference, suspect.format, suspect.dialect, decode_scale=stored)
    else:
        twin = quantise(reference, suspect.format, suspect.dialect, encode_scale=stored)
    yield _labelled(twin, suspect)


def _amax_candidates(reference: Tensor, suspect: QuantisedTensor) -> Iterator[Tensor]:
    """Yield amax values from which the dialect makes the stored scale, bit for bit.

    Trap: a decode scale stored as 1 / G does not give G back, and G sets the block scales.
    """
    fmt, stored = suspect.format, suspect.decode_scale
    # Largest values of E2M1 and E4M3: amax = tensor scale * 6 * 448.
    largest = 6.0 * 448.0 if fmt.tensor_scale else 1.0
    sample = reference.reshape(-1, reference.shape[-1])[:1, : fmt.block[1]]
    if stored.ndim:
        return
    middle = (stored.double() * largest).float()
    steps = [middle]
    for toward in (torch.inf, -torch.inf):
        step = middle
        for _ in range(2):
            # The division by 2688 was rounded, so the neighbours of the product are candidates too.
            step = torch.nextafter(step, torch.tensor(toward))
            steps.append(step)
    for amax in steps:
        if not bool(amax.isfinite()) or not bool(amax > 0):
            continue
        made = quantise(sample, fmt, suspect.dialect, amax=amax).tensor_scale
        if made is not None and bool(made == suspect.tensor_scale):
            yield amax


def _labelled(twin: QuantisedTensor, suspect: QuantisedTensor) -> QuantisedTensor:
    """Convert the twin to the form that the suspect declares."""
    twin = twin.with_layout(suspect.layout)
    if suspect.direction is not None:
        twin = twin.with_direction(suspect.direction)
    if suspect.nibble_order is not None:
        twin = twin.with_nibble_order(suspect.nibble_order)
    return twin


def _explain(
    reference: Tensor,
    suspect: QuantisedTensor,
    twin: QuantisedTensor,
    faults: tuple[TensorFault, ...],
) -> tuple[tuple[PackingCause, ...], tuple[Unexplained, ...]]:
    causes: list[PackingCause] = []
    unexplained: list[Unexplained] = []
    for difference in compare_parts(suspect, twin, reference):
        case = DifferingPart(twin, suspect, difference.rows)
        matches = [(f, f.signature(case)) for f in faults if f.part is difference.part]
        ranked = sorted(
            ((f, m) for f, m in matches if m is not None), key=lambda pair: -pair[1].reproduced
        )
        # A fault that reproduces less than the undamaged twin does explains nothing.
        good = [(f, m) for f, m in ranked if m.reproduced >= max(NAMED_FROM, m.untouched)]
        if good:
            (fault, match), *others = good
            ties = tuple(f.id for f, m in others if m.reproduced == match.reproduced)
            causes.append(PackingCause(fault, match, difference, ties))
        else:
            excluded = tuple((f.id, m.reproduced) for f, m in ranked)
            unexplained.append(Unexplained(difference, excluded))
    return tuple(causes), tuple(unexplained)


def _sentence(
    causes: tuple[PackingCause, ...], unexplained: tuple[Unexplained, ...], suspect: QuantisedTensor
) -> str:
    """Return the diagnosis in one sentence."""
    if not causes and not unexplained:
        return (
            f"Every code and scale is what {suspect.dialect.name} writes for this weight "
            f"in {suspect.format.name}."
        )
    parts = [f"{cause.fault.title} ({cause.fault.id})" for cause in causes]
    parts += [f"no known fault explains the {u.difference.part}" for u in unexplained]
    return "; ".join(parts) + "."
