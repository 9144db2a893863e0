"""Parse the nightly options of pytest's command line into a record. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument

if TYPE_CHECKING:
    import pytest

OPTIONS = {
    "--prompts": ("FILE", "prompts of a night: one a line, or a .jsonl file"),
    "--repeats": ("N", "captures of a night in processes of their own"),
    "--museum": ("EXTENT", "faults that a night plants: some, published, whole"),
    "--store": ("URL", "history store that a night is added to"),
    "--ledger": ("FILE", "known failures, a YAML list"),
    "--commit": ("SHA", "commit of the kernels that are judged"),
    "--subject": ("NAME", "what the history calls the checkpoint"),
    "--summary": ("FILE", "a Markdown file that the summary of a night is added to"),
}
EXTENTS = ("some", "published", "whole")
REPEATS = 4
MOST_REPEATS = 64


@dataclass(frozen=True)
class NightOptions:
    """Options of a night, from the command line."""

    prompts: Path | None = None
    repeats: int = REPEATS
    museum: str = EXTENTS[0]
    store: str | None = None
    ledger: Path | None = None
    commit: str = ""
    subject: str = ""
    summary: Path | None = None


def add_options(group: Any) -> None:
    """Add them to a group of pytest's options."""
    for option, (metavar, text) in OPTIONS.items():
        group.addoption(option, metavar=metavar, default=None, help=text)


def night_options(config: pytest.Config) -> NightOptions:
    """Read them, or refuse one by name."""
    said = {name: config.getoption(name) for name in OPTIONS}
    museum = said["--museum"] or EXTENTS[0]
    if museum not in EXTENTS:
        raise InvalidArgument("--museum", museum, f"one of {', '.join(EXTENTS)}", "Name one.")
    return NightOptions(
        prompts=_path(said["--prompts"]),
        repeats=_repeats(said["--repeats"]),
        museum=museum,
        store=said["--store"],
        ledger=_path(said["--ledger"]),
        commit=said["--commit"] or "",
        subject=said["--subject"] or "",
        summary=_path(said["--summary"]),
    )


def _path(value: str | None) -> Path | None:
    return Path(value).absolute() if value else None


def _repeats(value: str | None) -> int:
    if value is None:
        return REPEATS
    if not (value.isascii() and value.isdigit() and 2 <= int(value[:4]) <= MOST_REPEATS):
        raise InvalidArgument(
            "--repeats", value, f"a number from 2 to {MOST_REPEATS}",
            "One run alone shows nothing; four are the default.",
        )  # fmt: skip
    return int(value)
