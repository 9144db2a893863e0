"""Quantise BF16 to NVFP4: codes and block scales, canonical numerics, padding written as zeros.

Owns one kernel source for sm_90a and sm_100a without tensor cores, in the forms of QuantiseForm:
plain, behind a clamped SwiGLU of gate and up halves, with a scale for each expert's rows, and with
the values that were quantised written as well. One thread a block of 16 values: 32 bytes are read,
8 bytes of codes and a scale written. The factor by which a block is multiplied needs two divisions
and depends on the scale's code alone, so each thread block makes a table of 128 factors first.

The wrapper checks and launches, allocates no more than what it returns, and never waits for the
GPU, so it may be captured in a graph. Refuses other dtypes, shapes, strides and alignments by name.
Kept honest by suites/kernels/quantise/test_simt_quantise_nvfp4.py: compiled for every target, and
on an H200 equal to harness.formats byte for byte. Shape letters: M rows, K columns, P = K / 2
bytes, E experts
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute
from torch import Tensor

from degarble.harness.formats import scalar_codecs as codecs
from degarble.harness.formats.layouts import ceil_div, round_up
from degarble.kernels.primitives import quantise_problem as facts
from degarble.kernels.primitives.nvfp4_words import (
    WORDS,
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
from degarble.kernels.runtime.settings import CompileSettings
from degarble.kernels.runtime.targets import TARGETS, target_of_device

ALIGNMENTS = (32, 4, 4, 8, 1, 32)  # of values, decode scale, offsets, codes, scales, kept values
ELEMENTS = (Uint32, Float32, Int32, Uint32, Uint8, Uint32)


class Quantised(NamedTuple):
    """What a launch writes: packed codes [M, P], scale bytes in their layout, values if kept."""

    codes: Tensor
    scales: Tensor
    values: Tensor | None


# ---- device --------------------------------------------------------------------------------------


class Tensors(NamedTuple):
    """What the kernel reads and writes, as blocks: [words of a block, blocks] or flat."""

    values: Any
    decode_scale: Any
    offsets: Any
    codes: Any
    scales: Any
    kept: Any


def tensors_of(pointers: tuple[Any, ...]) -> Tensors:
    """View the six pointers; extents are checked by row and block, not by these layouts."""
    shapes = (WORDS, 0, 0, WORDS // 4, 0, WORDS)
    flat = 1 << 30
    return Tensors(
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


def words_at(tensors: Tensors, place: tuple[Any, Any, Any], form: QuantiseForm) -> list[Any]:
    """Return the words of the block that is to be quantised, whatever makes them."""
    row, block, blocks = (Int64(number) for number in place)
    if form.source == "values":
        return loaded(tensors.values, row * blocks + block)
    gate = 2 * row * blocks + block
    halves = loaded(tensors.values, gate), loaded(tensors.values, gate + blocks)
    return swiglu_words(*halves, form.limit)


def quantise_at(
    tensors: Tensors, place: tuple[Any, Any, Any], scaling: Scaling, form: QuantiseForm
) -> Any:
    """Quantise the block at (row, block) of rows of so many blocks; return its scale's code."""
    words = words_at(tensors, place, form)
    scale_code = scale_code_of(block_amax(words), scaling.share)
    if form.by_expert:
        factor = codecs.nvfp4_block_encode_scale(scale_code, scaling.encode)
    else:
        factor = scaling.factors[scale_code & 0x7F]
    row, block, blocks = (Int64(number) for number in place)
    index = row * blocks + block
    store(tensors.codes, index, code_words(words, factor, form.target))
    if form.keeps_values:
        store(tensors.kept, index, words)
    return scale_code


