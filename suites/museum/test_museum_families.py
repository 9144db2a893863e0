"""The museum in CI: every family at least once, healthy runs, and the whole of it where asked for.

Faults are planted late in the model, where little is left to run and to judge; the whole museum
plants them everywhere (`-m faults`). What is counted is what docs/figures.md counts.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from degarble.harness.engine.faults.model_faults import Way, with_inputs
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.engine.localise.localise import localise
from degarble.harness.inference.processes import workers_for
from degarble.harness.museum.cases import (
    ModelKey,
    MuseumCase,
    MuseumModel,
    Stage,
    healthy_cases,
    prepare,
)
from degarble.harness.museum.museum import (
    PUBLISHED,
    WHOLE,
    WORKER_BYTES,
    chosen,
    judge_healthy,
    report_lines,
    run_museum,
)
from degarble.harness.museum.plants import (
    CauseAnswer,
    PlaceAnswer,
    PlantedFault,
    judge_plant,
    touches,
    ways_of,
)
from degarble.harness.museum.scores import STRONG, is_missed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ModelFault
    from degarble.harness.museum.plants import PlantOutcome

KEYS = (ModelKey("v32", "nvfp4-experts"), ModelKey("v4", "nvfp4-full"))
# The first is cheap; the second has what V3.2 has not: windows, pools, streams.
CASES = (MuseumCase(KEYS[0], 3, (70, 9)), MuseumCase(KEYS[1], 4, (131, 6)))
FAMILIES = sorted({fault.family for fault in MODEL_FAULTS.values()})
TRIED = 3  # strong plants of a family, one of which is named at least; all are localised
_MODELS: dict[ModelKey, MuseumModel] = {}


@cache
def _folder() -> TemporaryDirectory[str]:
    made = TemporaryDirectory(prefix="degarble-museum-")
    prepare(Path(made.name), KEYS)
    return made


@cache
def stage(case: MuseumCase) -> Stage:
    """A case, opened once a process."""
    return Stage.of(case, Path(_folder().name), _MODELS)


def late(case: MuseumCase, fault: ModelFault) -> list[str]:
    """Components where a fault can be, the last ones first."""
    return [name for name in reversed(stage(case).calls) if fault.sits(stage(case).scene(name))]


def strong(family: str) -> Iterator[PlantOutcome]:
    """What is said of plants of a family, from three budgets on; few are tried."""
    chance = random.Random(family)
    faults = [fault for fault in MODEL_FAULTS.values() if fault.family == family]
    chance.shuffle(faults)
    for fault in faults:
        for case in CASES:
            for name in late(case, fault)[:2]:
                found = ways_of(stage(case), fault, name)
                if not found:
                    continue
                planted = PlantedFault(fault, name, chance.choice(found))
                if not touches(stage(case), planted):
                    continue
                made = judge_plant(stage(case), planted, leave_out=False)
                assert not is_missed(made), made
                if made.effect >= STRONG:
                    yield made


# Every third here; suites/engine/diagnose/test_diagnose_behaviour.py names one fault of each
# family.
THIRD = [
    pytest.param(family, marks=[pytest.mark.slow] * (number % 3 > 0))
    for number, family in enumerate(FAMILIES)
]


@pytest.mark.parametrize("family", THIRD)
def test_a_family_is_found_and_named(family: str) -> None:
    made = []
    for each in islice(strong(family), TRIED):
        made.append(each)
        assert each.place is PlaceAnswer.EXACT, each
        if each.cause in (CauseAnswer.FIRST, CauseAnswer.SAME):
            return
    assert made, f"no plant of {family} has an effect"
    raise AssertionError("\n".join(map(str, made)))


@pytest.mark.parametrize("case", [c for c in healthy_cases(24) if c.key in KEYS][:4], ids=str)
def test_a_healthy_run_raises_no_alarm(case: MuseumCase) -> None:
    _folder()
    found = judge_healthy(Path(_folder().name), case)
    assert found.alarms == ()
    assert found.undecided == ()


def shifted(names: tuple[str, ...], shift: int = 1) -> tuple[str, ...]:
    """Whom the engine blames where positions arrive shifted at some components of layer 0."""
    case = MuseumCase(KEYS[1], 4, (12, 6), new_tokens=2)

    def moved(given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {**given, "positions": given["positions"] + shift}

    way = Way("shifted", with_inputs(moved))
    at = stage(case)
    run = at.run(at.taped(), dict.fromkeys(names, way))
    found = localise(at.twin, at.model.recipe, at.rest(run))
    return tuple(each.component for each in found.origins)


def test_a_layer_of_windows_may_turn_all_by_shifted_positions_and_no_part_alone() -> None:
    layer = "layers.0.attn."
    turning = [layer + each for each in ("q_head_norm_rope", "kv_norm_rope", "inverse_rope")]
    assert shifted(tuple(turning)) == ()
    assert shifted(tuple(turning[:1])) == (turning[0],)
    assert set(shifted(tuple(turning[:2]))) == set(turning[:2])
    entries = [each.replace("layers.0", "layers.1") for each in turning]
    assert set(shifted(tuple(entries))) == set(entries), "entries have absolute positions"


@pytest.mark.faults
@pytest.mark.timeout(7200)
def test_the_whole_museum() -> None:
    made = run_museum(chosen(()), WHOLE, workers_for(WORKER_BYTES))
    missed = [score.claim for score in made.scores if not score.met]
    assert not missed, "\n".join(report_lines(made))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_published_part() -> None:
    made = run_museum(chosen(()), PUBLISHED, workers_for(WORKER_BYTES))
    missed = [score.claim for score in made.scores if not score.met]
    assert not missed, "\n".join(report_lines(made))
