"""What tells two sources apart: heads, sizes, config, and samples of the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.harness.checkpoint.view.view import (
    WINDOW_BYTES,
    WINDOWS,
    Checkpoint,
    fingerprint,
    fingerprints,
    shard_samples,
)
from degarble.harness.checkpoint.write.plan import PlannedTensor, WritePlan
from degarble.harness.checkpoint.write.writer import CompanionFiles, write

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ELEMENTS = 1 << 20


def produce(tensor: PlannedTensor) -> Iterator[bytes]:
    yield bytes(range(256)) * (tensor.nbytes // 256)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors = [PlannedTensor(f"layers.{i}.weight", "U8", (ELEMENTS,)) for i in range(4)]
    plan = WritePlan.of(tensors, shard_bytes=2 * ELEMENTS)
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


def test_other_data_under_the_same_head_are_seen(source: Path) -> None:
    before = told(source)
    assert told(source) == before
    (first, second) = sorted(name for name in before if name.endswith(".safetensors"))
    shift(source / second, 1)
    after = told(source)
    assert after[first] == before[first]
    assert after[second] != before[second]


def test_another_config_is_seen(source: Path) -> None:
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
