"""Quantise BF16 to NVFP4 with canonical numerics: packed codes, block scales, zeroed padding.

codes [M, P], E4M3 scales per block of 16 in their layout, padding included. Forms (QuantiseForm):
plain, after a clamped SwiGLU of gate and up halves, with a decode scale per expert's rows, and with
the quantised values written as well. One source for sm_90a and sm_100a, no tensor cores.
One thread per block of 16: reads 32 bytes, writes 8 bytes of codes and one scale. A thread block
walks down the rows of one column of tiles. The encoding factor of a block needs two divisions and
depends on the scale's code alone, so each thread block first fills a table of 128 factors in shared
memory (not with expert scales, where it is computed per block) and synchronises once.

The entry point allocates only its result and never synchronises, so it can be captured in a CUDA
graph. Shape letters: M rows, K columns, P = K / 2 bytes, E experts.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute
from torch import Tensor

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats.layouts import ceil_div, round_up
from degarble.kernels.primitives import quantise_problem as facts
from degarble.kernels.primitives.device_words import (
    BLOCK_WORDS,
    Scaling,
    block_amax,
    code_words,
    loaded,
    scale_code_of,
    scaling_of,
    store,
    swiglu_words,
)
from degarble.kernels.primitives.quantise_problem import QuantiseForm, QuantiseProblem
from degarble.kernels.runtime.compiling import (
    CompiledKernel,
    CompileSettings,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.runtime.operands import (
    DRIVERS_CHOICE,
    pointer,
    processors_of,
    require_device,
    require_optional,
    require_tensor,
)
from degarble.kernels.runtime.targets import TARGETS, target_of_device

ALIGNMENTS = (32, 4, 4, 8, 1, 32)  # of values, decode scale, offsets, codes, scales, kept values
ELEMENTS = (Uint32, Float32, Int32, Uint32, Uint8, Uint32)


class QuantisedRows(NamedTuple):
    """Outputs of a launch: packed codes [M, P], scale bytes in their layout, kept values."""

    codes: Tensor
    scales: Tensor
    values: Tensor | None


# ---- device --------------------------------------------------------------------------------------


class QuantiseTensors(NamedTuple):
    """Inputs and outputs of the kernel: [words of a block, blocks] or flat."""

    values: Any
    decode_scale: Any
    offsets: Any
    codes: Any
    scales: Any
    kept: Any


def tensors_of(pointers: tuple[Any, ...]) -> QuantiseTensors:
    """View the six pointers; kernels check rows and blocks, these layouts have no bounds."""
    shapes = (BLOCK_WORDS, 0, 0, BLOCK_WORDS // 4, 0, BLOCK_WORDS)
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
    scale_code = scale_code_of(block_amax(words), scaling.share)
    if form.by_expert:
        factor = codecs.nvfp4_block_encode_scale(scale_code, scaling.encode)
    else:
        # Without the sign bit: scales are not negative, and the table has 128 entries.
        factor = scaling.factors[scale_code & 0x7F]
    row, block, blocks = (Int64(number) for number in place)
    index = row * blocks + block
    store(tensors.codes, index, code_words(words, factor, form.target))
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
    rows, blocks, thread = Uint32(rows), Uint32(blocks), Uint32(thread)
    layout = facts.LAYOUTS[form.layout]
    padded_rows, padded = round_up(rows, layout.row_tile), round_up(blocks, layout.column_tile)
    tile_rows = ceil_div(padded_rows, facts.TILE_ROWS)

    allocator = cutlass.memory.SmemAllocator()
    sFactors = allocator.allocate_tensor(Float32, cute.make_layout(facts.SCALE_CODES), 16)
    scaling = scaling_of(tensors.decode_scale[0], sFactors)
    if cutlass.const_expr(not form.by_expert):
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
                scaling = scaling_of(tensors.decode_scale[expert], sFactors)
            scale_code = quantise_at(tensors, (row, block, blocks), scaling, form)
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
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


@cache
def compile_form(form: QuantiseForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a form; needs no GPU."""
    pointers = _pointers((None,) * len(ELEMENTS))
    extents = tuple(Int32(1) for _ in range(5))
    arguments = (pointers, extents, form, any_stream())
    return compile_kernel(launch_quantise, arguments, TARGETS[form.target], settings)


