"""Quantise BF16 to NVFP4: codes and block scales, canonical numerics, padding written as zeros.

Owns one kernel source for sm_90a and sm_100a without tensor cores, in the forms of QuantiseForm:
plain, behind a clamped SwiGLU of gate and up halves, with a scale for each expert's rows, and with
the values that were quantised written as well. One thread a block of 16 values: 32 bytes are read,
8 bytes of codes and a scale written. The factor by which a block is multiplied needs two divisions
and depends on the scale's code alone, so each thread block makes a table of 128 factors first.

The wrapper checks and launches, allocates no more than what it returns, and never waits for the
GPU, so it may be captured in a graph. Refuses other dtypes, shapes, strides and alignments by name.
Kept honest by suites/kernels/test_simt_quantise_nvfp4.py: compiled for every target, and on an H200
equal to harness.formats byte for byte. Shape letters: M rows, K columns, P = K / 2 bytes, E experts
"""

from functools import cache
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32, cute
from cutlass.cute.runtime import make_ptr
from torch import Tensor

from degarble.harness.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
)
from degarble.harness.formats import scalar_codecs as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div, round_up
from degarble.kernels.common import quantise_problem as facts
from degarble.kernels.common.compiling import (
    CompiledKernel,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.common.e2m1_words import NUMBERS, Primitives, e2m1_word
from degarble.kernels.common.quantise_problem import QuantiseForm, QuantiseProblem
from degarble.kernels.common.settings import CompileSettings
from degarble.kernels.common.targets import TARGETS, target_of_device

WORDS = facts.BLOCK // 2  # words of two BF16 in a block
LOG2_E = 1.4426950408889634
HIGH_HALF = 0xFFFF_0000
HEADROOM = 2.0**-64
ALIGNMENTS = (32, 4, 4, 8, 1, 32)  # of values, decode scale, offsets, codes, scales, kept values
ELEMENTS = (Uint32, Float32, Int32, Uint32, Uint8, Uint32)


class Quantised(NamedTuple):
    """What a launch writes: packed codes [M, P], scale bytes in their layout, values if kept."""

    codes: Tensor
    scales: Tensor
    values: Tensor | None


def _emit(instruction: str, result: Any, *arguments: Any) -> Any:
    """Emit one instruction; {$w0} is the result, {$r0} and on are the arguments."""
    return cute.arch.inline_ptx(
        instruction, write_only_types=[result], read_only_args=list(arguments)
    )


INSTRUCTIONS = Primitives(
    limited=lambda x: _emit("min.xorsign.abs.f32 {$w0}, {$r0}, {$r1};", Float32, x, Float32(6.0)),
    at_least_one=lambda x: _emit(
        "max.xorsign.abs.f32 {$w0}, {$r0}, {$r1};", Float32, x, Float32(1.0)
    ),
    constant=Uint32,
    low_halves=lambda a, b: _emit("prmt.b32 {$w0}, {$r0}, {$r1}, 0x5410;", Uint32, a, b),
    high_halves=lambda a, b: _emit("prmt.b32 {$w0}, {$r0}, {$r1}, 0x7632;", Uint32, a, b),
)


def native_word(numbers: list[Any]) -> Any:
    """Return the codes of eight numbers by the conversion that sm_100a has; PTX ISA 9.1, cvt."""
    pairs = "\n".join(
        f"cvt.rn.satfinite.e2m1x2.f32 b{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}};" for i in range(4)
    )
    text = f"{{\n.reg .b8 b0, b1, b2, b3;\n{pairs}\nmov.b32 {{$w0}}, {{b0, b1, b2, b3}};\n}}"
    return _emit(text, Uint32, *numbers)


def block_amax(words: list[Any]) -> Any:
    """Return the largest magnitude of eight words of two BF16; a NaN is left out."""
    largest = words[0]
    for word in words[1:]:
        largest = _emit("max.xorsign.abs.bf16x2 {$w0}, {$r0}, {$r1};", Uint32, largest, word)
    low = ops.absolute(codecs.bf16_decode(largest & 0xFFFF))
    high = ops.absolute(ops.number_of(largest & Uint32(HIGH_HALF)))
    return ops.maximum(ops.maximum(low, high), 0.0)  # all NaN: 0


def numbers_of(words: list[Any]) -> list[Any]:
    """Return the float32 numbers of words of two BF16, first the low half."""
    found = []
    for word in words:
        found += [ops.number_of(ops.shift_left(word, 16)), ops.number_of(word & Uint32(HIGH_HALF))]
    return found


def scale_code_of(amax: Any, share: Any) -> Any:
    """Return the E4M3 code of a block's scale by the processor's own conversion."""
    raw = ops.multiply_rn(amax, share)
    pair = _emit("cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};", Uint16, raw, Float32(0.0))
    return Uint32(pair)


def swiglu_words(gate: list[Any], up: list[Any], limit: float | None) -> list[Any]:
    """Return silu(gate) * up rounded to BF16, both clamped first, the gate from above only."""
    if limit is not None:
        gate = [_clamped("min", word, limit) for word in gate]
        up = [_clamped("max", _clamped("min", word, limit), -limit) for word in up]
    made = []
    for g, u in zip(numbers_of(gate), numbers_of(up), strict=True):
        # A power that is flushed is lost in the sum; the sum is scaled, so that no inverse is.
        power = _emit("ex2.approx.ftz.f32 {$w0}, {$r0};", Float32, ops.multiply_rn(g, -LOG2_E))
        total = ops.fma_rn(power, HEADROOM, HEADROOM)
        inverse = _emit("rcp.approx.ftz.f32 {$w0}, {$r0};", Float32, total)
        silu = ops.multiply_rn(g, ops.multiply_rn(inverse, HEADROOM))
        made.append(ops.multiply_rn(silu, u))
    return [
        _emit("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", Uint32, *pair)
        for pair in zip(made[0::2], made[1::2], strict=True)
    ]


def _clamped(bound: str, word: Any, limit: float) -> Any:
    """Bound both BF16 numbers of a word; as with torch, a NaN stays NaN."""
    pair = int(codecs.bf16_encode(limit)) * 0x1_0001
    text = f"{{ .reg .b32 at; mov.b32 at, {pair}; {bound}.NaN.bf16x2 {{$w0}}, {{$r0}}, at; }}"
    return _emit(text, Uint32, word)


def code_words(words: list[Any], factor: Any, target: str) -> list[Any]:
    """Return the two words of codes of a block."""
    scaled = [ops.multiply_rn(number, factor) for number in numbers_of(words)]
    halves = (scaled[:NUMBERS], scaled[NUMBERS:])
    if TARGETS[target].converts_e2m1:
        return [native_word(half) for half in halves]
    return [e2m1_word(half, INSTRUCTIONS) for half in halves]


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


def loaded(tensor: Any, index: Any) -> list[Any]:
    """Read the words of one block."""
    registers = cute.make_rmem_tensor(WORDS, Uint32)
    cute.autovec_copy(tensor[None, index], registers)
    # Trap: an element of a Uint32 tensor arrives as a signed Int32.
    return [Uint32(registers[i]) for i in range(WORDS)]


def store(tensor: Any, index: Any, words: list[Any]) -> None:
    """Write words of one block."""
    registers = cute.make_rmem_tensor(len(words), Uint32)
    for place, word in enumerate(words):
        registers[place] = word
    cute.autovec_copy(registers, tensor[None, index])


def words_at(tensors: Tensors, place: tuple[Any, Any, Any], form: QuantiseForm) -> list[Any]:
    """Return the words of the block that is to be quantised, whatever makes them."""
    row, block, blocks = (Int64(number) for number in place)
    if form.source == "values":
        return loaded(tensors.values, row * blocks + block)
    gate = 2 * row * blocks + block
    halves = loaded(tensors.values, gate), loaded(tensors.values, gate + blocks)
    return swiglu_words(*halves, form.limit)


class Scaling(NamedTuple):
    """How blocks are scaled: the encode scale, a sixth of it, and a table of factors or None."""

    encode: Any
    share: Any
    factors: Any


def scaling_of(decode_scale: Any, factors: Any) -> Scaling:
    """Return what follows from a decode scale."""
    encode = ops.divide_rn(1.0, decode_scale)
    return Scaling(encode, ops.multiply_rn(encode, codecs.ONE_SIXTH), factors)


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
        grid=[walkers, tile_columns, 1], block=[facts.THREADS, 1, 1], stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


@cache
def compile_form(form: QuantiseForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a form; needs no GPU."""
    pointers = tuple(_pointer(place, None) for place in range(len(ELEMENTS)))
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
    device = _require_device(tensors)
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
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    walkers, columns, _ = facts.grid(problem, tactic, processors)
    extents = (problem.rows, problem.blocks, problem.experts, walkers, columns)
    pointers = tuple(_pointer(place, tensor) for place, tensor in enumerate(tensors))
    kernel(pointers, tuple(Int32(extent) for extent in extents), current_stream(device))


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
    _require("values", values_MK, torch.bfloat16, shape, ALIGNMENTS[0])
    scales = decode_scale.reshape(-1) if decode_scale.ndim == 0 else decode_scale
    _require("decode_scale", scales, torch.float32, (max(1, problem.experts),), ALIGNMENTS[1])
    if (offsets_E is None) != (problem.experts == 0):
        raise InvalidArgument(
            "offsets",
            None if offsets_E is None else tuple(offsets_E.shape),
            "row offsets exactly where the problem has experts",
            f"The problem says experts={problem.experts}.",
        )
    if offsets_E is not None:
        _require("offsets", offsets_E, torch.int32, (problem.experts + 1,), ALIGNMENTS[2])


def require_outputs(problem: QuantiseProblem, out: Quantised) -> None:
    """Refuse outputs that do not hold what is written."""
    shape = (problem.rows, problem.columns)
    _require("codes", out.codes, torch.uint8, (shape[0], shape[1] // 2), ALIGNMENTS[3])
    _require("scales", out.scales, torch.uint8, (problem.scale_bytes,), ALIGNMENTS[4])
    if (out.values is not None) != problem.keeps_values:
        raise InvalidArgument(
            "values to write",
            None if out.values is None else tuple(out.values.shape),
            f"what the problem says, keeps_values={problem.keeps_values}",
            "Allocate with empty_outputs(problem, device).",
        )
    if out.values is not None:
        _require("values to write", out.values, torch.bfloat16, shape, ALIGNMENTS[5])


def _require(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], alignment: int
) -> None:
    if tensor.dtype is not dtype:
        raise DtypeMismatch(name, tensor.dtype, str(dtype), "Convert it; the kernel reads bits.")
    if tuple(tensor.shape) != shape:
        raise ShapeMismatch(
            name, tuple(tensor.shape), f"{shape}, as the problem says", "Build the problem from it."
        )
    if not tensor.is_contiguous():
        raise LayoutMismatch(
            f"strides of {name}", tensor.stride(), "a contiguous tensor", "Copy it: contiguous()."
        )
    if tensor.data_ptr() % alignment:
        raise LayoutMismatch(
            f"address of {name}",
            tensor.data_ptr() % alignment,
            f"a multiple of {alignment} bytes",
            "Copy it into memory of its own.",
        )


def _require_device(tensors: tuple[Tensor | None, ...]) -> int:
    devices = {tensor.device for tensor in tensors if tensor is not None}
    device = next(iter(devices))
    if len(devices) > 1 or device.type != "cuda":
        names = sorted(str(device) for device in devices)
        raise InvalidArgument("devices of the tensors", names, "one CUDA device", "Move them.")
    return device.index or 0


def _pointer(place: int, tensor: Tensor | None) -> Any:
    """Return a device pointer; without a tensor one to compile with, which nothing reads."""
    alignment = ALIGNMENTS[place]
    address = alignment if tensor is None else tensor.data_ptr()
    return make_ptr(ELEMENTS[place], address, cute.AddressSpace.gmem, assumed_align=alignment)
