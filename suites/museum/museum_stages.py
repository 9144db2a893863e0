"""A small case of the museum, prepared once a process: the small V3.2 and a few tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from degarble.harness.museum.cases import ModelKey, MuseumCase, Stage, prepare

KEY = ModelKey("v32", "nvfp4-experts")


@cache
def _folder() -> TemporaryDirectory[str]:
    """The folder goes with the process."""
    made = TemporaryDirectory(prefix="degarble-museum-")
    prepare(Path(made.name), (KEY,))
    return made


def root() -> Path:
    """Where the checkpoints lie."""
    return Path(_folder().name)


@cache
def small_stage() -> Stage:
    """The case with its healthy run."""
    return Stage.open(MuseumCase(KEY, 1, (40, 7)), root(), {})
