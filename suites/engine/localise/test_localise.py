"""Healthy runs raise no alarm; one planted fault is one origin, at the component to blame."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from degarble.harness.capture.files.records import CapturedCall, CapturedStep, CapturedTensor, Phase
from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.faults.model_faults import ComponentContext
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.engine.localise import judged_run
from degarble.harness.engine.localise import localise as module
from degarble.harness.engine.localise.discrepancy import DiscrepancyKind
from degarble.harness.engine.localise.input_reconstruction import joined_prefill, lacks_producers
from degarble.harness.engine.localise.judged_run import (
    Judge,
    OutputRow,
    discrepancy_of_outputs,
    missing_calls,
    repeats_apart,
)
from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.recorded_run import InMemoryRun, by_component
from degarble.harness.engine.localise.replay import Batch, TwinComponents, batches, is_ragged
from degarble.harness.model.config.config import small_v32
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import BoundModel
from degarble.suites.engine.localise_cases import (
    ATTN,
    FFN,
    V4,
    V32,
    bound,
    localised,
    plain,
    replaced,
    run_of,
    scaled,
)
from degarble.suites.museum.museum_stages import small_stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.budget.budget import OutputResult
    from degarble.harness.engine.localise.recorded_run import RecordedRun
    from degarble.suites.support.configs import DeepSeekConfig


# --------------------------------------------------------------------------------------------------
# Healthy runs raise no alarm; one planted fault is one origin, at the place that is to blame.


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
def test_a_healthy_run_agrees_everywhere_whatever_its_sums_are_made_in(
    config: DeepSeekConfig,
) -> None:
    found = localised(run_of(config=config, inside=torch.float32), config)
    assert found.verdict is Verdict.AGREES, found.origins
    assert not found.origins
    assert not found.unjudged
    assert max(row.ratio for row in found.rows) <= 0.7
    quality = [row.cosines["candidate and reference"].cosine for row in found.rows if row.cosines]
    assert 0.8 < min(each for each in quality if each == each) < 0.999  # noqa: PLR0124  NaN
    for row in found.rows:
        if row.cosines and not torch.tensor(row.cosines["candidate and twin"].cosine).isnan():
            assert row.cosines["candidate and twin"].cosine > 0.999


def nan_at_the_end(x: Tensor) -> Tensor:
    x = x.clone()
    x[-1, 5] = torch.nan
    return x


@pytest.mark.parametrize(
    ("name", "way", "site"),
    [
        (f"{FFN}experts.w2", scaled("out", 1.05), f"{FFN}experts.w2.out"),
        (f"{ATTN}wq_a.act_quant", replaced("x", lambda x: x.roll(1, -1)), None),
        (f"{ATTN}kv_norm_rope", replaced("positions", lambda p: p + 1), None),
        (f"{ATTN}hc_pre", scaled("mix", 1.1), f"{ATTN}hc_pre.out.mix"),
        ("head", scaled("out", 1.01), "head.out"),
    ],
)
def test_a_wrong_component_is_the_only_origin(
    name: str, way: Callable[..., Any], site: str | None
) -> None:
    found = localised(run_of(name, way))
    assert found.verdict is Verdict.DIFFERS
    (origin,) = found.origins
    assert (origin.kind, origin.component) == (DiscrepancyKind.OUTPUT, name)
    assert site is None or str(origin.site) == site
    assert origin.judged is not None
    assert origin.judged.ratio > 1
    assert origin.record is not None
    assert origin.record.expected.keys() == origin.record.outputs.keys()


@pytest.mark.parametrize(
    ("name", "inp", "change", "blamed"),
    [
        (f"{ATTN}q_norm", "x", lambda x: x.roll(1, 0), f"{ATTN}q_norm"),
        (f"{ATTN}attend", "window", lambda x: x * 1.125, f"{ATTN}kv_write"),
        (f"{ATTN}attend", "state_window", torch.zeros_like, f"{ATTN}kv_write"),
        (f"{ATTN}attend", "state_compressed", lambda x: x[:-1], f"{ATTN}compressor.write"),
        (f"{ATTN}compressor.pool", "state_gate", torch.zeros_like, f"{ATTN}compressor.pool"),
        (
            f"{ATTN}indexer.scores",
            "state_keys",
            lambda x: x.flip(0),
            f"{ATTN}indexer.compressor.pool",
        ),
        (f"{ATTN}kv_norm_rope", "positions", lambda p: p * 0, f"{ATTN}kv_norm_rope"),
        ("embed", "tokens", lambda t: t + 1, "embed"),
    ],
)
def test_a_wrong_input_is_the_consumers_and_memory_its_writers(
    name: str, inp: str, change: Callable[[Tensor], Tensor], blamed: str
) -> None:
    found = localised(run_of(name, edge=replaced(inp, change)))
    assert found.verdict is Verdict.DIFFERS
    (origin,) = [
        discrepancy for discrepancy in found.origins if discrepancy.kind is DiscrepancyKind.EDGE
    ]
    assert (origin.component, str(origin.site)) == (blamed, f"{name}.in.{inp}")
    assert len(found.origins) == 1
    assert origin.context.name == name
    assert origin.record is not None
    if origin.record.implied[inp].shape == origin.record.inputs[inp].shape:
        assert not torch.equal(origin.record.implied[inp], origin.record.inputs[inp])


def test_the_first_value_that_is_not_finite_has_its_producer() -> None:
    def spoilt(call: Any, inputs: Any, weights: Any) -> Any:
        return {"out": nan_at_the_end(call(inputs, weights)["out"])}

    run = run_of(f"{ATTN}wo_a", lambda call: partial(spoilt, call), recipe="bf16")
    found = localised(run, recipe="bf16")
    (origin,) = found.origins
    first = found.first_non_finite
    assert origin.component == f"{ATTN}wo_a"
    assert first is not None
    assert (first.component, first.step, first.row, first.inputs_as_well) == (
        f"{ATTN}wo_a", 0, 13, False,
    )  # fmt: skip
    edge = replaced("x", nan_at_the_end)
    found = localised(run_of(f"{FFN}norm", edge=edge, recipe="bf16"), recipe="bf16")
    (origin,) = found.origins
    assert (origin.kind, origin.component) == (DiscrepancyKind.EDGE, f"{FFN}norm")
    assert found.first_non_finite is not None
    assert found.first_non_finite.inputs_as_well


def test_inputs_that_were_written_over_are_the_writers() -> None:
    def writes(call: Any, inputs: Any, weights: Any) -> Any:
        made = call(inputs, weights)
        inputs["x"].mul_(1.5)
        return made

    found = localised(run_of(f"{ATTN}wq_a.act_quant", lambda call: partial(writes, call)))
    (origin,) = found.origins
    assert (origin.kind, origin.component) == (DiscrepancyKind.CHANGED, f"{ATTN}wq_a.act_quant")
    quiet = localised(run_of(f"{ATTN}q_norm", lambda call: partial(writes, call)))
    assert quiet.verdict is Verdict.AGREES
    assert "nobody read them later" in quiet.notes[0]


def test_a_product_of_unquantised_operands_is_called_a_fallback() -> None:
    seen: dict[str, Tensor] = {}

    def spied(call: Any, inputs: Any, weights: Any) -> Any:
        seen["x"] = inputs["x"]
        return call(inputs, weights)

    def fell_back(_call: Any, _inputs: Any, weights: Any) -> Any:
        return plain(V4).calls[name]({"x": seen["x"]}, weights)

    name, candidate = f"{ATTN}wo_b", bound(V4, "nvfp4-full", torch.float64)
    healthy = candidate.calls[f"{name}.act_quant"]
    candidate.calls[f"{name}.act_quant"] = partial(spied, healthy)
    try:
        run = run_of(name, lambda call: partial(fell_back, call))
    finally:
        candidate.calls[f"{name}.act_quant"] = healthy
    (origin,) = localised(run).origins
    assert (origin.kind, origin.component) == (DiscrepancyKind.FALLBACK, name)


def test_missing_calls_outputs_of_other_forms_and_unknown_names_are_reported() -> None:
    run = run_of()
    name = f"{FFN}norm"
    for at, call in enumerate(run.calls):
        if call.component == name and call.step == 1:
            del run.calls[at]
            run._tensors.pop(at)
    run.calls = [replace(call, number=at) for at, call in enumerate(run.calls)]
    run.calls[0] = replace(run.calls[0], component="layers.9.mystery")
    found = localised(run)
    assert ("layers.9.mystery", "no component of this model") in found.unjudged
    (origin,) = found.origins
    assert (origin.kind, origin.component, origin.steps) == (DiscrepancyKind.MISSING, name, (1,))

    def cut(call: Any, inputs: Any, weights: Any) -> Any:
        return {"out": call(inputs, weights)["out"].half()}

    (origin,) = localised(run_of(f"{ATTN}wq_a", lambda call: partial(cut, call))).origins
    assert (origin.kind, origin.component) == (DiscrepancyKind.FORM, f"{ATTN}wq_a")
    assert "float16 in place of" in origin.sentence


@pytest.mark.parametrize("size", [0, 1, 7])
def test_an_output_of_another_size_is_an_origin_and_no_fault_is_tried(size: int) -> None:
    run, name = run_of(), f"{ATTN}wq_a"
    for at, call in enumerate(run.calls):
        if call.component == name and call.step == 1:
            inputs, outputs = run._tensors[at]
            run._tensors[at] = (inputs, {"out": outputs["out"].flatten()[:size]})
    origins = localised(run).origins
    (form,) = [origin for origin in origins if origin.kind is DiscrepancyKind.FORM]
    assert form.component == name
    assert form.record is None or not diagnose(form.context, [form.record, *form.more]).named


def test_uncaptured_calls_prove_nothing_and_two_answers_are_unstable() -> None:
    run = run_of()
    name = f"{ATTN}hc_pre"
    for at, call in enumerate(run.calls):
        if call.component == name:
            inputs, outputs = run._tensors[at]
            run._tensors[at] = (inputs, {"out": outputs["out"]})
            run.calls[at] = replace(call, outputs={"out": call.outputs["out"]})
    found = localised(run)
    assert found.verdict is Verdict.AGREES
    assert [row.output for row in found.rows if row.component.name == name] == ["out"]
    for at, call in enumerate(run.calls):
        if call.component == "norm":
            given = {n: kept._replace(sha256="a" * 64) for n, kept in call.inputs.items()}
            made = {n: kept._replace(sha256=f"{at:064}") for n, kept in call.outputs.items()}
            run.calls[at] = replace(call, inputs=given, outputs=made)
    found = localised(run)
    assert (found.verdict, found.unstable) == (Verdict.UNSTABLE, ("norm",))
    first = CapturedTensor("BF16", (1, 4), "a" * 64, "here")
    calls = [CapturedCall(n, n, name, {"x": first}, {"out": first}) for n in range(2)]
    assert not repeats_apart(calls)
    other = replace(calls[1], outputs={"out": first._replace(sha256="b" * 64)})
    assert repeats_apart([calls[0], other])
    assert not repeats_apart([calls[0], replace(other, inputs=other.outputs)])
    assert not repeats_apart(
        [replace(captured_call, inputs={}) for captured_call in (calls[0], other)]
    )


@pytest.mark.parametrize("place", ["ffn.experts.w13", "ffn.experts.combine"])
def test_what_a_captured_step_left_is_known_by_earlier_calls_alone(place: str) -> None:
    """Choices and weights of the first decoded token, in the second one: nothing else tells."""
    stage, name = small_stage(), f"layers.1.{place}"
    (variant,) = MODEL_FAULTS["M36.metadata"].variants(stage.context(name))
    seen = stage.rest(stage.run(stage.taped(), {name: variant}))
    (discrepancy,) = localise(stage.twin, stage.model.recipe, seen).origins
    assert discrepancy.record is not None
    assert [record.step for record in discrepancy.record.earlier] == [0, 1]
    named = diagnose(discrepancy.context, discrepancy.record).named
    assert [fault.id for fault in named] == ["M36.metadata"]
    assert "of step 1 reproduces" in named[0].evidence
    assert not diagnose(discrepancy.context, replace(discrepancy.record, earlier=())).named


# --------------------------------------------------------------------------------------------------
# Prefill against decoding, chunks against the whole: one prefill says what all calls should.

RECIPES = ("nvfp4-experts", "nvfp4-full")
ATTEND = {"v4": "layers.1.attn.attend", "v32": "layers.0.attn.attend"}


def in_chunks(config: DeepSeekConfig, recipe: str) -> InMemoryRun:
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
    run: InMemoryRun, config: DeepSeekConfig, recipe: str
) -> Iterator[tuple[str, int, OutputResult]]:
    """Every sequence of every component with memory, beside one prefill."""
    known = TwinComponents.from_twin(
        bound(config, recipe, torch.float64), recipe_named(recipe, config)
    )
    steps = {step.number: step for step in run.steps}
    for name, calls in by_component(run).items():
        component = known.components[name]
        if is_ragged(component):
            found = list(joined_prefill(component, batches(run, component, calls, steps), steps))
            assert found, name
            for piece in Judge(known).component(component, found).rows.values():
                yield name, len(found), piece.judged or pytest.fail(piece.undecided)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
def test_healthy_runs_agree_with_one_prefill_however_they_were_cut(
    config: DeepSeekConfig, recipe: str
) -> None:
    for run in (run_of(config=config, recipe=recipe, inside=torch.float32),
                in_chunks(config, recipe)):  # fmt: skip
        names = set()
        for name, count, result in judged(run, config, recipe):
            assert count == 2
            assert result.verdict is Verdict.AGREES, (name, result.worst)
            assert result.ratio <= 0.7, (name, result.worst)
            names.add(name.partition("attn.")[2])
        assert {"attend", "indexer.scores"} <= names


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_calls_with_a_gap_are_no_prefill(gone: int) -> None:
    """A call that was not captured leaves rows out; what is behind it lies elsewhere."""
    run = run_of()
    known = TwinComponents.from_twin(
        bound(V4, "nvfp4-full", torch.float64), recipe_named("nvfp4-full", V4)
    )
    component, steps = known.components[ATTEND["v4"]], {step.number: step for step in run.steps}
    every = list(batches(run, component, by_component(run)[component.name], steps))
    made = {len(batch.step_of) for batch in joined_prefill(component, every, steps)}
    assert made == {13, 5}
    kept = [batch for batch in every if batch.calls[0].step != gone]
    found = [len(batch.step_of) for batch in joined_prefill(component, kept, steps)]
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
def test_memory_without_a_captured_producer_is_compared_with_one_prefill(
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
    monkeypatch.setattr(module, "lacks_producers", lambda *_: False)
    assert localised(seen, config).verdict is Verdict.AGREES, "replay believes what arrived"


def test_a_complete_capture_is_vouched_for_by_its_wiring() -> None:
    run = run_of()
    known = TwinComponents.from_twin(
        bound(V4, "nvfp4-full", torch.float64), recipe_named("nvfp4-full", V4)
    )
    calls = by_component(run)
    assert not any(lacks_producers(known.components[name], calls) for name in calls)
    few = {ATTEND["v4"]: calls[ATTEND["v4"]]}
    assert lacks_producers(known.components[ATTEND["v4"]], few)


# --------------------------------------------------------------------------------------------------
# A component judged briefly: small calls first, and no further than the first that differs.


@pytest.mark.parametrize(("briefly", "asked"), [(False, [3, 1, 2, 4]), (True, [1, 2])])
def test_a_brief_judgement_ends_at_the_first_finding(
    briefly: bool, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def take(_judge: Judge, made: Any, rows: int) -> None:
        seen.append(rows)
        verdict = Verdict.DIFFERS if rows == 2 else Verdict.AGREES
        made.rows[str(rows)] = OutputRow(made.component, str(rows), verdict)

    monkeypatch.setattr(judged_run, "replayed", lambda _known, batch: len(batch.step_of))
    monkeypatch.setattr(Judge, "_take", take)
    batches: Any = [SimpleNamespace(step_of=range(rows)) for rows in (3, 1, 2, 4)]
    nothing: Any = None
    assert Judge(nothing).component(nothing, batches, briefly=briefly).differs
    assert seen == asked


# --------------------------------------------------------------------------------------------------
# Silent fallback: unquantised operands are distinguished from every other difference.


def bf16_weights(name: str, config: DeepSeekConfig) -> Any:
    """Codes arrive as they should, and are multiplied with the weights of the BF16 model."""

    def faulty(call: Any, inputs: Any, _weights: Any) -> Any:
        return call(inputs, plain(config).weights_of(name))

    return lambda call: partial(faulty, call)


def fell_back(name: str, config: DeepSeekConfig, recipe: str) -> InMemoryRun:
    """Neither activations nor weights are quantised, though the codes were made."""
    seen: dict[str, Tensor] = {}
    maker = f"{name}.act_quant"
    candidate = bound(config, recipe, torch.float64)
    healthy = candidate.calls[maker]

    def spied(inputs: Any, weights: Any) -> Mapping[str, Tensor]:
        seen["x"] = inputs["x"]
        return healthy(inputs, weights)

    def faulty(_call: Any, inputs: Any, _weights: Any) -> Mapping[str, Tensor]:
        rest = {n: e for n, e in inputs.items() if n == "experts"}
        model = plain(config)
        return model.calls[name]({"x": seen["x"], **rest}, model.weights_of(name))

    candidate.calls[maker] = spied
    try:
        return run_of(name, lambda call: partial(faulty, call), config=config, recipe=recipe)
    finally:
        candidate.calls[maker] = healthy


CASES = [
    (V4, "nvfp4-full", f"{ATTN}wo_b"),
    (V4, "nvfp4-full", f"{ATTN}wq_a"),
    (V4, "nvfp4-experts", f"{FFN}experts.w13"),
    (V32, "nvfp4-full", "layers.0.attn.wo"),
]


@pytest.mark.parametrize(("config", "recipe", "name"), CASES)
def test_bf16_weights_and_activations_are_called_too_good(
    config: DeepSeekConfig, recipe: str, name: str
) -> None:
    (origin,) = localised(fell_back(name, config, recipe), config, recipe).origins
    assert (origin.kind, origin.component) == (DiscrepancyKind.FALLBACK, name)
    assert origin.where["operands"] == "unquantised"
    assert "nearer to the BF16 reference than its twin is" in origin.sentence


@pytest.mark.parametrize(("config", "recipe", "name"), CASES)
def test_bf16_weights_alone_are_too_good_as_well(
    config: DeepSeekConfig, recipe: str, name: str
) -> None:
    run = run_of(name, bf16_weights(name, config), config=config, recipe=recipe)
    (origin,) = localised(run, config, recipe).origins
    assert (origin.kind, origin.component) == (DiscrepancyKind.FALLBACK, name)


@pytest.mark.parametrize(("name", "factor"), [(f"{ATTN}wo_b", 0.98), (f"{ATTN}wq_a", 0.96)])
def test_a_gain_that_happens_to_help_is_none(name: str, factor: float) -> None:
    """Shrinking a noisy output brings it nearer to what was meant."""
    run = run_of(name, scaled("out", factor))
    (origin,) = localised(run).origins
    assert (origin.kind, origin.component) == (DiscrepancyKind.OUTPUT, name)


def test_a_gain_towards_a_reference_of_the_same_direction_is_no_fallback() -> None:
    """Nearer by far, and turned no less: no operand made that."""
    name = f"{ATTN}wq_a"
    reference = bf16_times(name, 0.5)
    run = run_of(name, scaled("out", 0.5))
    recipe, twin = recipe_named("nvfp4-full", V4), bound(V4, "nvfp4-full", torch.float64)
    (origin,) = localise(twin, recipe, run, reference).origins
    assert (origin.kind, origin.component) == (DiscrepancyKind.OUTPUT, name)


def bf16_times(name: str, gain: float) -> BoundModel:
    """The BF16 model, one of whose components has another gain."""
    model = plain(V4)
    other = BoundModel(V4, model.numerics, {n: model.weights[n] for n in model.weights})
    other.calls[name] = scaled("out", gain)(other.calls[name])
    return other


def test_a_step_that_a_killed_run_left_unfinished_lacks_nothing() -> None:
    """Its last step ended early; a call that an earlier one lacks is missing."""
    run, name = run_of(), f"{FFN}norm"
    known = TwinComponents.from_twin(
        bound(V4, "nvfp4-full", torch.float64), recipe_named("nvfp4-full", V4)
    )
    last = run.steps[-1].number
    for complete, expected in ((False, {1}), (True, {1, last})):
        calls = [c for c in run.calls if c.component != name or c.step == 0]
        killed = SimpleNamespace(facts={}, steps=run.steps, calls=calls, complete=complete)
        (discrepancy,) = missing_calls(known, cast("RecordedRun", killed))
        assert (discrepancy.kind, discrepancy.component) == (DiscrepancyKind.MISSING, name)
        assert set(discrepancy.steps) == expected


def test_without_a_reference_nothing_is_said_of_it() -> None:
    name, recipe = f"{ATTN}wq_a", recipe_named("nvfp4-full", V4)
    run = run_of(name, bf16_weights(name, V4))
    (origin,) = localise(bound(V4, "nvfp4-full", torch.float64), recipe, run).origins
    assert origin.kind is DiscrepancyKind.OUTPUT


@pytest.mark.parametrize("fault", ["M27.left_out", "M27.applied_twice", "M26.weights"])
@pytest.mark.parametrize(
    "config",
    [dataclasses.replace(V4, num_hash_layers=1), small_v32(num_hidden_layers=4)],
    ids=["v4", "v32"],
)
def test_a_choice_that_fell_the_other_way_hides_no_cause(
    config: DeepSeekConfig, fault: str
) -> None:
    """Row 0 lies on the edge of a choice, and the candidate took the other expert there."""
    recipe, twin = recipe_named("nvfp4-full", config), bound(config, "nvfp4-full", torch.float64)
    known = TwinComponents.from_twin(twin, recipe)
    name = next(
        n for n in reversed(list(known.components)) if n.endswith("ffn.topk") and "mtp" not in n
    )
    call, weights = twin.calls[name], twin.weights_of(name)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(12, config.n_routed_experts, generator=generator, dtype=torch.float64)
    before, behind = on_the_edge(lambda x: call({"logits": x}, weights)["experts"], logits)
    context = ComponentContext(twin, known.components[name], recipe)
    (variant, *_) = MODEL_FAULTS[fault].variants(context)
    outputs = dict(variant.apply(call)({"logits": behind}, weights))
    other = variant.apply(call)({"logits": before}, weights)
    outputs = {n: torch.cat((other[n][:1], output[1:])) for n, output in outputs.items()}
    zeros = torch.zeros(12, dtype=torch.int64)
    batch = Batch(
        known.components[name], (CapturedCall(0, 0, name, {}, {}),), {"logits": behind}, outputs,
        zeros, zeros, (slice(0, 12),),
    )  # fmt: skip
    component = Judge(known).component(known.components[name], [batch])
    assert component.rows["experts"].flips == 1
    step = CapturedStep(0, Phase.PREFILL, (5,) * 12, tuple(range(12)), (0,) * 12)
    discrepancy = discrepancy_of_outputs(known, component, {0: step})
    assert discrepancy.record is not None
    assert len(discrepancy.record.inputs["logits"]) == 11
    assert [named_fault.id for named_fault in diagnose(context, discrepancy.record).named][:1] == [
        fault
    ]


def on_the_edge(choose: Callable[[Tensor], Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits whose first row is just not, and just, choosing another expert."""
    chosen = choose(logits)[0].tolist()

    def chosen_at(other: int, value: float) -> bool:
        tried = logits.clone()
        tried[0, other] = value
        return other in choose(tried)[0].tolist()

    high = float(logits[0].max()) + 3
    others = (each for each in range(logits.shape[1]) if each not in chosen)
    other = next(other for other in others if chosen_at(other, high))
    low = float(logits[0, other])
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if chosen_at(other, middle) else (middle, high)
    before, behind = logits.clone(), logits.clone()
    before[0, other], behind[0, other] = low, high
    return before, behind
