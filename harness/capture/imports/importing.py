"""Turn a dump of another tool into a capture of a traced model, and say what it can decide."""

from __future__ import annotations

import platform
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.base.version import VERSION
from degarble.harness.capture.files.reader import Capture, capture_document, capture_lines
from degarble.harness.capture.files.writer import CaptureWriter, require_free
from degarble.harness.capture.imports import dumped, flashinfer, sglang, vllm_states
from degarble.harness.capture.recorded_tensors import Coverage, TensorRun
from degarble.harness.capture.recorder import Recorder
from degarble.harness.checkpoint.view.content import source_facts
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.inference.traced import traced_config
from degarble.harness.report.files import require_folder
from degarble.references.traced.family import TracedConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.capture.imports.dumped import ReadDump

_SHOWN = 3  # unplaced modules that are listed


@dataclass(frozen=True)
class ImportOptions:
    """What is imported, and where it goes."""

    kind: str
    path: Path
    model: Path
    out: Path
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class ImportSummary:
    """A written capture, and what it can decide."""

    folder: Path
    config: TracedConfig
    coverage: Coverage
    read: ReadDump
    left_out: Mapping[str, int]

    def lines(self) -> list[str]:
        """Summarise it in a few lines."""
        wide = self.coverage.wide
        alone = self.coverage.judged_alone
        lines = [
            *capture_lines(Capture.open(self.folder)),
            f"  decides     {alone} components alone, {len(wide)} stretches of several",
        ]
        lines += [f"  {line}" for line in self.coverage.wide_lines()]
        if self.left_out:
            lines.append(f"  left out    {len(self.left_out)} components without all their tensors")
        if self.read.unplaced:
            shown = ", ".join(self.read.unplaced[:_SHOWN])
            lines.append(f"  unplaced    {len(self.read.unplaced)}, such as {shown}")
        if self.read.apart:
            lines.append(
                f"  ranks       {len(self.read.apart)} copies differ, {self.read.apart[0]}"
            )
        return [*lines, f"Wrote {self.folder}"]

    def document(self) -> dict[str, Any]:
        """Return the summary as a JSON document."""
        made: dict[str, Any] = {"verdict": None, "origins": [], "cosines": []}
        made |= {"capture": str(self.folder)} | self.coverage.document()
        made["left_out"] = dict(self.left_out)
        made |= {"unplaced": list(self.read.unplaced), "ranks_apart": list(self.read.apart)}
        return made | capture_document(Capture.open(self.folder))


def import_dump(options: ImportOptions) -> ImportSummary:
    """Read a dump, write a capture of it, and say what it decides."""
    if options.kind not in KINDS:
        raise UnknownName.among("KIND", options.kind, KINDS)
    require_free(options.out)
    require_folder("--out", options.out)
    with ExitStack() as stack:
        checkpoint = stack.enter_context(Checkpoint.open(options.model))
        whole = traced_config(checkpoint)
        read = KINDS[options.kind](options, whole, checkpoint)
        if not read.recorded:
            raise InvalidArgument(
                str(options.path), "no tensor that every pass has", "a tensor of this model",
                "Name the checkpoint that the engine loaded: --model CKPT.",
            )  # fmt: skip
        config = TracedConfig(whole.text, whole.dtype, tuple(read.recorded))
        writer = stack.enter_context(
            CaptureWriter(options.out, traced_facts(checkpoint, config, options.kind))
        )
        run = TensorRun(config, Recorder(writer), read.unknown)
        for step in read.steps:
            run.step(step)
        writer.finish(
            ranks=read.ranks, ranks_apart=list(read.apart), left_out=sorted(run.left_out),
            unknown=sorted(read.unknown),
        )  # fmt: skip
    coverage = Coverage.from_config(config)
    return ImportSummary(options.out, config, coverage, read, dict(run.left_out))


def traced_facts(checkpoint: Checkpoint, config: TracedConfig, backend: str) -> dict[str, Any]:
    """Return the manifest's facts of a run that some engine computed."""
    return {
        "source": {
            "name": checkpoint.root.name,
            "path": str(checkpoint.root.resolve()),
            **source_facts(checkpoint),
        },
        "family": config.family,
        "config": config.raw,
        "recorded": list(config.recorded),
        "backend": backend,
        "versions": {
            "degarble": VERSION,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


# --------------------------------------------------------------------------------------------------
# Kinds


def _sglang(options: ImportOptions, config: TracedConfig, _checkpoint: Checkpoint) -> ReadDump:
    return dumped.translated(sglang.read_sglang(options.path), config)


def _vllm_states(options: ImportOptions, config: TracedConfig, _checkpoint: Checkpoint) -> ReadDump:
    if not options.layers:
        raise InvalidArgument(
            "--layers", "none", "the layers whose states were extracted, which no file names",
            "Name those of eagle_aux_hidden_state_layer_ids: --layers 1,2,3.",
        )  # fmt: skip
    return vllm_states.read_vllm_states(options.path, config, options.layers)


def _flashinfer(options: ImportOptions, config: TracedConfig, checkpoint: Checkpoint) -> ReadDump:
    norms = flashinfer.norm_weights(config, _reader(checkpoint))
    return flashinfer.read_flashinfer(options.path, config, norms)


def _reader(checkpoint: Checkpoint) -> Callable[[str], Tensor | None]:
    def read(name: str) -> Tensor | None:
        return checkpoint.tensor(name) if name in checkpoint.entries else None

    return read


KINDS: Mapping[str, Callable[[ImportOptions, TracedConfig, Checkpoint], ReadDump]] = (
    MappingProxyType({"flashinfer": _flashinfer, "sglang": _sglang, "vllm-states": _vllm_states})
)
