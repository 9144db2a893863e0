"""Quantise BF16 to NVFP4 with canonical numerics: packed codes, block scales, zeroed padding.

codes [M, P], E4M3 scales per block of 16 in their layout, padding included. Forms (QuantiseForm):
plain, after a clamped SwiGLU of gate and up halves, with a decode scale per expert's rows, with the
values that are quantised written as well, and decoded: what codes and block scales stand for, in
place of both. That is exact in BF16: a code has two significant bits, a scale four, and their
product lies between 2**-10 and 2688; the tensor's decode scale is no part of it. One source for
sm_90a and sm_100a, no tensor cores.
One thread per block of 16: reads 32 bytes, writes 8 bytes of codes and one scale. A thread block
walks down the rows of one column of tiles. The encoding factor of a block needs two divisions and
depends on the scale's code alone, so each thread block first fills a table of 128 factors in shared
memory and synchronises once; with expert scales, and of decoded values, it is computed per block.

The entry point allocates only its result and never synchronises, so it can be captured in a CUDA
graph. Shape letters: M rows, K columns, P = K / 2 bytes, E experts.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats.layouts import ceil_div, round_up
from degarble.kernels.primitives import quantise_problem as facts
from degarble.kernels.primitives.device_words import (
    BLOCK_WORDS,
    Scaling,
    block_amax,
    code_words,
    loaded,
    nvfp4_values,
    scale_code_of,
    scaling_of,
    store,
    swiglu_words,
)
from degarble.kernels.primitives.quantise_problem import QuantiseForm, QuantiseProblem
from degarble.kernels.runtime.kernel import (
    Kernel,
    LaunchContext,
    Operand,
    Presence,
    Storage,
    as_vector,
)
from degarble.kernels.runtime.operands import (
    DRIVERS_CHOICE,
)
from degarble.kernels.runtime.pdl import EARLY, fetch_line, follow

# ---- device --------------------------------------------------------------------------------------


class QuantiseTensors(NamedTuple):
    """Inputs and outputs of the kernel: [words of a block, blocks] or flat."""

    values: Any
    decode_scale: Any
    offsets: Any
    codes: Any
    scales: Any
    kept: Any
    decoded: Any = None


def tensors_of(pointers: tuple[Any, ...]) -> QuantiseTensors:
    """View six or seven pointers; kernels check rows and blocks, these layouts have no bounds."""
    shapes = (BLOCK_WORDS, 0, 0, BLOCK_WORDS // 4, 0, BLOCK_WORDS, BLOCK_WORDS)[: len(pointers)]
    flat = 1 << 30
    return QuantiseTensors(
        *(
            cute.make_tensor(
                pointer,
                cute.make_layout((words, flat), stride=(1, words))
                if words
                else cute.make_layout(flat),
            )
            for pointer, words in zip(pointers, shapes, strict=True)
        )
    )


def words_at(
    tensors: QuantiseTensors, place: tuple[Any, Any, Any], form: QuantiseForm
) -> list[Any]:
    """Return the words of the block to quantise: read, or gated."""
    row, block, blocks = (Int64(number) for number in place)
    if form.source == "values":
        return loaded(tensors.values, row * blocks + block)
    # A row of the input is gate, then up: 2 K values.
    gate = 2 * row * blocks + block
    halves = loaded(tensors.values, gate), loaded(tensors.values, gate + blocks)
    return swiglu_words(*halves, form.limit)


def quantise_at(
    tensors: QuantiseTensors, place: tuple[Any, Any, Any], scaling: Scaling, form: QuantiseForm
) -> Any:
    """Quantise the block at (row, block) of `blocks` a row; return its scale's code."""
    words = words_at(tensors, place, form)
    if form.decoded:
        # Few rows: the scale is read beside the values, and a table would take longer to make.
        scaling = scaling_of(tensors.decode_scale[0], None)
    scale_code = scale_code_of(block_amax(words), scaling.share)
    if form.factors_apart:
        factor = codecs.nvfp4_block_encode_scale(scale_code, scaling.encode)
    else:
        # Without the sign bit: scales are not negative, and the table has 128 entries.
        factor = scaling.factors[scale_code & 0x7F]
    row, block, blocks = (Int64(number) for number in place)
    index = row * blocks + block
    codes = code_words(words, factor, form.target)
    if form.decoded:
        halves = [nvfp4_values(word, scale_code) for word in codes]
        store(tensors.decoded, index, halves[0] + halves[1])
        return scale_code
    store(tensors.codes, index, codes)
    if form.keeps_values:
        store(tensors.kept, index, words)
    return scale_code


