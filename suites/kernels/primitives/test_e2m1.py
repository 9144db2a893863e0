"""Encoding and decoding of E2M1 words, exhaustively."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.scalar_ops import e2m1_decode, e2m1_encode, e4m3_decode
from degarble.kernels.gemm.w4a16_problem import DECODED_EXPONENT
from degarble.kernels.primitives import e2m1, kv_problem
from degarble.kernels.primitives import e2m1 as halves
from degarble.kernels.primitives.e2m1 import (
    HALF_OPERATORS,
    HALF_SCALE_EXPONENT,
    HALF_VALUE_EXPONENT,
    NUMBERS,
    PAIRS,
    SCALE_EXPONENT,
    VALUE_EXPONENT,
    WORD_OPERATORS,
    WORDS,
    bf16_pairs,
    e2m1_word,
    e2m1_word_by_products,
    fp16_pairs,
    fp16_pairs_by_products,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# --------------------------------------------------------------------------------------------------
# Eight codes to a word: equal to the codec at every boundary, and on strides of all patterns.

BOUNDARIES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0)


def wanted(x_N: torch.Tensor) -> torch.Tensor:
    code_WI = e2m1_encode(x_N).reshape(-1, NUMBERS)
    places = torch.arange(NUMBERS, dtype=torch.int64) * 4
    word_W: torch.Tensor = (code_WI << places).sum(-1)
    return word_W


def words(x_N: torch.Tensor, primitives: e2m1.WordOperations = WORD_OPERATORS) -> torch.Tensor:
    x_WI = x_N.reshape(-1, NUMBERS)
    word: torch.Tensor = e2m1_word(list(x_WI.unbind(-1)), primitives)
    return word & 0xFFFF_FFFF


def by_products(x_N: torch.Tensor) -> torch.Tensor:
    x_WI = x_N.reshape(-1, NUMBERS)
    word: torch.Tensor = e2m1_word_by_products(list(x_WI.unbind(-1)))
    return word & 0xFFFF_FFFF


def near_boundaries() -> torch.Tensor:
    """Every boundary and its neighbours up to 40 ulps away, both signs, and the special numbers."""
    bits = torch.tensor(BOUNDARIES).view(torch.int32)[:, None] + torch.arange(-40, 40)
    x_N = bits.clamp(min=0).to(torch.int32).view(torch.float32).flatten()
    special = torch.tensor([0.0, torch.inf, torch.nan, 1e-45, 1e-38, 3.4e38, 448.0, 2.0**22])
    x_N = torch.cat([x_N, special])
    negative = torch.where(x_N.isnan(), x_N, -x_N)  # the sign of a NaN is not defined
    return torch.cat([x_N, negative])


def test_every_boundary_and_its_neighbours() -> None:
    for x_N in (near_boundaries(), near_boundaries().roll(3)):  # other numbers of a word beside it
        assert torch.equal(words(x_N), wanted(x_N))
        assert torch.equal(by_products(x_N), wanted(x_N))


def test_strides_of_all_bit_patterns() -> None:
    for start in range(0, 1 << 32, 1 << 30):
        bits = torch.arange(start, start + (1 << 30), 4099, dtype=torch.int64)[: 8 * 32_000]
        x_N = ops.number_of(bits)
        x_N = torch.where(x_N.isnan(), torch.tensor(torch.nan).abs(), x_N)
        assert torch.equal(words(x_N), wanted(x_N))
        assert torch.equal(by_products(x_N), wanted(x_N))


def as_codes_and_as_values(x_N: torch.Tensor, code: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers times a scale, rounded by their codes and without them."""
    x_N, scale = x_N.reshape(-1), e4m3_decode(torch.tensor(code)).float()
    by_code = torch.stack(kv_problem.e2m1_numbers(words(x_N), scale), -1).flatten()
    return by_code, e2m1.e2m1_rounded(x_N, scale)


@pytest.mark.parametrize("code", [0, 1, 7, 8, 0x38, 0x3B, 0x7E])
def test_rounded_numbers_are_those_of_their_codes(code: int) -> None:
    strides = ops.number_of(torch.arange(0, 1 << 32, 40_961, dtype=torch.int64)[: 8 * 13_000])
    strides = torch.where(strides.isnan(), torch.tensor(torch.nan).abs(), strides)
    for x_N in (near_boundaries(), strides):
        by_code, rounded = as_codes_and_as_values(x_N, code)
        assert torch.equal(ops.bits_of(by_code), ops.bits_of(rounded))


def test_a_nan_of_a_scale_stays_one_in_rounded_numbers() -> None:
    by_code, rounded = as_codes_and_as_values(near_boundaries(), 0x7F)
    assert by_code.isnan().all()
    assert rounded.isnan().all()


def test_python_numbers_give_the_same_word() -> None:
    numbers = [0.3, -0.75, 1.25, -5.0, 1e9, -0.0, 2.5, -3.51]
    assert e2m1_word(numbers) == int(wanted(torch.tensor(numbers))[0])
    assert e2m1_word_by_products(numbers) == e2m1_word(numbers)


