"""Two configs that compute differently are told key by key; two spellings of one are not."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.checkpoint.audit import value_rules as rules
from degarble.harness.checkpoint.audit.against.against import (
    audit_against,
    differences,
    judge_configs,
)
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.suites.checkpoint.converting_cases import source
from degarble.suites.checkpoint.reading_cases import write_shards

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
RESAVED = {
    **{key: value for key, value in LLAMA.items() if not key.startswith("rope")},
    "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0},
    "attention_bias": False,
    "head_dim": 1,
    "pretraining_tp": 1,
    "transformers_version": "5.20.0",
    "dtype": "float16",
}


def _written(folder: Path, config: dict[str, Any]) -> Path:
    shard = {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(4, 4) * (i + 1) for i in range(2)}
    write_shards(folder, [shard])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _told(here: Path, there: Path) -> dict[str, tuple[object, object]]:
    with Checkpoint.survey(here) as a, Checkpoint.open(there) as b:
        return {key: (ours, theirs) for key, ours, theirs in differences(a, b)}


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("rope_theta", 10000.0, "rope_theta"),
        ("rms_norm_eps", 1e-6, "rms_norm_eps"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 4.0}, "rope_factor"),
        ("rope_scaling", None, "rope_type"),
        ("model_type", "mistral", "model_type"),
        ("num_hidden_layers", 1, "num_hidden_layers"),
        ("max_position_embeddings", 4096, None),
        ("torch_dtype", "float32", None),
    ],
)
def test_keys_of_any_family_are_compared(
    tmp_path: Path, key: str, value: object, told: str | None
) -> None:
    here = _written(tmp_path / "here", LLAMA | {key: value})
    found = _told(here, _written(tmp_path / "there", LLAMA))
    assert (told in found) if told else not found


def test_a_config_that_was_saved_again_is_the_same(tmp_path: Path) -> None:
    here = _written(tmp_path / "here", RESAVED)
    assert not _told(here, _written(tmp_path / "there", LLAMA))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", 20000.0),
        ("routed_scaling_factor", 1.25),
        ("sliding_window", 64),
        ("hc_eps", 1e-5),
        ("rope_scaling.factor", 4),
        ("num_experts_per_tok", 1),
    ],
)
def test_a_known_family_is_compared_as_a_record(tmp_path: Path, key: str, value: object) -> None:
    shutil.copytree(source("nvfp4-experts"), tmp_path / "c")
    path = tmp_path / "c/config.json"
    config = inner = json.loads(path.read_text())
    *front, last = key.split(".")
    for name in front:
        inner = inner[name]
    inner[last] = value
    path.write_text(json.dumps(config))
    with Checkpoint.survey(tmp_path / "c") as a, Checkpoint.open(source("bf16")) as b:
        (finding,) = judge_configs(a, b)
    assert finding.rule == rules.CONFIG.id
    assert finding.evidence["here"] == str(value)


def test_a_config_that_cannot_be_is_no_other_checkpoint(tmp_path: Path) -> None:
    """Names are spelled by the reference's config, so that the comparison still runs."""
    shutil.copytree(source("v32-nvfp4"), tmp_path / "c")
    path = tmp_path / "c/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scoring_func": "none"}))
    with Checkpoint.survey(tmp_path / "c") as a, Checkpoint.open(source("v32")) as b:
        audit = audit_against(a, b)
    assert {each.rule for each in audit.findings} == {rules.CONFIG.id}
    assert len(audit.table) > 70


def test_a_tensor_of_the_reference_that_is_missing_is_an_error(tmp_path: Path) -> None:
    there = _written(tmp_path / "there", LLAMA)
    write_shards(tmp_path / "here", [{"model.layers.0.mlp.up_proj.weight": torch.ones(4, 4)}])
    (tmp_path / "here/config.json").write_text(json.dumps(LLAMA))
    with Checkpoint.survey(tmp_path / "here") as a, Checkpoint.open(there) as b:
        found = {each.rule: each for each in audit_against(a, b).findings}
    assert "layers.1.mlp.up_proj" in found[rules.MISSING.id].message
