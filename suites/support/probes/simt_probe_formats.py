"""A kernel that runs the formats' formulas on the device and writes what they return.

Three entries without tensor cores, so that one source runs on every target:

* `launch_probe`: a group of suites/support/probes/probes.py, one thread a sample;
* `launch_native`: the processor's own conversions of the same samples, as an independent oracle;
* `launch_quantise`: the canonical NVFP4 quantiser, one thread a block, scales in 128x4 order.

They are not tuned. Traced code lives in plain functions, because a decorated one cannot fail: a
check inside it has no numbers.

Shape letters: M rows, K columns, P = K / 2 bytes, N probes, S samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float16, Float32, Uint8, Uint16, Uint32, cute
from cutlass.cute.runtime import make_ptr
from torch import Tensor

from degarble.harness.base.errors import DtypeMismatch, ShapeMismatch
from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.codec import low_nibble, pack_pair
from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div, offset_128x4
from degarble.kernels.runtime.compiling import (
    CompiledKernel,
    CompileSettings,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.runtime.targets import TARGETS, Target
from degarble.suites.support.probes.probes import (
    GROUPS,
    SAMPLES,
    Sample,
    canonical_bits,
    number,
    sample_bytes,
    swapped,
)

THREADS = 256
BLOCK = 16  # values that share a scale


@dataclass(frozen=True)
class MatrixShape:
    """Extents that the quantiser is compiled for: M and K, K a multiple of 16."""

    rows: int
    columns: int

    def __post_init__(self) -> None:
        if self.columns % BLOCK or min(self.rows, self.columns) < 1:
            raise ShapeMismatch(
                "matrix to quantise",
                (self.rows, self.columns),
                f"at least one row, and columns in a multiple of {BLOCK}",
                "Pad the columns with zeros.",
            )

    @property
    def scale_columns(self) -> int:
        """Blocks of a row."""
        return self.columns // BLOCK

    @property
    def blocks(self) -> int:
        """Blocks of the matrix: one thread each."""
        return self.rows * self.scale_columns

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales in 128x4 order, padding included."""
        size: int = SWIZZLE_128X4.storage_size(self.rows, self.scale_columns)
        return size


@dataclass(frozen=True)
class NativeProbe:
    """A conversion instruction on the device, and the formula that has to return the same."""

    name: str
    on_device: Callable[[Sample], Any]
    formula: Callable[[Sample], Any]


def convert(instruction: str, result: Any, *arguments: Any) -> Any:
    """Emit one conversion; {$w0} is the result, {$r0} and on are the arguments."""
    return cute.arch.inline_ptx(
        instruction, write_only_types=[result], read_only_args=list(arguments)
    )


# PTX ISA 9.1, cvt: of two sources the first goes to the high half.
def _native_e4m3(sample: Sample) -> Any:
    pair = convert(
        "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};", Uint16, number(sample), swapped(sample)
    )
    return Uint32(pair)


def _native_e4m3_decode(sample: Sample) -> Any:
    pair = convert("cvt.rn.f16x2.e4m3x2 {$w0}, {$r0};", Uint32, Uint16(sample.low))
    return _wide(pair)


def _native_bf16(sample: Sample) -> Any:
    wide = ops.number_of(Uint32(sample.index) * 0x10001)
    code = Uint32(convert("cvt.rn.bf16.f32 {$w0}, {$r0};", Uint16, wide))
    return ops.select((code & 0x7FFF) > 0x7F80, 0x7FC0, code)


def _native_e2m1(sample: Sample) -> Any:
    instruction = """{
        .reg .b8 pair, none;
        cvt.rn.satfinite.e2m1x2.f32 pair, {$r1}, {$r0};
        mov.b32 {$w0}, {pair, none, none, none};
    }"""
    return convert(instruction, Uint32, number(sample), swapped(sample)) & 0xFF


def _native_e2m1_decode(sample: Sample) -> Any:
    instruction = """{
        .reg .b8 pair, other;
        mov.b32 {pair, other, _, _}, {$r0};
        cvt.rn.f16x2.e2m1x2 {$w0}, pair;
    }"""
    return _wide(convert(instruction, Uint32, Uint32(sample.low)))


def _native_ue8m0(sample: Sample) -> Any:
    magnitude = ops.absolute(number(sample))
    pair = convert(
        "cvt.rp.satfinite.ue8m0x2.f32 {$w0}, {$r1}, {$r0};", Uint16, magnitude, magnitude
    )
    return Uint32(pair) & 0xFF


def _native_ue8m0_decode(sample: Sample) -> Any:
    pair = convert("cvt.rn.bf16x2.ue8m0x2 {$w0}, {$r0};", Uint32, Uint16(sample.low))
    return canonical_bits(codecs.bf16_decode(pair & 0xFFFF))


