"""Replay captured calls of a component through its twin, on the same inputs.

Calls with independent rows are batched and replayed as one; calls with sequences or memory are
replayed one by one. Where a recipe quantises and plain values arrive, the twin quantises them
first, as a fused kernel would. A call that cannot be replayed is UNDECIDED, with the reason.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.budget.bounded_values import exactly
from degarble.harness.engine.budget.quantised_inputs import quantised_bound
from degarble.harness.engine.budget.rules import JudgeableCall as Judgeable
from degarble.harness.model.components import components
from degarble.references.binding import bind
from degarble.references.linears import X_LOOSE, X, quantise_activations

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from degarble.harness.capture.files.records import CapturedCall, CapturedStep
    from degarble.harness.engine.localise.recorded_run import RecordedRun
    from degarble.harness.model.components import Component
    from degarble.harness.model.recipes import Recipe
    from degarble.references.binding import BoundModel

    Tensors = Mapping[str, Tensor]

STATE = "state_"
RAGGED = "token_offsets"
_OPTIONAL = frozenset({"residual", "expanded", "context", "tensor_scale", "experts"})
_MERGED_BYTES = 256 << 20  # of inputs batched into one replay, at most
_SHARED_VALUES = 64  # elements of a tensor shared by all rows; larger ones are not batched
_FUSED = "its tensors were captured with another component's, as one module"


@dataclass(frozen=True, eq=False)
class TwinComponents:
    """A twin's bound components, in the order in which they run."""

    twin: BoundModel
    recipe: Recipe
    components: Mapping[str, Component]

    @classmethod
    def from_twin(cls, twin: BoundModel, recipe: Recipe) -> TwinComponents:
        """Collect the components that a twin has bound."""
        plain = {each.name: each for each in components(twin.config)}
        found: dict[str, Component] = {}
        for component in components(twin.config, recipe):
            if component.name in twin.calls:
                maker = maker_of(component)
                # A switch may disable the quantisation of one linear; use its plain component then.
                bound = not maker or maker in twin.calls
                found[component.name] = component if bound else plain[component.name]
        return cls(twin, recipe, found)

    def expected(self, component: Component, inputs: Tensors) -> dict[str, Tensor]:
        """Return the twin's outputs."""
        name = component.name
        with torch.inference_mode():
            return dict(self.twin.calls[name](inputs, self.twin.weights_of(name)))

    @cached_property
    def plain(self) -> BoundModel:
        """Return a twin with the same weights and without quantised activations."""
        return bind(self.twin.config, self.twin.numerics, self.twin.weights)

    def is_coded(self, linear: str) -> bool:
        """Tell whether a linear, or experts, hold weights in codes or take inputs in codes."""
        weights = [*self.twin.weights_of(linear).values()]
        scaled = any(w.input_scale is not None or w.channel_scale is not None for w in weights)
        held = scaled or any(weight.is_decoded for weight in weights)
        return held or self.activation(linear) is not None

    def activation(self, linear: str) -> str | None:
        """Return the format of a linear's quantised input; None where values arrive."""
        _, facts = self.twin.bound_to(linear)
        names = (facts.activation(name) for name in self.twin.weights_of(linear))
        return next((form for form in names if form is not None), None)


def maker_of(component: Component) -> str:
    """Return the component that quantises a linear's input; empty where none does."""
    codes = next((each for each in component.inputs if each.name == "codes"), None)
    return codes.sources[0].component if codes else ""


@dataclass(frozen=True, eq=False)
class Batch:
    """Calls of one component replayed together; `step_of` and `position_of` are given per row."""

    component: Component
    calls: tuple[CapturedCall, ...]
    inputs: Tensors
    outputs: Tensors  # the candidate's
    step_of: Tensor
    position_of: Tensor
    spans: tuple[slice, ...] = ()  # rows of each call, where several are batched
    lacking: str = ""  # why it cannot be replayed as it is
    whole: Batch | None = None  # where rows were left out: all of them, and which are `kept`
    kept: Tensor | None = None

    def part(self, at: int, tensor: Tensor) -> Tensor:
        """Return the rows of one call."""
        if len(self.calls) == 1 or not tensor.ndim or tensor.shape[0] != len(self.step_of):
            return tensor
        return tensor[self.spans[at]]


