"""Faults of recurrent models: states, windows, gates and weights are placed in their component."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from degarble.harness.capture.recorder import MemoryRun, Recorder
from degarble.harness.capture.traced import cache_argument, recording
from degarble.harness.engine.localise.localise import localise
from degarble.harness.model.recipes import recipe_named
from degarble.references.numerics import Numerics
from degarble.references.traced.family import TracedModel
from degarble.suites.references.traced.traced_models import built, config_of, weights_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    Between = Callable[[Any, int], object]  # changes a cache after so many decoding steps

pytestmark = pytest.mark.needs("transformers")


class Places(NamedTuple):
    """A layer that is damaged, its projections, and what computes its scan and convolution."""

    layer: int
    before: str
    after: str
    scan: str  # empty without one
    window: str | None = None  # where the scan is, if not stated


MODELS = {
    "lfm2": Places(0, "conv.in_proj", "conv.out_proj", "", "conv.out_proj_input"),
    "granitemoehybrid": Places(0, "mamba.in_proj", "mamba.out_proj", "mamba.norm_input"),
    "qwen3_next": Places(
        2, "linear_attn.in_proj_qkvz", "linear_attn.out_proj", "linear_attn.norm_input"
    ),
    "qwen3_5_text": Places(
        2, "linear_attn.in_proj_qkv", "linear_attn.out_proj", "linear_attn.norm_input"
    ),
    "nemotron_h": Places(0, "mixer.in_proj", "mixer.out_proj", "mixer.norm_input"),
    "minimax": Places(1, "self_attn.qkv_proj", "self_attn.out_proj", "self_attn.norm_input", ""),
    "falcon_h1": Places(1, "mamba.in_proj", "mamba.out_proj", "mamba.out_proj_input"),
    "mamba": Places(
        1, "mixer.in_proj", "mixer.out_proj", "mixer.out_proj_input", "mixer.x_proj_input"
    ),
    "mamba2": Places(1, "mixer.in_proj", "mixer.out_proj", "mixer.norm_input"),
    "jamba": Places(
        0, "mamba.in_proj", "mamba.out_proj", "mamba.out_proj_input", "mamba.x_proj_input"
    ),
    "bamba": Places(0, "mamba.in_proj", "mamba.out_proj", "mamba.norm_input"),
    "zamba2": Places(0, "mamba.in_proj", "mamba.out_proj", "mamba.norm_input"),
}
QUICK = ("lfm2",)


def _named(names: Iterable[str]) -> list[Any]:
    return [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in names]


def _origins(found: Any, name: str) -> list[str]:
    """Return the components of the damaged layer that differ; others by their whole name."""
    front = f"layers.{MODELS[name].layer}."
    return [origin.component.removeprefix(front) for origin in found.origins]


def judged(name: str, plant: Callable[[Any], object], between: Between) -> Any:
    """Judge a prompt of two sequences and three decoding steps in BF16."""
    dtype = torch.bfloat16
    model: Any = built(name, dtype)
    model.set_attn_implementation("eager")
    config: Any = config_of(name, dtype)
    weights = weights_of(model)
    plant(model)
    run = MemoryRun({})
    ids = torch.randint(3, config.vocab_size, (2, 23), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), recording(model, config, Recorder(run)):
        out = model(input_ids=ids, use_cache=True)
        for step in range(3):
            cache = cache_argument(model)
            between(getattr(out, cache), step)
            at = {"position_ids": torch.full((2, 1), 23 + step)} if name == "bamba" else {}
            at["input_ids"] = out.logits[:, -1].argmax(-1, keepdim=True)
            out = model(**{cache: getattr(out, cache)}, use_cache=True, **at)
    wide = torch.float64
    numerics = replace(Numerics.bf16(), work=wide, products=wide, store=dtype)
    return localise(TracedModel(config, numerics, weights), recipe_named("bf16", config), run)


def _nothing(*_: object) -> None:
    """Change nothing."""


def _recurrent(cache: Any, layer: int) -> Tensor:
    if hasattr(cache, "linear_cache"):  # MiniMax
        state: Tensor = cache.linear_cache[layer]
        return state
    found: Tensor = cache.layers[layer].recurrent_states[0]
    return found


def _stale(layer: int) -> Between:
    """Return what puts the state of the step before into the last step."""
    kept: list[Tensor] = []

    def between(cache: Any, step: int) -> None:
        state = _recurrent(cache, layer)
        if step == 2:
            state.copy_(kept[-1])
        kept.append(state.clone())

    return between


def _of_another_sequence(layer: int) -> Between:
    def between(cache: Any, step: int) -> None:
        if step == 1:
            state = _recurrent(cache, layer)
            state.copy_(state.flip(0))

    return between


def _shifted(layer: int) -> Between:
    def between(cache: Any, step: int) -> None:
        if step == 1:
            window = cache.layers[layer].conv_states[0]
            window.copy_(window.roll(1, -1))

    return between


_STATES = {"stale": _stale, "of another sequence": _of_another_sequence}


@pytest.mark.parametrize("fault", _STATES)
@pytest.mark.parametrize("name", _named(name for name, at in MODELS.items() if at.scan))
def test_a_wrong_state_is_placed(name: str, fault: str) -> None:
    found = judged(name, _nothing, _STATES[fault](MODELS[name].layer))
    assert _origins(found, name) == [MODELS[name].scan]
    # Steps are the prompt, and three of decoding.
    assert found.origins[0].steps == ((3,) if fault == "stale" else (2, 3))


@pytest.mark.parametrize("name", _named(name for name, at in MODELS.items() if at.window != ""))
def test_a_shifted_window_of_a_convolution_is_placed(name: str) -> None:
    at = MODELS[name]
    found = judged(name, _nothing, _shifted(at.layer))
    assert _origins(found, name) == [at.window or at.scan]


def _module(model: Any, name: str, path: str) -> Any:
    layers = getattr(model, "backbone", None) or model.model
    return layers.layers[MODELS[name].layer].get_submodule(path)


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("name", _named(MODELS))
def test_damaged_weights_of_a_projection_are_placed(name: str, side: str) -> None:
    path = getattr(MODELS[name], side)

    def plant(model: Any) -> None:
        _module(model, name, path).weight.data[::3].mul_(-1)

    assert _origins(judged(name, plant, _nothing), name) == [path]


# A parameter of the gate, and the component that it is part of. Tiny Nemotron-H has one layer of
# experts alone, too few to learn how it stores sums on the inputs that a wrong gate leads to.
_GATES = {
    "lfm2": ("conv.conv.weight", "conv.out_proj_input"),
    "granitemoehybrid": ("mamba.dt_bias", "mamba.norm_input"),
    "qwen3_next": ("linear_attn.A_log", "linear_attn.norm_input"),
    "qwen3_5_text": ("linear_attn.A_log", "linear_attn.norm_input"),
    "falcon_h1": ("mamba.dt_bias", "mamba.out_proj_input"),
    "mamba": ("mixer.D", "mixer.out_proj_input"),
    "mamba2": ("mixer.A_log", "mixer.norm_input"),
    "jamba": ("mamba.A_log", "mamba.out_proj_input"),
    "bamba": ("mamba.dt_bias", "mamba.norm_input"),
    "zamba2": ("mamba.A_log", "mamba.norm_input"),
}


@pytest.mark.parametrize("name", _named(_GATES))
def test_a_wrong_gate_is_placed(name: str) -> None:
    path, component = _GATES[name]
    parent, _, leaf = path.rpartition(".")

    def plant(model: Any) -> None:
        gate = getattr(_module(model, name, parent), leaf)
        gate.data.copy_(gate.data.flip(-1) + 0.5)

    assert _origins(judged(name, plant, _nothing), name) == [component]
