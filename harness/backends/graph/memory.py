"""KV caches of a decoder for a fixed number of lanes: pages, rings and slot tables.

A lane is a row of every step: one sequence, or none. The window is a ring of slots. A lane's
entries are in pages of its own, whose order in memory is the reverse of their numbers. Nothing has
to be cleared for a new sequence: what a token does not see is never read.

Shape letters: B lanes, C columns of a table, R rows of a ring, F columns of a compressor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.cache.problem import overlaps, rows_of_ring
from degarble.kernels.indexer.problem import WIDTH as KEY_WIDTH
from degarble.kernels.primitives.kv_problem import WIDTH, WITH_KEY, Pages

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.model.types import Block

PAGE = 64  # entries


@dataclass(frozen=True)
class Room:
    """The number of lanes, positions of each, and the cache's entry format."""

    lanes: int
    positions: int
    window: int
    entry: str = "bf16"  # of the paged caches

    def __post_init__(self) -> None:
        for name in ("lanes", "positions", "window"):
            if getattr(self, name) < 1:
                raise InvalidArgument(
                    f"{name} of a decoder", getattr(self, name), "1 at least", "Ask for more."
                )

    def pages_of_lane(self, ratio: int) -> int:
        """Return the number of pages of a lane's window (ratio 0) or entries."""
        rows = self.window if ratio == 0 else ceil_div(self.positions, ratio)
        found: int = ceil_div(rows, PAGE)
        return found

    def columns(self, ratio: int) -> int:
        """Return the number of slots of a lane."""
        return self.pages_of_lane(ratio) * PAGE

    def pages(self, ratio: int, width: int = WIDTH, entry: str | None = None) -> Pages:
        """Describe the cache of all lanes; by default latent rows in the room's own format."""
        return Pages(entry or self.entry, PAGE, self.lanes * self.pages_of_lane(ratio), width=width)


@dataclass(frozen=True)
class Tables:
    """Pages of every lane int32 [B, pages], and their slots int32 [B, C]."""

    pages: Tensor
    slots: Tensor


def tables_of(room: Room, ratio: int, device: Any) -> Tables:
    """Assign pages to lanes, the last ones in memory first."""
    count = room.lanes * room.pages_of_lane(ratio)
    pages = torch.arange(count - 1, -1, -1, dtype=torch.int32).reshape(room.lanes, -1)
    within = torch.arange(PAGE, dtype=torch.int32)
    slots = (pages[:, :, None] * PAGE + within).reshape(room.lanes, -1)
    return Tables(pages.contiguous().to(device), slots.contiguous().to(device))


@dataclass(frozen=True)
class LayerMemory:
    """One V4 layer's memory: window pages; entries, index keys and rings if it compresses."""

    window: Tensor
    entries: Tensor | None = None
    ring: Tensor | None = None  # float32 [B, R, 2 F]
    keys: Tensor | None = None
    key_ring: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors that exist."""
        every = (self.window, self.entries, self.ring, self.keys, self.key_ring)
        return tuple(each for each in every if each is not None)


@dataclass(frozen=True)
class LatentMemory:
    """One V3.2 layer's memory: pages of latent and key rows, and of the indexer's keys."""

    rows: Tensor
    keys: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return both tensors."""
        return self.rows, self.keys


def latent_memory_of(room: Room, device: Any) -> LatentMemory:
    """Allocate one layer's memory, an entry a token, zeroed."""
    rows, keys = room.pages(1, WITH_KEY), room.pages(1, KEY_WIDTH, "bf16")
    return LatentMemory(empty_pages(rows, device), empty_pages(keys, device))


def empty_pages(of: Pages, device: Any) -> Tensor:
    """Allocate zeroed pages."""
    return torch.zeros(of.count, of.stride, dtype=torch.uint8, device=device)


def memory_of(room: Room, block: Block, *, indexes: bool, device: Any) -> LayerMemory:
    """Allocate one layer's memory, zeroed."""

    def pages(ratio: int, width: int = WIDTH, entry: str | None = None) -> Tensor:
        return empty_pages(room.pages(ratio, width, entry), device)

    def ring(width: int) -> Tensor:
        # Latents and gates, each twice if windows overlap.
        columns = 2 * width * (2 if overlaps(block.ratio) else 1)
        shape = (room.lanes, rows_of_ring(block.ratio), columns)
        return torch.zeros(shape, dtype=torch.float32, device=device)

    if not block.ratio:
        return LayerMemory(pages(0))
    made = pages(0), pages(block.ratio), ring(WIDTH)
    if not indexes:
        return LayerMemory(*made)
    return LayerMemory(*made, pages(block.ratio, KEY_WIDTH, "bf16"), ring(KEY_WIDTH))
