"""The golden set: what a change of structure must leave equal; README.md says what it holds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from degarble.suites.golden import checkpoints, documents, identifiers, store, verdicts

if TYPE_CHECKING:
    from pathlib import Path


def test_names_are_as_kept() -> None:
    store.require_equal({"data/identifiers.json": identifiers.data()})


def test_sentences_of_names_are_as_kept() -> None:
    store.require_equal({"texts/identifiers.json": identifiers.texts()})


def test_checkpoints_have_the_same_bytes(tmp_path: Path) -> None:
    store.require_equal({"data/checkpoints.json": checkpoints.data(tmp_path)})


def test_documents_have_the_same_keys(tmp_path: Path) -> None:
    store.require_equal({"data/documents.json": documents.data(tmp_path)})


@pytest.mark.parametrize(
    "part",
    ["healthy", *(pytest.param(part, marks=pytest.mark.slow) for part in ("demo", "faults"))],
)
def test_judgements_are_as_kept(part: str, tmp_path: Path) -> None:
    files = verdicts.as_files(part, verdicts.JUDGED[part](tmp_path))
    kept = json.loads((store.FOLDER / f"numbers/{part}.json").read_text(encoding="utf-8"))
    if kept["holds for"] != verdicts.here():  # sums have other last digits here
        files = {file: files[file] for file in files.keys() - verdicts.of_one_machine(part)}
    store.require_equal(files)


def test_numbers_hold_for_this_machine() -> None:
    for path in (store.FOLDER / "numbers").glob("*.json"):
        held = json.loads(path.read_text(encoding="utf-8"))["holds for"]
        if held != verdicts.here():
            pytest.skip(f"{path.name} holds for {held}; this is {verdicts.here()}: not compared")
