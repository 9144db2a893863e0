"""Numba loops of fast.nvfp4: flat arrays in, flat arrays out. Import it inside a function.

Importing numba is slow. The loops check nothing, hold no Python objects, allocate at most a few KiB
of scratch and release the GIL; fast.buffers splits the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]  # it is not typed
from numba.core import types
from numba.extending import intrinsic

from degarble.harness.base.compiled_loops import compiled, compiled_with

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


# --------------------------------------------------------------------------------------------------
# Canonical NVFP4 and plain E2M1
#
# Arithmetic follows the definition step by step in float32, with fast-math off. Integers are
# wrapped after every operation, because numba widens 32-bit arithmetic to 64 bits and the vectors
# would be half as long. Encoding loops are phases over a chunk: a flat loop over contiguous scratch
# is vectorised, a nest with a trip count of 16 is unrolled into scalars.

if TYPE_CHECKING:
    Bits = NDArray[Any]  # uint16 (bfloat16) or uint32 (float32)
    Bytes = NDArray[np.uint8]
    Floats = NDArray[np.float32]
    Doubles = NDArray[np.float64]


U16 = np.uint16
U32 = np.uint32
F32 = np.float32

BLOCK = 16  # elements that share one scale byte
STREAM_BYTES = 1 << 24  # outputs from here on bypass the cache, which they would only empty
STREAM_ALIGNMENT = 64  # bytes: 16 float32
CHUNK_BLOCKS = 512  # scratch of one encoding chunk: 8,192 elements, 48 KiB at most


def _vector(width: int, lanes: int) -> ir.VectorType:
    return ir.VectorType(ir.IntType(width), lanes)


def _lookup_of_16(*, packed: bool, stream: bool) -> Any:
    """Return the intrinsic that writes the table entries of 16 codes, two or one a byte.

    LLVM makes one permute of the 16 times extract and insert where the CPU has one. With `stream`
    the result goes past the cache, and the output must be aligned to 16 entries.
    """

    def lookup(
        _typing_context: Any, codes: Any, table: Any, out: Any, block: Any, row: Any
    ) -> tuple[Any, Callable[..., Any]]:
        width = table.dtype.bitwidth
        entries = _vector(width, BLOCK)

        def generate(context: Any, build: Any, sig: Any, args: Any) -> Any:
            def place(argument: int, index: Any, stride: int, vector: ir.VectorType) -> Any:
                array = context.make_array(sig.args[argument])(context, build, args[argument])
                first = build.mul(index, ir.Constant(index.type, stride))
                return build.bitcast(build.gep(array.data, [first]), vector.as_pointer())

            size = BLOCK // 2 if packed else BLOCK
            found = build.load(place(0, args[3], size, _vector(8, size)), align=1)
            nibbles = _nibbles(build, found, width)
            choice = build.load(place(1, args[4], BLOCK, entries), align=width // 8)
            chosen = ir.Constant(entries, ir.Undefined)
            for lane in range(BLOCK):
                at = ir.Constant(ir.IntType(32), lane)
                entry = build.extract_element(choice, build.extract_element(nibbles, at))
                chosen = build.insert_element(chosen, entry, at)
            alignment = BLOCK * width // 8 if stream else width // 8
            store = build.store(chosen, place(2, args[3], BLOCK, entries), align=alignment)
            if stream:
                one = ir.Constant(ir.IntType(32), 1)
                store.set_metadata("nontemporal", build.module.add_metadata([one]))
            return context.get_dummy_value()

        return types.void(codes, table, out, block, row), generate

    return intrinsic(lookup)


def _nibbles(build: Any, found: Any, width: int) -> Any:
    """Return 16 codes as a vector of `width` bits each, from 8 packed bytes or 16 bytes."""
    if found.type.count == BLOCK:
        nibbles = build.zext(found, _vector(width, BLOCK))
    else:
        pairs = build.zext(found, _vector(32, 8))
        spread = build.shl(pairs, ir.Constant(pairs.type, [12] * 8))  # odd nibble to bits 16..19
        nibbles = build.bitcast(build.or_(pairs, spread), _vector(16, BLOCK))
        if width > 16:
            nibbles = build.zext(nibbles, _vector(width, BLOCK))
    return build.and_(nibbles, ir.Constant(nibbles.type, [15] * BLOCK))


def _fence_ir(_typing_context: Any) -> tuple[Any, Callable[..., Any]]:
    """Order streamed stores before whatever follows: on x86 they are not ordered otherwise."""

    def generate(context: Any, build: Any, _sig: Any, _args: Any) -> Any:
        build.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


_lookup_packed: Any = _lookup_of_16(packed=True, stream=False)
_stream_packed: Any = _lookup_of_16(packed=True, stream=True)
_lookup_single: Any = _lookup_of_16(packed=False, stream=False)
_stream_single: Any = _lookup_of_16(packed=False, stream=True)
_fence: Any = intrinsic(_fence_ir)


def streams(out: Bits) -> bool:
    """Return whether an output should be written past the cache, and can be."""
    return out.nbytes >= STREAM_BYTES and out.ctypes.data % STREAM_ALIGNMENT == 0


@compiled
def decode_blocks(packed: Bytes, scales: Bytes, table: Bits, out: Bits, stream: bool) -> None:
    """Decode whole blocks: out[16 b + j] = table[16 scales[b] + nibble j of block b]."""
    if stream:
        for block in range(scales.size):
            _stream_packed(packed, table, out, block, np.intp(scales[block]))
        _fence()
    else:
        for block in range(scales.size):
            _lookup_packed(packed, table, out, block, np.intp(scales[block]))


@compiled
def decode_blocks_wide(packed: Bytes, scales: Bytes, table: Any, out: Any) -> None:
    """Decode whole blocks in float64: out[16 b + j] = table[16 scales[b] + nibble j of block b]."""
    for block in range(scales.size):
        row = np.intp(scales[block]) * 16
        for pair in range(8):
            byte, at = packed[block * 8 + pair], block * 16 + 2 * pair
            out[at] = table[row + (byte & 15)]
            out[at + 1] = table[row + (byte >> 4)]


@compiled
def _e2m1_code(value: Any) -> Any:
    """Round a float32 to E2M1, nearest even, saturating; NaN gives +6 as the hardware does."""
    bits = F32(value).view(U32)
    magnitude = U32(bits & U32(0x7FFFFFFF))
    # From 1.0 up both formats are normal: keep one mantissa bit, then re-bias 127 to 1.
    half = U32(U32(0x1FFFFF) + U32(U32(magnitude >> U32(22)) & U32(1)))
    code = min(U32(U32(U32(magnitude + half) >> U32(22)) - U32(252)), U32(7))
    # Below 1.0 codes count halves: adding 2**22 (ulp 1/2) leaves the rounded count in the low bits.
    count = F32(magnitude.view(F32) + F32(4194304.0)).view(U32)
    code = U32(count - U32(0x4A800000)) if magnitude < U32(0x3F800000) else code
    signed = U32(code | U32(U32(bits >> U32(28)) & U32(8)))
    return U32(7) if magnitude > U32(0x7F800000) else signed


@compiled
def _e2m1_code_of_bf16(bits: Any) -> Any:
    """Do the same to a BF16 pattern in 16-bit integers: twice as many fit into a vector."""
    magnitude = U16(bits & U16(0x7FFF))
    half = U16(U16(0x1F) + U16(U16(magnitude >> U16(6)) & U16(1)))
    code = min(U16(U16(U16(magnitude + half) >> U16(6)) - U16(252)), U16(7))
    below_1 = U16(1) if magnitude > U16(0x3E80) else U16(0)  # beyond 0.25; the tie goes to 0
    below_1 = U16(2) if magnitude >= U16(0x3F40) else below_1  # from 0.75, a tie that goes to 1.0
    code = below_1 if magnitude < U16(0x3F80) else code
    signed = U16(code | U16(U16(bits >> U16(12)) & U16(8)))
    return U16(7) if magnitude > U16(0x7F80) else signed


@compiled
def _e4m3_code(value: Any) -> Any:
    """Round a non-negative float32 to E4M3, nearest even, saturating at 448."""
    bits = F32(value).view(U32)
    half = U32(U32(0x7FFFF) + U32(U32(bits >> U32(20)) & U32(1)))
    code = U32(U32(U32(bits + half) >> U32(20)) - U32(960))  # re-bias 127 to 7
    # Subnormals count 2**-9, the ulp of 2**14.
    count = U32(F32(value + F32(16384.0)).view(U32) - U32(0x46800000))
    code = count if value < F32(0.015625) else code
    return np.uint8(U32(0x7E) if value >= F32(448.0) else code)


def _widened_ir(_typing_context: Any, bits: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the float32 bits of a bfloat16 or float32 pattern; the shift is a constant."""

    def generate(context: Any, build: Any, sig: Any, args: Any) -> Any:
        del context, sig
        wide = build.zext(args[0], ir.IntType(32))
        return build.shl(wide, ir.Constant(wide.type, 32 - bits.bitwidth))

    return types.uint32(bits), generate


