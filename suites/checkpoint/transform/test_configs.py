"""Other files of a converted checkpoint: configs that readers accept, companions safe to copy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from degarble.harness.checkpoint.transform import configs
from degarble.harness.checkpoint.transform.configs import (
    companions,
    config_files,
    declared,
    is_weight_only,
)
from degarble.harness.checkpoint.transform.quantise.job import target_layout, weight_only
from degarble.harness.model.config.json_file import config_to_dict
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.recipes import recipe_named
from degarble.suites.checkpoint.reading_cases import TINY_V4, TINY_V32

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from degarble.suites.support.configs import DeepSeekConfig


def test_entries_of_the_source_survive() -> None:
    layout = target_layout(TINY_V4, recipe_named("nvfp4-experts", TINY_V4))
    source = config_to_dict(TINY_V4) | {"mine": 3, "quantization_config": {"quant_method": "x"}}
    made = json.loads(config_files(TINY_V4, layout, source)["config.json"])
    assert made.pop("quantization_config")["quant_method"] == "fp8"
    source.pop("quantization_config")
    assert made == source


def test_transformers_reads_the_configs(tmp_path: Path) -> None:
    cases: dict[str, DeepSeekConfig] = {}
    families: dict[str, DeepSeekConfig] = {"v4": TINY_V4, "v32": TINY_V32}
    for family, config in families.items():
        for recipe in ("nvfp4-experts", "nvfp4-full"):
            folder = tmp_path / f"{family}-{recipe}"
            folder.mkdir()
            cases[str(folder)] = config
            layout = target_layout(config, recipe_named(recipe, config))
            for name, data in config_files(config, layout, config_to_dict(config)).items():
                (folder / name).write_bytes(data)
    script = (
        "import sys, json; from transformers import AutoConfig;"
        "all = [AutoConfig.from_pretrained(each) for each in sys.argv[1:]];"
        "print(json.dumps([[c.model_type, c.num_hidden_layers,"
        " getattr(c, 'quantization_config', None)] for c in all]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *cases],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    answers = json.loads(done.stdout.splitlines()[-1])
    for (folder_name, config), (family, layers, stated) in zip(cases.items(), answers, strict=True):
        assert family.startswith("deepseek")
        assert layers == config.num_hidden_layers
        written = json.loads((tmp_path / folder_name / "config.json").read_text())
        assert stated == written.get("quantization_config")


def test_weights_alone_are_distinguished() -> None:
    recipe = recipe_named("nvfp4-full", TINY_V4)
    assert not is_weight_only(TINY_V4, target_layout(TINY_V4, recipe))
    layout = target_layout(TINY_V4, weight_only(recipe))
    assert is_weight_only(TINY_V4, layout)
    beside = json.loads(config_files(TINY_V4, layout, {})["hf_quant_config.json"])
    assert beside["quantization"]["quant_algo"] == "W4A16_NVFP4"
    assert not is_weight_only(TINY_V4, layout_named("bf16", TINY_V4))


def test_links_of_a_hub_cache_are_followed_within_the_cache_only(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "model" / "blobs", tmp_path / "model" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in ("tokenizer.json", "README.md", "modeling.py"):
        (blobs / f"hash-of-{name}").write_text(name)
        (snapshot / name).symlink_to(f"../../blobs/hash-of-{name}")
    (snapshot / "vocab.json").symlink_to("../../blobs/gone")
    (tmp_path / "secret").write_text("not yours")
    (snapshot / "merges.txt").symlink_to("../../../secret")
    copied, passed_over = companions(snapshot, taken=())
    assert copied == {"README.md": b"README.md", "tokenizer.json": b"tokenizer.json"}
    assert passed_over == {
        "merges.txt": "a link",
        "modeling.py": "not on the list of companions",
        "vocab.json": "a link",
    }


def test_only_safe_companions_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not yours")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "README.md", "LICENSE", "vocab.json", "config.json"):
        (source / name).write_text(name)
    for name in ("modeling.py", "run.sh", "README.sh", "training_args.bin", "manifest.json"):
        (source / name).write_text(name)
    (source / "merges.txt").symlink_to(secret)
    (source / "tokenizer.model").mkdir()
    os.mkfifo(source / "generation_config.json")
    (source / "model-00001-of-00001.safetensors").write_bytes(b"")
    monkeypatch.setattr(configs, "LARGEST_COMPANION", 12)
    (source / "tokenizer.json").write_text("x" * 13)
    copied, passed_over = companions(source, taken={"config.json"})
    assert copied == {name: name.encode() for name in ("LICENSE", "README.md", "vocab.json")}
    assert passed_over == {
        "README.sh": "not on the list of companions",
        "generation_config.json": "no regular file",
        "merges.txt": "a link",
        "modeling.py": "not on the list of companions",
        "run.sh": "not on the list of companions",
        "tokenizer.json": "too large",
        "tokenizer.model": "no regular file",
        "training_args.bin": "not on the list of companions",
    }
    monkeypatch.setattr(configs, "MOST_COMPANIONS", 8)
    assert "vocab.json" in companions(source, taken=())[1]


def test_v32_in_nvfp4_lists_for_vllm_what_is_fused_and_unquantised() -> None:
    """vLLM passes hf_quant_config.json of another producer over, and asks for fused names."""
    layout = target_layout(TINY_V32, recipe_named("nvfp4-full", TINY_V32))
    stated, beside = declared(TINY_V32, layout)
    assert stated is not None
    assert beside is not None
    assert (stated["quant_method"], stated["quant_algo"]) == ("modelopt", "NVFP4")
    added = set(stated["ignore"]) - set(beside["quantization"]["exclude_modules"])
    assert {name.partition(".self_attn.")[2] for name in added} == {
        "fused_qkv_a_proj",
        "indexer.wk_weights_proj",
    }
