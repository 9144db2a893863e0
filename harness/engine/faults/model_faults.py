"""Faults in a running model: in one component, or on an edge between two.

A fault is planted and named by the same code: a variant wraps the call of a component, or binds the
component again with other facts (another base, no clamp, other rounding).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.model.components import component_named
from degarble.harness.model.family import family_of
from degarble.references.binding import plain_call
from degarble.references.facts import ModelFacts
from degarble.references.linears import (
    BLOCK_SCALE,
    CODES,
    TENSOR_SCALE,
    X_LOOSE,
    X,
    activation_values,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.components import Component
    from degarble.harness.model.recipes import Recipe
    from degarble.references.binding import BoundModel

    Inputs = Mapping[str, Tensor]
    Weights = Mapping[str, Any]
    Function = Callable[[Any, Inputs, Weights], Mapping[str, Tensor]]


# --------------------------------------------------------------------------------------------------
# The vocabulary of faults in a running model: in one component, or on an edge between two.
#
# A `FaultVariant` is one exact way to go wrong; it wraps the healthy call of a component. `inject`
# plants it around the candidate's call. A signature recognises it by wrapping the twin's call on
# the inputs that the candidate received; the budget decides whether the outputs match the
# candidate's. Planting and recognition share this code, and a cause is never inferred from a
# symptom.
#
# An edge fault wraps the consumer and changes its inputs, and the capture holds the changed ones.
# Its signature starts from the inputs that the producers' outputs imply, and `passed_on` returns
# what the consumer would have received.


class Reach(StrEnum):
    """Whether a fault changes a component's outputs or its inputs."""

    COMPONENT = "component"  # what comes out, given what went in
    EDGE = "edge"  # what goes in, given what its producers put out


_OF_ROWS = ("position", "decode", "sequence")


@dataclass(frozen=True, eq=False)
class RowPositions:
    """Position, phase, sequence and experts of a batch's rows."""

    position: Tensor  # -1 where rows are no tokens
    decode: Tensor
    sequence: Tensor
    experts: Tensor | None = None  # [T, K], of routed rows
    calls: Tensor | None = None  # [T, 3]: step, tokens of the step, tokens of the sequence so far

    def select(self, chosen: Tensor) -> RowPositions:
        """Return some of the rows."""
        experts, calls = (
            None if side is None else side[chosen] for side in (self.experts, self.calls)
        )
        return RowPositions(
            self.position[chosen], self.decode[chosen], self.sequence[chosen], experts, calls
        )

    def joined(self, others: Sequence[RowPositions]) -> RowPositions:
        """Return these rows and others after them."""
        every = (self, *others)

        def below(name: str) -> Tensor | None:
            known = [side for each in every if (side := getattr(each, name)) is not None]
            return torch.cat(known) if len(known) == len(every) else None

        first = {name: torch.cat([getattr(each, name) for each in every]) for name in _OF_ROWS}
        return RowPositions(**first, experts=below("experts"), calls=below("calls"))


@dataclass(frozen=True, eq=False)
class ComponentContext:
    """One component of a bound model: of the candidate when planting, of the twin when naming."""

    bound: BoundModel
    component: Component
    recipe: Recipe

    @property
    def name(self) -> str:
        """Return the component's full name."""
        return self.component.name

    @property
    def role(self) -> str:
        """Return its name without the layer, or the word by which it is judged instead."""
        return self.component.judged_as

    @property
    def weights(self) -> Mapping[str, Weight]:
        """Return its weights, by names within its block."""
        return self.bound.weights_of(self.name)

    @property
    def call(self) -> ComponentCall:
        """Return the healthy call, unwrapped, so that its function and facts can be read."""
        return plain_call(self.bound.calls[self.name])

    def sibling(self, name: str) -> ComponentContext | None:
        """Return another component of this model; None if the model lacks it."""
        if name not in self.bound.calls:
            return None
        component = component_named(self.bound.config, name, self.recipe)
        return ComponentContext(self.bound, component, self.recipe)


