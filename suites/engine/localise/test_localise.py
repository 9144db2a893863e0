"""Healthy runs raise no alarm; one planted fault is one origin, at the place that is to blame."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.capture.files.records import CapturedCall, CapturedTensor
from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.engine.localise.discrepancy import DiscrepancyKind
from degarble.harness.engine.localise.judged_run import repeats_apart
from degarble.harness.engine.localise.localise import localise
from degarble.harness.report.verdict import Verdict
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
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.model.config.config import Config


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
def test_a_healthy_run_agrees_everywhere_whatever_its_sums_are_made_in(config: Config) -> None:
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
    assert origin.sight is not None
    assert origin.sight.expected.keys() == origin.sight.outputs.keys()


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
    (origin,) = [each for each in found.origins if each.kind is DiscrepancyKind.EDGE]
    assert (origin.component, str(origin.site)) == (blamed, f"{name}.in.{inp}")
    assert len(found.origins) == 1
    assert origin.scene.name == name
    assert origin.sight is not None
    if origin.sight.implied[inp].shape == origin.sight.inputs[inp].shape:
        assert not torch.equal(origin.sight.implied[inp], origin.sight.inputs[inp])


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


def test_calls_that_are_missing_outputs_of_other_forms_and_unknown_names_are_told() -> None:
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
    (form,) = [each for each in origins if each.kind is DiscrepancyKind.FORM]
    assert form.component == name
    assert form.sight is None or not diagnose(form.scene, [form.sight, *form.more]).named


def test_what_was_not_captured_says_nothing_and_two_answers_are_unstable() -> None:
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
    assert not repeats_apart([replace(each, inputs={}) for each in (calls[0], other)])


@pytest.mark.parametrize("place", ["ffn.experts.w13", "ffn.experts.combine"])
def test_what_a_captured_step_left_is_known_by_earlier_calls_alone(place: str) -> None:
    """Choices and weights of the first decoded token, in the second one: nothing else tells."""
    stage, name = small_stage(), f"layers.1.{place}"
    (way,) = MODEL_FAULTS["M36.metadata"].ways(stage.scene(name))
    seen = stage.rest(stage.run(stage.taped(), {name: way}))
    (trouble,) = localise(stage.twin, stage.model.recipe, seen).origins
    assert trouble.sight is not None
    assert [each.step for each in trouble.sight.earlier] == [0, 1]
    named = diagnose(trouble.scene, trouble.sight).named
    assert [each.id for each in named] == ["M36.metadata"]
    assert "of step 1 reproduces" in named[0].evidence
    assert not diagnose(trouble.scene, replace(trouble.sight, earlier=())).named