@dataclass(frozen=True, eq=False)
class Replay:
    """A batch and the twin's outputs on its inputs, or the reason why there are none."""

    batch: Batch
    expected: Tensors = field(default_factory=dict)
    undecided: str = ""
    inputs: Tensors = field(default_factory=dict)  # as the twin took them

    def judgeable(self, known: TwinComponents) -> Judgeable:
        """Return the call in the form that judging takes."""
        return Judgeable.from_twin(
            known.twin, self.batch.component.name, self.inputs, self.expected
        )


def batches(
    run: RecordedRun,
    component: Component,
    calls: Sequence[CapturedCall],
    steps: Mapping[int, CapturedStep],
) -> list[Batch]:
    """Read a component's calls, and batch those that can be."""
    made = [_batch(run, component, call, steps[call.step]) for call in calls]
    if is_ragged(component):
        return made
    groups: dict[tuple[object, ...], list[Batch]] = defaultdict(list)
    for batch in made:
        groups[_likeness(batch)].append(batch)
    return [part for group in groups.values() for part in _merged(group)]


def _batch(run: RecordedRun, component: Component, call: CapturedCall, step: CapturedStep) -> Batch:
    inputs, outputs = run.inputs(call), run.outputs(call)
    count = _rows(component, call, inputs)
    kept_rows = (tensor.rows for side in (call.inputs, call.outputs) for tensor in side.values())
    chosen = next((rows for rows in kept_rows if rows is not None), None)
    last = dict(zip(step.sequences, step.positions, strict=True))
    if chosen is not None and len(chosen) == count:
        positions = [step.positions[row] for row in chosen]
    elif count == len(step.tokens):
        positions = list(step.positions)
    elif count == len(last):
        # One row per sequence: its last token.
        positions = list(last.values())
    else:
        positions = [-1] * count
    return Batch(
        component, (call,), inputs, outputs, torch.full((count,), call.step),
        torch.tensor(positions, dtype=torch.int64), (slice(0, count),),
    )  # fmt: skip


def _rows(component: Component, call: CapturedCall, inputs: Tensors) -> int:
    for each in component.inputs:
        if each.name in inputs and inputs[each.name].ndim and not each.name.startswith(STATE):
            return inputs[each.name].shape[0]
    sides = [*inputs.values(), *[torch.empty(kept.shape) for kept in call.outputs.values()]]
    return next((side.shape[0] for side in sides if side.ndim), 1)


def _likeness(batch: Batch) -> tuple[object, ...]:
    """Return a key of names, dtypes, shapes and shared values; equal keys can be batched."""
    count, found = len(batch.step_of), list[tuple[object, ...]]()
    for name, tensor in (*batch.inputs.items(), *batch.outputs.items()):
        if tensor.ndim and tensor.shape[0] == count:
            found.append((name, tensor.dtype, tuple(tensor.shape[1:])))
        else:
            few = tensor.numel() <= _SHARED_VALUES
            # Tensors shared by all rows have to be equal to be batched; large ones never are.
            value = tuple(tensor.flatten().tolist()) if few else id(tensor)
            found.append((name, tensor.dtype, (tuple(tensor.shape), value)))
    return tuple(found)


