"""Runs of transformers models agree when healthy; a fault is placed in exactly its component."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.recorder import MemoryRun, Recorder
from degarble.harness.capture.traced import recording
from degarble.suites.references.traced.traced_models import NAMES, built, config_of, weights_of
from degarble.suites.support.thinned import thinned
from degarble.suites.support.traced_runs import judged_run, prompt, recorded

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

pytestmark = pytest.mark.needs("transformers")


def judged(
    name: str,
    dtype: torch.dtype,
    attention: str,
    plant: Callable[[Any], object] | None = None,
    device: str = "cpu",
    prepare: Callable[[Any], object] | None = None,
) -> Any:
    """Judge a run of a model; `prepare` changes the model, and `plant` only what runs."""
    model: Any = built(name, dtype)
    model.set_attn_implementation(attention)
    if prepare is not None:
        prepare(model)
    return _judged_run(model, config_of(name, dtype), plant, device)


def _judged_run(
    model: Any, config: Any, plant: Callable[[Any], object] | None = None, device: str = "cpu"
) -> Any:
    """Judge a run of a model whose weights are right, with a fault that is planted then."""
    weights = weights_of(model)
    if plant is not None:
        plant(model)
    run = recorded(model.to(device), config, prompt(config, device))
    return judged_run(config, weights, run)


def _windowed(name: str, plant: Callable[[Any], object] | None = None, **settings: Any) -> Any:
    """Judge an eager run in BF16 of a model with other settings in its config."""
    dtype = torch.bfloat16
    return _judged_run(built(name, dtype, **settings), config_of(name, dtype, **settings), plant)


_RUNS = [("eager", torch.float32), ("eager", torch.bfloat16), ("sdpa", torch.bfloat16)]


# transformers has no SDPA of attention with sinks, and its SDPA leaves out Gemma 2's soft cap.
_NOT_HEALTHY = {(name, "sdpa") for name in ("gpt_oss", "gemma2", "granite_swa", "mamba", "mamba2")}


_QUICK = ("eager", torch.bfloat16)


def _marks(name: Any, attention: str, dtype: torch.dtype) -> Any:
    """Llama runs in all three ways by default, the others in one."""
    quick = name.values[0] == "llama" or (attention, dtype) == _QUICK
    return name.marks if quick else pytest.mark.slow


def _cases(*, marked: bool) -> list[Any]:
    return [
        pytest.param(
            *(*name.values, attention, dtype),
            marks=_marks(name, attention, dtype) if marked else (),
            id=f"{name.values[0]}-{attention}-{str(dtype).removeprefix('torch.')}",
        )
        for name in NAMES
        for attention, dtype in _RUNS
        if (name.values[0], attention) not in _NOT_HEALTHY
    ]


@pytest.mark.parametrize(("name", "attention", "dtype"), _cases(marked=True))
def test_a_healthy_run_agrees(name: str, attention: str, dtype: torch.dtype) -> None:
    found = judged(name, dtype, attention)
    assert [origin.component for origin in found.origins] == []
    assert found.verdict == "AGREES"
    assert not found.unjudged
    # These compute norms and rotations in float32 and store once: nothing to tell apart.
    if dtype is torch.bfloat16 and name not in {"olmo2", "nemotron_h"}:
        learned = {convention.name: convention.value for convention in found.conventions}
        assert learned["operations_stored"] is True


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "attention", "dtype"), _cases(marked=False))
def test_a_healthy_run_on_a_gpu_agrees(name: str, attention: str, dtype: torch.dtype) -> None:
    found = judged(name, dtype, attention, device="cuda")
    assert [origin.component for origin in found.origins] == []
    assert found.verdict == "AGREES"
    assert not found.unjudged


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("doge", "sdpa"),  # a registry of attention functions of its own, and a mask of numbers
        ("git", "eager"),  # a mask by blocks, and a sum that is written into an embedding
        ("xglm", "eager"),  # a table of positions that is called `out`
        ("megatron-bert", "eager"),  # a component that nothing enters but the number of tokens
        ("hy_v4", "eager"),  # a choice among as many tokens as there are; sinks in float32
        pytest.param("recurrent_gemma", "eager", marks=pytest.mark.slow),  # a bias added late
    ],
)
def test_a_healthy_run_of_an_unusual_model_agrees(name: str, attention: str) -> None:
    found = judged(name, torch.bfloat16, attention)
    assert [origin.component for origin in found.origins] == []
    assert found.verdict == "AGREES"
    assert not found.unjudged


def _added_to_stored(added: Any, batch1: Any, batch2: Any, *, beta: float, alpha: float) -> Any:
    return beta * added + alpha * torch.bmm(batch1, batch2)


def test_a_product_may_be_stored_before_something_is_added_to_it() -> None:
    """As cuBLAS does where there is one query."""
    assert config_of("bloom", torch.bfloat16).graph, "traced as it is"
    with mock.patch.object(torch.Tensor, "baddbmm", _added_to_stored):
        found = judged("bloom", torch.bfloat16, "eager")
    assert [origin.component for origin in found.origins] == []


def _layer(model: Any) -> Any:
    return model.model.layers[1]


def _scaled(path: str, factor: float) -> Callable[[Any], object]:
    return lambda model: _layer(model).get_submodule(path).weight.data.mul_(factor)


def _epsilon(model: Any) -> None:
    _layer(model).post_attention_layernorm.variance_epsilon = 1e-2


def _angles(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(1.01)


def _logits(model: Any) -> None:
    _layer(model).self_attn.scaling *= 1.03


def _gelu(input: torch.Tensor) -> torch.Tensor:  # noqa: A002  named as in torch
    return torch.nn.functional.gelu(input)


def _activation(model: Any) -> None:
    _layer(model).mlp.act_fn.forward = _gelu


def _row(model: Any) -> None:
    weight = _layer(model).self_attn.o_proj.weight.data
    weight[5] = weight[6]


def _swapped(first: str, second: str) -> Callable[[Any], object]:
    def plant(model: Any) -> None:
        a, b = (_layer(model).get_submodule(path).weight for path in (first, second))
        a.data, b.data = b.data, a.data

    return plant


_PLANTS: dict[str, tuple[Callable[[Any], object], set[str]]] = {
    "q scaled": (_scaled("self_attn.q_proj", 1.01), {"layers.1.self_attn.q_proj"}),
    "norm scaled": (_scaled("input_layernorm", 1.01), {"layers.1.input_layernorm"}),
    "epsilon": (_epsilon, {"layers.1.post_attention_layernorm"}),
    "angles": (_angles, {"rotary_emb"}),
    "logits scaled": (_logits, {"layers.1.self_attn.attention"}),
    "activation": (_activation, {"layers.1.mlp.act_fn"}),
    "row": (_row, {"layers.1.self_attn.o_proj"}),
    "gate and up": (
        _swapped("mlp.gate_proj", "mlp.up_proj"), {"layers.1.mlp.gate_proj", "layers.1.mlp.up_proj"}
    ),
    "key and value": (
        _swapped("self_attn.k_proj", "self_attn.v_proj"),
        {"layers.1.self_attn.k_proj", "layers.1.self_attn.v_proj"},
    ),
    "down negated": (_scaled("mlp.down_proj", -1), {"layers.1.mlp.down_proj"}),
}  # fmt: skip


@pytest.mark.parametrize("plant", _PLANTS)
def test_a_fault_is_placed_in_exactly_its_component(plant: str) -> None:
    change, places = _PLANTS[plant]
    found = judged("llama", torch.bfloat16, "eager", change)
    assert {origin.component for origin in found.origins} == places


@pytest.mark.gpu
@pytest.mark.parametrize("plant", _PLANTS)
def test_a_fault_on_a_gpu_is_placed_in_exactly_its_component(plant: str) -> None:
    change, places = _PLANTS[plant]
    found = judged("llama", torch.bfloat16, "eager", change, "cuda")
    assert {origin.component for origin in found.origins} == places


_WINDOWED = [("gpt_oss", 8), ("gpt_oss", 22), ("gemma3_text", 8), ("mistral", 24)]


@pytest.mark.parametrize(("name", "window"), thinned(_WINDOWED))
def test_a_cache_may_forget_what_no_later_token_attends_to(name: str, window: int) -> None:
    found = _windowed(name, sliding_window=window)
    assert [origin.component for origin in found.origins] == []
    assert found.verdict == "AGREES"
    assert not found.unjudged


def _cache_moved(side: str) -> Callable[[Any], object]:
    """Move the rows of a layer's cache by one token after every pass."""

    def moved(_model: Any, _given: Any, out: Any) -> None:
        layer = out.past_key_values.layers[0]
        setattr(layer, side, getattr(layer, side).roll(1, -2))

    return lambda model: model.register_forward_hook(moved)


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize(("name", "window"), [("llama", None), ("gpt_oss", 8)])
def test_rows_of_a_cache_in_another_order_are_found(
    name: str, window: int | None, side: str
) -> None:
    settings: dict[str, Any] = {} if window is None else {"sliding_window": window}
    found = _windowed(name, _cache_moved(side), **settings)
    (origin,) = found.origins
    assert origin.context.component.name == "layers.0.self_attn.cache"
    assert origin.site.name == f"state_{side.removesuffix('s')}"


