"""Name maps: every element goes where it is said to go, and comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings

from degarble.harness.base.errors import LayoutMismatch, UnknownName
from degarble.harness.model.config.config import V4_PRO, small_v4, small_v32
from degarble.harness.model.layouts import LAYOUTS, Layout, layout_named
from degarble.harness.model.tensors import Move, NameMap, PartKind, TypeChange, name_map, tensors_of
from degarble.suites.model.configs import TINY_V4, TINY_V32, configs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from degarble.harness.model.config.config import Config

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
    assert made.inverse().by_target == {
        name: tuple(m._replace(source=m.target, target=m.source) for m in moves)
        for name, moves in made.by_source.items()
    }


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
