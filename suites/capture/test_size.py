"""The estimate beside captures that were written: both families, prefill, decode, filters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.capture.capture import SequenceTokens, captured_bytes, steps_of
from degarble.harness.capture.files.records import Phase
from degarble.harness.capture.files.writer import CaptureWriter
from degarble.harness.capture.options import CaptureFilter
from degarble.harness.capture.recorder import Recorder
from degarble.harness.model.config.config import V4_PRO
from degarble.references.binding import BoundModel
from degarble.references.model import ModelV4, ModelV32, Sequence
from degarble.references.numerics import Numerics
from degarble.references.weights import random_weights
from degarble.suites.checkpoint.reading_cases import TINY_V4, TINY_V32

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.model.config.config import Config

LENGTHS, NEW = [140, 30], 4


def written(bound: BoundModel, folder: Path, wanted: CaptureFilter) -> int:
    """Run prompts and new tokens; the bytes of tensors that the capture has."""
    config = bound.config
    model: ModelV4 | ModelV32
    v32 = config is TINY_V32
    model = ModelV32(bound, TINY_V32) if v32 else ModelV4(bound, TINY_V4)
    sequences = [Sequence() for _ in LENGTHS]
    chance = torch.Generator().manual_seed(1)
    with torch.inference_mode(), CaptureWriter(folder, {}) as writer:
        recorder = Recorder(writer, wanted)
        recorder.wrap(bound)
        for step in steps_of(LENGTHS, NEW, 2048):
            pieces = [torch.randint(0, 60, (fed.tokens,), generator=chance) for fed in step]
            positions = [at for f in step for at in range(f.before, f.before + f.tokens)]
            recorder.begin(Phase.PREFILL, [0] * len(positions), positions, [0] * len(positions))
            model.forward(sequences, pieces, last_only=True)
        return writer.finish().stored_bytes


@pytest.mark.parametrize("config", [TINY_V4, TINY_V32], ids=["v4", "v32"])
@pytest.mark.parametrize(
    ("words", "low", "high"),
    [({}, 0.97, 1.1), ({"layers": "1"}, 0.9, 1.1), ({"tokens": "0-9"}, 0.3, 1.5)],
    ids=["all", "one layer", "ten tokens"],
)
def test_the_estimate_is_near_what_is_written(
    config: Config,
    words: dict[str, str],
    low: float,
    high: float,
    tmp_path: Path,
) -> None:
    bound = BoundModel(config, Numerics.bf16(), random_weights(config, 1, torch.float32))
    wanted = CaptureFilter.of(**words)
    estimate = captured_bytes(bound, steps_of(LENGTHS, NEW, 2048), wanted)
    found = written(bound, tmp_path, wanted)
    assert low * found <= estimate <= high * found, estimate / found


def test_steps_are_pieces_and_then_tokens() -> None:
    assert steps_of([5, 3], 3, 4) == [
        [SequenceTokens(4, 0), SequenceTokens(3, 0)], [SequenceTokens(1, 4)],
        [SequenceTokens(1, 5), SequenceTokens(1, 3)], [SequenceTokens(1, 6), SequenceTokens(1, 4)],
    ]  # fmt: skip


def test_v4_pro_is_estimated_without_weights() -> None:
    bound = BoundModel(V4_PRO, Numerics.bf16(), {})
    total = captured_bytes(bound, steps_of([1000], 1, 2048), CaptureFilter())
    assert 50e9 < total < 200e9
    assert (
        captured_bytes(bound, steps_of([1000], 1, 2048), CaptureFilter.of(layers="3")) < total / 40
    )
