"""Provide the weights of a model: held in memory, or streamed through a window."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch

from degarble.harness.formats.codec import decode_array
from degarble.harness.formats.fast.buffers import bits_view, output_tensor, run_parts, values_of
from degarble.harness.formats.number_formats import E2M1, E4M3, MXFP4, UE8M0, NibbleOrder
from degarble.harness.formats.weight import DerivedWeight, Weight
from degarble.harness.model.parameters import parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.checkpoint.view.stored import StoredWeight
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.model.config.config import Config


# --------------------------------------------------------------------------------------------------
# In memory: read once, and decoded once for each dtype. Decoded values are kept under torch's
# inference mode too, where Weight keeps none. A weight is decoded when a component first uses it.


@dataclass(eq=False)
class HeldWeight(Weight):
    """A weight whose fields do not change: its values are decoded once in each dtype."""

    # Trap: of a record made by `replace` they would be the values of other fields.
    _kept: dict[torch.dtype, Tensor] = field(default_factory=dict, repr=False, init=False)

    @classmethod
    def of_weight(cls, weight: Weight) -> HeldWeight:
        """Take over the fields of a weight."""
        named = {each.name: getattr(weight, each.name) for each in fields(weight) if each.init}
        named.pop("_decoded")
        return cls(**named)

    def values(self, dtype: torch.dtype) -> Tensor:
        """The numbers, in `dtype`."""
        found = self._kept.get(dtype)
        if found is None:
            with torch.inference_mode(mode=False):
                found = self._kept[dtype] = super()._decode(dtype)
        return found

    def rows(self, part: slice, dtype: torch.dtype) -> Tensor:
        """The numbers of a part of the first axis."""
        return self.values(dtype)[part]


class HeldWeights(Mapping[str, Weight]):
    """All weights of a source, each read at its first use."""

    def __init__(self, source: Mapping[str, Weight]) -> None:
        self._source = source
        self._held: dict[str, Weight] = {}

    def __getitem__(self, name: str) -> Weight:
        weight = self._held.get(name)
        if weight is None:
            read = self._source[name]
            # A derived weight keeps its values itself.
            derived = isinstance(read, DerivedWeight)
            weight = self._held[name] = read if derived else HeldWeight.of_weight(read)
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)


# --------------------------------------------------------------------------------------------------
# Streamed: map, read ahead, decode, release. A window moves over the files. Pages are released
# after WINDOW bytes, and the next AHEAD bytes are requested from the disk meanwhile. `expect`
# predicts what is needed next: a component's own weights, of its experts only those that some token
# visits, then those of the following components. Values are decoded by table where the format has
# one, and equal Weight.values bit for bit.

WINDOW = 256 << 20  # bytes handed out between two releases
AHEAD = 128 << 20  # bytes requested before they are used
_LOCATED = 4096  # weights whose place and form are remembered: more than a layer has
_GRAIN = 4096  # blocks of 32 that one thread decodes at least
_PANELS = 4  # rows of 128x128 blocks that one thread decodes at least
_NO_OVERFLOW = 252  # UE8M0 codes below it times 6 stay within float32


class StreamedWeights(Mapping[str, Weight]):
    """Weights of a checkpoint, each read anew at every use."""

    def __init__(self, checkpoint: Checkpoint, config: Config) -> None:
        assert checkpoint.names is not None, "called only for a known model"
        self._checkpoint = checkpoint
        self._stored = lru_cache(maxsize=_LOCATED)(checkpoint.stored)
        self._config = config
        self._names = checkpoint.names.present
        self._expected: deque[str] = deque()
        self._requested: dict[str, int] = {}  # bytes asked of the disk and not used yet
        self._files: dict[Path, int] = {}
        self._handed_out = 0
        self._since: set[str] = set()  # what was handed out: read again, it lies in memory
        self.read = 0  # bytes of all weights that were read
        self.on_read: Callable[[int, str], None] | None = (
            None  # called with each weight's size and name
        )

    def __getitem__(self, name: str) -> Weight:
        if self._handed_out >= WINDOW:
            self._checkpoint.release()
            self._handed_out = 0
            self._since.clear()
        stored = self._stored(name)
        size = _size(stored)
        if name not in self._since:
            self._since.add(name)
            self._handed_out += size
        self.read += size
        if self.on_read is not None:
            self.on_read(size, name)
        self._requested.pop(name, None)
        self._request()
        return StreamedWeight.of_weight(stored.weight())

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def total(self) -> int:
        """Bytes of all weights of the model."""
        return sum(
            _size(self._checkpoint.stored(parameter.name)) for parameter in parameters(self._config)
        )

    def expect(self, names: Iterable[str]) -> None:
        """Announce which weights will be read next, in this order."""
        coming = list(names)
        # What the disk is already reading is not requested again.
        kept = self._requested.keys() & set(coming)
        self._requested = {name: self._requested[name] for name in kept}
        self._expected = deque(name for name in coming if name not in kept)
        self._request()

    def close(self) -> None:
        """Close files and release memory."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        self._expected.clear()

    def _request(self) -> None:
        """Ask the disk for what comes next, up to AHEAD bytes."""
        while self._expected and sum(self._requested.values()) < AHEAD:
            name = self._expected.popleft()
            stored = self._stored(name)
            self._requested[name] = _size(stored)
            for part, entry in stored.form.parts.items():
                if stored.boxes is None or part in stored.boxes:
                    self._advise(entry.file, entry.begin, entry.end - entry.begin)

    def _advise(self, path: Path, begin: int, size: int) -> None:
        if not hasattr(os, "posix_fadvise"):
            return
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.posix_fadvise(self._files[path], begin, size, os.POSIX_FADV_WILLNEED)