def clear_at(tensors: QuantiseTensors, place: tuple[Any, Any, Any], form: QuantiseForm) -> None:
    """Write zeros where a row belongs to no expert."""
    row, block, blocks = (Int64(number) for number in place)
    index = row * blocks + block
    store(tensors.codes, index, [Uint32(0)] * (BLOCK_WORDS // 4))
    if form.keeps_values:
        store(tensors.kept, index, [Uint32(0)] * BLOCK_WORDS)


@cute.kernel
def quantise_kernel(
    tensors: QuantiseTensors, rows: Int32, blocks: Int32, experts: Int32, form: cutlass.Constexpr
) -> None:
    """Quantise the rows of one column of tiles."""
    thread, _, _ = cute.arch.thread_idx()
    first, tile_column, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    if thread + first + tile_column == 0:
        fetch_line(tensors.decode_scale.iterator.toint())
    follow()
    rows, blocks, thread = Uint32(rows), Uint32(blocks), Uint32(thread)
    layout = facts.LAYOUTS[form.layout]
    padded_rows, padded = round_up(rows, layout.row_tile), round_up(blocks, layout.column_tile)
    tile_rows = ceil_div(padded_rows, facts.TILE_ROWS)

    allocator = cutlass.memory.SmemAllocator()
    sFactors = allocator.allocate_tensor(Float32, cute.make_layout(facts.SCALE_CODES), 16)
    scaling: Any = None
    if cutlass.const_expr(not form.factors_apart):
        scaling = scaling_of(tensors.decode_scale[0], sFactors)
        if thread < facts.SCALE_CODES:
            sFactors[thread] = codecs.nvfp4_block_encode_scale(thread, scaling.encode)
        cute.arch.sync_threads()

    for walked in cutlass.range(Int32(first), Int32(tile_rows), Int32(step), unroll=1):
        tile = Uint32(walked)
        row, block = facts.place_of(tile, thread % 32, thread // 32, form.layout)
        block = Uint32(tile_column) * facts.TILE_BLOCKS + block
        expert = Uint32(0)
        exists = (row < rows) & (block < blocks)
        if cutlass.const_expr(form.by_expert):
            for each in cutlass.range(Uint32(experts), unroll=4):
                # Counts the experts that end before this row: the number of the row's expert.
                expert += Uint32(Uint32(tensors.offsets[each + 1]) <= row)
            if exists & (expert >= Uint32(experts)):
                clear_at(tensors, (row, block, blocks), form)
            exists = exists & (expert < Uint32(experts))
        scale_code = Uint32(0)
        if exists:
            if cutlass.const_expr(form.by_expert):
                own = scaling_of(tensors.decode_scale[expert], sFactors)
                scale_code = quantise_at(tensors, (row, block, blocks), own, form)
            else:
                scale_code = quantise_at(tensors, (row, block, blocks), scaling, form)
        if cutlass.const_expr(not form.decoded):  # noqa: SIM102  traced
            # Padding of the scales is written as zeros.
            if (row < padded_rows) & (block < padded):
                tensors.scales[layout.offset_of(row, block, rows, blocks)] = Uint8(scale_code)


@cute.jit
def launch_quantise(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on the extents rows, blocks, experts, grid along x and y."""
    rows, blocks, experts, walkers, tile_columns = extents
    quantise_kernel(tensors_of(pointers), rows, blocks, experts, form).launch(
        grid=[walkers, tile_columns, 1],
        block=[facts.THREADS, 1, 1],
        # Bounds the registers of one form; 0, no bound, where it would cause spills.
        min_blocks_per_mp=facts.bound_blocks(form),
        preferred_smem_carveout=DRIVERS_CHOICE if facts.bound_blocks(form) else None,
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[QuantiseProblem, QuantiseForm]) -> tuple[Any, ...]:
    walkers, columns, _ = facts.grid(of.problem, of.tactic, of.processors)
    return ((of.problem.rows, of.problem.blocks, of.problem.experts, walkers, columns),)


_Operand = Operand[QuantiseProblem]
_VALUES = Storage(Uint32, torch.bfloat16, 32)
_SCALE = Storage(Float32, torch.float32, 4)
_OFFSETS = Storage(Int32, torch.int32, 4)
_CODES, _SCALES = Storage(Uint32, torch.uint8, 8), Storage(Uint8, torch.uint8, 1)
_BY_EXPERT = Presence[QuantiseProblem](
    lambda p: p.experts > 0, lambda p: f"The problem says experts={p.experts}."
)
_KEEPS_VALUES = Presence[QuantiseProblem](
    lambda p: p.keeps_values, "Allocate with KERNEL.allocate."
)
_WRITES_CODES = Presence[Any](
    lambda of: not of.decoded, "Decoded values are in place of codes and scales."
)
_DECODED = Presence[Any](
    lambda of: of.decoded, "Ask for decoded=True, and allocate with KERNEL.allocate."
)
KERNEL = Kernel[QuantiseProblem, QuantiseForm](
    entry=launch_quantise,
    operands=(
        _Operand("values", _VALUES, lambda p: (p.rows, p.input_columns)),
        _Operand("decode_scale", _SCALE, lambda p: (max(1, p.experts),), checked=as_vector),
        _Operand("offsets", _OFFSETS, lambda p: (p.experts + 1,), _BY_EXPERT),
        _Operand("codes", _CODES, lambda p: (p.rows, p.columns // 2), _WRITES_CODES, output=True),
        _Operand("scales", _SCALES, lambda p: (p.scale_bytes,), _WRITES_CODES, output=True),
        _Operand(
            "kept",
            _VALUES,
            lambda p: (p.rows, p.columns),
            _KEEPS_VALUES,
            output=True,
            label="values to write",
        ),
        _Operand(
            "decoded",
            _VALUES,
            lambda p: (p.rows, p.columns),
            _DECODED,
            output=True,
            passed=False,
        ),
    ),
    choose_form=facts.choose_form,
    choose_tactic=facts.choose_tactic,
    kinds=((Int32,) * 5,),
    numbers=_numbers,
    work=lambda problem: problem.rows,
)
compile_form = KERNEL.compile_form
