"""Fast E2M1 against the definition: every code, every BF16 pattern, float32 by stride."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, ShapeMismatch
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.fast import nvfp4 as fast_e2m1
from degarble.harness.formats.fast.buffers import values_of
from degarble.harness.formats.fast.nvfp4 import decode_e2m1, encode_e2m1, round_e2m1
from degarble.harness.formats.number_formats import E2M1, NanRule
from degarble.suites.formats.bits import differences

DTYPES = (torch.bfloat16, torch.float32)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

ALL_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
# A prime stride over all float32 patterns, infinities and NaN included.
SOME_FLOAT32 = torch.arange(-(1 << 31), 1 << 31, 40_009).to(torch.int32).view(torch.float32)
PATTERNS = {torch.bfloat16: ALL_BF16, torch.float32: SOME_FLOAT32}


@by_dtype
def test_every_pattern_gets_the_code_of_the_definition(dtype: torch.dtype) -> None:
    expected = encode_array(PATTERNS[dtype], E2M1, nan=NanRule.LARGEST)
    assert differences(encode_e2m1(PATTERNS[dtype]), expected) == ""


@by_dtype
def test_midpoints_go_to_even(dtype: torch.dtype) -> None:
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0], dtype=dtype)
    assert encode_e2m1(midpoints).tolist() == [0, 2, 2, 4, 4, 6, 6, 7]
    assert encode_e2m1(-midpoints).tolist() == [8, 10, 10, 12, 12, 14, 14, 15]


@by_dtype
def test_every_byte_decodes_by_its_lower_nibble(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    expected = decode_array(codes & 15, E2M1).to(dtype)
    assert differences(decode_e2m1(codes, dtype), expected) == ""


@by_dtype
def test_rounding_is_encoding_and_decoding(dtype: torch.dtype) -> None:
    values = PATTERNS[dtype]
    expected = decode_e2m1(encode_e2m1(values), dtype)
    assert differences(round_e2m1(values), expected) == ""
    assert differences(round_e2m1(round_e2m1(values)), expected) == ""


@by_dtype
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 33, 3 * 131_072 + 5])
def test_lengths_that_are_no_whole_vectors(
    dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_e2m1, "GRAIN_UNITS", 1 << 13)
    values = SOME_FLOAT32[:count].to(dtype) if count < 100 else torch.full((count,), -2.5).to(dtype)
    codes = encode_e2m1(values, threads=3)
    assert differences(codes, encode_array(values, E2M1, nan=NanRule.LARGEST)) == ""
    decoded = decode_e2m1(codes, dtype, threads=3)
    assert differences(decoded, decode_array(codes, E2M1).to(dtype)) == ""
    assert differences(round_e2m1(values, threads=3), decoded) == ""


@by_dtype
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


def test_a_wrong_table_entry_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    table = values_of(E2M1).copy()
    table[5] = 3.5
    monkeypatch.setattr(fast_e2m1, "values_of", lambda _fmt: table)
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