_widened: Any = intrinsic(_widened_ir)


@compiled
def _magnitude(bits: Any) -> Any:
    """Return float32 bits without sign, and 0 for NaN, which no amax counts (as fmaxf)."""
    magnitude = U32(_widened(bits) & U32(0x7FFFFFFF))
    return U32(0) if magnitude > U32(0x7F800000) else magnitude


@compiled
def largest_bits(values: Bits) -> Any:
    """Return the largest magnitude of all values as float32 bits."""
    largest = U32(0)
    for i in range(values.size):
        largest = max(largest, _magnitude(values[i]))
    return largest


@compiled
def encode_blocks(
    values: Bits, scale_factor: Any, encode_scales: Floats, packed: Bytes, scales: Bytes
) -> None:
    """Encode whole blocks; encode_scales[byte] is the factor for the elements of a block."""
    a = np.empty(CHUNK_BLOCKS * 8, U32)
    b = np.empty(CHUNK_BLOCKS * 4, U32)
    factors = np.empty(CHUNK_BLOCKS * 8, F32)
    for start in range(0, scales.size, CHUNK_BLOCKS):
        stop = min(start + CHUNK_BLOCKS, scales.size)
        x, y, count = values[start * 16 : stop * 16], packed[start * 8 : stop * 8], stop - start
        for i in range(count * 8):  # the largest of 2, 4, 8, 16: each a flat loop
            a[i] = max(_magnitude(x[2 * i]), _magnitude(x[2 * i + 1]))
        for i in range(count * 4):
            b[i] = max(a[2 * i], a[2 * i + 1])
        for i in range(count * 2):
            a[i] = max(b[2 * i], b[2 * i + 1])
        for i in range(count):
            amax = U32(max(a[2 * i], a[2 * i + 1])).view(F32)
            scales[start + i] = _e4m3_code(F32(amax * scale_factor))
        for i in range(count):
            factor = encode_scales[scales[start + i]]
            for j in range(8):
                factors[8 * i + j] = factor
        for i in range(count * 8):
            even = _e2m1_code(F32(U32(_widened(x[2 * i])).view(F32) * factors[i]))
            odd = _e2m1_code(F32(U32(_widened(x[2 * i + 1])).view(F32) * factors[i]))
            y[i] = np.uint8(U32(even | U32(odd << U32(4))))


