"""Components judged elsewhere: what comes back as numbers makes the same result."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch

from degarble.harness.commands.check.output_statistics import StatisticsCollector
from degarble.harness.engine.conventions.registry import LEARNED
from degarble.harness.engine.localise.answers import JudgingTask, RowNumbers, TaskAnswer, tasks_of
from degarble.harness.engine.localise.judged_run import OutputRow
from degarble.harness.engine.localise.localise import During, Localisation, localise
from degarble.harness.engine.localise.recorded_run import InMemoryRun, same_bits
from degarble.harness.model.components import components
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.page import from_plain, to_plain
from degarble.suites.engine.conventions.convention_cases import V32, model
from degarble.suites.engine.localise_cases import (
    ATTN,
    PROMPTS,
    V4,
    bound,
    plain,
    replaced,
    run_of,
    scaled,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from degarble.harness.engine.localise.localise import Localised

RECIPE = recipe_named("nvfp4-full", V4)


class Elsewhere:
    """Judges every task by a localisation of its own, last task first, and hands over JSON."""

    def __init__(self, work: Localisation) -> None:
        self.work = work
        self.tasks: list[JudgingTask] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def each(
        self, tasks: Sequence[JudgingTask], here: Callable[[JudgingTask], TaskAnswer]
    ) -> Iterator[tuple[JudgingTask, TaskAnswer]]:
        del here
        for task in reversed(tasks):
            self.tasks.append(task)
            text = json.dumps(to_plain(self.work.told(task)))
            yield task, from_plain(TaskAnswer, json.loads(text), "answer")


def both(run: InMemoryRun, twins: Sequence[Any], recipe: Any, reference: Any = None) -> Any:
    """Judge a run here and elsewhere; `twins` are equal and separate."""
    seen = [StatisticsCollector(each.config) for each in twins]
    here = localise(twins[0], recipe, run, reference, During(looked=seen[0]))
    looking = During(looked=StatisticsCollector(twins[1].config))
    elsewhere = Elsewhere(Localisation.begun(twins[1], recipe, run, reference, looking))
    told = localise(twins[0], recipe, run, reference, During(looked=seen[1], elsewhere=elsewhere))
    assert {name for task in elsewhere.tasks for name in task.names} == {
        call.component for call in run.calls
    }
    for row in here.rows:
        name = row.component.name, row.output
        assert seen[0].measured_output(*name) == seen[1].measured_output(*name), name
    return here, told, elsewhere


def facts(found: Localised) -> list[Any]:
    """Everything that a result says, without its tensors."""
    rows = [to_plain([row.component.name, RowNumbers.of(row)]) for row in found.rows]
    origins = [
        (str(each.site), each.component, each.kind, each.sentence, dict(each.where), each.steps)
        for each in found.origins
    ]
    rest = (found.verdict, found.first_non_finite, found.unstable, found.unjudged, found.notes)
    return [rows, origins, rest, found.conventions]


@pytest.mark.parametrize(
    ("name", "way", "edge"),
    [
        (f"{ATTN}wq_b", scaled("out", 1.25), None),
        pytest.param(
            f"{ATTN}wq_b", None, replaced("codes", lambda x: x.roll(1, 0)), marks=pytest.mark.slow
        ),
        pytest.param("head", scaled("out", math.nan), None, marks=pytest.mark.slow),
    ],
    ids=["output", "edge", "nan"],
)
def test_the_result_is_the_same_wherever_a_component_was_judged(
    name: str, way: Any, edge: Any
) -> None:
    run = run_of(name, way, edge)
    twin = bound(V4, "nvfp4-full")
    here, told, _ = both(run, (twin, twin), RECIPE, plain(V4))
    assert facts(told) == facts(here)
    assert [each.component for each in here.origins] == [name]
    assert (here.first_non_finite is None) == (name != "head")
    for left, right in zip(here.origins, told.origins, strict=True):
        assert (left.record is None) == (right.record is None)
        if left.record is not None and right.record is not None:
            assert left.record.outputs.keys() == right.record.outputs.keys()
            for output, tensor in right.record.outputs.items():
                assert same_bits(left.record.outputs[output], tensor)


def test_conventions_are_learned_from_numbers_as_well() -> None:
    recipe = recipe_named("nvfp4-full", V32)
    candidate = model(V32, torch.float32, {"attention_in_storage_dtype": False})
    run = InMemoryRun.from_prompts(candidate, PROMPTS, 3)
    twins = [model(V32, torch.float64, {}) for _ in range(2)]
    here, told, elsewhere = both(run, twins, recipe)
    assert facts(told) == facts(here)
    assert [each.source for each in told.conventions] == [LEARNED]
    assert any(task.briefly for task in elsewhere.tasks)
    assert any(task.values and not task.briefly for task in elsewhere.tasks)


def test_a_quantisation_and_its_linears_are_one_task() -> None:
    tasks = tasks_of(components(V4, RECIPE), {})
    (found,) = [task for task in tasks if f"{ATTN}wq_b" in task.names]
    assert found.names[0] == f"{ATTN}wq_b.act_quant"
    assert sorted(name for task in tasks for name in task.names) == sorted(
        each.name for each in components(V4, RECIPE)
    )


def test_every_field_of_a_row_is_handed_over() -> None:
    assert {each.name for each in fields(OutputRow)} - {"component"} == {
        each.name for each in fields(RowNumbers)
    }
