"""A host model of what a thread block of sm_100a holds: barriers, boxes of TMA, tensor memory.

Owns, in our own words, what PTX ISA 9.1 says of them: phases of barriers, boxes and swizzles, scale
copies to tensor memory, matrix instructions by their descriptors. Arithmetic is that of
references.tensor_core. Nothing that was compiled is read or run here.

Refuses what hardware leaves undefined: tensor memory that was not allocated, reserved bits, scales
that differ between groups of lanes. Kept honest by
suites/kernels/gemm/test_tcgen05.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from degarble.references import tensor_core
from degarble.suites.kernels import tcgen05_words as words

MEMORY_BYTES = 227 * 1024
BASE = 1024  # where shared memory begins; the first kilobyte belongs to the system
POISON = 0x7FC0_0BAD  # a NaN that nothing computes
LANES, COLUMNS, SUBPARTITION = 128, 512, 32
SCALE_BYTES = 16  # of a row in a copy of 32 x 128 bits
CODE_BYTES = 32  # of a row in one matrix instruction: 64 codes
SWIZZLE_ROWS = 8


class Undefined(AssertionError):
    """Something that hardware leaves undefined, or a wait that never ends."""


def require(condition: Any, text: str) -> None:
    """Refuse by name."""
    if not condition:
        raise Undefined(text)


@dataclass
class Barrier:
    """An mbarrier: arrivals and bytes that its phase still waits for."""

    count: int
    pending: int = 0
    phase: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        """Count arrivals, and bytes that are to come."""
        require(count <= self.pending, f"{count} arrivals where {self.pending} are left")
        self.pending -= count
        self.transact(-expected)

    def transact(self, arrived: int) -> None:
        """Count bytes; end the phase where nothing is left of it."""
        self.bytes -= arrived
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count

    def passed(self, parity: int) -> bool:
        """Tell whether the phase of a parity is over."""
        return self.phase != parity


@dataclass(frozen=True)
class Matrix:
    """A matrix as TMA sees it: rows of bytes, bytes of an element, the box, bytes of a swizzle."""

    rows: Any
    element: int
    box: tuple[int, int]  # rows, elements
    swizzle: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of a box."""
        return self.box[0] * self.box[1] * self.element

    def addresses(self, start: int) -> Any:
        """Return where each byte of a box lies in shared memory: (rows, bytes of a row)."""
        width = self.box[1] * self.element
        require(start % (SWIZZLE_ROWS * (self.swizzle or SCALE_BYTES)) == 0, f"box at {start}")
        at = start + np.arange(self.box[0])[:, None] * width + np.arange(width)
        if self.swizzle:
            require(width == self.swizzle, f"rows of {width} bytes in a swizzle of {self.swizzle}")
            at ^= at >> 3 & (self.swizzle - 1 & ~(words.ATOM - 1))
        return at

    def overlap(self, row: int, column: int) -> tuple[Any, Any]:
        """Return slices of the matrix, and of the box, where they meet."""
        width, first = self.box[1] * self.element, column * self.element
        rows = max(0, min(self.rows.shape[0] - row, self.box[0]))
        count = max(0, min(self.rows.shape[1] - first, width))
        return (slice(row, row + rows), slice(first, first + count)), (slice(rows), slice(count))

    def filled(self, row: int, column: int) -> Any:
        """Return a box: zeros where it leaves the matrix."""
        of_matrix, of_box = self.overlap(row, column)
        box = np.zeros((self.box[0], self.box[1] * self.element), np.uint8)
        box[of_box] = self.rows[of_matrix]
        return box


