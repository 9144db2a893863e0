"""Reading by position gives what a mapping gives, from buffers that are used again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.checkpoint.view.stored import PositionedReader
from degarble.harness.formats.number_formats import FP8_128X128_F32, NVFP4
from degarble.suites.checkpoint.number_cases import matrix, quantised_parts, write_modules

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.formats.weight import Weight


def reader(checkpoint: Checkpoint) -> PositionedReader:
    return PositionedReader({shard.file: shard.file_size for shard in checkpoint.shards})


def fields(weight: Weight) -> list[torch.Tensor]:
    parts = (weight.value, weight.codes, weight.block_scale, weight.tensor_scale)
    return [part.clone() for part in (*parts, weight.input_scale) if part is not None]


def test_rows_are_those_of_the_mapping(tmp_path: Path, seed: int) -> None:
    modules: dict[str, dict[str, torch.Tensor] | torch.Tensor] = {
        "a": quantised_parts(matrix(seed, 384, 256), NVFP4),
        "b": quantised_parts(matrix(seed + 1, 384, 256), FP8_128X128_F32),
        "c.weight": matrix(seed + 2, 384, 256),
        "d": torch.tensor([1.0, 2.0, 3.0]),
    }
    with write_modules(tmp_path, modules) as checkpoint, reader(checkpoint) as read:
        for name in ("a", "b", "c", "d", "a"):
            stored = checkpoint.stored(name)
            expected = [fields(weight) for _, weight in stored.row_blocks(128 * 256)]
            pieces = read.over(stored).row_blocks(128 * 256)
            found = [fields(weight) for _, weight in pieces]
            assert len(found) == (1 if name == "d" else 3)
            for ours, theirs in zip(found, expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_memory_is_used_again_and_aligned(tmp_path: Path, seed: int) -> None:
    modules = {name: {"weight": matrix(seed, 512, 256)} for name in ("a", "b")}
    with write_modules(tmp_path, modules) as checkpoint, reader(checkpoint) as read:
        places = set()
        for name in modules:
            for _, weight in read.over(checkpoint.stored(name)).row_blocks(128 * 256):
                assert weight.value is not None
                places.add(weight.value.data_ptr())
        (place,) = places
        assert place % 64 == 0


@pytest.mark.parametrize("opened", [False, True])
def test_a_file_that_shrinks_is_refused(tmp_path: Path, seed: int, opened: bool) -> None:
    checkpoint = write_modules(tmp_path, {"a": {"weight": matrix(seed, 512, 256)}})
    stored = checkpoint.stored("a")
    with reader(checkpoint) as read:
        if opened:
            read.ahead(checkpoint.shards[0].file, 0, 1 << 30)
        file = checkpoint.shards[0].file
        with file.open("rb+") as shard:
            shard.truncate(100_000)
        with pytest.raises(UnreadableFile, match="whose header was read"):
            list(read.over(stored).row_blocks())
