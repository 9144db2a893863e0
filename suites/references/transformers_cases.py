"""Cases that our references and transformers compute from the same weights and tokens.

`answers` runs the oracle once for a list of cases. `Judge` compares one of our components with
what a module of theirs put out for the same input; near-ties of top-k are left out and counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from degarble.references.model import Sequence
from degarble.references.weights import random_weights
from degarble.suites.hang_guard import HANG_SECONDS

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.config.config import Config
    from degarble.references.binding import BoundModel
    from degarble.suites.references.transformers_oracle import Seen

RELATIVE = 1e-5  # of the largest magnitude of the site, in float32
NEAR_TIE = 1e-6  # of the largest magnitude of a token's scores


@dataclass
class Case:
    """A model of ours, tokens [B, T], and what transformers made of them."""

    config: Config
    tokens: Tensor
    seed: int
    decode: int = 0
    weights: dict[str, Weight] = field(default_factory=dict)
    seen: Seen = field(default_factory=dict)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        self.weights = random_weights(self.config, self.seed, torch.float32)

    def flat(self, name: str, side: str = "out", number: int = 0) -> Tensor:
        """A tensor of theirs with batch and time in one axis, as our tokens lie."""
        return self.seen[name, side, number].flatten(0, 1)

    @property
    def offsets(self) -> Tensor:
        """Where each sequence begins."""
        batch, time = self.tokens.shape
        return torch.arange(batch + 1) * time

    @property
    def positions(self) -> Tensor:
        """Position of each token."""
        return torch.arange(self.tokens.shape[1]).repeat(self.tokens.shape[0])


def tokens(batch: int, time: int, vocabulary: int, seed: int) -> Tensor:
    """Random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (batch, time), generator=generator)


def answers(cases: list[Case], folder: Path) -> list[Case]:
    """Fill in what transformers makes of the cases, in one process of its own."""
    asked, answered = folder / "cases.pt", folder / "answers.pt"
    torch.save(
        [
            {"config": c.config, "weights": c.weights, "tokens": c.tokens, "decode": c.decode}
            for c in cases
        ],
        asked,
    )
    module = "degarble.suites.references.transformers_oracle"
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, str(asked), str(answered)],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert made.returncode == 0, made.stderr[-2000:]
    for case, answer in zip(cases, torch.load(answered, weights_only=False), strict=True):
        case.seen, case.logits = answer["seen"], answer["logits"]
    return cases


@dataclass
class Judge:
    """Components of ours against modules of theirs, by the same inputs."""

    bound: BoundModel
    judged: set[str] = field(default_factory=set)
    worst: dict[str, float] = field(default_factory=dict)
    near_ties: int = 0
    choices: int = 0

    def run(self, name: str, **inputs: Tensor) -> dict[str, Tensor]:
        """Run one component of ours."""
        self.judged.add(name)
        return dict(self.bound(name, **inputs))

    def expect(self, name: str, ours: Tensor, theirs: Tensor, relative: float = RELATIVE) -> None:
        """Demand that two tensors agree."""
        theirs = theirs.reshape(ours.shape)
        distance = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-20))
        self.worst[name] = max(distance, self.worst.get(name, 0.0))
        assert distance <= relative, f"{name}: {distance:.2e} of the largest magnitude"

    def same(self, name: str, theirs: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        """Run one component and demand that its plain output agrees."""
        outputs = self.run(name, **inputs)
        self.expect(name, outputs["out"], theirs)
        return outputs

    def same_choice(self, name: str, ours: Tensor, theirs: Tensor, scores: Tensor) -> None:
        """Demand the same sets, apart from tokens whose last choice was a near-tie."""
        near = near_ties(scores, ours.shape[-1])
        equal = (ours.sort(-1).values == theirs.sort(-1).values).all(-1)
        self.near_ties += int(near.sum())
        self.choices += near.numel()
        wrong = ~(equal | near)
        assert not bool(wrong.any()), (
            f"{name}: {int(wrong.sum())} choices, first {wrong.nonzero()[0]}"
        )


def near_ties(scores: Tensor, count: int) -> Tensor:
    """Tell which rows of scores leave their last choice open: the next best is as good."""
    if count >= scores.shape[-1]:
        return torch.zeros(scores.shape[0], dtype=torch.bool)
    best = scores.sort(-1, descending=True).values
    last, following = best[:, count - 1], best[:, count]
    size = torch.where(torch.isfinite(scores), scores.abs(), 0.0).amax(-1)
    return torch.isfinite(following) & (last - following <= NEAR_TIE * size)


class Model(Protocol):
    """What generates: one of our models, whole."""

    def forward(self, sequences: list[Sequence], tokens: list[Tensor]) -> Tensor:
        """Return the logits of all new tokens."""


def require_ragged(model: Model, case: Case, lengths: Collection[int]) -> None:
    """Require the oracle's logits for prompts of these lengths in one call."""
    prompts = [row[:length] for row, length in zip(case.tokens, lengths, strict=True)]
    ours = model.forward([Sequence() for _ in prompts], prompts)
    theirs = torch.cat([row[:n] for row, n in zip(case.logits, lengths, strict=True)])
    assert (ours - theirs).abs().max() <= RELATIVE * theirs.abs().max()


def require_cached(model: Model, case: Case) -> None:
    """Require the oracle's logits for a prompt, and for one token after the other behind it."""
    batch = len(case.tokens)
    sequences = [Sequence() for _ in range(batch)]
    prompt = case.tokens.shape[1] - case.decode
    first = model.forward(sequences, list(case.tokens[:, :prompt])).reshape(batch, prompt, -1)
    following = [
        model.forward(sequences, list(column[:, None])).reshape(batch, 1, -1)
        for column in case.tokens[:, prompt:].T
    ]
    ours = torch.cat([first, *following], dim=1)
    assert (ours - case.logits).abs().max() <= RELATIVE * case.logits.abs().max()
