"""Every point on which the sources disagree: what a switch changes, where first, and what never.

Two runs of one model differ in one switch. The first component whose output changes must be the
one that the switch is about; in the definition nothing may change beyond rounding, unless the
switch is about the mathematics.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, UnknownName
from degarble.harness.model.config.config import V4Config, small_v4, small_v32
from degarble.harness.model.recipes import Recipe, Rule
from degarble.references.binding import BoundModel
from degarble.references.model import ModelV4, ModelV32, Sequence, TokenBatch
from degarble.references.numerics import (
    SOURCES,
    DecodedOperands,
    HeadNorm,
    IndexerFormat,
    KeyValueCache,
    Numerics,
    Switches,
    switches_of,
)
from degarble.references.weights import InputAmax, quantised_weights, random_weights
from degarble.suites.support.thinned import thinned

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.formats.weight import Weight
    from degarble.suites.support.configs import DeepSeekConfig

V4 = small_v4(
    num_hidden_layers=3, compress_ratios=(0, 4, 128, 0), hidden_size=64, q_lora_rank=32,
    o_lora_rank=128, moe_intermediate_size=64, num_hash_layers=1, swiglu_limit=0.5,
    index_n_heads=16,
)  # fmt: skip
V32 = small_v32(num_hidden_layers=2, hidden_size=64, q_lora_rank=32, moe_intermediate_size=64)
RECIPE = Recipe(
    "some",
    (
        Rule("layers.*.attn.wo_a", "FP8_128X128_UE8M0", "FP8_1X128_UE8M0"),
        Rule("layers.*.ffn.experts.*", "NVFP4", "NVFP4"),
    ),
)
TOKENS = torch.randint(0, 512, (131,), generator=torch.Generator().manual_seed(5))


class Side(NamedTuple):
    """One switch: the model it is shown on, its other value, where it is seen first."""

    config: DeepSeekConfig
    base: dict[str, Any]
    other: dict[str, Any]
    first: str
    mathematical: bool = False


_KEYS = "attn.indexer.compressor.pool"
SIDES: dict[str, Side] = {
    "kv_cache": Side(V4, {}, {"kv_cache": KeyValueCache.FP8}, "attn.kv_write"),
    "cache_scale_floored": Side(
        V4, {"kv_cache": KeyValueCache.FP8}, {"cache_scale_floored": True}, "attn.kv_write"
    ),
    "indexer_format": Side(V4, {}, {"indexer_format": IndexerFormat.MXFP4}, _KEYS),
    "indexer_hadamard": Side(V4, {}, {"indexer_hadamard": False}, _KEYS, True),
    "indexer_in_storage_dtype": Side(
        V4, {}, {"indexer_in_storage_dtype": False}, "attn.indexer.scores"
    ),
    "head_norm": Side(V4, {}, {"head_norm": HeadNorm.ONCE}, "attn.q_head_norm_rope"),
    "rotation_in_storage_dtype": Side(
        V4, {}, {"rotation_in_storage_dtype": True}, "attn.q_head_norm_rope"
    ),
    "attention_in_storage_dtype": Side(V4, {}, {"attention_in_storage_dtype": True}, "attn.attend"),
    "pooling_in_storage_dtype": Side(
        V4, {}, {"pooling_in_storage_dtype": True}, "attn.compressor.proj"
    ),
    "mixing_in_storage_dtype": Side(V4, {}, {"mixing_in_storage_dtype": True}, "attn.hc_post"),
    "router_in_storage_dtype": Side(V4, {}, {"router_in_storage_dtype": True}, "ffn.gate"),
    "routing_epsilon": Side(V4, {}, {"routing_epsilon": 1e-3}, "ffn.topk", True),
    "routing_weight_before_w2": Side(
        V4, {}, {"routing_weight_before_w2": False}, "ffn.experts.act_quant"
    ),
    "shared_expert_clamped": Side(V4, {}, {"shared_expert_clamped": False}, "ffn.shared.act", True),
    "input_scale_shared": Side(V4, {}, {"input_scale_shared": True}, "ffn.experts.w13.act_quant"),
    "wo_a_follows_recipe": Side(V4, {}, {"wo_a_follows_recipe": False}, "attn.wo_a"),
    "latent_rounded_before_rotation": Side(
        V4, {}, {"latent_rounded_before_rotation": False}, "attn.kv_norm_rope"
    ),
    "entry_rounded_in_between": Side(
        V4, {}, {"entry_rounded_in_between": False}, "attn.compressor.pool"
    ),
    "indexer_operand_rounded_in_between": Side(
        V4,
        {"indexer_format": IndexerFormat.FP8},
        {"indexer_operand_rounded_in_between": False},
        "attn.indexer.compressor.pool",
    ),
    "indexer_weights_in_storage_dtype": Side(
        V4, {}, {"indexer_weights_in_storage_dtype": False}, "attn.indexer.weights_proj"
    ),
    "indexer_sum_in_storage_dtype": Side(
        V4, {}, {"indexer_sum_in_storage_dtype": False}, "attn.indexer.scores"
    ),
    "norm_rounded_before_weight": Side(V4, {}, {"norm_rounded_before_weight": True}, "attn.norm"),
    "gate_rounded_before_product": Side(
        V4, {}, {"gate_rounded_before_product": True}, "ffn.experts.act_quant"
    ),
    "activation_rounded_before_codes": Side(
        V4, {}, {"activation_rounded_before_codes": False}, "ffn.experts.act_quant"
    ),
    "decoded_operands": Side(V4, {}, {"decoded_operands": DecodedOperands.BOTH}, "ffn.experts.w13"),
    "residual_rounded_before_norm": Side(
        V32, {}, {"residual_rounded_before_norm": True}, "ffn.norm"
    ),
    "latent_norm_epsilon": Side(V32, {}, {"latent_norm_epsilon": 1e-2}, "attn.q_norm", True),
    "first_draft_embedding_zeroed": Side(
        V4, {}, {"first_draft_embedding_zeroed": True}, "embed", True
    ),
}
ELSEWHERE = {
    "reduction_in_storage_dtype": "test_sharded.py",
    "operations_stored": "traced/test_traced.py",
    "attention_operations_stored": "traced/test_traced.py",
    "expert_operations_stored": "traced/test_traced.py",
    "expert_sums_stored": "traced/test_traced.py",
    "code_sums": "../engine/localise/test_quantised_inputs.py",
    "block_scales": "../engine/localise/test_quantised_inputs.py",
    "expert_block_scales": "../engine/localise/test_quantised_inputs.py",
    "input_factors_applied": "../engine/localise/test_input_factors.py",
    "quantised_inputs": "../engine/localise/test_quantised_inputs.py",
    "expert_input_scale_shared": "../engine/localise/test_quantised_inputs.py",
    "expert_width_parts": "../engine/localise/test_quantised_inputs.py",
    "cache_quantised": "../engine/localise/test_quantised_caches.py",
}


def test_every_switch_is_shown() -> None:
    assert set(SIDES) | set(ELSEWHERE) == {field.name for field in fields(Switches)}
    assert all(set(side.other) == {name} for name, side in SIDES.items())


@pytest.fixture(scope="module")
def weights() -> dict[str, dict[str, Weight]]:
    found = {}
    for config in (V4, V32):
        plain = random_weights(config, 3)
        if config is V4:
            for name, weight in plain.items():
                if name.endswith("kv_norm") and weight.value is not None:
                    weight.value[:64] *= 1e-5  # a block in which a floor of the scale matters
        watch = InputAmax(config)
        run(config, Numerics.bf16(), plain, None, watch)
        found[config.family] = quantised_weights(plain, config, RECIPE, input_amax=watch.largest)
    return found


def run(
    config: DeepSeekConfig,
    numerics: Numerics,
    weights: Mapping[str, Weight],
    recipe: Recipe | None = RECIPE,
    observer: Any = None,
) -> dict[str, dict[str, Tensor]]:
    """Outputs of every component of one prompt, the drafter behind it."""
    made: dict[str, dict[str, Tensor]] = {}

    def watch(component: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        made[component] = dict(outputs)
        if observer is not None:
            observer(component, inputs, outputs)

    bound = BoundModel(config, numerics, weights, recipe, watch)
    sequence, step = Sequence(), TokenBatch.from_sequences([0], [TOKENS])
    if isinstance(config, V4Config):
        v4 = ModelV4(bound, config)
        v4.draft([sequence], v4.streams(step, [sequence]), [TOKENS])
    else:
        v32 = ModelV32(bound, config)
        v32.draft([sequence], v32.hidden(step, [sequence]), [TOKENS])
    return made


KEPT: dict[tuple[str, Numerics], dict[str, dict[str, Tensor]]] = {}


def kept(
    config: DeepSeekConfig, numerics: Numerics, weights: Mapping[str, Weight]
) -> dict[str, dict[str, Tensor]]:
    """As run, once for each arithmetic."""
    key = (config.family, numerics)
    if key not in KEPT:
        KEPT[key] = run(config, numerics, weights)
    return KEPT[key]


def first_change(
    one: dict[str, dict[str, Tensor]], two: dict[str, dict[str, Tensor]], bound: float = 0.0
) -> str | None:
    """The first component whose output differs by more than `bound` of its size."""
    for name, outputs in two.items():
        for part, tensor in outputs.items():
            other = one[name][part].double()
            if other.shape != tensor.shape:
                return name
            finite = torch.isfinite(other)
            gap = (tensor.double() - other)[finite].abs()
            size = other[finite].abs().max() if finite.any() else torch.ones(())
            if gap.numel() and float(gap.max()) > bound * float(size):
                return name
    return None


def role(name: str | None) -> str:
    assert name is not None, "nothing changed"
    return name.split(".", 2)[-1] if name.startswith(("layers.", "mtp.")) else name


@pytest.mark.parametrize("name", thinned(SIDES))
def test_a_switch_changes_what_it_is_about(
    name: str, weights: dict[str, dict[str, Weight]]
) -> None:
    side = SIDES[name]
    given = weights[side.config.family]
    twin, exact = Numerics.twin(**side.base), Numerics.definition(**side.base)
    one, other = kept(side.config, twin, given), twin.with_switches(**side.other)
    assert role(first_change(one, run(side.config, other, given))) == side.first
    one, other = kept(side.config, exact, given), exact.with_switches(**side.other)
    changed = first_change(one, run(side.config, other, given), 1e-9)
    if side.mathematical or name == "routing_weight_before_w2":
        assert role(changed) == side.first
    else:
        assert changed is None


@pytest.mark.parametrize("name", ["indexer_hadamard", "routing_weight_before_w2"])
def test_what_is_equal_in_exact_arithmetic_stays_so(
    name: str, weights: dict[str, dict[str, Weight]]
) -> None:
    side, given = SIDES[name], weights[V4.family]
    exact = Numerics.definition()
    one, two = kept(V4, exact, given), run(V4, exact.with_switches(**side.other), given)
    later = {"indexer_hadamard": "attn.indexer.scores", "routing_weight_before_w2": "ffn.moe_sum"}
    found = [n for n in one if n.endswith(later[name])]
    assert found
    for component in found:
        pair = {component: one[component]}, {component: two[component]}
        assert first_change(*pair, 1e-11) is None


@pytest.mark.parametrize("base", [V4, V32], ids=["v4", "v32"])
def test_an_indexer_whose_width_has_no_hadamard_transform_goes_without(
    base: DeepSeekConfig,
) -> None:
    config = replace(base, index_head_dim=96)
    given = random_weights(config, 3)
    one, two = (
        run(config, Numerics.bf16(indexer_hadamard=switch), given) for switch in (True, False)
    )
    assert first_change(one, two, 0.0) is None
    assert Numerics.bf16().transforms(128)
    assert not Numerics.bf16(indexer_hadamard=False).transforms(128)


@pytest.mark.parametrize("kind", [KeyValueCache.FP8, KeyValueCache.FP8_F32, KeyValueCache.NVFP4])
def test_v32_caches_round_the_latent_and_leave_the_key(
    kind: KeyValueCache, weights: dict[str, dict[str, Weight]]
) -> None:
    given = weights[V32.family]
    plain = run(V32, Numerics.bf16(), given)["layers.0.attn.kv_write"]["out"]
    made = run(V32, Numerics.bf16(kv_cache=kind), given)["layers.0.attn.kv_write"]["out"]
    width = V32.kv_lora_rank
    assert torch.equal(made[:, width:], plain[:, width:])
    assert not torch.equal(made[:, :width], plain[:, :width])
    gap = (made[:, :width] - plain[:, :width]).float().norm() / plain[:, :width].float().norm()
    assert gap < (0.12 if kind is KeyValueCache.NVFP4 else 0.04)


def test_attention_of_v32_stores_logits_by_default(weights: dict[str, dict[str, Weight]]) -> None:
    given = weights[V32.family]
    official, transformers, kernels = (
        run(V32, Numerics.bf16(attention_in_storage_dtype=value), given)
        for value in (None, True, False)
    )
    assert first_change(official, transformers) is None
    assert role(first_change(official, kernels)) == "attn.attend"


def test_weight_is_applied_after_w2_in_v32_whatever_the_switch(
    weights: dict[str, dict[str, Weight]],
) -> None:
    given = weights[V32.family]
    before, behind = (
        run(V32, Numerics.twin(routing_weight_before_w2=value), given) for value in (True, False)
    )
    assert first_change(before, behind) is None


def test_sources_are_named() -> None:
    assert switches_of("official-v4").indexer_format is IndexerFormat.MXFP4
    assert not switches_of("official-v4-flash-early").shared_expert_clamped
    assert switches_of("official-v32").indexer_format is IndexerFormat.FP8
    assert switches_of("transformers").routing_epsilon == 1e-20
    assert switches_of("vllm").head_norm is HeadNorm.ONCE
    assert len(set(SOURCES.values())) == len(SOURCES)
    with pytest.raises(UnknownName, match="official-v4"):
        switches_of("oficial-v4")


def test_numerics_are_records() -> None:
    exact = Numerics.definition()
    assert exact.exact
    assert exact.with_switches(routing_epsilon=1.0).switches.routing_epsilon == 1.0
    assert Numerics.bf16() == Numerics.bf16(Switches())
    assert Numerics.twin(SOURCES["vllm"], head_norm=HeadNorm.FACTOR).switches == replace(
        SOURCES["vllm"], head_norm=HeadNorm.FACTOR
    )
    with pytest.raises(DtypeMismatch, match="float64 or float32"):
        Numerics.definition(torch.bfloat16)
    with pytest.raises(TypeError):
        Numerics.bf16(no_such_switch=True)


@pytest.mark.parametrize("write", ["attn.kv_write", "attn.compressor.write"])
def test_rotated_dims_pass_the_cache_unrounded(write: str) -> None:
    numerics = Numerics.bf16(kv_cache=KeyValueCache.FP8)
    bound = BoundModel(V4, numerics, random_weights(V4, 1, torch.bfloat16))
    x = torch.randn(5, V4.head_dim, generator=torch.Generator().manual_seed(2)).bfloat16()
    out, plain = bound(f"layers.1.{write}", x=x)["out"], V4.nope_head_dim
    assert torch.equal(out[:, plain:], x[:, plain:])
    assert not torch.equal(out[:, :plain], x[:, :plain])
