"""What follows from the grouped products on sm_100a: whose rows a warp has, where its codes go.

Slots of an expert begin where a tile begins, and a tile is 128 rows: as many as a tile of scales in
128x4 order. So groups are padded to 128 rows in codes and in scales alike, each group's scales are
tiles of their own, and TMA brings those of a tile of rows as one box. Of FC1 a tile is 128 columns
of gate beside 128 of up, a tile of scales each; a thread has one row of it, hence whole blocks of
16. Warps store on their own: one whose 32 rows belong to nobody leaves them as they are.

Pure host arithmetic, and arithmetic that kernels trace; no GPU, no DSL. Kept honest by
suites/kernels/moe/test_tensor_memory.py. Nothing of it was run: no sm_100a device is here.
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
    """Buffers of pieces of 32 rows: each warp has its own."""
    return facts.PIECES_AT_ONCE * tensor_memory.LANES // WARP_ROWS


def columns_of_part(form: MoeForm) -> int:
    """Columns of gate, or of up, in a tile of FC1; of FC2 all of them."""
    return form.gemm.tactic.columns // form.gemm.parts


def blocks_of_tile(form: MoeForm) -> int:
    """Blocks of 16 that a row of a tile becomes."""
    return columns_of_part(form) // BLOCK


def words_of_row(form: MoeForm) -> int:
    """Words of two BF16 that a thread keeps of its row, so that the sums are given back early."""
    return form.gemm.tactic.columns // 2


def codes_at(row: Any, block: Any, blocks: Any) -> Any:
    """Return where codes of a pair of blocks begin, counted in 16 bytes."""
    return row * (blocks // BLOCKS_OF_STORE) + block // BLOCKS_OF_STORE


def scales_at(row: Any, block: Any, blocks: Any) -> Any:
    """Return where the word of four scales is that begins with a block, a multiple of four."""
    offset = SWIZZLE_128X4.offset_of(row, block, None, blocks)
    return offset // SWIZZLE_128X4.column_tile