def test_a_view_that_is_not_of_its_producer_is_found() -> None:
    """Latent attention takes its values out of a projection's rows, which no module does."""

    def plant(model: Any) -> None:
        own = _layer(model).self_attn.expand_kv

        def expand_kv(latent: torch.Tensor, turned: torch.Tensor) -> Any:
            keys, values = own(latent, turned)
            return keys, values.flip(1)

        _layer(model).self_attn.expand_kv = expand_kv

    found = judged("deepseek_v3", torch.bfloat16, "eager", plant)
    (origin,) = found.origins
    assert origin.context.component.name == "layers.1.self_attn.attention"
    assert origin.site.name == "value"


def _router(model: Any, layer: int, change: Callable[..., Any]) -> None:
    """Let Mixtral's router take its experts and their weights from `change`."""
    gate = model.model.layers[layer].mlp.gate

    def forward(hidden_states: torch.Tensor) -> Any:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = torch.nn.functional.linear(x, gate.weight)
        scores = logits.float().softmax(-1)
        return logits, *change(scores, gate.top_k)

    gate.forward = forward


def _next_experts(scores: torch.Tensor, count: int) -> Any:
    weights, experts = scores.topk(count)
    return weights / weights.sum(-1, keepdim=True), (experts + 1) % scores.shape[-1]


