"""The fast paths against the definition, bit for bit: exhaustive where 8 or 16 bits allow."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from degarble.harness.base.errors import (
    DegarbleError,
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
)
from degarble.harness.formats.codec import decode_array, encode_array, pack_nibbles, unpack_nibbles
from degarble.harness.formats.dialects import CANONICAL, MODELOPT
from degarble.harness.formats.fast import loops as fast_loops
from degarble.harness.formats.fast import nvfp4 as fast_nvfp4
from degarble.harness.formats.fast.buffers import empty_tensor, values_of
from degarble.harness.formats.fast.nvfp4 import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    ScaleSearch,
    decode_e2m1,
    decode_table,
    dequantise_nvfp4,
    encode_e2m1,
    encode_scale_of,
    largest_finite,
    largest_magnitude,
    largest_magnitude_or_nan,
    measure_error,
    quantise_modelopt,
    quantise_nvfp4,
    round_e2m1,
    search_modelopt,
)
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.number_formats import (
    E2M1,
    E4M3,
    NVFP4,
    NanRule,
    NibbleOrder,
    ScaleDirection,
)
from degarble.harness.formats.quantise import (
    QuantisedTensor,
    dequantise,
    dequantise_definition,
    quantise,
    quantise_definition,
)
from degarble.harness.formats.scale_rules import TENSOR_SCALE, TensorScales
from degarble.suites.formats.bits import differences

if TYPE_CHECKING:
    from torch import Tensor


# --------------------------------------------------------------------------------------------------
# The fast NVFP4 paths against the definition, bit for bit: exhaustive where 8 or 16 bits allow.

DTYPES = (torch.bfloat16, torch.float32)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# Ordinary, exact, results subnormal in BF16, products subnormal in float32, results beyond BF16.
DECODE_SCALES = (0.0037, 1.0, 2.0**-127, 1.7e-43, 3e35)

# 0.0037-like, exact, the cap, one whose reciprocal is subnormal, tiny.
ENCODE_SCALES = (None, 268.8, 1.0, float(np.finfo(np.float32).max), 2.0**127, 8e-36, 2.0**-126)

RULE = CANONICAL.rule_for(NVFP4)

ALL_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def quantised(codes: Tensor, scales: Tensor, decode_scale: float) -> QuantisedTensor:
    return QuantisedTensor(
        codes=codes,
        block_scale=scales,
        tensor_scale=torch.tensor(decode_scale, dtype=torch.float32),
        format=NVFP4,
        dialect=CANONICAL,
        layout=LINEAR,
        direction=ScaleDirection.DECODE,
        nibble_order=NibbleOrder.LOW_EVEN,
        shape=(*codes.shape[:-1], codes.shape[-1] * 2),
    )


def defined_values(
    codes: Tensor, scales: Tensor, decode_scale: float, dtype: torch.dtype
) -> Tensor:
    return dequantise_definition(quantised(codes, scales, decode_scale), dtype)


def defined_scales(values: Tensor, encode_scale: float | None) -> TensorScales:
    if encode_scale is not None:
        encode = torch.tensor(encode_scale, dtype=torch.float32)
        return TensorScales(encode=encode, decode=encode.reciprocal())
    magnitude = values.float().abs()
    largest = torch.where(magnitude.isnan(), 0.0, magnitude).amax()
    return TENSOR_SCALE[RULE.tensor_scale](largest, NVFP4, values.dtype)


def encoding_differences(values: Tensor, encode_scale: float | None = None) -> str:
    """Compare codes, scale bytes and the tensor scale with the definition."""
    scales = defined_scales(values, encode_scale)
    codes, block_scale = quantise_definition(values, RULE, scales)
    nvfp4 = quantise_nvfp4(values, encode_scale, threads=1)
    encode = torch.tensor([nvfp4.encode_scale], dtype=torch.float32)
    parts = {
        "encode scale": differences(encode, scales.encode.reshape(1)),
        "scale bytes": differences(nvfp4.block_scale, block_scale),
        "codes": differences(nvfp4.codes, codes),
    }
    return "; ".join(f"{part}: {text}" for part, text in parts.items() if text)


@by_dtype
@pytest.mark.parametrize("decode_scale", DECODE_SCALES)
def test_every_code_byte_under_every_scale_byte(dtype: torch.dtype, decode_scale: float) -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    codes = every.repeat(256, 1)
    scales = every[:, None].repeat(1, 32)
    expected = defined_values(codes, scales, decode_scale, dtype)
    found = dequantise_nvfp4(codes, scales, decode_scale, dtype)
    assert differences(found, expected) == ""


@pytest.mark.parametrize("decode_scale", DECODE_SCALES)
def test_every_code_byte_under_every_scale_byte_in_float64(
    decode_scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    tensor = quantised(every.repeat(256, 16), every[:, None].repeat(1, 512), decode_scale)
    found, expected = (
        decode(tensor, torch.float64) for decode in (dequantise, dequantise_definition)
    )
    assert torch.equal(found.isnan(), expected.isnan())
    known = found.isfinite()
    assert bool(known.any())
    assert torch.equal(*(each[known].view(torch.int64) for each in (found, expected)))
    monkeypatch.setattr(fast_nvfp4, "dequantise_nvfp4_wide", lambda *_: "by the loop")
    assert dequantise(tensor, torch.float64) == "by the loop"


@pytest.mark.parametrize("encode_scale", ENCODE_SCALES)
def test_every_bf16_value_in_blocks_of_neighbours(encode_scale: float | None) -> None:
    assert encoding_differences(ALL_BF16.reshape(-1, 16), encode_scale) == ""


def test_every_bf16_value_with_a_fixed_amax() -> None:
    blocks = ALL_BF16.reshape(-1, 8).repeat_interleave(2, dim=1)
    blocks[:, 1::2] = 6.0
    assert encoding_differences(blocks, 448.0) == ""
    assert encoding_differences(blocks, 1.0) == ""


def test_every_bf16_value_in_random_order(seed: int) -> None:
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(seed))
    finite = ALL_BF16[order].nan_to_num(0.0, 0.0, 0.0)
    assert encoding_differences(finite.reshape(4, 4, -1)) == ""
    assert encoding_differences(finite.reshape(64, -1), 3.5) == ""


@pytest.mark.parametrize("encode_scale", ENCODE_SCALES)
def test_float32_patterns_of_all_kinds(seed: int, encode_scale: float | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 31), 1 << 31, (256, 128), generator=generator, dtype=torch.int64)
    assert encoding_differences(bits.to(torch.int32).view(torch.float32), encode_scale) == ""


@by_dtype
def test_midpoints_and_their_neighbours(dtype: torch.dtype) -> None:
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    around = torch.stack([torch.nextafter(midpoints, midpoints * side) for side in (0.0, 1.0, 2.0)])
    blocks = torch.cat([around, -around]).to(dtype).repeat_interleave(2, dim=1)
    blocks[:, 1] = 6.0  # scale byte 0x38, so elements reach the rounder as they are
    assert quantise_nvfp4(blocks, 1.0).block_scale.eq(0x38).all()
    assert encoding_differences(blocks, 1.0) == ""


@by_dtype
def test_special_blocks(dtype: torch.dtype) -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[0.0], [-0.0], [nan], [nan, 1.0], [inf, 1.0], [-inf, nan, -0.0], [1e-30], [-1e-38, 0.0]]
    blocks = torch.tensor([(row * 16)[:16] for row in rows]).to(dtype)
    for encode_scale in ENCODE_SCALES:
        assert encoding_differences(blocks, encode_scale) == ""
        for block in blocks:
            assert encoding_differences(block[None], encode_scale) == ""
    assert quantise_nvfp4(blocks[2]).codes.eq(0x77).all()  # NaN is +6
    assert quantise_nvfp4(blocks[1]).codes.eq(0x88).all()  # -0 keeps its sign


_NUMBERS = st.floats(width=32) | st.sampled_from([0.0, -0.0, 0.25, 2.5, -5.0, 6.0, 448.0, 1e-30])


@given(
    rows=st.integers(0, 3),
    blocks=st.integers(0, 3),
    block=st.lists(_NUMBERS, min_size=16, max_size=16),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape_and_any_values(
    rows: int, blocks: int, block: list[float], dtype: torch.dtype
) -> None:
    values = torch.tensor(block).to(dtype).repeat(rows, blocks)
    if values.numel():
        assert encoding_differences(values) == ""
    packed = quantise_nvfp4(values)
    scale = float(np.float32(1) / np.float32(packed.encode_scale))
    decoded = dequantise_nvfp4(packed.codes, packed.block_scale, scale, dtype)
    assert decoded.shape == values.shape
    expected = defined_values(packed.codes, packed.block_scale, scale, dtype)
    assert differences(decoded, expected) == ""


@by_dtype
def test_threads_and_chunks_leave_no_seam(
    dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_nvfp4, "GRAIN_BLOCKS", 1 << 13)
    generator = torch.Generator().manual_seed(seed)
    # 3 grains and a bit, no multiple of a chunk.
    values = torch.randn(3, 8501, 16, generator=generator).to(dtype)
    one, three = (quantise_nvfp4(values, threads=threads) for threads in (1, 3))
    assert differences(three.codes, one.codes) == ""
    assert differences(three.block_scale, one.block_scale) == ""
    assert three.encode_scale == one.encode_scale
    decoded = [dequantise_nvfp4(*one[:2], 0.01, dtype, threads=threads) for threads in (1, 3)]
    assert differences(*decoded) == ""
    codes, _ = quantise_definition(values[1], RULE, defined_scales(values, one.encode_scale))
    assert differences(three.codes[1], codes) == ""


@by_dtype
def test_the_public_functions_take_this_path(
    dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(512, 512, generator=torch.Generator().manual_seed(seed)).to(dtype)
    tensor = quantise(values, NVFP4)
    expected = quantise_nvfp4(values)
    assert differences(tensor.codes, expected.codes) == ""
    assert differences(tensor.block_scale, expected.block_scale) == ""
    assert differences(dequantise(tensor, dtype), dequantise_definition(tensor, dtype)) == ""
    calls = []
    monkeypatch.setattr(fast_nvfp4, "dequantise_nvfp4", lambda *given: calls.append(given))
    dequantise(tensor, dtype)
    assert len(calls) == 1


@by_dtype
def test_output_past_the_cache_is_the_same(dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes, scales = (
        torch.randint(0, 256, (count,), generator=generator).to(torch.uint8).numpy()
        for count in (8 * 999, 999)
    )
    table = decode_table(np.float32(0.3), dtype).reshape(-1)
    kept, streamed = (
        empty_tensor((16 * 999,), dtype).fill_(0).view(torch.int16).numpy().view(table.dtype)
        for _ in range(2)
    )
    fast_loops.decode_blocks(codes, scales, table, kept, False)
    fast_loops.decode_blocks(codes, scales, table, streamed, True)
    assert kept.any()
    np.testing.assert_array_equal(streamed, kept)


def test_only_large_aligned_outputs_go_past_the_cache() -> None:
    large = np.empty(fast_loops.STREAM_BYTES + 64, dtype=np.uint8)
    first = -large.ctypes.data % 64
    assert fast_loops.streams(large[first : first + fast_loops.STREAM_BYTES])
    assert not fast_loops.streams(large[first : first + fast_loops.STREAM_BYTES - 1])
    assert not fast_loops.streams(large[(first + 2) % 64 :][: fast_loops.STREAM_BYTES])


def test_the_output_of_the_caller_is_filled_even_unaligned() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).reshape(4, 64)
    scales = torch.full((4, 8), 0x3C, dtype=torch.uint8)
    expected = dequantise_nvfp4(codes, scales, 2.0)
    out = torch.zeros(4 * 128 + 1, dtype=torch.bfloat16)[1:].view(4, 128)
    assert dequantise_nvfp4(codes, scales, 2.0, out=out) is out
    assert differences(out, expected) == ""
    floats = scales.view(torch.float8_e4m3fn)
    assert differences(dequantise_nvfp4(codes, floats, torch.tensor(2.0)), expected) == ""


def test_tensor_scale_of_the_ends() -> None:
    largest = float(np.finfo(np.float32).max)
    assert encode_scale_of(0.0) == 1
    assert encode_scale_of(float("inf")) == 1
    assert encode_scale_of(2688.0) == 1
    assert encode_scale_of(1e-44) == np.float32(largest)
    assert encode_scale_of(largest) == np.float32(2688) / np.float32(largest)
    assert largest_magnitude(torch.tensor([1.0, float("nan"), -3.0])) == 3
    assert largest_magnitude(torch.tensor([float("nan")])) == 0
    assert largest_magnitude(torch.empty(0)) == 0


@pytest.mark.parametrize("where", [(0x38, 5), (0x01, 9), (0xFE, 15)])
def test_a_wrong_table_entry_is_detected(
    monkeypatch: pytest.MonkeyPatch, where: tuple[int, int]
) -> None:
    def wrong(scale: np.float32, dtype: torch.dtype) -> object:
        table = decode_table(scale, dtype).copy()
        table[where] ^= 1
        return table

    monkeypatch.setattr(fast_nvfp4, "decode_table", wrong)
    with pytest.raises(AssertionError, match="differ, first at"):
        test_every_code_byte_under_every_scale_byte(torch.bfloat16, 1.0)


def test_a_wrong_factor_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fast_nvfp4.element_factors

    def wrong(encode_scale: np.float32) -> object:
        factors = right(encode_scale)
        factors[0x38] = np.nextafter(factors[0x38], np.float32(0))
        return factors

    monkeypatch.setattr(fast_nvfp4, "element_factors", wrong)
    with pytest.raises(AssertionError, match=r"codes: .* differ"):
        test_midpoints_and_their_neighbours(torch.float32)


def test_a_swapped_nibble_and_a_wrong_scale_byte_are_detected(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    packed = quantise_nvfp4(torch.randn(4, 64, generator=generator))
    expected = defined_values(packed.codes, packed.block_scale, 1.0, torch.float32)
    swapped = packed.codes.clone()
    swapped[2, 7] = (swapped[2, 7] >> 4) | (swapped[2, 7] << 4)
    if swapped[2, 7] == packed.codes[2, 7]:
        swapped[2, 7] ^= 1
    found = dequantise_nvfp4(swapped, packed.block_scale, 1.0, torch.float32)
    assert "first at (2, 1" in differences(found, expected)
    scales = packed.block_scale.clone()
    scales[3, 1] += 1
    found = dequantise_nvfp4(packed.codes, scales, 1.0, torch.float32)
    assert "first at (3, " in differences(found, expected)


CODES = torch.zeros(2, 16, dtype=torch.uint8)
SCALES = torch.zeros(2, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((CODES.int(), SCALES, 1.0), DtypeMismatch, "codes"),
        ((CODES, SCALES.float(), 1.0), DtypeMismatch, "block_scale"),
        ((CODES, SCALES, 1.0, torch.float16), DtypeMismatch, "dtype"),
        ((CODES, SCALES, torch.tensor(1.0, dtype=torch.float64)), DtypeMismatch, "decode_scale"),
        ((CODES, SCALES, torch.ones(2)), DtypeMismatch, "decode_scale"),
        ((CODES[:, ::2], SCALES[:, :1], 1.0), LayoutMismatch, "strides"),
        ((CODES[:, :12].contiguous(), SCALES, 1.0), ShapeMismatch, "multiple of 8"),
        ((CODES, SCALES[:, :1].contiguous(), 1.0), ShapeMismatch, r"\(2, 2\)"),
        ((CODES, SCALES.flatten(), 1.0), ShapeMismatch, "from_layout"),
        ((CODES.to("meta"), SCALES, 1.0), InvalidArgument, "device of codes"),
    ],
)
def test_decoding_refuses_by_name(
    arguments: tuple[object, ...], error: type[DegarbleError], words: str
) -> None:
    with pytest.raises(error, match=words):
        dequantise_nvfp4(*arguments)  # type: ignore[arg-type]  # wrong on purpose


def test_decoding_refuses_a_wrong_output() -> None:
    with pytest.raises(ShapeMismatch, match="out"):
        dequantise_nvfp4(CODES, SCALES, 1.0, out=torch.zeros(2, 16, dtype=torch.bfloat16))
    with pytest.raises(DtypeMismatch, match="out"):
        dequantise_nvfp4(CODES, SCALES, 1.0, out=torch.zeros(2, 32))


@pytest.mark.parametrize(
    ("values", "scale", "error", "words"),
    [
        (torch.zeros(2, 16, dtype=torch.float16), None, DtypeMismatch, "values"),
        (torch.zeros(2, 24), None, ShapeMismatch, "multiple of 16"),
        (torch.zeros(()), None, ShapeMismatch, "multiple of 16"),
        (torch.zeros(16, 16).t()[::2], None, LayoutMismatch, "contiguous"),
        (torch.zeros(2, 16), 0.0, InvalidArgument, "encode_scale"),
        (torch.zeros(2, 16), 1e-45, InvalidArgument, "encode_scale"),
        (torch.zeros(2, 16), -1.0, InvalidArgument, "encode_scale"),
        (torch.zeros(2, 16), float("nan"), InvalidArgument, "encode_scale"),
        (torch.zeros(2, 16), float("inf"), InvalidArgument, "encode_scale"),
    ],
)
def test_encoding_refuses_by_name(
    values: Tensor, scale: float | None, error: type[DegarbleError], words: str
) -> None:
    with pytest.raises(error, match=words):
        quantise_nvfp4(values, scale)


def test_importing_compiles_nothing() -> None:
    program = (
        "import sys\n"
        "from degarble.harness.formats.fast import nvfp4\n"
        "sys.exit('numba' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# --------------------------------------------------------------------------------------------------
# Fast E2M1 against the definition: every code, every BF16 pattern, float32 by stride.

E2M1_DTYPES = (torch.bfloat16, torch.float32)
by_value_dtype = pytest.mark.parametrize("dtype", E2M1_DTYPES, ids=str)

# A prime stride over all float32 patterns, infinities and NaN included.
SOME_FLOAT32 = torch.arange(-(1 << 31), 1 << 31, 40_009).to(torch.int32).view(torch.float32)
PATTERNS = {torch.bfloat16: ALL_BF16, torch.float32: SOME_FLOAT32}


@by_value_dtype
def test_every_pattern_gets_the_code_of_the_definition(dtype: torch.dtype) -> None:
    expected = encode_array(PATTERNS[dtype], E2M1, nan=NanRule.LARGEST)
    assert differences(encode_e2m1(PATTERNS[dtype]), expected) == ""


@by_value_dtype
def test_midpoints_go_to_even(dtype: torch.dtype) -> None:
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0], dtype=dtype)
    assert encode_e2m1(midpoints).tolist() == [0, 2, 2, 4, 4, 6, 6, 7]
    assert encode_e2m1(-midpoints).tolist() == [8, 10, 10, 12, 12, 14, 14, 15]


@by_value_dtype
def test_every_byte_decodes_by_its_lower_nibble(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    expected = decode_array(codes & 15, E2M1).to(dtype)
    assert differences(decode_e2m1(codes, dtype), expected) == ""


@by_value_dtype
def test_rounding_is_encoding_and_decoding(dtype: torch.dtype) -> None:
    values = PATTERNS[dtype]
    expected = decode_e2m1(encode_e2m1(values), dtype)
    assert differences(round_e2m1(values), expected) == ""
    assert differences(round_e2m1(round_e2m1(values)), expected) == ""


@by_value_dtype
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 33, 3 * 131_072 + 5])
def test_lengths_that_are_no_whole_vectors(
    dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_nvfp4, "GRAIN_UNITS", 1 << 13)
    values = SOME_FLOAT32[:count].to(dtype) if count < 100 else torch.full((count,), -2.5).to(dtype)
    codes = encode_e2m1(values, threads=3)
    assert differences(codes, encode_array(values, E2M1, nan=NanRule.LARGEST)) == ""
    decoded = decode_e2m1(codes, dtype, threads=3)
    assert differences(decoded, decode_array(codes, E2M1).to(dtype)) == ""
    assert differences(round_e2m1(values, threads=3), decoded) == ""


@by_value_dtype
def test_large_outputs_go_past_the_cache_unchanged(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from degarble.harness.formats.fast import loops as fast_loops  # noqa: PLC0415  patched here

    values = PATTERNS[dtype][: 1 << 16].clone()
    expected = round_e2m1(values)
    monkeypatch.setattr(fast_loops, "STREAM_BYTES", 1)
    out = torch.empty_like(values)
    assert fast_loops.streams(out.view(torch.int16).numpy())
    assert round_e2m1(values, out=out) is out
    assert differences(out, expected) == ""
    assert differences(decode_e2m1(encode_e2m1(values), dtype), expected) == ""


def test_a_wrong_e2m1_table_entry_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    table = values_of(E2M1).copy()
    table[5] = 3.5
    monkeypatch.setattr(fast_nvfp4, "values_of", lambda _fmt: table)
    with pytest.raises(AssertionError, match="differ, first at"):
        test_every_byte_decodes_by_its_lower_nibble(torch.float32)


def test_refuses_by_name() -> None:
    with pytest.raises(DtypeMismatch, match="values"):
        encode_e2m1(torch.zeros(16, dtype=torch.float64))
    with pytest.raises(DtypeMismatch, match="codes"):
        decode_e2m1(torch.zeros(16, dtype=torch.int32))
    with pytest.raises(DtypeMismatch, match="dtype"):
        decode_e2m1(torch.zeros(16, dtype=torch.uint8), torch.float16)
    with pytest.raises(ShapeMismatch, match="out"):
        round_e2m1(torch.zeros(16), out=torch.zeros(15))
    with pytest.raises(DtypeMismatch, match="out"):
        round_e2m1(torch.zeros(16), out=torch.zeros(16, dtype=torch.bfloat16))


# --------------------------------------------------------------------------------------------------
# ModelOpt's dialect at speed: bit for bit the definition; the search against one written plainly.
#
# The package itself stands behind the definition: test_dialects_oracles.py.

MODELOPT_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
MSE = ScaleSearch((6.0,), (0, -1, 1, -2, 2, -3, 3))
FOUR_OVER_SIX = ScaleSearch((6.0, 4.0))


def hard_values(seed: int, dtype: torch.dtype, rows: int = 48) -> torch.Tensor:
    """Rows of every magnitude, halfway points, zeros of both signs, tiny and huge blocks."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    values = torch.randn(rows, 256, generator=generator)
    values *= torch.linspace(-12, 6, rows).exp2()[:, None]
    values[0, :16], values[0, 16:32], values[1, :16] = 0.0, -0.0, 1e-30
    values[2, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6] * 2)
    values[3, :16] = -values[2, :16]
    values[4, :4] = torch.tensor([-1e-38, 1e-38, -0.0, 0.0])
    return values.to(dtype)


