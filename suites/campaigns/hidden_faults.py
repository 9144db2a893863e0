"""Plant museum faults where something hides them, and count what `check` makes of each.

Hidden are faults beside rows of NaN that everybody has to hand on, and faults that act in one
phase, in one call or on one sequence only. Controls have the NaN and no fault. In others one
component puts out numbers near the end of float32, and no other may be blamed.

    python -m degarble.suites.campaigns.hidden_faults --count 600 --jobs 32 --out DIR

Columns of the table: `missed` (three budgets or more, and no origin), `elsewhere` (a component
without a fault is blamed), `wrong` (another cause is named), `alarm` (a healthy run differs).
`unnamed` is no failure, and counted in the kind.
"""

from __future__ import annotations

import math
import os
import random
import sys
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.faults.model_faults import FaultVariant, Reach
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.engine.localise.localise import localise
from degarble.harness.formats.weight import Weight
from degarble.harness.museum.cases import (
    MODELS,
    RECIPES,
    ModelKey,
    MuseumCase,
    MuseumModel,
    Stage,
    WeightsWithChange,
    equal,
    prepare,
)
from degarble.harness.museum.plants import (
    CauseAnswer,
    PlaceAnswer,
    PlantedFault,
    candidate_sites,
    judge_plant,
    touches,
    ways_of,
)
from degarble.suites.campaigns.runner import CaseResult, arguments, run_campaign
from degarble.suites.engine.localise_cases import V4, V32, bound, localised, run_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.engine.faults.model_faults import ModelFault
    from degarble.harness.museum.plants import PlantOutcome

    Tensors = Mapping[str, Tensor]
    When = Callable[[Tensors], bool]

FOLDER = "DEGARBLE_HIDDEN_FAULTS"  # where the processes of a campaign find the checkpoints
KEYS = tuple(ModelKey(model, recipe) for model in MODELS for recipe in (*RECIPES, "official"))
HEALTHY, BESIDE = "healthy NaN", "beside NaN"
PREFILL, DECODE, ONE_CALL, ONE_SEQUENCE = "prefill", "decode", "one call", "one sequence"
LARGE = "near the end of float32"
KINDS = (HEALTHY, BESIDE, PREFILL, BESIDE, DECODE, BESIDE, ONE_CALL, ONE_SEQUENCE, LARGE)
LENGTHS = ((131, 9, 30, 17), (40, 133, 5, 12), (20, 33, 140, 7))
CLEAR = 3.0  # budgets from which on a fault has to be found
_TRIES = 40


@dataclass(frozen=True)
class SpoiltCase(MuseumCase):
    """A case in which one token of one sequence has a row of NaN in the embedding."""

    owner: int = 1
    at: int = 3

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """Token ids, with the spoilt one in its place."""
        plain = [list(ids) for ids in super().prompts]
        plain[self.owner][self.at] = self.token
        return tuple(map(tuple, plain))

    @property
    def token(self) -> int:
        """An id that no prompt has otherwise."""
        held = {token for ids in super().prompts for token in ids}
        return next(token for token in range(1000) if token not in held)


@cache
def _root() -> Path:
    return Path(os.environ.get(FOLDER) or mkdtemp(prefix="degarble-hidden-"))


@cache
def _model(key: ModelKey) -> MuseumModel:
    prepare(_root(), (key,))
    return MuseumModel.open(key, _root())