def _one_too_low(scores: torch.Tensor, count: int) -> Any:
    weights, experts = (part[:, 1:] for part in scores.topk(count + 1))
    return weights / weights.sum(-1, keepdim=True), experts


def _not_divided(scores: torch.Tensor, count: int) -> Any:
    return scores.topk(count)


def test_another_choice_among_equal_scores_is_legal() -> None:
    def all_equal(model: Any) -> None:
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight.data
            weight[1:] = weight[:1]

    def plant(model: Any) -> None:
        _router(model, 1, _next_experts)

    found = judged("mixtral", torch.bfloat16, "eager", plant, prepare=all_equal)
    assert [origin.component for origin in found.origins] == []
    assert sum(row.flips for row in found.rows if row.component.name.endswith(".topk")) > 0


@pytest.mark.parametrize("change", thinned([_one_too_low, _next_experts, _not_divided]))
def test_a_wrong_choice_of_experts_is_placed_in_the_choice(change: Callable[..., Any]) -> None:
    found = judged("mixtral", torch.bfloat16, "eager", lambda model: _router(model, 1, change))
    assert [origin.component for origin in found.origins] == ["layers.1.mlp.gate.topk"]


def test_wrong_logits_of_a_router_are_placed_in_its_gate() -> None:
    found = judged("mixtral", torch.bfloat16, "eager", _scaled("mlp.gate", 1.05))
    assert [origin.component for origin in found.origins] == ["layers.1.mlp.gate"]


def _indexer(model: Any, change: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """Let a layer's indexer choose other tokens."""
    indexer = _layer(model).self_attn.indexer
    own = indexer.forward

    def forward(*given: Any, **named: Any) -> torch.Tensor:
        chosen: torch.Tensor = own(*given, **named)
        return change(chosen, given[3].shape[-1])

    indexer.forward = forward


def _oldest(chosen: torch.Tensor, _keys: int) -> torch.Tensor:
    return torch.arange(chosen.shape[-1], dtype=chosen.dtype).expand_as(chosen).clone()


def _next_token(chosen: torch.Tensor, keys: int) -> torch.Tensor:
    return ((chosen + 1) % keys).to(chosen.dtype)


@pytest.mark.parametrize("change", thinned([_next_token, _oldest]))
def test_a_wrong_choice_of_tokens_is_placed_in_the_choice(change: Callable[..., Any]) -> None:
    found = judged("glm_moe_dsa", torch.bfloat16, "eager", lambda model: _indexer(model, change))
    assert [origin.component for origin in found.origins] == ["layers.1.self_attn.indexer.result"]


def test_another_model_is_refused_and_no_hook_stays() -> None:
    model: nn.Module = built("llama")
    with (
        pytest.raises(InvalidArgument, match="module"),
        recording(model, config_of("gpt_oss"), Recorder(MemoryRun({}))),
    ):
        pass
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
