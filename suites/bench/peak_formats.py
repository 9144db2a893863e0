"""Peak memory of one arm of bench_formats, in a process of its own.

`python -m degarble.suites.bench.peak_formats TASK ARM SIZE` prints (input + rise) / (input +
output), or None where the kernel has no resettable high-water mark. A first call at full size is
not counted: it compiles, imports and starts thread pools.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.formats.fast.buffers import drop_spare_memory
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.suites.bench import peers_formats as peers
from degarble.suites.bench.bench_formats import OURS, weights
from degarble.suites.bench.timing import peak_bytes, pin

if TYPE_CHECKING:
    from collections.abc import Callable


def prepared(task: str, arm: str, size: int) -> tuple[Callable[[], Any], int, int]:
    """Return the call, the bytes of its input and the bytes of its output."""
    values = weights(size)
    tensor = quantise(values, NVFP4)
    small = tensor.codes.nbytes + tensor.block_scale.nbytes
    ours: dict[str, Callable[[], Any]] = {
        "quantise": lambda: quantise(values, NVFP4),
        "dequantise": lambda: dequantise(tensor, torch.bfloat16),
    }
    quantising = task == "quantise"
    if arm == OURS:
        call = ours[task]
    elif quantising:
        call = peers.QUANTISERS[arm](values)
    else:
        call = peers.DECODERS[arm](tensor.codes, tensor.block_scale, tensor.decode_scale)
    return call, *((values.nbytes, small) if quantising else (small, values.nbytes))


def main(task: str, arm: str, size: str) -> None:
    """Measure once, after one call that is not counted."""
    pin(2)
    with peers.quiet():
        call, read, written = prepared(task, arm, int(size))
        call()
        drop_spare_memory()
        rise = peak_bytes(call)
    sys.stdout.write(f"{None if rise is None else (read + rise) / (read + written)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
