"""Counting: intervals against published ones, what is missed, and what does not count."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from degarble.harness.museum.plants import CauseAnswer, PlaceAnswer, PlantOutcome, RepeatedRun
from degarble.harness.museum.scores import (
    HealthyRun,
    by_family,
    by_strength,
    classes,
    has_effect,
    is_missed,
    scores,
    wilson,
)
from degarble.harness.report.verdict import Verdict


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


def test_nothing_counted_says_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    empty = scores([], [])
    assert all(each.met and math.isnan(each.share) for each in empty)


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
    found = [outcome(5.0, left_out=CauseAnswer.UNKNOWN) for _ in range(9)]
    found += [
        outcome(50.0, cause=CauseAnswer.WRONG, left_out=CauseAnswer.WRONG),
        outcome(0.5, PlaceAnswer.ELSEWHERE),
    ]
    by_claim = {
        each.claim: each for each in scores(found, [HealthyRun("a", ("b",)), HealthyRun("c")])
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


def test_classes_count_beside_strict_names() -> None:
    found = [
        outcome(5.0),
        outcome(5.0, cause=CauseAnswer.SAME),
        outcome(5.0, cause=CauseAnswer.BESIDE),
    ]
    found[1] = replace(found[1], named="M41.tile_of_k")
    found.append(replace(outcome(5.0, left_out=CauseAnswer.SAME), left_named="M01.inverse"))
    by_claim = {each.claim.strip(): each for each in scores(found, [])}
    hits = {claim: each.hits for claim, each in by_claim.items() if each.total}
    assert hits["cause named first, from 3x"] == 3
    assert hits["strictly: by its own name"] == 2
    assert hits["wrong cause named, from 3x"] == 0
    assert hits["strictly: any other name"] == 2
    assert hits["its family left out: no known fault"] == 1
    assert hits["strictly: nothing named"] == 0
    assert by_claim["strictly: nothing named"].met, "it has no target"
    pairs = {("M10.nibble_order", "M41.tile_of_k"): 1, ("M01.inverse", "M10.nibble_order"): 1}
    assert classes(found) == pairs


def test_repeats_count_where_they_are_apart() -> None:
    race = RepeatedRun("M37.tile", "head", "a", "b", Verdict.UNSTABLE, ("head",))
    made = [race, replace(race, blamed=("norm",)), replace(race, fault="", component="")]
    by_claim = {each.claim: each for each in scores([], [], made)}
    told = by_claim["run twice: UNSTABLE, at its component"]
    assert (told.hits, told.total, told.met) == (1, 2, False)
    alarms = by_claim["run twice: alarms on healthy runs"]
    assert (alarms.hits, alarms.total, alarms.met) == (1, 1, False)


def test_bins_are_by_effect_and_families_by_id() -> None:
    found = [outcome(x) for x in (0.5, 1.0, 2.9, 3.0, 9.9, 10.0, math.inf, math.nan)]
    counts = {name: count for name, count, *_ in by_strength(found)}
    assert counts == {"below 1": 1, "1 to 3": 2, "3 to 10": 2, "from 10": 2, "no budget": 1}
    found.append(outcome(4.0, PlaceAnswer.NOWHERE, fault="O01.magnitudes"))
    families = by_family(found)
    assert list(families) == ["M10", "O01"]
    count, effective, localised, *_ = families["O01"]
    assert (count, effective, localised.hits, localised.total) == (1, 1, 0, 1)
