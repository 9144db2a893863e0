"""Rounding of cache rows and indexer operands against the formats: every code, every block."""

from __future__ import annotations

import math

import pytest
import torch

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.number_formats import E2M1, E4M3, FP8_1X128_UE8M0, MXFP4
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.references import numerics
from degarble.references.numerics import IndexerFormat, KeyValueCache, Numerics


@pytest.mark.parametrize(
    ("fmt", "through"),
    [(E2M1, numerics.round_e2m1), (E4M3, numerics.round_e4m3)],
    ids=["e2m1", "e4m3"],
)
def test_elements_round_as_the_codec_does(fmt: object, through: object) -> None:
    codes = torch.arange(16 if fmt is E2M1 else 256, dtype=torch.uint8)
    values = decode_array(codes, fmt)  # type: ignore[arg-type]
    finite = values[torch.isfinite(values)].sort().values
    middles = (finite[1:] + finite[:-1]) / 2  # ties, and both neighbours of each
    around = torch.cat([torch.nextafter(middles, torch.tensor(s * math.inf)) for s in (-1, 1)])
    x = torch.cat((finite, middles, around, torch.tensor([-1e9, 1e9, 500.0, -7.0])))
    expected = decode_array(encode_array(x, fmt), fmt)  # type: ignore[arg-type]
    assert torch.equal(through(x), expected)  # type: ignore[operator]


def test_scales_are_rounded_up_to_powers_of_two() -> None:
    for exponent in range(-120, 120):
        power = 2.0**exponent
        x = torch.tensor([power, power * (1 + 2**-23), power * 1.5])
        assert numerics.power_of_two_above(x).tolist() == [power, 2 * power, 2 * power]


def blocks(seed: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, width, generator=generator)
    x = x * torch.exp2(torch.randint(-30, 20, (64, 1), generator=generator).float())
    x[0] = 0.0
    x[1] = 1e-6  # below the floor of FP8
    x[2, 0] = 448.0 * 2**5  # an exact power of two times the largest
    return x.bfloat16().float()


def test_fp8_blocks_equal_the_format(seed: int) -> None:
    x = blocks(seed, 256)
    expected = dequantise(quantise(x, FP8_1X128_UE8M0), torch.float32)
    assert torch.equal(numerics.through_fp8(x, 128), expected)
    narrow = numerics.through_fp8(x, 64)
    for part in range(0, 256, 64):  # a block of 64 is a block of 128 whose other half is zero
        padded = torch.nn.functional.pad(x[:, part : part + 64], (0, 64))
        alone = dequantise(quantise(padded, FP8_1X128_UE8M0), torch.float32)
        assert torch.equal(narrow[:, part : part + 64], alone[:, :64])


def test_mxfp4_blocks_equal_the_format(seed: int) -> None:
    x = blocks(seed, 128)
    assert torch.equal(numerics.through_mxfp4(x), dequantise(quantise(x, MXFP4), torch.float32))


def test_floor_of_the_scale_matters_for_tiny_blocks_only() -> None:
    x = torch.tensor([[0.02, 6e-7, 0.01, -0.01], [0.05, 1.0, -2.0, 6e-7]])
    amax, scale = (numerics.through_fp8(x, 4, scale_floored=floored) for floored in (False, True))
    assert torch.equal(amax[1], scale[1])
    assert not torch.equal(amax[0], scale[0])
    # 0.02 / 448 becomes 2^-14, the floor 2^-13; E4M3's last step, 2^-9, grows with the scale.
    assert float(amax[0, 1]) == round(6e-7 * 2**23) * 2.0**-23
    assert float(scale[0, 1]) == round(6e-7 * 2**22) * 2.0**-22


def test_float32_scales_reach_the_largest_code(seed: int) -> None:
    x = blocks(seed, 128)
    made = numerics.through_fp8_f32(x, 128)
    amax = x.abs().amax(-1)
    near = made.abs().amax(-1)[amax > 1e-3]
    assert torch.allclose(near, amax[amax > 1e-3], rtol=1e-6)
    assert not torch.equal(made, numerics.through_fp8(x, 128))


def test_nvfp4_rows_have_e4m3_scales_with_a_floor() -> None:
    x = torch.zeros(3, 16)
    x[1, 0] = 6 * 2.0**-9
    x[2, :2] = torch.tensor([5000.0, 6.0])
    made = numerics.through_nvfp4_row(x)
    assert not made[0].any()
    assert float(made[1, 0]) == 6 * 2.0**-9
    assert made[2, :2].tolist() == [6 * 448.0, 0.0]  # the scale saturates, so does the value
    rows = torch.randn(20, 32, generator=torch.Generator().manual_seed(3))
    scale = decode_array(encode_array(rows.reshape(20, 2, 16).abs().amax(-1) / 6, E4M3), E4M3)
    codes = encode_array(rows.reshape(20, 2, 16) / scale[..., None], E2M1)
    expected = (decode_array(codes, E2M1) * scale[..., None]).reshape(20, 32)
    assert torch.equal(numerics.through_nvfp4_row(rows), expected)


@pytest.mark.parametrize("kind", list(KeyValueCache))
def test_cache_rows_are_rounded_by_switch_and_never_in_the_definition(
    kind: KeyValueCache, seed: int
) -> None:
    x = blocks(seed, 128).bfloat16()
    exact = Numerics.definition(kv_cache=kind)
    assert numerics.through_cache(x.double(), 64, exact).equal(x.double())
    made = numerics.through_cache(x, 64, Numerics.bf16(kv_cache=kind))
    assert made.dtype is torch.bfloat16
    assert torch.equal(made, x) == (kind is KeyValueCache.EXACT)
    if kind is KeyValueCache.FP8:
        assert torch.equal(made, numerics.through_fp8(x, 64).bfloat16())
        floored = Numerics.bf16(kv_cache=kind, cache_scale_floored=True)
        assert not torch.equal(made, numerics.through_cache(x, 64, floored))


@pytest.mark.parametrize("kind", list(IndexerFormat))
def test_indexer_operands_are_rounded_by_switch(kind: IndexerFormat, seed: int) -> None:
    x = blocks(seed, 128).bfloat16()
    made = numerics.through_indexer(x, Numerics.bf16(indexer_format=kind))
    expected = {
        IndexerFormat.EXACT: x.float(),
        IndexerFormat.FP8: numerics.through_fp8(x, 128),
        IndexerFormat.MXFP4: numerics.through_mxfp4(x),
    }[kind]
    assert torch.equal(made, expected.bfloat16())
    assert numerics.through_indexer(x, Numerics.definition(indexer_format=kind)).equal(x)


def test_rows_that_blocks_do_not_fill_are_refused() -> None:
    with pytest.raises(ShapeMismatch, match="multiple of the 64-wide blocks"):
        numerics.through_fp8(torch.zeros(2, 100), 64)
