"""Reading and writing config.json: three spellings, one record, and every way to be unclear."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from degarble.harness.anatomy.config import Config, V4Config
from degarble.harness.anatomy.config_json import (
    SPELLINGS,
    V4_KEYS,
    V32_KEYS,
    config_from_dict,
    config_from_file,
    config_to_dict,
)
from degarble.harness.anatomy.config_reader import REQUIRED
from degarble.harness.anatomy.presets import V3_2, V4_PRO
from degarble.harness.errors import Refused, UnknownName, UnreadableFile
from degarble.suites.anatomy.configs import configs

if TYPE_CHECKING:
    from pathlib import Path


def readable_from(config: Config, spelling: str) -> Config:
    """What a record is after a round trip: inference/config.json states less."""
    if spelling != "inference":
        return config
    if isinstance(config, V4Config):
        stated = 1 if config.dspark else config.num_nextn_predict_layers
        return replace(config, max_position_embeddings=None, num_nextn_predict_layers=stated)
    yarn = config.yarn and replace(config.yarn, mscale_all_dim=config.yarn.mscale)
    return replace(config, max_position_embeddings=None, num_nextn_predict_layers=0, yarn=yarn)


@given(configs(), st.sampled_from(SPELLINGS))
def test_every_spelling_comes_back(config: Config, spelling: str) -> None:
    raw = json.loads(json.dumps(config_to_dict(config, spelling)))
    read = config_from_dict(raw)
    assert read == readable_from(config, spelling)
    assert set(read.other) <= {"architectures"}, "nothing that anatomy needs is provenance"


@given(configs())
def test_spellings_may_be_mixed(config: Config) -> None:
    raw = config_to_dict(config) | config_to_dict(config, "transformers")
    assert config_from_dict(raw) == config


@pytest.mark.parametrize("config", [V4_PRO, V3_2], ids=["v4", "v32"])
def test_each_missing_field_is_refused_by_name(config: Config) -> None:
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
def test_contradictions_are_refused_by_name(raw: dict[str, Any], name: str) -> None:
    with pytest.raises(Refused) as refusal:
        config_from_dict(raw)
    assert refusal.value.name.startswith(name)


def test_an_attention_factor_would_scale_cos_and_sin() -> None:
    nested = json.loads(json.dumps(SAVED))
    nested["rope_parameters"]["compress"]["attention_factor"] = 1.277
    with pytest.raises(Refused, match="cos and sin are unscaled"):
        config_from_dict(nested)


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
    config: Config, spelling: str, hostile: Any
) -> None:
    raw, read = config_to_dict(config, spelling), 0
    for key, value in raw.items():
        nested = {**value, "factor": hostile} if isinstance(value, dict) else [hostile]
        for spoilt in (hostile, nested):
            with suppress(Refused):
                config_from_dict(raw | {key: spoilt})
                read += 1
    assert read < len(raw), "most keys are facts, and a fact that is spoilt is refused"