@compiled
def encode_elements(values: Bits, codes: Bytes) -> None:
    """Encode one E2M1 code a byte."""
    for i in range(values.size):
        if values.itemsize == 2:  # known when this is compiled
            codes[i] = np.uint8(_e2m1_code_of_bf16(U16(values[i])))
        else:
            codes[i] = np.uint8(_e2m1_code(U32(values[i]).view(F32)))


@compiled
def decode_elements(codes: Bytes, table: Bits, out: Bits, stream: bool) -> None:
    """Decode one code a byte, by its lower nibble: out[i] = table[codes[i]]."""
    whole = codes.size // BLOCK
    if stream:
        for block in range(whole):
            _stream_single(codes, table, out, block, 0)
        _fence()
    else:
        for block in range(whole):
            _lookup_single(codes, table, out, block, 0)
    for i in range(whole * BLOCK, codes.size):
        out[i] = table[codes[i] & 15]


@compiled
def round_elements(values: Bits, table: Bits, out: Bits, stream: bool) -> None:
    """Encode and decode in one pass; the codes never leave the nearest cache."""
    codes = np.empty(CHUNK_BLOCKS * BLOCK, np.uint8)
    for start in range(0, values.size, CHUNK_BLOCKS * BLOCK):
        stop = min(start + CHUNK_BLOCKS * BLOCK, values.size)
        part = codes[: stop - start]
        encode_elements(values[start:stop], part)
        decode_elements(part, table, out[start:stop], stream)


# --------------------------------------------------------------------------------------------------
# ModelOpt's NVFP4
#
# Every step is one float32 operation, rounded to nearest even, in ModelOpt's order. Errors are
# float64, where a decoded value is exact, and add up as a tree of pairs, so that the definition can
# repeat them bit for bit. Fast-math is off; division by zero yields what IEEE 754 says.


