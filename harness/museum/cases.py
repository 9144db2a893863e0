"""The museum's models and test cases: checkpoints, prompts, switches and healthy variants.

The trained small V4 and V3.2 are quantised by the job of `degarble quantise`, into a folder that
lives as long as a run. Everything follows from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.capture.amax import InputRanges
from degarble.harness.capture.files.records import CapturedStep, Phase
from degarble.harness.checkpoint.audit.structure.inventory import take_inventory
from degarble.harness.checkpoint.transform.quantise.job import QuantiseJob, target_layout
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.engine.faults.model_faults import ComponentContext
from degarble.harness.engine.faults.negative_controls import (
    CONTROLS,
    WEIGHT_CONTROLS,
    WHOLE_RUN_CONTROLS,
)
from degarble.harness.engine.localise.recorded_run import InMemoryRun, by_component, same_bits
from degarble.harness.inference.model import open_model, recipe_as_stored
from degarble.harness.inference.weights import HeldWeight, HeldWeights
from degarble.harness.model.components import component_named
from degarble.harness.model.recipes import recipe_named
from degarble.references import tiny
from degarble.references.binding import BoundModel
from degarble.references.model import Sequence
from degarble.references.numerics import Numerics, switches_of
from degarble.references.tiny import language

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as Many

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.capture.files.records import CapturedCall
    from degarble.harness.checkpoint.transform.quantise.calibration import Calibration
    from degarble.harness.engine.faults.model_faults import FaultVariant
    from degarble.harness.engine.faults.negative_controls import Control
    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.recipes import Recipe
    from degarble.references.numerics import Switches


# --------------------------------------------------------------------------------------------------
# Models.
#
# Released weights are calibrated on documents of the small language. A candidate computes in the
# arithmetic of engines (float32 products), its twin exactly on the operands on disk; both read the
# same checkpoint.

MODELS = ("v4", "v32")
RECIPES = ("nvfp4-experts", "nvfp4-full")
_DOCUMENTS = 4  # that calibrate
_LENGTH = 320  # of each of them
_RELEASED = Path(tiny.__file__).parent / "v1"


@dataclass(frozen=True, order=True)
class ModelKey:
    """A model and a recipe."""

    model: str
    recipe: str

    def __str__(self) -> str:
        return f"{self.model} {self.recipe}"

    @property
    def folder(self) -> str:
        """Return its folder's name."""
        return f"{self.model}-{self.recipe}"


KEYS = tuple(ModelKey(model, recipe) for model in MODELS for recipe in RECIPES)


@dataclass(frozen=True, eq=False)
class MuseumModel:
    """A quantised checkpoint, read once: candidates and twins share its weights."""

    key: ModelKey
    config: Config
    recipe: Recipe
    weights: Mapping[str, Weight]

    @classmethod
    def open(cls, key: ModelKey, root: Path) -> MuseumModel:
        """Read what `prepare` has written."""
        with Checkpoint.open(root / key.folder) as checkpoint:
            config = checkpoint.model
            names = checkpoint.names
            assert config is not None, "prepare has written a config"
            assert names is not None, "prepare has written known names"
            recipe = recipe_as_stored(take_inventory(names), config)
            weights = HeldWeights(checkpoint.weights)
            for name in checkpoint.weights:
                weights[name].values(torch.float32)  # read before the files are closed
        return cls(key, config, recipe, weights)

    @cached_property
    def switches(self) -> Switches:
        """Return the switches of the family's official code."""
        return switches_of(f"official-{self.key.model}")

    def candidate(self, switches: Switches | None = None) -> BoundModel:
        """Bind the weights in an engine's arithmetic."""
        numerics = Numerics.twin(switches or self.switches, products=torch.float32)
        return BoundModel(self.config, numerics, self.weights, self.recipe)

    def twin(self, switches: Switches | None = None) -> BoundModel:
        """Bind the weights in exact arithmetic."""
        numerics = Numerics.twin(switches or self.switches)
        return BoundModel(self.config, numerics, self.weights, self.recipe)


def prepare(root: Path, keys: tuple[ModelKey, ...] = KEYS) -> None:
    """Write the checkpoints of the keys; existing ones stay."""
    for key in keys:
        if (root / key.folder).exists():
            continue
        source = _RELEASED / key.model
        with Checkpoint.open(source) as checkpoint:
            config = checkpoint.model
        assert config is not None, "both sources have a config"
        recipe = recipe_named(key.recipe, config)
        job = QuantiseJob(
            source, target_layout(config, recipe), calibration=_calibration(source, config)
        )
        draft = root / f"{key.folder}.draft"
        job.run(draft)
        draft.rename(root / key.folder)