class StreamedWeight(Weight):
    """A weight that is decoded quickly and keeps nothing."""

    @classmethod
    def of_weight(cls, weight: Weight) -> StreamedWeight:
        """Take over the fields of a weight."""
        named = {each.name: getattr(weight, each.name) for each in fields(weight)}
        named.pop("_decoded")
        return cls(**named)

    def values(self, dtype: torch.dtype) -> Tensor:
        """The numbers, in `dtype`."""
        encoding = self.storage
        if (
            encoding is None
            or len(encoding.shape) != 2
            or dtype not in (torch.float32, torch.float64)
        ):
            return self._decode(dtype)
        if encoding.format == MXFP4 and encoding.nibble_order is NibbleOrder.LOW_EVEN:
            assert self.codes is not None, "a weight with a storage has codes"
            assert self.block_scale is not None, "codes have scales"
            if dtype is torch.float32 or int(self.block_scale.max()) < _NO_OVERFLOW:
                return _mxfp4_values(self.codes, self.block_scale).to(dtype)
        if (
            dtype is torch.float32
            and encoding.format.element == E4M3
            and encoding.format.block[0] > 1
        ):
            return _panel_values(self)
        return self._decode(dtype)


def _size(stored: StoredWeight) -> int:
    """Bytes of a weight; of a fused one, those of its own rows."""
    parts = stored.form.parts.items()
    if stored.boxes is None:
        return sum(entry.end - entry.begin for _, entry in parts)
    size = 0
    for part, entry in parts:
        if part in stored.boxes:
            own, whole = prod(stored.boxes[part].shape), prod(entry.shape)
            size += (entry.end - entry.begin) * own // max(1, whole)
    return size


def _panel_values(weight: StreamedWeight) -> Tensor:
    """Values [M, K] of an FP8 weight whose blocks span rows, on all threads."""
    from degarble.harness.inference import streamed_loops  # noqa: PLC0415  imports numba

    encoding, codes, scales = weight.storage, weight.codes, weight.block_scale
    assert encoding is not None, "called only for quantised weights"
    assert codes is not None, "a weight with a storage has codes"
    assert scales is not None, "codes have scales"
    if scales.dtype is not torch.float32:
        scales = decode_array(scales, UE8M0)
    rows, block, table = encoding.format.block[0], encoding.format.block, values_of(E4M3)
    wanted = tuple(-(-extent // each) for extent, each in zip(codes.shape, block, strict=True))
    if tuple(scales.shape) != wanted:
        return Weight.values(
            weight, torch.float32
        )  # refuses it; the loop would read beyond the end
    made = output_tensor(None, tuple(codes.shape), torch.float32)
    source, scale_PQ = codes.contiguous().view(torch.uint8).numpy(), scales.contiguous().numpy()
    out = made.numpy()

    def part(start: int, stop: int) -> None:
        first, last = start * rows, stop * rows
        streamed_loops.decode_panels(
            source[first:last], scale_PQ[start:stop], table, block, out[first:last]
        )

    run_parts(part, len(scale_PQ), _PANELS, None)
    return made


def _mxfp4_values(codes: Tensor, block_scale: Tensor) -> Tensor:
    """Values [M, K] of an MXFP4 weight by table, on all threads."""
    from degarble.harness.formats.fast import loops as fast_loops  # noqa: PLC0415  imports numba

    packed = bits_view("codes", codes.contiguous(), (torch.uint8,))
    scales = bits_view("block_scale", block_scale.contiguous(), (torch.uint8,))
    made = output_tensor(None, (codes.shape[0], 2 * codes.shape[1]), torch.float32)
    out, table = bits_view("values", made, (torch.float32,)), _mxfp4_table()
    stream = fast_loops.streams(out)

    def part(start: int, stop: int) -> None:
        doubled = np.repeat(scales[start:stop], 2)  # the loop's blocks have 16 codes
        fast_loops.decode_blocks(
            packed[start * 16 : stop * 16], doubled, table, out[start * 32 : stop * 32], stream
        )

    run_parts(part, scales.size, _GRAIN, None)
    return made


def _mxfp4_table() -> NDArray[np.uint32]:
    with np.errstate(all="ignore"):
        table = values_of(UE8M0)[:, None] * values_of(E2M1)
    bits: NDArray[np.uint32] = table.view(np.uint32).reshape(-1)
    return bits
