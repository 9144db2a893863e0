"""A shard that is missing or cut off is one finding, whatever share of the model it held."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from degarble.suites.checkpoint.structure_cases import V4, audited, errors, told
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHARDS = 6


def _removed(shard: Path) -> None:
    shard.unlink()


def _cut(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("layout", "share", "lose"),
    [
        ("official", (3,), _removed),
        ("official", (1, 2, 3, 4), _cut),
        ("official", (1, 2, 3, 4, 5), _removed),
        ("vllm", (3,), _cut),
        ("nvfp4-full", (0, 2, 3, 4), _removed),
    ],
)
def test_lost_shards_are_the_only_errors(
    tmp_path: Path, layout: str, share: tuple[int, ...], lose: Callable[[Path], None]
) -> None:
    write_checkpoint(tmp_path / "c", Synthetic(V4, layout), shards=SHARDS)
    shards = sorted((tmp_path / "c").glob("*.safetensors"))
    weight_map = json.loads((tmp_path / "c/model.safetensors.index.json").read_text())["weight_map"]
    for number in share:
        lose(shards[number])
    found = audited(tmp_path / "c")
    assert errors(found) == {"files.unreadable_shard"}, [f for f in found if f.level == "error"]
    lost = told(found, "files.unreadable_shard")
    assert sum(each.count for each in lost) == len(share)
    there = sum(shard == shards[share[0]].name for shard in weight_map.values())
    assert f"The index places {there:,} tensors there" in lost[0].message


def test_without_an_index_what_is_missing_is_told_by_its_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", Synthetic(V4, "official"), shards=SHARDS)
    (tmp_path / "c/model-00004-of-00006.safetensors").unlink()
    (tmp_path / "c/model.safetensors.index.json").unlink()
    assert "structure.missing_parameter" in errors(audited(tmp_path / "c"))


def test_another_fault_beside_a_lost_shard_is_still_told(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", Synthetic(V4, "official"), shards=SHARDS)
    (tmp_path / "c/model-00004-of-00006.safetensors").unlink()
    config = json.loads((tmp_path / "c/config.json").read_text())
    (tmp_path / "c/config.json").write_text(json.dumps(config | {"vocab_size": 96}))
    assert errors(audited(tmp_path / "c")) == {"files.unreadable_shard", "structure.shape"}
