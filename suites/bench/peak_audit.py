"""One step of the audit's bench, in a process of its own; prints one line of JSON.

`python -m degarble.suites.bench.peak_audit STEP ...`, steps:
  write LAYOUT SIZE BYTES FOLDER   a synthetic V4 of hidden size SIZE and about so many bytes
  cached FOLDER ROUNDS             audit its numbers, files in the page cache; profile one round
  against FOLDER ROUNDS            compare it with itself
  cold FOLDER ROUNDS WORKERS       by turns: plain reads, an audit, each after dropping the files

Files are dropped by posix_fadvise, which needs no rights; a host's cache below it stays.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.checkpoint.audit.against.against import measure_against
from degarble.harness.checkpoint.audit.numbers.numbers import judge_numbers, measure_numbers
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.model.config.config import small_v4
from degarble.suites.bench.peak_checkpoint_quantise import _peak_bytes
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.model.config.config import Config

_PIECE = 16 << 20
_BITS = {"nvfp4-experts": 4.5, "official": 4.25, "bf16": 16.0}  # of an expert's element
_STEPS = {  # what the profile is told by; the rest is told as one
    "e2m1_rows": "codes and block scales (e2m1_rows)",
    "e2m1_columns": "profile of columns (e2m1_columns)",
    "e4m3_panel": "FP8 codes (e4m3_panel)",
    "float_rows": "floats (float_rows)",
    "row_digests": "digests of rows (row_digests)",
    "byte_counts": "entropy of bytes (byte_counts)",
    "preadv": "reading (preadv)",
}


def config_of(layout: str, size: int, wanted: int) -> Config:
    """Return a V4 of two layers with so many experts that its files have about `wanted` bytes."""
    width = max(128, size // 128 * 128)
    inner = max(128, width * 3 // 7 // 128 * 128)
    expert = 3 * width * inner * _BITS[layout] / 8
    return small_v4(
        num_hidden_layers=2,
        compress_ratios=(0, 4, 0),
        num_hash_layers=1,
        hidden_size=width,
        moe_intermediate_size=inner,
        n_routed_experts=max(4, round(wanted / expert / 3)),
        vocab_size=256,
    )


def write(layout: str, size: str, wanted: str, folder: str) -> dict[str, Any]:
    """Write a checkpoint, and the files to the disk."""
    target = Path(folder)
    write_checkpoint(target, Synthetic(config_of(layout, int(size), int(wanted)), layout))
    return {"bytes": sum(path.stat().st_size for path in _shards(target))}


def cached(folder: str, rounds: str) -> dict[str, Any]:
    """Audit by one thread, several times; the median counts."""
    with Checkpoint.open(folder) as checkpoint:
        found: list[Any] = []

        def audit() -> None:
            found[:] = [measure_numbers(checkpoint)]
            judge_numbers(checkpoint, found[0])

        answer = _timed(audit, int(rounds))
        size = int(found[0]["nbytes"].sum())
        weights = len(found[0])
        profile = cProfile.Profile()
        start = time.perf_counter()
        profile.runcall(audit)
        profiled = time.perf_counter() - start
    return _answer(answer, size, weights) | {
        "profiled": profiled,
        "profile": _shares(profile, profiled),
    }


def against(folder: str, rounds: str) -> dict[str, Any]:
    """Compare a checkpoint with itself; bytes of both sides count."""
    with Checkpoint.open(folder) as here, Checkpoint.open(folder) as there:
        found: list[Any] = []
        answer = _timed(lambda: found.append(measure_against(here, there)), int(rounds))
        size = sum(pair.nbytes for pair in found[0].pairs)
        return _answer(answer, size, len(found[0]))


def cold(folder: str, rounds: str, workers: str) -> dict[str, Any]:
    """Take turns between plain reads and an audit, each of them from the disk."""
    paths = _shards(Path(folder))
    size = sum(path.stat().st_size for path in paths)
    with Checkpoint.open(folder) as checkpoint:
        measure_numbers(checkpoint)  # compiles, and is not counted
    disk, rate = [], []
    for _ in range(max(1, int(rounds))):
        _drop(paths)
        disk.append(size / _clock(lambda: _read(paths)))
        _drop(paths)
        with Checkpoint.open(folder) as checkpoint:
            rate.append(size / _clock(lambda: measure_numbers(checkpoint, workers=int(workers))))
    return {
        "disk": statistics.median(disk),
        "rate": statistics.median(rate),
        "turns": len(rate),
        "workers": int(workers),
        "peak": _peak_bytes(),
    }


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _timed(work: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return median processor seconds and median seconds, after a round that compiles."""
    work()
    processor, clock = [], []
    for _ in range(max(1, rounds)):
        start = time.process_time(), time.perf_counter()
        work()
        processor.append(time.process_time() - start[0])
        clock.append(time.perf_counter() - start[1])
    return statistics.median(processor), statistics.median(clock)


def _answer(seconds: tuple[float, float], size: int, weights: int) -> dict[str, Any]:
    return {
        "bytes": size,
        "weights": weights,
        "rate": size / seconds[0],
        "clock_rate": size / seconds[1],
        "peak": _peak_bytes(),
    }


def _shares(profile: cProfile.Profile, whole: float) -> list[tuple[str, float]]:
    spent = dict.fromkeys(_STEPS.values(), 0.0)
    raw: Any = pstats.Stats(profile)
    for (_, _, name), (_, _, own, _, _) in raw.stats.items():
        step = next((told for key, told in _STEPS.items() if key in name), None)
        if step:
            spent[step] += own
    found = sorted(spent.items(), key=lambda pair: -pair[1])
    return [*found, ("everything else: Python, records, judging", whole - sum(spent.values()))]


def _clock(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _read(paths: list[Path]) -> None:
    buffer = memoryview(bytearray(_PIECE))
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _drop(paths: list[Path]) -> None:
    """Write files back and drop them from the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def main(step: str, *arguments: str) -> None:
    """Do one step and say what was measured."""
    torch.set_num_threads(1)
    steps: dict[str, Callable[..., dict[str, Any]]] = {
        "write": write,
        "cached": cached,
        "against": against,
        "cold": cold,
    }
    sys.stdout.write(json.dumps(steps[step](*arguments)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
