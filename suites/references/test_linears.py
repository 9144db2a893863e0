"""Linears, cache roundings and compiled decoding against the formats and the readable forms."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import ShapeMismatch, UnknownName
from degarble.harness.engine.recover.operands import operand_of_input
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    E2M1,
    E4M3,
    FP8_1X128_UE8M0,
    FP8_ROW,
    MXFP4,
    NVFP4,
)
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.harness.formats.weight import Weight
from degarble.references import attention, compiled, linears, numerics
from degarble.references.numerics import CodeSums, IndexerFormat, KeyValueCache, Numerics, compiles

if TYPE_CHECKING:
    from torch import Tensor


# --------------------------------------------------------------------------------------------------
# Linears with and without codes, and the quantisation in front of them, by recipe format.

FORMATS = ("NVFP4", "MXFP8", "FP8_1X128_UE8M0", "FP8_1X128_F32")


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_codes_stand_for_the_values_of_the_format(name: str, dtype: torch.dtype, seed: int) -> None:
    x = noise(6, 256, seed=seed).bfloat16()
    scale = torch.tensor(0.003) if name == "NVFP4" else None
    made = linears.quantise_activations(x, name, scale)
    given = {"decode_scale": scale} if scale is not None else {}
    expected = dequantise(quantise(x, BLOCK_FORMATS[name], **given), dtype)  # type: ignore[arg-type]
    assert torch.equal(linears.activation_values(made, name, dtype), expected)
    assert made["codes"].dtype is torch.uint8


@pytest.mark.parametrize("sums", [CodeSums.HOPPER, CodeSums.HOPPER_IN_STAGES])
def test_each_rank_sums_its_own_part_of_codes(sums: CodeSums, seed: int) -> None:
    """Parts of K that are no multiple of 128 wide: each begins with a stage of its own."""
    ranks, width = 2, 288
    x, w = noise(3, ranks * width, seed=seed), noise(4, ranks * width, seed=seed + 1)
    held = Numerics.twin().with_switches(code_sums=sums)
    whole = quantise(w, FP8_ROW)
    quantiser = linears.InputQuantiser("FP8_ROW", ranks=ranks)
    made = linears.short_summed(quantiser.codes(x), "FP8_ROW", Weight.of(whole), held)
    assert made is not None
    expected = torch.zeros_like(made)
    for rank in range(ranks):
        part = slice(rank * width, (rank + 1) * width)
        own = replace(whole, codes=whole.codes[:, part].contiguous(), shape=(4, width))
        alone = replace(quantiser, ranks=1).codes(x[:, part])
        term = linears.short_summed(alone, "FP8_ROW", Weight.of(own), held)
        assert term is not None
        expected += term
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=0)
    exact = linears.matmul(quantiser(x), Weight.of(whole), replace(held, store=torch.float64))
    assert not torch.equal(made, exact)


def test_parts_of_a_token_have_scales_of_their_own(seed: int) -> None:
    x = noise(3, 64, seed=seed) * torch.tensor([1.0, 100.0]).repeat_interleave(32)
    for name in ("FP8_ROW", "INT8_ROW"):
        quantiser = linears.InputQuantiser(name, ranks=2)
        alone = replace(quantiser, ranks=1)
        parts = [alone(part) for part in x.chunk(2, -1)]
        assert torch.equal(quantiser(x), torch.cat(parts, -1))
        assert not torch.equal(quantiser(x), alone(x))
        operand = operand_of_input(quantiser.codes(x), name)
        assert torch.equal(operand.numbers, quantiser(x))


def test_without_input_scale_every_token_has_its_own(seed: int) -> None:
    x = noise(5, 64, seed=seed) * torch.tensor([1.0, 1e-3, 1e3, 0.0, 1.0])[:, None]
    made = linears.quantise_activations(x, "NVFP4", None)
    for token in range(5):
        alone = linears.quantise_activations(x[token : token + 1], "NVFP4", None)
        for part, tensor in made.items():
            assert torch.equal(tensor[token : token + 1], alone[part])
    own = x.abs().amax(-1)[:3] / (6 * 448)
    assert torch.allclose(made["tensor_scale"][:3], own, rtol=1e-6)
    values = linears.activation_values(made, "NVFP4", torch.float32)
    error = (values - x).norm(dim=-1)[:3] / x.norm(dim=-1)[:3]
    assert (error < 0.15).all()
    shared = linears.quantise_activations(x, "NVFP4", x.abs().amax() / (6 * 448))
    lost = linears.activation_values(shared, "NVFP4", torch.float32)
    assert not lost[1].any()  # one scale for all would lose the small token


def test_scales_may_belong_to_slots(seed: int) -> None:
    x, scales = noise(3, 2, 32, seed=seed), torch.rand(3, 2) + 0.01
    made = linears.quantise_activations(x, "NVFP4", scales)
    for t in range(3):
        for k in range(2):
            one = quantise(x[t, k][None], NVFP4, decode_scale=scales[t, k])
            assert torch.equal(made["codes"][t, k], one.codes[0])
            assert torch.equal(made["tensor_scale"][t, k], scales[t, k])


def test_product_of_codes_is_exact_and_rounded_once(seed: int) -> None:
    x, w = noise(4, 128, seed=seed), noise(16, 128, seed=seed + 1)
    weight = Weight.of(quantise(w, NVFP4))
    made = linears.quantise_activations(x, "NVFP4", torch.tensor(0.002))
    numerics = Numerics.twin()
    values = linears.activation_values(made, "NVFP4", numerics.products)
    out = linears.matmul(values, weight, numerics)
    exact = values.double() @ weight.values(torch.float64).T
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, exact.bfloat16())
    double = torch.matmul(values.bfloat16(), weight.values(torch.bfloat16).T)
    assert not torch.equal(out, double)  # operands rounded on the way are seen


def test_shared_input_scale_is_the_largest() -> None:
    def weight(scale: float | None) -> Weight:
        return Weight(input_scale=None if scale is None else torch.tensor([scale]))

    assert float(linears.largest_scale([weight(0.1), weight(0.3)]) or 0) == pytest.approx(0.3)
    assert linears.largest_scale([weight(0.1), weight(None)]) is None
    assert linears.largest_scale([]) is None


def test_large_weights_are_converted_in_pieces(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    x, value = noise(3, 8, seed=seed), noise(20, 8, seed=seed + 1).bfloat16()
    whole = linears.product(x, Weight(value=value), torch.float64)
    monkeypatch.setattr(linears, "_CHUNK", 24)
    weight = Weight(value=value)
    assert (linears.product(x, weight, torch.float64) - whole).abs().max() < 1e-15
    assert not weight._decoded  # nothing of it is kept
    rows = linears.table_rows(weight, torch.tensor([3, 0, 3]), torch.float32)
    assert torch.equal(rows, value[[3, 0, 3]].float())
    assert not weight._decoded


def test_unknown_activation_formats_are_refused() -> None:
    with pytest.raises(UnknownName, match="NVFP4"):
        linears.quantise_activations(torch.zeros(2, 16), "NVFP5", None)


# --------------------------------------------------------------------------------------------------
# Rounding of cache rows and indexer operands against the formats: every code, every block.


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


# --------------------------------------------------------------------------------------------------
# The compiled loops of a decoding step equal the readable forms; the definition never takes them.
#
# Products of BF16 by BF16 are exact in float64 and their sums nearly so: bits that are stored in
# BF16 do not depend on who computed them.

HELD = replace(Numerics.bf16(), work=torch.float64, products=torch.float64)


def decoding_noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("tokens", [1, 4])
def test_products_read_weights_as_they_are_stored(tokens: int, seed: int) -> None:
    x = decoding_noise(tokens, 70, seed=seed)
    weight = Weight(value=decoding_noise(33, 70, seed=seed + 1).bfloat16())
    made = linears.product(x, weight, torch.float64, HELD)
    assert not weight._decoded  # the compiled one ran: nothing was decoded
    expected = x @ weight.values(torch.float64).T
    assert (made - expected).abs().max() < 1e-13
    stored = x.bfloat16()
    both = [linears.matmul(tensor, weight, HELD) for tensor in (stored, stored.repeat(5, 1))]
    assert torch.equal(both[0], both[1][:tokens])  # alone and among other rows


def test_groups_have_a_matrix_each(seed: int) -> None:
    x, value = (
        decoding_noise(2, 3 * 16, seed=seed),
        decoding_noise(3, 5, 16, seed=seed + 1).bfloat16(),
    )
    made = attention.grouped_as_stored(x, value, HELD)
    assert torch.equal(made, attention.grouped(x, value.double(), HELD))
    turned = attention.grouped_as_stored(x, value.flip(0), HELD)
    assert not torch.equal(made, turned)  # a group with another's matrix is seen


@pytest.mark.parametrize("counts", [(40,), (31, 1, 8), (0, 5)])
def test_attention_of_one_token_is_the_readable_one(counts: tuple[int, ...], seed: int) -> None:
    q, sink = decoding_noise(1, 8, 24, seed=seed), decoding_noise(8, seed=seed)
    rows = [decoding_noise(count, 24, seed=seed + n) for n, count in enumerate(counts, 1)]
    seen = torch.ones(1, sum(counts), dtype=torch.bool)
    made = attention.attend(q, rows, None, sink, HELD)
    assert torch.equal(made, attention.attend(q, rows, seen, sink, HELD))
    direct = compiled.attend(q[0], rows, sink, 24**-0.5)
    kept = replace(HELD, store=torch.float64)
    expected = attention.attend(q, rows, seen, sink, kept)[0]
    assert (direct - expected).abs().max() > 0.0  # weights are rounded to BF16 as they are stored
    assert (direct - expected).abs().max() < 2**-7 * expected.abs().max()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_numbers_that_are_none_stay_so(poison: float, seed: int) -> None:
    q, sink, rows = (
        decoding_noise(1, 2, 8, seed=seed),
        decoding_noise(2, seed=seed),
        decoding_noise(5, 8, seed=seed + 1),
    )
    rows[3, 2] = poison
    made = attention.attend(q, [rows], None, sink, HELD)
    seen = torch.ones(1, 5, dtype=torch.bool)
    expected = attention.attend(q, [rows], seen, sink, HELD)
    assert torch.equal(made.isfinite(), expected.isfinite())
    assert not made.isfinite().all()


def test_who_may_compile(seed: int) -> None:
    x = decoding_noise(2, 8, seed=seed)
    assert compiles(HELD, x)
    assert not compiles(Numerics.definition(), x)  # the definition stays readable
    assert not compiles(Numerics.bf16(), x)  # float32 sums would change in stored bits
    assert not compiles(HELD, x.clone().requires_grad_())
    assert not compiles(HELD, x.T)
    weight = Weight(value=decoding_noise(4, 8, seed=seed).bfloat16())
    linears.product(x, weight, torch.float64, Numerics.definition())
    linears.product(decoding_noise(5, 8, seed=seed), weight, torch.float64, HELD)  # too many tokens
    assert weight._decoded
    with pytest.raises(RuntimeError):  # by torch, instead of reading beyond the end
        linears.product(x[:, :7].contiguous(), weight, torch.float64, HELD)
