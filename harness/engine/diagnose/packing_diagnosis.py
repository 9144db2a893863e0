"""Diagnose a quantised tensor: check that a correct producer writes it, else name the fault.

The source weight is quantised again as the suspect's labels say (the twin), and compared part by
part. A cause is named for each part that differs, by reproduction: the fault applied to the twin
must return the suspect's data. A part that no fault reproduces is reported with its location and
the excluded faults.

NAMED_FROM: producers of one dialect differ from each other in up to 0.56 % of codes (measured:
exact against approximate reciprocals, several distributions). So a fault that reproduces 99 %
leaves nothing to explain; one that reproduces less is not the cause, or not the only one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.engine.compare.compare import closeness
from degarble.harness.engine.diagnose.packing_compare import compare_parts
from degarble.harness.engine.faults.registry import FAULTS
from degarble.harness.engine.faults.tensor_faults import DifferingPart
from degarble.harness.formats.number_formats import ScaleDirection
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from degarble.harness.engine.compare.compare import Closeness
    from degarble.harness.engine.diagnose.packing_compare import PartDifference
    from degarble.harness.engine.faults.tensor_faults import Match, TensorFault
    from degarble.harness.formats.quantise import QuantisedTensor

NAMED_FROM = 0.99


@dataclass(frozen=True, eq=False)
class Cause:
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

    `found` compares the suspect with the source, `floor` a correct quantisation with the source.
    """

    verdict: Verdict
    sentence: str
    causes: tuple[Cause, ...]
    unexplained: tuple[Unexplained, ...]
    found: Closeness
    floor: Closeness
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
    best: tuple[QuantisedTensor, tuple[Cause, ...], tuple[Unexplained, ...]] | None = None
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
        closeness(dequantise(suspect, torch.float64), reference),
        closeness(dequantise(twin, torch.float64), reference),
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
) -> tuple[tuple[Cause, ...], tuple[Unexplained, ...]]:
    causes: list[Cause] = []
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
            causes.append(Cause(fault, match, difference, ties))
        else:
            excluded = tuple((f.id, m.reproduced) for f, m in ranked)
            unexplained.append(Unexplained(difference, excluded))
    return tuple(causes), tuple(unexplained)


def _sentence(
    causes: tuple[Cause, ...], unexplained: tuple[Unexplained, ...], suspect: QuantisedTensor
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
