"""Compute logits with a reference model: of the next tokens, or of all rows piece by piece.

The families differ in what lies between the layers and the head: streams in V4, normed states in
V3.2.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from degarble.harness.model.config.config import V4Config, V32Config
from degarble.references.model.v4 import ModelV4
from degarble.references.model.v32 import ModelV32
from degarble.references.state import Step

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.references.binding import Bound
    from degarble.references.state import Sequence


class Speaker:
    """Forward pass of either family; `absorbed` selects V3.2's absorbed attention."""

    def __init__(self, bound: Bound, *, absorbed: bool = True) -> None:
        config = bound.config
        self.bound = bound
        self.config = config
        self._model: ModelV4 | ModelV32
        if isinstance(config, V4Config):
            self._model = ModelV4(bound, config)
        else:
            assert isinstance(config, V32Config), "there are two families"
            self._model = ModelV32(bound, config, absorbed=absorbed)

    @property
    def context(self) -> int:
        """How many positions the model has."""
        return self.config.max_position_embeddings or sys.maxsize

    def next_logits(self, sequences: list[Sequence], tokens: list[Tensor]) -> Tensor:
        """Return logits [B, V] after each sequence's last new token; the sequences advance."""
        hidden = self.hidden(sequences, tokens)
        return self.logits(hidden[torch.tensor([len(new) for new in tokens]).cumsum(0) - 1])

    def hidden(self, sequences: list[Sequence], tokens: list[Tensor]) -> Tensor:
        """Return the states before the head for every new token, and advance the sequences."""
        step = Step.of([each.length for each in sequences], tokens)
        with torch.inference_mode():
            if isinstance(self._model, ModelV4):
                made = self._model.streams(step, sequences)
            else:
                made = self._model.hidden(step, sequences)
        for sequence, new in zip(sequences, tokens, strict=True):
            sequence.length += len(new)
        return made

    def normed(self, hidden: Tensor) -> Tensor:
        """The head's input, for rows of `hidden`."""
        if isinstance(self._model, ModelV32):
            return hidden
        with torch.inference_mode():
            return self.bound("norm", x=self.bound("hc_head", streams=hidden)["out"])["out"]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of rows of `hidden`."""
        normed = self.normed(hidden)
        with torch.inference_mode():
            return self.bound("head", x=normed)["out"]
