"""Too good to be true: operands that were left unquantised are told from every other difference."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from degarble.harness.capture.files.records import CapturedCall, CapturedStep, Phase
from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.faults.model_faults import Scene
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.engine.localise.discrepancy import DiscrepancyKind
from degarble.harness.engine.localise.judged_run import Judge, discrepancy_of_outputs, missing_calls
from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.replay import Batch, TwinComponents
from degarble.harness.model.presets import small_v32
from degarble.harness.model.recipes import recipe_named
from degarble.references.binding import Bound
from degarble.suites.engine.localise_cases import (
    ATTN,
    FFN,
    V4,
    V32,
    bound,
    localised,
    plain,
    run_of,
    scaled,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.engine.localise.recorded_run import InMemoryRun, RecordedRun
    from degarble.harness.model.config.config import Config


def bf16_weights(name: str, config: Config) -> Any:
    """Codes arrive as they should, and are multiplied with the weights of the BF16 model."""

    def faulty(call: Any, inputs: Any, _weights: Any) -> Any:
        return call(inputs, plain(config).weights_of(name))

    return lambda call: partial(faulty, call)


def fell_back(name: str, config: Config, recipe: str) -> InMemoryRun:
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
    config: Config, recipe: str, name: str
) -> None:
    (origin,) = localised(fell_back(name, config, recipe), config, recipe).origins
    assert (origin.kind, origin.component) == (DiscrepancyKind.FALLBACK, name)
    assert origin.where["operands"] == "unquantised"
    assert "nearer to the BF16 reference than its twin is" in origin.sentence


@pytest.mark.parametrize(("config", "recipe", "name"), CASES)
def test_bf16_weights_alone_are_too_good_as_well(config: Config, recipe: str, name: str) -> None:
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


def bf16_times(name: str, gain: float) -> Bound:
    """The BF16 model, one of whose components has another gain."""
    model = plain(V4)
    other = Bound(V4, model.numerics, {n: model.weights[n] for n in model.weights})
    other.calls[name] = scaled("out", gain)(other.calls[name])
    return other


def test_a_step_that_a_killed_run_left_unfinished_lacks_nothing() -> None:
    """Its last step ended early; a call that an earlier one lacks is missing."""
    run, name = run_of(), f"{FFN}norm"
    known = TwinComponents.of(
        bound(V4, "nvfp4-full", torch.float64), recipe_named("nvfp4-full", V4)
    )
    last = run.steps[-1].number
    for complete, expected in ((False, {1}), (True, {1, last})):
        calls = [c for c in run.calls if c.component != name or c.step == 0]
        killed = SimpleNamespace(facts={}, steps=run.steps, calls=calls, complete=complete)
        (trouble,) = missing_calls(known, cast("RecordedRun", killed))
        assert (trouble.kind, trouble.component) == (DiscrepancyKind.MISSING, name)
        assert set(trouble.steps) == expected


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
def test_a_choice_that_fell_the_other_way_hides_no_cause(config: Config, fault: str) -> None:
    """Row 0 lies on the edge of a choice, and the candidate took the other expert there."""
    recipe, twin = recipe_named("nvfp4-full", config), bound(config, "nvfp4-full", torch.float64)
    known = TwinComponents.of(twin, recipe)
    name = next(
        n for n in reversed(list(known.components)) if n.endswith("ffn.topk") and "mtp" not in n
    )
    call, weights = twin.calls[name], twin.weights_of(name)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(12, config.n_routed_experts, generator=generator, dtype=torch.float64)
    before, behind = on_the_edge(lambda x: call({"logits": x}, weights)["experts"], logits)
    scene = Scene(twin, known.components[name], recipe)
    (way, *_) = MODEL_FAULTS[fault].ways(scene)
    outputs = dict(way.apply(call)({"logits": behind}, weights))
    other = way.apply(call)({"logits": before}, weights)
    outputs = {n: torch.cat((other[n][:1], each[1:])) for n, each in outputs.items()}
    zeros = torch.zeros(12, dtype=torch.int64)
    batch = Batch(
        known.components[name], (CapturedCall(0, 0, name, {}, {}),), {"logits": behind}, outputs,
        zeros, zeros, (slice(0, 12),),
    )  # fmt: skip
    made = Judge(known).component(known.components[name], [batch])
    assert made.rows["experts"].flips == 1
    step = CapturedStep(0, Phase.PREFILL, (5,) * 12, tuple(range(12)), (0,) * 12)
    trouble = discrepancy_of_outputs(known, made, {0: step})
    assert trouble.sight is not None
    assert len(trouble.sight.inputs["logits"]) == 11
    assert [each.id for each in diagnose(scene, trouble.sight).named][:1] == [fault]


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
