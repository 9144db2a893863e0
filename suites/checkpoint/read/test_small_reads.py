"""Small tensors are read by position, from many files, and from none that shrank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.checkpoint.read.file_access import read_small
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.suites.checkpoint.reading_cases import write_shards

if TYPE_CHECKING:
    from pathlib import Path


def test_every_tensor_has_its_own_bytes(tmp_path: Path) -> None:
    shards = [
        {f"{s}.{i}": torch.tensor([s, i], dtype=torch.int32) for i in range(5)} for s in (0, 1)
    ]
    write_shards(tmp_path, shards)
    with Checkpoint.open(tmp_path) as checkpoint:
        found = dict(read_small(checkpoint.entries.values()))
    assert len(found) == 10
    for shard in shards:
        for name, tensor in shard.items():
            assert found[name] == tensor.numpy().tobytes()


def test_a_file_that_shrank_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"a": torch.zeros(4), "b": torch.ones(4)}])
    with Checkpoint.open(tmp_path) as checkpoint:
        (file,) = {entry.file for entry in checkpoint.entries.values()}
        with file.open("r+b") as handle:
            handle.truncate(file.stat().st_size - 3)
        with pytest.raises(UnreadableFile, match="13 bytes"):
            list(read_small(checkpoint.entries.values()))
