"""The museum as one run: tasks, scores, the report, and every family of faults at least once.

In CI faults are planted late in the model, where little is left to run and to judge; the whole
museum plants them everywhere (`-m faults`). What is counted is what docs/figures.md counts.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from degarble.harness.engine.faults.model_faults import FaultVariant, with_inputs
from degarble.harness.engine.faults.registry import MODEL_FAULTS, STRENGTHS
from degarble.harness.engine.localise.localise import localise
from degarble.harness.inference.processes import workers_for
from degarble.harness.museum import museum
from degarble.harness.museum.cases import (
    ModelKey,
    MuseumCase,
    MuseumModel,
    Stage,
    healthy_cases,
    prepare,
)
from degarble.harness.museum.museum import (
    CHOSEN,
    PUBLISHED,
    WHOLE,
    WORKER_BYTES,
    Museum,
    MuseumExtent,
    MuseumTask,
    chosen,
    judge_healthy,
    lines_to,
    report_lines,
    run_museum,
    tasks,
)
from degarble.harness.museum.plants import (
    CauseAnswer,
    PlaceAnswer,
    PlantedFault,
    PlantOutcome,
    RepeatedRun,
    judge_plant,
    touches,
    ways_of,
)
from degarble.harness.museum.scores import (
    STRONG,
    HealthyRun,
    by_family,
    by_strength,
    classes,
    has_effect,
    is_missed,
    scores,
    wilson,
)
from degarble.harness.report.page import to_plain
from degarble.harness.report.verdict import Verdict
from degarble.suites.museum.museum_stages import KEY, root
from degarble.suites.snapshots import assert_as_kept

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ModelFault


# --------------------------------------------------------------------------------------------------
# The museum as one run: what is done for which ids, what has no effect, and what decides.

SMALL = MuseumExtent(plants=2, healthy=0, cases=(MuseumCase(KEY, 1, (40, 7)),))


def test_ids_and_families_are_chosen_in_order() -> None:
    assert chosen(()) == tuple(MODEL_FAULTS)
    assert chosen(("M10.nibble_order",)) == ("M10.nibble_order",)
    family = tuple(name for name in MODEL_FAULTS if name.startswith("M10."))
    assert chosen(("M10", "M10.nibble_order")) == family
    assert len(family) > 1


def test_every_fault_is_a_task_and_some_are_searched_without_their_family() -> None:
    found = tasks(tuple(MODEL_FAULTS), museum.WHOLE)
    once = [task for task in found if not task.twice]
    planted = [task.fault for task in once if task.fault]
    assert sorted(planted) == sorted(MODEL_FAULTS)
    assert set(planted[: len(STRENGTHS)]) == set(STRENGTHS), "the longest first"
    assert sum(task.healthy is not None for task in once) >= 200
    assert {task.extent.leave_out for task in once if task.fault} == {1}
    some = tasks(tuple(MODEL_FAULTS), museum.PUBLISHED)
    assert {task.extent.leave_out for task in some if task.fault and not task.twice} == {0, 1}
    assert all(task.extent.leave_out for task in tasks(("M10.nibble_order",), CHOSEN))


@pytest.mark.slow
def test_a_fault_is_planted_where_it_has_an_effect(tmp_path: Path) -> None:
    heard: list[str] = []
    with lines_to(tmp_path / "lines.jsonl") as ended:
        made = run_museum(
            ("M10.nibble_order",), SMALL, report=heard.append, root=root(), ended=ended
        )
        (line,) = (tmp_path / "lines.jsonl").read_text().splitlines()
    told = json.loads(line)
    assert (told["task"], told["seconds"] > 0) == ("M10.nibble_order", True)
    assert [each["place"] for each in told["found"]] == ["exact", "exact"]
    assert heard == ["M10.nibble_order"]
    assert len(made.outcomes) == 2
    assert len({plant_outcome.component for plant_outcome in made.outcomes}) == 2
    assert all(
        (plant_outcome.place, plant_outcome.cause) == (PlaceAnswer.EXACT, CauseAnswer.FIRST)
        for plant_outcome in made.outcomes
    )
    assert (made.verdict, made.missed, made.without_effect) == (Verdict.AGREES, (), ())
    document = to_plain(made.document())
    assert isinstance(document, dict)
    assert document["verdict"] == "AGREES"
    assert document["families"]["M10"]["plants"] == 2  # type: ignore[index,call-overload]


def test_races_and_healthy_cases_are_run_twice() -> None:
    found = [task for task in tasks(tuple(MODEL_FAULTS), museum.WHOLE) if task.twice]
    assert {task.fault for task in found} >= {"M36.workspace", "M37.tile", "M37.scales", ""}
    assert all(task.name.endswith(", twice") for task in found)
    race = MuseumTask(replace(SMALL, repeats=1), "M37.tile", twice=True)
    (made,) = museum.perform(root(), race)
    assert isinstance(made, RepeatedRun)
    assert made.right, made
    (same,) = museum.perform(
        root(), MuseumTask(SMALL, healthy=MuseumCase(KEY, 2, (9,)), twice=True)
    )
    assert isinstance(same, RepeatedRun)
    assert (same.fault, same.verdict) == ("", Verdict.AGREES)
    whole = Museum((), (), (), repeats=(made, same))
    assert whole.verdict is Verdict.AGREES
    wrong = replace(made, blamed=("head",)), replace(same, verdict=Verdict.UNSTABLE)
    assert Museum((), (), (), repeats=wrong[:1]).missed == ("M37.tile",)
    assert Museum((), (), (), repeats=wrong[1:]).verdict is Verdict.DIFFERS


def test_a_family_with_few_plants_is_reported() -> None:
    plants = [PlantOutcome(f"M10.{n}", "head", "a", "b", 9.0, PlaceAnswer.EXACT) for n in range(3)]
    plants += [
        PlantOutcome("M06.up", "head", "a", "b", each, PlaceAnswer.EXACT)
        for each in (9.0, 9.0, 0.5)
    ]
    assert Museum(tuple(plants), (), ()).scarce == ("M06",)


@pytest.mark.slow
def test_mild_plants_are_added() -> None:
    made = run_museum(("M43.whole",), replace(SMALL, plants=1, mild=1), root=root())
    assert len(made.outcomes) == 4
    assert sum(1 <= plant_outcome.effect < 16 for plant_outcome in made.outcomes) >= 3


def test_a_fault_without_a_place_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(museum, "touches", lambda *_: False)
    made = run_museum(("M10.nibble_order",), SMALL, root=root())
    assert made.outcomes == ()
    assert made.without_effect == ("M10.nibble_order",)
    assert made.verdict is Verdict.AGREES


def test_healthy_runs_raise_no_alarm_and_a_planted_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = MuseumCase(KEY, 2, (9,), new_tokens=2)
    assert museum.judge_healthy(root(), case).alarms == ()

    def ill(self: Stage) -> object:
        bound = plain(self)
        call = bound.calls["norm"]
        bound.calls["norm"] = lambda inputs, weights: {
            name: 1.1 * tensor for name, tensor in call(inputs, weights).items()
        }
        return bound

    plain = Stage.candidate
    monkeypatch.setattr(Stage, "candidate", ill)
    run = museum.judge_healthy(root(), case)
    assert [alarm.split(":")[0] for alarm in run.alarms] == ["norm"]


# --------------------------------------------------------------------------------------------------
# Counting: intervals against published ones, what is missed, and what does not count.


def outcome(
    effect: float,
    place: PlaceAnswer = PlaceAnswer.EXACT,
    cause: CauseAnswer = CauseAnswer.FIRST,
    left_out: CauseAnswer | None = None,
    fault: str = "M10.nibble_order",
) -> PlantOutcome:
    return PlantOutcome(fault, "head", "a way", "a case", effect, place, cause, left_out=left_out)


# Newcombe, "Two-sided confidence intervals for the single proportion" (1998), table I, method 3.
@pytest.mark.parametrize(
    ("hits", "total", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_is_newcombes(hits: int, total: int, low: float, high: float) -> None:
    assert wilson(hits, total) == pytest.approx((low, high), abs=5e-5)


def test_no_claim_is_made_without_counts() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    empty = scores([], [])
    assert all(score.met and math.isnan(score.share) for score in empty)


@pytest.mark.parametrize(
    ("made", "missed"),
    [
        (outcome(5.0), False),
        (outcome(5.0, PlaceAnswer.NOWHERE), True),
        (outcome(5.0, PlaceAnswer.ALSO_ELSEWHERE), True),
        (outcome(5.0, cause=CauseAnswer.WRONG), True),
        (outcome(5.0, cause=CauseAnswer.SAME), False),
        (outcome(5.0, cause=CauseAnswer.BESIDE), False),
        (outcome(5.0, cause=CauseAnswer.UNKNOWN), False),
        (outcome(2.0, PlaceAnswer.NOWHERE, CauseAnswer.UNKNOWN), False),
        (outcome(2.0, PlaceAnswer.ELSEWHERE, CauseAnswer.UNKNOWN), True),
        (outcome(0.5, PlaceAnswer.NOWHERE, CauseAnswer.UNKNOWN), False),
        (outcome(0.5, PlaceAnswer.ELSEWHERE, CauseAnswer.UNKNOWN), True),
        (outcome(math.nan, PlaceAnswer.NOWHERE, CauseAnswer.UNKNOWN), True),
        (outcome(math.inf), False),
    ],
)
def test_what_is_missed(made: PlantOutcome, missed: bool) -> None:
    assert is_missed(made) == missed


def test_a_weak_plant_does_not_count_and_one_without_budget_does() -> None:
    assert not has_effect(outcome(0.9))
    assert has_effect(outcome(math.nan))


def test_claims_count_what_they_say() -> None:
    outcomes = [outcome(5.0, left_out=CauseAnswer.UNKNOWN) for _ in range(9)]
    outcomes += [
        outcome(50.0, cause=CauseAnswer.WRONG, left_out=CauseAnswer.WRONG),
        outcome(0.5, PlaceAnswer.ELSEWHERE),
    ]
    by_claim = {
        score.claim: score for score in scores(outcomes, [HealthyRun("a", ("b",)), HealthyRun("c")])
    }
    exact = by_claim["localised to the component, from 3x"]
    assert (exact.hits, exact.total, exact.met) == (10, 10, True)
    named = by_claim["cause named first, from 3x"]
    assert (named.hits, named.total, named.met) == (9, 10, True)
    wrong = by_claim["wrong cause named, from 3x"]
    assert (wrong.hits, wrong.met) == (1, False)
    without = by_claim["its family left out: no known fault"]
    assert (without.hits, without.total, without.met) == (9, 10, False)
    assert not by_claim["blamed below 1x"].met
    alarms = by_claim["alarms on healthy runs"]
    assert (alarms.hits, alarms.total, alarms.met) == (1, 2, False)


def test_classes_are_counted_in_addition_to_strict_names() -> None:
    outcomes = [
        outcome(5.0),
        outcome(5.0, cause=CauseAnswer.SAME),
        outcome(5.0, cause=CauseAnswer.BESIDE),
    ]
    outcomes[1] = replace(outcomes[1], named="M41.tile_of_k")
    outcomes.append(replace(outcome(5.0, left_out=CauseAnswer.SAME), left_named="M01.inverse"))
    by_claim = {score.claim.strip(): score for score in scores(outcomes, [])}
    hits = {claim: score.hits for claim, score in by_claim.items() if score.total}
    assert hits["cause named first, from 3x"] == 3
    assert hits["strictly: by its own name"] == 2
    assert hits["wrong cause named, from 3x"] == 0
    assert hits["strictly: any other name"] == 2
    assert hits["its family left out: no known fault"] == 1
    assert hits["strictly: nothing named"] == 0
    assert by_claim["strictly: nothing named"].met, "it has no target"
    pairs = {("M10.nibble_order", "M41.tile_of_k"): 1, ("M01.inverse", "M10.nibble_order"): 1}
    assert classes(outcomes) == pairs


def test_repeats_count_where_they_are_apart() -> None:
    race = RepeatedRun("M37.tile", "head", "a", "b", Verdict.UNSTABLE, ("head",))
    runs = [race, replace(race, blamed=("norm",)), replace(race, fault="", component="")]
    by_claim = {museum_score.claim: museum_score for museum_score in scores([], [], runs)}
    score = by_claim["run twice: UNSTABLE, at its component"]
    assert (score.hits, score.total, score.met) == (1, 2, False)
    alarms = by_claim["run twice: alarms on healthy runs"]
    assert (alarms.hits, alarms.total, alarms.met) == (1, 1, False)


def test_bins_are_by_effect_and_families_by_id() -> None:
    outcomes = [outcome(x) for x in (0.5, 1.0, 2.9, 3.0, 9.9, 10.0, math.inf, math.nan)]
    counts = {name: count for name, count, *_ in by_strength(outcomes)}
    assert counts == {"below 1": 1, "1 to 3": 2, "3 to 10": 2, "from 10": 2, "no budget": 1}
    outcomes.append(outcome(4.0, PlaceAnswer.NOWHERE, fault="O01.magnitudes"))
    families = by_family(outcomes)
    assert list(families) == ["M10", "O01"]
    count, effective, localised, *_ = families["O01"]
    assert (count, effective, localised.hits, localised.total) == (1, 1, 0, 1)


# --------------------------------------------------------------------------------------------------
# What the museum says, word for word, with every kind of miss in it.

W2 = "layers.1.ffn.experts.w2"
CASE = "v4 nvfp4-full, 133+17 tokens, seed 1, official"


def text_museum() -> Museum:
    right = PlantOutcome(
        "M10.nibble_order", W2, "swapping the two nibbles", CASE, 812.0, PlaceAnswer.EXACT,
        CauseAnswer.FIRST, "M10.nibble_order", CauseAnswer.UNKNOWN, (W2,), (W2,),
    )  # fmt: skip
    nowhere = PlantOutcome(
        "M06.up", W2, "rounding scales up", CASE, 4.5, truth=(W2,), sentence="not a word"
    )
    wrong = PlantOutcome(
        "M01.inverse", W2, "dividing by the scale", CASE, 33.0, PlaceAnswer.ALSO_ELSEWHERE,
        CauseAnswer.WRONG, "M02.missing", None, ("head", W2), (W2,), "a \x1b[31mhostile sentence",
    )  # fmt: skip
    edge = PlantOutcome(
        "M34.stale", "layers.1.attn.attend", "reading stale rows", CASE, math.inf,
        PlaceAnswer.EXACT, CauseAnswer.SAME, "M36.stale", None, ("layers.1.attn.kv_write",),
        ("layers.1.attn.kv_write",),
    )  # fmt: skip
    healthy = (HealthyRun("v4"), HealthyRun("v32", ("norm: 1.2 of its budget",)))
    outcomes = (right, nowhere, wrong, edge)
    race = RepeatedRun("M37.tile", W2, "a lost tile", CASE, Verdict.UNSTABLE, (W2,))
    missed = RepeatedRun("M37.tile", W2, "a lost tile", CASE, Verdict.UNSTABLE, ("head",))
    twice = (race, missed, RepeatedRun("", "", "", CASE, Verdict.AGREES))
    return Museum(outcomes, healthy, ("M19.nvfp4",), 61.4, twice)


def test_it_is_as_kept() -> None:
    assert_as_kept("museum/museum.txt", "\n".join(report_lines(text_museum())) + "\n")


def test_misses_and_alarms_decide() -> None:
    made = text_museum()
    assert made.missed == ("M01.inverse", "M06.up", "M37.tile")
    assert made.verdict is Verdict.DIFFERS
    clean = Museum(made.outcomes[:1], made.healthy[:1], ())
    assert clean.verdict is Verdict.AGREES
    assert Museum(made.outcomes[:1], made.healthy, ()).verdict is Verdict.DIFFERS


# --------------------------------------------------------------------------------------------------
# The museum in CI: every family at least once, healthy runs, and the whole of it on request.
#
# Faults are planted late in the model, where little is left to run and to judge; the whole museum
# plants them everywhere (`-m faults`). What is counted is what docs/figures.md counts.

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
    return Stage.open(case, Path(_folder().name), _MODELS)


def late(case: MuseumCase, fault: ModelFault) -> list[str]:
    """Components where a fault can be, the last ones first."""
    return [
        name for name in reversed(stage(case).calls) if fault.applies_to(stage(case).context(name))
    ]


def strong(family: str) -> Iterator[PlantOutcome]:
    """What is said of plants of a family, from three budgets on; few are tried."""
    chance = random.Random(family)
    faults = [fault for fault in MODEL_FAULTS.values() if fault.family == family]
    chance.shuffle(faults)
    for fault in faults:
        for case in CASES:
            for name in late(case, fault)[:2]:
                variants = ways_of(stage(case), fault, name)
                if not variants:
                    continue
                planted = PlantedFault(fault, name, chance.choice(variants))
                if not touches(stage(case), planted):
                    continue
                plant_outcome = judge_plant(stage(case), planted, leave_out=False)
                assert not is_missed(plant_outcome), plant_outcome
                if plant_outcome.effect >= STRONG:
                    yield plant_outcome


# Every third here; suites/engine/diagnose/test_diagnose.py names one fault of each
# family.
THIRD = [
    pytest.param(family, marks=[pytest.mark.slow] * (number % 3 > 0))
    for number, family in enumerate(FAMILIES)
]


@pytest.mark.parametrize("family", THIRD)
def test_a_family_is_found_and_named(family: str) -> None:
    made = []
    for plant_outcome in islice(strong(family), TRIED):
        made.append(plant_outcome)
        assert plant_outcome.place is PlaceAnswer.EXACT, plant_outcome
        if plant_outcome.cause in (CauseAnswer.FIRST, CauseAnswer.SAME):
            return
    assert made, f"no plant of {family} has an effect"
    raise AssertionError("\n".join(map(str, made)))


@pytest.mark.parametrize(
    "case",
    [
        # The longest of the four costs as much as the others together.
        pytest.param(c, id=str(c), marks=pytest.mark.slow if "seed 105" in str(c) else ())
        for c in [c for c in healthy_cases(24) if c.key in KEYS][:4]
    ],
)
def test_a_healthy_run_raises_no_alarm(case: MuseumCase) -> None:
    _folder()
    run = judge_healthy(Path(_folder().name), case)
    assert run.alarms == ()
    assert run.undecided == ()


def shifted(names: tuple[str, ...], shift: int = 1) -> tuple[str, ...]:
    """Whom the engine blames where positions arrive shifted at some components of layer 0."""
    case = MuseumCase(KEYS[1], 4, (12, 6), new_tokens=2)

    def moved(given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {**given, "positions": given["positions"] + shift}

    variant = FaultVariant("shifted", with_inputs(moved))
    at = stage(case)
    run = at.run(at.taped(), dict.fromkeys(names, variant))
    found = localise(at.twin, at.model.recipe, at.rest(run))
    return tuple(origin.component for origin in found.origins)


@pytest.mark.slow
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
