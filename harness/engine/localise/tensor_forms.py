"""Check the form of recorded tensors and of outputs before they are judged: shape, dtype, NaN."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.sums import all_finite
from degarble.harness.capture.files.records import site_of
from degarble.harness.engine.budget.budget import LevelFinding, OutputResult
from degarble.harness.engine.faults.model_faults import ComponentContext
from degarble.harness.engine.localise.discrepancy import Discrepancy, DiscrepancyKind, source_of
from degarble.harness.model.site_forms import RowUnit, declared_forms
from degarble.harness.model.sites import Port
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.capture.files.records import CapturedCall, CapturedStep, CapturedTensor
    from degarble.harness.engine.localise.recorded_run import RecordedRun
    from degarble.harness.engine.localise.replay import Replay, TwinComponents
    from degarble.harness.model.components import Component
    from degarble.harness.model.site_forms import ComponentForms, SiteForm
    from degarble.harness.model.sites import Site


# --------------------------------------------------------------------------------------------------
# Recorded tensors, against the dtypes and shapes that their sites declare.
#
# Only the record of a call is read, no tensor, so a healthy run costs next to nothing. A call with
# a tensor that its site cannot hold is excluded from judging, and each such site is a finding. A
# consumer that was given a wrong kernel's output is not reported for it. A tensor with the right
# number of elements per row in another shape is reshaped as declared. A run without either is
# returned unchanged.

if TYPE_CHECKING:
    Side = Mapping[str, CapturedTensor]

_FROM_OUTSIDE = ("tokens", "positions")


@dataclass(frozen=True)
class FormMismatch:
    """One recorded tensor that its site cannot hold."""

    call: CapturedCall
    port: Port
    name: str
    recorded: str
    declared: str

    @property
    def site(self) -> Site:
        """Return where it was recorded."""
        return site_of(self.call.component, self.port, self.name)

    @property
    def sentence(self) -> str:
        """Say what was recorded, and what is declared."""
        return f"{self.site} holds {self.recorded}; declared are {self.declared}"


@dataclass(frozen=True, eq=False)
class WellFormedRun:
    """The calls of a run whose tensors fit their sites, in the declared shapes."""

    whole: RecordedRun
    calls: Sequence[CapturedCall]

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return the facts that the run states about itself."""
        return self.whole.facts

    @property
    def steps(self) -> Sequence[CapturedStep]:
        """Return the forward passes, in order."""
        return self.whole.steps

    def inputs(self, call: CapturedCall) -> Mapping[str, Tensor]:
        """Return a call's inputs, as they were before it ran."""
        return _laid_out(call.inputs, self.whole.inputs(call))

    def outputs(self, call: CapturedCall) -> Mapping[str, Tensor]:
        """Return a call's outputs."""
        return _laid_out(call.outputs, self.whole.outputs(call))


@dataclass(frozen=True, eq=False)
class FormCheck:
    """The part of a run that can be judged, and the tensors that contradict their sites."""

    whole: RecordedRun
    run: RecordedRun  # the part that fits
    misfits: tuple[FormMismatch, ...] = ()
    unjudged: Mapping[str, str] = field(default_factory=dict)  # component and reason

    def discrepancies(self, known: TwinComponents) -> list[Discrepancy]:
        """Return one discrepancy per site, except those that a producer's finding accounts for."""
        made = {
            (mismatch.call.step, mismatch.site)
            for mismatch in self.misfits
            if mismatch.port is Port.OUT
        }
        found: dict[Site, list[FormMismatch]] = {}
        for misfit in self.misfits:
            component = known.components[misfit.call.component]
            source = None
            if misfit.port is Port.IN:
                source = (
                    source_of(component, misfit.name) if _names(component, misfit.name) else None
                )
            if (misfit.call.step, source) not in made:
                found.setdefault(misfit.site, []).append(misfit)
        return [_trouble(known, site, each) for site, each in found.items()]


def check_forms(run: RecordedRun, known: TwinComponents) -> FormCheck:
    """Check every recorded tensor against its site."""
    declared = declared_forms(known.twin.config, known.recipe)
    calls: list[CapturedCall] = []
    misfits: list[FormMismatch] = []
    unjudged: dict[str, str] = {}
    for call in run.calls:
        forms = declared.get(call.component)
        if forms is None or call.component not in known.components:
            calls.append(call)
            continue
        wrong = list(_misfits(call, forms))
        if wrong:
            misfits += wrong
            unjudged.setdefault(call.component, wrong[0].sentence)
        else:
            calls.append(_as_declared(call, forms))
    if not misfits and all(a is b for a, b in zip(calls, run.calls, strict=True)):
        return FormCheck(run, run)
    return FormCheck(run, WellFormedRun(run, calls), tuple(misfits), unjudged)


