"""Recognise a target: a checkpoint, a capture, a server's address, a kernel's tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from degarble.harness.base.errors import DegarbleError, InvalidArgument, UnreadableFile
from degarble.harness.base.files import read_small_text
from degarble.harness.capture.files.reader import LARGEST_MANIFEST
from degarble.harness.capture.files.records import FORMAT, MANIFEST

CONFIG, WEIGHTS = "config.json", "*.safetensors"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json")
_TAKES = "a checkpoint's folder, a capture, http://HOST:PORT, or a kernel's .safetensors"
# Files of tensors that would have to be unpickled, or that hold no BF16.
_OTHER_TENSORS = (".pt", ".pth", ".bin", ".pkl", ".npz", ".npy")
_SAVE = (
    "Save them so: from safetensors.torch import save_file; "
    'save_file({"x": x, "w": w, "out": out}, "kernel.safetensors")'
)


class TargetKind(StrEnum):
    """What a target can be."""

    CHECKPOINT = "checkpoint"
    CAPTURE = "capture"
    SERVER = "server"
    KERNEL = "kernel"


@dataclass(frozen=True)
class DoctorTarget:
    """One target; `nbytes` is what its files of weights or tensors hold together."""

    kind: TargetKind
    text: str
    nbytes: int = 0
    has_tokenizer: bool = False
    source: str | None = None  # of a capture: the checkpoint that it names
    backend: str | None = None  # of a capture: what computed it

    @property
    def path(self) -> Path:
        """Return its place on disk."""
        return Path(self.text)

    @property
    def name(self) -> str:
        """Return what sentences call it."""
        return self.text if self.kind is TargetKind.SERVER else self.path.resolve().name


def recognise(text: str) -> DoctorTarget:
    """Return what `text` names; refuse what it cannot be, with the command that gets it."""
    if text.startswith(("http://", "https://")):
        return DoctorTarget(TargetKind.SERVER, text)
    path = Path(text)
    if path.is_file():
        return _file(path)
    if (path / MANIFEST).is_file() and _is_capture(path / MANIFEST):
        return _capture(path)
    shards = list(path.glob(WEIGHTS))
    if shards or (path / CONFIG).is_file():
        nbytes = sum(shard.stat().st_size for shard in shards if shard.is_file())
        spoken = any((path / name).is_file() for name in TOKENIZERS)
        return DoctorTarget(TargetKind.CHECKPOINT, text, nbytes, spoken)
    raise UnreadableFile(
        "TARGET", text, _TAKES, "Name a folder with config.json and *.safetensors, or a capture."
    )


def _file(path: Path) -> DoctorTarget:
    if path.suffix == ".safetensors":
        return DoctorTarget(TargetKind.KERNEL, str(path), path.stat().st_size)
    if path.suffix in _OTHER_TENSORS:
        raise InvalidArgument("TARGET", str(path), "tensors in a .safetensors file", _SAVE)
    raise UnreadableFile("TARGET", str(path), _TAKES, "Name one of these.")


def _manifest(path: Path) -> dict[str, object]:
    try:
        found = json.loads(read_small_text(path, LARGEST_MANIFEST))
    except (ValueError, RecursionError, DegarbleError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_capture(path: Path) -> bool:
    return _manifest(path).get("format") == FORMAT


def _capture(path: Path) -> DoctorTarget:
    facts = _manifest(path / MANIFEST).get("facts")
    facts = facts if isinstance(facts, dict) else {}
    source = facts.get("source")
    stated = source.get("path") if isinstance(source, dict) else None
    backend = facts.get("backend")
    return DoctorTarget(
        TargetKind.CAPTURE,
        str(path),
        sum(part.stat().st_size for part in path.glob(WEIGHTS)),
        source=stated if isinstance(stated, str) else None,
        backend=backend if isinstance(backend, str) else None,
    )
