"""The records' derived numbers against torch and ml_dtypes, and the registry."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import pytest
import torch

from degarble.harness.base.errors import UnknownName
from degarble.harness.formats.codec import decode, is_nan
from degarble.harness.formats.number_formats import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    ELEMENT_FORMATS,
    FP16,
    FP32,
    UE8M0,
    ElementFormat,
    element_format,
)

FORMATS = list(ELEMENT_FORMATS.values())
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)

TORCH = {
    BF16.name: torch.bfloat16,
    FP16.name: torch.float16,
    FP32.name: torch.float32,
    E4M3.name: torch.float8_e4m3fn,
    E5M2.name: torch.float8_e5m2,
}
ML_DTYPES: dict[str, Any] = {
    E2M1.name: ml_dtypes.float4_e2m1fn,
    E4M3.name: ml_dtypes.float8_e4m3fn,
    E5M2.name: ml_dtypes.float8_e5m2,
    UE8M0.name: ml_dtypes.float8_e8m0fnu,
    BF16.name: ml_dtypes.bfloat16,
}


@pytest.mark.parametrize("name", TORCH)
def test_extremes_equal_torch(name: str) -> None:
    info, fmt = torch.finfo(TORCH[name]), ELEMENT_FORMATS[name]
    assert (fmt.largest, fmt.smallest_normal) == (info.max, info.tiny)
    assert fmt.bits == info.bits
    assert 2.0**-fmt.mantissa_bits == info.eps


@pytest.mark.parametrize("name", ML_DTYPES)
def test_extremes_equal_ml_dtypes(name: str) -> None:
    finfo: Any = ml_dtypes.finfo  # untyped upstream
    info, fmt = finfo(ML_DTYPES[name]), ELEMENT_FORMATS[name]
    assert fmt.largest == float(info.max)
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.smallest == float(info.smallest_subnormal)
    assert fmt.mantissa_bits == info.nmant


@by_format
def test_derived_numbers_equal_what_the_codes_decode_to(fmt: ElementFormat) -> None:
    assert decode(fmt.largest_code, fmt) == fmt.largest
    assert decode(1 if fmt.subnormals else 0, fmt) == fmt.smallest
    normal = 1 << fmt.mantissa_bits if fmt.subnormals else 0
    assert decode(normal, fmt) == fmt.smallest_normal
    sign_bits = 1 if fmt.signed else 0
    assert fmt.bits == sign_bits + fmt.exponent_bits + fmt.mantissa_bits
    assert fmt.magnitude_mask | fmt.sign_mask == fmt.code_count - 1


@by_format
def test_what_follows_the_largest_code_is_no_finite_number(fmt: ElementFormat) -> None:
    after = fmt.largest_code + 1
    if fmt.infinity_code is not None:
        assert after == fmt.infinity_code
    elif fmt.nan_code is not None:
        assert after == fmt.nan_code
    else:
        assert after == fmt.sign_mask
    assert fmt.nan_code is None or is_nan(fmt.nan_code, fmt)


def test_formats_are_found_by_name_and_typos_get_a_suggestion() -> None:
    assert element_format("E4M3") is E4M3
    assert list(ELEMENT_FORMATS) == ["E2M1", "E4M3", "E5M2", "UE8M0", "BF16", "FP16", "FP32"]
    with pytest.raises(UnknownName, match="Did you mean E4M3"):
        element_format("E4M3FN")


def test_a_planted_bias_is_detected() -> None:
    facts = {field: getattr(E4M3, field) for field in ElementFormat.__dataclass_fields__}
    planted = ElementFormat(**{**facts, "bias": 8})
    assert planted.largest != torch.finfo(torch.float8_e4m3fn).max
