"""Tensor memory, roles, registers and barriers of sparse attention on sm_100a. No GPU and no DSL.

A thread block has 64 heads, and an instruction of 64 rows takes half of the lanes: 16 of each 32
(PTX ISA 9.1, data path layout F). So the output's two halves of 256 columns lie in the same
columns, one in the lower lanes, one in the upper; after them lie the logits of two tiles. A warp
reads 16 lanes at once, eight columns a repeat; a thread then has what wgmma would have given it.

Nothing of it was run: no sm_100a device was available.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from degarble.kernels.attention import problem as facts
from degarble.kernels.primitives import attention_rows as rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.kernels.primitives.kv_problem import EntryFormat

INSTRUCTION_K = 16  # of one tcgen05.mma in BF16; PTX ISA 9.1, tcgen05.mma shapes
LANES_OF_WARP = 32  # that a warp reaches: those of its number in its warpgroup
UPPER_LANES = 16  # where the second 64 rows begin; PTX ISA 9.1, lane alignment 0 or 16
LANE = 1 << 16  # of an address in tensor memory; columns lie below
LEAST_ALLOCATED = 32  # columns, a power of two; PTX ISA 9.1, tcgen05.alloc
LOGITS = 2  # tiles whose logits are in tensor memory at once
REPEAT_COLUMNS, REPEAT_REGISTERS = 8, 4  # of a read of 16 lanes by 256 bits
REPEATS_AT_ONCE = 8  # of the output: 32 registers

# Warpgroups: two weigh, one brings keys, the first warp of the last one multiplies.
GROUPS = facts.CONSUMERS + 2
THREADS = GROUPS * facts.WARPGROUP
GATHERING_GROUP, MULTIPLYING_GROUP = facts.CONSUMERS, facts.CONSUMERS + 1
MULTIPLYING_WARP = MULTIPLYING_GROUP * (facts.WARPGROUP // rows.LANES)
LAUNCH_REGISTERS = facts.REGISTER_FILE // THREADS

BARRIERS = LOGITS + 2  # after those of tiles: logits ready, shares ready, sums done
BARRIER_BYTES, ADDRESS_BYTES = 8, 16


class Registers(NamedTuple):
    """Registers of a thread of each role, after setmaxnreg."""

    weighing: int
    gathering: int
    multiplying: int

    @property
    def total(self) -> int:
        """Return the registers of a thread block."""
        each = facts.CONSUMERS * self.weighing + self.gathering + self.multiplying
        return facts.WARPGROUP * each


# By width of a key: the fewest with which no form spills, as ptxas of CUDA 13.0 divides them.
REGISTERS: Mapping[int, Registers] = MappingProxyType(
    {rows.WIDTH: Registers(184, 88, 56), rows.WITH_KEY: Registers(176, 104, 56)}
)


def first_columns() -> tuple[int, int]:
    """Return the columns where the output and the logits begin."""
    return 0, facts.COLUMNS


def columns_held() -> int:
    """Return the number of columns that output and logits take."""
    return facts.COLUMNS + LOGITS * facts.TILE


def columns_allocated() -> int:
    """Return the number of columns to allocate: a power of two."""
    return max(LEAST_ALLOCATED, 1 << (columns_held() - 1).bit_length())


def repeats(columns: int) -> int:
    """Return the number of repeats of a read of so many columns."""
    return columns // REPEAT_COLUMNS


def instructions(width: int) -> tuple[int, int]:
    """Return the MMA instructions of a tile: for the logits, and for both halves' sums."""
    steps_of_keys = facts.TILE // INSTRUCTION_K
    return width // INSTRUCTION_K, rows.WIDTH // facts.COLUMNS * steps_of_keys


def bringing(entry: EntryFormat) -> facts.Bringing:
    """Return how tiles are brought: by one warpgroup, and without an exchange of logits."""
    return facts.Bringing(entry, 1, facts.FAMILIES[entry.width].ahead)


def places(entry: EntryFormat) -> dict[str, int]:
    """Return the offset of everything in shared memory, in the order of allocation."""
    held = facts.shared_memory(entry)
    sizes = {
        "queries": held.queries,
        "keys": held.keys,
        "shares": held.shares,
        "counts": facts.COUNTS_BYTES,
        "barriers of tiles": facts.BARRIER_BYTES,
        "masks": facts.MASK_BYTES,
        "barriers of logits": LOGITS * BARRIER_BYTES,
        "barrier of shares": BARRIER_BYTES,
        "barrier of sums": BARRIER_BYTES,
        "address": ADDRESS_BYTES,
        "codes": bringing(entry).ahead_bytes,
    }
    made, at = {}, 0
    for name, size in (*sizes.items(), ("end", 0)):
        made[name] = at
        at += size
    return made


def shared_bytes(entry: EntryFormat) -> int:
    """Return the shared memory of a thread block."""
    return places(entry)["end"]