def _misfits(call: CapturedCall, declared: ComponentForms) -> Iterator[FormMismatch]:
    """Yield contradictions: single tensors first, then row counts that do not match each other."""
    sound = True
    sides = ((Port.IN, call.inputs, declared.inputs), (Port.OUT, call.outputs, declared.outputs))
    for port, side, forms in sides:
        for name, kept in side.items():
            form = forms.get(name)
            if form is None or (form.accepts(kept.dtype) and form.laid_out(kept.shape) is not None):
                continue
            sound = False
            yield FormMismatch(call, port, name, f"{kept.dtype} {list(kept.shape)}", str(form))
    if sound and not any(kept.rows is not None for side in sides for kept in side[1].values()):
        for port, side, _ in sides:
            yield from _miscounted(call, port, side, declared)


def _miscounted(
    call: CapturedCall, port: Port, side: Side, declared: ComponentForms
) -> Iterator[FormMismatch]:
    """Yield tensors whose row count differs from the inputs of their call."""
    forms = declared.inputs if port is Port.IN else declared.outputs
    for name, kept in side.items():
        form = forms.get(name)
        count = None if form is None else _count(call, declared, form.counts)
        if count is None or (kept.shape[0] == count and (count or port is Port.OUT)):
            continue
        counted = forms[name].counts
        text = f"{count} {counted}, as its other inputs have" if count else "one row or more"
        yield FormMismatch(call, port, name, f"{kept.dtype} {list(kept.shape)}", text)


def _count(call: CapturedCall, declared: ComponentForms, counts: RowUnit) -> int | None:
    """Return the rows of an input that counts the same thing; None where there is none."""
    if counts is RowUnit.OTHERS:
        return None
    asked = RowUnit.BOUNDS if counts is RowUnit.SEQUENCES else counts
    names = [
        name
        for name, form in declared.inputs.items()
        if form.counts is asked and name in call.inputs
    ]
    if not names:
        return None
    # Positions and ids come from outside the model: no kernel can have lost a row of them.
    name = next((each for each in names if each in _FROM_OUTSIDE), names[0])
    return call.inputs[name].shape[0] - (counts is RowUnit.SEQUENCES)


def _as_declared(call: CapturedCall, declared: ComponentForms) -> CapturedCall:
    """Return a call with the declared shapes; the same object where nothing changes."""
    inputs = _reshaped(call.inputs, declared.inputs)
    outputs = _reshaped(call.outputs, declared.outputs)
    if inputs is call.inputs and outputs is call.outputs:
        return call
    return replace(call, inputs=inputs, outputs=outputs)


def _reshaped(side: Side, forms: Mapping[str, SiteForm]) -> Side:
    changed = {}
    for name, kept in side.items():
        shape = forms[name].laid_out(kept.shape) if name in forms else None
        if shape is not None and shape != kept.shape:
            changed[name] = kept._replace(shape=shape)
    return {**side, **changed} if changed else side