@dataclass
class Memories:
    """Shared memory and tensor memory of one thread block."""

    allocated: tuple[int, int]  # first column, columns
    shared: Any = field(default_factory=lambda: np.full(MEMORY_BYTES, 0xCD, np.uint8))
    tensor: Any = field(default_factory=lambda: np.full((LANES, COLUMNS), POISON, np.uint32))
    instructions: int = 0

    def columns(self, word: int, count: int) -> tuple[int, slice]:
        """Return the lane and the columns of an address; all have to be allocated."""
        at, (first, size) = words.place(word), self.allocated
        inside = first <= at.column and at.column + count <= first + size
        require(inside, f"columns {at.column} to {at.column + count} of {first} and {size}")
        return at.lane, slice(at.column, at.column + count)

    def copy_scales(self, word: int, descriptor: int) -> None:
        """Copy 32 rows of 128 bits to all four groups of lanes; PTX ISA 9.1, tcgen05.cp."""
        lane, columns = self.columns(word, SCALE_BYTES // 4)
        require(lane == 0, f"scales copied to lane {lane}")
        source = words.operand(descriptor)
        require(source.swizzle == 0, "scales are not swizzled")
        addresses = [
            [source.byte(row, byte) for byte in range(SCALE_BYTES)] for row in range(SUBPARTITION)
        ]
        rows = self.shared[np.array(addresses)].view(np.uint32)
        self.tensor[:, columns] = np.tile(rows, (LANES // SUBPARTITION, 1))

    def scales(self, word: int, rows: int) -> Any:
        """Return four scales a row out of tensor memory; every group of lanes has to agree."""
        lane, columns = self.columns(word, -(-rows // SUBPARTITION))
        require(lane == 0, f"scales in lane {lane}")
        groups = self.tensor[:, columns].reshape(LANES // SUBPARTITION, SUBPARTITION, -1)
        require((groups == groups[0]).all(), "groups of lanes hold different scales")
        return groups[0].T.reshape(-1).copy().view(np.uint8).reshape(-1, 4)[:rows]

    def operand(self, descriptor: int, rows: int) -> Any:
        """Return 32 bytes a row of an operand."""
        of = words.operand(descriptor)
        row = np.arange(rows)[:, None]
        at = of.start + row // words.ROWS_OF_CORE * of.stride + np.arange(CODE_BYTES)
        at = at + row % words.ROWS_OF_CORE * (of.swizzle or words.ATOM)
        if of.swizzle:
            at ^= at >> 3 & (of.swizzle - 1 & ~(words.ATOM - 1))
        return self.shared[at]

    def codes(self, descriptor: int, rows: int) -> Any:
        """Return an operand's E2M1 codes, row by row: the lower half of a byte first."""
        held = self.operand(descriptor, rows)
        return np.stack([held & 15, held >> 4], -1).reshape(rows, -1)

    def multiply(self, operands: tuple[int, ...], adds: bool) -> None:
        """Run one block-scaled instruction; `operands` are D, A, B, descriptor, both scales."""
        _, _, b, word, _, _ = operands
        what = of_codes(word)
        self.multiply_codes(operands, what, self.codes(b, what.columns), adds)

    def multiply_codes(
        self, operands: tuple[int, ...], what: words.Instruction, b_codes: Any, adds: bool
    ) -> None:
        """Multiply this thread block's rows with codes of B, wherever these came from."""
        d, a, _, _, a_scales, b_scales = operands
        columns = self.columns_of_sums(d, what)
        given = (
            self.codes(a, what.rows),
            self.scales(a_scales, what.rows),
            b_codes,
            self.scales(b_scales, what.columns),
        )
        sums = self.sums_before(columns, adds)
        a_codes, a_scaled, b_codes, b_scaled = map(_tensor, given)
        found = tensor_core.block_scaled_gemm(a_codes, a_scaled, b_codes, b_scaled, sums)
        self.tensor[:, columns] = found.numpy().view(np.uint32)
        self.instructions += 1

    def multiply_dense(self, operands: tuple[int, ...], adds: bool) -> None:
        """Run one instruction on BF16 operands; `operands` are D, A, B, descriptor."""
        d, a, b, word = operands
        what = words.dense(word)
        formats = (what.a_format, what.b_format)
        require(formats == (words.BF16_OF_F16,) * 2, f"formats {formats}")
        columns = self.columns_of_sums(d, what)
        of_a, of_b = (
            _tensor(self.operand(descriptor, rows)).view(torch.bfloat16)
            for descriptor, rows in ((a, what.rows), (b, what.columns))
        )
        sums = self.sums_before(columns, adds)
        found = tensor_core.dense_gemm(of_a, of_b, sums, rule=tensor_core.TCGEN05_F16)
        self.tensor[:, columns] = found.numpy().view(np.uint32)
        self.instructions += 1

    def columns_of_sums(self, word: int, what: words.Instruction) -> slice:
        """Return the columns of an instruction's sums."""
        require(what.rows == LANES, f"{what.rows} rows")
        lane, columns = self.columns(word, what.columns)
        require(lane == 0, f"sums in lane {lane}")
        return columns

    def sums_before(self, columns: slice, adds: bool) -> torch.Tensor:
        """Return the sums that an instruction adds to."""
        held = self.tensor[:, columns]
        return _tensor((held if adds else np.zeros_like(held)).view(np.float32))


@dataclass
class Together:
    """The memories of two thread blocks, as one instruction of cta_group::2 takes them.

    PTX ISA 9.1, tcgen05.mma and tcgen05.cp: the same places in both; each has half of the rows of
    A, half of those of B, and sums of its own rows with all of B.
    """

    memories: tuple[Memories, Memories]

    def copy_scales(self, word: int, descriptor: int) -> None:
        """Copy to both tensor memories, from the shared memory of each."""
        for memory in self.memories:
            memory.copy_scales(word, descriptor)

    def multiply(self, operands: tuple[int, ...], adds: bool) -> None:
        """Run one block-scaled instruction of both."""
        _, _, b, word, _, _ = operands
        whole = of_codes(word)
        halves = [memory.codes(b, whole.columns // 2) for memory in self.memories]
        each = replace(whole, rows=whole.rows // 2)
        for memory in self.memories:
            memory.multiply_codes(operands, each, np.concatenate(halves), adds)


def of_codes(word: int) -> words.Instruction:
    """Read the descriptor of an instruction on E2M1 codes with their scales."""
    what = words.block_scaled(word)
    formats = (what.a_format, what.b_format, what.a_scale_id, what.b_scale_id)
    require(formats == (words.E2M1_OF_MXF4,) * 2 + (0, 0), f"formats {formats}")
    return what


def _tensor(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))
