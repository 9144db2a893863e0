"""Eight codes to four pairs: every code in every place, every code times every scale, exactly."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.formats.scalar_ops import e2m1_decode, e4m3_decode
from degarble.kernels.gemm.w4a16_problem import DECODED_EXPONENT
from degarble.kernels.primitives import e2m1
from degarble.kernels.primitives.e2m1 import PAIRS, SCALE_EXPONENT, VALUE_EXPONENT, bf16_pairs

CODES = torch.arange(16, dtype=torch.int64)


def numbers(words_W: torch.Tensor) -> torch.Tensor:
    """Both BF16 numbers of words, [W, 2], the low one first."""
    halves_W2 = torch.stack([words_W & 0xFFFF, words_W >> 16], -1)
    return halves_W2.to(torch.int16).view(torch.bfloat16)


def mismatches() -> int:
    """Count wrong numbers over all codes in all places, among neighbours of all ones and zeros."""
    wrong = 0
    for place in range(2 * PAIRS):
        for neighbours in (0, 0xFFFF_FFFF):
            words = (neighbours & ~(0xF << 4 * place)) | (CODES << 4 * place)
            pair = bf16_pairs(words)[place % PAIRS]
            got = numbers(pair)[:, place // PAIRS].double()
            wrong += int((got != e2m1_decode(CODES).double() * 2.0**VALUE_EXPONENT).sum())
    return wrong


def test_every_code_in_every_place() -> None:
    assert mismatches() == 0


def test_ints_and_tensors_agree() -> None:
    for word in (0, 0xFFFF_FFFF, 0x1234_5678, 0x8765_4321):
        tensors = bf16_pairs(torch.tensor([word]))
        assert bf16_pairs(word) == [int(pair[0]) for pair in tensors]


def test_every_code_times_every_scale_is_exact() -> None:
    scale_codes = torch.arange(256)
    values = numbers(bf16_pairs(CODES)[0])[:, :1]
    scale_S = e4m3_decode(scale_codes)
    factor_S = (scale_S * 2.0**SCALE_EXPONENT).bfloat16()
    assert torch.equal(factor_S.float().nan_to_num(), (scale_S * 2.0**SCALE_EXPONENT).nan_to_num())
    got_CS = values * factor_S  # BF16, as the kernel multiplies
    want_CS = e2m1_decode(CODES)[:, None].double() * scale_S.double() * 2.0**DECODED_EXPONENT
    assert got_CS.dtype is torch.bfloat16
    assert torch.equal(got_CS.isnan(), want_CS.isnan())
    assert torch.equal(got_CS.double().nan_to_num(), want_CS.nan_to_num())
    assert DECODED_EXPONENT == VALUE_EXPONENT + SCALE_EXPONENT


@pytest.mark.parametrize(
    ("name", "value"),
    [("_KEPT", 0x81C0_80C0), ("_PAIR", 0x000F_0007), ("_PAIR_MOVES", (0x1040, 0x102))],
)
def test_a_wrong_constant_is_detected(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(e2m1, name, value)
    assert mismatches() > 0
