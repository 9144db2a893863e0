"""Undo a lossless conversion: restore the source's own tensors, byte for byte."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import LayoutMismatch, UnreadableFile
from degarble.harness.base.files import read_small_file
from degarble.harness.checkpoint.read.types import LARGEST_INDEX, TensorEntry, shown
from degarble.harness.checkpoint.transform.configs import recipe_of, stored_formats
from degarble.harness.checkpoint.transform.convert.job import SOURCE, job_of, prove
from degarble.harness.checkpoint.transform.convert.vllm import FUSED, formats_in_vllm
from degarble.harness.checkpoint.transform.convert.vllm_parameters import BACKENDS, BLOCK
from degarble.harness.checkpoint.transform.pipeline import Transform
from degarble.harness.checkpoint.transform.units import TargetNames
from degarble.harness.checkpoint.view.modules import ModuleTable
from degarble.harness.checkpoint.view.view import fingerprints, logical_names, model_of
from degarble.harness.checkpoint.write.plan import PlannedTensor
from degarble.harness.checkpoint.write.writer import CompanionFiles
from degarble.harness.formats.codec import decode_array
from degarble.harness.formats.layouts import (
    LINEAR,
    exact_ue8m0,
    from_layout,
    restore_rows,
    unpack_scales,
)
from degarble.harness.formats.number_formats import E4M3, ScaleDirection
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.tensors import PartKind, slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.checkpoint.transform.convert.job import ConversionJob
    from degarble.harness.checkpoint.transform.units import (
        Chunk,
        ConversionOptions,
        ConversionProof,
    )
    from degarble.harness.checkpoint.view.view import LogicalNames
    from degarble.harness.checkpoint.write.manifest import Manifest
    from degarble.harness.checkpoint.write.workers import Workers
    from degarble.harness.model.tensors import Slot


# --------------------------------------------------------------------------------------------------
# The inverse of harness.checkpoint.transform.convert.vllm, part by part: cut boxes of rows, undo a
# backend's row order and scale layout, drop padding, widen identifiers. Only parts that kept their
# format can be restored; `convert_back` raises for the rest.

_GATED = (".w1", ".w3")


def restored_parts(back: InverseJob) -> Iterator[tuple[str, Callable[[], Iterator[Chunk]]]]:
    """Yield each source tensor that kept its format, with the function that restores it."""
    names = back.names
    model, before = names.config, stored_formats(names)
    layout = layout_named("vllm", model)
    after = formats_in_vllm(model, layout, before, names.present)
    recipe = recipe_of(after, names)
    present = [
        parameter for parameter in names.present.values() if not layout.omits(parameter, model)
    ]
    for slot in slots(model, layout.with_recipe(recipe), present):
        name = slot.parameter.name
        if name in after and after[name].weight != before[name].weight:
            continue
        form = names.table.form(names.module_of(slot.parameter))
        if form.direction is ScaleDirection.ENCODE and slot.part is PartKind.TENSOR_SCALE:
            continue  # a divisor became a factor: rounded
        if slot.part in form.parts:
            own = form.parts[slot.part]
            stacked = slot.parameter.expert is not None and after[name].weight == "NVFP4"
            arranged = stacked and slot.part in (PartKind.CODES, PartKind.BLOCK_SCALE)
            make = _expert if arranged else _cut
            yield own.name, partial(make, back, slot, own.dtype)


def _cut(back: InverseJob, slot: Slot, dtype: str) -> Iterator[Chunk]:
    entry = back.checkpoint.entry(slot.tensor)
    # vLLM stores identifiers as int32 where the source has int64.
    if slot.box.shape == entry.shape and (entry.dtype, dtype) != ("I32", "I64"):
        yield from back.checkpoint.chunks(slot.tensor)
        return
    box = back.checkpoint.tensor(slot.tensor)[tuple(slice(*each) for each in slot.box.ranges)]
    yield box.long() if (entry.dtype, dtype) == ("I32", "I64") else box
    back.checkpoint.release(slot.tensor)


def _expert(back: InverseJob, slot: Slot, _dtype: str) -> Iterator[Tensor]:
    """Cut one member of one expert out of a stack in a backend's order."""
    backend = BACKENDS[back.options.backend]
    gated = slot.parameter.name.endswith(_GATED)
    unit = 2 if slot.part is PartKind.CODES else BLOCK
    rows, columns = slot.shape
    high, wide = backend.padded((rows, columns * unit), gated=gated)
    total = high * (2 if gated else 1)
    stored = back.checkpoint.tensor(slot.tensor)[slot.parameter.expert].view(torch.uint8)
    if slot.part is PartKind.BLOCK_SCALE and backend.scales != LINEAR:
        stored = from_layout(stored.flatten(), backend.scales, total, wide // unit)
    whole = restore_rows(stored, backend.w13 if gated else backend.w2)
    # w1 lies above w3, each followed by its padding.
    begin = high if slot.parameter.name.endswith(_GATED[1]) else 0
    yield whole[begin : begin + rows, :columns]
    back.checkpoint.release(slot.tensor)


# --------------------------------------------------------------------------------------------------
# Conversions that can be undone: `vllm` (any backend), `fused-compressor`, `deepgemm-wo-a` and
# `nvfp4-lossless`. conversion_source.json lists the source's tensors. Each one is copied, cut out
# of a fused or stacked tensor, taken out of a backend's order, or gets its packed scale restored. A
# tensor that was rounded or left out cannot be restored and raises an error.
#
# Trap: NVFP4 blocks of zeros store no exponent, so their MXFP4 scale may differ from the source's;
# the values are the same. The proof is the forward one, with the restored checkpoint as source.

if TYPE_CHECKING:
    Maker = Callable[[], Iterator[Chunk]]


@dataclass(frozen=True)
class InverseJob(Transform):
    """The inverse of one conversion; its source is the converted checkpoint."""

    @cached_property
    def forward(self) -> ConversionJob:
        """The job that wrote it; that job's own source is not read."""
        return job_of(self.source, self.source)

    @property
    def options(self) -> ConversionOptions:
        """The options of the conversion."""
        return self.forward.options

    @cached_property
    def source_record(self) -> Mapping[str, Any]:
        """The content of conversion_source.json."""
        path = self.source / SOURCE
        try:
            fields: dict[str, Any] = json.loads(read_small_file(path, LARGEST_INDEX))
            return {"tensors": dict(fields["tensors"]), "files": dict(fields["files"])}
        except (ValueError, KeyError, TypeError) as error:
            raise UnreadableFile(
                shown(str(path)), repr(error), "what a conversion writes", "Convert again."
            ) from error

    @cached_property
    def entries(self) -> Mapping[str, TensorEntry]:
        """The source's tensors; file and offsets are dummies."""
        return {
            name: TensorEntry(name, dtype, tuple(shape), Path("source"), 0, 0)
            for name, (dtype, shape) in self.source_record["tensors"].items()
        }

    @cached_property
    def names(self) -> LogicalNames:
        """The logical names of the source."""
        model = model_of(json.loads(self.source_record["files"].get("config.json", "{}")))
        names = None if model is None else logical_names(model, ModuleTable(self.entries))
        if names is None:
            raise LayoutMismatch(
                f"source of {shown(str(self.source))}",
                "an unknown model",
                "V4 or V3.2",
                "Keep the source itself.",
            )
        return names

    @cached_property
    def target(self) -> TargetNames:
        """Map each name of the source to its name in the converted checkpoint."""
        whole = self.forward.conversion.whole
        return TargetNames(None if whole else self.names, self.forward.to)

    def planned(self) -> tuple[PlannedTensor, ...]:
        """List the tensors to restore; raise where one cannot be."""
        assert self.makers
        return tuple(PlannedTensor(e.name, e.dtype, e.shape) for e in self.entries.values())

    def plan_sources(self) -> dict[str, str]:
        """Return the conversion and the fingerprints of what it wrote."""
        return {"conversion": f"back from {self.forward.to}"} | fingerprints(self.checkpoint)

    @cached_property
    def companions(self) -> CompanionFiles:
        """The source's own configs."""
        return CompanionFiles(
            {name: text.encode() for name, text in self.source_record["files"].items()}
        )

    def produce(self, tensor: PlannedTensor) -> Iterator[Chunk]:
        """Yield the bytes of one restored tensor."""
        return self.makers[tensor.name]()

    @cached_property
    def makers(self) -> Mapping[str, Maker]:
        """Map each tensor to the function that restores it; raise where there is none."""
        special = {
            "vllm": restored_parts,
            "fused-compressor": _cut_compressors,
            "deepgemm-wo-a": _flattened,
            "nvfp4-lossless": _unscaled,
        }
        found: dict[str, Maker] = dict(special[self.forward.to](self))
        for name, entry in self.entries.items():
            here = self.checkpoint.entries.get(self.target.tensor(name))
            if name in found or here is None:
                continue
            if (here.dtype, here.shape) == (entry.dtype, entry.shape):
                found[name] = partial(self.checkpoint.chunks, here.name)
        lost = [name for name in self.entries if name not in found]
        if lost:
            raise LayoutMismatch(
                f"way back from {self.forward.to}",
                [shown(name) for name in lost[:3]],
                f"a tensor that was neither rounded nor left out, unlike these {len(lost)}",
                "Keep the source, or convert to the format that you need.",
            )
        return found

    def prove(
        self,
        target: Path,
        *,
        workers: Workers = 1,
        progress: Callable[[int, str], None] | None = None,
    ) -> ConversionProof:
        """Prove the forward conversion with the restored checkpoint as its source."""
        return prove(target, self.source, workers=workers, progress=progress)


def convert_back(source: Path, target: Path, *, workers: Workers = 1) -> Manifest:
    """Undo a conversion."""
    if not (source / SOURCE).is_file():
        raise LayoutMismatch(
            shown(str(source)),
            f"no {SOURCE}",
            "the output of vllm, fused-compressor, deepgemm-wo-a or nvfp4-lossless",
            "Formats that were rounded have no way back.",
        )
    return InverseJob(source).run(target, workers=workers)


def _cut_compressors(back: InverseJob) -> Iterator[tuple[str, Maker]]:
    for parameter in back.names.present.values():
        module = back.names.module_of(parameter)
        fused = f"{back.target.sibling(module, FUSED)}.weight"
        half = {"wkv": 0, "wgate": 1}.get(parameter.name.rpartition(".")[2])
        own = back.entries.get(f"{module}.weight")
        if half is None or own is None or fused not in back.checkpoint.entries:
            continue
        if own.dtype == "BF16":  # what was decoded has no way back
            yield own.name, partial(_rows, back, fused, half * own.shape[0], own.shape[0])


def _rows(back: InverseJob, name: str, begin: int, count: int) -> Iterator[Tensor]:
    yield back.checkpoint.tensor(name)[begin : begin + count]


def _flattened(back: InverseJob) -> Iterator[tuple[str, Maker]]:
    options = back.forward.options
    for parameter in back.names.present.values():
        module = back.names.module_of(parameter)
        parts = back.names.table.parts(module)
        codes, scale = parts[PartKind.CODES], parts.get(PartKind.BLOCK_SCALE)
        if not parameter.name.endswith(".wo_a") or codes.dtype != "F8_E4M3" or scale is None:
            continue
        rounded = options.per == "tensor" or (scale.dtype == "F32" and options.gpu == "sm100")
        stored = f"{back.target.module(module)}.weight"
        if len(back.checkpoint.entry(stored).shape) == 3 and not rounded:
            yield codes.name, partial(back.checkpoint.chunks, stored)
            yield scale.name, partial(_block_scale, back, back.target.module(module), scale)


def _block_scale(back: InverseJob, module: str, scale: TensorEntry) -> Iterator[Tensor]:
    stored = back.checkpoint.tensor(f"{module}.weight_scale_inv")
    encodes = back.forward.options.direction == "encode"
    if stored.dtype is torch.int32:
        codes = unpack_scales(stored.transpose(-1, -2), scale.shape[1])[:, ::128].flatten(0, 1)
        yield 254 - codes if encodes else codes  # 2 * 127: the exponent's sign turns
        return
    stored = (stored.reciprocal() if encodes else stored).flatten(0, 1)
    yield stored if scale.dtype == "F32" else exact_ue8m0(stored.clone())


def _unscaled(back: InverseJob) -> Iterator[tuple[str, Maker]]:
    for module in back.names.table.suffixes:
        stored = back.target.module(module)
        if f"{stored}.weight_scale_2" not in back.checkpoint.entries:
            continue  # not NVFP4
        parts = back.names.table.parts(module)
        if PartKind.TENSOR_SCALE in parts:
            continue  # NVFP4 in the source already
        yield parts[PartKind.CODES].name, partial(back.checkpoint.chunks, f"{stored}.weight")
        yield parts[PartKind.BLOCK_SCALE].name, partial(_exponents, back, stored)


def _exponents(back: InverseJob, module: str) -> Iterator[Tensor]:
    codes = back.checkpoint.tensor(f"{module}.weight_scale").view(torch.uint8)[:, ::2]
    scale = decode_array(codes, E4M3) * back.checkpoint.tensor(f"{module}.weight_scale_2")
    yield exact_ue8m0(scale)
