"""Config records: released geometries, derived facts, and every field spoiled in turn."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given

from degarble.harness.base.errors import Refused
from degarble.harness.model.config.config import (
    V3_2,
    V4_FLASH,
    V4_PRO,
    Config,
    Dspark,
    V4Config,
    compressor_windows,
    small_v4,
    small_v32,
)
from degarble.harness.model.config.json_file import config_to_dict
from degarble.harness.model.types import LayerType, MlpType, RopeEnd, RopePairing, Yarn
from degarble.suites.model.configs import configs

RECORDS: dict[str, Config] = {"v4": V4_PRO, "v32": V3_2}
PROVENANCE = {"quantisation", "other"}
DSPARK = Dspark(target_layer_ids=(2, 3, 4), markov_rank=32, block_size=5, noise_token_id=9)
# What no field of that type may be: a number in quotes, a flag, a fraction, nothing, too small.
BAD: dict[str, list[Any]] = {
    "int": ["7168", True, 2.5, -1],
    "float": ["1e-6", True, float("nan"), float("inf"), -1.0],
    "str": ["sqrtsoftplu", 3, None],
    "tuple[int, ...]": [[0, 4], ("4",), "4,128"],
    "Yarn": [{"factor": 16}, 16],
    "Dspark": [],
}


def spoiled_fields() -> list[Any]:
    """Every field of both records with every bad value of its type."""
    return [
        pytest.param(record, field.name, value, id=f"{name}-{field.name}-{value!r}")
        for name, record in RECORDS.items()
        for field in fields(record)
        if field.name not in PROVENANCE
        for value in BAD[str(field.type).removesuffix(" | None")]
    ]


@pytest.mark.parametrize(("record", "name", "value"), spoiled_fields())
def test_every_spoiled_field_is_refused_by_name(record: Any, name: str, value: object) -> None:
    with pytest.raises(Refused) as refusal:
        replace(record, **{name: value})
    assert refusal.value.name.startswith(name)


@pytest.mark.parametrize(
    ("record", "change", "name"),
    [
        (V4_PRO, {"o_groups": 24}, "o_groups"),
        (V4_PRO, {"compress_ratios": V4_PRO.compress_ratios[:60]}, "compress_ratios"),
        (V4_PRO, {"compress_ratios": (*V4_PRO.compress_ratios, 0, 0)}, "compress_ratios"),
        (V4_PRO, {"compress_ratios": (2, *V4_PRO.compress_ratios[1:])}, "compress_ratios[0]"),
        (V4_PRO, {"compress_ratios": (*V4_PRO.compress_ratios[:61], 4)}, "compress_ratios[61]"),
        (V4_PRO, {"num_hash_layers": 62}, "num_hash_layers"),
        (V4_PRO, {"num_experts_per_tok": 385}, "num_experts_per_tok"),
        (V4_PRO, {"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        (V4_PRO, {"qk_rope_head_dim": 130}, "qk_rope_head_dim"),
        (V4_PRO, {"dspark": replace(DSPARK, target_layer_ids=(61,))}, "dspark_target_layer_ids"),
        (V4_PRO, {"dspark": replace(DSPARK, markov_rank=0)}, "markov_rank"),
        (V4_PRO, {"yarn": Yarn(factor=0, original_max_position_embeddings=1)}, "factor"),
        (V3_2, {"first_k_dense_replace": 62}, "first_k_dense_replace"),
        (V3_2, {"n_group": 7}, "n_group"),
        (V3_2, {"topk_group": 9}, "topk_group"),
        (V3_2, {"num_experts_per_tok": 129}, "num_experts_per_tok"),
        (V3_2, {"qk_rope_head_dim": 256}, "qk_rope_head_dim"),
    ],
)
def test_contradictions_are_refused_by_name(record: Any, change: Any, name: str) -> None:
    with pytest.raises(Refused) as refusal:
        replace(record, **change)
    assert refusal.value.name == name


def test_v4_pro_alternates_and_ends_compressed() -> None:
    # deepseek-ai/DeepSeek-V4-Pro config.json; indexer tensors exist in exactly these 30 layers.
    indexed = [layer for layer in range(61) if V4_PRO.has_indexer(layer)]
    assert indexed == list(range(2, 61, 2))
    assert all(V4_PRO.has_compressor(layer) for layer in range(61))
    assert V4_PRO.layer_type(60) is LayerType.SPARSE
    assert len(V4_PRO.compress_ratios) == 61
    assert [V4_PRO.is_hash_layer(layer) for layer in range(5)] == [True] * 3 + [False] * 2
    assert (V4_PRO.coff(0), V4_PRO.coff(2)) == (1, 2)


def test_v4_flash_begins_with_two_windows() -> None:
    counts = Counter(V4_FLASH.layer_type(layer) for layer in range(43))
    assert counts == {LayerType.SLIDING: 2, LayerType.SPARSE: 21, LayerType.HEAVY: 20}
    assert V4_FLASH.coff(0) == 0
    assert V4_FLASH.layer_type(42) is LayerType.SPARSE


@pytest.mark.parametrize("config", [V4_PRO, V4_FLASH])
def test_groups_are_eight_heads(config: V4Config) -> None:
    assert (config.heads_per_group, config.group_features) == (8, 4096)
    assert (config.hc_rows, config.nope_head_dim) == (24, 448)
    assert config.wo_a_view() == (config.o_groups, 1024, 4096)


def test_wo_a_is_split_by_groups_alone() -> None:
    assert V4_PRO.wo_a_view(tp=8) == (2, 1024, 4096)
    with pytest.raises(Refused, match="16 groups"):
        V4_PRO.wo_a_view(tp=32)


def test_rotation_depends_on_compression() -> None:
    window, sparse, heavy = (V4_FLASH.layers[layer] for layer in (0, 2, 3))
    plain, scaled = V4_FLASH.rope(window), V4_FLASH.rope(sparse)
    assert (plain.theta, plain.yarn) == (10000, None)
    assert (scaled.theta, scaled.yarn) == (160000, V4_FLASH.yarn)
    assert V4_FLASH.rope(heavy) == scaled
    assert V4_FLASH.rope(V4_FLASH.blocks[-1]) == plain, "the drafter has no compressor"
    assert (scaled.pairing, scaled.end, scaled.dims) == (RopePairing.INTERLEAVED, RopeEnd.LAST, 64)


def test_v32_rotates_its_indexer_otherwise() -> None:
    block = V3_2.layers[0]
    assert (V3_2.rope(block).pairing, V3_2.rope(block).end) == (
        RopePairing.INTERLEAVED,
        RopeEnd.LAST,
    )
    assert (V3_2.indexer_rope().pairing, V3_2.indexer_rope().end) == (
        RopePairing.HALVES,
        RopeEnd.FIRST,
    )
    assert V3_2.qk_head_dim == 192


def test_v32_is_dense_first_and_indexed_everywhere() -> None:
    assert [block.mlp_type for block in V3_2.layers[:4]] == [MlpType.DENSE] * 3 + [MlpType.SCORED]
    assert all(V3_2.has_indexer(layer) for layer in range(61))
    assert V3_2.blocks[-1].prefix == "mtp.0"
    assert V3_2.blocks[-1].mlp_type is MlpType.SCORED


def test_ratios_may_leave_the_drafter_out() -> None:
    longer = replace(V4_PRO, compress_ratios=(*V4_PRO.compress_ratios, 0))
    assert longer == V4_PRO
    assert config_to_dict(V4_PRO)["compress_ratios"] == [*V4_PRO.compress_ratios, 0]
    assert not replace(V4_PRO, num_nextn_predict_layers=0).drafters


def test_a_block_parallel_drafter_has_a_block_a_target() -> None:
    config = small_v4(dspark=DSPARK)
    assert [block.prefix for block in config.blocks[-3:]] == ["mtp.0", "mtp.1", "mtp.2"]
    assert len(config_to_dict(config)["compress_ratios"]) == 5 + 3
    assert config.num_nextn_predict_layers == 1


def test_small_models_hold_every_kind_of_layer() -> None:
    assert {block.layer_type for block in small_v4().layers} == set(LayerType) - {LayerType.INDEXED}
    assert {block.mlp_type for block in small_v4().layers} == {MlpType.HASH, MlpType.SCORED}
    assert {block.mlp_type for block in small_v32().layers} == {MlpType.DENSE, MlpType.SCORED}
    assert small_v4(vocab_size=96).vocab_size == 96


@given(configs())
def test_a_record_can_be_hashed_and_sent_to_a_process(config: Config) -> None:
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert hash(copy) == hash(config)
    assert copy.blocks == config.blocks


@given(configs())
def test_provenance_takes_no_part_in_equality(config: Config) -> None:
    assert replace(config, other={"torch_dtype": "bfloat16"}) == config


@given(configs())
def test_blocks_are_layers_and_drafters(config: Config) -> None:
    blocks = config.blocks
    assert len(blocks) == config.num_hidden_layers + config.drafters
    assert len({block.prefix for block in blocks}) == len(blocks)
    for block in blocks:
        assert compressor_windows(block) == {0: 0, 4: 2, 128: 1}[block.ratio]
        assert not (block.is_drafter and block.ratio)