def prompt_ids(seed: int, length: int) -> tuple[int, ...]:
    """Return the first so many tokens of a document of the small language."""
    mixture = language.Mixture(length=max(length, 32), facts=4)
    return tuple(language.document(seed, mixture).ids[:length])


def _calibration(source: Path, config: Config) -> Calibration:
    """Measure the inputs of linears."""
    ranges = InputRanges(config)
    with open_model(source, "bf16", absorbed=False) as model:
        model.logits_model.bound.observer = ranges
        for number in range(_DOCUMENTS):
            ids = torch.tensor(prompt_ids(number, _LENGTH))
            hidden = model.logits_model.hidden([Sequence()], [ids])
            ranges("head", {"x": model.logits_model.normed(hidden)}, {})
    return ranges.calibration()


# --------------------------------------------------------------------------------------------------
# Cases.
#
# A case runs in memory: prompts together, then tokens one by one. Prompts are longer than the
# window, than the ratio of a heavily compressed layer and than the indexer's top-k, so that every
# component has work. Healthy variants change lengths, batching, switches and the order of sums.

LENGTHS = ((133, 17), (131, 9, 30), (200,), (133, 133))
NEW_TOKENS = 3
_HEALTHY_LENGTHS = (*LENGTHS, (5,), (1,), (64, 3, 40), (129, 1), (200,), (2, 2, 2, 2))
_SOURCES = ("official", "exact", "vllm")
TOGETHER, IN_CHUNKS, JOINING = "together", "in chunks", "joining"
SCHEDULES = (TOGETHER, IN_CHUNKS, JOINING)
_CHUNK = 48  # tokens of a prompt that are fed at a time
_EDGES = {control.id: control for control in WHOLE_RUN_CONTROLS if control.id == "window_shift"}
_WEIGHTS = {control.id: control for control in WEIGHT_CONTROLS}
_CONTROLS = (*(control.id for control in CONTROLS), *_EDGES, *_WEIGHTS)


@dataclass(frozen=True)
class MuseumCase:
    """One case. `products` is the dtype in which the candidate sums; the twin's is float64."""

    key: ModelKey
    seed: int
    lengths: tuple[int, ...] = LENGTHS[0]
    new_tokens: int = NEW_TOKENS
    source: str = "official"
    products: str = "float32"
    absorbed: bool = True
    control: str = ""  # a negative control that sits wherever it can, or nothing
    schedule: str = TOGETHER  # how prompts are fed: whole, in chunks, or joining later

    def __str__(self) -> str:
        lengths = "+".join(map(str, self.lengths))
        more = [self.source, *(() if self.products == "float32" else (self.products,))]
        more += [] if self.absorbed else ["naive"]
        more += [self.control] if self.control else []
        more += [self.schedule] if self.schedule != TOGETHER else []
        return f"{self.key}, {lengths} tokens, seed {self.seed}, {', '.join(more)}"

    @property
    def switches(self) -> Switches | None:
        """Return the switches of its source; None for the defaults."""
        if self.source == "exact":
            return None
        return switches_of(
            f"official-{self.key.model}" if self.source == "official" else self.source
        )

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """Return the prompts' token ids."""
        return tuple(
            prompt_ids(1000 + 16 * self.seed + number, length)
            for number, length in enumerate(self.lengths)
        )


def planting_cases(seed: int = 0) -> tuple[MuseumCase, ...]:
    """Return one case for each model and recipe, with different lengths."""
    return tuple(
        MuseumCase(key, seed + number, LENGTHS[(seed + number) % len(LENGTHS)])
        for number, key in enumerate(KEYS)
    )


# Faults without effect where parts share a scale, or no block scale is small, have cases of their
# own. What their checkpoints hold is legal.
_OF_FAULTS = {"M03": "own_scales", "M08.subnormal": "small_scales", "M08.flushed": "small_scales"}


def cases_of_fault(fault: str) -> tuple[MuseumCase, ...]:
    """Return the cases that only this fault needs: none, or one for each model."""
    control = next((each for name, each in _OF_FAULTS.items() if fault.startswith(name)), None)
    if control is None:
        return ()
    return tuple(
        MuseumCase(key, 8 + number, LENGTHS[number], control=control)
        for number, key in enumerate(key for key in KEYS if key.recipe == "nvfp4-full")
    )


