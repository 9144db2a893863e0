"""Sentences out of an encoder's file: parsed and never run, known by fingerprint, or refused."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.chat import conversation
from degarble.harness.chat.conversation import NO_TEMPLATES, PromptTemplates, read_templates
from degarble.suites.chat.talk_cases import ENCODER, WORDINGS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("place", conversation.PLACES)
def test_they_are_found_without_running_the_file(tmp_path: Path, place: str) -> None:
    path = tmp_path / place / "encoding_dsv4.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(ENCODER)
    found = read_templates(tmp_path, "encoding_dsv4")
    assert dict(found.texts) == dict(WORDINGS.texts)
    assert found.source == path
    assert sorted(found.unknown) == ["effort max", "tools"]  # these are not the official ones


def test_a_known_text_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    text = WORDINGS.texts["tools"]
    marks = {"tools": (hashlib.sha256(text.encode()).hexdigest(),)}
    monkeypatch.setattr(conversation, "FINGERPRINTS", marks)
    assert WORDINGS.unknown == []
    assert PromptTemplates({"tools": text + " "}, None).unknown == ["tools"]


def test_a_checkpoint_without_an_encoder(tmp_path: Path) -> None:
    assert read_templates(tmp_path, "encoding_dsv4") is NO_TEMPLATES
    with pytest.raises(UnreadableFile, match="Copy the folder `encoding`"):
        NO_TEMPLATES.text("tools")


@pytest.mark.parametrize(
    "raw", [b"def (", b"\xff\xfe", b"x = " + b"(" * 500, b"#" * (conversation.LARGEST_FILE + 1)]
)
def test_a_file_that_is_no_python_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "encoding_dsv4.py").write_bytes(raw)
    with pytest.raises(UnreadableFile):
        read_templates(tmp_path, "encoding_dsv4")
