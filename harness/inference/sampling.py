"""Sample the next token from logits: greedy, or with temperature and top-p.

A draw depends on the seed and on the number of tokens drawn before for the same prompt, never on
the rest of the batch. All arithmetic is float64; ties go to the lower id. Logits that are not
finite are an error, since a token would hide a broken model. A capture continues, because broken
runs are what it is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Temperature 0 takes the likeliest token each time."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    goes_on: bool = False

    def sampler(self) -> Sampler:
        """A sampler for one prompt."""
        return Sampler(self)


class Sampler:
    """Sampler of one prompt's tokens, with its own random draws."""

    def __init__(self, sampling: Sampling) -> None:
        self._how = sampling
        self._random = torch.Generator().manual_seed(sampling.seed)
        self.drawn = 0

    def __call__(self, logits_V: Tensor) -> int:
        """Choose the next token."""
        values = logits_V.detach().double().cpu()
        wrong = int((~values.isfinite()).sum())
        if wrong and self._how.goes_on:
            self.drawn += 1
            return int(values.where(values.isfinite(), -torch.inf).argmax())
        if wrong:
            raise InvalidArgument(
                f"logits of new token {self.drawn}", f"{wrong} of {values.numel()} not finite",
                "finite logits", "Audit the checkpoint: degarble audit CKPT.",
            )  # fmt: skip
        self.drawn += 1
        if self._how.temperature == 0:
            return int(values.argmax())  # of several largest ones the first
        # Trap: a tiny temperature makes quotients infinite; only those below the peak may be.
        share = torch.softmax((values - values.max()) / self._how.temperature, dim=-1)
        ordered, numbers = torch.sort(share, descending=True, stable=True)
        total = ordered.cumsum(0)
        kept = int((total < self._how.top_p).sum()) + 1  # the one that reaches the share is in
        kept = min(kept, len(total))
        drawn = torch.rand((), generator=self._random, dtype=torch.float64) * total[kept - 1]
        place = int(torch.searchsorted(total[:kept], drawn, right=True))
        return int(numbers[min(place, kept - 1)])
