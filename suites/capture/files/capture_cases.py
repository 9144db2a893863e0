"""A small capture, made without torch or a model: the same bytes whenever it is written."""

from __future__ import annotations

import json
import shutil
import sys
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.harness.capture.files.records import CapturedStep, Phase
from degarble.harness.capture.files.writer import CaptureWriter, Payload, PendingCall, PendingTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A capture of version 1 as it was written once; these files are never written again.
OLD = {
    "manifest.json": Path(__file__).parent / "capture_1_manifest.json",
    "part-000000.safetensors": Path(__file__).parent / "capture_1_part.safetensors",
}
FACTS = {"source": {"name": "toy"}, "family": "toy", "backend": "torch", "arithmetic": "bf16"}
WORDS = {"float32": "F32", "int64": "I64", "uint16": "BF16", "bool": "BOOL", "uint8": "U8"}


def old_capture(folder: Path) -> Path:
    """Lay the old capture out."""
    folder.mkdir()
    for name, file in OLD.items():
        shutil.copy(file, folder / name)
    return folder


def payload(array: NDArray[Any], *, stored: bool = True) -> Payload:
    """The bytes of an array; 16-bit integers stand for BF16."""
    return Payload(WORDS[str(array.dtype)], array.shape, memoryview(array.tobytes()), stored)


def sent(array: NDArray[Any], **more: Any) -> PendingTensor:
    """An array at a site."""
    return PendingTensor(payload(array), array.shape, **more)


def arrays(seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """What goes through one layer: [T, D] in float32, and codes."""
    chance = np.random.default_rng(seed)
    return (
        chance.standard_normal((3, 8), np.float32),
        chance.integers(0, 1 << 16, (3, 4)).astype(np.uint16),
    )


def write_layers(writer: CaptureWriter, layers: int, begin: int = 0) -> None:
    """Each layer's two components; the second takes what the first put out."""
    for layer in range(begin, begin + layers):
        x, codes = arrays(layer)
        shared = payload(codes)
        norm, linear = f"layers.{layer}.attn.norm", f"layers.{layer}.attn.wq_a"
        out = {"out": PendingTensor(shared, codes.shape)}
        writer.call(PendingCall(0, norm, {"x": sent(x)}, out))
        # Seen there with another shape, as a kernel sees rows.
        put = {"out": sent(x), "scale": sent(np.array(layer, np.float32))}
        writer.call(PendingCall(0, linear, {"x": PendingTensor(shared, (12,))}, put, ("x",)))


def write_capture(folder: Path, layers: int = 2, **options: Any) -> None:
    """The whole capture; a slow machine makes no parts of its own."""
    with CaptureWriter(folder, FACTS, part_seconds=inf, **options) as writer:
        writer.step(CapturedStep(0, Phase.PREFILL, (5, 6, 7), (0, 1, 2), (0, 0, 0)))
        write_layers(writer, layers)
        writer.finish(texts=["anna"])


def write_without_end(folder: Path) -> None:
    """Capture until somebody ends the process; parts take a while to write, and there are many."""
    with CaptureWriter(folder, FACTS, part_bytes=4 << 20) as writer:
        writer.step(CapturedStep(0, Phase.PREFILL, (5, 6, 7), (0, 1, 2), (0, 0, 0)))
        for layer in range(100_000):
            write_layers(writer, 1, layer)
            large = sent(np.full(1 << 18, layer))
            writer.call(PendingCall(0, f"layers.{layer}.ffn.gate", {"x": large}, {}))


if __name__ == "__main__":
    write_without_end(Path(sys.argv[1]))


def marked_incomplete(folder: Path) -> Path:
    """Leave the manifest as a killed run leaves it."""
    path = folder / "manifest.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(raw | {"complete": False, "parts": [], "calls": None}))
    return folder
