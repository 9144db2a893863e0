"""Two thousand spoilt checkpoints: each is refused or told of by name, or was not spoilt after all.

No crash, no hang, nothing written. The safetensors package and the standard JSON decoder judge
what is accepted: whatever we accept they read alike.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
import safetensors
import torch

from degarble.harness.base import files as input_files
from degarble.harness.base.errors import Refused
from degarble.harness.checkpoint.read import json_scan, safetensors_files
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.model.layouts import layout_named
from degarble.suites.checkpoint.reading_cases import (
    TINY_V4,
    make_model,
    oracle_of,
    write_model,
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
    from collections.abc import Callable

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
            told = [require_told(problem.error) for problem in checkpoint.problems.found]
            assert not reason or told, f"refused as {reason}, and not told by the survey"
    except Refused as refused:
        require_told(refused)
        assert reason
    assert time.process_time() - started < LONGEST
    assert everything(folder) == before, "reading wrote something"
    return reason


@pytest.mark.timeout(300)
def test_spoilt_shards(folder: Path, seed: int) -> None:
    rng, path = Random(seed), folder / SHARD
    sound = path.read_bytes()
    outcomes: Counter[str] = Counter()
    for _ in range(SHARDS):
        spoilt = spoil_shard(rng, sound)
        path.write_bytes(spoilt)
        reason = judge(folder)
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
    assert judge(folder) == ""
    assert outcomes["refused"] > SHARDS * 0.8, outcomes
    assert outcomes["accepted"] > 10, "spoilt data bytes and blanks are no fault"


@pytest.mark.timeout(300)
def test_spoilt_indices(folder: Path, seed: int) -> None:
    rng, path = Random(seed), folder / INDEX
    sound = path.read_bytes()
    refused = 0
    for _ in range(INDICES):
        spoilt = spoil_index(rng, sound)
        path.write_bytes(spoilt)
        reason = judge(folder)
        refused += bool(reason)
        if not reason:
            assert json.loads(spoilt)["weight_map"] == json.loads(sound)["weight_map"]
    path.write_bytes(sound)
    assert judge(folder) == ""
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
def test_spoilt_quantisation_configs(folder: Path, seed: int) -> None:
    rng, path = Random(seed), folder / "hf_quant_config.json"
    sound = json.dumps({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["head"]}})
    for _ in range(QUANTISATIONS):
        path.write_bytes(spoil_text(rng, sound.encode()))
        judge(folder)
    path.write_text(sound)
    assert Checkpoint.open(folder).quantisation["hf_quant_config.json"]["quant_algo"] == "NVFP4"
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


def test_a_parser_that_crashes_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise KeyError

    monkeypatch.setattr(safetensors_files._HeaderParser, "_require_sound", crash)
    with pytest.raises(KeyError):
        judge(folder)


def test_a_parser_that_writes_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = input_files.read_small_file
    written = folder.parent / "written"

    def write(path: Path, largest: int) -> bytes:
        written.write_text("")
        return honest(path, largest)

    monkeypatch.setattr("degarble.harness.checkpoint.read.safetensors_files.read_small_file", write)
    with pytest.raises(AssertionError, match="reading wrote something"):
        judge(folder)
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
def test_a_lax_parser_is_seen(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: object,
    name: str,
    disabled: Callable[[object], None],
    spoil: Callable[[bytes], bytes],
) -> None:
    path = folder / SHARD
    sound = path.read_bytes()
    path.write_bytes(spoil(sound))
    assert path.read_bytes() != sound
    assert judge(folder)
    monkeypatch.setattr(target, name, disabled)
    assert judge(folder) == "", "and the oracle refuses it, which test_spoilt_shards would see"
    with pytest.raises(safetensors.SafetensorError):
        oracle_of(path.read_bytes())
    path.write_bytes(sound)
