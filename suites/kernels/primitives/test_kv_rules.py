"""Rules of cache entries: scales, quotients and codes of every BF16 number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from degarble.harness.formats import scalar_ops as codecs
from degarble.kernels.primitives import kv_problem as facts
from degarble.kernels.primitives import kv_problem as rules
from degarble.references import numerics

ALL_BF16 = torch.arange(0x8000, dtype=torch.int64)  # magnitudes


def test_the_fp8_scale_of_every_magnitude() -> None:
    code = rules.fp8_scale_code(ALL_BF16)
    amax = codecs.bf16_decode(ALL_BF16)
    finite = ALL_BF16 < 0x7F80
    scaled = amax[finite].clamp(min=numerics.FP8_FLOOR) * (1.0 / numerics.E4M3_LARGEST)
    want = numerics.power_of_two_above(scaled)
    assert torch.equal(codecs.ue8m0_decode(code[finite]), want)
    assert torch.equal(rules.fp8_factor(code[finite]), 1 / want)
    assert (code[~finite] == 255).all()
    assert rules.fp8_factor(code[~finite]).isnan().all()


def test_the_float32_scale_of_every_magnitude() -> None:
    amax, finite = codecs.bf16_decode(ALL_BF16), ALL_BF16 < 0x7F80
    for name, width, powers in (
        ("fp8-v32", 576, False), ("fp8-v32-ue8m0", 576, True), (facts.KEY, 128, True),
    ):  # fmt: skip
        entry = facts.entry_format(name, width)
        assert entry.powers == powers
        scale = rules.fp32_scale_bits(ALL_BF16, entry).int().view(torch.float32)
        want = amax[finite].clamp(min=numerics.FP8_FLOOR) / torch.tensor(numerics.E4M3_LARGEST)
        if powers:
            scaled = amax[finite].clamp(min=numerics.FP8_FLOOR) * (1.0 / numerics.E4M3_LARGEST)
            want = numerics.power_of_two_above(scaled)
        assert torch.equal(scale[finite], want)
        assert scale[~finite].isnan().all()


def test_the_nvfp4_scale_of_every_magnitude() -> None:
    bits = ALL_BF16[ALL_BF16 <= 0x7F80]
    got = codecs.e4m3_encode(rules.nvfp4_scale_number(codecs.bf16_decode(bits)))
    amax = codecs.bf16_decode(bits).clamp(min=6.0 * numerics.NVFP4_SCALE_FLOOR)
    want = numerics.round_e4m3(amax / 6.0).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(got, want.to(got.dtype))


@pytest.mark.parametrize("off", [-2, 0, 2])
def test_every_quotient_rounds_as_the_true_one(off: int) -> None:
    """All BF16 below saturation, all scales, and estimates that are off by two steps."""
    code = torch.arange(1, 0x7F)[:, None]
    scale = codecs.e4m3_decode(code)
    estimate = ((1 / scale).view(torch.int32) + off).view(torch.float32)
    magnitudes = torch.cat((ALL_BF16[:1], ALL_BF16[0x3A00:0x4528]))  # others are 0, or bounded
    number = codecs.bf16_decode(torch.cat((magnitudes, magnitudes + 0x8000)))[None]
    most = scale * codecs.E2M1_MAX
    assert torch.equal(most, codecs.bf16_round(most))
    bounded = torch.copysign(number.abs().minimum(most), number)
    inverse = rules.nvfp4_inverse(scale, estimate)
    assert (inverse[1] > 0).all()
    got = rules.nvfp4_quotient(bounded, inverse)
    assert (got.abs() <= codecs.E2M1_MAX).all()
    want = (number.double() / scale.double()).float()
    assert torch.equal(codecs.e2m1_encode(got), codecs.e2m1_encode(want))
    product = codecs.e2m1_encode(number * estimate)
    assert (product != codecs.e2m1_encode(got)).any()  # hence the second term


def test_words_of_codes_decode_in_python_and_on_tensors() -> None:
    for scale in (2.0**-9, 1.0, 448.0):
        for word in (0x7654_3210, 0xFEDC_BA98):
            want = [codecs.e2m1_decode(word >> 4 * i & 15) * np.float32(scale) for i in range(8)]
            got = rules.e2m1_numbers(word, np.float32(scale))
            assert [float(n) for n in got] == [float(n) for n in want]
            assert [np.signbit(n) for n in got] == [np.signbit(n) for n in want]
            tensors = rules.e2m1_numbers(torch.tensor([word]), torch.tensor([scale]))
            assert [float(n) for n in tensors] == [float(n) for n in got]
