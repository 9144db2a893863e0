"""Open healthy and hostile checkpoints, find parameters by name, and fingerprint sources."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from degarble.harness.base import files as input_files
from degarble.harness.base.errors import (
    InvalidArgument,
    Refused,
    ShapeMismatch,
    UnknownName,
    UnreadableFile,
)
from degarble.harness.checkpoint.read import json_scan, safetensors_files
from degarble.harness.checkpoint.read.types import ProblemKind, StoredLayout
from degarble.harness.checkpoint.view import view
from degarble.harness.checkpoint.view.view import (
    WINDOW_BYTES,
    WINDOWS,
    Checkpoint,
    fingerprint,
    fingerprints,
    model_of,
    shard_samples,
)
from degarble.harness.checkpoint.write.plan import PlannedTensor, WritePlan
from degarble.harness.checkpoint.write.writer import CompanionFiles, write
from degarble.harness.model.config.config import V4Config
from degarble.harness.model.config.json_file import config_to_dict
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.parameters import parameter_named, parameters
from degarble.harness.model.tensors import PartKind
from degarble.suites.checkpoint.reading_cases import (
    TINY_V4,
    TINY_V32,
    entry,
    header_of,
    make_model,
    oracle_of,
    write_model,
    write_raw,
    write_shards,
)
from degarble.suites.checkpoint.view.hostile_cases import (
    FOLDER_FAULTS,
    spoil_config,
    spoil_index,
    spoil_shard,
    spoil_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from degarble.harness.model.config.config import Config


# --------------------------------------------------------------------------------------------------
# A view is lazy and small: it reads heads, finds configs, and costs little for 300,000 tensors.


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
    from degarble.harness.model.config.config import V3_2, V4_FLASH, V4_PRO  # noqa: PLC0415

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


@pytest.mark.parametrize(("method", "refused"), [("spqr", True), ("fp8", False), (None, False)])
def test_an_unknown_method_over_plain_weights_is_refused(
    tmp_path: Path, method: str | None, refused: bool
) -> None:
    stated = {"bits": 3} if method is None else {"quant_method": method}
    plain = {"a.weight": torch.zeros(4, 4), "norm.weight": torch.zeros(4)}
    for name, tensors in {
        "plain": plain,
        "coded": plain | {"a.weight_packed": torch.zeros(4, 2, dtype=torch.uint8)},
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        config = {"model_type": "llama", "quantization_config": stated}
        (folder / "config.json").write_text(json.dumps(config))
        if not refused or name == "coded":
            Checkpoint.open(folder).close()
            continue
        with pytest.raises(UnknownName, match="spqr, over plain weights") as error:
            Checkpoint.open(folder)
        assert "Remove quantization_config from config.json" in str(error.value)
        with Checkpoint.survey(folder) as checkpoint:
            assert checkpoint.problems.counts[ProblemKind.UNKNOWN_METHOD] == 1


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_a_quantisation_that_is_no_object_is_refused(tmp_path: Path, name: str) -> None:
    save_file({"a.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    config: dict[str, Any] = {"model_type": "llama"}
    key = "quantization_config" if name == "config.json" else "quantization"
    for file in {"config.json", name}:
        stated = {key: "nvfp4"} if file == name else {}
        (tmp_path / file).write_text(json.dumps(config | stated))
    with pytest.raises(InvalidArgument, match=f"quantization_config in .*{name} = 'nvfp4'"):
        Checkpoint.open(tmp_path)
    with Checkpoint.survey(tmp_path) as checkpoint:
        assert checkpoint.problems.counts[ProblemKind.UNREADABLE_CONFIG] == 1


@pytest.mark.slow
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
    texts = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert texts[:4] == [str(95 * per_shard), str(95 * per_shard // 4), "1", "16"]
    assert int(texts[4]) < 300, f"{texts[4]} MB"
    assert float(texts[5]) < 10, f"{texts[5]} s"
    assert texts[6] == "False"


# --------------------------------------------------------------------------------------------------
# Every parameter of a model comes back, bit for bit, from every layout that can hold it.

CASES = [
    (TINY_V4, "official", None, StoredLayout.OFFICIAL),
    (TINY_V4, "bf16", None, StoredLayout.BF16),
    (TINY_V4, "nvfp4-experts", None, StoredLayout.MODELOPT),
    (TINY_V4, "nvfp4-full", None, StoredLayout.MODELOPT),
    (TINY_V4, "transformers", None, StoredLayout.TRANSFORMERS),
    (TINY_V4, "vllm", None, StoredLayout.VLLM),
    (TINY_V4, "vllm", "nvfp4-experts", StoredLayout.VLLM),
    (TINY_V32, "official", None, StoredLayout.HF_FP8),
    (TINY_V32, "inference", None, StoredLayout.OFFICIAL),
    (TINY_V32, "bf16", None, StoredLayout.BF16),
    (TINY_V32, "nvfp4-experts", None, StoredLayout.MODELOPT),
    (TINY_V32, "nvfp4-full", None, StoredLayout.MODELOPT),
    (TINY_V32, "transformers", None, StoredLayout.TRANSFORMERS),
    (TINY_V32, "vllm", "bf16", StoredLayout.VLLM),
]


@pytest.mark.parametrize(("config", "name", "recipe", "summary"), CASES)
def test_every_parameter_round_trips(
    tmp_path: Path, seed: int, config: Config, name: str, recipe: str | None, summary: StoredLayout
) -> None:
    layout = layout_named(name, config)
    model = make_model(config, layout.with_recipe(recipe) if recipe else layout, seed)
    write_model(tmp_path, model)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.layout is summary
        assert checkpoint.model == config
        assert set(checkpoint.weights) == set(model.parts)
        assert len(checkpoint.weights) == len(model.parts)
        for parameter, parts in model.parts.items():
            weight = checkpoint.weights[parameter]
            fields = {
                PartKind.VALUE: weight.value,
                PartKind.CODES: weight.codes,
                PartKind.BLOCK_SCALE: weight.block_scale,
                PartKind.TENSOR_SCALE: weight.tensor_scale,
                PartKind.INPUT_SCALE: weight.input_scale,
            }
            for part, field in fields.items():
                assert (field is None) == (part not in parts), f"{parameter}: {part}"
                assert field is None or torch.equal(field, parts[part]), f"{parameter}: {part}"
            values = model.values[parameter]
            assert torch.equal(weight.values(values.dtype), values), parameter


def test_what_a_layout_leaves_out_is_not_there(tmp_path: Path, seed: int) -> None:
    model = make_model(TINY_V4, layout_named("nvfp4-full", TINY_V4), seed)
    write_model(tmp_path, model)
    checkpoint = Checkpoint.open(tmp_path)
    left_out = {parameter.name for parameter in parameters(TINY_V4)} - set(checkpoint.weights)
    assert left_out
    assert all(name.startswith("mtp.") for name in left_out)
    with pytest.raises(KeyError):
        checkpoint.weights["mtp.0.enorm"]
    with pytest.raises(UnknownName, match=r"layers\.0\.attn\.wq_a"):
        checkpoint.names.place("layers.0.attn.wq_c")  # type: ignore[union-attr]


def test_an_unknown_family_and_unknown_names_have_no_logical_names(
    tmp_path: Path, seed: int
) -> None:
    write_model(tmp_path, make_model(TINY_V32, layout_named("bf16", TINY_V32), seed))
    assert Checkpoint.open(tmp_path).names is not None
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "llama"}))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.model is None
    assert checkpoint.names is None
    assert not checkpoint.weights
    assert "model.layers.0.self_attn.q_a_proj" in checkpoint.modules()
    (tmp_path / "config.json").unlink()
    assert Checkpoint.open(tmp_path).model is None


def test_names_of_another_model_are_not_taken_for_this_one(tmp_path: Path, seed: int) -> None:
    write_model(tmp_path, make_model(TINY_V32, layout_named("inference", TINY_V32), seed))
    raw = json.loads((tmp_path / "config.json").read_text())
    for path in tmp_path.glob("*.safetensors"):
        header = header_of(path)
        changed = {
            name if name.startswith("__") else f"something.else.{name}": each
            for name, each in header.items()
        }
        write_raw(path, changed, path.read_bytes()[-_data_size(header) :])
    (tmp_path / "model.safetensors.index.json").unlink()
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.model is not None
    assert raw["model_type"] == checkpoint.model.family
    assert checkpoint.names is None


def _data_size(header: dict[str, dict[str, Any]]) -> int:
    ends: list[int] = [each["data_offsets"][1] for each in header.values() if "shape" in each]
    return max(ends)


@pytest.mark.parametrize("name", ["nvfp4-full", "vllm", "transformers"])
def test_a_shape_that_the_config_does_not_imply_is_refused(
    tmp_path: Path, seed: int, name: str
) -> None:
    write_model(tmp_path, make_model(TINY_V4, layout_named(name, TINY_V4), seed))
    raw = json.loads((tmp_path / "config.json").read_text())
    larger = {"moe_intermediate_size": 2 * raw["moe_intermediate_size"]}
    (tmp_path / "config.json").write_text(json.dumps(raw | larger))
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(ShapeMismatch, match="as the config implies"):
        checkpoint.weight("layers.1.ffn.experts.0.w2")
    checkpoint.weight("layers.1.attn.wq_a")


def test_a_mixed_up_order_of_experts_would_be_detected(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(TINY_V4, layout_named("transformers", TINY_V4), seed)
    write_model(tmp_path, model)
    name = "layers.1.ffn.experts.1.w1"
    honest = view.LogicalNames.place

    def mixed_up(names: view.LogicalNames, wanted: str) -> view.ParameterLocation:
        return honest(names, wanted.replace(".1.w1", ".2.w1"))

    assert torch.equal(
        Checkpoint.open(tmp_path).weight(name).values(torch.float32), model.values[name].float()
    )
    monkeypatch.setattr(view.LogicalNames, "place", mixed_up)
    assert not torch.equal(
        Checkpoint.open(tmp_path).weight(name).values(torch.float32), model.values[name].float()
    )


def test_members_are_found_after_the_anatomy_forgot_them(tmp_path: Path, seed: int) -> None:
    """Anatomy keeps the parameters of a few configs; those made again are others, but equal."""
    write_model(tmp_path, make_model(TINY_V4, layout_named("vllm", TINY_V4), seed))
    with Checkpoint.open(tmp_path) as checkpoint:
        before = checkpoint.stored("layers.0.attn.wq_a")
        for extra in range(1, 12):
            parameter_named(replace(TINY_V4, vocab_size=TINY_V4.vocab_size + extra), "embed")
        after = checkpoint.stored("layers.0.attn.wq_a")
        assert after.boxes
        assert after.boxes == before.boxes
        assert torch.equal(after.values(), before.values())


def test_both_families_are_shown() -> None:
    assert {type(config) for config, *_ in CASES} == {V4Config, type(TINY_V32)}


def test_names_of_compressed_tensors_are_found_too(tmp_path: Path, seed: int) -> None:
    model = make_model(TINY_V32, layout_named("nvfp4-full", TINY_V32), seed)
    write_model(tmp_path, model, shards=1)
    path = next(tmp_path.glob("*.safetensors"))
    renamed = {}
    for name, tensor in load_file(path).items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight" and f"{name}_scale_2" in header_of(path):
            renamed[f"{module}.weight_packed"] = tensor
        elif suffix in ("weight_scale_2", "input_scale"):
            divisor = {"weight_scale_2": "weight_global_scale"}.get(suffix, "input_global_scale")
            renamed[f"{module}.{divisor}"] = tensor.reciprocal().reshape(1)
        else:
            renamed[name] = tensor
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(renamed, path)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.layout is StoredLayout.COMPRESSED_TENSORS
    assert set(checkpoint.weights) == set(model.values)
    for name, values in model.values.items():
        weight = checkpoint.weights[name]
        torch.testing.assert_close(
            weight.values(torch.float32), values.float(), rtol=2.0**-21, atol=0
        )
        stored = model.parts[name].get(PartKind.INPUT_SCALE)
        if stored is not None:
            assert weight.input_scale is not None
            torch.testing.assert_close(weight.input_scale, stored, rtol=2.0**-22, atol=0)


# --------------------------------------------------------------------------------------------------
# What tells two sources apart: heads, sizes, config, and samples of the data.

ELEMENTS = 1 << 20


def produce(tensor: PlannedTensor) -> Iterator[bytes]:
    yield bytes(range(256)) * (tensor.nbytes // 256)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors = [PlannedTensor(f"layers.{i}.weight", "U8", (ELEMENTS,)) for i in range(4)]
    plan = WritePlan.from_tensors(tensors, shard_bytes=2 * ELEMENTS)
    write(
        tmp_path / "source",
        plan,
        produce,
        CompanionFiles({"config.json": b'{"model_type": "none"}'}),
    )
    return tmp_path / "source"


def told(source: Path) -> dict[str, str]:
    with Checkpoint.open(source) as checkpoint:
        found = fingerprints(checkpoint)
        assert fingerprint(checkpoint)
    return found


def shift(path: Path, change: int) -> None:
    data = bytearray(path.read_bytes())
    begin = len(data) - 2 * ELEMENTS
    data[begin:] = bytes((each + change) % 256 for each in data[begin:])
    path.write_bytes(data)


def test_other_data_under_the_same_head_are_detected(source: Path) -> None:
    before = told(source)
    assert told(source) == before
    (first, second) = sorted(name for name in before if name.endswith(".safetensors"))
    shift(source / second, 1)
    after = told(source)
    assert after[first] == before[first]
    assert after[second] != before[second]


def test_another_config_is_detected(source: Path) -> None:
    before = told(source)
    (source / "config.json").write_text('{"model_type": "other"}')
    assert {name for name, each in told(source).items() if each != before[name]} == {"config.json"}


@pytest.mark.parametrize("length", [0, 1, WINDOW_BYTES, WINDOWS * WINDOW_BYTES, ELEMENTS])
def test_windows_reach_from_the_first_to_the_last_byte(length: int, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"head" + bytes(index % 251 for index in range(length)))
    found = shard_samples(path, 4, 4 + length)
    data = path.read_bytes()[4:]
    if length <= WINDOWS * WINDOW_BYTES:
        assert b"".join(found) == data
        return
    assert len(found) == WINDOWS
    assert all(len(each) == WINDOW_BYTES for each in found)
    assert (found[0], found[-1]) == (data[:WINDOW_BYTES], data[-WINDOW_BYTES:])


# --------------------------------------------------------------------------------------------------
# Two thousand spoilt checkpoints: each is refused or told of by name, or was not spoilt after all.
#
# No crash, no hang, nothing written. The safetensors package and the standard JSON decoder judge
# what is accepted: whatever we accept they read alike.

SHARDS, INDICES, CONFIGS, QUANTISATIONS = 1000, 500, 380, 90
LONGEST = 1.0  # seconds of CPU time for one case; the usual one takes a hundredth of it
SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
# Files that the package reads and we do not, each with the reason.
STRICTER = re.compile(
    "each key once|is stated twice"  # the format forbids it; the package takes the last one
    "|an object of dtype, shape and data_offsets"  # the package ignores unknown keys
    "|an object of texts"  # the package takes null for metadata
    "|that begins at once"
)


@pytest.fixture(scope="module")
def view_hostile_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small sound checkpoint: quantised, plain, scalar and empty tensors in two shards."""
    folder = tmp_path_factory.mktemp("outside") / "checkpoint"
    first = {
        "up.weight": torch.zeros(4, 16, dtype=torch.uint8),
        "up.weight_scale": torch.ones(4, 2).to(torch.float8_e4m3fn),
        "up.weight_scale_2": torch.tensor(0.5),
        "norm.weight": torch.ones(4, dtype=torch.bfloat16),
    }
    second = {
        "down.weight": torch.zeros(4, 128).to(torch.float8_e4m3fn),
        "down.scale": torch.ones(1, 1).to(torch.float8_e8m0fnu),
        "ids": torch.arange(3),
        "none": torch.zeros(0, 3),
    }
    write_shards(folder, [first, second])
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    small = replace(
        TINY_V4, num_hidden_layers=1, compress_ratios=(4, 0), num_hash_layers=0, n_routed_experts=2
    )
    write_model(folder, make_model(small, layout_named("nvfp4-experts", small), 1), shards=1)
    return folder


