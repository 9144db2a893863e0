"""Check recorded tensors against the dtypes and shapes that their sites declare.

Only the record of a call is read, no tensor, so a healthy run costs next to nothing. A call with a
tensor that its site cannot hold is excluded from judging, and each such site is a finding. A
consumer that was given a wrong kernel's output is not reported for it. A tensor with the right
number of elements per row in another shape is reshaped as declared. A run without either is
returned unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from degarble.harness.capture.files.records import site_of
from degarble.harness.engine.faults.model_faults import Scene
from degarble.harness.engine.localise.attribution import Kind, Trouble, source_of
from degarble.harness.model.site_forms import Rows, declared_forms
from degarble.harness.model.sites import Port

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.capture.files.records import CapturedCall, CapturedStep, CapturedTensor
    from degarble.harness.engine.localise.recorded_run import SeenRun
    from degarble.harness.engine.localise.replay import Known
    from degarble.harness.model.components import Component
    from degarble.harness.model.site_forms import Forms, SiteForm
    from degarble.harness.model.sites import Site

    Side = Mapping[str, CapturedTensor]

_FROM_OUTSIDE = ("tokens", "positions")


@dataclass(frozen=True)
class Misfit:
    """One recorded tensor that its site cannot hold."""

    call: CapturedCall
    port: Port
    name: str
    found: str
    declared: str

    @property
    def site(self) -> Site:
        """Return where it was recorded."""
        return site_of(self.call.component, self.port, self.name)

    @property
    def sentence(self) -> str:
        """Say what was recorded, and what is declared."""
        return f"{self.site} holds {self.found}; declared are {self.declared}"


@dataclass(frozen=True, eq=False)
class FittingRun:
    """The calls of a run whose tensors fit their sites, in the declared shapes."""

    whole: SeenRun
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
class Fitted:
    """The part of a run that can be judged, and the tensors that contradict their sites."""

    whole: SeenRun
    run: SeenRun  # the part that fits
    misfits: tuple[Misfit, ...] = ()
    unjudged: Mapping[str, str] = field(default_factory=dict)  # component and reason

    def troubles(self, known: Known) -> list[Trouble]:
        """Return one discrepancy per site, except those that a producer's finding accounts for."""
        made = {(each.call.step, each.site) for each in self.misfits if each.port is Port.OUT}
        found: dict[Site, list[Misfit]] = {}
        for each in self.misfits:
            component = known.components[each.call.component]
            source = None
            if each.port is Port.IN:
                source = source_of(component, each.name) if _names(component, each.name) else None
            if (each.call.step, source) not in made:
                found.setdefault(each.site, []).append(each)
        return [_trouble(known, site, each) for site, each in found.items()]


def fitted(run: SeenRun, known: Known) -> Fitted:
    """Check every recorded tensor against its site."""
    declared = declared_forms(known.twin.config, known.recipe)
    calls: list[CapturedCall] = []
    misfits: list[Misfit] = []
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
        return Fitted(run, run)
    return Fitted(run, FittingRun(run, calls), tuple(misfits), unjudged)


def _misfits(call: CapturedCall, declared: Forms) -> Iterator[Misfit]:
    """Yield contradictions: single tensors first, then row counts that do not match each other."""
    sound = True
    sides = ((Port.IN, call.inputs, declared.inputs), (Port.OUT, call.outputs, declared.outputs))
    for port, side, forms in sides:
        for name, kept in side.items():
            form = forms.get(name)
            if form is None or (form.takes(kept.dtype) and form.laid_out(kept.shape) is not None):
                continue
            sound = False
            yield Misfit(call, port, name, f"{kept.dtype} {list(kept.shape)}", str(form))
    if sound and not any(kept.rows is not None for side in sides for kept in side[1].values()):
        for port, side, _ in sides:
            yield from _miscounted(call, port, side, declared)


def _miscounted(call: CapturedCall, port: Port, side: Side, declared: Forms) -> Iterator[Misfit]:
    """Yield tensors whose row count differs from the inputs of their call."""
    forms = declared.inputs if port is Port.IN else declared.outputs
    for name, kept in side.items():
        form = forms.get(name)
        count = None if form is None else _count(call, declared, form.counts)
        if count is None or (kept.shape[0] == count and (count or port is Port.OUT)):
            continue
        counted = forms[name].counts
        told = f"{count} {counted}, as its other inputs have" if count else "one row or more"
        yield Misfit(call, port, name, f"{kept.dtype} {list(kept.shape)}", told)


def _count(call: CapturedCall, declared: Forms, counts: Rows) -> int | None:
    """Return the rows of an input that counts the same thing; None where there is none."""
    if counts is Rows.OTHERS:
        return None
    asked = Rows.BOUNDS if counts is Rows.SEQUENCES else counts
    names = [
        name
        for name, form in declared.inputs.items()
        if form.counts is asked and name in call.inputs
    ]
    if not names:
        return None
    # Positions and ids come from outside the model: no kernel can have lost a row of them.
    name = next((each for each in names if each in _FROM_OUTSIDE), names[0])
    return call.inputs[name].shape[0] - (counts is Rows.SEQUENCES)


def _as_declared(call: CapturedCall, declared: Forms) -> CapturedCall:
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
        name: each.reshape(side[name].shape) if name in side else each
        for name, each in tensors.items()
    }


def _names(component: Component, name: str) -> bool:
    return any(each.name == name for each in component.inputs)


def _trouble(known: Known, site: Site, found: Sequence[Misfit]) -> Trouble:
    component = known.components[site.component]
    return Trouble(
        Kind.FORM,
        site.component,
        Scene(known.twin, component, known.recipe),
        site,
        found[0].sentence,
        steps=tuple(sorted({each.call.step for each in found})),
    )
