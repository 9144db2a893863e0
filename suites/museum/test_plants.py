"""Planting: truth by the rule of blame, effects in budgets, and how an answer is read."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.engine.faults.model_faults import (
    ModelFault,
    Reach,
    Scene,
    Way,
    from_ways,
    with_inputs,
    with_outputs,
)
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.museum import plants as museum_plants
from degarble.harness.museum.plants import (
    CauseAnswer,
    PlaceAnswer,
    PlantedFault,
    PlantOutcome,
    candidate_sites,
    judge_plant,
    touches,
    ways_of,
)
from degarble.harness.museum.scores import is_missed
from degarble.suites.museum.museum_stages import small_stage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.museum.cases import Stage

WO = "layers.1.attn.wo"
NIBBLES = MODEL_FAULTS["M10.nibble_order"]


@pytest.fixture(scope="module")
def stage() -> Stage:
    return small_stage()


def fault(way: Way, reach: Reach = Reach.COMPONENT) -> ModelFault:
    def ways(_scene: Scene) -> Iterator[Way]:
        yield way

    return ModelFault("X01.own", "a", "b", "c", lambda _: True, ways, from_ways(ways), reach)


def times(factor: float) -> Way:
    def change(_inputs: Any, outputs: Any) -> Any:
        return {name: factor * each for name, each in outputs.items()}

    return Way(f"times {factor}", with_outputs(change))


def turned(*names: str) -> Way:
    def change(inputs: Any) -> Any:
        return {n: each.flip(0) if n in names else each for n, each in inputs.items()}

    return Way(f"turning {names}", with_inputs(change))


def on_experts(stage: Stage) -> PlantOutcome:
    name = "layers.1.ffn.experts.w2"
    planted = PlantedFault(NIBBLES, name, ways_of(stage, NIBBLES, name)[0])
    assert touches(stage, planted)
    return judge_plant(stage, planted, leave_out=True)


def test_a_known_fault_is_found_named_and_unknown_without_its_family(stage: Stage) -> None:
    found = on_experts(stage)
    assert found.place is PlaceAnswer.EXACT
    assert found.cause is CauseAnswer.FIRST
    assert found.named == NIBBLES.id
    assert found.left_out is CauseAnswer.UNKNOWN
    assert found.effect > 10
    assert not is_missed(found)


def test_an_unknown_fault_is_localised_all_the_same(stage: Stage) -> None:
    found = judge_plant(
        stage, PlantedFault(fault(turned_rows()), WO, turned_rows()), leave_out=False
    )
    assert (found.place, found.cause) == (PlaceAnswer.EXACT, CauseAnswer.UNKNOWN)
    assert found.truth == (WO,)


def turned_rows() -> Way:
    def change(_inputs: Any, outputs: Any) -> Any:
        return {n: each + each.flip(-1) * each.roll(1, -1).sign() for n, each in outputs.items()}

    return Way("mixing columns", with_outputs(change))


def test_an_edge_is_blamed_by_the_rule(stage: Stage) -> None:
    way = turned("x")
    planted = PlantedFault(fault(way, Reach.EDGE), "layers.1.ffn.gate", way)
    found = judge_plant(stage, planted, leave_out=False)
    assert planted.harmed
    assert found.effect == math.inf
    assert found.truth == ("layers.1.ffn.gate",)
    assert found.place is PlaceAnswer.EXACT


def test_memory_is_blamed_on_who_writes_it(stage: Stage) -> None:
    name = "layers.1.attn.attend"
    way = turned("state_rows")
    planted = PlantedFault(fault(way, Reach.EDGE), name, way)
    found = judge_plant(stage, planted, leave_out=False)
    assert found.truth == ("layers.1.attn.kv_write",)
    assert found.blamed == found.truth


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("M12.layer_view", "layers.1.attn.indexer.scores"),
        ("M12.layer_view", "layers.1.attn.attend"),
        ("M36.metadata", "layers.1.ffn.experts.combine"),
    ],
)
def test_what_arrives_from_other_layers_and_earlier_calls_is_named(
    stage: Stage, name: str, component: str
) -> None:
    made = MODEL_FAULTS[name]
    found = judge_plant(
        stage, PlantedFault(made, component, ways_of(stage, made, component)[0]), leave_out=True
    )
    assert found.place is PlaceAnswer.EXACT
    assert (found.cause, found.named) == (CauseAnswer.FIRST, name)
    assert found.left_out is CauseAnswer.UNKNOWN


def test_nothing_is_no_effect(stage: Stage) -> None:
    assert not touches(stage, PlantedFault(fault(times(1.0)), WO, times(1.0)))
    assert touches(stage, PlantedFault(fault(times(1.01)), WO, times(1.01)))


def test_sites_take_roles_by_turns_and_come_once(stage: Stage) -> None:
    found = list(candidate_sites(stage, NIBBLES, random.Random(1)))
    assert len(found) == len(set(found))
    roles = [name.split(".", 2)[2] for name in found]
    assert len(set(roles[: len(set(roles))])) == len(set(roles))
    assert all(NIBBLES.sits(stage.scene(name)) for name in found)


def test_an_engine_that_is_blind_misses(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = SimpleNamespace(origins=(), rows=())
    monkeypatch.setattr(museum_plants, "localise", lambda *_: nothing)
    assert on_experts(stage).place is PlaceAnswer.NOWHERE


@pytest.mark.parametrize("broken", ["localise", "diagnose"])
def test_an_engine_that_stops_is_told(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def stops(*_: object) -> None:
        raise IndexError("no such row")

    monkeypatch.setattr(museum_plants, broken, stops)
    found = on_experts(stage)
    assert "the engine stops: IndexError in stops: no such row" in found.sentence
    assert found.cause is CauseAnswer.UNKNOWN
    assert is_missed(found) == (broken == "localise")


@pytest.mark.parametrize(
    ("factor", "also", "cause"),
    [
        (2.0, (), CauseAnswer.WRONG),
        (2.0, (NIBBLES.id,), CauseAnswer.BESIDE),
        (0.0, (), CauseAnswer.SAME),
    ],
)
def test_another_cause_is_wrong_unless_it_makes_the_same(
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    factor: float,
    also: tuple[str, ...],
    cause: CauseAnswer,
) -> None:
    way = times(factor) if factor else on_experts_way(stage)
    named = SimpleNamespace(
        id="M02.missing", way=way, alternatives=also, fault=MODEL_FAULTS["M02.missing"]
    )
    monkeypatch.setattr(
        museum_plants, "diagnose", lambda *_: SimpleNamespace(named=(named,), sentence="so")
    )
    found = on_experts(stage)
    assert (found.cause, found.named) == (cause, "M02.missing")
    assert (found.left_out, found.left_named) == (cause, "M02.missing")


def on_experts_way(stage: Stage) -> Way:
    return ways_of(stage, NIBBLES, "layers.1.ffn.experts.w2")[0]
