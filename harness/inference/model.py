"""Open a checkpoint of any layout as a runnable reference model, and compute its logits."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import torch

from degarble.harness.base.errors import UnknownName, UnreadableFile
from degarble.harness.checkpoint.audit.structure.inventory import stored_recipe, take_inventory
from degarble.harness.checkpoint.transform.source import require_model
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.inference.traced import TracedWeights, traced_config, traced_recipe
from degarble.harness.inference.weights import HeldWeights, StreamedWeights
from degarble.harness.model.components import components
from degarble.harness.model.family import family_of
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import BF16, Recipe, Rule, recipe_named
from degarble.references.binding import CallWrapper
from degarble.references.binding import bind as bind_model
from degarble.references.model import TokenBatch
from degarble.references.numerics import Numerics
from degarble.references.traced.family import TracedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.checkpoint.audit.structure.inventory import Inventory
    from degarble.harness.checkpoint.view.view import LogicalNames
    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.parameters import Parameter
    from degarble.references.binding import BoundModel, Observer
    from degarble.references.model import ForwardPass, Sequence


# --------------------------------------------------------------------------------------------------
# Logits: of the next tokens, or of all rows piece by piece. What lies between the layers and the
# head is the family's: streams in V4, normed states in V3.2.


class LogitsModel:
    """Forward pass of a bound model; `absorbed` selects V3.2's absorbed attention."""

    def __init__(self, bound: BoundModel, *, absorbed: bool = True) -> None:
        self.bound = bound
        self.config = bound.config
        forward = family_of(bound.config).forward
        self._model: ForwardPass = forward(bound, absorbed=absorbed)

    @property
    def context(self) -> int:
        """How many positions the model has."""
        return self.config.max_position_embeddings or sys.maxsize

    def next_logits(self, sequences: list[Sequence], tokens: list[Tensor]) -> Tensor:
        """Return logits [B, V] after each sequence's last new token; the sequences advance."""
        hidden = self.hidden(sequences, tokens)
        return self.logits(hidden[torch.tensor([len(new) for new in tokens]).cumsum(0) - 1])

    def hidden(self, sequences: list[Sequence], tokens: list[Tensor]) -> Tensor:
        """Return the states before the head for every new token, and advance the sequences.

        Of a traced model these are the logits already: its head is a component as any other.
        """
        step = TokenBatch.from_sequences([each.length for each in sequences], tokens)
        with torch.inference_mode():
            made = self._model.hidden(step, sequences)
        for sequence, new in zip(sequences, tokens, strict=True):
            sequence.length += len(new)
        return made

    def normed(self, hidden: Tensor) -> Tensor:
        """The head's input, for rows of `hidden`."""
        with torch.inference_mode():
            return self._model.normed(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of rows of `hidden`."""
        with torch.inference_mode():
            return self._model.logits(hidden)


# --------------------------------------------------------------------------------------------------
# Weights are held in memory or streamed through a window. Arithmetic is the definition, bf16, or
# the twin of the checkpoint's own recipe. With held weights everything between two roundings is
# float64, so that batching changes no token. With streamed weights decoded values cost memory, and
# bf16 sums in float32.

ARITHMETICS = ("definition", "bf16", "twin")
HELD_VALUES = 1 << 27  # decoded values that are kept in memory: 1 GiB in float64
_WIDE = 1024  # of hidden states: from here on a product is worth a second thread
_MANY_VISITS = 2  # slots an expert, from which on all experts are taken to be visited


@dataclass
class OpenModel:
    """A checkpoint, ready to be run. Use it as a context, or close it.

    In its context a narrow model is computed by one thread.
    """

    checkpoint: Checkpoint
    logits_model: LogitsModel
    recipe: Recipe
    arithmetic: str
    streamed: StreamedWeights | None
    weights: Mapping[str, Weight] = field(default_factory=dict, repr=False)  # as in the files
    stored: Mapping[str, str] = field(default_factory=dict, repr=False)  # parameter of a module
    _threads: ExitStack = field(default_factory=ExitStack, repr=False)

    @property
    def config(self) -> Any:
        """The model's config, of its family's own class."""
        return self.logits_model.config

    @property
    def store(self) -> torch.dtype:
        """The dtype in which the model holds its results."""
        return self.logits_model.bound.numerics.store

    def close(self) -> None:
        """Close the files."""
        if self.streamed is not None:
            self.streamed.close()
        self.checkpoint.close()

    def __enter__(self) -> Self:
        self._threads.enter_context(threads_for(self.config))
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.close()
        self.close()


def threads_for(config: Config) -> AbstractContextManager[None]:
    """Let one thread compute a narrow model: to wake others up takes longer than its products."""
    return one_thread() if config.hidden_size < _WIDE else nullcontext()


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: threads that spin on a busy machine cost more than small work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def open_model(
    path: Path | OpenModel,
    arithmetic: str | None = None,
    observer: Observer | None = None,
    *,
    absorbed: bool = True,
    held_values: int = HELD_VALUES,
    switches: Mapping[str, Any] = MappingProxyType({}),
) -> OpenModel:
    """Bind a checkpoint to its reference; more than `held_values` values are streamed.

    Without an arithmetic it is twin where the checkpoint quantises activations, else bf16.
    `switches` says on which side of the sources' disagreements it computes, where not the official.
    Of a model that is open already no header is read again.
    """
    if arithmetic is not None and arithmetic not in ARITHMETICS:
        raise UnknownName.among("--numerics", arithmetic, ARITHMETICS)
    if isinstance(path, OpenModel):
        checkpoint, known = path.checkpoint.once_more(), path.recipe
    else:
        checkpoint, known = Checkpoint.open(path), None
    try:
        source = _source_of(checkpoint, known)
        config, recipe = source.config, source.recipe
        if arithmetic is None:
            quantised = any(rule.activation != BF16 for rule in recipe.rules)
            arithmetic = "twin" if quantised else "bf16"
        size = sum(prod(parameter.shape) for parameter in parameters(config))
        streamed = source.streamed() if size > held_values else None
        weights: Mapping[str, Weight] = streamed or HeldWeights(source.weights)
        numerics = numerics_of(arithmetic, held=streamed is None).with_switches(**switches)
        chosen = recipe if arithmetic == "twin" else None
        bound = source.bind(config, numerics, weights, chosen, observer)
        bound.declared = dict(switches)
        if isinstance(streamed, StreamedWeights):
            ReadPlan(bound, streamed).install()
    except BaseException:
        checkpoint.close()
        raise
    return OpenModel(
        checkpoint, LogitsModel(bound, absorbed=absorbed), recipe, arithmetic, streamed,
        source.weights, source.stored,
    )  # fmt: skip


@dataclass(frozen=True)
class _ModelSource:
    """What a family makes of a checkpoint: config, recipe, weights held or streamed, model.

    `stored`: the parameter of each stored module that holds one alone.
    """

    config: Config
    recipe: Recipe
    weights: Mapping[str, Weight]
    stored: Mapping[str, str]
    streamed: Callable[[], StreamedWeights]
    bind: Callable[..., BoundModel] = bind_model


def _source_of(checkpoint: Checkpoint, recipe: Recipe | None = None) -> _ModelSource:
    if checkpoint.model is None:
        return _traced_source(checkpoint)
    config, names = require_model(checkpoint, "generate")
    config = family_of(config).without_drafters(config)
    if recipe is None:
        _require_complete(config, names)
        recipe = recipe_as_stored(take_inventory(names), config)
    streamed = partial(StreamedWeights, checkpoint, config)
    stored = {
        names.module_of(parameter): name
        for name, parameter in names.present.items()
        if not names.is_fused(parameter)
    }
    return _ModelSource(config, recipe, checkpoint.weights, stored, streamed)


def _traced_source(checkpoint: Checkpoint) -> _ModelSource:
    """Read a checkpoint whose family has no reference of its own by transformers' definition."""
    config: Any = traced_config(checkpoint)
    weights: Any = TracedWeights(checkpoint, config)

    def bind(config: Any, numerics: Numerics, *bound_to: Any) -> BoundModel:
        stored = numerics.store if numerics.exact else config.torch_dtype
        return TracedModel(config, replace(numerics, store=stored), *bound_to)

    recipe = traced_recipe(checkpoint, config, weights)
    return _ModelSource(config, recipe, weights, weights.stored, lambda: weights, bind)


def numerics_of(arithmetic: str, *, held: bool) -> Numerics:
    """Return the arithmetic of a name; `held` states that decoded weights cost no memory."""
    if arithmetic == "definition":
        return Numerics.definition()
    chosen = Numerics.twin() if arithmetic == "twin" else Numerics.bf16()
    exact = torch.float64
    return replace(chosen, work=exact, products=exact) if held else chosen


def _require_complete(config: Config, names: LogicalNames) -> None:
    missing = [
        parameter.name for parameter in parameters(config) if parameter.name not in names.present
    ]
    if missing:
        raise UnreadableFile(
            "weights", f"{len(missing)} parameters missing, such as {missing[0]}",
            "every parameter of the model",
            "Fetch the missing shards. A conversion for one kernel is no model: run its source.",
        )  # fmt: skip


def recipe_as_stored(inventory: Inventory, config: Config) -> Recipe:
    """Return the recipe that a checkpoint follows, activations included."""
    stored, official = stored_recipe(inventory), recipe_named("official", config)
    said: dict[str, Rule] = {}
    for linear in inventory.linears:
        name = linear.parameter.name
        rule = next(rule for rule in stored.rules if rule.pattern.fullmatch(name))
        formats = official.format_of(linear.parameter)
        if rule.match in said or rule.activation != BF16 or rule.weight == BF16:
            said.setdefault(rule.match, rule)
        elif formats.weight == rule.weight and _fits(linear.parameter, formats.activation):
            said[rule.match] = Rule(rule.match, rule.weight, formats.activation)
    return Recipe("as stored", tuple(said.get(rule.match, rule) for rule in stored.rules))


def _fits(parameter: Parameter, activation: str) -> bool:
    form = BLOCK_FORMATS.get(activation)
    return form is None or parameter.shape[-1] % form.block[1] == 0


class ReadPlan:
    """What each component reads, and which components follow it, in the order of a run."""

    def __init__(self, bound: BoundModel, streamed: StreamedWeights) -> None:
        self._bound = bound
        self._streamed = streamed
        order = [
            component.name
            for component in components(bound.config)
            if component.name in bound.calls
        ]
        self._place = {name: number for number, name in enumerate(order)}
        self._weights = {
            component.name: component.weights
            for component in components(bound.config)
            if component.name in self._place
        }
        self._order = order

    def install(self) -> None:
        """Wrap every call."""
        for name, call in list(self._bound.calls.items()):
            self._bound.calls[name] = _Announced(call, partial(self._announce, name))

    def _announce(self, name: str, inputs: Mapping[str, Tensor]) -> None:
        if self._weights.get(name):
            self._streamed.expect(self._next(name, inputs))

    def _next(self, name: str, inputs: Mapping[str, Tensor]) -> Iterator[str]:
        """Name what this component reads, then what follows as far as it is certain."""
        visited = None
        if "experts" in inputs:
            visited = set(inputs["experts"].unique().tolist())
        yield from _of_experts(self._weights[name], visited)
        tokens = len(next(iter(inputs.values()))) if inputs else 0
        for follower in self._order[self._place[name] + 1 :]:
            same = follower.rpartition(".experts.")[0] == name.rpartition(".experts.")[0]
            if ".experts." in follower and not (same and visited is not None):
                count = self._bound.config.n_routed_experts
                if tokens * self._bound.config.num_experts_per_tok < _MANY_VISITS * count:
                    return
            yield from _of_experts(self._weights[follower], visited if same else None)
            if ".experts." in follower and not same:
                return


class _Announced(CallWrapper):
    """A call that announces the weights it is about to read."""

    def __init__(
        self, behind: ComponentCall, announce: Callable[[Mapping[str, Tensor]], None]
    ) -> None:
        super().__init__(behind)
        self._announce = announce

    def __call__(
        self, inputs: Mapping[str, Tensor], weights: Mapping[str, Any]
    ) -> Mapping[str, Tensor]:
        """Announce the weights, and run."""
        self._announce(inputs)
        return self.wrapped(inputs, weights)


def _of_experts(names: tuple[str, ...], visited: set[int] | None) -> Iterator[str]:
    """Order names as they are read, without the experts that nobody visits."""
    if visited is None or not any(".experts." in name for name in names):
        yield from names
        return
    by_expert: dict[int, list[str]] = {}
    for name in names:
        by_expert.setdefault(int(name.split(".experts.")[1].split(".")[0]), []).append(name)
    for number in sorted(visited & by_expert.keys()):
        yield from by_expert[number]
