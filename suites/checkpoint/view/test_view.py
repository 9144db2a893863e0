"""A view is lazy and small: it reads heads, finds configs, and costs little for 300,000 tensors."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, Refused, UnknownName, UnreadableFile
from degarble.harness.checkpoint.read.types import ProblemKind
from degarble.harness.checkpoint.view.view import Checkpoint, model_of
from degarble.harness.model.config.json_file import config_to_dict
from degarble.suites.checkpoint.reading_cases import TINY_V4, TINY_V32, entry, write_shards

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {"a.up.weight": torch.arange(6.0).reshape(2, 3), "a.norm.weight": torch.ones(3)}
    write_shards(tmp_path, [tensors])
    return tmp_path


def test_tensors_bytes_and_pieces(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.tensor("a.up.weight").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert bytes(checkpoint.raw("a.norm.weight")) == struct.pack("<3f", 1, 1, 1)
        assert b"".join(checkpoint.chunks("a.up.weight", 5)) == struct.pack("<6f", *range(6))
        assert checkpoint.modules() == ("a.up",)
        assert checkpoint.shards[0].metadata == {"format": "pt"}
        checkpoint.release("a.up.weight")
        checkpoint.release()
    with pytest.raises(InvalidArgument, match="closed"):
        checkpoint.tensor("a.up.weight")


def test_unknown_names_are_refused_with_near_ones(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(UnknownName, match=r"a\.up\.weight"):
        checkpoint.tensor("a.up.weigth")
    with pytest.raises(UnknownName, match=r"a\.up"):
        checkpoint.weight("a.upp")


@pytest.mark.parametrize("config", [TINY_V4, TINY_V32], ids=lambda each: each.family)
@pytest.mark.parametrize("spelling", ["released", "transformers"])
def test_a_known_config_becomes_a_record(folder: Path, config: Any, spelling: str) -> None:
    (folder / "config.json").write_text(json.dumps(config_to_dict(config, spelling)))
    checkpoint = Checkpoint.open(folder)
    assert isinstance(checkpoint.model, type(config))
    assert checkpoint.config["hidden_size"] == config.hidden_size
    assert checkpoint.names is None, "none of its parameters is there"


def test_other_families_have_no_record(folder: Path) -> None:
    assert Checkpoint.open(folder).config == {}
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 1}')
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.model is None
    assert checkpoint.config["hidden_size"] == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": "large"}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ({"num_nextn_predict_layers": 10**9}, "at most 10000"),
        ({"n_routed_experts": 10_000, "num_hidden_layers": 10_000}, "layers and experts"),
    ],
)
def test_implausible_configs_are_refused(folder: Path, change: dict[str, Any], says: str) -> None:
    raw = config_to_dict(TINY_V32) | {"n_group": 1, "topk_group": 1} | change
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(Refused, match=r"config\.json: ") as refused:
        Checkpoint.open(folder)
    assert says in str(refused.value)
    surveyed = Checkpoint.survey(folder)
    assert surveyed.problems.counts == {ProblemKind.UNREADABLE_CONFIG: 1}
    assert surveyed.model is None
    assert surveyed.tensor("a.norm.weight").tolist() == [1, 1, 1]


def test_the_largest_known_models_are_plausible() -> None:
    from degarble.harness.model.presets import V3_2, V4_FLASH, V4_PRO  # noqa: PLC0415

    for config in (V4_PRO, V4_FLASH, V3_2):
        assert model_of(config_to_dict(config)) == config


def test_both_quantisation_configs_are_kept(folder: Path) -> None:
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "x", "quantization_config": stated})
    )
    quantisation = {"quantization": {"quant_algo": "NVFP4"}, "producer": {"name": "modelopt"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(quantisation))
    assert Checkpoint.open(folder).quantisation == {
        "config.json": stated,
        "hf_quant_config.json": {"quant_algo": "NVFP4"},
    }


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 1}', "{} {}", '{"a": NaN}'])
def test_configs_that_are_no_object_are_refused(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(UnreadableFile, match=rf"{name}: .* at byte"):
        Checkpoint.open(folder)


# At full size


def test_300_000_tensors_in_95_shards(tmp_path: Path) -> None:
    """Opened, grouped and judged in less than 300 MB and 10 s, without torch."""
    parts: tuple[tuple[str, str, list[int], int], ...] = (
        ("weight", "U8", [4096, 1024], 4 << 20),
        ("weight_scale", "F8_E4M3", [4096, 128], 512 << 10),
        ("weight_scale_2", "F32", [], 4),
        ("input_scale", "F32", [], 4),
    )
    per_shard, end = 3160, 0
    entries: dict[str, Any] = {}
    for number in range(per_shard):
        suffix, dtype, shape, size = parts[number % 4]
        name = f"model.layers.LAYER.mlp.experts.{number // 4}.down_proj.{suffix}"
        entries[name] = entry(dtype, shape, end, end + size)
        end += size
    header = json.dumps(entries, separators=(",", ":"))
    lines = json.dumps(dict.fromkeys(entries, "model-LAYER.safetensors"))[1:-1]
    for layer in range(95):
        text = header.replace("LAYER", str(layer)).encode()
        with (tmp_path / f"model-{layer}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    lines = ", ".join(lines.replace("LAYER", str(layer)) for layer in range(95))
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{lines}}}}}')
    code = (
        "import sys, time\n"
        "started = time.process_time()\n"
        "from degarble.harness.checkpoint.view.view import Checkpoint\n"
        "checkpoint = Checkpoint.open(sys.argv[1])\n"
        "opened = time.process_time() - started\n"
        "modules = checkpoint.modules()\n"
        "block = checkpoint.form(modules[-1]).block\n"
        # Trap: ru_maxrss of a started process begins with what its parent had.
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "peak = int(peak.split()[1]) // 1024\n"
        "print(len(checkpoint.entries), len(modules), *block, peak, opened, 'torch' in sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert told[:4] == [str(95 * per_shard), str(95 * per_shard // 4), "1", "16"]
    assert int(told[4]) < 300, f"{told[4]} MB"
    assert float(told[5]) < 10, f"{told[5]} s"
    assert told[6] == "False"
