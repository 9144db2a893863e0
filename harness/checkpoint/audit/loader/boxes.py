"""Compute which elements of a tensor a set of boxes leaves out or covers twice.

A box is a range of indices in each dimension. One dimension is cut wherever a box begins or ends,
and each slab is covered recursively by the rest of its boxes. Results are cached by shape and
boxes: a stack of 384 experts costs as much as two, and 61 layers as much as one. No loop visits
elements.

`byte_runs` maps a box to byte ranges of its file, and raises if sub-byte elements do not begin and
end at a whole byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.checkpoint.read.types import DTYPE_BITS, shown
from degarble.harness.model.types import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.checkpoint.read.types import TensorEntry

Ranges = tuple[tuple[int, int], ...]


class Cover(NamedTuple):
    """Disjoint boxes of a tensor: those that no box covers, and those that at least two cover."""

    missing: tuple[Box, ...]
    twice: tuple[Box, ...]


@lru_cache(maxsize=4096)
def cover(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> Cover:
    """Return which elements of `shape` the boxes, all inside it, leave out or cover twice."""
    for box in boxes:
        inside = len(box.ranges) == len(shape) and all(
            0 <= first <= last <= extent
            for (first, last), extent in zip(box.ranges, shape, strict=True)
        )
        assert inside, f"{box} leaves {shape}"
    held = tuple(box.ranges for box in boxes if box.count)
    if 0 in shape:
        return Cover((), ())
    missing, twice = _sweep(shape, held)
    return Cover(tuple(map(Box, missing)), tuple(map(Box, twice)))


@lru_cache(maxsize=65536)
def _sweep(
    shape: tuple[int, ...], held: tuple[Ranges, ...]
) -> tuple[tuple[Ranges, ...], tuple[Ranges, ...]]:
    """Return the ranges that none of `held` covers, and those that two do."""
    # No dimension is left: one element, in as many boxes as there are.
    if not shape:
        return ((),) if not held else (), ((),) if len(held) > 1 else ()
    if not held:
        return (tuple((0, extent) for extent in shape),), ()
    missing: list[Ranges] = []
    twice: list[Ranges] = []
    for slab, inner in _slabs(shape[0], held):
        none, two = _sweep(shape[1:], inner)
        missing.extend((slab, *ranges) for ranges in none)
        twice.extend((slab, *ranges) for ranges in two)
    return tuple(missing), tuple(twice)


def _slabs(
    extent: int, held: tuple[Ranges, ...]
) -> Iterator[tuple[tuple[int, int], tuple[Ranges, ...]]]:
    """Cut the first dimension where boxes begin or end; merge neighbours with equal rests."""
    events: dict[int, list[tuple[int, Ranges]]] = {0: [], extent: []}
    # Each box has two events: the first makes it active, the second removes it.
    for number, ((first, last), *rest) in enumerate(held):
        inner = tuple(rest)
        events.setdefault(first, []).append((number, inner))
        events.setdefault(last, []).append((number, inner))
    active: dict[int, Ranges] = {}
    begin, before = 0, None
    cuts = sorted(events)
    for here in cuts[:-1]:
        for number, inner in events[here]:
            if number in active:
                del active[number]
            else:
                active[number] = inner
        inside = tuple(sorted(active.values()))
        # Emit a slab only where the active boxes change, so equal neighbours merge.
        if inside != before:
            if before is not None:
                yield (begin, here), before
            begin, before = here, inside
    assert before is not None, "an extent has at least one slab"
    yield (begin, extent), before


def joined(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> tuple[Box, ...]:
    """Return the union of boxes as few disjoint boxes: the complement of the complement."""
    return cover(shape, cover(shape, boxes).missing).missing


@dataclass(frozen=True)
class ByteRuns:
    """Byte runs of equal length in a file: `first`, repeated by (count, step), outermost first.

    Iterate for (begin, end) of each run.
    """

    first: int
    length: int
    repeats: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """Number of runs."""
        return prod(count for count, _ in self.repeats)

    @property
    def nbytes(self) -> int:
        """Total bytes of all runs."""
        return self.count * self.length

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for steps in product(*(range(0, count * step, step) for count, step in self.repeats)):
            begin = self.first + sum(steps)
            yield begin, begin + self.length


def byte_runs(entry: TensorEntry, box: Box) -> ByteRuns:
    """Return the bytes of the file that hold a box of a stored tensor."""
    assert len(box.ranges) == len(entry.shape), f"{box} in {entry.shape}"
    if not box.count:
        return ByteRuns(entry.begin, 0, ((0, 1),))
    bits, whole = DTYPE_BITS[entry.dtype], len(entry.shape)
    # Trailing dimensions that the box takes as a whole, and the one before them, lie in one piece.
    while whole and box.ranges[whole - 1] == (0, entry.shape[whole - 1]):
        whole -= 1
    whole = max(whole - 1, 0)
    steps = [bits * prod(entry.shape[axis + 1 :]) for axis in range(len(entry.shape))]
    first = sum(start * step for (start, _), step in zip(box.ranges, steps, strict=True))
    length = bits * prod(box.shape[whole:])
    repeats = tuple(
        (extent, step) for extent, step in zip(box.shape[:whole], steps[:whole], strict=True)
    )
    if first % 8 or length % 8 or any(step % 8 for _, step in repeats):
        raise ShapeMismatch(
            f"box of {shown(entry.name)}",
            list(box.ranges),
            f"whole bytes of {entry.dtype}",
            "Cut between bytes.",
        )
    runs = tuple((count, step // 8) for count, step in repeats if count != 1)
    return ByteRuns(entry.begin + first // 8, length // 8, runs)
