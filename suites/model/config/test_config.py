"""Config records and config.json: every field spoiled in turn, three spellings, one record."""

from __future__ import annotations

import json
import math
import pickle
from collections import Counter
from contextlib import suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from degarble.harness.base.errors import Refused, UnknownName, UnreadableFile
from degarble.harness.model.config.config import (
    V3_2,
    V4_FLASH,
    V4_PRO,
    Dspark,
    V4Config,
    V32Config,
    compressor_windows,
    small_v4,
    small_v32,
)
from degarble.harness.model.config.json_file import (
    REQUIRED,
    SPELLINGS,
    V4_KEYS,
    V32_KEYS,
    config_from_dict,
    config_from_file,
    config_to_dict,
)
from degarble.harness.model.types import LayerType, MlpType, RopeEnd, RopePairing, Yarn
from degarble.references.attention import softmax_scale
from degarble.suites.model.configs import configs

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.suites.support.configs import DeepSeekConfig


# --------------------------------------------------------------------------------------------------
# DeepSeekConfig records: released geometries, derived facts, and every field spoiled in turn.

RECORDS: dict[str, DeepSeekConfig] = {"v4": V4_PRO, "v32": V3_2}
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
    assert all(layer.ratio > 0 for layer in V4_PRO.layers[:61])
    assert V4_PRO.layer_type(60) is LayerType.SPARSE
    assert len(V4_PRO.compress_ratios) == 61
    hashed = [layer.mlp_type is MlpType.HASH for layer in V4_PRO.layers[:5]]
    assert hashed == [True] * 3 + [False] * 2
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
    of_others = {LayerType.INDEXED, LayerType.FULL, LayerType.TRACED}
    assert {block.layer_type for block in small_v4().layers} == set(LayerType) - of_others
    assert {block.mlp_type for block in small_v4().layers} == {MlpType.HASH, MlpType.SCORED}
    assert {block.mlp_type for block in small_v32().layers} == {MlpType.DENSE, MlpType.SCORED}
    assert small_v4(vocab_size=96).vocab_size == 96


@given(configs())
def test_a_record_can_be_hashed_and_sent_to_a_process(config: DeepSeekConfig) -> None:
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert hash(copy) == hash(config)
    assert copy.blocks == config.blocks


@given(configs())
def test_provenance_takes_no_part_in_equality(config: DeepSeekConfig) -> None:
    assert replace(config, other={"torch_dtype": "bfloat16"}) == config


@given(configs())
def test_blocks_are_layers_and_drafters(config: DeepSeekConfig) -> None:
    blocks = config.blocks
    assert len(blocks) == config.num_hidden_layers + config.drafters
    assert len({block.prefix for block in blocks}) == len(blocks)
    for block in blocks:
        assert compressor_windows(block) == {0: 0, 4: 2, 128: 1}[block.ratio]
        assert not (block.is_drafter and block.ratio)


# --------------------------------------------------------------------------------------------------
# Reading and writing config.json: three spellings, one record, and every way to be unclear.


def readable_from(config: DeepSeekConfig, spelling: str) -> DeepSeekConfig:
    """What a record is after a round trip: inference/config.json states less."""
    if spelling != "inference":
        return config
    if isinstance(config, V4Config):
        stated = 1 if config.dspark else config.num_nextn_predict_layers
        yarn = config.yarn and replace(config.yarn, mscale=None, mscale_all_dim=None)
        return replace(
            config, max_position_embeddings=None, num_nextn_predict_layers=stated, yarn=yarn
        )
    yarn = config.yarn
    if yarn is not None:
        mscale = yarn.mscale_all_dim or None
        factor = None if mscale else 1.0
        yarn = replace(yarn, mscale=mscale, mscale_all_dim=mscale, attention_factor=factor)
    return replace(config, max_position_embeddings=None, num_nextn_predict_layers=0, yarn=yarn)


def is_official(config: DeepSeekConfig) -> bool:
    """Tell whether the official code can compute what the config's YaRN says."""
    return config.yarn is None or (config.yarn.rotation_scale == 1 and config.yarn.truncate)


@given(configs(), st.sampled_from(SPELLINGS))
def test_every_spelling_round_trips(config: DeepSeekConfig, spelling: str) -> None:
    if spelling == "inference" and not is_official(config):
        with pytest.raises(Refused, match=r"official code"):
            config_to_dict(config, spelling)
        return
    raw = json.loads(json.dumps(config_to_dict(config, spelling)))
    read = config_from_dict(raw)
    assert read == readable_from(config, spelling)
    assert set(read.other) <= {"architectures"}, "nothing that anatomy needs is provenance"


