"""A checkpoint as the other side of a probe: the reference of `degarble generate` scores texts."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from degarble.harness.generate.generate import GenerationOptions, TextGenerator
from degarble.harness.inference.model import open_model
from degarble.harness.probe.answers import Position, token_of
from degarble.references.model import Sequence

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from degarble.harness.inference.model import OpenModel
    from degarble.harness.probe.server import Prompt


@dataclass(frozen=True)
class LocalSide:
    """An open checkpoint that scores texts."""

    model: OpenModel
    name: str
    top: int

    @property
    def gives_ids(self) -> bool:
        """Return whether tokens can be named by their ids."""
        return True

    @cached_property
    def generator(self) -> TextGenerator:
        """Return what splits texts; a checkpoint without a tokenizer scores ids only."""
        return TextGenerator(self.model, GenerationOptions())

    def score_text(self, text: Prompt, *, ids: bool) -> tuple[Position, ...]:
        """Return the log-probabilities of a text's tokens, by ids or by their texts."""
        model = self.model.logits_model

        def spelt(number: int) -> str:
            return token_of(number) if ids else self.generator.tokenizer.decode([number])

        numbers = list(text) if isinstance(text, tuple) else self.generator.ids(text)
        hidden = model.hidden([Sequence()], [torch.tensor(numbers)])
        made = [Position(spelt(numbers[0]), None, {})]
        for number, row in zip(numbers[1:], hidden, strict=False):
            values = model.logits(row[None])[0].double().log_softmax(-1)
            best = values.topk(min(self.top, len(values)))
            top = {
                spelt(int(token)): float(value)
                for token, value in zip(best.indices.flip(0), best.values.flip(0), strict=True)
            }
            made.append(Position(spelt(number), float(values[number]), top))
        return tuple(made)


@contextmanager
def open_local(folder: Path, top: int) -> Iterator[LocalSide]:
    """Open a checkpoint."""
    with open_model(folder) as model:
        yield LocalSide(model, folder.resolve().name, top)
