"""MX and FP8 blocks against the rules of DeepSeek-V4's kernels, written out for one block."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from degarble.harness.formats import codec
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    FP8_1X128_F32,
    FP8_1X128_UE8M0,
    FP8_128X128_F32,
    FP8_128X128_UE8M0,
    MXFP4,
    MXFP8,
    UE8M0,
    Rounding,
)
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.suites.formats.block_cases import ordinary_cases

if TYPE_CHECKING:
    from degarble.harness.formats.number_formats import BlockFormat

F = np.float32
ONE = F(1)


def power_of_two_above(number: np.float32) -> np.float32:
    """2 ** ceil(log2(number)) from the bits, as DeepSeek's kernel computes it."""
    bits = int(number.view(np.uint32))
    exponent = (bits >> 23) - 127 + (1 if bits & 0x7FFFFF else 0)
    return F(2.0**exponent)


FLOORS = {"MXFP4": F(6 * 2.0**-126), "MXFP8": F(0), "FP8": F(1e-4)}


def fp_block_by_hand(block: list[float], fmt: BlockFormat) -> tuple[np.float32, list[int]]:
    """Scale and codes of one block, as DeepSeek-V4's act_quant and fp4_act_quant have them."""
    floor = FLOORS.get(fmt.name, FLOORS["FP8"])
    amax = max(F(max(abs(x) for x in block)), floor)
    scale = amax * (ONE / F(fmt.element.largest))
    if fmt.scale == UE8M0:
        scale = max(power_of_two_above(scale), F(2.0**-127)) if scale else F(2.0**-127)
    bound = fmt.element.largest
    ratios = [min(max(float(F(x) / scale), -bound), bound) for x in block]
    return scale, [codec.encode(ratio, fmt.element) for ratio in ratios]


@pytest.mark.parametrize(
    "fmt", [MXFP4, MXFP8, FP8_1X128_F32, FP8_1X128_UE8M0], ids=lambda fmt: fmt.name
)
def test_rows_of_blocks_equal_the_hand(fmt: BlockFormat, seed: int) -> None:
    width = fmt.block[1]
    for case, values in ordinary_cases(seed).items():
        if values.shape[-1] % width:
            continue
        values = values[:4]  # noqa: PLW2901
        q = quantise(values, fmt)
        scales, codes = [], []
        for block in values.float().reshape(-1, width).tolist():
            scale, block_codes = fp_block_by_hand(block, fmt)
            scales.append(float(scale))
            codes += block_codes
        assert q.scale_values().flatten().tolist() == scales, case
        assert q.element_codes().flatten().tolist() == codes, case


@pytest.mark.parametrize("fmt", [FP8_128X128_F32, FP8_128X128_UE8M0], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (129, 140)])
def test_square_blocks_equal_the_hand_even_when_cut_off(
    fmt: BlockFormat, shape: tuple[int, int], seed: int
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    q = quantise(values, fmt)
    scales, codes = q.scale_values(), q.element_codes()
    for row in range(0, shape[0], 128):
        for column in range(0, shape[1], 128):
            block = values[row : row + 128, column : column + 128]
            scale, expected = fp_block_by_hand(block.flatten().tolist(), fmt)
            assert scales[row // 128, column // 128].item() == scale
            got = codes[row : row + 128, column : column + 128].flatten().tolist()
            assert got == expected
    assert q.codes.shape == shape
    assert dequantise(q).shape == shape


@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=lambda fmt: fmt.name)
def test_zeros_of_every_format(fmt: BlockFormat) -> None:
    q = quantise(torch.zeros(128, 128), fmt)
    assert (q.element_codes() == 0).all()
    assert (dequantise(q) == 0).all()
    expected = {
        "NVFP4": 0.0,
        "MXFP4": 2.0**-126,  # the floor 6 * 2**-126, over 6
        "MXFP8": 2.0**-127,  # byte 0: there is no smaller scale
        "FP8_128X128_F32": float(F(1e-4) * (ONE / F(448))),
        "FP8_1X128_F32": float(F(1e-4) * (ONE / F(448))),
        "FP8_128X128_UE8M0": 2.0**-22,
        "FP8_1X128_UE8M0": 2.0**-22,
    }
    assert set(q.scale_values().flatten().tolist()) == {expected[fmt.name]}


@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=lambda fmt: fmt.name)
def test_nan_does_not_move_a_scale(fmt: BlockFormat, seed: int) -> None:
    values = torch.randn(128, 128, generator=torch.Generator().manual_seed(seed))
    poisoned = values.clone()
    poisoned[5, 7] = torch.nan
    values[5, 7] = 0.0
    before, after = quantise(values, fmt), quantise(poisoned, fmt)
    assert torch.equal(before.block_scale, after.block_scale)
    assert after.element_codes()[5, 7].item() == (7 if fmt.packed else 0x7F)
    assert (before.element_codes() != after.element_codes()).sum().item() == 1


def test_infinities_of_the_other_formats() -> None:
    values = torch.ones(1, 128)
    values[0, 3] = torch.inf
    saturated = quantise(values, FP8_1X128_UE8M0)
    assert saturated.block_scale.tolist() == [[0xFE]]
    assert saturated.codes[0, 3].item() == 0x7E
    poisoned = quantise(values, FP8_1X128_F32)
    assert poisoned.block_scale.isinf().all()
    assert dequantise(poisoned).isnan().all()


def test_a_power_of_two_is_not_rounded_up() -> None:
    # float32(1/448) lies above 1/448, so 448 * 2**k times it must still give 2**k exactly.
    for fmt, largest in ((FP8_1X128_UE8M0, 448.0), (MXFP8, 448.0), (MXFP4, 6.0)):
        values = torch.zeros(3, 128)
        values[:, 0] = largest * torch.tensor([0.5, 1.0, 2.0])
        scale = quantise(values, fmt).scale_values()[:, 0]
        assert scale.tolist() == [0.5, 1.0, 2.0], fmt.name
        values[:, 0] *= 1 + 2.0**-20
        assert quantise(values, fmt).scale_values()[:, 0].tolist() == [1.0, 2.0, 4.0], fmt.name


def test_the_scale_rounding_is_detected_by_these_checks(seed: int) -> None:
    # The planted fault: floor instead of ceiling must differ from the hand.
    rule = CANONICAL.rule_for(MXFP8)
    floored = replace(
        CANONICAL, rules=(replace(rule, scale_rounding=Rounding.DOWN),), name="floored"
    )
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    wrong = quantise(values, MXFP8, floored)
    assert not torch.equal(wrong.block_scale, quantise(values, MXFP8).block_scale)
    assert (wrong.element_codes() & 0x7F == 0x7E).any(), "too small a scale saturates"