def everything(folder: Path) -> list[tuple[str, int, int, int]]:
    """State of the folder and of what lies around it."""
    found = []
    for root, folders, files in os.walk(folder.parent):
        for name in (*folders, *files):
            status = Path(root, name).lstat()
            found.append((name, status.st_ino, status.st_size, status.st_mtime_ns))
    return sorted(found)


def use(checkpoint: Checkpoint, most: int) -> None:
    """Ask everything that a view answers."""
    assert checkpoint.layout
    names = list(checkpoint.weights)[:most] + list(checkpoint.table.suffixes)[:most]
    for name in names:
        try:
            checkpoint.weight(name).values(torch.float32)
        except Refused as refused:
            require_told(refused)
    checkpoint.modules()
    for name in list(checkpoint.entries)[:most]:
        checkpoint.tensor(name)


def require_told(refused: Refused) -> str:
    text = str(refused)
    assert text.isprintable(), "control characters reach no terminal"
    assert len(text) < 2000
    assert refused.name
    assert refused.expectation
    assert refused.remedy
    return text


def judge(folder: Path, most: int = 8) -> str:
    """Open strictly and leniently; return why it was refused, empty where it was not."""
    before, started = everything(folder), time.process_time()
    reason = ""
    try:
        with Checkpoint.open(folder) as checkpoint:
            use(checkpoint, most)
    except Refused as refused:
        reason = require_told(refused)
    try:
        with Checkpoint.survey(folder) as checkpoint:
            use(checkpoint, most)
            lines = [require_told(problem.error) for problem in checkpoint.problems.found]
            assert not reason or lines, f"refused as {reason}, and not told by the survey"
    except Refused as refused:
        require_told(refused)
        assert reason
    assert time.process_time() - started < LONGEST
    assert everything(folder) == before, "reading wrote something"
    return reason