def definition(values: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the dialect's record says."""
    return quantise_definition(
        values, MODELOPT.rule_for(NVFP4), TensorScales(encode=1 / scale, decode=scale)
    )


@MODELOPT_DTYPES
@pytest.mark.parametrize("shift", [0, 1, -3, 90, -75])
def test_the_fast_twin_is_the_definition(seed: int, dtype: torch.dtype, shift: int) -> None:
    values = (hard_values(seed, dtype) * 2.0**shift).to(dtype)
    for factor in (1.0, 0.37, 5.0):  # a scale that saturates, one that wastes range
        scale = values.abs().max().float() / 2688 * factor
        assert SMALLEST_SCALE <= float(scale) <= LARGEST_SCALE
        codes, block_scale = quantise_modelopt(values, float(scale))
        expected = definition(values, scale)
        assert torch.equal(codes, expected[0])
        assert torch.equal(block_scale, expected[1])


@MODELOPT_DTYPES
def test_several_threads_and_leading_extents_change_nothing(seed: int, dtype: torch.dtype) -> None:
    values = hard_values(seed, dtype, rows=1 << 13).reshape(4, -1, 256)
    scale = values.abs().max().float() / 2688
    one, two = (quantise_modelopt(values, float(scale), threads=n) for n in (1, 2))
    assert one[0].shape == (4, 1 << 11, 128)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])


