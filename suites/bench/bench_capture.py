"""What a capture costs a run: a forward pass with everything recorded, against the same one plain.

A toy of 16 layers of width 1024 with 512 tokens. Arms: plain; captured, inputs and outputs of every
module, hashed and written in the background; statistics only; and what a person writes by hand,
hooks that clone outputs. The time is that of the forward pass; the time until the capture is
complete on disk is listed separately. Arms take turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.capture.files.writer import CaptureWriter
from degarble.harness.capture.modules import places_by_name, recording
from degarble.harness.capture.recorder import Recorder
from degarble.suites.bench.timing import Neighbours, Reading, Section, Table, Target, paired_ratio
from degarble.suites.capture.capture_models import Stack

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.suites.bench.timing import Settings

PACKAGES = ("torch", "safetensors")
RATIO = 1.2
WIDTH, LAYERS, TOKENS, IDS = 1024, 16, 512, 1000


class Turn(NamedTuple):
    """One forward pass: seconds of it, seconds until all was on the disk, bytes there."""

    forward: float
    rest: float = 0.0
    nbytes: int = 0


def plain(model: Stack, tokens: torch.Tensor, _folder: Path) -> Turn:
    """The pass alone."""
    return Turn(_timed(model, tokens))


def captured(
    model: Stack, tokens: torch.Tensor, folder: Path, *, statistics_only: bool = False
) -> Turn:
    """Every input and output, to the disk."""
    with CaptureWriter(folder, {}) as writer:
        recorder = Recorder(writer, statistics_only=statistics_only)
        with recording(model, places_by_name(model), recorder):
            forward = _timed(model, tokens)
        begin = time.perf_counter()
        tally = writer.finish()
    return Turn(forward, time.perf_counter() - begin, tally.stored_bytes)


def told(model: Stack, tokens: torch.Tensor, folder: Path) -> Turn:
    """Statistics and hashes."""
    return captured(model, tokens, folder, statistics_only=True)


def by_hand(model: Stack, tokens: torch.Tensor, folder: Path) -> Turn:
    """Hooks that clone what a module puts out, and one file at the end."""
    from safetensors.torch import save_file  # noqa: PLC0415  of this arm alone

    seen: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name and next(module.children(), None) is None:

                def hook(_module: Any, _given: Any, made: Any, name: str = name) -> None:
                    seen[name] = made.detach().clone()

                stack.callback(module.register_forward_hook(hook).remove)
        forward = _timed(model, tokens)
    begin = time.perf_counter()
    folder.mkdir()
    save_file(seen, folder / "all.safetensors")
    nbytes = sum(each.nbytes for each in seen.values())
    return Turn(forward, time.perf_counter() - begin, nbytes)


ARMS: dict[str, Callable[[Stack, torch.Tensor, Path], Turn]] = {
    "plain": plain,
    "captured, inputs and outputs": captured,
    "statistics only": told,
    "hooks and clones of outputs, by hand": by_hand,
}


def _timed(model: Stack, tokens: torch.Tensor) -> float:
    begin = time.perf_counter()
    model(tokens)
    return time.perf_counter() - begin


def turns(settings: Settings) -> dict[str, list[Turn]]:
    """Run every arm once to warm up, then by turns."""
    width = min(settings.size, WIDTH)
    model = Stack(LAYERS, width, 4 * width, IDS)
    tokens = torch.arange(TOKENS)[None] * 37 % IDS
    found: dict[str, list[Turn]] = {name: [] for name in ARMS}
    names = list(ARMS)
    with torch.inference_mode():
        for number in range(settings.rounds + 1):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                with tempfile.TemporaryDirectory() as folder:
                    turn = ARMS[name](model, tokens, Path(folder) / "capture")
                if number:
                    found[name].append(turn)
    return found


def run(settings: Settings) -> Section:
    """Measure all arms by turns."""
    with Neighbours() as neighbours:
        found = turns(settings)
    readings = {name: Reading(tuple(t.forward for t in each)) for name, each in found.items()}
    rows = []
    for name, each in found.items():
        ratio, low, high = paired_ratio(readings[name], readings["plain"])
        rest = statistics.median(turn.rest for turn in each)
        size = each[0].nbytes / 1e9
        rows.append(
            (name, f"{readings[name].median:.3f}", f"{ratio:.2f} [{low:.2f}, {high:.2f}]",
             f"{rest:.2f}", f"{size:.2f}")
        )  # fmt: skip
    ratio = paired_ratio(readings["captured, inputs and outputs"], readings["plain"])[0]
    header = ("arm", "forward, s", "times plain", "then until on the disk, s", "GB")
    return Section(
        key="capture",
        title="What a capture costs",
        tables=(Table("Forward pass of a toy on the CPU", header, tuple(rows)),),
        targets=(Target("forward with everything captured, times plain", ratio, RATIO, False),),
        notes=(
            f"{LAYERS} layers of width {min(settings.size, WIDTH)}, {TOKENS} tokens, float32",
            f"{settings.rounds} rounds, by turns",
            f"other processes took {neighbours.cores:.2f} cores of this machine meanwhile",
        ),
    )