@pytest.mark.timeout(300)
def test_spoilt_shards(view_hostile_folder: Path, seed: int) -> None:
    rng, path = Random(seed), view_hostile_folder / SHARD
    sound = path.read_bytes()
    outcomes: Counter[str] = Counter()
    for _ in range(SHARDS):
        spoilt = spoil_shard(rng, sound)
        path.write_bytes(spoilt)
        reason = judge(view_hostile_folder)
        try:
            oracle = oracle_of(spoilt)
        except (safetensors.SafetensorError, ValueError):
            oracle = None
        if oracle is None:
            assert reason, f"accepted what the package refuses: {spoilt!r}"
        elif not reason:
            assert {
                (name, entry.dtype, entry.shape, spoilt[entry.begin : entry.end])
                for name, entry in safetensors_files.read_header(path).entries.items()
            } == {
                (name, each["dtype"], tuple(each["shape"]), bytes(each["data"]))
                for name, each in oracle.items()
            }
        elif "index" not in reason and "shard" not in reason:
            assert STRICTER.search(reason), f"refused what the package reads: {reason}"
        outcomes["refused" if reason else "accepted"] += 1
    path.write_bytes(sound)
    assert judge(view_hostile_folder) == ""
    assert outcomes["refused"] > SHARDS * 0.8, outcomes
    assert outcomes["accepted"] > 10, "spoilt data bytes and blanks are no fault"


