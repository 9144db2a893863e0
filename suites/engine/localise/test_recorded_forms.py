"""Recorded tensors beside what their sites declare: healthy runs fit, others are findings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.localise.discrepancy import DiscrepancyKind
from degarble.harness.engine.localise.replay import TwinComponents
from degarble.harness.engine.localise.tensor_forms import check_forms
from degarble.harness.model.components import components
from degarble.harness.model.recipes import recipe_named
from degarble.harness.model.site_forms import declared_forms
from degarble.harness.report.verdict import Verdict
from degarble.suites.engine.localise_cases import ATTN, V4, V32, bound, localised, run_of, scaled

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.capture.files.records import CapturedCall
    from degarble.harness.engine.localise.recorded_run import InMemoryRun
    from degarble.harness.model.config.config import Config

    Change = Callable[[torch.Tensor], torch.Tensor]


def changed(run: InMemoryRun, component: str, port: str, name: str, change: Change) -> InMemoryRun:
    """Put another tensor at one site of the first call, in its record as well."""
    at = next(n for n, call in enumerate(run.calls) if call.component == component)
    sides = [dict(side) for side in run._tensors[at]]
    side = sides[port == "outputs"]
    side[name] = change(side[name])
    run._tensors[at] = (sides[0], sides[1])
    call = run.calls[at]
    records = [dict(call.inputs), dict(call.outputs)]
    kept = records[port == "outputs"]
    shape = tuple(side[name].shape)
    kept[name] = kept[name]._replace(dtype=WORDS[side[name].dtype], shape=shape)
    run.calls[at] = replace(call, inputs=records[0], outputs=records[1])
    return run


WORDS = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.bfloat16: "BF16", torch.float64: "F64",
    torch.int64: "I64", torch.float16: "F16", torch.float32: "F32",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "recipe"),
    [(V4, "bf16"), (V4, "nvfp4-full"), (V32, "bf16"), (V32, "nvfp4-full"), (V32, "official")],
)
def test_a_healthy_run_fits_and_every_site_of_it_is_declared(config: Config, recipe: str) -> None:
    run, twin = run_of(config=config, recipe=recipe), bound(config, recipe)
    known = TwinComponents.of(twin, recipe_named(recipe, config))
    assert check_forms(run, known).run is run
    declared = declared_forms(config, known.recipe)
    for call in run.calls:
        assert call.inputs.keys() <= declared[call.component].inputs.keys(), call.component
        assert call.outputs.keys() <= declared[call.component].outputs.keys(), call.component


@pytest.mark.parametrize("config", [V4, V32])
def test_every_output_of_a_model_is_declared(config: Config) -> None:
    for name in ("bf16", "nvfp4-full", "nvfp4-experts", "official"):
        recipe = recipe_named(name, config)
        declared = declared_forms(config, recipe)
        for each in components(config, recipe):
            if each.name in declared:
                assert set(each.outputs) <= declared[each.name].outputs.keys(), each.name


@pytest.mark.parametrize(
    ("component", "name", "change", "told"),
    [
        ("q_head_norm_rope", "out", lambda t: t.to(torch.uint8), "U8"),
        ("q_norm", "out", lambda t: t.bool(), "BOOL"),
        ("compressor.pool", "state_latent", lambda t: t.sum(), "F64 []"),
        ("indexer.weights_proj", "out", lambda t: t[None], "BF16 [1, "),
        ("wq_a", "out", lambda t: t[:, 1:], "declared are numbers [tokens, "),
        ("wq_a", "out", lambda t: t[1:], "tokens, as its other inputs have"),
        ("wq_a.act_quant", "block_scale", lambda t: t.float(), "declared are codes"),
        ("indexer.topk", "out", lambda t: t.double(), "declared are integers [tokens, any]"),
    ],
)  # fmt: skip
def test_an_output_that_its_site_cannot_hold_is_the_one_finding(
    component: str, name: str, change: Change, told: str
) -> None:
    found = localised(changed(run_of(), ATTN + component, "outputs", name, change))
    (origin,) = found.origins
    assert (origin.kind, origin.component, origin.sight) == (
        DiscrepancyKind.FORM,
        ATTN + component,
        None,
    )
    assert told in origin.sentence
    assert (ATTN + component, origin.sentence) in found.unjudged


def test_a_consumer_is_not_blamed_for_what_a_wrong_kernel_made() -> None:
    run = run_of()
    run = changed(run, f"{ATTN}wo_b", "outputs", "out", lambda t: t[:, :-1])
    run = changed(run, f"{ATTN}hc_post", "inputs", "x", lambda t: t[:, :-1])
    found = localised(run)
    assert [each.component for each in found.origins] == [f"{ATTN}wo_b"]
    assert {name for name, _ in found.unjudged} >= {f"{ATTN}wo_b", f"{ATTN}hc_post"}


def test_an_input_that_nobody_made_so_is_a_finding_of_its_own() -> None:
    found = localised(changed(run_of(), f"{ATTN}attend", "inputs", "q", lambda t: t.flatten()))
    (origin,) = found.origins
    assert (origin.kind, str(origin.site)) == (DiscrepancyKind.FORM, f"{ATTN}attend.in.q")
    assert "declared are numbers [tokens, " in origin.sentence


@pytest.mark.parametrize(
    ("component", "name", "change"),
    [("wo_a", "x", lambda t: t.reshape(len(t), 2, -1)), ("attend", "q", lambda t: t.flatten(1))],
)
def test_other_extents_of_the_same_row_are_laid_out_as_declared(
    component: str, name: str, change: Change
) -> None:
    found = localised(changed(run_of(), ATTN + component, "inputs", name, change))
    assert (found.verdict, found.origins, found.unjudged) == (Verdict.AGREES, (), ())


@pytest.mark.parametrize(
    ("component", "name"),
    [("attn.hc_pre", "post"), ("attn.compressor.pool", "out"), ("ffn.topk", "weights")],
)
def test_outputs_beside_which_others_were_not_captured_are_judged(
    component: str, name: str
) -> None:
    """Budgets read all outputs of a component; modules of others put out less."""
    component = f"layers.1.{component}"
    run = run_of(component, scaled(name, 1.1))

    def alone(call: CapturedCall) -> CapturedCall:
        return replace(call, outputs={name: call.outputs[name]})

    for at, call in enumerate(run.calls):
        if call.component == component:
            run.calls[at] = alone(call)
            inputs, outputs = run._tensors[at]
            run._tensors[at] = (inputs, {name: outputs[name]})
    found = localised(run)
    if component.endswith("topk"):  # a choice is judged as a whole
        assert found.verdict is Verdict.UNDECIDED
        return
    assert component in {each.component for each in found.origins}
