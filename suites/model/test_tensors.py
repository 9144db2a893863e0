"""Stored tensors, their parts, and maps between layouts: published counts, tilings, round trips."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch, ShapeMismatch, UnknownName
from degarble.harness.families.deepseek_v4.family import DeepSeekV4
from degarble.harness.families.deepseek_v4.tables import V4_BLOCK, V4_ENDS, V4_MTP
from degarble.harness.model.config.config import (
    V3_2,
    V4_FLASH,
    V4_PRO,
    Config,
    V4Config,
    small_v4,
    small_v32,
)
from degarble.harness.model.layouts import Layout, layout_named
from degarble.harness.model.parameters import ParameterTable, parameter_named, parameters
from degarble.harness.model.recipes import UNQUANTISED, Formats, Recipe, Rule
from degarble.harness.model.tensors import (
    SUFFIXES,
    Move,
    NameMap,
    PartKind,
    TypeChange,
    name_map,
    parts_of,
    slots,
    suffixes_named,
    tensors_of,
)
from degarble.harness.model.types import Box, Dtype, StoredTensor
from degarble.suites.model.configs import TINY_V4, TINY_V32, configs
from degarble.suites.support.families import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


# --------------------------------------------------------------------------------------------------
# Every stored tensor: published counts and sizes, tilings, and what a layout refuses.


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
    kept = tuple(row for row in V4_BLOCK if row.name != "attn.attn_sink")
    monkeypatch.setattr(DeepSeekV4, "rows", ParameterTable(V4_ENDS, kept, V4_MTP))
    assert len(tensors_of(V4_PRO, layout_named("official", V4_PRO))) == 145_116 - 62


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
        for parameter in parameters(config)
        if parameter.block is None or parameter.block.is_drafter or parameter.block.index == number
    ]
    found = {
        tensor.name: tensor for tensor in tensors_of(config, layout_named(layout, config), only)
    }
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
        for parameter in parameters(config):
            reason = layout.omits(parameter, config)
            assert (parameter.name in stored) == (reason == "")


def test_a_drafter_is_left_out_with_a_reason() -> None:
    parameter = parameter_named(V4_PRO, "mtp.0.e_proj")
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


# --------------------------------------------------------------------------------------------------
# What a format makes of a matrix on disk: parts, extents, names, and cuts through scales.

NVFP4 = Formats("NVFP4", "NVFP4")
MXFP4 = Formats("MXFP4", "FP8_1X128_UE8M0")
FP8 = Formats("FP8_128X128_UE8M0", "FP8_1X128_UE8M0")
W1, W2 = "layers.5.ffn.experts.7.w1", "layers.5.ffn.experts.7.w2"


@pytest.mark.parametrize(
    ("config", "name", "formats", "extents"),
    [
        # deepseek-ai/DeepSeek-V4-Pro shard headers.
        (V4_PRO, W1, MXFP4, [(3072, 3584), (3072, 224)]),
        (V4_PRO, W2, MXFP4, [(7168, 1536), (7168, 96)]),
        (V4_PRO, "layers.5.attn.wq_b", FP8, [(65536, 1536), (512, 12)]),
        (V4_PRO, "layers.5.attn.wo_a", FP8, [(16384, 4096), (128, 32)]),
        (V4_PRO, "layers.4.attn.indexer.wq_b", FP8, [(8192, 1536), (64, 12)]),
        # nvidia/DeepSeek-V4-Pro-NVFP4 and -Flash-NVFP4.
        (V4_PRO, W1, NVFP4, [(3072, 3584), (3072, 448), (), ()]),
        (V4_PRO, W2, NVFP4, [(7168, 1536), (7168, 192), (), ()]),
        (V4_FLASH, W1, NVFP4, [(2048, 2048), (2048, 256), (), ()]),
        (V4_FLASH, W2, NVFP4, [(4096, 1024), (4096, 128), (), ()]),
    ],
)
def test_extents_of_published_tensors(
    config: object, name: str, formats: Formats, extents: list[tuple[int, ...]]
) -> None:
    parts = parts_of(parameter_named(config, name), formats)  # type: ignore[arg-type]
    assert [part.shape for part in parts] == extents


def test_what_is_no_linear_stays_as_it_is() -> None:
    norm = parameter_named(V4_PRO, "layers.0.attn.q_norm")
    sink = parameter_named(V4_PRO, "layers.0.attn.attn_sink")
    assert [(p.part, p.dtype) for p in parts_of(norm, NVFP4)] == [(PartKind.VALUE, Dtype.BF16)]
    assert [(p.part, p.dtype) for p in parts_of(sink, NVFP4)] == [(PartKind.VALUE, Dtype.F32)]


def test_a_weight_alone_has_no_input_scale() -> None:
    linear = parameter_named(V4_PRO, W1)
    parts = [part.part for part in parts_of(linear, Formats("NVFP4", "BF16"))]
    assert parts == [PartKind.CODES, PartKind.BLOCK_SCALE, PartKind.TENSOR_SCALE]


def test_fp8_rounds_up_and_fp4_refuses() -> None:
    config = small_v4(hidden_size=200, q_lora_rank=136)
    linear = parameter_named(config, "layers.0.attn.wq_a")
    assert [part.shape for part in parts_of(linear, FP8)] == [(136, 200), (2, 2)]
    with pytest.raises(ShapeMismatch, match="K for NVFP4 = 200"):
        parts_of(linear, NVFP4)


def test_a_cut_follows_into_every_part() -> None:
    linear = parameter_named(V4_PRO, W2)  # [7168, 3072]: rank 1 of 8 along K
    box = Box(((0, 7168), (384, 768)))
    boxes = {part.part: part.box_of(box, W2).ranges for part in parts_of(linear, NVFP4)}
    assert boxes == {
        PartKind.CODES: ((0, 7168), (192, 384)),
        PartKind.BLOCK_SCALE: ((0, 7168), (24, 48)),
        PartKind.TENSOR_SCALE: (),
        PartKind.INPUT_SCALE: (),
    }


@pytest.mark.parametrize(
    ("formats", "start", "stop"), [(NVFP4, 8, 24), (NVFP4, 0, 24), (MXFP4, 16, 48), (FP8, 64, 192)]
)
def test_a_cut_through_a_scale_is_refused(formats: Formats, start: int, stop: int) -> None:
    linear = parameter_named(V4_PRO, W2)
    scale = parts_of(linear, formats)[1]
    with pytest.raises(ShapeMismatch, match="a cut at a multiple of"):
        scale.box_of(Box(((0, 7168), (start, stop))), W2)


def test_the_last_block_may_be_short() -> None:
    linear = parameter_named(small_v4(hidden_size=200), "layers.0.attn.wq_a")
    scale = parts_of(linear, FP8)[1]
    assert scale.box_of(Box(((0, 128), (128, 200))), "wq_a").ranges == ((0, 1), (1, 2))


@pytest.mark.parametrize(
    ("table", "part", "weight", "suffix"),
    [
        ("deepseek", PartKind.BLOCK_SCALE, "FP8_128X128_UE8M0", ".scale"),
        ("deepseek", PartKind.BLOCK_SCALE, "MXFP4", ".scale"),
        ("deepseek", PartKind.BLOCK_SCALE, "NVFP4", ".weight_scale"),
        ("deepseek", PartKind.TENSOR_SCALE, "NVFP4", ".weight_scale_2"),
        ("huggingface", PartKind.BLOCK_SCALE, "FP8_128X128_F32", ".weight_scale_inv"),
        ("vllm", PartKind.BLOCK_SCALE, "MXFP4", ".weight_scale"),
        ("vllm", PartKind.BLOCK_SCALE, "FP8_128X128_UE8M0", ".weight_scale_inv"),
        ("compressed-tensors", PartKind.CODES, "NVFP4", ".weight_packed"),
        ("compressed-tensors", PartKind.INPUT_SCALE, "NVFP4", ".input_global_scale"),
        ("huggingface", PartKind.VALUE, "BF16", ".weight"),
    ],
)
def test_suffixes(table: str, part: PartKind, weight: str, suffix: str) -> None:
    assert suffixes_named(table).suffix(part, weight) == suffix


def test_a_part_without_a_name_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="block_scale of MXFP4 = 'huggingface'"):
        suffixes_named("huggingface").suffix(PartKind.BLOCK_SCALE, "MXFP4")
    with pytest.raises(UnknownName, match="Did you mean vllm"):
        suffixes_named("vlm")


def test_the_same_bytes_are_typed_otherwise() -> None:
    codes, scale = parts_of(parameter_named(V4_PRO, W1), MXFP4)
    typed = {name: (SUFFIXES[name].dtype(codes, "MXFP4"), SUFFIXES[name].dtype(scale, "MXFP4"))
             for name in ("deepseek", "vllm")}  # fmt: skip
    assert typed == {
        "deepseek": (Dtype.I8, Dtype.F8_E8M0),
        "vllm": (Dtype.U8, Dtype.U8),
    }
    assert parts_of(parameter_named(V4_PRO, W1), UNQUANTISED)[0].dtype is Dtype.BF16


# --------------------------------------------------------------------------------------------------
# Name maps: every element goes where it is said to go, and comes back.

if TYPE_CHECKING:
    Tensors = dict[str, NDArray[np.int64]]


def numbered(config: Config, layout: Layout) -> Tensors:
    """Fill the tensors of a layout with elements that all differ."""
    tensors, first = {}, 0
    for tensor in tensors_of(config, layout):
        tensors[tensor.name] = np.arange(first, first + tensor.count).reshape(tensor.shape)
        first += tensor.count
    return tensors


def carried(made: NameMap, source: Mapping[str, NDArray[np.int64]], config: Config) -> Tensors:
    """Move every element; what nothing reaches is -1."""
    target = {t.name: np.full(t.shape, -1) for t in tensors_of(config, made.target)}
    for move in made.moves:
        out_of = source[move.source.tensor][cut(move.source.box.ranges)]
        into = target[move.target.tensor]
        into[cut(move.target.box.ranges)] = out_of.reshape(move.target.box.shape)
    return target


def cut(ranges: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in ranges)


def layouts_of(config: Config, recipe: str) -> list[Layout]:
    """Every layout of the family that can hold a recipe."""
    own = [layout.with_recipe(recipe) for (f, _), layout in LAYOUTS.items() if f == config.family]
    return [layout for layout in own if holds(config, layout)]


def holds(config: Config, layout: Layout) -> bool:
    try:
        tensors_of(config, layout)
    except LayoutMismatch:
        return False
    return True


def require_round_trip(config: Config, source: Layout, target: Layout) -> None:
    """Move every element there and back; what is lost must be what the map leaves unmapped."""
    made = name_map(config, source, target)
    before = numbered(config, source)
    back = carried(made.inverse(), carried(made, before, config), config)
    owners = {move.source.tensor: move.parameter for move in name_map(config, source, source).moves}
    dropped = {name for name, _ in made.unmapped}
    for name, tensor in before.items():
        lost = back[name] == -1
        assert np.array_equal(back[name][~lost], tensor[~lost]), name
        assert not lost.any() or owners[name] in dropped, name


@settings(max_examples=5)
@given(configs())
def test_every_element_round_trips_unquantised(config: Config) -> None:
    held = layouts_of(config, "bf16")
    assert len(held) == len([family for family, _ in LAYOUTS if family == config.family])
    for source in held:
        for target in held:
            require_round_trip(config, source, target)


@pytest.mark.parametrize("recipe", ["official", "nvfp4-experts", "nvfp4-full"])
@pytest.mark.parametrize("config", [TINY_V4, TINY_V32], ids=["v4", "v32"])
def test_every_element_round_trips_quantised(config: Config, recipe: str) -> None:
    first, *others = layouts_of(config, recipe)
    assert len(others) >= 3
    for other in others:
        require_round_trip(config, first, other)
        require_round_trip(config, other, first)


@pytest.mark.parametrize("config", [TINY_V4, TINY_V32], ids=["v4", "v32"])
def test_a_target_tensor_is_filled_completely(config: Config) -> None:
    official = layout_named("official", config)
    for name in ("vllm", "transformers"):
        target = layout_named(name, config)
        source = official.with_recipe(target.recipe)
        made = name_map(config, source, target)
        there = carried(made, numbered(config, source), config)
        assert all((tensor >= 0).all() for tensor in there.values())
        assert set(there) == set(made.by_target)


@given(configs())
def test_an_inverse_of_an_inverse_is_the_map(config: Config) -> None:
    made = name_map(config, layout_named("bf16", config), layout_named("transformers", config))
    assert made.inverse().inverse() == made
    assert set(made.inverse().by_target) == {move.source.tensor for move in made.moves}


def test_a_move_that_goes_astray_is_detected() -> None:
    config = TINY_V4
    made = name_map(config, layout_named("official", config), layout_named("vllm", config))
    before = numbered(config, made.source)
    a, b = (made.moves.index(m) for m in made.filling("model.layers.1.attn.fused_wqa_wkv.weight"))
    moves = list(made.moves)
    moves[a], moves[b] = astray(moves[a], moves[b])
    there = carried(NameMap(made.source, made.target, tuple(moves), ()), before, config)
    back = carried(made.inverse(), there, config)
    wrong = {name for name in before if not np.array_equal(before[name], back[name])}
    assert wrong == {"layers.1.attn.wq_a.weight", "layers.1.attn.wkv.weight"}


def astray(first: Move, second: Move) -> tuple[Move, Move]:
    """Swap two sources of one fused tensor; their shapes are equal in the small model."""
    return first._replace(source=second.source), second._replace(source=first.source)


@pytest.mark.parametrize(
    ("tensor", "sources"),
    [
        # vLLM 0.33: only q_a + kv, kv + gate, gate + up and the experts are truly stacked.
        ("model.layers.2.attn.fused_wqa_wkv.weight",
         [("layers.2.attn.wq_a.weight", (0, 1536)), ("layers.2.attn.wkv.weight", (1536, 2048))]),
        ("model.layers.2.attn.compressor.fused_wkv_wgate.weight",
         [("layers.2.attn.compressor.wkv.weight", (0, 1024)),
          ("layers.2.attn.compressor.wgate.weight", (1024, 2048))]),
        ("model.layers.2.attn.indexer.compressor.fused_wkv_wgate.weight",
         [("layers.2.attn.indexer.compressor.wkv.weight", (0, 256)),
          ("layers.2.attn.indexer.compressor.wgate.weight", (256, 512))]),
        ("model.layers.2.ffn.shared_experts.gate_up_proj.weight_scale_inv",
         [("layers.2.ffn.shared_experts.w1.scale", (0, 24)),
          ("layers.2.ffn.shared_experts.w3.scale", (24, 48))]),
        ("model.layers.2.attn.wq_b.weight", [("layers.2.attn.wq_b.weight", (0, 65536))]),
        ("model.layers.2.ffn.gate.e_score_correction_bias", None),
    ],
)  # fmt: skip
def test_what_fills_a_fused_tensor_of_v4_pro(
    v4_pro_to_vllm: NameMap, tensor: str, sources: list[tuple[str, tuple[int, int]]] | None
) -> None:
    if sources is None:  # layer 2 chooses experts by token id, so it has no bias
        with pytest.raises(UnknownName, match="e_score_correction_bias"):
            v4_pro_to_vllm.filling(tensor)
        return
    moves = v4_pro_to_vllm.filling(tensor)
    assert [(move.source.tensor, move.target.box.ranges[0]) for move in moves] == sources


def test_stacked_experts_of_v4_pro(v4_pro_to_vllm: NameMap) -> None:
    moves = v4_pro_to_vllm.filling("model.layers.2.ffn.experts.w13_weight")
    assert len(moves) == 2 * 384
    assert [m.source.tensor.rpartition("experts.")[2] for m in moves[:3]] == [
        "0.w1.weight", "0.w3.weight", "1.w1.weight",
    ]  # fmt: skip
    assert moves[1].target.box.ranges == ((0, 1), (3072, 6144), (0, 3584))
    assert v4_pro_to_vllm.unmapped == ()


@pytest.fixture(scope="module")
def v4_pro_to_vllm() -> NameMap:
    """One layer of each kind that V4-Pro has, at its widths, and its drafter."""
    config = replace(V4_PRO, num_hidden_layers=3, compress_ratios=(128, 128, 4), num_hash_layers=3)
    return name_map(config, layout_named("official", config), layout_named("vllm", config))


def test_types_change_as_said(v4_pro_to_vllm: NameMap) -> None:
    typed = {
        (m.part, m.source.dtype.value, m.target.dtype.value): m.typing for m in v4_pro_to_vllm.moves
    }
    assert typed == {
        (PartKind.VALUE, "BF16", "BF16"): TypeChange.SAME,
        (PartKind.VALUE, "F32", "F32"): TypeChange.SAME,
        (PartKind.VALUE, "I64", "I32"): TypeChange.CAST,
        (PartKind.CODES, "F8_E4M3", "F8_E4M3"): TypeChange.SAME,
        (PartKind.CODES, "I8", "U8"): TypeChange.VIEW,
        (PartKind.BLOCK_SCALE, "F8_E8M0", "F8_E8M0"): TypeChange.SAME,
        (PartKind.BLOCK_SCALE, "F8_E8M0", "U8"): TypeChange.VIEW,
    }
    config = small_v4()
    norms = name_map(config, layout_named("bf16", config), layout_named("transformers", config))
    (move,) = norms.filling("model.norm.weight")
    assert (move.source.dtype, move.target.dtype, move.typing) == ("BF16", "F32", TypeChange.CAST)


def test_what_has_no_place_is_named_with_its_reason() -> None:
    config = small_v4()
    made = name_map(config, layout_named("bf16", config), layout_named("transformers", config))
    names = {name for name, _ in made.unmapped}
    assert names == {name for name in names if name.startswith("mtp.0.")}
    assert {reason for _, reason in made.unmapped} == {
        "transformers ignores the drafter when it loads"
    }


def test_layouts_with_different_recipes_are_refused() -> None:
    config = small_v4()
    with pytest.raises(LayoutMismatch, match=r"nvfp4-full.*Give both one recipe"):
        name_map(config, layout_named("nvfp4-full", config), layout_named("vllm", config))


def test_an_unknown_target_is_refused(v4_pro_to_vllm: NameMap) -> None:
    with pytest.raises(UnknownName, match=r"Did you mean model\.layers"):
        v4_pro_to_vllm.filling("model.layers.2.attn.fused_wqa.weight")


def test_v3_2_keeps_its_published_order_in_vllm() -> None:
    config = small_v32()
    source, target = layout_named("nvfp4-full", config), layout_named("vllm", config)
    moves = name_map(config, source, target).filling(
        "model.layers.2.self_attn.fused_qkv_a_proj.weight"
    )
    assert [(m.source.tensor.split(".")[4], m.target.box.ranges[0]) for m in moves] == [
        ("q_a_proj", (0, 128)),
        ("kv_a_proj_with_mqa", (128, 320)),
    ]