@pytest.mark.timeout(300)
def test_spoilt_indices(view_hostile_folder: Path, seed: int) -> None:
    rng, path = Random(seed), view_hostile_folder / INDEX
    sound = path.read_bytes()
    refused = 0
    for _ in range(INDICES):
        spoilt = spoil_index(rng, sound)
        path.write_bytes(spoilt)
        reason = judge(view_hostile_folder)
        refused += bool(reason)
        if not reason:
            assert json.loads(spoilt)["weight_map"] == json.loads(sound)["weight_map"]
    path.write_bytes(sound)
    assert judge(view_hostile_folder) == ""
    assert refused > INDICES * 0.9


@pytest.mark.timeout(300)
def test_spoilt_configs(model_folder: Path, seed: int) -> None:
    rng, path = Random(seed), model_folder / "config.json"
    sound = path.read_bytes()
    refused = 0
    for _ in range(CONFIGS):
        path.write_bytes(spoil_config(rng, sound))
        refused += bool(judge(model_folder, most=2))
    path.write_bytes(sound)
    assert judge(model_folder, most=2) == ""
    assert refused > CONFIGS * 0.5


@pytest.mark.timeout(300)
def test_spoilt_quantisation_configs(view_hostile_folder: Path, seed: int) -> None:
    rng, path = Random(seed), view_hostile_folder / "hf_quant_config.json"
    sound = json.dumps({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["head"]}})
    for _ in range(QUANTISATIONS):
        path.write_bytes(spoil_text(rng, sound.encode()))
        judge(view_hostile_folder)
    path.write_text(sound)
    assert (
        Checkpoint.open(view_hostile_folder).quantisation["hf_quant_config.json"]["quant_algo"]
        == "NVFP4"
    )
    path.unlink()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [SHARD, INDEX, "config.json"])
