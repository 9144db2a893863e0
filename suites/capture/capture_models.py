"""Small models that are captured: ours with random weights, and plain layers of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.records import Phase
from degarble.harness.capture.files.writer import CaptureWriter
from degarble.harness.capture.recorder import Recorder
from degarble.references.binding import BoundModel
from degarble.references.model import ModelV4, Sequence
from degarble.references.numerics import Numerics
from degarble.references.weights import random_weights
from degarble.suites.checkpoint.reading_cases import TINY_V4, TINY_V32

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.capture.options import CaptureFilter
    from degarble.harness.model.config.config import Config

THEIRS: dict[str, Config] = {"v4": TINY_V4, "v32": TINY_V32}  # as transformers builds them
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [7, 7])


def bound_v4(seed: int) -> BoundModel:
    """The tiny V4 with random weights, in bf16."""
    weights = random_weights(TINY_V4, seed, torch.float32)
    return BoundModel(TINY_V4, Numerics.bf16(), weights)


def run_v4(bound: BoundModel, recorder: Recorder, decode: int = 2) -> None:
    """Prompts side by side, then tokens one by one."""
    model, sequences = ModelV4(bound, TINY_V4), [Sequence() for _ in PROMPTS]
    pieces = [list(prompt) for prompt in PROMPTS]
    with torch.inference_mode():
        for number in range(decode + 1):
            begins = [sequence.length for sequence in sequences]
            ids = [token for piece in pieces for token in piece]
            positions = [
                at for begin, piece in zip(begins, pieces, strict=True)
                for at in range(begin, begin + len(piece))
            ]  # fmt: skip
            owners = [n for n, piece in enumerate(pieces) for _ in piece]
            recorder.begin(Phase.DECODE if number else Phase.PREFILL, ids, positions, owners)
            model.forward(sequences, [torch.tensor(piece) for piece in pieces])
            pieces = [[number + 2], [number + 3]]


def captured_v4(
    folder: Path,
    wanted: CaptureFilter | None = None,
    *,
    statistics_only: bool = False,
    decode: int = 2,
) -> Capture:
    """A capture of that run."""
    bound = bound_v4(5)
    with CaptureWriter(folder, {}) as writer:
        recorder = Recorder(writer, wanted, statistics_only=statistics_only)
        recorder.wrap(bound)
        run_v4(bound, recorder, decode)
        writer.finish()
    return Capture.open(folder)


class Layer(nn.Module):
    """One layer of a plain model, without attention."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, wide, bias=False)
        self.up = nn.Linear(width, wide, bias=False)
        self.down = nn.Linear(wide, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        gated = nn.functional.silu(self.gate(h)) * self.up(h)
        made: torch.Tensor = x + self.down(gated)
        return made


class Stack(nn.Module):
    """Some layers between an embedding and a head."""

    def __init__(self, layers: int = 2, width: int = 16, wide: int = 32, ids: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(ids, width)
        self.layers = nn.ModuleList([Layer(width, wide) for _ in range(layers)])
        self.head = nn.Linear(width, ids, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        made: torch.Tensor = self.head(x)
        return made
