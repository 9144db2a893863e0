"""The vocabulary of faults in a running model: in one component, or on an edge between two.

Owns what such a fault is. A `Way` is one exact way to go wrong: it wraps the healthy call of a
component. `inject` plants it by wrapping the candidate's call; a signature recognises it by
wrapping the twin's, on the inputs that the candidate saw, and the budget says whether the outputs
are the candidate's. So both are the same code, and a cause is never inferred from a symptom.

An edge fault wraps the consumer and changes what arrives there: a candidate with it is captured
behind the change. Its signature is asked with the inputs that the producers' outputs imply, and
`passed_on` tells what the consumer would have received.

Kept honest by suites/engine/faults/test_model_faults.py and by the museum.
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
    """What a fault changes."""

    COMPONENT = "component"  # what comes out, given what went in
    EDGE = "edge"  # what goes in, given what its producers put out


@dataclass(frozen=True, eq=False)
class Scene:
    """One component of a bound model: a healthy candidate when planting, the twin when naming."""

    bound: Bound
    component: Component
    recipe: Recipe

    @property
    def name(self) -> str:
        """The component's full name."""
        return self.component.name

    @property
    def role(self) -> str:
        """Its name without the layer."""
        return self.component.role

    @property
    def weights(self) -> Mapping[str, Weight]:
        """What it reads, by names within its block."""
        return self.bound.weights_of(self.name)

    @property
    def call(self) -> ComponentCall:
        """The healthy call: it is asked what it is made of."""
        return plain_call(self.bound.calls[self.name])

    def sibling(self, name: str) -> Scene | None:
        """The same role elsewhere, or another component of this model; None without it."""
        if name not in self.bound.calls:
            return None
        found = component_named(self.bound.config, name, self.recipe)
        return Scene(self.bound, found, self.recipe)


@dataclass(frozen=True, eq=False)
class Sight:
    """What the candidate did at a scene, in one call: what it was given and what came out.

    `expected` is what the twin returns on these inputs. On an edge `implied` holds the inputs that
    the producers' outputs imply; it is empty inside a component. `earlier` are the sights of the
    same place in calls before this one, oldest first, as far as they are known: what is stale
    comes from there. `rows` counts the rows of each call where several stand below each other.
    `elsewhere` holds, by layer, what the same component of other layers was to get in this step.
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

    `beside` wraps other components, by name, that hand this one what it takes wrongly; they stay
    healthy. Whoever plants a way plants these with it. `whole` ways depend on which rows and
    experts a call holds: with some of them left out they are other ways. `unknown` marks elements
    of an output that the way leaves open, such as those read from memory that races.
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
        """What a consumer receives when this way is taken on its edge."""
        return self.apply(lambda given, _weights: given)(inputs, weights)


@dataclass(frozen=True)
class ModelFault:
    """One known way to go wrong in a running model.

    `sits` says by role, recipe and config alone whether it can be at a scene. `ways` lists what can
    be planted there, mild ones included. `signature` proposes what may explain a sight, fitted to
    it where the fault has a parameter; whether it does is decided by reproduction. Where damage
    is another one in every call (`per_call`), so is what a signature proposes.
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
        """The part of the id before the dot."""
        return self.id.partition(".")[0]

    def inject(self, scene: Scene, chance: random.Random) -> Way:
        """Choose one way to plant here; the caller wraps the candidate's call with it."""
        found = list(self.ways(scene))
        return found[chance.randrange(len(found))]


def from_ways(
    ways: Callable[[Scene], Iterator[Way]],
) -> Callable[[Scene, Sight], Iterator[Way]]:
    """A signature of faults without a parameter: every way that can be planted may explain."""

    def signature(scene: Scene, _sight: Sight) -> Iterator[Way]:
        return ways(scene)

    return signature


def with_weights(change: Callable[[str, Weight], Weight]) -> Callable[..., ComponentCall]:
    """Wrap a call so that its weights are other ones; `change` may return what it was given."""

    def apply(call: ComponentCall) -> ComponentCall:
        def faulty(inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Any:
            return call(inputs, ChangedWeights(weights, change))

        return faulty

    return apply


def with_inputs(change: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> Any:
    """Wrap a call so that it is given other inputs."""

    def apply(call: ComponentCall) -> ComponentCall:
        return lambda inputs, weights: call(change(inputs), weights)

    return apply


def with_outputs(
    change: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, Tensor]],
) -> Any:
    """Wrap a call so that it returns other outputs; `change` sees inputs and outputs."""

    def apply(call: ComponentCall) -> ComponentCall:
        return lambda inputs, weights: change(inputs, call(inputs, weights))

    return apply


class ChangedWeights(Mapping[str, "Weight"]):
    """Weights of a component behind a change that is made when one is read."""

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
