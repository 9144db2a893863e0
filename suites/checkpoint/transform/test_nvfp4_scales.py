"""Scales of NVFP4 by rule and without loss, and quick decoding, against the definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.checkpoint.transform import nvfp4_scales
from degarble.harness.checkpoint.transform.nvfp4_scales import (
    Errors,
    Exponents,
    ScaleRule,
    quantise_rows,
    tensor_scale,
)
from degarble.harness.checkpoint.transform.source import row_values
from degarble.harness.formats.codec import decode_array, unpack_nibbles
from degarble.harness.formats.dialects import CANONICAL, MODELOPT
from degarble.harness.formats.number_formats import (
    E2M1,
    E4M3,
    FP8_128X128_F32,
    FP8_128X128_UE8M0,
    MXFP4,
    NVFP4,
    UE8M0,
)
from degarble.harness.formats.quantise import dequantise_definition, quantise
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from degarble.harness.formats.number_formats import BlockFormat


# --------------------------------------------------------------------------------------------------
# Scale rules: each against the dialect's definition or the errors that it promises.


def weights(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed % 2**63)
    return torch.randn(128, 512, generator=generator).bfloat16() * 0.02


def errors_of(values: torch.Tensor, rule: ScaleRule, step: int = 128) -> Errors:
    scale, errors = tensor_scale(float(values.abs().max()), rule), Errors()
    for begin in range(0, values.shape[0], step):
        rows = values[begin : begin + step]
        errors.add(begin, rows, quantise_rows(rows, scale, rule), scale)
    return errors


def test_amax_is_modelopts_own_rule(seed: int) -> None:
    values = weights(seed)
    scale = tensor_scale(float(values.abs().max()), ScaleRule.AMAX)
    nvfp4_rows, theirs = (
        quantise_rows(values, scale, ScaleRule.AMAX),
        quantise(values, NVFP4, MODELOPT),
    )
    assert theirs.tensor_scale is not None
    assert float(theirs.tensor_scale) == scale
    assert torch.equal(nvfp4_rows.codes, theirs.codes)
    assert torch.equal(nvfp4_rows.block_scale, theirs.block_scale)


def test_searching_pays_and_nothing_beats_the_floor(seed: int) -> None:
    errors = {rule: errors_of(weights(seed), rule) for rule in ScaleRule}
    relative = {rule: error.relative for rule, error in errors.items()}
    assert relative[ScaleRule.MSE] < relative[ScaleRule.FOUR_OVER_SIX] < relative[ScaleRule.AMAX]
    assert 0.09 < relative[ScaleRule.AMAX] < 0.10
    over = {rule: error.over_floor or 0.0 for rule, error in errors.items()}
    assert over[ScaleRule.MSE] == 1.0
    assert 1.0 < over[ScaleRule.FOUR_OVER_SIX] < over[ScaleRule.AMAX] < 1.25


def test_four_over_six_leaves_room_for_four(seed: int) -> None:
    values = weights(seed)
    scale = tensor_scale(float(values.abs().max()), ScaleRule.FOUR_OVER_SIX)
    nvfp4_rows = quantise_rows(values, scale, ScaleRule.FOUR_OVER_SIX)
    six = quantise_rows(values, scale, ScaleRule.AMAX)
    assert int(nvfp4_rows.block_scale.max()) <= 0x7C  # 384 = 1.5 * 256
    assert int(six.block_scale.max()) == 0x78  # 256
    changed = nvfp4_rows.block_scale != six.block_scale
    assert 0.1 < float(changed.double().mean()) < 0.9
    assert bool((nvfp4_rows.block_scale[changed] > six.block_scale[changed]).all())


def test_a_halved_scale_shows_above_the_floor(seed: int) -> None:
    values = weights(seed)
    scale = tensor_scale(float(values.abs().max()), ScaleRule.AMAX)
    nvfp4_rows = quantise_rows(values, scale, ScaleRule.AMAX)
    damaged = nvfp4_rows._replace(
        block_scale=nvfp4_rows.block_scale - 8
    )  # the planted fault: an octave less
    errors = Errors()
    errors.add(0, values, damaged, scale)
    assert (errors.over_floor or 0.0) > 2


def test_row_blocks_sample_the_same_rows(seed: int) -> None:
    whole = errors_of(weights(seed), ScaleRule.AMAX)
    parts = errors_of(weights(seed), ScaleRule.AMAX, step=48)
    assert parts.over_floor == pytest.approx(whole.over_floor, rel=1e-12)
    assert parts.relative == pytest.approx(whole.relative, rel=1e-12)


def test_zeros_have_a_scale_and_no_error() -> None:
    values = torch.zeros(32, 64)
    errors = errors_of(values, ScaleRule.AMAX)
    assert (errors.relative, errors.over_floor) == (0.0, None)
    nvfp4_rows = quantise_rows(values, tensor_scale(0.0, ScaleRule.MSE), ScaleRule.MSE)
    assert not nvfp4_rows.codes.any()
    assert nvfp4_rows.block_scale.unique().tolist() == [0x38]


def test_what_no_weight_has_is_refused() -> None:
    for amax in (1e-30, 1e35):
        with pytest.raises(InvalidArgument, match="largest magnitude"):
            tensor_scale(amax, ScaleRule.AMAX)
    values = torch.ones(1, 16)
    values[0, 3] = float("nan")
    for rule in ScaleRule:
        with pytest.raises(InvalidArgument, match="finite"):
            quantise_rows(values, 1.0, rule)


# --------------------------------------------------------------------------------------------------
# MXFP4 to NVFP4 without loss, by every exponent, against float64 of the formats' definition.


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


def test_the_proof_detects_one_wrong_byte(seed: int) -> None:
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


# --------------------------------------------------------------------------------------------------
# Quick decoding of rows: the same bits as the definition, for every format a source may have.


@pytest.mark.parametrize(
    "fmt", [MXFP4, FP8_128X128_UE8M0, FP8_128X128_F32, NVFP4], ids=lambda fmt: fmt.name
)
def test_rows_are_the_definition(seed: int, fmt: BlockFormat) -> None:
    generator = torch.Generator().manual_seed(seed % 2**63)
    values = torch.randn(200, 320, generator=generator) * torch.arange(1, 201)[:, None]
    made = quantise(values, fmt, MODELOPT if fmt == NVFP4 else CANONICAL)
    expected = dequantise_definition(made, torch.float32)
    found = row_values(Weight.of(made))
    assert found.dtype is torch.float32
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    made.block_scale.view(torch.uint8).reshape(-1)[0] ^= 1  # the planted fault
    assert not torch.equal(row_values(Weight.of(made)), expected)


def test_every_mxfp4_number(seed: int) -> None:
    del seed
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(255, 32, generator=generator)
    made = quantise(values, MXFP4)
    made.block_scale[:, 0] = torch.arange(255).byte()  # all scales but NaN
    made.codes[:] = torch.arange(16).byte() * 17
    found = row_values(Weight.of(made))
    expected = dequantise_definition(made, torch.float32)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_plain_values_keep_their_dtype_where_that_is_exact() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        value = torch.ones(2, 16, dtype=dtype)
        assert row_values(Weight(value=value)) is value
    assert row_values(Weight(value=torch.ones(2, 16).half())).dtype is torch.float32
