"""Compute the perplexity of a text: the log-probability of every token, and the mean.

The text is one sequence, so every token has its full context; probabilities are those of one
forward pass. Layers take PIECE tokens at a time with their caches, as engines prefill; a text of at
most PIECE tokens is one pass. The head takes rows in pieces, because the logits of a whole text
would not fit in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.references.state import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.inference.speaker import Speaker

PIECE = 8192  # tokens that go through the layers together
_LOGITS = 1 << 24  # of one block of rows: 128 MiB in float64


@dataclass(frozen=True)
class Surprise:
    """Natural logarithms of the probabilities of all tokens but the first."""

    log_probabilities: tuple[float, ...]

    @property
    def loss(self) -> float:
        """Mean negative logarithm, in nats a token."""
        return -math.fsum(self.log_probabilities) / len(self.log_probabilities)

    @property
    def perplexity(self) -> float:
        """Return the exponential of the loss; infinite if float64 overflows."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


def surprise(
    speaker: Speaker,
    ids: list[int],
    heard: Callable[[int], None] | None = None,
    piece: int = PIECE,
) -> Surprise:
    """Evaluate a text; `heard` receives the number of tokens evaluated so far."""
    context = speaker.context
    if not 2 <= len(ids) <= context:
        raise InvalidArgument(
            "text", f"{len(ids)} tokens", f"2 to {context}, the model's context",
            "Choose another text, or a part of it.",
        )  # fmt: skip
    tokens, sequence, found = torch.tensor(ids), Sequence(), []
    for begin in range(0, len(ids) - 1, piece):
        new = tokens[begin : min(begin + piece, len(ids) - 1)]
        hidden = speaker.hidden([sequence], [new])
        found.append(_of_targets(speaker, hidden, tokens[begin + 1 : begin + 1 + len(new)]))
        if heard is not None:
            heard(begin + len(new))
    values = torch.cat(found)
    wrong = int((~values.isfinite()).sum())
    if wrong:
        raise InvalidArgument(
            "log-probabilities", f"{wrong} of {len(values)} not finite", "finite numbers",
            "Audit the checkpoint: degarble audit CKPT.",
        )  # fmt: skip
    return Surprise(tuple(values.tolist()))


def _of_targets(speaker: Speaker, hidden: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities [T] of the targets, in float64."""
    rows, found = max(1, _LOGITS // speaker.config.vocab_size), []
    for part, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
        logits = speaker.logits(part).double()
        chosen = logits.gather(1, wanted[:, None]).squeeze(1)
        found.append(chosen - logits.logsumexp(-1))
    return torch.cat(found)
