"""Prefill against decoding, chunks against the whole: one prefill says what all calls should."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.capture.files.records import CapturedStep, Phase
from degarble.harness.engine.localise import localise as module
from degarble.harness.engine.localise.input_reconstruction import joined, unvouched
from degarble.harness.engine.localise.judged_run import Judge
from degarble.harness.engine.localise.recorded_run import InMemoryRun, by_component
from degarble.harness.engine.localise.replay import TwinComponents, batches, is_ragged
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.verdict import Verdict
from degarble.suites.engine.localise_cases import V4, V32, bound, localised, replaced, run_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.engine.budget.judging import OutputResult
    from degarble.harness.model.config.config import Config

RECIPES = ("nvfp4-experts", "nvfp4-full")
ATTEND = {"v4": "layers.1.attn.attend", "v32": "layers.0.attn.attend"}


def in_chunks(config: Config, recipe: str) -> InMemoryRun:
    """Two sequences whose prompts arrive in pieces of other sizes, then token by token."""
    long, short = list(range(3, 20)), [5, 9, 2, 6, 5, 3]
    cuts = [((0, 5), (0, 3)), ((5, 6), (3, 6)), ((6, 13), None), ((13, 16), None), ((16, 17), None)]
    steps = []
    for number, both in enumerate(cuts):
        ids: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        for owner, (tokens, cut) in enumerate(zip((long, short), both, strict=True)):
            if cut is not None:
                ids += tokens[slice(*cut)]
                positions += range(*cut)
                owners += [owner] * (cut[1] - cut[0])
        phase = Phase.DECODE if len(ids) == 1 else Phase.PREFILL
        steps.append(CapturedStep(number, phase, tuple(ids), tuple(positions), tuple(owners)))
    return InMemoryRun.again(bound(config, recipe, torch.float32), steps)


def judged(
    run: InMemoryRun, config: Config, recipe: str
) -> Iterator[tuple[str, int, OutputResult]]:
    """Every sequence of every component with memory, beside one prefill."""
    known = TwinComponents.of(bound(config, recipe, torch.float64), recipe_named(recipe, config))
    steps = {step.number: step for step in run.steps}
    for name, calls in by_component(run).items():
        component = known.components[name]
        if is_ragged(component):
            found = list(joined(component, batches(run, component, calls, steps), steps))
            assert found, name
            for piece in Judge(known).component(component, found).rows.values():
                yield name, len(found), piece.judged or pytest.fail(piece.undecided)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
def test_healthy_runs_agree_with_one_prefill_however_they_were_cut(
    config: Config, recipe: str
) -> None:
    for run in (run_of(config=config, recipe=recipe, inside=torch.float32),
                in_chunks(config, recipe)):  # fmt: skip
        names = set()
        for name, count, each in judged(run, config, recipe):
            assert count == 2
            assert each.verdict is Verdict.AGREES, (name, each.worst)
            assert each.ratio <= 0.7, (name, each.worst)
            names.add(name.partition("attn.")[2])
        assert {"attend", "indexer.scores"} <= names


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_calls_with_a_gap_are_no_prefill(gone: int) -> None:
    """A call that was not captured leaves rows out; what is behind it lies elsewhere."""
    run = run_of()
    known = TwinComponents.of(
        bound(V4, "nvfp4-full", torch.float64), recipe_named("nvfp4-full", V4)
    )
    component, steps = known.components[ATTEND["v4"]], {step.number: step for step in run.steps}
    every = list(batches(run, component, by_component(run)[component.name], steps))
    made = {len(each.step_of) for each in joined(component, every, steps)}
    assert made == {13, 5}
    kept = [each for each in every if each.calls[0].step != gone]
    found = [len(each.step_of) for each in joined(component, kept, steps)]
    assert sorted(found) == ([4, 12] if gone == 2 else []), (
        "what is missing at the end is not asked"
    )


def alone(run: InMemoryRun, name: str, *, stateless: bool = False) -> InMemoryRun:
    """The same run with one component captured; maybe without what it remembers."""
    calls = []
    for call in run.calls:
        if call.component == name:
            inputs = {n: e for n, e in call.inputs.items() if not stateless or "state_" not in n}
            calls.append(replace(call, inputs=inputs))
    tensors = list(run._tensors)
    for call in calls:
        before, after = tensors[call.number]
        tensors[call.number] = ({n: before[n] for n in call.inputs}, after)
    facts = {"filters": {"components": [name]}}
    return replace(run, calls=calls, facts=facts, _tensors=tensors)


@pytest.mark.parametrize("family", ["v4", "v32"])
def test_memory_that_nobody_vouches_for_is_held_against_one_prefill(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, name = (V4, ATTEND["v4"]) if family == "v4" else (V32, ATTEND["v32"])
    state = "state_window" if family == "v4" else "state_rows"
    healthy = run_of(config=config, inside=torch.float32)
    for stateless in (False, True):
        found = localised(alone(healthy, name, stateless=stateless), config)
        assert found.verdict is Verdict.AGREES, (found.origins, found.unjudged)
    stale = run_of(name, edge=replaced(state, lambda rows: rows.roll(1, 0)), config=config)
    seen = alone(stale, name)
    (origin,) = localised(seen, config).origins
    assert origin.component == name
    assert (origin.where["beside"], origin.where["phase"]) == ("one prefill", "decode")
    assert int(origin.where["first position"]) >= 3
    assert "what wrote its memory was not captured" in origin.sentence
    monkeypatch.setattr(module, "unvouched", lambda *_: False)
    assert localised(seen, config).verdict is Verdict.AGREES, "replay believes what arrived"


def test_a_complete_capture_is_vouched_for_by_its_wiring() -> None:
    run = run_of()
    known = TwinComponents.of(
        bound(V4, "nvfp4-full", torch.float64), recipe_named("nvfp4-full", V4)
    )
    calls = by_component(run)
    assert not any(unvouched(known.components[name], calls) for name in calls)
    few = {ATTEND["v4"]: calls[ATTEND["v4"]]}
    assert unvouched(known.components[ATTEND["v4"]], few)