F64 = np.float64

_compiled_ieee = compiled_with(error_model="numpy")


@_compiled_ieee
def _quotient_code(value: Any, divisor: Any) -> Any:
    """Round a quotient to E2M1; adding +0 drops the sign of a zero, and of a zero alone."""
    return _e2m1_code(F32(F32(value / divisor) + F32(0.0)))


@_compiled_ieee
def _scale_code(amax: Any, share: Any) -> Any:
    """Round a block's scale: 0 becomes 1, the rest is clamped to [2^-9, 448]."""
    raw = F32(amax / share)
    # ModelOpt gives a zero block scale 1. 2^-9 is E4M3's smallest value.
    raw = F32(1.0) if raw == F32(0.0) else raw
    return _e4m3_code(max(raw, F32(0.001953125)))


@_compiled_ieee
def _block_amax(values: Bits, a: Bits, b: Bits, count: Any) -> Any:
    """Leave the largest magnitude of every block in `a`, as bits; NaN beats all numbers."""
    for i in range(count * 8):
        even = U32(_widened(values[2 * i]) & U32(0x7FFFFFFF))
        a[i] = max(even, U32(_widened(values[2 * i + 1]) & U32(0x7FFFFFFF)))
    for i in range(count * 4):
        b[i] = max(a[2 * i], a[2 * i + 1])
    for i in range(count * 2):
        a[i] = max(b[2 * i], b[2 * i + 1])
    largest = U32(0)
    for i in range(count):
        a[i] = max(a[2 * i], a[2 * i + 1])
        largest = max(largest, a[i])
    return largest


@_compiled_ieee
def largest_bits_or_nan(values: Bits) -> Any:
    """Return the largest magnitude as float32 bits; NaN beats infinity, infinity all numbers."""
    largest = U32(0)
    for i in range(values.size):
        largest = max(largest, U32(_widened(values[i]) & U32(0x7FFFFFFF)))
    return largest


@_compiled_ieee
def encode_blocks_modelopt(
    values: Bits, share: Any, divisors: Floats, packed: Bytes, scales: Bytes
) -> Any:
    """Encode whole blocks; `share` is 6 s, divisors[byte] the scale times s. Return the amax."""
    a = np.empty(CHUNK_BLOCKS * 8, U32)
    b = np.empty(CHUNK_BLOCKS * 4, U32)
    spread = np.empty(CHUNK_BLOCKS * 8, F32)
    largest = U32(0)
    for start in range(0, scales.size, CHUNK_BLOCKS):
        stop = min(start + CHUNK_BLOCKS, scales.size)
        x, y, count = values[start * 16 : stop * 16], packed[start * 8 : stop * 8], stop - start
        largest = max(largest, _block_amax(x, a, b, count))
        for i in range(count):
            scales[start + i] = _scale_code(U32(a[i]).view(F32), share)
        for i in range(count):
            divisor = divisors[scales[start + i]]
            for j in range(8):
                spread[8 * i + j] = divisor
        for i in range(count * 8):
            even = _quotient_code(U32(_widened(x[2 * i])).view(F32), spread[i])
            odd = _quotient_code(U32(_widened(x[2 * i + 1])).view(F32), spread[i])
            y[i] = np.uint8(U32(even | U32(odd << U32(4))))
    return largest


@_compiled_ieee
def _fold(errors: Doubles, other: Doubles, count: Any) -> None:
    """Add 8 entries a block up as a tree of pairs; the sums end in errors[:count]."""
    for i in range(count * 4):
        other[i] = errors[2 * i] + errors[2 * i + 1]
    for i in range(count * 2):
        errors[i] = other[2 * i] + other[2 * i + 1]
    for i in range(count):
        other[i] = errors[2 * i] + errors[2 * i + 1]
    for i in range(count):
        errors[i] = other[i]


@_compiled_ieee
def _try(
    x: Bits, choice: Bytes, tables: Any, packed: Bytes, errors: Doubles, other: Doubles
) -> None:
    """Encode the blocks of a chunk with these scales; leave codes, and one squared error each."""
    divisors, steps, elements = tables
    count = choice.size
    spread = np.empty(CHUNK_BLOCKS * 8, F32)
    units = np.empty(CHUNK_BLOCKS * 8, F64)
    for i in range(count):
        divisor, step = divisors[choice[i]], steps[choice[i]]
        for j in range(8):
            spread[8 * i + j] = divisor
            units[8 * i + j] = step
    for i in range(count * 8):
        x0, x1 = U32(_widened(x[2 * i])).view(F32), U32(_widened(x[2 * i + 1])).view(F32)
        even, odd = _quotient_code(x0, spread[i]), _quotient_code(x1, spread[i])
        packed[i] = np.uint8(U32(even | U32(odd << U32(4))))
    _errors(x, packed, units, elements, errors, count)
    _fold(errors, other, count)