@dataclass(frozen=True, eq=False)
class CallRecord:
    """One recorded call of a component of the candidate: inputs, outputs, and the twin's outputs.

    `expected` is what the twin returns on these inputs. On an edge `implied` holds the inputs that
    the producers' outputs imply; it is empty inside a component. `earlier` are the calls of the
    same component before this one, oldest first, as far as they are known: stale data comes from
    there. `rows` counts the rows of each call if several are concatenated. `elsewhere` holds, by
    layer, the inputs meant for the same component of other layers in this step. `places` says which
    token each row is. `held` marks the outputs that a variant has to reproduce; all, where it is
    empty.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    expected: Mapping[str, Tensor]
    implied: Mapping[str, Tensor] = field(default_factory=dict)
    step: int = 0
    earlier: tuple[CallRecord, ...] = ()
    rows: tuple[int, ...] = ()
    elsewhere: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    owners: tuple[int, ...] = ()  # the sequence of each row, where rows are tokens
    places: RowPositions | None = None
    held: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class FaultVariant:
    """One exact way to go wrong. `words` end the sentence "... reproduces the candidate".

    `companions` wraps other components, by name, that pass this one what it misreads; they stay
    healthy, and are planted together with the variant. `needs_whole_call` variants depend on which
    rows and experts a call holds, so they must not be tried on a subset. `unknown` marks output
    elements that the variant leaves open, such as those read from memory that races.
    `stores_within` variants round on the way, where a kernel's own order of sums may decide.
    """

    words: str
    apply: Callable[[ComponentCall], ComponentCall]
    where: Mapping[str, str | int | float] = field(default_factory=lambda: MappingProxyType({}))
    companions: Mapping[str, Callable[[ComponentCall], ComponentCall]] = field(default_factory=dict)
    needs_whole_call: bool = False
    unknown: Callable[[Tensor], Tensor] | None = None
    stores_within: bool = False

    def passed_on(
        self, inputs: Mapping[str, Tensor], weights: Mapping[str, Weight]
    ) -> Mapping[str, Tensor]:
        """Return what a consumer receives when this variant is planted on its edge."""
        return self.apply(lambda given, _weights: given)(inputs, weights)


def from_variants(
    variants: Callable[[ComponentContext], Iterator[FaultVariant]],
) -> Callable[[ComponentContext, CallRecord], Iterator[FaultVariant]]:
    """Return the signature of a fault without a parameter: it proposes every plantable variant."""

    def signature(context: ComponentContext, _record: CallRecord) -> Iterator[FaultVariant]:
        return variants(context)

    return signature


def _every_variant(_context: ComponentContext, _record: CallRecord) -> Iterator[FaultVariant]:
    """Stand for from_variants(variants) where a fault names no signature."""
    raise AssertionError("replaced when the fault is made")


@dataclass(frozen=True)
class ModelFault:
    """One known way to go wrong in a running model.

    `applies_to` decides by role, recipe and config alone whether it applies to a component.
    `variants` lists what can be planted there, mild variants included. `signature` proposes what
    may explain a call, fitted to it if the fault has a parameter, else all that can be planted;
    reproduction decides whether it does. If damage varies from call to call (`per_call`), so do the
    proposals.
    """

    id: str
    title: str
    effect: str
    remedy: str
    applies_to: Callable[[ComponentContext], bool]
    variants: Callable[[ComponentContext], Iterator[FaultVariant]]
    signature: Callable[[ComponentContext, CallRecord], Iterator[FaultVariant]] = _every_variant
    reach: Reach = Reach.COMPONENT
    per_call: bool = False

    def __post_init__(self) -> None:
        if self.signature is _every_variant:
            object.__setattr__(self, "signature", from_variants(self.variants))

    @property
    def family(self) -> str:
        """Return the part of the id before the dot."""
        return self.id.partition(".")[0]

    def inject(self, context: ComponentContext, chance: random.Random) -> FaultVariant:
        """Choose one variant to plant here; the caller wraps the candidate's call with it."""
        variants = list(self.variants(context))
        return variants[chance.randrange(len(variants))]


def with_weights(change: Callable[[str, Weight], Weight]) -> Callable[..., ComponentCall]:
    """Wrap a call so that its weights are changed; `change` may return its argument."""
    return partial(changed_weights, change)


def changed_weights(change: Callable[[str, Weight], Weight], call: ComponentCall) -> ComponentCall:
    """Return a call whose weights are changed."""
    return lambda inputs, weights: call(inputs, ChangedWeights(weights, change))


def with_inputs(change: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> Any:
    """Wrap a call so that its inputs are changed."""
    return partial(changed_inputs, change)


def changed_inputs(change: Callable[[Inputs], Inputs], call: ComponentCall) -> ComponentCall:
    """Return a call whose inputs are changed."""
    return lambda inputs, weights: call(change(inputs), weights)


def with_outputs(
    change: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, Tensor]],
) -> Any:
    """Wrap a call so that its outputs are changed; `change` gets inputs and outputs."""
    return partial(changed_outputs, change)


def changed_outputs(
    change: Callable[[Inputs, Inputs], Inputs], call: ComponentCall
) -> ComponentCall:
    """Return a call whose outputs are changed."""
    return lambda inputs, weights: change(inputs, call(inputs, weights))


class ChangedWeights(Mapping[str, "Weight"]):
    """Weights of a component that are changed when they are read.

    What a run decodes before it multiplies, it decodes of a changed weight as well. `change` gets a
    weight without the factors that it has for its input; they stay unless it gives it others.
    """

    def __init__(
        self, weights: Mapping[str, Weight], change: Callable[[str, Weight], Weight]
    ) -> None:
        self._weights = weights
        self._change = change

    def __getitem__(self, key: str) -> Weight:
        own = self._weights[key]
        factors = own.channel_scale
        changed = self._change(key, own if factors is None else own.without_factors())
        unlike = own.is_decoded and not changed.is_decoded
        loses = factors is not None and changed.channel_scale is None
        if unlike or loses:
            changed = copy.copy(changed)
            changed.from_codes = changed.from_codes or unlike
            changed.channel_scale = factors if loses else changed.channel_scale
        return changed

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


