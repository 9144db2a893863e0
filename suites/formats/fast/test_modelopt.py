"""ModelOpt's dialect at speed: bit for bit the definition; the search against one written plainly.

The package itself stands behind the definition: test_dialects_oracles.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.harness.formats.codec import decode_array, encode_array, pack_nibbles, unpack_nibbles
from degarble.harness.formats.dialects import MODELOPT
from degarble.harness.formats.fast import nvfp4 as fast_modelopt
from degarble.harness.formats.fast.nvfp4 import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    ScaleSearch,
    largest_finite,
    largest_magnitude_or_nan,
    measure_error,
    quantise_modelopt,
    search_modelopt,
)
from degarble.harness.formats.number_formats import E2M1, E4M3, NVFP4
from degarble.harness.formats.quantise import quantise, quantise_definition
from degarble.harness.formats.scale_rules import TensorScales

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
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


@DTYPES
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


@DTYPES
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
    real = fast_modelopt.quantise_modelopt

    def told(given: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(1)
        return real(given, scale)

    monkeypatch.setattr(fast_modelopt, "quantise_modelopt", told)
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


@DTYPES
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


@DTYPES
def test_measured_errors_are_those_of_the_decoded_values(seed: int, dtype: torch.dtype) -> None:
    values = hard_values(seed, dtype)
    scale = float(values.abs().max().float() / 2688)
    codes, scales = quantise_modelopt(values, scale)
    elements = decode_array(unpack_nibbles(codes), E2M1).double().reshape(*scales.shape, 16)
    decoded = elements * decode_array(scales, E4M3).double()[..., None] * float(np.float32(scale))
    found = measure_error(values, codes, scales, scale)
    assert found.energy == pytest.approx(float(values.double().square().sum()), rel=1e-12)
    error = float((values.double() - decoded.reshape(values.shape)).square().sum())
    assert found.error == pytest.approx(error, rel=1e-12)
    codes[-1, 7] ^= 0x70  # a planted fault
    assert measure_error(values, codes, scales, scale).error > found.error * (1 + 1e-9)


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