def _wide(pair: Any) -> Any:
    """Return the low half of a pair of float16, widened to float32."""
    half = Uint16(pair & 0xFFFF).bitcast(Float16)
    return canonical_bits(half.to(Float32))


_NATIVE_EVERYWHERE = (
    NativeProbe(
        "e4m3 of bf16",
        _native_e4m3,
        lambda s: codecs.e4m3_encode(number(s)) + codecs.e4m3_encode(swapped(s)) * 256,
    ),
    NativeProbe(
        "e4m3 decoded", _native_e4m3_decode, lambda s: canonical_bits(codecs.e4m3_decode(s.low))
    ),
    NativeProbe(
        "bf16 of float32",
        _native_bf16,
        lambda s: codecs.bf16_encode(ops.number_of(ops.unsigned(s.index) * 0x10001)),
    ),
)
_NATIVE_WITH_E2M1 = (
    NativeProbe(
        "e2m1 of bf16",
        _native_e2m1,
        lambda s: pack_pair(codecs.e2m1_encode(number(s)), codecs.e2m1_encode(swapped(s))),
    ),
    NativeProbe(
        "e2m1 decoded",
        _native_e2m1_decode,
        lambda s: ops.bits_of(codecs.e2m1_decode(low_nibble(s.low))),
    ),
    NativeProbe("ue8m0 of bf16", _native_ue8m0, lambda s: codecs.ue8m0_encode(number(s))),
    NativeProbe(
        "ue8m0 decoded", _native_ue8m0_decode, lambda s: canonical_bits(codecs.ue8m0_decode(s.low))
    ),
)


def native_probes(target: Target) -> tuple[NativeProbe, ...]:
    """Return the conversions that the target's instructions cover."""
    return _NATIVE_EVERYWHERE + (_NATIVE_WITH_E2M1 if target.converts_e2m1 else ())


def thread_index() -> Any:
    """Return this thread's number in the grid."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    return Uint32(block) * THREADS + Uint32(thread)


def write_sample(
    index: Any, gBytes: Any, gValues: Any, functions: tuple[Callable[[Sample], Any], ...]
) -> None:
    """Read one sample's bytes and write what each function makes of it into [N, S]."""
    bytes_S2 = cute.make_tensor(gBytes, cute.make_layout(2 * SAMPLES))
    values_NS = cute.make_tensor(gValues, cute.make_layout(len(functions) * SAMPLES))
    # Trap: an element of a Uint8 tensor arrives as a signed Int8.
    low, high = ops.unsigned(bytes_S2[index * 2]), ops.unsigned(bytes_S2[index * 2 + 1])
    sample = Sample(index, low, high)
    for place, function in enumerate(functions):
        values_NS[index + place * SAMPLES] = Uint32(function(sample))


class MatrixTensors(NamedTuple):
    """Operands of the quantiser: bfloat16 bits, one float32, bytes, bytes."""

    values: Any
    encode_scale: Any
    codes: Any
    scales: Any


