"""The museum's models and cases: written by `degarble quantise`, all from the seed."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.files import read_small_file
from degarble.harness.capture.files.records import Phase
from degarble.harness.checkpoint.transform.quantise.conversion_report import REPORT
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.engine.faults.negative_controls import CONTROLS, WEIGHT_CONTROLS
from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.recorded_run import by_component
from degarble.harness.museum.cases import (
    IN_CHUNKS,
    JOINING,
    KEYS,
    SCHEDULES,
    MuseumCase,
    MuseumModel,
    Stage,
    cases_of_fault,
    equal,
    healthy_cases,
    planting_cases,
    prepare,
    prompt_ids,
    steps_of,
)
from degarble.harness.report.verdict import Verdict
from degarble.references.tiny.configs import TINY_V32
from degarble.suites.museum.museum_stages import KEY, root, small_stage

if TYPE_CHECKING:
    from torch import Tensor


# --------------------------------------------------------------------------------------------------
# The museum's models: written by the job behind `degarble quantise`, read as they lie on disk.


def test_the_checkpoint_is_what_quantise_writes() -> None:
    folder = root() / KEY.folder
    told = json.loads(read_small_file(folder / REPORT, 1 << 24))
    assert told["recipe"] == KEY.recipe
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.model == TINY_V32


def test_what_is_there_already_stays() -> None:
    before = {path.name: path.stat().st_mtime_ns for path in (root() / KEY.folder).iterdir()}
    prepare(root(), (KEY,))
    after = {path.name: path.stat().st_mtime_ns for path in (root() / KEY.folder).iterdir()}
    assert before == after
    assert not list(root().glob("*.draft"))


def test_candidate_and_twin_differ_in_their_sums_alone() -> None:
    model = MuseumModel.open(KEY, root())
    candidate, twin = model.candidate(), model.twin()
    assert candidate.weights is twin.weights
    assert candidate.numerics.products == torch.float32
    assert twin.numerics.products == torch.float64
    assert candidate.calls.keys() == twin.calls.keys()
    scale = model.weights["layers.1.ffn.experts.0.w2"].input_scale
    assert scale is not None
    assert float(scale) > 0


def test_weights_are_read_before_the_files_are_closed() -> None:
    model = MuseumModel.open(KEY, root())
    for name in ("embed", "layers.0.attn.wo", "layers.1.ffn.experts.7.w3"):
        assert bool(model.weights[name].values(torch.float64).isfinite().all())


def test_prompts_are_documents_of_the_language() -> None:
    assert prompt_ids(3, 40) == prompt_ids(3, 40)
    assert len(prompt_ids(3, 7)) == 7
    assert len({prompt_ids(seed, 40) for seed in range(20)}) == 20


# --------------------------------------------------------------------------------------------------
# Cases: prompts follow from the seed, healthy ones vary, and a taped run is the run itself.

PLANTED = "layers.1.attn.wo"


@pytest.fixture(scope="module")
def stage() -> Stage:
    return small_stage()


def test_a_healthy_run_agrees(stage: Stage) -> None:
    found = localise(stage.twin, stage.model.recipe, stage.healthy)
    assert found.verdict is Verdict.AGREES
    assert not found.unjudged


def test_a_taped_run_computes_what_is_new_and_gives_the_same_bits(stage: Stage) -> None:
    computed: list[str] = []

    def planted(bound_calls: dict[str, object]) -> None:
        plain = stage.candidate().calls[PLANTED]
        bound_calls[PLANTED] = lambda inputs, weights: {
            name: 2 * tensor for name, tensor in plain(inputs, weights).items()
        }

    plain, taped = stage.candidate(), stage.taped()
    planted(plain.calls)  # type: ignore[arg-type]
    planted(taped.calls)  # type: ignore[arg-type]
    for name, tape in taped.calls.items():
        if hasattr(tape, "known"):
            tape.call = _counting(tape.call, name, computed)  # type: ignore[attr-defined]
    a, b = stage.run(plain), stage.run(taped)
    assert [call.component for call in a.calls] == [call.component for call in b.calls]
    for left, right in zip(a.calls, b.calls, strict=True):
        assert equal(a.inputs(left), b.inputs(right)), left.component
        assert equal(a.outputs(left), b.outputs(right)), left.component
    assert not [name for name in computed if name.startswith("layers.0.attn")]
    assert "layers.1.ffn.norm" in computed
    rest = stage.rest(b)
    assert PLANTED not in rest.judged
    assert "layers.0.attn.wo" in rest.judged
    found = localise(stage.twin, stage.model.recipe, rest)
    assert [origin.component for origin in found.origins] == [PLANTED]


def _counting(call: object, name: str, computed: list[str]) -> object:
    def counted(inputs: dict[str, Tensor], weights: object) -> object:
        computed.append(name)
        return call(inputs, weights)  # type: ignore[operator]

    return counted


def test_a_control_sits_wherever_it_can(stage: Stage) -> None:
    wrapped = Stage(replace(stage.case, control="order_of_sums"), stage.model, stage.twin)
    plain, other = stage.candidate().calls, wrapped.candidate().calls
    changed = {name for name, call in other.items() if not isinstance(call, partial)}
    assert all(isinstance(call, partial) for call in plain.values())
    assert changed
    assert all(CONTROLS[0].applies_to(stage.context(name)) for name in changed)


def test_the_rest_of_a_healthy_run_is_nothing(stage: Stage) -> None:
    rest = stage.rest(stage.run(stage.taped()))
    assert rest.judged == by_component(stage.healthy).keys()
    assert all(not kept.at for call in rest.calls for kept in call.inputs.values())


def test_every_model_is_planted_and_prompts_follow_from_the_seed() -> None:
    cases = planting_cases()
    assert tuple(case.key for case in cases) == KEYS
    assert cases[0].prompts == planting_cases()[0].prompts
    assert len({case.prompts for case in planting_cases(0) + planting_cases(9)}) == 2 * len(KEYS)
    assert [len(ids) for ids in cases[1].prompts] == list(cases[1].lengths)
    assert max(torch.tensor(cases[0].prompts[0])) < 512


def test_healthy_cases_differ_in_every_way() -> None:
    cases = list(healthy_cases(200))
    assert len(set(cases)) == len({str(case) for case in cases}) == 200
    ways = ("key", "lengths", "new_tokens", "source", "products", "absorbed", "schedule")
    for way in ways:
        assert len({getattr(case, way) for case in cases}) > 1, way
    controls = {*(each.id for each in (*CONTROLS, *WEIGHT_CONTROLS)), "window_shift"}
    assert {case.control for case in cases} == {"", *controls}
    assert {case.schedule for case in cases} == set(SCHEDULES)


def test_prompts_are_fed_in_chunks_or_one_after_the_other() -> None:
    case = MuseumCase(KEY, 1, (100, 7), new_tokens=2, schedule=IN_CHUNKS)
    steps = steps_of(case)
    assert [len(step.tokens) for step in steps] == [55, 49, 5, 1, 1]
    joined = steps_of(replace(case, schedule=JOINING))
    assert [len(step.tokens) for step in joined] == [100, 8, 2, 1]
    assert [step.phase for step in joined] == [Phase.PREFILL] * 2 + [Phase.DECODE] * 2
    for made in (steps, joined):
        for owner, length in enumerate(case.lengths):
            places = [
                place
                for step in made
                for whose, place in zip(step.sequences, step.positions, strict=True)
                if whose == owner
            ]
            assert places == list(range(length + case.new_tokens))


@pytest.mark.parametrize("schedule", [IN_CHUNKS, JOINING])
def test_a_healthy_run_agrees_however_it_is_fed(stage: Stage, schedule: str) -> None:
    case = MuseumCase(KEY, 1, (60, 7), schedule=schedule)
    made = Stage.open(case, root(), {KEY: stage.model})
    found = localise(made.twin, made.model.recipe, made.healthy)
    assert (found.verdict, found.unjudged) == (Verdict.AGREES, ())


@pytest.mark.parametrize("control", [control.id for control in WEIGHT_CONTROLS])
def test_legal_weights_are_healthy_and_other_ones(stage: Stage, control: str) -> None:
    made = Stage.open(replace(stage.case, control=control), root(), {KEY: stage.model})
    found = localise(made.twin, made.model.recipe, made.healthy)
    assert (found.verdict, found.unjudged) == (Verdict.AGREES, ())
    last = made.healthy.logits[0]
    assert not torch.equal(last, stage.healthy.logits[0]), "they change something"


def test_faults_without_effect_elsewhere_have_cases_of_their_own() -> None:
    assert cases_of_fault("M10.nibble_order") == cases_of_fault("M08.underflow") == ()
    assert {case.control for case in cases_of_fault("M03.first")} == {"own_scales"}
    assert {case.key.model for case in cases_of_fault("M08.flushed")} == {"v4", "v32"}
