"""Log-probabilities of tokens, with the likeliest alternatives, and each token's own text.

They are natural logarithms in float64 of the model's own distribution, before temperature and
top_p. The texts of a sequence's tokens add up to its text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.chat.tokenizer import Growing
from degarble.harness.serve.messages import Scored

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from degarble.harness.chat.tokenizer import Tokenizer
    from degarble.harness.inference.speaker import Speaker

_LOGITS = 1 << 22  # of one block of rows: 32 MiB in float64


class Scoring:
    """The scores of one sequence, token by token."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._growing = Growing(tokenizer)

    def first(self, number: int) -> Scored:
        """Score the token that begins everything: nothing predicts it."""
        return Scored(number, self._growing.add(number), None)

    def token(self, number: int, logits_V: Tensor) -> Scored:
        """Score one token by the logits at its position."""
        values = logits_V.double().log_softmax(-1)
        likeliest = tuple((n, self.text_of(n), float(values[n])) for n in _best(values, self._top))
        return Scored(number, self._growing.add(number), float(values[number]), likeliest)

    def prompt(self, speaker: Speaker, hidden: Tensor, targets: Sequence[int]) -> Iterator[Scored]:
        """Score tokens of a prompt; row n of `hidden` predicts target n."""
        rows = max(1, _LOGITS // speaker.config.vocab_size)
        for begin in range(0, len(targets), rows):
            wanted = targets[begin : begin + rows]
            logits = speaker.logits(hidden[begin : begin + len(wanted)])
            yield from (self.token(n, row) for n, row in zip(wanted, logits, strict=True))

    def rest(self) -> str:
        """Return the text of tokens that end inside a character."""
        return self._growing.rest()

    def text_of(self, number: int) -> str:
        """Return the text of a token alone."""
        return self._tokenizer.decode([number])


def _best(values_V: Tensor, count: int) -> list[int]:
    """Return the ids of the largest values; ties go to the lowest id."""
    if count == 0:
        return []
    least = values_V.topk(min(count, len(values_V))).values[-1]
    near = (values_V >= least).nonzero().squeeze(1)  # more than `count` where some are equal
    order = values_V[near].sort(descending=True, stable=True).indices
    found: list[int] = near[order[:count]].tolist()
    return found
