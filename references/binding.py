"""Bind a model's components to their weights, and call them by name.

A backend replaces entries of the table of calls. Every forward pass goes through Bound, so an
observer gets exactly the inputs and outputs of what ran. The names are those of
harness.model.components under the recipe. The block-parallel drafter (DSpark) has no reference,
nor has router scoring other than the family's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from degarble.harness.base.errors import InvalidArgument, NotBuilt, UnknownName
from degarble.harness.model.components import components
from degarble.harness.model.config.config import has_parallel_drafter
from degarble.harness.model.family import family_of
from degarble.references import experts
from degarble.references.components import common
from degarble.references.facts import ReferenceTable, formats_by_block, local_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.components import Component
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.recipes import Recipe
    from degarble.references.facts import ModelFacts
    from degarble.references.numerics import Numerics

_ACT_QUANT = ".act_quant"


class Observer(Protocol):
    """Called after every component call with the component's name, inputs and outputs."""

    def __call__(
        self, component: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> None:
        """Inspect the tensors without changing anything."""
        ...


class CallWrapper:
    """A wrapper that passes a call on to `wrapped` and changes no number.

    It runs the call elsewhere, or on request.
    """

    def __init__(self, behind: ComponentCall) -> None:
        self.wrapped = behind


def plain_call(call: ComponentCall) -> ComponentCall:
    """Return the call that computes, inside all wrappers."""
    while isinstance(call, CallWrapper):
        call = call.wrapped
    return call


def _rewrapped(wrapped: ComponentCall, call: ComponentCall) -> ComponentCall:
    """Wrap a call in copies of the wrappers of another one."""
    if not isinstance(wrapped, CallWrapper):
        return call
    made = copy(wrapped)
    made.wrapped = _rewrapped(wrapped.wrapped, call)
    return cast("ComponentCall", made)


def as_they_are(weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
    """Return weights where they are."""
    return weights


class BoundModel:
    """A model's components and their weights.

    `calls` may be changed entry by entry; `weights` is any mapping from logical parameter names.
    """

    def __init__(
        self,
        config: Config,
        numerics: Numerics,
        weights: Mapping[str, Weight],
        recipe: Recipe | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.config: Any = config  # of its family's own class
        self.numerics = numerics
        self.weights = weights
        self.observer = observer
        self.ranks = 1  # of a candidate that is judged by this: sums run over them
        # Of a candidate as well: components whose FP8 products a tensor core cuts so many bits
        # below the largest.
        self.fraction_bits: Mapping[str, int] = {}
        # Weights where products are computed: see harness.inference.devices.
        self.placed: Callable[[Mapping[str, Weight]], Mapping[str, Weight]] = as_they_are
        self.declared: Mapping[str, Any] = {}  # switches that the candidate says it computes by
        self.calls: dict[str, ComponentCall] = {}
        self._fetched: dict[str, FetchedWeights] = {}
        self.last_changed: FetchedWeights | None = None  # whose weights are kept as they were made
        self._inputs: dict[str, frozenset[str]] = {}
        self._bound_to: dict[str, tuple[Component, ModelFacts]] = {}
        # In the definition nothing is quantised, whatever the recipe says.
        self.recipe = None if numerics.exact else recipe
        self._bind(self.recipe)

    def with_switches(self, **changes: Any) -> BoundModel:
        """Return the same model, weights and ways of running on the other side of some switches."""
        model = type(self)(
            self.config, self.numerics.with_switches(**changes), self.weights, self.recipe
        )
        model.ranks, model.fraction_bits = self.ranks, self.fraction_bits
        model.declared, model.placed = self.declared, self.placed
        model.calls = {
            name: _rewrapped(self.calls[name], call) if name in self.calls else call
            for name, call in model.calls.items()
        }
        return model

    def coarsened(self, recorded: Iterable[str]) -> BoundModel:
        """Return the model of a run that recorded these tensors alone."""
        raise InvalidArgument(
            "recorded tensors of the capture", len(tuple(recorded)),
            f"none: a {self.config.family} capture holds every tensor",
            "Check it against the checkpoint that was dumped.",
        )  # fmt: skip

    def _bind(self, recipe: Recipe | None) -> None:
        table: ReferenceTable = family_of(self.config).reference()
        _require_scoring(self.config, table.scoring)
        found = components(self.config, recipe)
        facts = _facts_by_block(self.config, self.numerics, recipe, table)
        names = {component.name: _parameter_names(component) for component in found}
        for component in found:
            here, name = facts.get(component.block), component.name
            if here is None:
                continue
            if name.endswith(_ACT_QUANT) and not names[name]:
                names[name] = names.get(name.removesuffix(_ACT_QUANT), ())
            call = _call_of(component, here, names[name], table)
            if call is not None:
                self.calls[name] = call
                local = {local_name(each, component.block): each for each in names[name]}
                self._fetched[name] = FetchedWeights(self, local)
                self._bound_to[name] = component, here
                self._inputs[name] = frozenset(each.name for each in component.inputs)

    def weights_of(self, component: str) -> Mapping[str, Weight]:
        """Return a component's weights by their names in its block; fetched when they are read."""
        if component not in self.calls:
            raise self._unknown(component)
        return self._fetched[component]

    def bound_to(self, component: str) -> tuple[Component, ModelFacts]:
        """Return the component and the facts that its callable was bound to."""
        if component not in self._bound_to:
            raise self._unknown(component)
        return self._bound_to[component]

    def __call__(self, component: str, **inputs: Tensor) -> Mapping[str, Tensor]:
        """Run one component and pass its tensors to the observer."""
        call = self.calls.get(component)
        if call is None:
            raise self._unknown(component)
        outputs = call(inputs, self._fetched[component])
        if self.observer is not None:
            self.observer(component, inputs, outputs)
        return outputs

    def quantises(self, component: str) -> bool:
        """Return whether the recipe quantises the input of `component`."""
        return component + _ACT_QUANT in self.calls

    def has_input(self, component: str, name: str) -> bool:
        """Return whether `component` has an input of this name."""
        return name in self._inputs[component]

    def _unknown(self, component: str) -> NotBuilt | UnknownName:
        if has_parallel_drafter(self.config) and component.startswith("mtp."):
            return NotBuilt(
                "component", component, "a component of the main model",
                "The DSpark drafter has no reference; generate without it.",
            )  # fmt: skip
        return UnknownName.among("component", component, self.calls)


class FetchedWeights(Mapping[str, "Weight"]):
    """Weights under their local names, read from the source only when a component asks.

    `changed` makes of a weight, by its local name, what the run multiplies. What was made is kept
    for the component that asked last.
    """

    def __init__(
        self,
        bound: BoundModel,
        names: Mapping[str, str],
        changed: Callable[[str, Weight], Weight] | None = None,
    ) -> None:
        self._bound = bound
        self._names = names
        self._changed = changed
        self._made: dict[str, tuple[Weight, Weight]] = {}

    def __getitem__(self, key: str) -> Weight:
        weight = self._bound.weights[self._names[key]]
        if self._changed is None:
            return weight
        last, self._bound.last_changed = self._bound.last_changed, self
        if last is not None and last is not self:
            last.forget()
        known = self._made.get(key)
        if known is None or known[0] is not weight:
            known = self._made[key] = weight, self._changed(key, weight)
        return known[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def forget(self) -> None:
        """Release what was made, each of it a whole weight."""
        self._made.clear()


def bind(
    config: Config,
    numerics: Numerics,
    weights: Mapping[str, Weight],
    recipe: Recipe | None = None,
    observer: Observer | None = None,
) -> BoundModel:
    """Bind a model of any family."""
    kind = family_of(config).bound_model() or BoundModel
    bound: BoundModel = kind(config, numerics, weights, recipe, observer)
    return bound


def _require_scoring(config: Any, known: str | None) -> None:
    """Raise if the config names a router scoring that no reference computes."""
    if known is not None and config.scoring_func != known:
        raise NotBuilt(
            "scoring_func", config.scoring_func, f"{known}, the only one of {config.family} here",
            "Correct the config.json if it is a slip; another router has no reference.",
        )  # fmt: skip


def _facts_by_block(
    config: Config, numerics: Numerics, recipe: Recipe | None, table: ReferenceTable
) -> dict[Any, Any]:
    """Return the facts of the ends (None) and of every block that has a reference."""
    formats = formats_by_block(config, recipe)
    blocks = config.layers if has_parallel_drafter(config) else config.blocks
    return {b: table.facts(config, numerics, b, formats[b]) for b in (None, *blocks)}


def _parameter_names(component: Component) -> tuple[str, ...]:
    """Return the full names of what a component reads: values, or the input scales of a linear."""
    return component.weights or component.input_scales


def _call_of(
    component: Component, facts: Any, names: tuple[str, ...], table: ReferenceTable
) -> ComponentCall | None:
    """Bind one component to its facts; return None where a switch leaves it out."""
    role = component.role
    if role.endswith(_ACT_QUANT) and role != "ffn.experts.act_quant":
        if facts.activation(local_name(names[0], component.block)) is None:
            return None
        routed = role == "ffn.experts.w13.act_quant"
        return partial(experts.w13_act_quant if routed else common.act_quant, facts)
    return partial(table.function(role, component.block), facts)
