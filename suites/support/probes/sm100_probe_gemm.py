"""Run one role of the sm_100a NVFP4 GEMM at a time, to bring it up on a new GPU.

Three kernels call the roles of sm100_gemm_nvfp4 unchanged:

* `load`: writes out what the loading warp left in shared memory;
* `multiply`: reads stages from an image in memory, writes sums as float32;
* `store`: reads sums from memory, writes D by TMA.

The storing warps replace a missing partner as far as the rings need. One tile, K within the ring.
Compiled, never run. sm100_first_minute.py holds the expected results.
Shape letters: M rows of the tile, N its columns, S stages, W words of a stage
"""

from functools import cache
from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import tcgen05 as instructions
from torch import Tensor

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import mainloop, tcgen05, tensor_memory
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import sm100_gemm_nvfp4 as gemm
from degarble.kernels.gemm.problem import GemmForm, GemmProblem
from degarble.kernels.runtime import operands
from degarble.kernels.runtime.compiling import (
    CompiledKernel,
    CompileSettings,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.runtime.targets import TARGETS

PARTS = ("load", "multiply", "store")
QUAD = 4  # words that are copied at once
HANDED_OVER = 3  # number of the named barrier between the storing warps and the multiplying one
ELEMENTS = (Uint32, Int64, Uint32, Int64, BFloat16, Uint32, Float32)
ALIGNMENT = 16  # of A, its scales, B, its scales, D, image, sums


@cute.kernel
def probe_kernel(
    atoms: Any,
    memory: tuple[Any, Any],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    part: cutlass.Constexpr,
) -> None:
    """Run one role, and let the storing warps stand in for its partners."""
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
    elif warp == tensor_memory.MULTIPLYING_WARP:
        if cutlass.const_expr(part == "multiply"):
            blocks = extents[2] // tcgen05.BLOCK
            rings = (held.ring, held.sums_ring)
            gemm.multiply(rings, gemm.operands_of(held, form), walk, (steps, blocks), form)
        if cutlass.const_expr(part == "store"):
            hand_over(held.sums_ring, form)
    else:
        if cutlass.const_expr(part == "load"):
            write_out(held, image, steps, form)
        if cutlass.const_expr(part == "multiply"):
            fill(held, image, steps, form)
            write_sums(held, sums, form)
        if cutlass.const_expr(part == "store"):
            fill_sums(held, sums, form)
            outlets = (store, held.pieces, held.sums, held.sums_ring)
            tcgen05.store_tiles(outlets, walk, (Float32(1.0),), form)
        tcgen05.give_back(held.base, form)


def together() -> None:
    """Let the storing warps meet."""
    cute.arch.barrier(
        barrier_id=tcgen05.BARRIER_OF_STORES,
        number_of_threads=tensor_memory.threads_that_store(),
    )


@cute.jit
def write_out(held: Any, image: Any, steps: Any, form: cutlass.Constexpr) -> None:
    """Write stage after stage to memory as it lies, and give it back."""
    ring, whole = held.ring, held.shared.whole
    state = mainloop.consumer_state(tensor_memory.footprint(form).stages)
    for step in cutlass.range(steps, unroll=1):
        ring.consumer_wait(state)
        move(whole, image, (state.index, step), out=True)
        together()
        if cute.arch.warp_idx() == 0:
            ring.consumer_release(state)
        state.advance()


@cute.jit
def fill(
    held: Any, image: Any, steps: Any, form: cutlass.Constexpr, space: cutlass.Constexpr = "cta"
) -> None:
    """Fill stage after stage from memory; each counts as loaded once all of it is there."""
    ring, whole = held.ring, held.shared.whole
    state = mainloop.producer_state(tensor_memory.footprint(form).stages)
    for step in cutlass.range(steps, unroll=1):
        move(whole, image, (state.index, step), out=False)
        cute.arch.fence_proxy("async.shared", space=space)
        together()
        if cute.arch.warp_idx() == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(ring.producer_get_barrier(state))
        state.advance()


def move(whole: Any, image: Any, at: tuple[Any, Any], *, out: bool) -> None:
    """Copy a stage's words, operand by operand, to or from a row of the image."""
    stage, step = at
    thread, _, _ = cute.arch.thread_idx()
    way = move_words if len(whole) == len(gemm.NAMES) else move_quads
    first = 0
    for words in whole:
        count = cute.size(words, mode=[0])
        way(words, image, (stage, step, first, count), thread, out=out)
        first += count


@cute.jit
def move_words(words: Any, image: Any, at: Any, thread: Any, *, out: cutlass.Constexpr) -> None:
    """Copy one operand of a stage, thread by thread."""
    stage, step, first, count = at
    each = tensor_memory.threads_that_store()
    for i in cutlass.range(ceil_div(count, each), unroll=1):
        word = i * each + thread
        if word < count:
            if cutlass.const_expr(out):
                image[step, first + word] = words[word, stage]
            else:
                words[word, stage] = image[step, first + word]


@cute.jit
def move_quads(words: Any, image: Any, at: Any, thread: Any, *, out: cutlass.Constexpr) -> None:
    """Copy four words a thread: the DSL has no narrower way to the other one's shared memory."""
    stage, step, first, count = at
    each = tensor_memory.threads_that_store()
    for i in cutlass.range(ceil_div(count, each * QUAD), unroll=1):
        place = i * each + thread
        if place * QUAD < count:
            held = cute.local_tile(words[None, stage], (QUAD,), (place,))
            told = cute.local_tile(image[step, None], (QUAD,), (first // QUAD + place,))
            registers = cute.make_rmem_tensor(QUAD, Uint32)
            cute.autovec_copy(held if out else told, registers)
            cute.autovec_copy(registers, told if out else held)


@cute.jit
def write_sums(held: Any, sums: Any, form: cutlass.Constexpr) -> None:
    """Write the sums of a tile to memory, a row a thread."""
    thread, _, _ = cute.arch.thread_idx()
    reading = tcgen05.reading_of(held.sums, thread)
    state = mainloop.consumer_state(tensor_memory.accumulators(form))
    held.sums_ring.consumer_wait(state)
    tcgen05.fence("after")
    for i in cutlass.range_constexpr(form.tactic.columns // facts.PIECE_COLUMNS):
        registers = cute.make_rmem_tensor(reading.shape, Float32)
        cute.copy(reading.copy, reading.source[None, None, None, 0, i, 0], registers)
        cute.arch.fence_view_async_tmem_load()
        to = cute.make_tensor(
            sums.iterator + (thread * form.tactic.columns + i * facts.PIECE_COLUMNS),
            cute.make_layout(facts.PIECE_COLUMNS),
        )
        cute.autovec_copy(cute.make_tensor(registers.iterator, to.layout), to)
    tcgen05.fence("before")
    held.sums_ring.consumer_release(state)


@cute.jit
def fill_sums(held: Any, sums: Any, form: cutlass.Constexpr) -> None:
    """Fill the first sums in tensor memory, and tell the warp that hands them over."""
    thread, _, _ = cute.arch.thread_idx()
    atom = cute.make_copy_atom(
        instructions.St32x32bOp(instructions.Repetition(facts.PIECE_COLUMNS)), Float32
    )
    pieces = cute.flat_divide(
        held.sums[(None, None), 0, 0, None], (tensor_memory.LANES, facts.PIECE_COLUMNS)
    )
    copy = instructions.make_tmem_copy(atom, pieces[None, None, 0, 0, 0])
    own = copy.get_slice(thread)
    target = own.partition_D(pieces)
    piece = cute.make_identity_tensor((tensor_memory.LANES, facts.PIECE_COLUMNS))
    for i in cutlass.range_constexpr(form.tactic.columns // facts.PIECE_COLUMNS):
        registers = cute.make_rmem_tensor(own.partition_S(piece).shape, Float32)
        source = cute.make_tensor(
            sums.iterator + (thread * form.tactic.columns + i * facts.PIECE_COLUMNS),
            cute.make_layout(facts.PIECE_COLUMNS),
        )
        cute.autovec_copy(source, cute.make_tensor(registers.iterator, source.layout))
        cute.copy(copy, registers, target[None, None, None, 0, i, 0])
    cute.arch.fence_view_async_tmem_store()
    tcgen05.fence("before")
    meet_multiplier()


def meet_multiplier() -> None:
    """Let the storing warps and the multiplying one meet."""
    count = tensor_memory.threads_that_store() + facts.WARP
    cute.arch.barrier(barrier_id=HANDED_OVER, number_of_threads=count)


@cute.jit
def hand_over(sums_ring: Any, form: cutlass.Constexpr) -> None:
    """Commit sums that others wrote, as the multiplying warp commits its own."""
    target = mainloop.producer_state(tensor_memory.accumulators(form))
    meet_multiplier()
    tcgen05.fence("after")
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
    """Launch a part on one tile: extents are M, N, K."""
    atoms, memory = given_of(pointers, extents, form)
    probe_kernel(atoms, memory, extents, form, part).launch(
        grid=[1, 1, 1], block=[tensor_memory.threads(), 1, 1], min_blocks_per_mp=1, stream=stream
    )


def given_of(pointers: Any, extents: Any, form: GemmForm) -> tuple[Any, tuple[Any, Any]]:
    """Return the atoms of the GEMM, and image and sums in memory."""
    *of_gemm, image, sums = pointers
    atoms = gemm.atoms_of(tuple(of_gemm), extents, form)
    words = facts.expected_bytes(form) // 4
    mImage = cute.make_tensor(
        image, cute.make_layout((facts.MOST_STAGES, words), stride=(words, 1))
    )
    mSums = cute.make_tensor(sums, cute.make_layout(tensor_memory.LANES * form.tactic.columns))
    return atoms, (mImage, mSums)


# ---- host ----------------------------------------------------------------------------------------


@cache
def compile_part(part: str, form: GemmForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a part; needs no GPU."""
    return compiled(launch_probe, part, form, settings)


def compiled(jitted: Any, part: str, form: GemmForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a part's launch, of one thread block or of two."""
    if part not in PARTS:
        raise UnknownName.among("part of a GEMM", part, PARTS)
    pointers = tuple(operands.pointer(element, None, ALIGNMENT) for element in ELEMENTS)
    extents = tuple(Int32(1) for _ in range(3))
    arguments = (pointers, extents, form, part, any_stream())
    return compile_kernel(jitted, arguments, TARGETS[form.target], settings)


def launch(
    kernel: CompiledKernel, form: GemmForm, problem: GemmProblem, tensors: tuple[Tensor, ...]
) -> None:
    """Launch a part on tensors: A, its scales, B, its scales, D, image [S, W], sums [M, N]."""
    tile = tcgen05.tile_of(form)[:2]
    steps = ceil_div(problem.inner, form.tactic.inner)
    if problem.rows > tile[0] or problem.columns > tile[1]:
        raise ShapeMismatch(
            "extents M, N", (problem.rows, problem.columns), f"within one tile, {tile}", "Cut them."
        )
    if steps > tensor_memory.footprint(form).stages:
        raise InvalidArgument("K", problem.inner, "no more than the ring holds", "Cut it.")
    extents = (problem.rows, problem.columns, problem.inner)
    pointers = tuple(
        operands.pointer(element, tensor, ALIGNMENT)
        for element, tensor in zip(ELEMENTS, tensors, strict=True)
    )
    kernel(pointers, tuple(map(Int32, extents)), current_stream(tensors[0].device.index or 0))