def _merged(group: list[Batch]) -> list[Batch]:
    size = sum(t.numel() * t.element_size() for each in group for t in each.inputs.values())
    if len(group) == 1 or size > _MERGED_BYTES:
        return group
    first, spans, begin = group[0], [], 0
    for batch in group:
        spans.append(slice(begin, begin + len(batch.step_of)))
        begin += len(batch.step_of)

    def joined(side: str) -> dict[str, Tensor]:
        made = {}
        for name, tensor in getattr(first, side).items():
            by_row = tensor.ndim and tensor.shape[0] == len(first.step_of)
            parts = [getattr(each, side)[name] for each in group]
            made[name] = torch.cat(parts) if by_row else tensor
        return made

    return [
        Batch(
            first.component,
            tuple(call for each in group for call in each.calls),
            joined("inputs"),
            joined("outputs"),
            torch.cat([each.step_of for each in group]),
            torch.cat([each.position_of for each in group]),
            tuple(spans),
        )
    ]


def replayed(known: TwinComponents, batch: Batch) -> Replay:
    """Run the twin on the candidate's inputs."""
    component = batch.component
    if batch.lacking:
        return Replay(batch, undecided=batch.lacking)
    inputs = taken(batch)
    if not inputs or not batch.outputs:
        return Replay(batch, undecided=_FUSED)
    if RAGGED in inputs and any(is_filtered(call) for call in batch.calls):
        return Replay(batch, undecided="only some rows were captured, and it needs all of them")
    try:
        if maker_of(component) and "codes" not in inputs and "x" in inputs:
            inputs = quantised(known, component, inputs)
        missing = [
            each.name
            for each in component.inputs
            if each.name not in inputs
            and not each.name.startswith(STATE)
            and each.name not in _OPTIONAL
        ]
        if missing:
            return Replay(batch, undecided=f"its input {missing[0]} was not captured")
        return Replay(batch, known.expected(component, inputs), inputs=inputs)
    except CANNOT_RUN as error:
        # A candidate's tensors may have any shape; torch's own message is the reason.
        line = (str(error).splitlines() or [type(error).__name__])[0][:200]
        return Replay(batch, undecided=f"the twin cannot run on its inputs: {line}")


def is_filtered(call: CapturedCall) -> bool:
    """Return whether a filter left rows of a call out."""
    return any(
        tensor.rows is not None for tensor in (*call.inputs.values(), *call.outputs.values())
    )


def is_ragged(component: Component) -> bool:
    """Tell whether rows depend on each other: sequences of a call, or memory of earlier ones."""
    return any(each.name == RAGGED or each.name.startswith(STATE) for each in component.inputs)


def taken(batch: Batch) -> dict[str, Tensor]:
    """Return the inputs of a batch that its component takes."""
    return {name: tensor for name, tensor in batch.inputs.items() if _takes(batch.component, name)}


def _takes(component: Component, name: str) -> bool:
    return name == "x" or any(each.name == name for each in component.inputs)


def _is_divided(known: TwinComponents, component: Component) -> bool:
    """Return whether each rank quantises its own part of what a linear is given."""
    divided: bool = known.twin.bound_to(component.name)[1].summed_over_ranks
    return divided


def quantised(known: TwinComponents, component: Component, inputs: Tensors) -> dict[str, Tensor]:
    """Quantise plain values to the inputs of a quantised linear."""
    maker, rest = maker_of(component), {n: tensor for n, tensor in inputs.items() if n != "x"}
    if maker == f"{component.name}.act_quant":
        owned = {n: tensor for n, tensor in rest.items() if known.twin.has_input(maker, n)}
        weights = known.twin.weights_of(maker)
        made = known.twin.calls[maker]({"x": inputs["x"], **owned}, weights)
        operand = known.twin.bound_to(maker)[1].quantised_operand(inputs[X], weights)
        if operand is not None:
            x, quantiser = operand
            if known.twin.ranks > 1 and _is_divided(known, component):
                quantiser = replace(quantiser, ranks=known.twin.ranks)
                made = {**made, **quantiser.codes(x)}
            # A fault of the quantisation starts from the numbers.
            made = {**made, X_LOOSE: quantised_bound(quantiser, exactly(x)), X: inputs[X]}
        return {**made, **rest}
    form = known.activation(component.name)
    assert form is not None, "codes are expected only where the recipe quantises"
    return {**quantise_activations(inputs["x"], form, None), **rest}
