"""Traced models compute what transformers computes, and refuse by name what they cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, NotBuilt
from degarble.references.model import Sequence
from degarble.references.numerics import Numerics
from degarble.references.traced.family import TracedConfig, TracedModel, traced_parameters
from degarble.references.traced.model import TracedForward
from degarble.references.traced.trace import trace
from degarble.suites.references.traced.traced_models import (
    NAMES,
    built,
    config_of,
    raw_config,
    weights_of,
)

pytestmark = pytest.mark.needs("transformers")


@pytest.mark.parametrize("name", NAMES)
def test_a_forward_pass_with_caches_equals_transformers(name: str) -> None:
    model = built(name)
    config: Any = config_of(name)
    forward = TracedForward(TracedModel(config, Numerics.definition(), weights_of(model)))
    ids = torch.randint(0, config.vocab_size, (2, 23), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = [model(input_ids=ids[row : row + 1]).logits[0] for row in range(2)]
    sequences = [Sequence(), Sequence()]
    # Ragged: 17 and 12 tokens, then two and one at a time.
    made: list[list[torch.Tensor]] = [[], []]
    stops, steps = [17, 12], [2, 1]
    starts = [0, 0]
    while starts != stops or not made[0] or stops[0] < 23:
        logits = forward.forward(
            sequences, [ids[row, starts[row] : stops[row]] for row in range(2)]
        )
        first = stops[0] - starts[0]
        made[0].append(logits[:first])
        made[1].append(logits[first:])
        if stops[0] == 23:
            break
        starts, stops = stops, [stop + step for stop, step in zip(stops, steps, strict=True)]
    for row in range(2):
        got = torch.cat(made[row]).double()
        size = float(want[row].abs().max())
        # Zamba 2 in float32 is 5e-5 off itself.
        near = 1e-4 if name == "zamba2" else 2e-5
        assert float((got - want[row][: len(got)].double()).abs().max()) < near * size


def test_a_caller_in_inference_mode_changes_no_operation() -> None:
    from transformers import AutoConfig  # noqa: PLC0415  heavy

    raw = raw_config("llama")
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    plain = trace(config, torch.float32)
    with torch.inference_mode():
        inside = trace(config, torch.float32)
    assert inside.operations == plain.operations


def test_an_unknown_architecture_is_refused_by_name() -> None:
    config = TracedConfig.of({"model_type": "no_such_model"})
    with pytest.raises(InvalidArgument, match="no_such_model"):
        _ = config.graph


def test_code_of_a_checkpoint_is_never_run() -> None:
    config = TracedConfig.of({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}})
    with pytest.raises(InvalidArgument, match="code is never run"):
        _ = config.graph


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("jetmoe", "a forward pass that runs without weights"),  # branches on values
    ],
)
def test_a_model_that_cannot_be_traced_is_refused_by_name(kind: str, expected: str) -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 2, "n_layer": 2, "vocab_size": 128}
    with pytest.raises(NotBuilt, match=expected):
        _ = TracedConfig.of({"model_type": kind, **small}).graph


def test_settings_that_transformers_refuses_are_refused_by_name() -> None:
    for settings in ({"hidden_size": 65}, {"num_hidden_layers": "two"}):
        with pytest.raises(InvalidArgument, match="settings that transformers builds"):
            _ = TracedConfig.of({"model_type": "falcon", **settings}).graph


def test_a_model_that_writes_no_text_is_refused_by_name() -> None:
    with pytest.raises(NotBuilt, match="a causal language model"):
        _ = TracedConfig.of({"model_type": "vit"}).graph


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("trocr", "operands that follow from tokens"),  # an index without a value
        ("falcon", "a parameter, a buffer or a result of the pass"),  # made with the model
    ],
)
def test_a_tensor_without_a_value_is_refused_by_name(kind: str, expected: str) -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "vocab_size": 128}
    with pytest.raises(NotBuilt, match=expected):
        _ = TracedConfig.of({"model_type": kind, **small}).graph


def test_parameters_of_one_name_are_refused() -> None:
    small = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "head_dim": 16}
    small |= {"num_attention_heads": 4, "num_layers_per_stack": 1, "H_cycles": 1, "L_cycles": 1}
    config: Any = TracedConfig.of({"model_type": "hrm_text", **small})
    with pytest.raises(NotBuilt, match=r"L_module.* and model\.H_module"):
        traced_parameters(config)


def test_what_is_written_into_a_modules_result_is_read_afterwards() -> None:
    """CTRL scales the result of its embedding in place."""
    own = {"n_embd": 64, "n_layer": 1, "n_head": 4, "dff": 96, "vocab_size": 128}
    model: Any = built("ctrl", settings=own)
    config: Any = TracedConfig.of({**own, "model_type": "ctrl", "dtype": "float32"})
    forward = TracedForward(TracedModel(config, Numerics.definition(), weights_of(model)))
    ids = torch.arange(3, 20)
    with torch.no_grad():
        want = model(input_ids=ids[None]).logits[0]
    got = forward.forward([Sequence()], [ids])
    assert float((got - want).abs().max()) < 2e-5 * float(want.abs().max())


def test_expert_sums_stored_after_each_expert_change_experts_first() -> None:
    config: Any = config_of("qwen3_moe", torch.bfloat16)
    weights, ids = weights_of(built("qwen3_moe", torch.bfloat16)), torch.arange(23)
    made = []
    for stored in (False, True):
        seen: dict[str, dict[str, torch.Tensor]] = {}
        numerics = Numerics.bf16().with_switches(
            expert_operations_stored=True, expert_sums_stored=stored
        )
        bound = TracedModel(config, numerics, weights, None, _keeping(seen))
        TracedForward(bound).forward([Sequence()], [ids])
        made.append(seen)
    changed = [
        name
        for name, outputs in made[0].items()
        if any(not torch.equal(outputs[out], made[1][name][out]) for out in outputs)
    ]
    assert changed[0] == "layers.0.mlp.experts"


def _keeping(seen: dict[str, dict[str, torch.Tensor]]) -> Any:
    def watch(name: str, _: object, outputs: dict[str, torch.Tensor]) -> None:
        seen[name] = dict(outputs)

    return watch


@pytest.mark.parametrize(
    ("switch", "model", "first"),
    [
        ("operations_stored", "llama", "layers.0.input_layernorm"),
        ("attention_operations_stored", "llama", "layers.0.self_attn.attention"),
        ("expert_operations_stored", "qwen3_moe", "layers.0.mlp.experts"),
    ],
)
def test_a_switch_changes_what_it_concerns_and_nothing_before_it(
    switch: str, model: str, first: str
) -> None:
    config: Any = config_of(model, torch.bfloat16)
    weights, ids = weights_of(built(model, torch.bfloat16)), torch.arange(23)
    made = []
    for numerics in (Numerics.bf16(), Numerics.bf16().with_switches(**{switch: True})):
        seen: dict[str, dict[str, torch.Tensor]] = {}

        bound = TracedModel(config, numerics, weights, None, _keeping(seen))
        TracedForward(bound).forward([Sequence()], [ids])
        made.append(seen)
    changed = [
        name
        for name, outputs in made[0].items()
        if any(not torch.equal(outputs[out], made[1][name][out]) for out in outputs)
    ]
    assert changed[0] == first
