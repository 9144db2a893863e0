"""Measure how much of the final difference each origin explains, by injecting it into the twin.

The twin runs the same steps as the run. Where a component was found wrong, its error (its output
less the twin's on the same inputs) is added to the twin's own output; on an edge, what arrived less
what should have. Choices and codes are replaced instead. The share of a set of origins is the part
of the squared difference of the logits that disappears when they are injected. Origins are taken
greedily, so several faults can be separated: an origin that explains nothing alone may explain
the rest together with another, and this is reported. Runs that begin in the middle, or whose logits
are not finite, have no shares; nor has an origin of which some steps or rows were not recorded.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.localise.discrepancy import DiscrepancyKind
from degarble.harness.engine.localise.input_reconstruction import InputReconstruction
from degarble.harness.engine.localise.recorded_run import by_component, forward_again
from degarble.harness.engine.localise.replay import TwinComponents, is_filtered
from degarble.harness.engine.localise.tensor_forms import aligned, wrong_forms
from degarble.harness.model.sites import Port

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.localise.discrepancy import Discrepancy
    from degarble.harness.engine.localise.recorded_run import RecordedRun
    from degarble.references.binding import BoundModel

    Additions = dict[int, dict[str, tuple[Tensor, bool]]]  # by step and name; True: in place of it

_ENOUGH = 0.999  # of the difference: nothing is left to explain
_HEAD = "head"


@dataclass(frozen=True)
class Shares:
    """The part of the final difference that origins explain; numbers index the list of origins.

    `difference` is the relative length of the candidate's logits less the twin's.
    """

    difference: float
    alone: tuple[float | None, ...]
    order: tuple[int, ...] = ()
    together: tuple[float, ...] = ()  # with each origin of `order` added

    def share_of(self, number: int) -> float | None:
        """Return the share of one origin alone."""
        return self.alone[number] if number < len(self.alone) else None

    @property
    def sentence(self) -> str:
        """Return the shares in words."""
        if not self.together:
            return "No origin could be injected."
        text = f"{len(self.order)} explain {100 * self.together[-1]:.1f} % of the final difference"
        alone = sum(each for each in self.alone if each is not None)
        if len(self.order) > 1 and abs(alone - self.together[-1]) > 0.1:
            text += f"; alone they would make {100 * alone:.1f} %, so they work on each other"
        return f"{text}."


def shares_of(
    twin: BoundModel, run: RecordedRun, discrepancies: Sequence[Discrepancy]
) -> Shares | None:
    """Inject every origin alone, then cumulatively; None where the run cannot be repeated."""
    if not _whole(run) or not any(call.component == _HEAD for call in run.calls):
        return None
    heads = {call.step: run.outputs(call).get("out") for call in by_component(run)[_HEAD]}
    numbers = [step.number for step in run.steps]
    absorbed = run.facts.get("form", "absorbed") == "absorbed"

    def logits(chosen: Sequence[int]) -> list[Tensor]:
        with _injected(twin, [additions[number] for number in chosen], numbers):
            return forward_again(twin, run.steps, absorbed=absorbed)

    known = TwinComponents.from_twin(twin, discrepancies[0].context.recipe)
    additions = [_additions(known, run, discrepancy) for discrepancy in discrepancies]
    try:
        # The twin without any injection: the whole difference that shares refer to.
        healthy = logits(())
        wanted = _joined(heads, run)
        start = _distance(healthy, wanted)
        size = sum(float(tensor.double().square().sum()) for tensor in healthy)
        if start is None or not start or not size:
            return None
        alone = [
            _share(_distance(logits((n,)), wanted), start) if a else None
            for n, a in enumerate(additions)
        ]
        order, together = _greedy(alone, lambda s: _share(_distance(logits(s), wanted), start))
    except CANNOT_RUN:
        return None  # the captured tensors do not fit into the twin's own run
    return Shares((start / size) ** 0.5, tuple(alone), order, together)


def recorded_throughout(run: RecordedRun, component: str) -> bool:
    """Tell whether all rows of all steps of a component were recorded; the head may skip steps."""
    calls = by_component(run).get(component, [])
    steps = {call.step for call in calls}
    every = component == _HEAD or all(step.number in steps for step in run.steps)
    return every and not any(map(is_filtered, calls))


def _greedy(
    alone: Sequence[float | None], measure: Any
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Take the origin that explains most, then whichever adds most, until nothing is left."""
    left = [n for n, each in enumerate(alone) if each is not None]
    left.sort(key=lambda n: -(alone[n] or 0.0))
    order: list[int] = []
    together: list[float] = []
    while left:
        if not order:
            best, share = left[0], alone[left[0]] or 0.0
        else:
            tried = [(measure((*order, n)) or 0.0, -n) for n in left]
            # -n breaks ties in favour of the first origin of the run.
            share, place = max(tried)
            best = -place
        order.append(best)
        together.append(share)
        left.remove(best)
        if share >= _ENOUGH:
            break
    return tuple(order), tuple(together)


