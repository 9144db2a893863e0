"""Load weights from a checkpoint: values, or codes with their scales, whole or by blocks of rows.

A StoredWeight is one module, or one logical parameter. Nothing is read until it is used; then its
fields share memory with the mapped file. Large weights are walked by row blocks, so memory is
bounded whatever their size. Scale directions are kept as stored, except `input_scale`, which Weight
defines as a decode scale: a divisor is inverted, rounded once to float32. Block scales in bfloat16
are widened, which is exact.

A cut through a scale block, and rows of a stack (walk its blocks instead), raise an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.harness.checkpoint.read.types import DTYPE_BITS, TensorEntry, shown, unknown_name
from degarble.harness.checkpoint.view.modules import Convention
from degarble.harness.formats.block_formats import codes_shape, scale_shape
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.weight import Storage, Weight
from degarble.harness.model.storage import Part
from degarble.harness.model.types import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import Tensor

    from degarble.harness.checkpoint.view.modules import StoredForm
    from degarble.harness.formats.types import BlockFormat

_BLOCK_ELEMENTS = 1 << 22  # of one row block by default: 16 MiB once decoded to float32


def keep_pages(_entry: TensorEntry) -> None:
    """Release nothing: a reused buffer has no pages of a file."""


@dataclass(frozen=True)
class StoredWeight:
    """One weight in the files. `boxes`: its own part of each tensor; None: all of it.

    `read` makes a tensor over the file's pages; `release` frees the pages.
    """

    name: str
    form: StoredForm
    shape: tuple[int, ...]
    boxes: Mapping[Part, Box] | None
    read: Callable[[TensorEntry], Tensor]
    release: Callable[[TensorEntry], None]

    @property
    def format(self) -> BlockFormat | None:
        """The block format of its codes; None where values are stored."""
        return self.form.format

    def weight(self) -> Weight:
        """Return the weight as a record whose fields share memory with the file where they can."""
        return self._weight(self._scalar(Part.TENSOR_SCALE), self._input_scale())

    def _weight(self, tensor_scale: Tensor | None, input_scale: Tensor | None) -> Weight:
        """Return the record with scalars that were read before: they apply to every row."""
        form, fmt = self.form, self.form.format
        if fmt is None:
            value = self._part(Part.VALUE, self.shape)
            return Weight(value=value, input_scale=input_scale)
        assert form.dialect is not None, "a block format has its producer"
        block_scale = _as_stored(self._part(Part.BLOCK_SCALE, scale_shape(self.shape, fmt)))
        return Weight(
            codes=_as_stored(self._part(Part.CODES, codes_shape(self.shape, fmt))),
            block_scale=block_scale,
            tensor_scale=tensor_scale,
            input_scale=input_scale,
            storage=Storage(
                fmt, form.dialect, LINEAR, form.direction, form.nibble_order, self.shape
            ),
        )

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return all values; for a large weight, walk row_blocks instead."""
        return self.weight().values(dtype)

    def rows(self, begin: int, end: int) -> Weight:
        """Return rows `begin` to `end` of a matrix (or of a vector) as a weight of their own."""
        return self._cut(begin, end).weight()

    def member(self, index: int) -> StoredWeight:
        """Return one matrix out of a stack [E, M, K]."""
        if len(self.shape) != 3 or not 0 <= index < self.shape[0]:
            raise InvalidArgument(
                f"member of {shown(self.name)}",
                index,
                f"an index into a stack; its shape is {list(self.shape)}",
                "Read a matrix as a whole, or by rows.",
            )
        boxes = {}
        for part, entry in self.form.parts.items():
            ranges = self.box(part).ranges
            # Parts with one entry a member are cut; a scalar of the whole stack is shared.
            if len(entry.shape) == 3 or entry.shape == self.shape[:1]:
                first = ranges[0][0] + index
                ranges = ((first, first + 1), *ranges[1:])
            boxes[part] = Box(ranges)
        return replace(self, name=f"{self.name}[{index}]", shape=self.shape[1:], boxes=boxes)

    def row_blocks(self, elements: int = _BLOCK_ELEMENTS) -> Iterator[tuple[int, Weight]]:
        """Yield (first row, weight) by whole scale blocks; pages are released after each.

        A stack is walked member by member, with row numbers that run through.
        """
        if len(self.shape) == 3:
            for index in range(self.shape[0]):
                for row, weight in self.member(index).row_blocks(elements):
                    yield index * self.shape[1] + row, weight
            return
        unit = self.form.format.block[0] if self.form.format else 1
        total, width = (self.shape or (1,))[0], prod(self.shape[1:])
        step = max(unit, elements // max(width, 1) // unit * unit)
        # Read once: they apply to every block of rows.
        scalars = self._scalar(Part.TENSOR_SCALE), self._input_scale()
        for begin in range(0, total, step):
            piece = self._cut(begin, min(begin + step, total)) if self.shape else self
            yield begin, piece._weight(*scalars)  # noqa: SLF001  of this class
            if self.release is keep_pages:
                continue
            for part, entry in self.form.parts.items():
                self.release(_within(entry, piece.box(part)))

    def _cut(self, begin: int, end: int) -> StoredWeight:
        unit = self.form.format.block[0] if self.form.format else 1
        total = self.shape[0] if len(self.shape) in (1, 2) else 0
        if not 0 <= begin < end <= total or begin % unit or (end % unit and end != total):
            raise ShapeMismatch(
                f"rows of {shown(self.name)} {list(self.shape)}",
                (begin, end),
                f"a range of rows of a matrix, cut at multiples of {unit}",
                "Walk row_blocks(), which cuts where scale blocks end.",
            )
        boxes: dict[Part, Box] = {}
        for part in self.form.parts:
            box = self.box(part)
            if part in (Part.TENSOR_SCALE, Part.INPUT_SCALE):
                boxes[part] = box
                continue
            # One row of scales covers `unit` rows of codes.
            height = unit if part is Part.BLOCK_SCALE else 1
            # The box of a stack's member still has the stack's axis in front.
            axis = len(box.ranges) - len(self.shape)
            first = box.ranges[axis][0]
            cut = (first + begin // height, first + -(-end // height))
            boxes[part] = Box((*box.ranges[:axis], cut, *box.ranges[axis + 1 :]))
        return replace(self, shape=(end - begin, *self.shape[1:]), boxes=boxes)

    def box(self, part: Part) -> Box:
        """Return this weight's own part of a stored tensor."""
        if self.boxes is not None:
            return self.boxes[part]
        return Box.whole(self.form.parts[part].shape)

    def _part(self, part: Part, shape: tuple[int, ...]) -> Tensor:
        entry = self.form.parts[part]
        tensor = self.read(entry if self.boxes is None else _within(entry, self.boxes[part]))
        if tensor.numel() != prod(shape):
            raise ShapeMismatch(
                f"{part} of {shown(self.name)}",
                list(tensor.shape),
                str(list(shape)),
                "Check which tool wrote it; nothing is broadcast silently.",
            )
        return tensor.reshape(shape)

    def _scalar(self, part: Part) -> Tensor | None:
        """Return a scale: one number, or one for each member of a stack."""
        if part not in self.form.parts or (self.boxes is not None and part not in self.boxes):
            return None
        count = prod(self.box(part).shape)
        return self._part(part, () if count == 1 else self.shape[:-2])

    def _input_scale(self) -> Tensor | None:
        scale = self._scalar(Part.INPUT_SCALE)
        divides = self.form.convention is Convention.COMPRESSED_TENSORS
        return scale.reciprocal() if scale is not None and divides else scale


class Weights(Mapping[str, Weight]):
    """The weights of a model by logical name, read at access.

    Every access makes a new record, so that memory does not grow; keep the one that you change.
    """

    def __init__(self, names: Collection[str], make: Callable[[str], Weight]) -> None:
        self._names = names
        self._make = make

    def __getitem__(self, name: str) -> Weight:
        if name not in self._names:
            raise KeyError(name) from unknown_name("parameter", name, self._names)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _within(entry: TensorEntry, box: Box) -> TensorEntry:
    """Return the bytes of a box as an entry of their own; boxes of whole rows are contiguous."""
    extents = box.shape
    # A box is contiguous if every axis after its first one longer than 1 is taken whole.
    cut = next((axis for axis, extent in enumerate(extents) if extent > 1), len(extents))
    assert extents[cut + 1 :] == entry.shape[cut + 1 :], "rows of several columns' parts"
    first = 0
    for (start, _), extent in zip(box.ranges, entry.shape, strict=True):
        first = first * extent + start
    bits = DTYPE_BITS[entry.dtype]
    begin = entry.begin + first * bits // 8
    end = begin + prod(extents) * bits // 8
    return TensorEntry(entry.name, entry.dtype, extents, entry.file, begin, end)


def _as_stored(tensor: Tensor) -> Tensor:
    """Return codes as bytes, and scales in the dtypes of QuantisedTensor; no value changes."""
    if tensor.dtype is torch.bfloat16:
        return tensor.float()
    return tensor if tensor.dtype is torch.float32 else tensor.view(torch.uint8)
