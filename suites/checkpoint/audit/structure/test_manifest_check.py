"""A flipped bit under a manifest is told with its tensor, and a reference with one is refused."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.checkpoint.audit.structure.manifest_check import (
    bytes_hashed,
    judge_manifest,
    require_as_written,
)
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.write.manifest import MANIFEST
from degarble.suites.checkpoint.audit.planted_numbers import Bytes
from degarble.suites.checkpoint.converting_cases import source

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.checkpoint.audit.findings import Finding


def _judged(folder: Path) -> list[Finding] | None:
    done: list[int] = []
    with Checkpoint.survey(folder) as checkpoint:
        found = judge_manifest(checkpoint, 2, done.append)
        assert sum(done) == bytes_hashed(checkpoint)
    return found


def test_a_flipped_bit_is_told_with_its_tensor(tmp_path: Path) -> None:
    shutil.copytree(source("nvfp4-experts"), tmp_path / "c")
    assert _judged(tmp_path / "c") == []
    name = "layers.1.ffn.experts.2.w1.weight"
    Bytes(tmp_path / "c")[name][3, 5] ^= 1
    found = _judged(tmp_path / "c")
    assert found is not None
    (finding,) = found
    assert (finding.rule, finding.tensor) == ("files.manifest", name)
    assert "1 tensor differs" in finding.message


def test_a_file_that_is_gone_or_another_is_told(tmp_path: Path) -> None:
    shutil.copytree(source("v32"), tmp_path / "c")
    (tmp_path / "c/config.json").write_text((tmp_path / "c/config.json").read_text() + " ")
    found = _judged(tmp_path / "c")
    assert found is not None
    assert [each.evidence["file"] for each in found] == ["config.json"]


def test_what_is_no_manifest_of_ours_is_left_alone(tmp_path: Path) -> None:
    shutil.copytree(source("v32"), tmp_path / "c")
    path = tmp_path / "c" / MANIFEST
    path.write_text(json.dumps({"files": ["of another tool"]}))
    assert _judged(tmp_path / "c") is None
    path.unlink()
    assert _judged(tmp_path / "c") is None
    path.write_text(json.dumps({"tool": {"name": "degarble"}}))
    found = _judged(tmp_path / "c")
    assert found is not None
    assert found[0].rule == "files.manifest"


def test_a_reference_that_is_not_what_was_written_is_refused(tmp_path: Path) -> None:
    shutil.copytree(source("nvfp4-experts"), tmp_path / "c")
    with Checkpoint.open(tmp_path / "c") as reference:
        done: list[int] = []
        assert require_as_written(reference, 2, done.append)
        assert sum(done) == bytes_hashed(reference)
    tokens = tmp_path / "c/tokenizer_config.json"
    tokens.write_text("{}")
    with Checkpoint.open(tmp_path / "c") as reference:
        assert require_as_written(reference, 2, done.append), "no comparison reads it"
    name = "layers.1.ffn.experts.2.w1.weight"
    Bytes(tmp_path / "c")[name][3, 5] ^= 1
    with Checkpoint.open(tmp_path / "c") as reference, pytest.raises(UnreadableFile) as told:
        require_as_written(reference, 2, done.append)
    error = told.value
    assert error.name.startswith("the reference's file ")
    assert ".safetensors" in error.name
    assert f"1 tensor differs, {name} first" in error.shown_value
    assert f"degarble audit {tmp_path / 'c'}" in error.remedy


@pytest.mark.parametrize("text", [None, "{}", '{"tool": {"name": "degarble"}}'])
def test_a_reference_without_hashes_that_can_be_read(tmp_path: Path, text: str | None) -> None:
    """None, or another tool's, has nothing to verify; a damaged one of ours is refused."""
    shutil.copytree(source("v32"), tmp_path / "c")
    manifest = tmp_path / "c" / MANIFEST
    manifest.unlink() if text is None else manifest.write_text(text)
    with Checkpoint.open(tmp_path / "c") as reference:
        if text and "degarble" in text:
            with pytest.raises(UnreadableFile, match="of the reference"):
                require_as_written(reference, 1, lambda _: None)
        else:
            assert not require_as_written(reference, 1, lambda _: None)
