"""Make vLLM's fused and stacked parameters, in the order that a MoE backend reads them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, LayoutMismatch, Refused
from degarble.harness.base.files import read_small_file
from degarble.harness.checkpoint.read.types import LARGEST_CONFIG
from degarble.harness.checkpoint.transform.configs import CONVERSION
from degarble.harness.checkpoint.transform.recode import Recoded
from degarble.harness.checkpoint.transform.units import ConversionUnit
from degarble.harness.checkpoint.write.plan import PlannedTensor
from degarble.harness.formats.layouts import (
    AS_STORED,
    INTERLEAVE_64,
    LINEAR,
    SHUFFLE_32,
    SWAP_HALVES,
    SWIZZLE_128X4,
    TRTLLM_GATED,
    RowOrder,
    chain,
    reorder_rows,
    round_up,
    to_layout,
)
from degarble.harness.formats.number_formats import ScaleDirection, block_format
from degarble.harness.model.tensors import PartKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.checkpoint.transform.configs import StoredFormat
    from degarble.harness.checkpoint.transform.source import SourceLinear
    from degarble.harness.checkpoint.transform.units import Chunk, TensorProof
    from degarble.harness.checkpoint.view.modules import StoredForm
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.formats.layouts import ScaleLayout
    from degarble.harness.model.tensors import Slot


# --------------------------------------------------------------------------------------------------
# Orders of stacked NVFP4 experts.
#
# A backend fixes the row order of w13 and w2, the zero padding of their extents, and the layout of
# the block scales. No value changes: codes stay packed, rows move, scale bytes are swizzled. Only
# NVFP4 is arranged, and extents must be divisible as the backend's order requires.
#
# Sources: FlashInfer utils.py and fused_moe/core.py; vLLM 0.33 flashinfer_fp4_moe.py and
# oracle/nvfp4.py.

BLOCK = 16  # elements of one NVFP4 scale


@dataclass(frozen=True)
class ExpertArrangement:
    """The arrangement that one backend's loader applies to w13 = [w1; w3] and to w2.

    `hidden` and `intermediate`: multiples to which these extents are padded with zeros.
    """

    name: str
    w13: RowOrder
    w2: RowOrder
    scales: ScaleLayout
    hidden: int = 1
    intermediate: int = 1

    def padded(self, shape: tuple[int, int], *, gated: bool) -> tuple[int, int]:
        """Return the extents of one member after padding: w1 and w3 [I, D], w2 [D, I]."""
        multiples = (self.intermediate, self.hidden) if gated else (self.hidden, self.intermediate)
        rows, columns = (round_up(x, m) for x, m in zip(shape, multiples, strict=True))
        return rows, columns

    def codes(self, members: Sequence[Tensor], *, gated: bool) -> Tensor:
        """Arrange packed codes [rows, K/2] of one expert's members."""
        return self._rows(members, 2, gated=gated)

    def block_scales(self, members: Sequence[Tensor], *, gated: bool) -> Tensor:
        """Arrange block scales [rows, K/16]; swizzled storage, as rows of the padded matrix."""
        rows = self._rows(members, BLOCK, gated=gated)
        if self.scales == LINEAR:
            return rows
        return to_layout(rows, self.scales).reshape(self.scale_extents(tuple(rows.shape)))

    def scale_extents(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the extents of the stored scales of a matrix [rows, K/16]."""
        rows, columns = shape
        return round_up(rows, self.scales.row_tile), round_up(columns, self.scales.column_tile)

    def _rows(self, members: Sequence[Tensor], unit: int, *, gated: bool) -> Tensor:
        filled = []
        for member in members:
            rows, columns = member.shape
            high, wide = self.padded((rows, columns * unit), gated=gated)
            filled.append(pad(member, (0, wide // unit - columns, 0, high - rows)))
        return reorder_rows(torch.cat(filled), self.w13 if gated else self.w2)


_CUTEDSL_GATED = chain("cutedsl_gated", SWAP_HALVES, INTERLEAVE_64)

BACKENDS: Mapping[str, ExpertArrangement] = MappingProxyType(
    {
        arrangement.name: arrangement
        for arrangement in (
            ExpertArrangement("loader", AS_STORED, AS_STORED, LINEAR),
            ExpertArrangement(
                "trtllm", TRTLLM_GATED, SHUFFLE_32, SWIZZLE_128X4, hidden=256, intermediate=64
            ),
            ExpertArrangement("cutedsl", _CUTEDSL_GATED, AS_STORED, SWIZZLE_128X4),
            ExpertArrangement("flashinfer-cutlass", SWAP_HALVES, AS_STORED, SWIZZLE_128X4),
            ExpertArrangement("vllm-cutlass", AS_STORED, AS_STORED, SWIZZLE_128X4),
        )
    }
)


# --------------------------------------------------------------------------------------------------
# One parameter: copy, decode, stack and arrange its parts.
#
# `FusedParameter` holds the target tensors of one path, the slots that fill each, and yields the
# bytes of every slot in row order. Stacks are written one expert at a time, so memory is one
# expert's weight.
#
# Members of one tensor must have one dtype and fill it without holes. Identifiers must fit int32.
# w1 and w3 need equal tensor scales.

_NVFP4 = "NVFP4"
_ARRANGED = (PartKind.CODES, PartKind.BLOCK_SCALE)


@dataclass(frozen=True)
class FusionPlan:
    """The facts that all units of one conversion share. `changed`: members whose format changes."""

    checkpoint: Checkpoint
    sources: Mapping[str, SourceLinear]
    after: Mapping[str, StoredFormat]
    changed: frozenset[str]
    backend: ExpertArrangement


class FusedParameter:
    """All tensors under one path of vLLM's."""

    def __init__(self, path: str, tensors: Mapping[str, list[Slot]], plan: FusionPlan) -> None:
        self.path = path
        self.tensors = {
            name: sorted(tensor, key=lambda slot: slot.box.ranges)
            for name, tensor in tensors.items()
        }
        self.checkpoint = plan.checkpoint
        self.sources = plan.sources
        self.after = plan.after
        self.backend = plan.backend
        members = {slot.parameter.name: slot for tensor in self.tensors.values() for slot in tensor}
        self.members = {name: slot.parameter for name, slot in members.items()}
        self.changed = plan.changed & members.keys()
        self.is_stack = any(member.expert is not None for member in self.members.values())
        self.is_nvfp4 = self.is_stack and all(self.after[n].weight == _NVFP4 for n in self.members)
        # Two rows of the parameter table in one stack: w1 and w3.
        self.is_gated = self.is_stack and len({member.row for member in self.members.values()}) > 1

    @cached_property
    def recoded(self) -> Mapping[str, Recoded]:
        """The members whose format changes."""
        return {
            name: Recoded(
                [self.sources[name].weight],
                None if word == "BF16" else block_format(word),
            )
            for name in self.members
            if name in self.changed
            for word in [self.after[name].weight]
        }

    def unit(
        self, check: Callable[[FusedParameter, Checkpoint], Iterator[TensorProof]]
    ) -> ConversionUnit:
        """Return the unit of work, with its proof."""
        left_out = tuple(pair for name in self.changed for pair in self.sources[name].input_scale)
        gone = {name for name, _ in left_out}
        entries = (e.name for name in self.members for e in self.form(name).parts.values())
        key = self.path if self.changed else ""  # only codes and scales made together stay together
        return ConversionUnit(
            key=self.path,
            tensors=tuple(PlannedTensor(name, *self.planned(name), key) for name in self.tensors),
            sources=tuple(name for name in entries if name not in gone),
            make=self.chunks,
            check=partial(check, self),
            left_out=left_out,
            formats={name: self.after[name].weight for name in self.changed},
        )

    def form(self, name: str) -> StoredForm:
        """Return the stored form of a member in the source."""
        names = self.checkpoint.names
        assert names is not None
        return self.checkpoint.form(names.module_of(self.members[name]))

    def planned(self, tensor: str) -> tuple[str, tuple[int, ...]]:
        """Return dtype and shape of a target tensor."""
        slots = self.tensors[tensor]
        shape = tuple(
            max(slot.box.ranges[axis][1] for slot in slots)
            for axis in range(len(slots[0].box.ranges))
        )
        if sum(slot.box.count for slot in slots) != prod(shape):
            raise LayoutMismatch(
                f"members of {tensor}",
                sorted({slot.parameter.name for slot in slots})[:3],
                "all of them: what is missing would stay uninitialised",
                "Look for a shard that is missing.",
            )
        dtypes = {self.dtype(slot) for slot in slots}
        if len(dtypes) != 1:
            raise DtypeMismatch(
                f"members of {tensor}", sorted(dtypes), "one dtype", "Convert one of them first."
            )
        if self.is_arranged(slots[0].part):
            shape = (shape[0], *self.arranged_shape(slots[0], len(slots) // shape[0]))
        return dtypes.pop(), shape

    def dtype(self, slot: Slot) -> str:
        """Return the dtype of a part: vLLM's for codes and scales, the source's for values."""
        if slot.part is not PartKind.VALUE or slot.parameter.name in self.changed:
            return str(slot.dtype)
        stored = self.form(slot.parameter.name).parts[PartKind.VALUE].dtype
        return "I32" if (stored, slot.dtype) == ("I64", "I32") else stored

    def is_arranged(self, part: PartKind) -> bool:
        """Return whether the backend moves the elements of a part."""
        return self.is_nvfp4 and self.backend.name != "loader" and part in _ARRANGED

    def arranged_shape(self, slot: Slot, members: int) -> tuple[int, int]:
        """Return rows and columns of one expert's part in the backend's order, with padding."""
        unit = 2 if slot.part is PartKind.CODES else BLOCK
        rows, columns = slot.shape
        high, wide = self.backend.padded((rows, columns * unit), gated=self.is_gated)
        shape = (high * members, wide // unit)
        return shape if slot.part is PartKind.CODES else self.backend.scale_extents(shape)

    def chunks(self, tensor: PlannedTensor) -> Iterator[Chunk]:
        """Yield the bytes of one target tensor."""
        slots = self.tensors[tensor.name]
        part = slots[0].part
        if self.is_gated and part is PartKind.TENSOR_SCALE:
            self._require_shared(slots)
        if not self.is_arranged(part):
            for slot in slots:
                yield from self._part(slot)
            return
        arrange = self.backend.codes if part is PartKind.CODES else self.backend.block_scales
        for _, group in groupby(slots, lambda slot: slot.parameter.expert):
            slots_ = list(group)
            yield arrange([self._bytes(slot) for slot in slots_], gated=self.is_gated)
            for slot in slots_:
                self.checkpoint.release(self.form(slot.parameter.name).parts[part].name)

    def _bytes(self, slot: Slot) -> Tensor:
        entry = self.form(slot.parameter.name).parts[slot.part]
        return self.checkpoint.tensor(entry.name).view(torch.uint8)

    def _part(self, slot: Slot) -> Iterator[Chunk]:
        name, part = slot.parameter.name, slot.part
        if name in self.changed:
            yield from self.recoded[name].chunks(part)
            return
        form = self.form(name)
        entry = form.parts[part]
        if part in (PartKind.TENSOR_SCALE, PartKind.INPUT_SCALE):
            scale = self.checkpoint.tensor(entry.name)
            # A divisor becomes a factor, rounded once.
            yield scale.reciprocal() if form.direction is ScaleDirection.ENCODE else scale
        elif (entry.dtype, slot.dtype) == ("I64", "I32"):
            yield _narrowed(name, self.checkpoint.tensor(entry.name))
        else:
            yield from self.checkpoint.chunks(entry.name)

    def _require_shared(self, slots: list[Slot]) -> None:
        for _, group in groupby(slots, lambda slot: slot.parameter.expert):
            scales = {
                slot.parameter.name: float(
                    self.checkpoint.tensor(
                        self.form(slot.parameter.name).parts[PartKind.TENSOR_SCALE].name
                    )
                )
                for slot in group
            }
            if len(set(scales.values())) > 1:
                raise InvalidArgument(
                    "tensor scales of " + " and ".join(scales),
                    tuple(scales.values()),
                    "one scale: kernels use the first for both",
                    "Quantise them together, with the larger magnitude of the two.",
                )


def _narrowed(name: str, ids: Tensor) -> Tensor:
    narrow = ids.to(torch.int32)
    if not torch.equal(narrow.long(), ids):
        raise DtypeMismatch(name, "I64", "identifiers that int32 holds", "Check the table.")
    return narrow


# --------------------------------------------------------------------------------------------------
# Read from conversion.json which backend's order a conversion stored the experts in.
#
# Audits need it because our conversion to vLLM's parameters can store stacked experts as one
# backend's kernels read them, with rows moved and scales swizzled. The stated order is a claim that
# statistics are compared with, not evidence. An unreadable file states nothing here; the structure
# audit reports it.

_STACKS = (".experts.w13", ".experts.w2")  # of vLLM; nothing else is arranged
_AS_LOADED = "loader"


def stated_backend(checkpoint: Checkpoint) -> ExpertArrangement | None:
    """Return the backend whose order conversion.json states; None for the plain order."""
    path = checkpoint.root / CONVERSION
    if not path.is_file():
        return None
    try:
        told = json.loads(read_small_file(path, LARGEST_CONFIG))
        name = told["options"]["backend"] if told["to"] == "vllm" else _AS_LOADED
        return BACKENDS.get(name) if name != _AS_LOADED else None
    except (Refused, ValueError, KeyError, TypeError):
        return None


def is_arranged(module: str) -> bool:
    """Return whether a module is one of those that a backend's order applies to."""
    return module.endswith(_STACKS)