@cache
def _stage(key: ModelKey, number: int, *, spoilt: bool) -> Stage:
    lengths, model = LENGTHS[number % len(LENGTHS)], _model(key)
    if not spoilt:
        return Stage.open(MuseumCase(key, number, lengths), _root(), {key: model})
    owner = number % len(lengths)
    case = SpoiltCase(key, number, lengths, owner=owner, at=lengths[owner] * (number % 3) // 3)

    def change(name: str, weight: Weight) -> Weight:
        if "embed" not in name:
            return weight
        table = weight.values(torch.bfloat16).clone()
        table[case.token] = torch.nan
        return Weight(value=table)

    changed = replace(model, weights=WeightsWithChange(model.weights, change))
    return Stage.open(case, _root(), {key: changed})


def in_calls(variant: FaultVariant, when: When) -> FaultVariant:
    """The way in some calls, nothing in the others."""

    def apply(call: ComponentCall) -> ComponentCall:
        faulty = variant.apply(call)

        def gated(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
            return faulty(inputs, weights) if when(inputs) else call(inputs, weights)

        return gated

    return replace(variant, apply=apply)


def on_sequence(variant: FaultVariant, owner: int, lengths: Sequence[int]) -> FaultVariant:
    """The way on the rows of one sequence; nothing on the others."""
    begin = sum(lengths[:owner])

    def apply(call: ComponentCall) -> ComponentCall:
        faulty = variant.apply(call)

        def gated(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
            wrong, right = faulty(inputs, weights), call(inputs, weights)
            made = {}
            for name, out in right.items():
                known = {
                    sum(lengths): slice(begin, begin + lengths[owner]),
                    len(lengths): slice(owner, owner + 1),
                }
                rows = known.get(len(out))
                made[name] = out.clone()
                if rows is not None and wrong[name].shape == out.shape:
                    made[name][rows] = wrong[name][rows]
            return made

        return gated

    return replace(variant, apply=apply)


def _hidden(
    kind: str, stage: Stage, name: str, variant: FaultVariant, chance: random.Random
) -> FaultVariant | None:
    """A way that acts in a part of the run only; None where this component has no such part."""
    calls = [stage.healthy.inputs(call) for call in stage.calls[name]]
    lengths = stage.case.lengths
    rows = [max((len(tensor) for tensor in inputs.values() if tensor.ndim), default=0)
            for inputs in calls]  # fmt: skip
    if len(calls) < 2 or rows[0] < sum(lengths):
        return None
    if kind == ONE_SEQUENCE:
        return on_sequence(variant, chance.randrange(len(lengths)), lengths)
    chosen = {PREFILL: 0, ONE_CALL: chance.randrange(len(calls))}.get(kind)
    if chosen is None:
        return in_calls(variant, lambda inputs: not equal(inputs, calls[0]))
    return in_calls(variant, lambda inputs: equal(inputs, calls[chosen]))


def _plants(
    kind: str, stage: Stage, chance: random.Random
) -> Iterator[tuple[PlantedFault, FaultVariant]]:
    """Plants, each with the way that it hides."""
    faults: list[ModelFault] = list(MODEL_FAULTS.values())
    chance.shuffle(faults)
    for fault in faults:
        if kind != BESIDE and (fault.reach is Reach.EDGE or fault.per_call):
            continue
        name = next(candidate_sites(stage, fault, chance), None)
        variants = ways_of(stage, fault, name) if name is not None else []
        if name is None or not variants:
            continue
        plain = chance.choice(variants)
        variant: FaultVariant | None = plain
        if kind != BESIDE:
            variant = None if plain.companions else _hidden(kind, stage, name, plain, chance)
        if variant is not None:
            yield PlantedFault(fault, name, variant), plain


def case(seed: int) -> CaseResult:
    """Plant what the seed says, and judge the answer."""
    kind, key = KINDS[seed % len(KINDS)], KEYS[seed // len(KINDS) % len(KEYS)]
    chance, number = random.Random(seed), seed // len(KINDS) % 9
    if kind == LARGE:
        return _large(seed, chance)
    stage = _stage(key, number, spoilt=kind in {HEALTHY, BESIDE})
    if kind == HEALTHY:
        again = stage.run(stage.candidate())
        found = localise(stage.twin, stage.model.recipe, again)
        text = "; ".join(f"{origin.component}: {origin.sentence}" for origin in found.origins)
        left = sum(row.left_out > 0 for row in found.rows)
        outcome = "alarm" if found.origins else "ok" if left else "all equal"
        return CaseResult(seed, kind, outcome, f"{key}: {text[:600]}")
    for planted, plain in islice(_plants(kind, stage, chance), _TRIES):
        try:
            if touches(stage, planted):
                plant_outcome = judge_plant(stage, planted, leave_out=False)
                if plant_outcome.cause is CauseAnswer.WRONG and _is_same(
                    stage, planted, plain, plant_outcome.named
                ):
                    plant_outcome = replace(plant_outcome, cause=CauseAnswer.SAME)
                if _has_effect(plant_outcome):
                    return _result(seed, kind, plant_outcome)
        except CANNOT_RUN as error:
            return CaseResult(seed, kind, "stopped", f"{planted.fault.id}: {error}"[:600])
    return CaseResult(seed, f"{kind}: nothing had an effect", "ok", str(key))


def _is_same(stage: Stage, planted: PlantedFault, plain: FaultVariant, named: str) -> bool:
    """Whether the cause that was named is also that of the way where nothing hides it.

    The museum holds two causes to be one by all calls of a run; a hidden one acts in some.
    """
    outcome = judge_plant(
        stage, PlantedFault(planted.fault, planted.component, plain), leave_out=False
    )
    return outcome.named == named and outcome.cause in {CauseAnswer.SAME, CauseAnswer.BESIDE}


def _large(seed: int, chance: random.Random) -> CaseResult:
    """Outputs of one component times 10^12 to 10^37: the twin is float64 inside, others float32."""
    config, factor = chance.choice((V4, V32)), 10.0 ** chance.uniform(12, 37)
    candidate = bound(config, "bf16", torch.float32)
    name = chance.choice([n for n in candidate.calls if "mtp" not in n and "topk" not in n])

    def change(call: ComponentCall) -> ComponentCall:
        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
            made = call(inputs, weights)
            return {
                key: (tensor.double() * factor).to(tensor.dtype)
                if tensor.is_floating_point()
                else tensor
                for key, tensor in made.items()
            }

        return faulty

    run = run_of(name, change, config=config, inside=torch.float32, recipe="bf16")
    found = localised(run, config, "bf16")
    blamed = {origin.component for origin in found.origins}
    outcome = "elsewhere" if blamed - {name} else "ok" if blamed else "missed"
    text = "; ".join(f"{origin.component}: {origin.sentence}" for origin in found.origins)
    return CaseResult(seed, LARGE, outcome, f"{name} times {factor:.3g}: {text}"[:1500])


def _has_effect(outcome: PlantOutcome) -> bool:
    if outcome.place is not PlaceAnswer.NOWHERE or "engine stops" in outcome.sentence:
        return True
    return not math.isnan(outcome.effect) and outcome.effect >= CLEAR


def _result(seed: int, kind: str, made: PlantOutcome) -> CaseResult:
    named = made.cause in {CauseAnswer.FIRST, CauseAnswer.SAME, CauseAnswer.BESIDE}
    outcome = "ok"
    if "engine stops" in made.sentence:
        outcome = "stopped"
    elif made.place is PlaceAnswer.NOWHERE:
        outcome = "missed"
    elif made.place is not PlaceAnswer.EXACT:
        outcome = "elsewhere"
    elif made.cause is CauseAnswer.WRONG:
        outcome = "wrong"
    detail = (
        f"{made.fault} at {made.component} ({made.way}), {made.case}: effect {made.effect:.3g}, "
        f"blamed {', '.join(made.blamed)}, named {made.named or '-'}: {made.sentence}"
    )
    return CaseResult(seed, f"{kind}: {'named' if named else 'unnamed'}", outcome, detail[:1500])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign; 1 where a case failed."""
    options = arguments("faults that something hides", count=64).parse_args(argv)
    folder = options.out / "models"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[FOLDER] = str(folder.absolute())
    prepare(folder, KEYS)
    return run_campaign("hidden_faults", case, options)


if __name__ == "__main__":
    sys.exit(main())