@pytest.mark.parametrize("decode_scale", [5 / 2688, 1.0, 3e-5, 777.0, 1e-30])
def test_bounded_values_need_no_limit(decode_scale: float) -> None:
    x_N = codecs.bf16_decode(torch.arange(1 << 16)).float()
    x_N = torch.where(x_N.isnan(), torch.tensor(torch.nan).abs(), x_N)  # as conversions make them
    encode = ops.divide_rn(torch.tensor(1.0), torch.tensor(decode_scale))
    unlimited = replace(WORD_OPERATORS, limited=lambda number: number)
    for code in range(0x7F):
        factor = codecs.nvfp4_block_encode_scale(torch.tensor(code), encode)
        bound = e2m1.largest_coded(factor).bfloat16().float()
        bounded = torch.where(x_N.abs() <= bound, x_N, bound.copysign(x_N))
        made = e2m1_word_by_products(
            list((bounded * factor).reshape(-1, NUMBERS).unbind(-1)), unlimited
        )
        assert torch.equal(made & 0xFFFF_FFFF, wanted(x_N * factor)), code


@pytest.mark.parametrize("moves", [(1 << 28) + (1 << 6), (1 << 28) + (1 << 5) + 1])
def test_another_product_is_detected(moves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2m1, "_TOP_MOVES", moves)
    x_N = near_boundaries()
    assert not torch.equal(by_products(x_N), wanted(x_N))


@pytest.mark.parametrize("constant", [2.0**22 + 2, 2.0**23 + 1])
def test_another_summand_is_detected(constant: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2m1, "_SUMMAND", constant)
    x_N = near_boundaries()
    assert not torch.equal(words(x_N), wanted(x_N))


def test_halves_exchanged_are_detected() -> None:
    wrong = replace(
        WORD_OPERATORS, low_halves=lambda low, high: WORD_OPERATORS.low_halves(high, low)
    )
    x_N = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 0.5, 1.5])
    assert not torch.equal(words(x_N, wrong), wanted(x_N))


# --------------------------------------------------------------------------------------------------
# Codes by packed BF16: every value by every scale is coded as its true quotient is.

SCALES = torch.arange(1, 0x7F)


def words_of(code_N: torch.Tensor) -> list[torch.Tensor]:
    """Pack BF16 codes by two, four words to a group."""
    pairs = code_N.unflatten(-1, (-1, WORDS, 2))
    return list((pairs[..., 0] + pairs[..., 1] * 65_536).unbind(-1))


def coded(code_N: torch.Tensor, scale: torch.Tensor, off: int = 0) -> torch.Tensor:
    """Return words of codes of BF16 values up to six scales, as a kernel makes them."""
    estimate = ((1 / scale).view(torch.int32) + off).view(torch.float32)
    terms = halves.inverse_terms(scale, estimate)
    assert (terms[1] >= 0).all()
    inverse: Any = tuple(codecs.bf16_encode(term) * 0x1_0001 for term in terms)
    made: torch.Tensor = halves.code_word(halves.quotients(words_of(code_N), inverse))
    return made