@_compiled_ieee
def _errors(
    x: Bits, packed: Bytes, units: Doubles, elements: Doubles, errors: Doubles, count: Any
) -> None:
    """Leave the squared error of every pair; a loop of its own, so that it becomes vectors."""
    for i in range(count * 8):
        x0, x1 = U32(_widened(x[2 * i])).view(F32), U32(_widened(x[2 * i + 1])).view(F32)
        pair = np.uint64(packed[i])
        d0 = F64(x0) - elements[pair & np.uint64(15)] * units[i]
        d1 = F64(x1) - elements[pair >> np.uint64(4)] * units[i]
        errors[i] = d0 * d0 + d1 * d1


@_compiled_ieee
def search_blocks(values: Bits, rule: Any, tables: Any, packed: Bytes, scales: Bytes) -> Any:
    """Encode whole blocks with the candidate scale of least squared error; the first one wins ties.

    `rule`: (shares, steps of the code): candidates are the scales of every share, moved by steps.
    """
    shares, moves = rule
    a = np.empty(CHUNK_BLOCKS * 8, U32)
    b = np.empty(CHUNK_BLOCKS * 4, U32)
    choice = np.empty(CHUNK_BLOCKS, np.uint8)
    codes = np.empty(CHUNK_BLOCKS * 8, np.uint8)
    errors = np.empty(CHUNK_BLOCKS * 8, F64)
    other = np.empty(CHUNK_BLOCKS * 4, F64)
    best = np.empty(CHUNK_BLOCKS, F64)
    largest = U32(0)
    for start in range(0, scales.size, CHUNK_BLOCKS):
        stop = min(start + CHUNK_BLOCKS, scales.size)
        x, y, count = values[start * 16 : stop * 16], packed[start * 8 : stop * 8], stop - start
        largest = max(largest, _block_amax(x, a, b, count))
        for i in range(count):
            best[i] = np.inf
            scales[start + i] = _scale_code(U32(a[i]).view(F32), shares[0])
        for i in range(count * 8):
            y[i] = 0
        for share in shares:
            for move in moves:
                for i in range(count):
                    base = np.int64(_scale_code(U32(a[i]).view(F32), share))
                    # 1 to 126 are the positive finite codes of E4M3: 0x7F is NaN.
                    choice[i] = np.uint8(min(max(base + move, 1), 126))
                _try(x, choice[:count], tables, codes, errors, other)
                for i in range(count):
                    # Strictly less: the first of equals wins; a NaN error never does.
                    if errors[i] < best[i]:
                        best[i] = errors[i]
                        scales[start + i] = choice[i]
                        for j in range(8):
                            y[8 * i + j] = codes[8 * i + j]
    return largest


@_compiled_ieee
def measure_blocks(values: Bits, packed: Bytes, scales: Bytes, tables: Any, sums: Doubles) -> None:
    """Add up, over whole blocks: energy and squared error."""
    steps, elements = tables
    energy = np.empty(CHUNK_BLOCKS * 8, F64)
    errors = np.empty(CHUNK_BLOCKS * 8, F64)
    other = np.empty(CHUNK_BLOCKS * 4, F64)
    units = np.empty(CHUNK_BLOCKS * 8, F64)
    for start in range(0, scales.size, CHUNK_BLOCKS):
        stop = min(start + CHUNK_BLOCKS, scales.size)
        x, y, count = values[start * 16 : stop * 16], packed[start * 8 : stop * 8], stop - start
        for i in range(count):
            step = steps[scales[start + i]]
            for j in range(8):
                units[8 * i + j] = step
        for i in range(count * 8):
            x0 = F64(U32(_widened(x[2 * i])).view(F32))
            x1 = F64(U32(_widened(x[2 * i + 1])).view(F32))
            energy[i] = x0 * x0 + x1 * x1
        _errors(x, y, units, elements, errors, count)
        _fold(energy, other, count)
        _fold(errors, other, count)
        for i in range(count):
            sums[0] += energy[i]
            sums[1] += errors[i]