def _laid_out(side: Side, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {
        name: tensor.reshape(side[name].shape) if name in side else tensor
        for name, tensor in tensors.items()
    }


def _names(component: Component, name: str) -> bool:
    return any(each.name == name for each in component.inputs)


def _trouble(known: TwinComponents, site: Site, found: Sequence[FormMismatch]) -> Discrepancy:
    component = known.components[site.component]
    return Discrepancy(
        DiscrepancyKind.FORM,
        site.component,
        ComponentContext(known.twin, component, known.recipe),
        site,
        found[0].sentence,
        steps=tuple(sorted({mismatch.call.step for mismatch in found})),
    )


# --------------------------------------------------------------------------------------------------
# Outputs.
#
# A candidate may return another dtype, or the same rows in another shape, as long as no value is
# lost; other forms are findings. The first value that is not finite is reported with its producer.
# Where inputs are not finite only one question is judged: is the candidate finite where its twin
# is?

if TYPE_CHECKING:
    Tensors = Mapping[str, Tensor]

NOT_FINITE = "inputs are not finite"
ONE_SIDED = "not finite where the twin is"
LARGEST = 2.0**112  # 2^-16 of float32's end: a kernel may sum 2^16 such terms before it divides
_SCORES = "scores"


@dataclass(frozen=True)
class NonFiniteOutput:
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


def wrong_forms(outputs: Tensors, expected: Tensors, store: torch.dtype) -> dict[str, OutputResult]:
    """Return findings for outputs of another shape, or of a dtype that cannot hold the values.

    `store` is the dtype in which the model holds its results: what it holds in float32 in one call
    it may hold in that in another, such as in a decoding step. An output that was not captured is
    no finding: other implementations' modules return less.
    """
    found = {}
    for name, twin in expected.items():
        words = _wrong_form(outputs[name], twin, store) if name in outputs else ""
        if words:
            finding = LevelFinding(words, (), 1.0, 0.0)
            found[name] = OutputResult(name, Verdict.DIFFERS, (finding,))
    return found


def _wrong_form(candidate: Tensor, twin: Tensor, store: torch.dtype) -> str:
    if candidate.numel() != twin.numel() or candidate.shape[:1] != twin.shape[:1]:
        return f"shape {list(candidate.shape)} in place of {list(twin.shape)}"
    if candidate.is_floating_point() != twin.is_floating_point():
        return f"dtype {candidate.dtype} in place of {twin.dtype}"
    if not twin.is_floating_point() or candidate.dtype == twin.dtype:
        return ""
    largest = min(torch.finfo(dtype).max for dtype in (torch.bfloat16, store))
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
    # Where both sums are finite, as nearly always, there is no NaN to be found equal.
    if all(bool(side.sum().isfinite()) for side in (candidate, twin)):
        return False
    return torch.equal(candidate.nan_to_num(), twin.nan_to_num()) and torch.equal(
        candidate.isnan(), twin.isnan()
    )


def finite(inputs: Tensors) -> bool:
    """Tell whether all inputs are finite; masked scores are -inf by design."""
    for name, tensor in inputs.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1 or all_finite(tensor):
            continue
        if name != _SCORES or not bool((tensor.isfinite() | tensor.isneginf()).all()):
            return False
    return True


def is_poisoned(judged: OutputResult) -> bool:
    """Tell whether the only judgement was that the candidate is finite where its twin is."""
    worst = judged.worst
    return judged.undecided == NOT_FINITE or (worst is not None and worst.level == ONE_SIDED)


def poisoned(name: str, candidate: Tensor, twin: Tensor) -> OutputResult:
    """Judge an output whose inputs are not finite: it must be finite wherever the twin is.

    Rows in which the twin is close to the end of float32 may overflow in a correct kernel.
    """
    if not twin.is_floating_point() or twin.dtype.itemsize == 1:
        if same_values(candidate, twin):
            return OutputResult(name, Verdict.AGREES)
        return OutputResult(name, Verdict.UNDECIDED, undecided=NOT_FINITE)
    finite_twin = twin.isfinite()
    # Near the end of float32 a correct kernel may overflow.
    edge = finite_twin & (twin.abs() > LARGEST)
    if edge.ndim > 1:
        edge = edge.flatten(1).any(1).reshape(-1, *(1,) * (edge.ndim - 1))
    odd = finite_twin & ~candidate.isfinite() & ~edge
    if bool(odd.any()):
        row = _first_row(odd)
        finding = LevelFinding(ONE_SIDED, (row,), float(odd.sum()), 0.0)
        return OutputResult(name, Verdict.DIFFERS, (finding,))
    return OutputResult(name, Verdict.UNDECIDED, undecided=NOT_FINITE)


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


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def count_equal(c: Tensor, t: Tensor) -> int:
    """Return how many elements are equal; a NaN equals a NaN."""
    code = _INTEGERS.get(c.dtype.itemsize)
    if code is None or not c.is_floating_point() or c.device.type != "cpu":
        return int(equal_elements(c, t).sum())
    flat = [side.detach().reshape(-1) for side in (c, t)]
    # numpy compares codes ten times as fast as torch compares numbers.
    codes = [side.view(code).numpy() for side in flat]
    apart = torch.from_numpy((codes[0] != codes[1]).nonzero()[0])
    # 0 equals -0, and a NaN any other one.
    again = equal_elements(*(side[apart] for side in flat)).sum()
    return c.numel() - len(apart) + int(again)


def non_finite_of(replay: Replay) -> NonFiniteOutput | None:
    """Return the first value of a replay's outputs that is not finite; skip masked scores."""
    batch = replay.batch
    output: NonFiniteOutput | None = None
    for name, tensor in batch.outputs.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1 or all_finite(tensor):
            continue
        odd = ~tensor.isfinite()
        if batch.component.role.endswith(".scores"):
            odd &= ~tensor.isneginf()
        if not bool(odd.any()):
            continue
        row = _first_row(odd)
        at = next((n for n, span in enumerate(batch.spans) if row < span.stop), 0)
        at = at if len(batch.calls) > 1 else 0
        twin = replay.expected.get(name)
        as_well = twin is not None and not bool(twin.isfinite().all())
        call = batch.calls[at]
        output = earlier_of(
            output,
            NonFiniteOutput(
                call.number, call.component, name, call.step, row - batch.spans[at].start,
                int(odd.sum()), as_well, not finite(batch.inputs),
            ),
        )  # fmt: skip
    return output


def earlier_of(
    one: NonFiniteOutput | None, other: NonFiniteOutput | None
) -> NonFiniteOutput | None:
    """Return the one that came first in the run."""
    if one is None or other is None:
        return one or other
    return one if one.call <= other.call else other
