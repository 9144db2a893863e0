"""The vocabulary of faults in a running model: in one component, or on an edge between two.

A `Way` is one exact way to go wrong; it wraps the healthy call of a component. `inject` plants it
around the candidate's call. A signature recognises it by wrapping the twin's call on the inputs
that the candidate received; the budget decides whether the outputs match the candidate's. Planting
and recognition share this code, and a cause is never inferred from a symptom.

An edge fault wraps the consumer and changes its inputs, and the capture holds the changed ones. Its
signature starts from the inputs that the producers' outputs imply, and `passed_on` returns what the
consumer would have received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from degarble.harness.model.components import component_named
from degarble.references.binding import plain_call

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.components import Component
    from degarble.harness.model.recipes import Recipe
    from degarble.references.binding import Bound


class Reach(StrEnum):
    """Whether a fault changes a component's outputs or its inputs."""

    COMPONENT = "component"  # what comes out, given what went in
    EDGE = "edge"  # what goes in, given what its producers put out


@dataclass(frozen=True, eq=False)
class Scene:
    """One component of a bound model: of the candidate when planting, of the twin when naming."""

    bound: Bound
    component: Component
    recipe: Recipe

    @property
    def name(self) -> str:
        """Return the component's full name."""
        return self.component.name

    @property
    def role(self) -> str:
        """Return its name without the layer."""
        return self.component.role

    @property
    def weights(self) -> Mapping[str, Weight]:
        """Return its weights, by names within its block."""
        return self.bound.weights_of(self.name)

    @property
    def call(self) -> ComponentCall:
        """Return the healthy call, unwrapped, so that its function and facts can be read."""
        return plain_call(self.bound.calls[self.name])

    def sibling(self, name: str) -> Scene | None:
        """Return another component of this model; None if the model lacks it."""
        if name not in self.bound.calls:
            return None
        found = component_named(self.bound.config, name, self.recipe)
        return Scene(self.bound, found, self.recipe)


@dataclass(frozen=True, eq=False)
class Sight:
    """One recorded call of a component of the candidate: inputs, outputs, and the twin's outputs.

    `expected` is what the twin returns on these inputs. On an edge `implied` holds the inputs that
    the producers' outputs imply; it is empty inside a component. `earlier` are the calls of the
    same component before this one, oldest first, as far as they are known: stale data comes from
    there. `rows` counts the rows of each call if several are concatenated. `elsewhere` holds, by
    layer, the inputs meant for the same component of other layers in this step.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    expected: Mapping[str, Tensor]
    implied: Mapping[str, Tensor] = field(default_factory=dict)
    step: int = 0
    earlier: tuple[Sight, ...] = ()
    rows: tuple[int, ...] = ()
    elsewhere: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    owners: tuple[int, ...] = ()  # the sequence of each row, where rows are tokens


@dataclass(frozen=True, eq=False)
class Way:
    """One exact way to go wrong. `words` end the sentence "... reproduces the candidate".

    `beside` wraps other components, by name, that pass this one what it misreads; they stay
    healthy, and are planted together with the way. `whole` ways depend on which rows and experts a
    call holds, so they must not be tried on a subset. `unknown` marks output elements that the way
    leaves open, such as those read from memory that races.
    """

    words: str
    apply: Callable[[ComponentCall], ComponentCall]
    where: Mapping[str, str | int | float] = field(default_factory=lambda: MappingProxyType({}))
    beside: Mapping[str, Callable[[ComponentCall], ComponentCall]] = field(default_factory=dict)
    whole: bool = False
    unknown: Callable[[Tensor], Tensor] | None = None

    def passed_on(
        self, inputs: Mapping[str, Tensor], weights: Mapping[str, Weight]
    ) -> Mapping[str, Tensor]:
        """Return what a consumer receives when this way is planted on its edge."""
        return self.apply(lambda given, _weights: given)(inputs, weights)


@dataclass(frozen=True)
class ModelFault:
    """One known way to go wrong in a running model.

    `sits` decides by role, recipe and config alone whether it applies to a component. `ways` lists
    what can be planted there, mild variants included. `signature` proposes what may explain a call,
    fitted to it if the fault has a parameter; reproduction decides whether it does. If damage
    varies from call to call (`per_call`), so do the proposals.
    """

    id: str
    title: str
    effect: str
    remedy: str
    sits: Callable[[Scene], bool]
    ways: Callable[[Scene], Iterator[Way]]
    signature: Callable[[Scene, Sight], Iterator[Way]]
    reach: Reach = Reach.COMPONENT
    per_call: bool = False

    @property
    def family(self) -> str:
        """Return the part of the id before the dot."""
        return self.id.partition(".")[0]

    def inject(self, scene: Scene, chance: random.Random) -> Way:
        """Choose one way to plant here; the caller wraps the candidate's call with it."""
        found = list(self.ways(scene))
        return found[chance.randrange(len(found))]


def from_ways(
    ways: Callable[[Scene], Iterator[Way]],
) -> Callable[[Scene, Sight], Iterator[Way]]:
    """Return the signature of a fault without a parameter: it proposes every plantable way."""

    def signature(scene: Scene, _sight: Sight) -> Iterator[Way]:
        return ways(scene)

    return signature


def with_weights(change: Callable[[str, Weight], Weight]) -> Callable[..., ComponentCall]:
    """Wrap a call so that its weights are changed; `change` may return its argument."""

    def apply(call: ComponentCall) -> ComponentCall:
        def faulty(inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Any:
            return call(inputs, ChangedWeights(weights, change))

        return faulty

    return apply


def with_inputs(change: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> Any:
    """Wrap a call so that its inputs are changed."""

    def apply(call: ComponentCall) -> ComponentCall:
        return lambda inputs, weights: call(change(inputs), weights)

    return apply


def with_outputs(
    change: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, Tensor]],
) -> Any:
    """Wrap a call so that its outputs are changed; `change` gets inputs and outputs."""

    def apply(call: ComponentCall) -> ComponentCall:
        return lambda inputs, weights: change(inputs, call(inputs, weights))

    return apply


class ChangedWeights(Mapping[str, "Weight"]):
    """Weights of a component that are changed when they are read."""

    def __init__(
        self, weights: Mapping[str, Weight], change: Callable[[str, Weight], Weight]
    ) -> None:
        self._weights = weights
        self._change = change

    def __getitem__(self, key: str) -> Weight:
        return self._change(key, self._weights[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
