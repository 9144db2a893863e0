"""Check the form of outputs before they are judged: shape, dtype, NaN and infinity.

A candidate may return another dtype, or the same rows in another shape, as long as no value is
lost; other forms are findings. The first value that is not finite is reported with its producer.
Where inputs are not finite only one question is judged: is the candidate finite where its twin is?
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.budget.budget import Finding
from degarble.harness.engine.budget.judging import Judged
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.localise.replay import Replay

    Tensors = Mapping[str, Tensor]

NOT_FINITE = "inputs are not finite"
ONE_SIDED = "not finite where the twin is"
LARGEST = 2.0**112  # 2^-16 of float32's end: a kernel may sum 2^16 such terms before it divides
_SCORES = "scores"


@dataclass(frozen=True)
class NonFinite:
    """The first value of an output that is not finite."""

    call: int
    component: str
    output: str
    step: int
    row: int
    count: int
    twin_as_well: bool
    inputs_as_well: bool

    @property
    def sentence(self) -> str:
        """Say where it came out, and whether the inputs were finite."""
        by = "its inputs were not finite" if self.inputs_as_well else "its inputs were finite"
        return (
            f"The first value that is not finite came out of {self.component} ({self.output}) "
            f"in step {self.step}, row {self.row}: {by}."
        )


def aligned(outputs: Tensors, expected: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
    """Return both sides of each output of equal size, in one shape and the narrower dtype."""
    found = {}
    for name, twin in expected.items():
        if name not in outputs or outputs[name].numel() != twin.numel():
            continue  # another size is a wrong form; elements cannot be paired
        candidate = outputs[name].reshape(twin.shape)
        if candidate.dtype is twin.dtype is torch.float64:
            # float64 comes from the reference only; round both to float32 first.
            found[name] = (candidate.float(), twin.float())
        elif candidate.dtype != twin.dtype and twin.is_floating_point():
            narrow = min((candidate.dtype, twin.dtype), key=lambda each: each.itemsize)
            found[name] = (candidate.to(narrow), twin.to(narrow))
        else:
            found[name] = (candidate.to(twin.dtype), twin)
    return found


def wrong_forms(outputs: Tensors, expected: Tensors) -> dict[str, Judged]:
    """Return findings for outputs of another shape, or of a dtype that cannot hold the values.

    An output that was not captured is no finding: other implementations' modules return less.
    """
    found = {}
    for name, twin in expected.items():
        words = _wrong_form(outputs[name], twin) if name in outputs else ""
        if words:
            finding = Finding(words, (), 1.0, 0.0)
            found[name] = Judged(name, Verdict.DIFFERS, (finding,))
    return found


def _wrong_form(candidate: Tensor, twin: Tensor) -> str:
    if candidate.numel() != twin.numel() or candidate.shape[:1] != twin.shape[:1]:
        return f"shape {list(candidate.shape)} in place of {list(twin.shape)}"
    if candidate.is_floating_point() != twin.is_floating_point():
        return f"dtype {candidate.dtype} in place of {twin.dtype}"
    if not twin.is_floating_point() or candidate.dtype == twin.dtype:
        return ""
    largest = torch.finfo(torch.bfloat16).max
    if twin.dtype.itemsize > 1 and torch.finfo(candidate.dtype).max < largest:
        return f"dtype {candidate.dtype} in place of {twin.dtype}: its range is smaller"
    return ""


def same_values(candidate: Tensor, twin: Tensor) -> bool:
    """Tell whether values are equal, NaN included; 8-bit codes are compared by their bytes."""
    if candidate.dtype.itemsize == 1:
        return torch.equal(candidate.view(torch.uint8), twin.view(torch.uint8))
    if torch.equal(candidate, twin):
        return True
    if not candidate.is_floating_point():
        return False
    return torch.equal(candidate.nan_to_num(), twin.nan_to_num()) and torch.equal(
        candidate.isnan(), twin.isnan()
    )


def finite(inputs: Tensors) -> bool:
    """Tell whether all inputs are finite; masked scores are -inf by design."""
    for name, each in inputs.items():
        if not each.is_floating_point() or each.dtype.itemsize == 1:
            continue
        known = each.isfinite() | each.isneginf() if name == _SCORES else each.isfinite()
        if not bool(known.all()):
            return False
    return True


def is_poisoned(judged: Judged) -> bool:
    """Tell whether the only judgement was that the candidate is finite where its twin is."""
    worst = judged.worst
    return judged.undecided == NOT_FINITE or (worst is not None and worst.level == ONE_SIDED)


def poisoned(name: str, candidate: Tensor, twin: Tensor) -> Judged:
    """Judge an output whose inputs are not finite: it must be finite wherever the twin is.

    Rows in which the twin is close to the end of float32 may overflow in a correct kernel.
    """
    if not twin.is_floating_point() or twin.dtype.itemsize == 1:
        if same_values(candidate, twin):
            return Judged(name, Verdict.AGREES)
        return Judged(name, Verdict.UNDECIDED, undecided=NOT_FINITE)
    finite_twin = twin.isfinite()
    # Near the end of float32 a correct kernel may overflow.
    edge = finite_twin & (twin.abs() > LARGEST)
    if edge.ndim > 1:
        edge = edge.flatten(1).any(1).reshape(-1, *(1,) * (edge.ndim - 1))
    odd = finite_twin & ~candidate.isfinite() & ~edge
    if bool(odd.any()):
        row = _first_row(odd)
        finding = Finding(ONE_SIDED, (row,), float(odd.sum()), 0.0)
        return Judged(name, Verdict.DIFFERS, (finding,))
    return Judged(name, Verdict.UNDECIDED, undecided=NOT_FINITE)


def _first_row(odd: Tensor) -> int:
    """Return the first row with an element that is set; a scalar is one row."""
    return int(odd.reshape(len(odd) if odd.ndim else 1, -1).any(1).nonzero()[0])


def equal_elements(c: Tensor, t: Tensor) -> Tensor:
    """Return which elements are equal; a NaN equals a NaN."""
    if c.dtype.itemsize == 1:
        return c.view(torch.uint8) == t.view(torch.uint8)
    if not c.is_floating_point():
        return c == t
    return (c == t) | (c.isnan() & t.isnan())


def non_finite_of(replay: Replay) -> NonFinite | None:
    """Return the first value of a replay's outputs that is not finite; skip masked scores."""
    batch = replay.batch
    found: NonFinite | None = None
    for name, each in batch.outputs.items():
        if not each.is_floating_point() or each.dtype.itemsize == 1:
            continue
        odd = ~each.isfinite()
        if batch.component.role.endswith(".scores"):
            odd &= ~each.isneginf()
        if not bool(odd.any()):
            continue
        row = _first_row(odd)
        at = next((n for n, span in enumerate(batch.spans) if row < span.stop), 0)
        at = at if len(batch.calls) > 1 else 0
        twin = replay.expected.get(name)
        as_well = twin is not None and not bool(twin.isfinite().all())
        call = batch.calls[at]
        found = earlier_of(
            found,
            NonFinite(
                call.number, call.component, name, call.step, row - batch.spans[at].start,
                int(odd.sum()), as_well, not finite(batch.inputs),
            ),
        )  # fmt: skip
    return found


def earlier_of(one: NonFinite | None, other: NonFinite | None) -> NonFinite | None:
    """Return the one that came first in the run."""
    if one is None or other is None:
        return one or other
    return one if one.call <= other.call else other