# --------------------------------------------------------------------------------------------------
# Run a reference component with other facts: another base, no clamp, other rounding.
#
# A bound call of a reference consists of a function and its facts; these wrappers replace either. A
# call that is no reference (a user's kernel) has no facts; a variant that needs them starts from
# the context's own call. If several variants are combined, those that change facts have to be
# applied first, because a wrapped call hides its facts.


_CODED = {CODES, BLOCK_SCALE, TENSOR_SCALE, X_LOOSE}


def has_window(context: ComponentContext) -> bool:
    """Return whether tokens attend to lists of rows: a sliding window, and entries."""
    config = context.bound.config
    return family_of(config).earlier_window(config) is not None


def has_clamp(context: ComponentContext) -> bool:
    """Return whether the model's config states a clamp of SwiGLU."""
    return hasattr(context.bound.config, "swiglu_limit")


def facts_of(call: ComponentCall) -> ModelFacts | None:
    """Return the facts that a reference's call is bound to; None for any other call."""
    if isinstance(call, partial) and call.args and isinstance(call.args[0], ModelFacts):
        found: ModelFacts = call.args[0]
        return found
    return None


def has_facts(context: ComponentContext) -> bool:
    """Return whether the context's call is a reference."""
    return facts_of(context.call) is not None


def facts_at(context: ComponentContext) -> Any:
    """Return the facts at a context whose call is a reference."""
    found = facts_of(context.call)
    assert found is not None, "called only where has_facts"
    return found


def with_facts(
    context: ComponentContext, change: Callable[[Any], ModelFacts]
) -> Callable[..., ComponentCall]:
    """Run the same function with other facts."""
    return partial(changed_facts, context, change)


def changed_facts(
    context: ComponentContext, change: Callable[[Any], ModelFacts], call: ComponentCall
) -> ComponentCall:
    """Return a call with other facts."""
    own = call if facts_of(call) is not None else context.call
    assert isinstance(own, partial), "called only where has_facts"
    return partial(own.func, change(own.args[0]))


def with_function(context: ComponentContext, function: Function) -> Callable[..., ComponentCall]:
    """Run another function with the same facts; it may call the component's own."""

    def apply(call: ComponentCall) -> ComponentCall:
        own = facts_of(call) or facts_of(context.call)
        return partial(function, own)

    return apply


def function_at(context: ComponentContext) -> Function:
    """Return the reference function of a context."""
    assert isinstance(context.call, partial), "called only where has_facts"
    found: Function = context.call.func
    return found


def with_config(facts: Any, **changes: Any) -> Any:
    """Return the same facts with another config."""
    return replace(facts, config=replace(facts.config, **changes))


def with_epsilon(epsilon: float, facts: Any) -> Any:
    """Return the same facts with another epsilon in every RMSNorm."""
    if facts.numerics.switches.latent_norm_epsilon is not None:
        facts = with_switches(facts, latent_norm_epsilon=epsilon)
    return with_config(facts, rms_norm_eps=epsilon)


def with_numerics(facts: Any, **changes: Any) -> Any:
    """Return the same facts with other fields of Numerics."""
    return replace(facts, numerics=replace(facts.numerics, **changes))


def with_switches(facts: Any, **changes: Any) -> Any:
    """Return the same facts with other switches, where correct implementations disagree."""
    return replace(facts, numerics=facts.numerics.with_switches(**changes))


def unrounded(facts: Any) -> Any:
    """Return the same facts without the rounding of stored values."""
    return with_numerics(facts, store=facts.numerics.products)


def unrounded_output(facts: Any) -> Any:
    """Return the same facts without output rounding; attention's intermediates are rounded."""
    within = facts.numerics.on_the_way.store
    return with_numerics(facts, store=facts.numerics.products, within=within)


def with_x(
    context: ComponentContext, change: Callable[[Tensor], Tensor]
) -> Callable[..., ComponentCall]:
    """Run a product on another input [..., G, K], given as decoded values; G groups, mostly 1.

    Zeroing part of the input removes it from the sum, far more cheaply than changing a weight.
    """

    def apply(call: ComponentCall) -> ComponentCall:
        facts = facts_of(call) or facts_of(context.call)

        def faulty(inputs: Inputs, weights: Weights) -> Mapping[str, Tensor]:
            return call(decoded(facts, inputs, weights, change), weights)

        return faulty

    return apply


def decoded(
    facts: Any, inputs: Inputs, weights: Weights, change: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return the inputs of a product with a changed `x` in place of codes."""
    name = next(iter(weights))
    form = facts.activation(name) if facts is not None else None
    dtype = torch.float64 if facts is None else facts.numerics.products
    x = activation_values(inputs, form, dtype)
    width = max(weight.shape[1] for weight in weights.values() if len(weight.shape) > 1)
    made = change(x.reshape(*x.shape[:-1], -1, width))
    parts = {name: tensor for name, tensor in inputs.items() if name not in _CODED}
    return {**parts, X: made.reshape(*x.shape[:-1], -1).to(x.dtype)}


def block_function(facts: Any, role: str) -> Function:
    """Return the reference function of a role in this family."""
    found: Function = family_of(facts.config).reference().block[role]
    return found