@given(configs())
def test_spellings_may_be_mixed(config: DeepSeekConfig) -> None:
    raw = config_to_dict(config) | config_to_dict(config, "transformers")
    assert config_from_dict(raw) == config


@pytest.mark.parametrize("config", [V4_PRO, V3_2], ids=["v4", "v32"])
def test_each_missing_field_is_refused_by_name(config: DeepSeekConfig) -> None:
    keys = V4_KEYS if isinstance(config, V4Config) else V32_KEYS
    required = [key.field for key in keys if key.default is REQUIRED]
    required += ["rope_theta"]
    if isinstance(config, V4Config):
        required += ["compress_ratios", "compress_rope_theta", "num_hash_layers"]
        required += ["qk_rope_head_dim", "num_nextn_predict_layers"]
    else:
        required += ["first_k_dense_replace"]
    for name in required:
        raw = config_to_dict(config)
        del raw[name]
        with pytest.raises(Refused, match="missing") as refusal:
            config_from_dict(raw)
        assert refusal.value.name == name


def test_rope_scaling_may_be_null_but_not_absent() -> None:
    raw = config_to_dict(V4_PRO)
    assert config_from_dict(raw | {"rope_scaling": None}).yarn is None
    del raw["rope_scaling"]
    with pytest.raises(Refused, match="original_seq_len = 'missing'"):
        config_from_dict(raw)


