"""Plants: where faults fit, their strength, equal effects, races, and how an answer is scored."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch

from degarble.harness.capture.files.reader import Capture
from degarble.harness.engine.faults.model_faults import (
    CallRecord,
    ComponentContext,
    FaultVariant,
    ModelFault,
    Reach,
    from_variants,
    with_inputs,
    with_outputs,
)
from degarble.harness.engine.faults.registry import MODEL_FAULTS, STRENGTHS
from degarble.harness.museum import plants as museum_plants
from degarble.harness.museum import plants as museum_repeats
from degarble.harness.museum.cases import equal
from degarble.harness.museum.plants import (
    MILD,
    CauseAnswer,
    FaultyTwin,
    PlaceAnswer,
    PlantedFault,
    PlantOutcome,
    RepeatedRun,
    adjusted_fault,
    candidate_sites,
    equal_outputs,
    judge_plant,
    measure_strength,
    mild_plants,
    roles_of,
    run_repeatedly,
    same_effect,
    touches,
    ways_of,
    write_capture,
)
from degarble.harness.museum.scores import is_missed
from degarble.harness.report.verdict import Verdict
from degarble.suites.museum.museum_stages import small_stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.museum.cases import Stage


# --------------------------------------------------------------------------------------------------
# Planting: truth by the rule of blame, effects in budgets, and how an answer is read.

WO = "layers.1.attn.wo"
NIBBLES = MODEL_FAULTS["M10.nibble_order"]


@pytest.fixture(scope="module")
def stage() -> Stage:
    return small_stage()


def fault(variant: FaultVariant, reach: Reach = Reach.COMPONENT) -> ModelFault:
    def ways(_context: ComponentContext) -> Iterator[FaultVariant]:
        yield variant

    return ModelFault("X01.own", "a", "b", "c", lambda _: True, ways, from_variants(ways), reach)


def times(factor: float) -> FaultVariant:
    def change(_inputs: Any, outputs: Any) -> Any:
        return {name: factor * output for name, output in outputs.items()}

    return FaultVariant(f"times {factor}", with_outputs(change))


def turned(*names: str) -> FaultVariant:
    def change(inputs: Any) -> Any:
        return {n: each.flip(0) if n in names else each for n, each in inputs.items()}

    return FaultVariant(f"turning {names}", with_inputs(change))


def on_experts(stage: Stage) -> PlantOutcome:
    name = "layers.1.ffn.experts.w2"
    planted = PlantedFault(NIBBLES, name, ways_of(stage, NIBBLES, name)[0])
    assert touches(stage, planted)
    return judge_plant(stage, planted, leave_out=True)


def test_a_known_fault_is_found_named_and_unknown_without_its_family(stage: Stage) -> None:
    outcome = on_experts(stage)
    assert outcome.place is PlaceAnswer.EXACT
    assert outcome.cause is CauseAnswer.FIRST
    assert outcome.named == NIBBLES.id
    assert outcome.left_out is CauseAnswer.UNKNOWN
    assert outcome.effect > 10
    assert not is_missed(outcome)


@pytest.mark.slow
def test_an_unknown_fault_is_localised_all_the_same(stage: Stage) -> None:
    outcome = judge_plant(
        stage, PlantedFault(fault(turned_rows()), WO, turned_rows()), leave_out=False
    )
    assert (outcome.place, outcome.cause) == (PlaceAnswer.EXACT, CauseAnswer.UNKNOWN)
    assert outcome.truth == (WO,)


def turned_rows() -> FaultVariant:
    def change(_inputs: Any, outputs: Any) -> Any:
        return {
            n: output + output.flip(-1) * output.roll(1, -1).sign() for n, output in outputs.items()
        }

    return FaultVariant("mixing columns", with_outputs(change))


def test_an_edge_is_blamed_by_the_rule(stage: Stage) -> None:
    variant = turned("x")
    planted = PlantedFault(fault(variant, Reach.EDGE), "layers.1.ffn.gate", variant)
    outcome = judge_plant(stage, planted, leave_out=False)
    assert planted.changed_inputs
    assert outcome.effect == math.inf
    assert outcome.truth == ("layers.1.ffn.gate",)
    assert outcome.place is PlaceAnswer.EXACT


def test_memory_is_blamed_on_who_writes_it(stage: Stage) -> None:
    name = "layers.1.attn.attend"
    variant = turned("state_rows")
    planted = PlantedFault(fault(variant, Reach.EDGE), name, variant)
    outcome = judge_plant(stage, planted, leave_out=False)
    assert outcome.truth == ("layers.1.attn.kv_write",)
    assert outcome.blamed == outcome.truth


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
    model_fault = MODEL_FAULTS[name]
    outcome = judge_plant(
        stage,
        PlantedFault(model_fault, component, ways_of(stage, model_fault, component)[0]),
        leave_out=True,
    )
    assert outcome.place is PlaceAnswer.EXACT
    assert (outcome.cause, outcome.named) == (CauseAnswer.FIRST, name)
    assert outcome.left_out is CauseAnswer.UNKNOWN


def test_nothing_is_no_effect(stage: Stage) -> None:
    assert not touches(stage, PlantedFault(fault(times(1.0)), WO, times(1.0)))
    assert touches(stage, PlantedFault(fault(times(1.01)), WO, times(1.01)))


def test_sites_take_roles_by_turns_and_come_once(stage: Stage) -> None:
    found = list(candidate_sites(stage, NIBBLES, random.Random(1)))
    assert len(found) == len(set(found))
    roles = [name.split(".", 2)[2] for name in found]
    assert len(set(roles[: len(set(roles))])) == len(set(roles))
    assert all(NIBBLES.applies_to(stage.context(name)) for name in found)


def test_an_engine_that_is_blind_misses(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = SimpleNamespace(origins=(), rows=())
    monkeypatch.setattr(museum_plants, "localise", lambda *_: nothing)
    assert on_experts(stage).place is PlaceAnswer.NOWHERE


@pytest.mark.parametrize("broken", ["localise", "diagnose"])
def test_an_engine_that_stops_is_reported(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def stops(*_: object) -> None:
        raise IndexError("no such row")

    monkeypatch.setattr(museum_plants, broken, stops)
    outcome = on_experts(stage)
    assert "the engine stops: IndexError in stops: no such row" in outcome.sentence
    assert outcome.cause is CauseAnswer.UNKNOWN
    assert is_missed(outcome) == (broken == "localise")


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
    variant = times(factor) if factor else on_experts_way(stage)
    named = SimpleNamespace(
        id="M02.missing", variant=variant, alternatives=also, fault=MODEL_FAULTS["M02.missing"]
    )
    monkeypatch.setattr(
        museum_plants, "diagnose", lambda *_: SimpleNamespace(named=(named,), sentence="so")
    )
    outcome = on_experts(stage)
    assert (outcome.cause, outcome.named) == (cause, "M02.missing")
    assert (outcome.left_out, outcome.left_named) == (cause, "M02.missing")


def on_experts_way(stage: Stage) -> FaultVariant:
    return ways_of(stage, NIBBLES, "layers.1.ffn.experts.w2")[0]


# --------------------------------------------------------------------------------------------------
# What counts as the same: bits of what two ways make of the same calls, in every call.


def every_other(factor: float) -> FaultVariant:
    """Wrong in every second call: a way that remembers."""

    def apply(call: Any) -> Any:
        calls = iter(range(1000))

        def faulty(inputs: Any, weights: Any) -> Any:
            outputs = call(inputs, weights)
            wrong = next(calls) % 2
            return {n: factor * output if wrong else output for n, output in outputs.items()}

        return faulty

    return FaultVariant("every other", apply)


def same(planted: FaultVariant, named: FaultVariant, calls: slice = slice(None)) -> bool:
    stage = small_stage()
    candidate = stage.candidate()
    candidate.calls[WO] = planted.apply(candidate.calls[WO])
    run = stage.run(candidate)
    context = stage.context(WO)
    records = []
    for call in [captured_call for captured_call in run.calls if captured_call.component == WO]:
        inputs = run.inputs(call)
        expected = stage.twin.calls[WO](inputs, context.weights)
        records.append(CallRecord(inputs, run.outputs(call), expected, step=call.step))
    chosen = records[calls]
    trouble: Any = SimpleNamespace(context=context, record=chosen[0], more=tuple(chosen[1:]))
    first: Any = SimpleNamespace(variant=named, fault=MODEL_FAULTS["M43.whole"])
    return same_effect(FaultyTwin(stage.twin, WO, planted, run), trouble, first)


@pytest.mark.parametrize(
    ("planted", "named", "expected"),
    [
        (times(2.0), times(2.0), True),
        (times(2.0), times(2.02), False),
        (every_other(2.0), times(2.0), False),
    ],
)
def test_it_is_the_same_in_every_call_or_it_is_not(
    planted: FaultVariant, named: FaultVariant, expected: bool
) -> None:
    assert same(planted, named) == expected


def test_a_way_that_remembers_is_remade_in_order() -> None:
    """The second call of the run is wrong, and asked alone it still is."""
    assert same(every_other(2.0), times(2.0), slice(1, 2))
    assert not same(every_other(2.0), times(2.0), slice(0, 1))


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ({"out": torch.arange(4000.0)}, True),
        ({"out": torch.arange(4000.0).where(torch.arange(4000) != 7, -1.0)}, True),
        ({"out": torch.arange(4000.0).where(torch.arange(4000) > 7, -1.0)}, False),
        ({"out": torch.arange(4001.0)}, False),
        ({"other": torch.arange(4000.0)}, False),
    ],
)
def test_nearly_all_elements_have_to_be_equal(made: Mapping[str, Tensor], expected: bool) -> None:
    assert equal_outputs(made, {"out": torch.arange(4000.0)}) == expected
    nan = {"out": torch.full((5,), torch.nan)}
    assert equal_outputs(nan, nan)


# --------------------------------------------------------------------------------------------------
# Where faults can be, told without a model being run.


def test_every_fault_can_be_somewhere() -> None:
    nowhere = [name for name, fault in MODEL_FAULTS.items() if not roles_of(fault)]
    assert not nowhere


def test_roles_are_those_of_both_families() -> None:
    found = roles_of(MODEL_FAULTS["M10.nibble_order"])
    assert {"ffn.experts.w2", "attn.wo_b", "attn.wo"} <= set(found)
    assert len(found) == len(set(found))
    assert "attn.norm" not in found


# --------------------------------------------------------------------------------------------------
# Strengths: measured before planting; dials that are turned, mild ways that are found.


def test_the_quick_measure_is_that_of_the_run() -> None:
    stage, fault = small_stage(), MODEL_FAULTS["M10.nibble_order"]
    name = "layers.1.ffn.experts.w2"
    variant = ways_of(stage, fault, name)[0]
    found = measure_strength(stage, name, variant)
    whole = judge_plant(stage, PlantedFault(fault, name, variant), leave_out=False).effect
    assert found == pytest.approx(whole, rel=0.5)
    assert found > MILD[1]


@pytest.mark.parametrize("wanted", [1.6, 7.0])
def test_a_dial_is_turned_until_the_effect_is_as_wanted(wanted: float) -> None:
    stage = small_stage()
    variant = adjusted_fault(stage, "M43.whole", WO, wanted)
    assert variant is not None
    assert wanted / 1.3 < measure_strength(stage, WO, variant) < wanted * 1.3
    assert adjusted_fault(stage, "M43.whole", WO, 1e6) is None, "no such strength on its dial"


def test_mild_plants_are_mild() -> None:
    stage = small_stage()
    for name in ("M43.whole", "M24.norm_weight"):
        found = list(islice(mild_plants([stage], MODEL_FAULTS[name], random.Random(1)), 3))
        for at, component, variant in found:
            assert measure_strength(at, component, variant) >= 1
            assert measure_strength(at, component, variant) < 16
    assert not list(mild_plants([stage], MODEL_FAULTS["M34.rows"], random.Random(1))), (
        "edges have none"
    )


@pytest.mark.parametrize("name", STRENGTHS)
def test_every_dial_is_of_a_fault_that_sits_somewhere(name: str) -> None:
    stage, fault = small_stage(), MODEL_FAULTS[name]
    for component in islice(candidate_sites(stage, fault, random.Random(1)), 1):
        context = stage.context(component, stage.candidate())
        variant = STRENGTHS[name](context, 0.05)
        assert variant is None or measure_strength(stage, component, variant) > 0


# --------------------------------------------------------------------------------------------------
# Two runs of one candidate: equal to the bit, or UNSTABLE where a race is.

W2 = "layers.1.ffn.experts.w2"
RIGHT = RepeatedRun("M37.tile", W2, "a", "b", Verdict.UNSTABLE, (W2, "head"))


def test_a_race_is_unstable_where_it_is() -> None:
    stage, fault = small_stage(), MODEL_FAULTS["M37.tile"]
    variant = random.Random(1).choice(ways_of(stage, fault, W2))
    run = run_repeatedly(stage, fault.id, W2, variant)
    assert (run.verdict, run.blamed[0]) == (Verdict.UNSTABLE, W2)
    assert run.differs
    assert run.right


def test_what_is_written_lies_in_the_museums_folder_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is ended removes nothing: the museum removes its folder, with all in it."""
    seen: list[Path] = []

    def interrupted(*folders: Path) -> NoReturn:
        seen.extend(folders)
        raise KeyboardInterrupt

    monkeypatch.setattr(museum_repeats, "compare_runs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_repeatedly(small_stage(), root=tmp_path)
    assert [path.parent.parent for path in seen] == [tmp_path] * 2
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_twice_in_the_same_way_is_stable() -> None:
    stage, fault = small_stage(), MODEL_FAULTS["M10.nibble_order"]
    run = run_repeatedly(stage, fault.id, W2, ways_of(stage, fault, W2)[0])
    assert run.verdict is Verdict.AGREES
    assert not run.differs
    assert not run.right, "nothing was there to tell"


@pytest.mark.parametrize(
    ("made", "right"),
    [
        (RIGHT, True),
        (replace(RIGHT, blamed=("head", W2)), False),
        (replace(RIGHT, verdict=Verdict.DIFFERS), False),
        (replace(RIGHT, fault="", component="", verdict=Verdict.AGREES, blamed=()), True),
        (replace(RIGHT, fault="", component=""), False),
    ],
)
def test_what_is_right(made: RepeatedRun, right: bool) -> None:
    assert made.right == right


def test_a_run_is_written_as_recorded(tmp_path: Path) -> None:
    stage = small_stage()
    write_capture(stage.healthy, tmp_path / "a", {"weights": "here"})
    seen = Capture.open(tmp_path / "a")
    assert seen.complete
    assert [step.tokens for step in seen.steps] == [step.tokens for step in stage.healthy.steps]
    assert len(seen.calls) == len(stage.healthy.calls)
    for one, other in list(zip(seen.calls, stage.healthy.calls, strict=True))[::17]:
        assert one.component == other.component
        assert equal(seen.inputs(one), stage.healthy.inputs(other))
        assert equal(seen.outputs(one), stage.healthy.outputs(other))