def e2m1_halves_wanted(number_N: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return words of the codes of true quotients."""
    code_N = codecs.e2m1_encode((number_N.double() / scale.double()).float())
    places = torch.arange(8) * 4
    made: torch.Tensor = (code_N.unflatten(-1, (-1, 8)) << places).sum(-1)
    return made


def bounded(scale: torch.Tensor) -> torch.Tensor:
    """Return every BF16 between 2**-11 and six of a scale, and some below, with both signs."""
    most = codecs.bf16_encode(scale * codecs.E2M1_MAX)
    code_N = torch.cat((torch.tensor([0, 1, 0x80, 0x1000]), torch.arange(0x3A00, 0x4528)))
    code_N = code_N.minimum(most)
    both = torch.cat((code_N, code_N + 0x8000), -1)
    return both[..., : both.shape[-1] // 8 * 8]


@pytest.mark.parametrize("off", [-2, 0, 2])
def test_every_value_by_every_scale(off: int) -> None:
    for code in SCALES[:: 1 if not off else 9]:
        scale = codecs.e4m3_decode(code[None])
        values = bounded(scale)
        number = codecs.bf16_decode(values)
        assert torch.equal(coded(values, scale, off), e2m1_halves_wanted(number, scale)), int(code)


def test_neighbours_do_not_matter() -> None:
    scale = codecs.e4m3_decode(torch.tensor([0x3B]))
    values = bounded(scale)
    for step in (1, 3, 5):
        order = torch.randperm(len(values), generator=torch.Generator().manual_seed(step))
        number = codecs.bf16_decode(values[order])
        assert torch.equal(coded(values[order], scale), e2m1_halves_wanted(number, scale))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_SUMMANDS", 0x4284_4284),
        ("_WITHOUT_CONSTANT", 0),
        ("_SIGNS_AND_EXPONENTS", 0x7F80_7F80),
        ("_UPPER_BF16", 0xFF80_0000),
    ],
)
def test_other_constants_are_detected(
    name: str, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, name, wrong)
    found = 0
    for code in SCALES[::13]:
        scale = codecs.e4m3_decode(code[None])
        values = bounded(scale)
        found += not torch.equal(
            coded(values, scale), e2m1_halves_wanted(codecs.bf16_decode(values), scale)
        )
    assert found


def test_the_first_term_alone_moves_values() -> None:
    scale = codecs.e4m3_decode(torch.tensor([0x3F]))
    values = bounded(scale)
    first = codecs.bf16_encode(halves.inverse_terms(scale, 1 / scale)[0]) * 0x1_0001
    got = halves.code_word([HALF_OPERATORS.product(word, first) for word in words_of(values)])
    assert not torch.equal(got, e2m1_halves_wanted(codecs.bf16_decode(values), scale))


# --------------------------------------------------------------------------------------------------
# Eight codes to four pairs: every code in every place, every code times every scale, exactly.

CODES = torch.arange(16, dtype=torch.int64)


def numbers(words_W: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Both numbers of words, [W, 2], the low one first."""
    halves_W2 = torch.stack([words_W & 0xFFFF, words_W >> 16], -1)
    return halves_W2.to(torch.int16).view(dtype)


DECODERS: dict[str, tuple[Callable[[Any], list[Any]], torch.dtype, int, int]] = {
    "bf16": (bf16_pairs, torch.bfloat16, VALUE_EXPONENT, SCALE_EXPONENT),
    "fp16": (fp16_pairs, torch.float16, HALF_VALUE_EXPONENT, HALF_SCALE_EXPONENT),
    "by_products": (
        fp16_pairs_by_products, torch.float16, HALF_VALUE_EXPONENT, HALF_SCALE_EXPONENT,
    ),
}  # fmt: skip
by_each = pytest.mark.parametrize("decoder", DECODERS)


def mismatches(decoder: str) -> int:
    """Count wrong numbers over all codes in all places, among neighbours of all ones and zeros."""
    wrong, (pairs, dtype, exponent, _) = 0, DECODERS[decoder]
    for place in range(2 * PAIRS):
        for neighbours in (0, 0xFFFF_FFFF):
            words = (neighbours & ~(0xF << 4 * place)) | (CODES << 4 * place)
            pair = pairs(words)[place % PAIRS]
            got = numbers(pair, dtype)[:, place // PAIRS].double()
            wrong += int((got != e2m1_decode(CODES).double() * 2.0**exponent).sum())
    return wrong


@by_each
def test_every_code_in_every_place(decoder: str) -> None:
    assert mismatches(decoder) == 0


@by_each
def test_ints_and_tensors_agree(decoder: str) -> None:
    pairs = DECODERS[decoder][0]
    for word in (0, 0xFFFF_FFFF, 0x1234_5678, 0x8765_4321):
        tensors = pairs(torch.tensor([word]))
        assert pairs(word) == [int(pair[0]) for pair in tensors]


@by_each
def test_every_code_times_every_scale_is_exact(decoder: str) -> None:
    pairs, dtype, exponent, of_scale = DECODERS[decoder]
    scale_codes = torch.arange(256)
    values = numbers(pairs(CODES)[0], dtype)[:, :1]
    scale_S = e4m3_decode(scale_codes)
    factor_S = (scale_S * 2.0**of_scale).to(dtype)
    assert torch.equal(factor_S.float().nan_to_num(), (scale_S * 2.0**of_scale).nan_to_num())
    got_CS = values * factor_S  # in that dtype, as the kernel multiplies
    want_CS = e2m1_decode(CODES)[:, None].double() * scale_S.double() * 2.0 ** (exponent + of_scale)
    assert got_CS.dtype is dtype
    assert torch.equal(got_CS.isnan(), want_CS.isnan())
    assert torch.equal(got_CS.double().nan_to_num(), want_CS.nan_to_num())
    assert DECODED_EXPONENT == VALUE_EXPONENT + SCALE_EXPONENT


def test_every_decoded_activation_is_an_fp16_number() -> None:
    """Rows that a walk multiplies are codes times scales; it keeps them in FP16."""
    values = e2m1_decode(CODES)[:, None] * e4m3_decode(torch.arange(127))
    assert torch.equal(values.bfloat16().half().double(), values.double())
    assert values.abs().max() == 2688


@pytest.mark.parametrize(
    ("decoder", "name", "value"),
    [
        ("bf16", "_KEPT", 0x81C0_80C0),
        ("bf16", "_PAIR", 0x000F_0007),
        ("bf16", "_PAIR_MOVES", (0x1040, 0x102)),
        ("by_products", "_LOWER_BYTES", 0x00FF_007F),
        ("by_products", "_BYTE_UP", 1 << 7),
        ("by_products", "_MINUS_ONE", 0),
    ],
)
def test_a_wrong_constant_is_detected(
    decoder: str, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(e2m1, name, value)
    assert mismatches(decoder) > 0
