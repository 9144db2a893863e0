"""Expert GEMM on sm_90a for tiles of 256 x 128: four warpgroups multiply 64 rows each.

A fifth warpgroup decodes 128 rows of B for all four, where tiles of 128 x 256 decode 256 rows for
two. A warpgroup without rows skips the tile, so an expert's rows cost in steps of 64. Registers are
scarce: in addition to 64 x 128 sums a thread holds half a stage of A, and decodes the other half
after that one is multiplied; the other three warpgroups keep the tensor core busy meanwhile.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Uint32, cute
from cutlass.cute.nvgpu import warpgroup

from degarble.kernels.gemm import nvfp4_spans
from degarble.kernels.gemm import nvfp4_stages as stages
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import sm90_gemm_nvfp4 as gemm
from degarble.kernels.moe import few_rows

STEPS_OF_HALF = stages.BLOCKS // 2  # of K, 16 numbers each


@cute.jit
def multiply(rings: Any, states: Any, fragments: Any, work: Any) -> Any:
    """Sum up one tile; half a stage of A is decoded and multiplied at a time."""
    ring, decoded = rings
    state, source = states
    mma, sums, a, b = fragments
    shared, first, blocks, steps = work
    thread, _, _ = cute.arch.thread_idx()
    within = Int32(thread) % facts.WARPGROUP
    place = (first + within // facts.WARP * 16 + within % facts.WARP // 4, within % 4)

    ring.consumer_wait(state)
    codes, bits = nvfp4_spans.read_rows(shared, place, state.index, 1, range(1))[0]
    # The codes are in registers, so the stage can be refilled during the products.
    state = few_rows.give_back(ring, state)
    scales = scales_of(bits, place[1], stages.kept(blocks, Int32(0)))
    decode_half(codes, scales, a, 0)
    decoded.consumer_wait(source)
    multiply_half((mma, sums, a, b[None, None, None, source.index]), 0, begins=True)
    # The wgmma still reads the half fragment that is decoded over next.
    warpgroup.wait_group(0)
    decode_half(codes, scales, a, 1)
    multiply_half((mma, sums, a, b[None, None, None, source.index]), 1)
    for step in cutlass.range(1, steps, unroll=1):
        ring.consumer_wait(state)
        codes, bits = nvfp4_spans.read_rows(shared, place, state.index, 1, range(1))[0]
        state = few_rows.give_back(ring, state)
        scales = scales_of(bits, place[1], stages.kept(blocks, step))
        source = gemm.finish(decoded, source)
        decode_half(codes, scales, a, 0)
        decoded.consumer_wait(source)
        multiply_half((mma, sums, a, b[None, None, None, source.index]), 0)
        warpgroup.wait_group(0)
        decode_half(codes, scales, a, 1)
        multiply_half((mma, sums, a, b[None, None, None, source.index]), 1)
    source = gemm.finish(decoded, source)
    return state, source


def half_fragment(mma: Any) -> Any:
    """Return registers for half a stage of a warpgroup's rows of A."""
    return mma.make_fragment_A(mma.partition_shape_A((facts.PIECE_ROWS, stages.STAGE_K // 2)))


def scales_of(bits: Any, block: Any, mask: Any) -> list[Any]:
    """Return the scales of a thread's two rows, each as a pair of equal halves."""
    both = nvfp4_spans.scales_of_rows(bits, block, mask)
    return [stages.doubled(both, upper) for upper in (False, True)]


def decode_half(codes: Any, scales: Any, a: Any, half: int) -> None:
    """Decode one word of both rows' blocks: two steps of K."""
    fragment = cute.recast_tensor(a, Uint32)
    for i in range(2):
        pairs = stages.decoded([codes[i][half]], scales[i])
        for step in range(STEPS_OF_HALF):
            # wgmma's A registers of a step of 16: row g, row g + 8, then both again for k + 8.
            fragment[4 * step + i] = pairs[2 * step]
            fragment[4 * step + 2 + i] = pairs[2 * step + 1]


@cute.jit
def multiply_half(
    fragments: Any, half: cutlass.Constexpr, begins: cutlass.Constexpr = False
) -> None:
    """Issue the wgmma of half a stage."""
    mma, sums, a, b = fragments
    mma = cute.make_tiled_mma(cute.make_mma_atom(mma.op))
    warpgroup.fence()
    for k in cutlass.range_constexpr(STEPS_OF_HALF):
        mma.set(warpgroup.Field.ACCUMULATE, not (begins and k == 0))
        cute.gemm(mma, sums, a[None, None, k], b[None, None, half * STEPS_OF_HALF + k], sums)
    warpgroup.commit_group()
