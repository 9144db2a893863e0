"""The parameter tables: what exists where, known shapes, and one owner each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from degarble.harness.base.errors import UnknownName
from degarble.harness.model.config.config import V3_2, V4_FLASH, V4_PRO, Dspark, V4Config, small_v4
from degarble.harness.model.parameters import (
    V4_BLOCK,
    V4_ENDS,
    V4_MTP,
    V32_BLOCK,
    V32_ENDS,
    V32_MTP,
    WHERE,
    Row,
    parameter_named,
    parameters,
)
from degarble.harness.model.types import Kind
from degarble.suites.model.configs import configs

if TYPE_CHECKING:
    from degarble.harness.model.config.config import Config

TABLES = {
    "V4_ENDS": V4_ENDS, "V4_BLOCK": V4_BLOCK, "V4_MTP": V4_MTP,
    "V32_ENDS": V32_ENDS, "V32_BLOCK": V32_BLOCK, "V32_MTP": V32_MTP,
}  # fmt: skip


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_names_everything_once(table: tuple[Row, ...]) -> None:
    assert len({row.name for row in table}) == len(table)
    spelled = [row.hf for row in table if row.hf]
    assert len(set(spelled)) == len(spelled)
    for row in table:
        assert all(place in WHERE for place in row.where.split(", ")), row.name


@given(configs())
def test_names_are_unique_and_shapes_are_positive(config: Config) -> None:
    found = parameters(config)
    assert len({parameter.name for parameter in found}) == len(found)
    assert all(extent > 0 for parameter in found for extent in parameter.shape)


@given(configs())
def test_what_a_block_has_follows_from_its_type(config: Config) -> None:
    for block in config.blocks:
        inside = {p.row.name for p in parameters(config) if p.block == block}
        has = {part: any(part in name for name in inside) for part in ("compressor", "indexer")}
        if isinstance(config, V4Config):
            assert has == {"compressor": block.ratio > 0, "indexer": block.ratio == 4}
            hashed = block.index < config.num_hash_layers and not block.is_drafter
            assert ("ffn.gate.tid2eid" in inside) == hashed
            assert ("ffn.gate.bias" in inside) != hashed
        else:
            assert has == {"compressor": False, "indexer": True}
        dense = "ffn.w1" in inside
        assert dense != ("ffn.gate" in inside)


@pytest.mark.parametrize(
    ("config", "name", "shape"),
    [
        # deepseek-ai/DeepSeek-V4-Pro shard headers
        (V4_PRO, "embed", (129280, 7168)),
        (V4_PRO, "hc_head_fn", (4, 28672)),
        (V4_PRO, "layers.0.hc_attn_fn", (24, 28672)),
        (V4_PRO, "layers.0.attn.wq_b", (65536, 1536)),
        (V4_PRO, "layers.0.attn.wkv", (512, 7168)),
        (V4_PRO, "layers.0.attn.wo_a", (16384, 4096)),
        (V4_PRO, "layers.0.attn.wo_b", (7168, 16384)),
        (V4_PRO, "layers.0.attn.compressor.ape", (128, 512)),
        (V4_PRO, "layers.2.attn.compressor.ape", (4, 1024)),
        (V4_PRO, "layers.0.attn.compressor.wkv", (512, 7168)),
        (V4_PRO, "layers.2.attn.compressor.wgate", (1024, 7168)),
        (V4_PRO, "layers.2.attn.indexer.compressor.ape", (4, 256)),
        (V4_PRO, "layers.2.attn.indexer.compressor.wkv", (256, 7168)),
        (V4_PRO, "layers.2.attn.indexer.weights_proj", (64, 7168)),
        (V4_PRO, "layers.2.ffn.gate.tid2eid", (129280, 6)),
        (V4_PRO, "mtp.0.e_proj", (7168, 7168)),
        (V4_FLASH, "layers.2.attn.wo_a", (8192, 4096)),
        # deepseek-ai/DeepSeek-V3.2-Exp inference/model.py
        (V3_2, "layers.0.attn.wq_b", (24576, 1536)),
        (V3_2, "layers.0.attn.wkv_a", (576, 7168)),
        (V3_2, "layers.0.attn.wkv_b", (32768, 512)),
        (V3_2, "layers.0.attn.wo", (7168, 16384)),
        (V3_2, "layers.0.ffn.w1", (18432, 7168)),
        (V3_2, "layers.3.ffn.experts.255.w2", (7168, 2048)),
        (V3_2, "mtp.0.eh_proj", (7168, 14336)),
    ],
)
def test_known_shapes(config: Config, name: str, shape: tuple[int, ...]) -> None:
    assert parameter_named(config, name).shape == shape


def test_counts_of_v4_pro() -> None:
    counts = Counter(p.row.name for p in parameters(V4_PRO))
    assert counts["attn.compressor.wkv"] == 61
    assert counts["attn.indexer.compressor.wkv"] == 30
    assert counts["ffn.gate.tid2eid"] == 3
    assert counts["ffn.gate.bias"] == 58 + 1
    assert counts["ffn.experts.{e}.w1"] == 384 * 62


def test_a_block_parallel_drafter_has_its_own_tensors() -> None:
    # DeepSeek-V4-Flash-0731 shard headers, second-hand.
    dspark = Dspark(target_layer_ids=(40, 41, 42), markov_rank=256, block_size=5,
                    noise_token_id=128799)  # fmt: skip
    config = replace(V4_FLASH, dspark=dspark)
    drafter = {p.name: p.shape for p in parameters(config) if p.name.startswith("mtp.")}
    assert drafter["mtp.0.main_proj"] == (4096, 3 * 4096)
    assert drafter["mtp.2.markov_head.markov_w1"] == (129280, 256)
    assert drafter["mtp.2.confidence_head.proj"] == (1, 4096 + 256)
    assert {"mtp.0.main_norm", "mtp.2.norm", "mtp.2.hc_head_fn"} <= set(drafter)
    assert not {"mtp.0.enorm", "mtp.0.norm", "mtp.2.e_proj", "mtp.0.hc_head_fn"} & set(drafter)


def test_experts_come_one_after_the_other() -> None:
    routed = [p.name for p in parameters(small_v4()) if p.expert is not None][:4]
    assert routed == [f"layers.0.ffn.experts.{tail}" for tail in ("0.w1", "0.w2", "0.w3", "1.w1")]


def test_an_unknown_name_is_refused_with_its_neighbours() -> None:
    with pytest.raises(UnknownName, match=r"Did you mean layers\.0\.attn\.wq_b"):
        parameter_named(small_v4(), "layers.0.attn.wqb")


def test_plain_parameters_carry_no_suffix() -> None:
    for parameter in parameters(small_v4()):
        assert (parameter.kind is Kind.PLAIN) == (not parameter.kind.has_suffix)