@pytest.mark.parametrize("fault", FOLDER_FAULTS)
def test_spoilt_folders(tmp_path: Path, fault: str, name: str) -> None:
    folder = tmp_path / "checkpoint"
    write_shards(folder, [{"a": torch.ones(2)}, {"b": torch.ones(2)}])
    (folder / "config.json").write_text("{}")
    FOLDER_FAULTS[fault](folder / name)
    reason = judge(folder)
    readable = fault == "not to be read" and os.access(folder / name, os.R_OK)  # the superuser's
    optional = fault == "gone" and name != SHARD
    assert bool(reason) is not (readable or optional)


def test_the_numbers_add_up() -> None:
    cases = SHARDS + INDICES + CONFIGS + QUANTISATIONS + len(FOLDER_FAULTS) * 3
    assert cases >= 2000


# The judge is shown faults


def test_a_parser_that_crashes_is_detected(
    view_hostile_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise KeyError

    monkeypatch.setattr(safetensors_files._HeaderParser, "_require_sound", crash)
    with pytest.raises(KeyError):
        judge(view_hostile_folder)


def test_a_parser_that_writes_is_detected(
    view_hostile_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = input_files.read_small_file
    written = view_hostile_folder.parent / "written"

    def write(path: Path, largest: int) -> bytes:
        written.write_text("")
        return honest(path, largest)

    monkeypatch.setattr("degarble.harness.checkpoint.read.safetensors_files.read_small_file", write)
    with pytest.raises(AssertionError, match="reading wrote something"):
        judge(view_hostile_folder)
    written.unlink()


@pytest.mark.parametrize(
    ("target", "name", "disabled", "spoil"),
    [
        (
            json_scan.ObjectScanner,
            "finish",
            lambda _scan: None,
            lambda raw: raw.replace(b"}} ", b"}}x", 1),
        ),
        (safetensors_files, "_require_filled", lambda _header: None, lambda raw: raw + b"x"),
    ],
)
def test_a_lax_parser_is_detected(
    view_hostile_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: object,
    name: str,
    disabled: Callable[[object], None],
    spoil: Callable[[bytes], bytes],
) -> None:
    path = view_hostile_folder / SHARD
    sound = path.read_bytes()
    path.write_bytes(spoil(sound))
    assert path.read_bytes() != sound
    assert judge(view_hostile_folder)
    monkeypatch.setattr(target, name, disabled)
    assert judge(view_hostile_folder) == "", (
        "and the oracle refuses it, which test_spoilt_shards would see"
    )
    with pytest.raises(safetensors.SafetensorError):
        oracle_of(path.read_bytes())
    path.write_bytes(sound)
