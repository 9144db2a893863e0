"""Load weights from a checkpoint: values, or codes with their scales, whole or by blocks of rows.

Tensors share memory with the mapped file, or with a reader's buffers for one pass over all bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    ShapeMismatch,
)
from degarble.harness.base.files import regular_file
from degarble.harness.checkpoint.read.file_access import changed_file
from degarble.harness.checkpoint.read.types import DTYPE_BITS, TensorEntry, shown, unknown_name
from degarble.harness.checkpoint.view.modules import NamingConvention
from degarble.harness.checkpoint.view.packing import unpack_module
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.number_formats import WHOLE, codes_shape, scale_shape
from degarble.harness.formats.weight import Weight, WeightEncoding
from degarble.harness.model.tensors import PartKind
from degarble.harness.model.types import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.checkpoint.view.modules import StoredForm
    from degarble.harness.formats.number_formats import BlockFormat


# --------------------------------------------------------------------------------------------------
# Tensors over mapped bytes: a tensor shares memory with the mapping where its bytes are aligned for
# its dtype, and is copied elsewhere. A dtype that torch lacks raises an error; its bytes can still
# be read.

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BOOL": torch.bool,
        "F4": torch.float4_e2m1fn_x2,  # two codes an element: torch's last extent is half
        "U8": torch.uint8,
        "I8": torch.int8,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "I16": torch.int16,
        "U16": torch.uint16,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I32": torch.int32,
        "U32": torch.uint32,
        "F32": torch.float32,
        "C64": torch.complex64,
        "F64": torch.float64,
        "I64": torch.int64,
        "U64": torch.uint64,
    }
)


def tensor_over(entry: TensorEntry, raw: memoryview) -> Tensor:
    """Return the tensor whose bytes are `raw`, sharing memory where alignment allows."""
    dtype = TORCH_DTYPES.get(entry.dtype)
    if dtype is None:
        raise DtypeMismatch(
            f"tensor {shown(entry.name)}",
            entry.dtype,
            f"a dtype that torch holds: {', '.join(TORCH_DTYPES)}",
            "Read its bytes with raw().",
        )
    shape = entry.shape
    if entry.dtype == "F4":
        if not shape or shape[-1] % 2:
            raise ShapeMismatch(
                f"tensor {shown(entry.name)}", shape, "an even last extent", "Read it with raw()."
            )
        shape = (*shape[:-1], shape[-1] // 2)
    if not entry.nbytes:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(raw, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(shape)


# --------------------------------------------------------------------------------------------------
# Weights: a StoredWeight is one module, or one logical parameter. Nothing is read until it is used;
# then its fields share memory with the mapped file. Large weights are walked by row blocks, so
# memory is bounded whatever their size. Scale directions are kept as stored, except `input_scale`,
# which Weight defines as a decode scale: a divisor is inverted, rounded once to float32. Block
# scales in bfloat16 or float16 are widened, which is exact. Integers are unpacked whole, and their
# rows cut afterwards: words of some schemes hold codes of several rows.
#
# A cut through a scale block, and rows of a stack (walk its blocks instead), raise an error.

_OF_THE_INPUT = frozenset(
    {PartKind.LOGICAL_SHAPE, PartKind.INPUT_SCALE, PartKind.TENSOR_SCALE, PartKind.CHANNEL_SCALE}
)  # of a module of integers, and its shape
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
    boxes: Mapping[PartKind, Box] | None
    read: Callable[[TensorEntry], Tensor]
    release: Callable[[TensorEntry], None]
    cut: tuple[int, int] | None = None  # rows of a module of integers

    @property
    def format(self) -> BlockFormat | None:
        """The block format of its codes; None where values are stored."""
        return self.form.format

    def weight(self) -> Weight:
        """Return the weight as a record whose fields share memory with the file where they can."""
        return self._weight(self._scalar(PartKind.TENSOR_SCALE), self._input_scale())

    def _weight(self, tensor_scale: Tensor | None, input_scale: Tensor | None) -> Weight:
        """Return the record with scalars that were read before: they apply to every row."""
        form, fmt = self.form, self.form.format
        if fmt is None:
            value = self._part(PartKind.VALUE, self.shape)
            return Weight(value=value, input_scale=input_scale)
        assert form.dialect is not None, "a block format has its producer"
        if form.scheme is not None:
            return self._unpacked()
        block_scale = _as_stored(self._part(PartKind.BLOCK_SCALE, scale_shape(self.shape, fmt)))
        return Weight(
            codes=_as_stored(self._part(PartKind.CODES, codes_shape(self.shape, fmt))),
            block_scale=block_scale,
            tensor_scale=tensor_scale,
            input_scale=input_scale,
            channel_scale=self._factors(),
            storage=WeightEncoding(
                fmt, form.dialect, LINEAR, form.direction, form.nibble_order, self.shape
            ),
        )

    def _unpacked(self) -> Weight:
        """Return a module of integers as a weight of its own memory."""
        form = self.form
        assert form.format is not None
        assert form.dialect is not None
        tensors: dict[PartKind, Tensor] = {
            part: self.read(entry)
            for part, entry in form.parts.items()
            if part not in _OF_THE_INPUT
        }
        encoding = WeightEncoding(
            form.format, form.dialect, LINEAR, None, form.nibble_order, form.shape
        )
        fields = unpack_module(form, tensors)
        whole = Weight(
            codes=fields["codes"],
            block_scale=fields["block_scale"],
            input_scale=self._input_scale(),
            storage=encoding,
            zero_point=fields.get("zero_point"),
            group_index=fields.get("group_index"),
            channel_scale=self._factors(),
        )
        return whole if self.cut is None else _rows_of(whole, *self.cut)

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
        unit = self._unit
        total, width = (self.shape or (1,))[0], prod(self.shape[1:])
        step = max(unit, elements // max(width, 1) // unit * unit)
        if self.form.scheme is not None:
            whole = self.weight()
            for begin in range(0, total, step):
                yield begin, _rows_of(whole, begin, min(begin + step, total))
            for entry in self.form.parts.values():
                self.release(entry)
            return
        # Read once: they apply to every block of rows.
        scalars = self._scalar(PartKind.TENSOR_SCALE), self._input_scale()
        for begin in range(0, total, step):
            piece = self._cut(begin, min(begin + step, total)) if self.shape else self
            yield begin, piece._weight(*scalars)  # noqa: SLF001  of this class
            if self.release is keep_pages:
                continue
            for part, entry in self.form.parts.items():
                self.release(_within(entry, piece.box(part)))

    @property
    def _unit(self) -> int:
        """Return the rows that one row of scales covers, 1 where one scale covers all of them."""
        return (self.form.format.block[0] or 1) if self.form.format else 1

    def _cut(self, begin: int, end: int) -> StoredWeight:
        unit = self._unit
        total = self.shape[0] if len(self.shape) in (1, 2) else 0
        if not 0 <= begin < end <= total or begin % unit or (end % unit and end != total):
            raise ShapeMismatch(
                f"rows of {shown(self.name)} {list(self.shape)}",
                (begin, end),
                f"a range of rows of a matrix, cut at multiples of {unit}",
                "Walk row_blocks(), which cuts where scale blocks end.",
            )
        shape = (end - begin, *self.shape[1:])
        if self.form.scheme is not None:
            first = self.cut[0] if self.cut else 0
            return replace(self, shape=shape, cut=(first + begin, first + end))
        shared = {PartKind.TENSOR_SCALE, PartKind.INPUT_SCALE, PartKind.CHANNEL_SCALE}
        if self.form.format is not None and self.form.format.block[0] == WHOLE:
            shared.add(PartKind.BLOCK_SCALE)
        boxes: dict[PartKind, Box] = {}
        for part in self.form.parts:
            box = self.box(part)
            if part in shared:
                boxes[part] = box
                continue
            # One row of scales covers `unit` rows of codes.
            height = unit if part is PartKind.BLOCK_SCALE else 1
            # The box of a stack's member still has the stack's axis in front.
            axis = max(len(box.ranges) - len(self.shape), 0)  # one scale a row may have no columns
            first = box.ranges[axis][0]
            cut = (first + begin // height, first + -(-end // height))
            boxes[part] = Box((*box.ranges[:axis], cut, *box.ranges[axis + 1 :]))
        return replace(self, shape=shape, boxes=boxes)

    def box(self, part: PartKind) -> Box:
        """Return this weight's own part of a stored tensor."""
        if self.boxes is not None:
            return self.boxes[part]
        return Box.whole(self.form.parts[part].shape)

    def _part(self, part: PartKind, shape: tuple[int, ...]) -> Tensor:
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

    def _scalar(self, part: PartKind) -> Tensor | None:
        """Return a scale: one number, or one for each member of a stack."""
        if part not in self.form.parts or (self.boxes is not None and part not in self.boxes):
            return None
        count = prod(self.box(part).shape)
        return self._part(part, () if count == 1 else self.shape[:-2])

    def _factors(self) -> Tensor | None:
        """Return the factors of the columns of what a module multiplies."""
        entry = self.form.parts.get(PartKind.CHANNEL_SCALE)
        return None if entry is None else self.read(entry).float()

    def _input_scale(self) -> Tensor | None:
        scale = self._scalar(PartKind.INPUT_SCALE)
        divides = self.form.convention is NamingConvention.COMPRESSED_TENSORS
        return scale.reciprocal() if scale is not None and divides else scale


