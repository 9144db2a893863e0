"""Every stored tensor: published counts and sizes, tilings, and what a layout refuses."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch, ShapeMismatch, UnknownName
from degarble.harness.model import parameters as parameter_module
from degarble.harness.model.config.config import (
    V3_2,
    V4_FLASH,
    V4_PRO,
    Config,
    V4Config,
    small_v4,
    small_v32,
)
from degarble.harness.model.layouts import LAYOUTS, layout_named
from degarble.harness.model.recipes import Recipe, Rule
from degarble.harness.model.tensors import slots, tensors_of
from degarble.harness.model.types import Dtype, StoredTensor
from degarble.suites.model.configs import configs


def named(config: Config, layout: str) -> dict[str, StoredTensor]:
    return {tensor.name: tensor for tensor in tensors_of(config, layout_named(layout, config))}


def test_v4_pro_has_exactly_145116_tensors() -> None:
    # A dump of the published shard headers: 145,116 tensors, 805.3 GiB of data.
    found = named(V4_PRO, "official")
    assert len(found) == 145_116
    assert round(sum(tensor.nbytes for tensor in found.values()) / 2**30, 1) == 805.3
    compressors = [name for name in found if name.endswith(".attn.compressor.wkv.weight")]
    indexed = [name for name in found if name.endswith(".attn.indexer.compressor.wkv.weight")]
    assert (len(compressors), len(indexed)) == (61, 30)


def test_v3_2_has_exactly_92425_tensors_and_every_byte() -> None:
    # A manifest of the published shard headers, 163 shards: 92,425 tensors, 689,471,107,200 bytes.
    found = named(V3_2, "official")
    assert len(found) == 92_425
    assert sum(tensor.nbytes for tensor in found.values()) == 689_471_107_200


def test_v4_flash_is_about_160_gb() -> None:
    assert (
        round(sum(t.nbytes for t in tensors_of(V4_FLASH, layout_named("official", V4_FLASH))) / 1e9)
        == 160
    )


def test_a_lost_row_changes_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tuple(row for row in parameter_module.V4_BLOCK if row.name != "attn.attn_sink")
    monkeypatch.setattr(parameter_module, "V4_BLOCK", kept)
    parameter_module.parameters.cache_clear()
    try:
        assert len(tensors_of(V4_PRO, layout_named("official", V4_PRO))) == 145_116 - 62
    finally:
        parameter_module.parameters.cache_clear()


HF, NINE, SEVEN = "model.layers.2.", "model.layers.9.", "model.layers.7.self_attn."
INNER = "attn.indexer.compressor.fused_wkv_wgate.weight"
GATE = "self_attn.compressor.indexer.gate_proj.weight"


@pytest.mark.parametrize(
    ("config", "layout", "name", "shape", "dtype"),
    [
        (V4_PRO, "official", "head.weight", (129280, 7168), "BF16"),
        (V4_PRO, "official", "layers.4.attn.compressor.ape", (4, 1024), "F32"),
        (V4_PRO, "official", "layers.2.ffn.gate.tid2eid", (129280, 6), "I64"),
        (V4_PRO, "official", "layers.3.ffn.experts.0.w1.weight", (3072, 3584), "I8"),
        (V4_PRO, "official", "layers.3.ffn.experts.0.w1.scale", (3072, 224), "F8_E8M0"),
        (V4_PRO, "official", "mtp.0.e_proj.scale", (56, 56), "F8_E8M0"),
        (V4_PRO, "bf16", "layers.3.ffn.experts.0.w1.weight", (3072, 7168), "BF16"),
        (V4_PRO, "nvfp4-experts", "layers.3.ffn.experts.0.w1.weight", (3072, 3584), "U8"),
        (V4_PRO, "nvfp4-experts", "layers.3.ffn.experts.0.w1.weight_scale_2", (), "F32"),
        (V4_PRO, "nvfp4-experts", "layers.3.attn.wq_a.scale", (12, 56), "F8_E8M0"),
        (V4_PRO, "nvfp4-experts", "mtp.0.ffn.experts.0.w1.scale", (3072, 224), "F8_E8M0"),
        (V4_PRO, "nvfp4-full", HF + "self_attn.q_a_proj.weight_scale", (1536, 448), "F8_E4M3"),
        (V4_PRO, "nvfp4-full", HF + "self_attn.o_a_proj.weight", (16384, 4096), "BF16"),
        (V4_PRO, "nvfp4-full", HF + GATE, (256, 3584), "U8"),
        (V4_PRO, "nvfp4-full", HF + "mlp.experts.383.down_proj.input_scale", (), "F32"),
        (V4_PRO, "vllm", HF + "attn.fused_wqa_wkv.weight", (2048, 7168), "F8_E4M3"),
        (V4_PRO, "vllm", HF + "attn.fused_wqa_wkv.weight_scale_inv", (16, 56), "F8_E8M0"),
        (V4_PRO, "vllm", HF + "attn.compressor.fused_wkv_wgate.weight", (2048, 7168), "BF16"),
        (V4_PRO, "vllm", HF + INNER, (512, 7168), "BF16"),
        (V4_PRO, "vllm", NINE + "ffn.experts.w13_weight", (384, 6144, 3584), "U8"),
        (V4_PRO, "vllm", NINE + "ffn.experts.w13_weight_scale", (384, 6144, 224), "U8"),
        (V4_PRO, "vllm", NINE + "ffn.shared_experts.down_proj.weight", (7168, 3072), "F8_E4M3"),
        (V4_PRO, "vllm", NINE + "ffn.gate.e_score_correction_bias", (384,), "F32"),
        (V4_PRO, "vllm", "model.layers.61.mtp_block.attn.wq_b.weight", (65536, 1536), "F8_E4M3"),
        (V4_PRO, "vllm", "model.layers.61.shared_head.norm.weight", (7168,), "BF16"),
        (V4_PRO, "vllm", "model.layers.61.e_proj.weight", (7168, 7168), "F8_E4M3"),
        (V4_PRO, "vllm", "lm_head.weight", (129280, 7168), "BF16"),
        (V4_PRO, "transformers", NINE + "mlp.experts.gate_up_proj", (384, 6144, 7168), "BF16"),
        (V3_2, "official", "model.layers.0.self_attn.indexer.wk.weight_scale_inv", (1, 56), "F32"),
        (V3_2, "official", "model.layers.61.shared_head.head.weight", (129280, 7168), "BF16"),
        (V3_2, "inference", "layers.0.attn.wkv_a.scale", (5, 56), "F32"),
        (V3_2, "nvfp4-full", "model.layers.0.self_attn.o_proj.weight", (7168, 8192), "U8"),
        (V3_2, "nvfp4-full", "model.layers.0.self_attn.q_a_proj.weight", (1536, 7168), "BF16"),
        (V3_2, "nvfp4-full", HF + "mlp.down_proj.weight_scale", (7168, 1152), "F8_E4M3"),
        (V3_2, "nvfp4-full", "model.layers.61.mlp.experts.0.up_proj.weight", (2048, 7168), "BF16"),
        (V3_2, "vllm", SEVEN + "fused_qkv_a_proj.weight", (2112, 7168), "BF16"),
        (V3_2, "vllm", SEVEN + "indexer.wk_weights_proj.weight", (192, 7168), "BF16"),
    ],
)  # fmt: skip
def test_known_tensors(
    config: Config, layout: str, name: str, shape: tuple[int, ...], dtype: str
) -> None:
    # The block in question, drafters and ends are enough, and quick.
    number = int(next((word for word in name.split(".") if word.isdigit()), "-1"))
    only = [
        parameter
        for parameter in parameter_module.parameters(config)
        if parameter.block is None or parameter.block.is_drafter or parameter.block.index == number
    ]
    found = {each.name: each for each in tensors_of(config, layout_named(layout, config), only)}
    assert found[name] == StoredTensor(name, shape, Dtype(dtype))


def test_nvfp4_scalars_of_stacked_experts() -> None:
    layout = layout_named("vllm", V4_PRO).with_recipe("nvfp4-experts")
    found = {t.name: t.shape for t in tensors_of(small_v4(), layout)}
    experts = "model.layers.1.ffn.experts"
    assert found[f"{experts}.w13_weight_scale_2"] == (8, 2)
    assert found[f"{experts}.w2_weight_scale_2"] == (8,)
    assert found[f"{experts}.w13_input_scale"] == (8, 2)
    assert found[f"{experts}.w13_weight_scale"] == (8, 512, 16)
    assert f"{experts.replace('1', '5', 1)}.w13_weight_scale_2" not in found, "the drafter is MXFP4"


@settings(max_examples=20)
@given(configs(aligned=True))
def test_boxes_tile_every_tensor_of_every_layout(config: Config) -> None:
    for (family, name), layout in LAYOUTS.items():
        if family != config.family:
            continue
        boxes = defaultdict(list)
        for slot in slots(config, layout):
            assert slot.box.count == prod(slot.shape)
            boxes[slot.tensor].append(slot.box)
        for tensor in tensors_of(config, layout):
            held = boxes.pop(tensor.name)
            assert sum(box.count for box in held) == tensor.count, (name, tensor.name)
            assert not any(a.overlaps(b) for i, a in enumerate(held) for b in held[:i])
            for box in held:
                spans = zip(box.ranges, tensor.shape, strict=True)
                assert all(0 <= start < stop <= extent for (start, stop), extent in spans)
        assert not boxes


@settings(max_examples=20)
@given(configs(aligned=True))
def test_every_layout_stores_each_part_once_or_says_why_not(config: Config) -> None:
    for (family, _), layout in LAYOUTS.items():
        if family != config.family:
            continue
        keys = [slot.key for slot in slots(config, layout)]
        assert len(set(keys)) == len(keys)
        stored = {name for name, _ in keys}
        for parameter in parameter_module.parameters(config):
            reason = layout.omits(parameter, config)
            assert (parameter.name in stored) == (reason == "")


def test_a_drafter_is_left_out_with_a_reason() -> None:
    parameter = parameter_module.parameter_named(V4_PRO, "mtp.0.e_proj")
    assert "ignores the drafter" in layout_named("transformers", V4_PRO).omits(parameter, V4_PRO)
    assert layout_named("official", V4_PRO).omits(parameter, V4_PRO) == ""


def test_partners_in_different_formats_are_refused() -> None:
    # V3.2's own FP8 wk cannot share a tensor with its bf16 weights_proj.
    layout = layout_named("vllm", V3_2).with_recipe("official")
    with pytest.raises(LayoutMismatch, match=r"weights_proj.*both lie in.*wk_weights_proj"):
        tensors_of(small_v32(), layout)


def test_partners_cut_through_a_scale_block_are_refused() -> None:
    config = small_v4(q_lora_rank=64)  # wkv would begin inside wq_a's only row of scales
    with pytest.raises(LayoutMismatch, match=r"rows in front of layers\.0\.attn\.wkv = 64"):
        tensors_of(config, layout_named("vllm", config))


def test_a_format_without_a_name_is_refused() -> None:
    recipe = Recipe("odd", (Rule("*.ffn.experts.*", "MXFP4"),))
    layout = layout_named("nvfp4-full", V4_PRO).with_recipe(recipe)
    with pytest.raises(LayoutMismatch, match="block_scale of MXFP4"):
        tensors_of(small_v4(), layout)


def test_quantised_stacks_of_transformers_are_refused() -> None:
    layout = layout_named("transformers", V4_PRO).with_recipe("nvfp4-full")
    with pytest.raises(LayoutMismatch, match="layout transformers stacks experts unquantised"):
        tensors_of(small_v4(), layout)


def test_an_extent_that_a_format_cannot_hold_is_refused() -> None:
    config = small_v4(hidden_size=200)
    with pytest.raises(ShapeMismatch, match="MXFP4"):
        tensors_of(config, layout_named("official", config))


def test_layouts_belong_to_a_family() -> None:
    with pytest.raises(InvalidArgument, match="a layout of deepseek_v32"):
        tensors_of(small_v32(), layout_named("official", V4_PRO))
    with pytest.raises(UnknownName, match="inference"):
        layout_named("infer", V3_2)
    with pytest.raises(UnknownName):
        layout_named("inference", V4_PRO)


def test_fp8_experts_of_the_base_releases_have_fp32_scales() -> None:
    config = replace(small_v4(), expert_dtype="fp8")
    assert isinstance(config, V4Config)
    found = named(config, "official")
    scale = found["layers.0.ffn.experts.0.w1.scale"]
    assert (scale.shape, scale.dtype) == ((2, 2), Dtype.F32)