def quantise_nvfp4(
    values_MK: Tensor,
    decode_scale: Tensor,
    problem: QuantiseProblem,
    settings: CompileSettings,
    *,
    offsets_E: Tensor | None = None,
    out: QuantisedRows | None = None,
) -> QuantisedRows:
    """Quantise BF16 values, or gate and up halves, as the problem says, on their GPU.

    `decode_scale` is float32 on the GPU, one number or one per expert. Expert e has the rows from
    offsets_E[e] up to offsets_E[e + 1]; rows after the last become zeros.
    """
    out = out or empty_outputs(problem, values_MK.device)
    require_operands(problem, values_MK, decode_scale, offsets_E)
    require_outputs(problem, out)
    tensors = (values_MK, decode_scale, offsets_E, *out)
    device = require_device(tensors)
    if problem.rows:
        form = facts.choose_form(problem, target_of_device(device).name)
        launch(compile_form(form, settings), problem, tensors, facts.choose_tactic(problem))
    return out


def launch(
    kernel: CompiledKernel,
    problem: QuantiseProblem,
    tensors: tuple[Tensor | None, ...],
    tactic: facts.QuantiseTactic,
) -> None:
    """Launch on checked tensors: values, decode scale, offsets, codes, scales, kept values."""
    device = tensors[0].device.index or 0 if tensors[0] is not None else 0
    walkers, columns, _ = facts.grid(problem, tactic, processors_of(device))
    extents = (problem.rows, problem.blocks, problem.experts, walkers, columns)
    kernel(_pointers(tensors), tuple(Int32(extent) for extent in extents), current_stream(device))


def empty_outputs(problem: QuantiseProblem, device: torch.device) -> QuantisedRows:
    """Allocate the outputs uninitialised; the kernel writes every byte."""
    shape = (problem.rows, problem.columns)
    return QuantisedRows(
        torch.empty(shape[0], shape[1] // 2, dtype=torch.uint8, device=device),
        torch.empty(problem.scale_bytes, dtype=torch.uint8, device=device),
        torch.empty(shape, dtype=torch.bfloat16, device=device) if problem.keeps_values else None,
    )


def require_operands(
    problem: QuantiseProblem, values_MK: Tensor, decode_scale: Tensor, offsets_E: Tensor | None
) -> None:
    """Raise unless values, decode scales and offsets fit the problem."""
    shape = (problem.rows, problem.input_columns)
    require_tensor("values", values_MK, torch.bfloat16, shape, ALIGNMENTS[0])
    scales = decode_scale.reshape(-1) if decode_scale.ndim == 0 else decode_scale
    require_tensor("decode_scale", scales, torch.float32, (max(1, problem.experts),), ALIGNMENTS[1])
    kind = (torch.int32, (problem.experts + 1,), ALIGNMENTS[2])
    remedy = f"The problem says experts={problem.experts}."
    require_optional("offsets", offsets_E, kind, present=problem.experts > 0, remedy=remedy)


def require_outputs(problem: QuantiseProblem, out: QuantisedRows) -> None:
    """Raise unless codes, scales and kept values fit the problem."""
    shape = (problem.rows, problem.columns)
    require_tensor("codes", out.codes, torch.uint8, (shape[0], shape[1] // 2), ALIGNMENTS[3])
    require_tensor("scales", out.scales, torch.uint8, (problem.scale_bytes,), ALIGNMENTS[4])
    kind, remedy = (torch.bfloat16, shape, ALIGNMENTS[5]), "Allocate with empty_outputs."
    present = problem.keeps_values
    require_optional("values to write", out.values, kind, present=present, remedy=remedy)


def _pointers(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return the pointers of a launch; None becomes a pointer that is not read."""
    places = zip(ELEMENTS, tensors, ALIGNMENTS, strict=True)
    return tuple(pointer(element, tensor, alignment) for element, tensor, alignment in places)