class StoredWeights(Mapping[str, Weight]):
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


def _rows_of(weight: Weight, begin: int, end: int) -> Weight:
    """Return rows of a weight whose scales each have one row, or all of them."""
    encoding = weight.storage
    assert encoding is not None
    assert weight.codes is not None
    shared = encoding.format.block[0] == WHOLE

    def cut(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or shared else tensor[begin:end]

    return replace(
        weight,
        codes=weight.codes[begin:end],
        block_scale=cut(weight.block_scale),
        zero_point=cut(weight.zero_point),
        storage=replace(encoding, shape=(end - begin, encoding.shape[1])),
        _decoded={},
    )


def _as_stored(tensor: Tensor) -> Tensor:
    """Return codes as bytes, and scales in the dtypes of QuantisedTensor; no value changes."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return tensor.float()
    return tensor if tensor.dtype is torch.float32 else tensor.view(torch.uint8)


# --------------------------------------------------------------------------------------------------
# Reading by position into reused buffers, for one pass over a whole checkpoint: a mapping costs a
# page fault for every few kilobytes, more than counting the values in them. A read into a warm
# buffer does not, leaves no page in memory, and raises an error instead of SIGBUS where a file
# shrinks. Trap: a returned tensor is overwritten when the same part of the next rows is read.
#
# Files other than those whose headers were read raise an error. One reader serves one thread.

_ALIGNMENT = 64  # bytes: a cache line
_SMALL = 1 << 12  # bytes: scalars and the like get memory of their own


class PositionedReader:
    """A reader of tensor parts into a few buffers. Use it as a context: it holds files open."""

    def __init__(self, sizes: Mapping[Path, int]) -> None:
        self._sizes = sizes
        self._files: dict[Path, int] = {}
        self._open = ExitStack()
        self._buffers: list[NDArray[np.uint8]] = []
        self._taken: dict[str, int] = {}  # which buffer a tensor of the present weight uses

    def over(self, stored: StoredWeight) -> StoredWeight:
        """Return a weight that is read by this reader; the previous one loses its buffers."""
        self._taken.clear()
        return replace(stored, read=self._read, release=keep_pages)

    def ahead(self, path: Path, begin: int, end: int) -> None:
        """Ask the system to prefetch a part of a file."""
        size = min(end, self._sizes[path]) - begin
        if size > 0 and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file(path), begin, size, os.POSIX_FADV_WILLNEED)

    def _read(self, entry: TensorEntry) -> Tensor:
        size = entry.nbytes
        target = np.empty(size, np.uint8) if size <= _SMALL else self._buffer(entry.name, size)
        done = 0
        while done < size:
            got = os.preadv(self._file(entry.file), [target.data[done:]], entry.begin + done)
            if not got:
                raise changed_file(entry.file, entry.begin + done, self._sizes[entry.file])
            done += got
        return tensor_over(entry, target.data)

    def _buffer(self, name: str, size: int) -> NDArray[np.uint8]:
        """Return a buffer for a tensor; the same one as long as the weight is the same."""
        index = self._taken.setdefault(name, len(self._taken))
        if index == len(self._buffers):
            self._buffers.append(np.empty(0, np.uint8))
        if self._buffers[index].size < size:
            fresh = np.empty(size + _ALIGNMENT, np.uint8)
            self._buffers[index] = fresh[-fresh.ctypes.data % _ALIGNMENT :]
        return self._buffers[index][:size]

    def _file(self, path: Path) -> int:
        if path not in self._files:
            descriptor, status = self._open.enter_context(regular_file(path))
            if status.st_size != self._sizes[path]:
                raise changed_file(path, status.st_size, self._sizes[path])
            self._files[path] = descriptor
        return self._files[path]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._open.close()
