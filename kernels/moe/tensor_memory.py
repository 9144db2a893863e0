"""Derived facts of the expert products on sm_100a: a warp's rows, and places of codes and scales.

An expert's slots begin where a tile of 128 rows begins, which is also one tile of scales in 128x4
order. So groups are padded to 128 rows in codes and scales alike, and TMA brings the scales of a
tile of rows as one box. A tile of FC1 is 128 columns of gate next to 128 of up, one scale tile
each; a thread has one row of it, hence whole blocks of 16. Warps store independently; a warp whose
32 rows are unused stores nothing.

Host arithmetic that kernels trace as well; no GPU, no DSL. Nothing of it was run: there was no
sm_100a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from degarble.harness.formats.layouts import SWIZZLE_128X4
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm.tcgen05 import tensor_memory

if TYPE_CHECKING:
    from degarble.kernels.moe.problem import MoeForm

WARP_ROWS = 32  # lanes of tensor memory that one warp reaches; PTX ISA 9.1, tcgen05.ld
FIRST_BARRIER = 4  # of the warps that store; 0 to 3 belong to the thread block and to probes
BLOCK = facts.NVFP4.block
BLOCKS_OF_PIECE = facts.PIECE_COLUMNS // BLOCK  # 64 columns: a word of four scales
BLOCKS_OF_STORE = 2  # that leave together: 16 bytes of codes
WORDS_OF_BLOCK = BLOCK // 2  # of two BF16


def piece_buffers() -> int:
    """Return the buffers of 32-row pieces: each warp has its own."""
    return facts.PIECES_AT_ONCE * tensor_memory.LANES // WARP_ROWS


def columns_of_part(form: MoeForm) -> int:
    """Return the columns of gate, or of up, in a tile of FC1; of FC2 all of them."""
    return form.gemm.tactic.columns // form.gemm.parts


def blocks_of_tile(form: MoeForm) -> int:
    """Return the blocks of 16 that a row of a tile becomes."""
    return columns_of_part(form) // BLOCK


def words_of_row(form: MoeForm) -> int:
    """Return the words of two BF16 that a thread keeps of its row to release sums early."""
    return form.gemm.tactic.columns // 2


def codes_at(row: Any, block: Any, blocks: Any) -> Any:
    """Return where codes of a pair of blocks begin, counted in 16 bytes."""
    return row * (blocks // BLOCKS_OF_STORE) + block // BLOCKS_OF_STORE


def scales_at(row: Any, block: Any, blocks: Any) -> Any:
    """Return the word of four scales that begins with `block`, a multiple of four."""
    offset = SWIZZLE_128X4.offset_of(row, block, None, blocks)
    return offset // SWIZZLE_128X4.column_tile
