"""Tensor memory, roles and shared memory of the indexer's scores on sm_100a. No GPU and no DSL.

128 keys are the rows of tensor memory, the heads of one or four tokens its columns. Two sums
alternate, each with a warpgroup that weighs it. Weights lie in shared memory, because a thread
weighs all heads of its key. Nothing of it was run: no sm_100a device was available.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.kernels.indexer import problem as facts

if TYPE_CHECKING:
    from degarble.kernels.indexer.problem import ScoresForm

LOADING_WARP, MULTIPLYING_WARP = 0, 1  # of the first warpgroup; its others have nothing to do
SUMS = facts.CONSUMERS  # in tensor memory at once: one for each warpgroup that weighs
ALLOCATING_WARP = facts.WARPGROUP // 32  # the first that weighs
INSTRUCTION_BYTES = 32  # of a row in one tcgen05.mma; PTX ISA 9.1, tcgen05.mma shapes
LEAST_ALLOCATED = 32  # columns, a power of two; PTX ISA 9.1, tcgen05.alloc
READ_AT_ONCE = 32  # columns that a thread has in registers of one read
WORD_BYTES, BARRIER_BYTES, ADDRESS_BYTES = 4, 8, 16


def threads_that_weigh() -> int:
    """Return the number of threads of both epilogue warpgroups."""
    return facts.CONSUMERS * facts.WARPGROUP


def columns_held(form: ScoresForm) -> int:
    """Return the number of columns of tensor memory that the sums take."""
    return SUMS * form.columns


def columns_allocated(form: ScoresForm) -> int:
    """Return the number of columns that are allocated: a power of two."""
    return max(LEAST_ALLOCATED, 1 << (columns_held(form) - 1).bit_length())


def columns_read(form: ScoresForm) -> int:
    """Return the number of columns of one read."""
    return min(READ_AT_ONCE, form.columns)


def reads(form: ScoresForm) -> int:
    """Return the number of reads of a stage's sums."""
    return form.columns // columns_read(form)


def instructions(form: ScoresForm) -> int:
    """Return the number of matrix instructions of a stage: each takes all keys and all columns."""
    return facts.WIDTH * facts.OPERANDS[form.operands].bytes // INSTRUCTION_BYTES


def words_of_weights(form: ScoresForm) -> int:
    """Return the words of shared memory that weights take: a head in float32, two heads in BF16."""
    return form.columns // 2 if form.arithmetic == "stored" else form.columns


def barriers(form: ScoresForm) -> int:
    """Return the number of barriers: full and empty, of key stages, queries and sums."""
    return 2 * (facts.stages(form) + 1 + SUMS)


def shared_bytes(form: ScoresForm) -> int:
    """Return the shared memory of a thread block, in the order in which it is divided."""
    held = facts.query_bytes(form) + facts.stages(form) * facts.stage_bytes(form)
    words = words_of_weights(form) + 2 * form.at_once
    return held + ADDRESS_BYTES + words * WORD_BYTES + barriers(form) * BARRIER_BYTES