def matrix_tensors(pointers: tuple[Any, ...], shape: MatrixShape) -> MatrixTensors:
    """View four pointers as the flat tensors of a matrix of this shape."""
    numbers = shape.rows * shape.columns
    sizes = (numbers, 1, numbers // 2, shape.scale_bytes)
    flat = (cute.make_tensor(p, cute.make_layout(n)) for p, n in zip(pointers, sizes, strict=True))
    return MatrixTensors(*flat)


def quantise_block(tensors: MatrixTensors, index: Any, shape: MatrixShape) -> None:
    """Quantise the 16 values of one block, and put their scale where the tensor core reads it."""
    encode_scale = tensors.encode_scale[0]
    numbers = [codecs.bf16_decode(tensors.values[index * BLOCK + i]) for i in range(BLOCK)]
    amax = ops.absolute(numbers[0])
    for value in numbers[1:]:
        amax = ops.maximum(amax, ops.absolute(value))
    scale_code = codecs.nvfp4_block_scale(amax, encode_scale)
    factor = codecs.nvfp4_block_encode_scale(scale_code, encode_scale)
    element_codes = [codecs.nvfp4_encode(value, factor) for value in numbers]
    for byte in range(BLOCK // 2):
        packed = pack_pair(element_codes[2 * byte], element_codes[2 * byte + 1])
        tensors.codes[index * (BLOCK // 2) + byte] = Uint8(packed)
    columns = shape.scale_columns
    offset = offset_128x4(index // columns, index % columns, columns)
    tensors.scales[offset] = Uint8(scale_code)


@cute.kernel
def probe_kernel(gBytes: cute.Pointer, gValues: cute.Pointer, group: cutlass.Constexpr) -> None:
    """One thread a sample, every probe of a group."""
    write_sample(thread_index(), gBytes, gValues, tuple(probe.value for probe in GROUPS[group]))


@cute.kernel
def native_kernel(gBytes: cute.Pointer, gValues: cute.Pointer, target: cutlass.Constexpr) -> None:
    """One thread a sample, every conversion that the target has."""
    probes = native_probes(TARGETS[target])
    write_sample(thread_index(), gBytes, gValues, tuple(probe.on_device for probe in probes))


@cute.kernel
def quantise_kernel(
    gValues: cute.Pointer,
    gEncodeScale: cute.Pointer,
    gCodes: cute.Pointer,
    gScales: cute.Pointer,
    shape: cutlass.Constexpr,
) -> None:
    """One thread a block of 16 values."""
    tensors = matrix_tensors((gValues, gEncodeScale, gCodes, gScales), shape)
    index = thread_index()
    if index < shape.blocks:
        quantise_block(tensors, index, shape)


@cute.jit
def launch_probe(
    gBytes: cute.Pointer, gValues: cute.Pointer, group: cutlass.Constexpr, stream: CUstream
) -> None:
    """Launch a group, by name."""
    grid = [SAMPLES // THREADS, 1, 1]
    probe_kernel(gBytes, gValues, group).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)


@cute.jit
def launch_native(
    gBytes: cute.Pointer, gValues: cute.Pointer, target: cutlass.Constexpr, stream: CUstream
) -> None:
    """Launch the conversions of a target, by name."""
    grid = [SAMPLES // THREADS, 1, 1]
    native_kernel(gBytes, gValues, target).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)


@cute.jit
def launch_quantise(
    gValues: cute.Pointer,
    gEncodeScale: cute.Pointer,
    gCodes: cute.Pointer,
    gScales: cute.Pointer,
    shape: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch the quantiser for one shape."""
    grid = [ceil_div(shape.blocks, THREADS), 1, 1]
    quantise_kernel(gValues, gEncodeScale, gCodes, gScales, shape).launch(
        grid=grid, block=[THREADS, 1, 1], stream=stream
    )


def pointer(kind: Any, tensor: Tensor | None = None) -> Any:
    """Return a device pointer to a tensor, or one to compile with."""
    address = 16 if tensor is None else tensor.data_ptr()
    return make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=16)


def compile_probe(group: str, target: Target, settings: CompileSettings) -> CompiledKernel:
    """Compile a group of probes."""
    arguments = (pointer(Uint8), pointer(Uint32), group, any_stream())
    return compile_kernel(launch_probe, arguments, target, settings)


def compile_native(target: Target, settings: CompileSettings) -> CompiledKernel:
    """Compile the conversions that the target has instructions for."""
    arguments = (pointer(Uint8), pointer(Uint32), target.name, any_stream())
    return compile_kernel(launch_native, arguments, target, settings)


def compile_quantise(
    shape: MatrixShape, target: Target, settings: CompileSettings
) -> CompiledKernel:
    """Compile the quantiser for one shape."""
    pointers = (pointer(Uint16), pointer(Float32), pointer(Uint8), pointer(Uint8))
    return compile_kernel(launch_quantise, (*pointers, shape, any_stream()), target, settings)


def run_samples(kernel: CompiledKernel, probes: int) -> Tensor:
    """Run a compiled group on the current device; return int64 [N, S] on the host."""
    bytes_S2 = sample_bytes().cuda()
    values_NS = torch.full((probes, SAMPLES), -1, dtype=torch.int32, device="cuda")
    kernel(pointer(Uint8, bytes_S2), pointer(Uint32, values_NS), current_stream())
    return values_NS.cpu().to(torch.int64) & 0xFFFF_FFFF


def run_quantise(
    kernel: CompiledKernel, shape: MatrixShape, values_MK: Tensor, encode_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Quantise bfloat16 [M, K] with a kernel compiled for this shape; codes and 128x4 scales."""
    if tuple(values_MK.shape) != (shape.rows, shape.columns):
        raise ShapeMismatch(
            "matrix to quantise",
            tuple(values_MK.shape),
            f"what the kernel is compiled for, {(shape.rows, shape.columns)}",
            "Compile another kernel for it.",
        )
    if values_MK.dtype is not torch.bfloat16 or not values_MK.is_contiguous():
        raise DtypeMismatch(
            "matrix to quantise",
            f"{values_MK.dtype}, strides {values_MK.stride()}",
            "contiguous torch.bfloat16",
            "Convert it first; the kernel reads raw bits.",
        )
    codes_MP = values_MK.new_zeros((shape.rows, shape.columns // 2), dtype=torch.uint8)
    scales = values_MK.new_zeros(shape.scale_bytes, dtype=torch.uint8)
    kernel(
        pointer(Uint16, values_MK),
        pointer(Float32, encode_scale),
        pointer(Uint8, codes_MP),
        pointer(Uint8, scales),
        current_stream(),
    )
    return codes_MP, scales