PRO, V32 = config_to_dict(V4_PRO), config_to_dict(V3_2)
SAVED = config_to_dict(V4_PRO, "transformers")


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (PRO | {"dim": 4096}, "hidden_size"),
        (PRO | {"n_hash_layers": 2}, "num_hash_layers"),
        (PRO | {"num_key_value_heads": 8}, "num_key_value_heads"),
        (PRO | {"tie_word_embeddings": True}, "tie_word_embeddings"),
        (PRO | {"attention_bias": 0}, "attention_bias"),
        (PRO | {"hidden_act": "gelu"}, "hidden_act"),
        (PRO | {"layer_types": SAVED["layer_types"][::-1]}, "layer_types"),
        (PRO | {"layer_types": ["full_attention"] * 61}, "layer_types"),
        (PRO | {"compress_ratios": "4"}, "compress_ratios"),
        (PRO | {"compress_rates": {"compressed_sparse_attention": 8}}, "compress_rates.compressed"),
        (PRO | {"compress_rates": {"dense": 1}}, "compress_rates.dense"),
        (PRO | {"mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 59}, "num_hash_layers"),
        (PRO | {"mlp_layer_types": ["moe"] + ["hash_moe"] * 60}, "mlp_layer_types"),
        (PRO | {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        (PRO | {"mlp_layer_types": ["hash_moe"] * 3}, "mlp_layer_types"),
        (PRO | {"layer_types": []}, "layer_types"),
        (PRO | {"layer_types": SAVED["layer_types"][:5]}, "layer_types"),
        (PRO | {"partial_rotary_factor": 0.25}, "qk_rope_head_dim"),
        (PRO | {"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
        (PRO | {"rope_scaling": {"type": "linear", "factor": 4}}, "rope_scaling.rope_type"),
        (PRO | {"rope_scaling": PRO["rope_scaling"] | {"low": 1}}, "rope_scaling keys"),
        (PRO | {"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling.original_max"),
        (PRO | {"rope_scaling": 16}, "rope_scaling"),
        (SAVED | {"rope_scaling": PRO["rope_scaling"] | {"factor": 8}}, "rope_scaling"),
        (SAVED | {"rope_theta": 5}, "rope_theta"),
        (SAVED | {"rope_parameters": {"main": {}}}, "rope_parameters.compress"),
        (PRO | {"dspark_block_size": 5}, "dspark_target_layer_ids"),
        (PRO | {"num_hidden_layers": "61"}, "num_hidden_layers"),
        (V32 | {"n_dense_layers": 1}, "first_k_dense_replace"),
        (V32 | {"moe_layer_freq": 2}, "moe_layer_freq"),
        (V32 | {"num_key_value_heads": 1}, "num_key_value_heads"),
        (V32 | {"layer_types": ["full_attention"] * 61}, "layer_types"),
        (V32 | {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor"),
        ({"hidden_size": 1}, "model_type"),
    ],
)
def test_json_file_contradictions_are_refused_by_name(raw: dict[str, Any], name: str) -> None:
    with pytest.raises(Refused) as refusal:
        config_from_dict(raw)
    assert refusal.value.name.startswith(name)


LOG = math.log(40)
FULL = 0.1 * LOG + 1  # YaRN's own amplitude at a factor of 40
SHARE = 0.07 * LOG + 1  # with an mscale of 0.7


@pytest.mark.parametrize(
    ("stated", "rotation", "logits"),
    [
        ({}, FULL, 1),
        ({"mscale": None, "mscale_all_dim": None}, FULL, 1),
        ({"mscale": 0.7}, FULL, 1),
        ({"mscale_all_dim": 0.7}, FULL, SHARE**2),
        ({"mscale": 0.7, "mscale_all_dim": 0}, FULL, 1),
        ({"mscale": 0, "mscale_all_dim": 0.7}, FULL, SHARE**2),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1, FULL**2),
        ({"mscale": 1.0, "mscale_all_dim": 0.7}, FULL / SHARE, SHARE**2),
        ({"attention_factor": None}, FULL, 1),
        ({"attention_factor": 0, "mscale_all_dim": 0.7}, 0, SHARE**2),
        ({"attention_factor": 1.3, "mscale": 1.0, "mscale_all_dim": 0.7}, 1.3, SHARE**2),
        ({"factor": 1}, 1, 1),
        ({"factor": 0.5, "mscale": 1.0, "mscale_all_dim": 0.7}, 1, 1),
    ],
)
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_yarn_of_v32_scales_rotations_and_logits(
    where: str, stated: dict[str, Any], rotation: float, logits: float
) -> None:
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096} | stated
    read = config_from_dict(V32 | {"rope_scaling": None, where: yarn})
    assert isinstance(read, V32Config)
    assert read.rope(read.layers[0]).scale == pytest.approx(rotation)
    assert read.indexer_rope().scale == pytest.approx(rotation)
    assert softmax_scale(read) * read.qk_head_dim**0.5 == pytest.approx(logits)


@pytest.mark.parametrize(
    ("stated", "flat", "by_layer"),
    [
        ({}, 1, 0.1 * math.log(16) + 1),
        ({"attention_factor": None}, 0.1 * math.log(16) + 1, 0.1 * math.log(16) + 1),
        ({"attention_factor": 1.3}, 1.3, 1.3),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1, 1),
    ],
)
def test_yarn_of_v4_scales_rotations_where_transformers_does(
    stated: dict[str, Any], flat: float, by_layer: float
) -> None:
    yarn = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 64} | stated
    nested = json.loads(json.dumps(SAVED["rope_parameters"]))
    nested["compress"] = {"rope_theta": 160000, "partial_rotary_factor": 0.125} | yarn
    for raw, expected in (
        (PRO | {"rope_scaling": yarn}, flat),
        (SAVED | {"rope_parameters": nested}, by_layer),
    ):
        read = config_from_dict(raw)
        assert isinstance(read, V4Config)
        scales = {block.ratio: read.rope(block).scale for block in read.layers}
        assert scales == {4: pytest.approx(expected), 128: pytest.approx(expected)} | (
            {0: 1} if 0 in scales else {}
        )
        assert config_from_dict(config_to_dict(read, "transformers")) == read


@pytest.mark.parametrize(
    ("stated", "name"),
    [
        ({"mscale": -1}, "mscale"),
        ({"mscale": 1e308, "mscale_all_dim": 1e308}, "mscale_all_dim"),
        ({"mscale_all_dim": "1"}, "mscale_all_dim"),
        ({"attention_factor": -0.5}, "attention_factor"),
        ({"attention_factor": float("nan")}, "attention_factor"),
        ({"truncate": 1}, "truncate"),
        ({"beta_slow": 1e-323}, "beta_slow"),
        ({"original_max_position_embeddings": 10**400}, "original_max_position_embeddings"),
        ({"rope_theta": 1}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "llama3"}, "rope_parameters.rope_type"),
        ({"rope_type": "longrope"}, "rope_parameters.rope_type"),
    ],
)
def test_yarn_out_of_range_is_refused_by_name(stated: dict[str, Any], name: str) -> None:
    yarn = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    bare = {key: x for key, x in V32.items() if key not in ("rope_scaling", "rope_theta")}
    with pytest.raises(Refused) as refusal:
        config_from_dict(bare | {"rope_parameters": {"rope_theta": 1e4} | yarn | stated})
    assert refusal.value.name == name


def test_truncation_null_and_betas_of_zero_are_read_as_transformers_does() -> None:
    yarn = V32["rope_scaling"] | {"truncate": None, "beta_fast": 0, "beta_slow": None}
    read = config_from_dict(V32 | {"rope_scaling": yarn})
    assert read.yarn is not None
    assert (read.yarn.truncate, read.yarn.beta_fast, read.yarn.beta_slow) == (False, 32, 1)


def test_a_v32_of_save_pretrained_has_no_scoring_function() -> None:
    saved = config_to_dict(V3_2, "transformers")
    del saved["scoring_func"]
    assert config_from_dict(saved) == V3_2
    assert config_from_dict(saved | {"first_k_dense_replace": 3}) == V3_2


def test_the_default_of_dense_layers_is_ignored_next_to_a_list() -> None:
    saved = config_to_dict(V3_2, "transformers") | {"mlp_layer_types": ["sparse"] * 61}
    read = config_from_dict(saved | {"first_k_dense_replace": 3})
    assert isinstance(read, V32Config)
    assert read.first_k_dense_replace == 0
    with pytest.raises(Refused, match="as mlp_layer_types says"):
        config_from_dict(saved | {"first_k_dense_replace": 2})


def test_a_fraction_that_transformers_cuts_short_is_refused() -> None:
    raw = config_to_dict(small_v4(head_dim=44, qk_rope_head_dim=30), "transformers")
    assert int(44 * raw["partial_rotary_factor"]) == 30
    parts = json.loads(json.dumps(raw["rope_parameters"]).replace("0.681818181818181", "0.68"))
    with pytest.raises(Refused, match="partial_rotary_factor"):
        config_from_dict(raw | {"partial_rotary_factor": 30 / 44})
    with pytest.raises(Refused, match=r"rope_parameters\.main\.partial_rotary_factor"):
        config_from_dict(raw | {"rope_parameters": parts})


@pytest.mark.parametrize("family", ["deepseek_v41", "deepseek_v3", "llama"])
def test_other_families_are_refused_by_name(family: str) -> None:
    with pytest.raises(UnknownName, match=family):
        config_from_dict(PRO | {"model_type": family})


def test_unknown_fields_are_kept_and_written_back() -> None:
    raw = PRO | {
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "quantization_config": {"fmt": "e4m3"},
    }
    config = config_from_dict(raw)
    assert config.other["torch_dtype"] == "bfloat16"
    assert config.quantisation == {"fmt": "e4m3"}
    assert config_to_dict(config) == raw


def test_the_official_code_assumes_one_mtp_block() -> None:
    raw = config_to_dict(V4_PRO, "inference")
    del raw["n_mtp_layers"]
    assert config_from_dict(raw).drafters == 1


def test_an_unknown_spelling_is_refused() -> None:
    with pytest.raises(UnknownName, match="Did you mean transformers"):
        config_to_dict(V4_PRO, "transformer")


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PRO), "utf-8")
    assert config_from_file(path) == V4_PRO


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, '{"a": }', "\udcff"],
    ids=["empty", "cut", "deep", "bad", "bytes"],
)
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UnreadableFile, match=r"config\.json"):
        config_from_file(path)


