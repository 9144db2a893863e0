"""MXFP4 to NVFP4 without loss, by every exponent, against float64 of the formats' definition."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.checkpoint.transform import nvfp4_scales
from degarble.harness.checkpoint.transform.nvfp4_scales import Exponents
from degarble.harness.formats.codec import decode_array, unpack_nibbles
from degarble.harness.formats.number_formats import E2M1, E4M3, UE8M0


def codes_of(seed: int, rows: int, blocks: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed % 2**63)
    return torch.randint(0, 256, (rows, blocks * 16), generator=generator, dtype=torch.uint8)


def values_of(codes: torch.Tensor, scales: torch.Tensor, tensor_scale: float) -> torch.Tensor:
    elements = decode_array(unpack_nibbles(codes), E2M1).double()
    return elements.reshape(*scales.shape, -1) * scales.double()[..., None] * tensor_scale


@pytest.mark.parametrize("high", [-126, -100, 0, 3, 127])
@pytest.mark.parametrize("width", [0, 1, 16, 17])
def test_every_number_stays_itself(seed: int, high: int, width: int) -> None:
    low = max(high - width, -127)
    codes = codes_of(seed, 6, 24)
    scales = (torch.arange(6 * 24).reshape(6, 24) % (high - low + 1) + low + 127).byte()
    codes[1, 16:32] = 0x80  # a block of zeros of both signs, with a scale far below
    scales[1, 1] = 0
    exponents = nvfp4_scales.exponents_of(codes, scales)
    assert exponents == Exponents(low, high)
    assert nvfp4_scales.is_exact(exponents)
    tensor_scale = nvfp4_scales.tensor_scale_of(exponents)
    block_scale = nvfp4_scales.block_scales_of(scales, exponents)
    assert block_scale.shape == (6, 48)
    before = values_of(codes, decode_array(scales, UE8M0), 1.0)
    after = values_of(codes, decode_array(block_scale, E4M3), tensor_scale)
    assert torch.equal(before.reshape(-1), after.reshape(-1))
    assert torch.equal(before.signbit().reshape(-1), after.signbit().reshape(-1))
    assert nvfp4_scales.is_lossless(codes, scales, block_scale, tensor_scale)


def test_the_proof_sees_one_wrong_byte(seed: int) -> None:
    codes = codes_of(seed, 4, 4) | 0x11
    scales = torch.full((4, 4), 120, dtype=torch.uint8)
    exponents = nvfp4_scales.exponents_of(codes, scales)
    block_scale = nvfp4_scales.block_scales_of(scales, exponents)
    scale = nvfp4_scales.tensor_scale_of(exponents)
    assert not nvfp4_scales.is_lossless(codes, scales, block_scale, scale * 2)
    block_scale[3, 5] -= 8
    assert not nvfp4_scales.is_lossless(codes, scales, block_scale, scale)


def test_eighteen_octaves_are_too_many(seed: int) -> None:
    codes = codes_of(seed, 1, 2) | 0x11
    assert not nvfp4_scales.is_exact(
        nvfp4_scales.exponents_of(codes, torch.tensor([[100, 118]]).byte())
    )
    assert nvfp4_scales.is_exact(
        nvfp4_scales.exponents_of(codes, torch.tensor([[100, 117]]).byte())
    )
    parts: list[Exponents | None] = [Exponents(-3, 5), None, Exponents(-12, 0)]
    assert nvfp4_scales.join_exponents(parts) == Exponents(-12, 5)
    assert nvfp4_scales.is_exact(nvfp4_scales.join_exponents(parts))
    assert not nvfp4_scales.is_exact(nvfp4_scales.join_exponents([*parts, Exponents(-13, -13)]))


def test_zeros_fit_anywhere() -> None:
    codes, scales = torch.full((2, 32), 0x08, dtype=torch.uint8), torch.zeros(2, 2).byte()
    assert nvfp4_scales.exponents_of(codes, scales) is None
    assert nvfp4_scales.is_exact(None)
    assert nvfp4_scales.join_exponents([None, None]) is None
    block_scale = nvfp4_scales.block_scales_of(scales, None)
    assert nvfp4_scales.is_lossless(codes, scales, block_scale, nvfp4_scales.tensor_scale_of(None))


def test_a_nan_scale_is_refused(seed: int) -> None:
    with pytest.raises(InvalidArgument, match="NaN"):
        nvfp4_scales.exponents_of(codes_of(seed, 1, 2), torch.tensor([[255, 3]]).byte())
