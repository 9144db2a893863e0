"""Run one role of a pair of thread blocks at a time, to bring pairs up on a new GPU.

The parts are those of sm100_probe_gemm, for a pair:

* `load`: the first block waits for its barrier, which counts for both, and writes out both shared
  memories as they lie;
* `multiply`: the first block fills both from an image; each writes the sums of its rows;
* `store`: each block fills its sums, and stores them once both have.

Roles and partners are those of one thread block, unchanged.
Compiled, never run. sm100_first_minute.py holds the expected results.
Shape letters: M rows of the tile, N its columns, S stages, W words of a stage in both
"""

from functools import cache
from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, cute

from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import mainloop, tcgen05, tensor_memory
from degarble.kernels.gemm import sm100_gemm_nvfp4 as gemm
from degarble.kernels.gemm.problem import GemmForm
from degarble.kernels.runtime.compiling import CompiledKernel, CompileSettings
from degarble.suites.support.probes import sm100_probe_gemm as probe


@cute.kernel
def probe_kernel(
    atoms: Any,
    memory: tuple[Any, Any],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    part: cutlass.Constexpr,
) -> None:
    """Run one role of both, and let the storing warps stand in for its partners."""
    feeds, store = atoms
    image, sums = memory
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    held = gemm.prepared(form)
    walk = mainloop.walk_of((extents[0], extents[1]), form.tactic)
    steps = ceil_div(extents[2], form.tactic.inner)
    if warp == tensor_memory.LOADING_WARP:
        if cutlass.const_expr(part == "load"):
            feedings = gemm.feedings_of(feeds, held.shared, form)
            tcgen05.load(held.ring, feedings, walk, steps, form)
        if cutlass.const_expr(part == "store"):
            meet()
    elif warp == tensor_memory.MULTIPLYING_WARP:
        if cutlass.const_expr(part == "multiply"):  # noqa: SIM102  known while compiling
            if gemm.leads(form):
                rings, inner = (held.ring, held.sums_ring), (steps, extents[2] // tcgen05.BLOCK)
                gemm.multiply(rings, gemm.operands_of(held, form), walk, inner, form)
        if cutlass.const_expr(part == "store"):
            hand_over(held.sums_ring, form)
    else:
        if cutlass.const_expr(part == "load"):  # noqa: SIM102  known while compiling
            if gemm.leads(form):
                probe.write_out(with_other(held), image, steps, form)
        if cutlass.const_expr(part == "multiply"):
            if gemm.leads(form):
                probe.fill(with_other(held), image, steps, form, "cluster")
            probe.write_sums(held, own_rows(sums, form), form)
        if cutlass.const_expr(part == "store"):
            probe.fill_sums(held, own_rows(sums, form), form)
            meet()
            outlets = (store, held.pieces, held.sums, held.sums_ring)
            gemm.store_tiles_of(form)(outlets, walk, (Float32(1.0),), form)
    gemm.end_together(held.base, form)


def meet() -> None:
    """Let all threads of both meet."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def with_other(held: gemm.Nvfp4BlockState) -> gemm.Nvfp4BlockState:
    """Return a thread block's stages, followed by the other block's."""
    whole = (*held.shared.whole, *map(gemm.of_other, held.shared.whole))
    return held._replace(shared=held.shared._replace(whole=whole))


def own_rows(sums: Any, form: GemmForm) -> Any:
    """Return the sums of this thread block's rows in memory."""
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    return cute.make_tensor(
        sums.iterator + rank * (tensor_memory.LANES * form.tactic.columns), sums.layout
    )


@cute.jit
def hand_over(sums_ring: Any, form: cutlass.Constexpr) -> None:
    """Commit sums that both wrote, once both have; the first one does, for both."""
    target = mainloop.producer_state(tensor_memory.accumulators(form))
    probe.meet_multiplier()
    meet()
    tcgen05.fence("after")
    if gemm.leads(form):
        sums_ring.producer_acquire(target)
        sums_ring.producer_commit(target)
        target.advance()
        sums_ring.producer_tail(target)


@cute.jit
def launch_probe(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    part: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a part on one tile of both: extents are M, N, K."""
    atoms, memory = probe.given_of(pointers, extents, form)
    together = form.tactic.together
    probe_kernel(atoms, memory, extents, form, part).launch(
        grid=[together, 1, 1],
        block=[tensor_memory.threads(), 1, 1],
        cluster=[together, 1, 1],
        min_blocks_per_mp=1,
        stream=stream,
    )


@cache
def compile_part(part: str, form: GemmForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a part; needs no GPU. `sm100_probe_gemm.launch` launches it."""
    return probe.compiled(launch_probe, part, form, settings)
