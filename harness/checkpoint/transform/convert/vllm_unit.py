"""Make one of vLLM's parameters: copy, decode, stack and arrange its parts.

`Fused` holds the target tensors of one path, the slots that fill each, and yields the bytes of
every slot in row order. Stacks are written one expert at a time, so memory is one expert's weight.

Members of one tensor must have one dtype and fill it without holes. Identifiers must fit int32. w1
and w3 need equal tensor scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, LayoutMismatch
from degarble.harness.checkpoint.transform.convert.backends import BLOCK
from degarble.harness.checkpoint.transform.recode import Recoded
from degarble.harness.checkpoint.transform.units import Unit
from degarble.harness.checkpoint.write.plan import PlannedTensor
from degarble.harness.formats.block_formats import block_format
from degarble.harness.formats.types import ScaleDirection
from degarble.harness.model.storage import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.checkpoint.transform.convert.backends import Backend
    from degarble.harness.checkpoint.transform.convert.recipes_after import Stored
    from degarble.harness.checkpoint.transform.source import Linear
    from degarble.harness.checkpoint.transform.units import Chunk, TensorProof
    from degarble.harness.checkpoint.view.modules import StoredForm
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.model.tensors import Slot

_NVFP4 = "NVFP4"
_ARRANGED = (Part.CODES, Part.BLOCK_SCALE)


@dataclass(frozen=True)
class Plan:
    """The facts that all units of one conversion share. `changed`: members whose format changes."""

    checkpoint: Checkpoint
    sources: Mapping[str, Linear]
    after: Mapping[str, Stored]
    changed: frozenset[str]
    backend: Backend


class Fused:
    """All tensors under one path of vLLM's."""

    def __init__(self, path: str, tensors: Mapping[str, list[Slot]], plan: Plan) -> None:
        self.path = path
        self.tensors = {
            name: sorted(found, key=lambda slot: slot.box.ranges) for name, found in tensors.items()
        }
        self.checkpoint = plan.checkpoint
        self.sources = plan.sources
        self.after = plan.after
        self.backend = plan.backend
        members = {slot.parameter.name: slot for each in self.tensors.values() for slot in each}
        self.members = {name: slot.parameter for name, slot in members.items()}
        self.changed = plan.changed & members.keys()
        self.is_stack = any(each.expert is not None for each in self.members.values())
        self.is_nvfp4 = self.is_stack and all(self.after[n].weight == _NVFP4 for n in self.members)
        # Two rows of the parameter table in one stack: w1 and w3.
        self.is_gated = self.is_stack and len({each.row for each in self.members.values()}) > 1

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

    def unit(self, check: Callable[[Fused, Checkpoint], Iterator[TensorProof]]) -> Unit:
        """Return the unit of work, with its proof."""
        left_out = tuple(pair for name in self.changed for pair in self.sources[name].input_scale)
        gone = {name for name, _ in left_out}
        entries = (e.name for name in self.members for e in self.form(name).parts.values())
        key = self.path if self.changed else ""  # only codes and scales made together stay together
        return Unit(
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
        found = self.tensors[tensor]
        shape = tuple(
            max(slot.box.ranges[axis][1] for slot in found)
            for axis in range(len(found[0].box.ranges))
        )
        if sum(slot.box.count for slot in found) != prod(shape):
            raise LayoutMismatch(
                f"members of {tensor}",
                sorted({slot.parameter.name for slot in found})[:3],
                "all of them: what is missing would stay uninitialised",
                "Look for a shard that is missing.",
            )
        dtypes = {self.dtype(slot) for slot in found}
        if len(dtypes) != 1:
            raise DtypeMismatch(
                f"members of {tensor}", sorted(dtypes), "one dtype", "Convert one of them first."
            )
        if self.is_arranged(found[0].part):
            shape = (shape[0], *self.arranged_shape(found[0], len(found) // shape[0]))
        return dtypes.pop(), shape

    def dtype(self, slot: Slot) -> str:
        """Return the dtype of a part: vLLM's for codes and scales, the source's for values."""
        if slot.part is not Part.VALUE or slot.parameter.name in self.changed:
            return str(slot.dtype)
        stored = self.form(slot.parameter.name).parts[Part.VALUE].dtype
        return "I32" if (stored, slot.dtype) == ("I64", "I32") else stored

    def is_arranged(self, part: Part) -> bool:
        """Return whether the backend moves the elements of a part."""
        return self.is_nvfp4 and self.backend.name != "loader" and part in _ARRANGED

    def arranged_shape(self, slot: Slot, members: int) -> tuple[int, int]:
        """Return rows and columns of one expert's part in the backend's order, with padding."""
        unit = 2 if slot.part is Part.CODES else BLOCK
        rows, columns = slot.shape
        high, wide = self.backend.padded((rows, columns * unit), gated=self.is_gated)
        shape = (high * members, wide // unit)
        return shape if slot.part is Part.CODES else self.backend.scale_extents(shape)

    def chunks(self, tensor: PlannedTensor) -> Iterator[Chunk]:
        """Yield the bytes of one target tensor."""
        found = self.tensors[tensor.name]
        part = found[0].part
        if self.is_gated and part is Part.TENSOR_SCALE:
            self._require_shared(found)
        if not self.is_arranged(part):
            for slot in found:
                yield from self._part(slot)
            return
        arrange = self.backend.codes if part is Part.CODES else self.backend.block_scales
        for _, group in groupby(found, lambda slot: slot.parameter.expert):
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
        if part in (Part.TENSOR_SCALE, Part.INPUT_SCALE):
            scale = self.checkpoint.tensor(entry.name)
            # A divisor becomes a factor, rounded once.
            yield scale.reciprocal() if form.direction is ScaleDirection.ENCODE else scale
        elif (entry.dtype, slot.dtype) == ("I64", "I32"):
            yield _narrowed(name, self.checkpoint.tensor(entry.name))
        else:
            yield from self.checkpoint.chunks(entry.name)

    def _require_shared(self, found: list[Slot]) -> None:
        for _, group in groupby(found, lambda slot: slot.parameter.expert):
            scales = {
                slot.parameter.name: float(
                    self.checkpoint.tensor(
                        self.form(slot.parameter.name).parts[Part.TENSOR_SCALE].name
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