def test_quantise_takes_it_for_large_tensors(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = hard_values(seed, torch.bfloat16, rows=512)
    plain = quantise(values[:2], NVFP4, MODELOPT, amax=values.abs().max().float())
    asked: list[int] = []
    real = fast_nvfp4.quantise_modelopt

    def report(given: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(1)
        return real(given, scale)

    monkeypatch.setattr(fast_nvfp4, "quantise_modelopt", report)
    large = quantise(values, NVFP4, MODELOPT)
    assert asked
    assert torch.equal(large.codes[:2], plain.codes)
    values[7, 3] = float("nan")  # the definition says what becomes of it
    quantise(values, NVFP4, MODELOPT)
    assert len(asked) == 1


def plain_search(
    values: torch.Tensor, scale: float, search: ScaleSearch
) -> tuple[torch.Tensor, torch.Tensor]:
    """The search, written for reading: one candidate after the other, all blocks at once."""
    s = torch.tensor(scale, dtype=torch.float32)
    x = values.float().reshape(values.shape[0], -1, 16)
    best = torch.full(x.shape[:2], torch.inf, dtype=torch.float64)
    codes, scales = torch.zeros(x.shape, dtype=torch.uint8), torch.zeros(x.shape[:2]).byte()
    for target in search.targets:
        raw = x.abs().amax(-1) / (s * torch.tensor(target))
        raw = torch.where(raw == 0, torch.ones_like(raw), raw).clamp(min=2.0**-9)
        base = encode_array(raw, E4M3).int()
        for move in search.moves:
            choice = (base + move).clamp(1, 126).byte()
            b = decode_array(choice, E4M3)
            code = encode_array(x / (b * s)[..., None] + 0.0, E2M1)
            decoded = decode_array(code, E2M1).double() * (b.double() * s.double())[..., None]
            error = (x.double() - decoded).square()
            while error.shape[-1] > 1:
                error = error[..., 0::2] + error[..., 1::2]
            better = error[..., 0] < best
            best = torch.where(better, error[..., 0], best)
            scales = torch.where(better, choice, scales)
            codes = torch.where(better[..., None], code, codes)
    return pack_nibbles(codes.reshape(values.shape)), scales


@MODELOPT_DTYPES
@pytest.mark.parametrize("search", [MSE, FOUR_OVER_SIX], ids=["mse", "four-over-six"])
def test_the_search_is_the_plain_one(seed: int, dtype: torch.dtype, search: ScaleSearch) -> None:
    values = hard_values(seed, dtype)
    scale = float(values.abs().max().float() / (6 * 256))
    codes, scales = search_modelopt(values, scale, search)
    expected = plain_search(values, scale, search)
    assert torch.equal(scales, expected[1])
    assert torch.equal(codes, expected[0])


def test_a_search_of_one_candidate_is_the_amax_rule(seed: int) -> None:
    values = hard_values(seed, torch.float32)
    scale = float(values.abs().max().float() / 2688)
    for one, other in zip(
        search_modelopt(values, scale, ScaleSearch((6.0,))),
        quantise_modelopt(values, scale),
        strict=True,
    ):
        assert torch.equal(one, other)


@MODELOPT_DTYPES
def test_measured_errors_are_those_of_the_decoded_values(seed: int, dtype: torch.dtype) -> None:
    values = hard_values(seed, dtype)
    scale = float(values.abs().max().float() / 2688)
    codes, scales = quantise_modelopt(values, scale)
    elements = decode_array(unpack_nibbles(codes), E2M1).double().reshape(*scales.shape, 16)
    decoded = elements * decode_array(scales, E4M3).double()[..., None] * float(np.float32(scale))
    energy_and_error = measure_error(values, codes, scales, scale)
    assert energy_and_error.energy == pytest.approx(
        float(values.double().square().sum()), rel=1e-12
    )
    error = float((values.double() - decoded.reshape(values.shape)).square().sum())
    assert energy_and_error.error == pytest.approx(error, rel=1e-12)
    codes[-1, 7] ^= 0x70  # a planted fault
    assert measure_error(values, codes, scales, scale).error > energy_and_error.error * (1 + 1e-9)


def test_what_it_does_not_do_is_refused() -> None:
    values = torch.ones(2, 32)
    for scale in (0.0, -1.0, float("nan"), float("inf"), 2.0**-101, 2.0**101):
        with pytest.raises(InvalidArgument, match="decode_scale"):
            quantise_modelopt(values, scale)
    for bad in (float("nan"), float("inf"), -float("inf")):
        values[1, 17] = bad
        for call in (
            lambda: quantise_modelopt(values, 1.0),
            lambda: search_modelopt(values, 1.0, MSE),
            lambda: largest_finite(values),
        ):
            with pytest.raises(InvalidArgument, match="finite"):
                call()
    with pytest.raises(ShapeMismatch, match="multiple of 16"):
        quantise_modelopt(torch.ones(2, 24), 1.0)
    with pytest.raises(DtypeMismatch, match="bfloat16"):
        quantise_modelopt(torch.ones(2, 32, dtype=torch.float64), 1.0)


def test_the_largest_magnitude() -> None:
    assert largest_finite(torch.tensor([1.0, -7.5, 3.0])) == 7.5
    assert largest_finite(torch.zeros(4).bfloat16()) == 0.0
    assert largest_magnitude_or_nan(torch.ones(0)) == 0.0
    assert largest_magnitude_or_nan(torch.tensor([1.0, float("-inf")])) == float("inf")
    assert np.isnan(largest_magnitude_or_nan(torch.tensor([1.0, float("-nan"), float("inf")])))
