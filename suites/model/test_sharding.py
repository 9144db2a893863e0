"""Sharding plans: known shapes of eight ranks, and shards that tile every tensor exactly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from degarble.harness.base.errors import InvalidArgument, Refused, ShapeMismatch, UnknownName
from degarble.harness.model.config.config import V3_2, V4_FLASH, V4_PRO, small_v4, small_v32
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.parameters import parameter_named, parameters
from degarble.harness.model.recipes import recipe_named
from degarble.harness.model.sharding import ShardingPlan, part_boxes, plan, rank_tensors
from degarble.harness.model.tensors import PartKind, parts_of, tensors_of
from degarble.harness.model.types import Box
from degarble.suites.model.configs import configs
from degarble.suites.support.families import STYLES

if TYPE_CHECKING:
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Layout
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.sharding import ParameterShard


def gaps(parameter: Parameter, shards: tuple[ParameterShard, ...]) -> list[str]:
    """Say where boxes overlap, leave the tensor, or leave something out."""
    found = []
    whole = Box.whole(parameter.shape)
    for i, shard in enumerate(shards):
        if any(shard.box.overlaps(other.box) for other in shards[:i]):
            found.append("overlap")
        spans = zip(shard.box.ranges, whole.ranges, strict=True)
        if any(start < 0 or stop > end for (start, stop), (_, end) in spans):
            found.append("outside")
    if sum(shard.box.count for shard in shards) != whole.count:
        found.append("count")
    return found


@st.composite
def plans(draw: st.DrawFn) -> ShardingPlan:
    config = draw(configs(aligned=True))
    style = draw(st.sampled_from([name for family, name in STYLES if family == config.family]))
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    ep = tp if style == "official" else draw(st.sampled_from([1, tp, 2 * tp]))
    pp = draw(st.integers(1, 3))
    try:
        return plan(config, tp=tp, ep=ep, pp=pp, style=style)
    except Refused:
        reject()


@settings(max_examples=30)
@given(plans())
def test_shards_tile_every_parameter(made: ShardingPlan) -> None:
    for parameter in parameters(made.config):
        shards = made.shards(parameter)
        assert gaps(parameter, shards) == [], parameter.name
        holders = [rank for shard in shards for rank in shard.ranks]
        assert len(holders) == len(set(holders)), "a rank holds one box"
        assert all(0 <= rank < made.ranks for rank in holders)
        for rank in range(made.ranks):
            box = made.box_on(parameter, rank)
            assert (box is not None) == (rank in holders)


@settings(max_examples=30)
@given(plans(), st.sampled_from(["bf16", "official", "nvfp4-experts", "nvfp4-full"]))
def test_shards_tile_every_stored_part(made: ShardingPlan, name: str) -> None:
    recipe = recipe_named(name, made.config)
    for parameter in parameters(made.config):
        formats = recipe.format_of(parameter)
        try:
            boxes = dict(part_boxes(made, parameter, formats))
        except ShapeMismatch:
            continue  # a cut through a scale block; refused, which other suites look at
        for stored in parts_of(parameter, formats):
            shards = boxes.pop(stored.part)
            counts = [shard.box.count for shard in shards]
            assert sum(counts) == Box.whole(stored.shape).count
            for i, shard in enumerate(shards):
                assert not any(shard.box.overlaps(other.box) for other in shards[:i])
        assert not boxes


def test_a_lost_row_is_detected() -> None:
    sharding_plan = plan(small_v4(), tp=2)
    parameter = parameter_named(sharding_plan.config, "layers.0.attn.wq_b")
    first, second = sharding_plan.shards(parameter)
    (_, stop), columns = first.box.ranges
    short = first._replace(box=Box(((0, stop - 1), columns)))
    long = first._replace(box=Box(((0, stop + 1), columns)))
    assert gaps(parameter, (first, second)) == []
    assert gaps(parameter, (short, second)) == ["count"]
    assert gaps(parameter, (long, second)) == ["overlap", "count"]


# vLLM 0.33 at TP8 on V4-Pro: 16 heads, 2 groups, experts of 384 under TP.
TP8 = [
    ("attn.wq_b", (8192, 1536)),
    ("attn.wo_a", (2048, 4096)),
    ("attn.wo_b", (7168, 2048)),
    ("attn.attn_sink", (16,)),
    ("attn.wq_a", (1536, 7168)),
    ("attn.wkv", (512, 7168)),
    ("attn.indexer.wq_b", (8192, 1536)),
    ("attn.compressor.wkv", (1024, 7168)),
    ("ffn.experts.7.w1", (384, 7168)),
    ("ffn.experts.7.w2", (7168, 384)),
    ("ffn.shared_experts.w1", (384, 7168)),
    ("ffn.shared_experts.w2", (7168, 384)),
    ("ffn.gate", (384, 7168)),
]


@pytest.mark.parametrize(("name", "shape"), TP8)
def test_known_shapes_of_v4_pro_on_eight_ranks(
    v4_pro_tp8: ShardingPlan, name: str, shape: tuple[int, ...]
) -> None:
    parameter = parameter_named(V4_PRO, f"layers.4.{name}")
    boxes = [v4_pro_tp8.box_on(parameter, rank) for rank in range(8)]
    assert {box.shape for box in boxes if box} == {shape}
    assert None not in boxes


def test_known_tensors_of_v4_pro_on_eight_ranks() -> None:
    # One layer of each type is enough, and quick.
    config = replace(V4_PRO, num_hidden_layers=3, compress_ratios=(128, 128, 4))
    official = {t.name: t.shape for t in rank_tensors(plan(config, tp=8), vllm(config), 3)}
    layer = "model.layers.2."
    assert official[layer + "attn.wq_b.weight_scale_inv"] == (64, 12)
    assert official[layer + "attn.wo_a.weight_scale_inv"] == (16, 32)
    assert official[layer + "attn.fused_wqa_wkv.weight"] == (2048, 7168)
    assert official[layer + "ffn.shared_experts.gate_up_proj.weight"] == (768, 7168)
    assert official[layer + "ffn.experts.w13_weight"] == (384, 768, 3584)
    assert official[layer + "ffn.experts.w2_weight_scale"] == (384, 7168, 12)
    assert official["lm_head.weight"] == (16160, 7168)

    nvfp4 = vllm(config).with_recipe("nvfp4-experts")
    spread = {t.name: t.shape for t in rank_tensors(plan(config, tp=8, ep=8), nvfp4, 3)}
    assert spread[layer + "ffn.experts.w13_weight"] == (48, 6144, 3584)
    assert spread[layer + "ffn.experts.w13_weight_scale"] == (48, 6144, 448)
    assert spread[layer + "ffn.experts.w13_weight_scale_2"] == (48, 2)
    assert spread[layer + "ffn.experts.w2_weight_scale_2"] == (48,)


def vllm(config: Config) -> Layout:
    return layout_named("vllm", config)


@pytest.fixture(scope="module")
def v4_pro_tp8() -> ShardingPlan:
    return plan(V4_PRO, tp=8)


def test_experts_go_by_number() -> None:
    sharding_plan = plan(V4_PRO, tp=8, ep=8)
    assert [sharding_plan.experts_of(rank) for rank in (0, 7)] == [range(48), range(336, 384)]
    holder = sharding_plan.shards(parameter_named(V4_PRO, "layers.9.ffn.experts.100.w1"))
    assert [shard.ranks for shard in holder] == [(2,)]


def test_attention_is_repeated_where_experts_are_spread_wider() -> None:
    sharding_plan = plan(V4_PRO, tp=2, ep=8)
    shards = sharding_plan.shards(parameter_named(V4_PRO, "layers.9.attn.wq_b"))
    assert [shard.ranks for shard in shards] == [(0, 2, 4, 6), (1, 3, 5, 7)]


@pytest.mark.parametrize(
    ("config", "pp", "layers"),
    [
        (V4_PRO, 2, ((0, 31), (31, 61))),
        (V4_PRO, 4, ((0, 15), (15, 30), (30, 46), (46, 61))),
        (
            V4_FLASH,
            8,
            ((0, 5), (5, 10), (10, 15), (15, 20), (20, 26), (26, 32), (32, 38), (38, 43)),
        ),
    ],
)
def test_stages_hold_whole_layers(
    config: Config, pp: int, layers: tuple[tuple[int, int], ...]
) -> None:
    sharding_plan = plan(config, tp=8, pp=pp)
    assert sharding_plan.stage_layers == layers
    ends = Counter(
        (name, rank // 8)
        for name in ("embed", "head", "norm", "hc_head_fn", "mtp.0.e_proj")
        for shard in sharding_plan.shards(parameter_named(config, name))
        for rank in shard.ranks
    )
    last = pp - 1
    assert set(ends) == {
        ("embed", 0), ("embed", last), ("head", last), ("norm", last), ("hc_head_fn", last),
        ("mtp.0.e_proj", last),
    }  # fmt: skip


def test_a_model_without_drafter_embeds_on_the_first_stage_only() -> None:
    sharding_plan = plan(small_v32(num_nextn_predict_layers=0), pp=2)
    assert sharding_plan.stages(parameter_named(sharding_plan.config, "embed")) == (0,)


def test_ranks_together_hold_every_byte_once() -> None:
    config = small_v4(num_nextn_predict_layers=0)
    sharding_plan = plan(config, tp=2, ep=2, style="official")
    layout = layout_named("official", config)
    held = [t for rank in range(2) for t in rank_tensors(sharding_plan, layout, rank)]
    cut = {name for (_, style), cuts in STYLES.items() if style == "official" for name in cuts}
    whole = tensors_of(config, layout)
    repeated = sum(
        sum(part.dtype.size * Box.whole(part.shape).count
            for part in parts_of(p, recipe_named("official", config).format_of(p)))
        for p in parameters(config)
        if p.expert is None and p.row.name not in cut
    )  # fmt: skip
    assert sum(t.nbytes for t in held) == sum(t.nbytes for t in whole) + repeated


def test_a_short_last_rank_where_an_engine_pads() -> None:
    config = small_v4(moe_intermediate_size=384, o_groups=4)
    sharding_plan = plan(config, tp=2)
    parameter = parameter_named(config, "layers.0.ffn.shared_experts.w1")
    assert [shard.box.ranges[0] for shard in sharding_plan.shards(parameter)] == [
        (0, 256),
        (256, 384),
    ]
    wide = plan(config, tp=4)
    assert [s.box.ranges[0] for s in wide.shards(parameter)] == [(0, 128), (128, 256), (256, 384)]


@pytest.mark.parametrize(
    ("config", "sizes", "name"),
    [
        (V4_PRO, {"tp": 32}, "tp"),
        (V4_FLASH, {"tp": 16}, "tp"),
        (V4_PRO, {"tp": 3}, "tp"),
        (V4_PRO, {"tp": 0}, "tp"),
        (V4_PRO, {"tp": True}, "tp"),
        (V4_PRO, {"tp": 2.0}, "tp"),
        (V4_PRO, {"ep": 5}, "ep"),
        (V4_PRO, {"tp": 4, "ep": 6}, "ep"),
        (V4_PRO, {"tp": 8, "ep": 1, "style": "official"}, "ep"),
        (V4_PRO, {"pp": 62}, "pp"),
        (V4_PRO, {"pp": -1}, "pp"),
        (V3_2, {"tp": 3}, "tp"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(
    config: Config, sizes: dict[str, object], name: str
) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        plan(config, **sizes)  # type: ignore[arg-type]
    assert refusal.value.name == name


def test_an_extent_that_ranks_do_not_divide_is_refused() -> None:
    config = small_v4(vocab_size=250, o_groups=4)
    with pytest.raises(ShapeMismatch, match="dimension 0 of embed = 250"):
        plan(config, tp=4)


def test_a_cut_through_scales_is_refused() -> None:
    config = small_v4(moe_intermediate_size=64)  # 32 columns a rank: MXFP4 fits, 16 would not
    sharding_plan = plan(config, tp=2)
    assert rank_tensors(sharding_plan, layout_named("bf16", config), 1)
    with pytest.raises(ShapeMismatch, match="a cut at a multiple of 128"):
        rank_tensors(plan(small_v4(o_lora_rank=32), tp=4), layout_named("official", config), 1)
    with pytest.raises(ShapeMismatch, match=r"w2.*a cut at a multiple of 32"):
        rank_tensors(plan(config, tp=4), layout_named("official", config), 1)


def test_unknown_styles_and_ranks_are_refused() -> None:
    with pytest.raises(UnknownName, match="Did you mean vllm"):
        plan(V4_PRO, style="vlm")
    with pytest.raises(UnknownName):
        plan(V3_2, style="official")
    with pytest.raises(InvalidArgument, match="0 to 1"):
        rank_tensors(plan(small_v4(), tp=2), layout_named("official", small_v4()), 2)


def test_scalars_go_wherever_their_parameter_goes() -> None:
    sharding_plan = plan(small_v4(), tp=2)
    parameter = parameter_named(sharding_plan.config, "layers.0.ffn.experts.0.w1")
    boxes = dict(
        part_boxes(
            sharding_plan,
            parameter,
            recipe_named("nvfp4-full", sharding_plan.config).format_of(parameter),
        )
    )
    assert boxes[PartKind.TENSOR_SCALE] == ((Box(()), (0, 1)),)