def test_a_folder_and_an_absent_file_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.json"):
        with pytest.raises(UnreadableFile):
            config_from_file(path)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(UnreadableFile, match="16 MiB"):
        config_from_file(path)


def test_a_key_stated_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"vocab_size": 1, "vocab_size": 2}', "utf-8")
    with pytest.raises(Refused, match="vocab_size = 'stated twice'"):
        config_from_file(path)


@pytest.mark.parametrize("raw", [[], None, "config", 3])
def test_what_is_no_object_is_refused(raw: Any) -> None:
    with pytest.raises(Refused, match="a JSON object"):
        config_from_dict(raw)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("config", [V4_PRO, V3_2], ids=lambda config: config.family)
@pytest.mark.parametrize(
    "hostile",
    [[[]], [{}], {"a": []}, {"type": []}, {"main": {"rope_type": {}}}, 10**400, "x", True],
)
def test_values_that_no_field_has_are_refused_and_nothing_breaks(
    config: DeepSeekConfig, spelling: str, hostile: Any
) -> None:
    raw, read = config_to_dict(config, spelling), 0
    for key, value in raw.items():
        nested = {**value, "factor": hostile} if isinstance(value, dict) else [hostile]
        for spoilt in (hostile, nested):
            with suppress(Refused):
                config_from_dict(raw | {key: spoilt})
                read += 1
    assert read < len(raw), "most keys are facts, and a fact that is spoilt is refused"
