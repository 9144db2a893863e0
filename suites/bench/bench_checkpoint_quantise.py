"""Quantising checkpoints: weights against the packages of today, then a whole checkpoint.

Arms: one matrix (BF16 to NVFP4 in ModelOpt's dialect, the same tensor for all, tensor amax
included, output compared with nvidia-modelopt bit for bit); the same with report and searches; the
run over a synthetic checkpoint (rate on one core, peak memory, what 881 GB would take); and the
packages over the weights of the same checkpoint.

A projection multiplies the measured rate by the size, without disk and network, and says so.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from degarble.harness.checkpoint.transform.nvfp4_scales import (
    Errors,
    ScaleRule,
    quantise_rows,
    tensor_scale,
)
from degarble.harness.formats.dialects import MODELOPT
from degarble.harness.formats.fast.nvfp4 import largest_finite
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import quantise
from degarble.suites.bench import peers_formats as peers
from degarble.suites.bench.bench_formats import weights
from degarble.suites.bench.timing import (
    Neighbours,
    Reading,
    Section,
    Settings,
    Table,
    Target,
    interleave,
    paired_ratio,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

PACKAGES = ("torch", "numba", "numpy", "nvidia-modelopt", "compressed-tensors")
RATIO = 3.0
PEAK_BYTES = 1_000_000_000
FULL_SIZE = 881e9  # bytes of the V4-Pro checkpoint that was written
_RIVALS = ("nvidia-modelopt", "compressed-tensors")
_OURS = "degarble, amax"


def run(settings: Settings) -> Section:
    """Measure one matrix by all arms, then a whole checkpoint."""
    with Neighbours() as neighbours, peers.quiet():
        table, targets = _matrix(weights(settings.size), settings)
    whole, more = _checkpoint(settings.size)
    beside: tuple[Table, ...] = ()
    if settings.peers:
        rivals, ratios = _rivals(settings.size)
        beside, more = (rivals,), [*more, *ratios]
    return Section(
        key="checkpoint-quantise",
        title="Quantising checkpoints on the CPU",
        tables=(table, whole, *beside),
        targets=(*targets, *more),
        notes=(
            f"{settings.size} x {settings.size}, {settings.rounds} rounds",
            f"other processes took {neighbours.cores:.2f} cores of this machine meanwhile",
        ),
    )


def _with_report(values: Tensor, rule: ScaleRule) -> Errors:
    scale, errors = tensor_scale(largest_finite(values), rule), Errors()
    errors.add(0, values, quantise_rows(values, scale, rule), scale)
    return errors


def _matrix(values: Tensor, settings: Settings) -> tuple[Table, list[Target]]:
    arms: dict[str, Callable[[], Any]] = {
        _OURS: lambda: quantise(values, NVFP4, MODELOPT),
        "degarble, amax with report": lambda: _with_report(values, ScaleRule.AMAX),
        "degarble, four-over-six with report": lambda: _with_report(
            values, ScaleRule.FOUR_OVER_SIX
        ),
        "degarble, mse with report": lambda: _with_report(values, ScaleRule.MSE),
    }
    agreement: dict[str, str] = {}
    targets: list[Target] = []
    if settings.peers:
        ours = quantise(values, NVFP4, MODELOPT)
        for name in _RIVALS:
            arms[name] = peers.QUANTISERS[name](values)
            codes, scales = arms[name]()
            differ = (codes != ours.codes).double().mean(), (scales != ours.block_scale).sum()
            same = not (bool(differ[0]) or bool(differ[1]))
            agreement[name] = "bit-equal" if same else f"{float(differ[0]):.2%} of bytes differ"
        equal = float(agreement["nvidia-modelopt"] == "bit-equal")
        targets.append(Target("output is bit-equal to nvidia-modelopt (1 = yes)", equal, 1.0))
    readings = interleave(arms, settings.rounds)
    targets += [
        Target(f"times as fast as {name}", paired_ratio(readings[name], readings[_OURS])[0], RATIO)
        for name in agreement
    ]
    rows = tuple(
        (name, *_cells(reading, readings[_OURS], values.numel()), agreement.get(name, ""))
        for name, reading in readings.items()
    )
    header = ("arm", "ms", "ns an element", "time / degarble", "against our bytes")
    return Table("One matrix, BF16 to NVFP4", header, rows), targets


def _cells(reading: Reading, ours: Reading, elements: int) -> tuple[str, str, str]:
    ratio = paired_ratio(reading, ours)[0]
    return (
        f"{reading.median * 1e3:.1f}",
        f"{reading.median / elements * 1e9:.2f}",
        f"{ratio:.1f}",
    )


def _checkpoint(size: int) -> tuple[Table, list[Target]]:
    """Quantise synthetic checkpoints in a process of its own, where memory can be read."""
    rows, peaks = [], []
    with tempfile.TemporaryDirectory() as folder:
        for layout in ("official", "bf16"):
            command = [sys.executable, "-m", "degarble.suites.bench.peak_checkpoint_quantise"]
            said = subprocess.run(
                [*command, layout, str(size), str(Path(folder) / layout)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split()
            read, seconds, peak = float(said[-3]), float(said[-2]), float(said[-1])
            peaks.append(peak)
            rate = read / seconds
            hours = FULL_SIZE / rate / 3600
            cells = (f"{read / 1e9:.2f}", f"{rate / 1e9:.2f}", f"{peak / 1e6:.0f}", f"{hours:.2f}")
            rows.append((f"V4, {layout} to nvfp4-full", *cells))
    header = (
        "run, one worker",
        "GB read",
        "GB/s read, output written and hashed",
        "peak resident MB",
        "core hours for 881 GB read (size / rate; storage not counted)",
    )
    targets = [Target("peak resident bytes", max(peaks), PEAK_BYTES, at_least=False)]
    return Table("Whole checkpoints", header, tuple(rows)), targets


def _rivals(size: int) -> tuple[Table, list[Target]]:
    """Let today's packages quantise the weights of the same checkpoint, and do nothing else.

    Ours reads, quantises, measures errors, writes, hashes and syncs; theirs quantises.
    """
    rows, targets = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in _RIVALS:
            command = [sys.executable, "-m", "degarble.suites.bench.peak_checkpoint_quantise"]
            said = subprocess.run(
                [*command, "--rival", name, "bf16", str(size), str(Path(folder) / name)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split()
            ours, theirs, equal = map(float, said[-3:])
            rows.append(
                (name, f"{theirs:.1f}", f"{ours:.1f}", f"{theirs / ours:.1f}", f"{equal:.0%}")
            )
            targets.append(Target(f"a checkpoint: times as fast as {name}", theirs / ours, RATIO))
            if name == "nvidia-modelopt":
                targets.append(Target("share of weights bit-equal to nvidia-modelopt", equal, 1.0))
    header = (
        "package",
        "its seconds",
        "our seconds, all of it",
        "ratio",
        "weights with equal bytes",
    )
    return Table("Whole checkpoint, BF16 to nvfp4-full, one thread", header, tuple(rows)), targets