def healthy_cases(count: int) -> Iterator[MuseumCase]:
    """Yield cases without fault: seeds, lengths, switches, orders of sums, controls."""
    for number in range(count):
        key = KEYS[number % len(KEYS)]
        turn = number // len(KEYS)
        control = _CONTROLS[(turn // 2) % len(_CONTROLS)] if turn % 2 else ""
        lengths = _HEALTHY_LENGTHS[turn % len(_HEALTHY_LENGTHS)]
        schedule = SCHEDULES[1 + turn // 3 % 2] if turn % 3 == 2 else TOGETHER
        yield MuseumCase(
            key,
            seed=100 + number,
            lengths=lengths,
            new_tokens=2 + turn % 2,
            source=_SOURCES[turn % len(_SOURCES)],
            products="float64" if turn % 5 == 4 else "float32",
            absorbed=turn % 4 != 3,
            control=control,
            schedule=schedule,
        )


def steps_of(case: MuseumCase) -> tuple[CapturedStep, ...]:
    """Return the forward passes of a schedule other than TOGETHER; all tokens are given."""
    sequences = [
        prompt_ids(1000 + 16 * case.seed + number, length + case.new_tokens)
        for number, length in enumerate(case.lengths)
    ]
    cuts = [
        _cuts(case, length, len(ids)) for length, ids in zip(case.lengths, sequences, strict=True)
    ]
    begins = [number if case.schedule == JOINING else 0 for number in range(len(cuts))]
    steps = []
    for at in range(max(begin + len(cut) - 1 for begin, cut in zip(begins, cuts, strict=True))):
        fed = [
            (owner, each[at - begin], each[at - begin + 1])
            for owner, (begin, each) in enumerate(zip(begins, cuts, strict=True))
            if 0 <= at - begin < len(each) - 1
        ]
        tokens = tuple(token for owner, a, b in fed for token in sequences[owner][a:b])
        positions = tuple(place for _, a, b in fed for place in range(a, b))
        owners = tuple(owner for owner, a, b in fed for _ in range(a, b))
        phase = Phase.DECODE if len(tokens) == len(fed) and at else Phase.PREFILL
        steps.append(CapturedStep(at, phase, tokens, positions, owners))
    return tuple(steps)


def _cuts(case: MuseumCase, length: int, total: int) -> list[int]:
    """Return where a sequence is cut: its prompt in chunks or whole, then token by token."""
    size = _CHUNK if case.schedule == IN_CHUNKS else length
    return [*range(0, length, size), *range(length, total + 1)]


def equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Return whether two sets of tensors have the same bits."""
    return left.keys() == right.keys() and all(same_bits(left[n], right[n]) for n in right)


@dataclass(eq=False)
class _Tape:
    """A component's call that reuses the healthy run's outputs for equal inputs."""

    call: ComponentCall
    healthy: InMemoryRun
    known: Many[CapturedCall]

    def __call__(
        self, inputs: Mapping[str, Tensor], weights: Mapping[str, Any]
    ) -> Mapping[str, Tensor]:
        """Return recorded outputs for equal inputs, else compute."""
        for call in self.known:
            if equal(inputs, self.healthy.inputs(call)):
                kept = self.healthy.outputs(call)
                return {name: tensor.clone() for name, tensor in kept.items()}
        return self.call(inputs, weights)


class WeightsWithChange(Mapping[str, "Weight"]):
    """All weights of a model with a change that is made once, at the first read."""

    def __init__(
        self, source: Mapping[str, Weight], change: Callable[[str, Weight], Weight]
    ) -> None:
        self._source, self._change = source, change
        self._made: dict[str, HeldWeight] = {}

    def __getitem__(self, name: str) -> Weight:
        weight = self._made.get(name)
        if weight is None:
            # Trap: an inference tensor that is kept could not be changed outside of that mode.
            with torch.inference_mode(mode=False):
                made = self._change(name, self._source[name])
            weight = self._made[name] = HeldWeight.of_weight(made)
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)


class RemainingRun:
    """A run whose already judged components are presented as not stored."""

    def __init__(self, run: InMemoryRun, judged: frozenset[str]) -> None:
        self.steps, self.facts = run.steps, run.facts
        self.inputs, self.outputs = run.inputs, run.outputs
        self.judged = judged
        self.calls = [
            _without_tensors(call) if call.component in judged else call for call in run.calls
        ]


def _without_tensors(call: CapturedCall) -> CapturedCall:
    inputs, outputs = (
        {name: kept._replace(at=None) for name, kept in side.items()}
        for side in (call.inputs, call.outputs)
    )
    return replace(call, inputs=inputs, outputs=outputs)


@dataclass(eq=False)
class Stage:
    """A case with its twin and its healthy run, for planting faults."""

    case: MuseumCase
    model: MuseumModel
    twin: BoundModel
    healthy: InMemoryRun = field(init=False)

    def __post_init__(self) -> None:
        self.healthy = self.run()
        self.calls = by_component(self.healthy)

    @classmethod
    def open(cls, case: MuseumCase, root: Path, models: dict[ModelKey, MuseumModel]) -> Stage:
        """Open a case; models are cached between cases."""
        if case.key not in models:
            models[case.key] = MuseumModel.open(case.key, root)
        model = models[case.key]
        if case.control in _WEIGHTS:
            model = replace(
                model, weights=WeightsWithChange(model.weights, _WEIGHTS[case.control].change)
            )
        numerics = Numerics.twin(case.switches)
        return cls(case, model, BoundModel(model.config, numerics, model.weights, model.recipe))

    def candidate(self) -> BoundModel:
        """Return a new healthy candidate that may be changed."""
        products = getattr(torch, self.case.products)
        numerics = Numerics.twin(self.case.switches, products=products)
        bound = BoundModel(self.model.config, numerics, self.model.weights, self.model.recipe)
        for control in CONTROLS:
            if control.id == self.case.control:
                self._put(control, bound)
        return bound

    def _put(self, control: Control, bound: BoundModel) -> None:
        """Wrap every component to which a negative control applies with one of its variants."""
        chance = random.Random(self.case.seed)  # noqa: S311  no secret
        for name in list(bound.calls):
            context = self.context(name, bound)
            if control.applies_to(context):
                variants = list(control.variants(context))
                if variants:
                    bound.calls[name] = chance.choice(variants).apply(bound.calls[name])

    def taped(self) -> BoundModel:
        """Return a candidate that reuses what the healthy run has computed."""
        bound = self.candidate()
        for name, calls in self.calls.items():
            bound.calls[name] = _Tape(bound.calls[name], self.healthy, calls)
        return bound

    def rest(self, run: InMemoryRun) -> RemainingRun:
        """Return the part of a run that is still to judge: components with any new call.

        All calls of the others equal the healthy run's bit for bit, and are judged with it.
        """
        judged = set()
        for name, calls in by_component(run).items():
            known = self.calls.get(name, ())
            if len(calls) == len(known) and all(map(partial(self._alike, run), calls, known)):
                judged.add(name)
        return RemainingRun(run, frozenset(judged))

    def _alike(self, run: InMemoryRun, call: CapturedCall, known: CapturedCall) -> bool:
        return (
            call.step == known.step
            and call.changed == known.changed
            and equal(run.inputs(call), self.healthy.inputs(known))
            and equal(run.outputs(call), self.healthy.outputs(known))
        )

    def run(
        self,
        candidate: BoundModel | None = None,
        edges: Mapping[str, FaultVariant] = MappingProxyType({}),
    ) -> InMemoryRun:
        """Run the case; if fed together, the tokens after the prompts are the candidate's own."""
        candidate = candidate or self.candidate()
        edges = {**self._edges(), **edges}
        if self.case.schedule != TOGETHER:
            steps, absorbed = steps_of(self.case), self.case.absorbed
            return InMemoryRun.again(candidate, steps, edges, absorbed=absorbed)
        return InMemoryRun.from_prompts(
            candidate,
            self.case.prompts,
            self.case.new_tokens,
            edges,
            absorbed=self.case.absorbed,
        )

    def _edges(self) -> dict[str, FaultVariant]:
        """Return a control of whole runs, applied the same way wherever possible."""
        control = _EDGES.get(self.case.control)
        if control is None:
            return {}
        scenes = {name: self.context(name) for name in self.twin.calls}
        return {
            name: list(control.variants(context))[self.case.seed % 2]
            for name, context in scenes.items()
            if control.applies_to(context)
        }

    def context(self, name: str, bound: BoundModel | None = None) -> ComponentContext:
        """Return a component's context, by default the twin's."""
        component = component_named(self.model.config, name, self.model.recipe)
        return ComponentContext(bound or self.twin, component, self.model.recipe)

    def first(self, name: str) -> CapturedCall:
        """Return the healthy run's first call of a component."""
        return self.calls[name][0]