def _whole(run: RecordedRun) -> bool:
    """Tell whether every sequence begins at position 0, so that the twin can repeat the steps."""
    seen: dict[int, int] = {}
    for step in run.steps:
        for owner, position in zip(step.sequences, step.positions, strict=True):
            if position != seen.get(owner, 0):
                return False
            seen[owner] = position + 1
    return bool(run.steps)


def _joined(heads: Mapping[int, Tensor | None], run: RecordedRun) -> list[Tensor | None]:
    return [heads.get(step.number) for step in run.steps]


def _distance(made: Sequence[Tensor], wanted: Sequence[Tensor | None]) -> float | None:
    """Return the squared difference over the steps with logits; None if not finite."""
    total = 0.0
    for ours, theirs in zip(made, wanted, strict=True):
        if theirs is None:
            continue
        total += float((ours.double() - theirs.double().reshape(ours.shape)).square().sum())
    return total if total == total and total != float("inf") else None  # noqa: PLR0124  NaN


def _share(left: float | None, start: float) -> float | None:
    return None if left is None else 1.0 - left / start


def _additions(
    known: TwinComponents, run: RecordedRun, discrepancy: Discrepancy
) -> tuple[str, Port, Additions] | None:
    """Return the error to inject in each step; None where nothing can be injected."""
    component = discrepancy.context.component
    if not recorded_throughout(run, component.name):
        return None
    found: Additions = {}
    wires = InputReconstruction(known, run)
    for call in by_component(run).get(component.name, []):
        inputs = run.inputs(call)
        if discrepancy.kind is DiscrepancyKind.EDGE:
            implied = wires.implied(call)
            broken = {edge.name for edge in wires.broken(call, inputs)}
            sides = {n: (inputs[n], implied.get(n)) for n in broken & inputs.keys()}
        elif discrepancy.kind in {
            DiscrepancyKind.OUTPUT,
            DiscrepancyKind.FALLBACK,
            DiscrepancyKind.FORM,
        }:
            try:
                expected = known.expected(component, inputs)
            except CANNOT_RUN:
                return None
            outputs = run.outputs(call)
            if wrong_forms(outputs, expected, known.twin.numerics.store):
                # Outputs of another form cannot be subtracted, so they replace the twin's.
                sides = {n: (output, None) for n, output in outputs.items()}
            else:
                sides = dict(aligned(outputs, expected).items())
        else:
            return None
        found[call.step] = {name: _added(*pair) for name, pair in sides.items()}
    port = Port.IN if discrepancy.kind is DiscrepancyKind.EDGE else Port.OUT
    return (component.name, port, found) if found else None


def _added(seen: Tensor, right: Tensor | None) -> tuple[Tensor, bool]:
    """Return the error to add, or the value to replace with for codes, integers or other shapes."""
    number = seen.is_floating_point() and seen.dtype.itemsize > 1
    if right is None or not number or right.numel() != seen.numel():
        return seen, True
    return seen.double() - right.double().reshape(seen.shape), False


@contextmanager
def _injected(
    twin: BoundModel, chosen: Sequence[tuple[str, Port, Additions] | None], numbers: Sequence[int]
) -> Iterator[None]:
    plain = dict(twin.calls)
    clock, coming = [-1], iter(numbers)

    def ticking(call: Any, inputs: Any, weights: Any) -> Any:
        clock[0] = next(coming)
        return call(inputs, weights)

    try:
        for name, port, additions in (each for each in chosen if each is not None):
            twin.calls[name] = partial(_faulty, twin.calls[name], port, additions, clock)
        # `embed` runs first in each step, so it advances the clock.
        twin.calls["embed"] = partial(ticking, twin.calls["embed"])
        yield
    finally:
        twin.calls.update(plain)


def _faulty(
    call: Any, port: Port, additions: Additions, clock: list[int], inputs: Any, weights: Any
) -> Mapping[str, Tensor]:
    here = additions.get(clock[0], {})
    if port is Port.IN:
        given: Mapping[str, Tensor] = call({**inputs, **_changed(inputs, here)}, weights)
        return given
    outputs = dict(call(inputs, weights))
    return outputs | _changed(outputs, here)


def _changed(
    values: Mapping[str, Tensor], here: Mapping[str, tuple[Tensor, bool]]
) -> dict[str, Tensor]:
    found = {}
    for name, (tensor, instead) in here.items():
        own = values.get(name)
        if own is None or instead or own.numel() != tensor.numel():
            if instead:
                found[name] = tensor
            continue
        found[name] = (own.double() + tensor.reshape(own.shape)).to(own.dtype)
    return found
