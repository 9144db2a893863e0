"""Texts that a person reads, kept as files, so that a change of one word is seen in review.

A text that differs is written to out/snapshots/ and shown as a diff; if it is meant, it is copied
over the old one. Nothing is ever updated by running a suite.
"""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path

ROOT = Path(__file__).resolve().parent  # the package may be imported by a link
NEW = ROOT.parent / "out" / "snapshots"


def assert_as_kept(name: str, text: str) -> None:
    """Compare `text` with the file `name` below suites/."""
    kept = ROOT / name
    before = kept.read_text(encoding="utf-8") if kept.exists() else ""
    if text == before:
        return
    new = NEW / name
    new.parent.mkdir(parents=True, exist_ok=True)
    new.write_text(text, encoding="utf-8")
    diff = "".join(unified_diff(before.splitlines(True), text.splitlines(True), "kept", "now"))
    raise AssertionError(f"suites/{name} differs; if it is meant, copy {new} over it\n{diff}")