def clear_at(tensors: Tensors, place: tuple[Any, Any, Any], form: QuantiseForm) -> None:
    """Write zeros where a row belongs to no expert."""
    row, block, blocks = (Int64(number) for number in place)
    index = row * blocks + block
    store(tensors.codes, index, [Uint32(0)] * (WORDS // 4))
    if form.keeps_values:
        store(tensors.kept, index, [Uint32(0)] * WORDS)


@cute.kernel
def quantise_kernel(
    tensors: Tensors, rows: Int32, blocks: Int32, experts: Int32, form: cutlass.Constexpr
) -> None:
    """Walk down the rows of one column of tiles."""
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
                expert += Uint32(Uint32(tensors.offsets[each + 1]) <= row)
            if exists & (expert >= Uint32(experts)):
                clear_at(tensors, (row, block, blocks), form)
            exists = exists & (expert < Uint32(experts))
        scale_code = Uint32(0)
        if exists:
            if cutlass.const_expr(form.by_expert):
                scaling = scaling_of(tensors.decode_scale[expert], sFactors)
            scale_code = quantise_at(tensors, (row, block, blocks), scaling, form)
        if (row < padded_rows) & (block < padded):
            tensors.scales[layout.offset_of(row, block, rows, blocks)] = Uint8(scale_code)


@cute.jit
def launch_quantise(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a form on extents that are known now: rows, blocks, experts, grid along x and y."""
    rows, blocks, experts, walkers, tile_columns = extents
    quantise_kernel(tensors_of(pointers), rows, blocks, experts, form).launch(
        grid=[walkers, tile_columns, 1],
        block=[facts.THREADS, 1, 1],
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
    out: Quantised | None = None,
) -> Quantised:
    """Quantise BF16 values, or gate and up halves, as the problem says, on their GPU.

    `decode_scale` is float32 on the GPU, one number or one an expert; expert e has the rows from
    offsets_E[e] up to offsets_E[e + 1], rows after the last one become zeros.
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
    tactic: facts.Tactic,
) -> None:
    """Launch on checked tensors: values, decode scale, offsets, codes, scales, kept values."""
    device = tensors[0].device.index or 0 if tensors[0] is not None else 0
    walkers, columns, _ = facts.grid(problem, tactic, processors_of(device))
    extents = (problem.rows, problem.blocks, problem.experts, walkers, columns)
    kernel(_pointers(tensors), tuple(Int32(extent) for extent in extents), current_stream(device))


def empty_outputs(problem: QuantiseProblem, device: torch.device) -> Quantised:
    """Allocate what a launch writes; every byte of it is written."""
    shape = (problem.rows, problem.columns)
    return Quantised(
        torch.empty(shape[0], shape[1] // 2, dtype=torch.uint8, device=device),
        torch.empty(problem.scale_bytes, dtype=torch.uint8, device=device),
        torch.empty(shape, dtype=torch.bfloat16, device=device) if problem.keeps_values else None,
    )


def require_operands(
    problem: QuantiseProblem, values_MK: Tensor, decode_scale: Tensor, offsets_E: Tensor | None
) -> None:
    """Refuse inputs that the kernel would misread."""
    shape = (problem.rows, problem.input_columns)
    require_tensor("values", values_MK, torch.bfloat16, shape, ALIGNMENTS[0])
    scales = decode_scale.reshape(-1) if decode_scale.ndim == 0 else decode_scale
    require_tensor("decode_scale", scales, torch.float32, (max(1, problem.experts),), ALIGNMENTS[1])
    kind = (torch.int32, (problem.experts + 1,), ALIGNMENTS[2])
    remedy = f"The problem says experts={problem.experts}."
    require_optional("offsets", offsets_E, kind, present=problem.experts > 0, remedy=remedy)


def require_outputs(problem: QuantiseProblem, out: Quantised) -> None:
    """Refuse outputs that do not hold what is written."""
    shape = (problem.rows, problem.columns)
    require_tensor("codes", out.codes, torch.uint8, (shape[0], shape[1] // 2), ALIGNMENTS[3])
    require_tensor("scales", out.scales, torch.uint8, (problem.scale_bytes,), ALIGNMENTS[4])
    kind, remedy = (torch.bfloat16, shape, ALIGNMENTS[5]), "Allocate with empty_outputs."
    present = problem.keeps_values
    require_optional("values to write", out.values, kind, present=present, remedy=remedy)


def _pointers(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return what the entry takes; None becomes a pointer that is not read."""
    places = zip(ELEMENTS, tensors, ALIGNMENTS, strict=True)
    return tuple(pointer(element, tensor, alignment) for element, tensor, alignment in places)
