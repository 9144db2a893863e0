"""Records of the references' answers for the engine proof: texts, questions, margins of certainty.

`prepare` writes the file. Needs no torch, so that a fake server starts at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnreadableFile

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Text:
    """A prompt, the references' greedy ids, and of each place the largest logits: ids, values."""

    prompt: list[int]
    ids: list[int]
    best: list[list[int]]
    logits: list[list[float]]

    def gap(self, place: int, token: int) -> float:
        """Return how far a token is below the references' best; unknown ones are below all kept."""
        ids, values = self.best[place], self.logits[place]
        other = values[ids.index(token)] if token in ids else values[-1]
        return values[0] - other


@dataclass(frozen=True)
class Answers:
    """The references' answers for a checkpoint. `moves`: of logits, if a rounding is moved."""

    texts: list[Text]
    questions: list[Text]
    moves: float
    steady: int

    @classmethod
    def read(cls, path: Path) -> Answers:
        """Read what `prepare` wrote."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            texts, questions = ([Text(**each) for each in raw[k]] for k in ("texts", "questions"))
            return cls(texts, questions, raw["moves"], raw["steady"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UnreadableFile(
                str(path), f"{type(error).__name__}: {error}", "answers that prepare wrote",
                "Write them anew.",
            ) from error  # fmt: skip
