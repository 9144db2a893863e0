"""Eight codes to a word: equal to the codec at every boundary, and on strides of all patterns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.scalar_ops import e2m1_encode
from degarble.kernels.primitives import e2m1
from degarble.kernels.primitives.e2m1 import NUMBERS, WORD_OPERATORS, e2m1_word

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


def near_boundaries() -> torch.Tensor:
    """Every boundary and its neighbours up to 40 ulps away, both signs, and the special numbers."""
    bits = torch.tensor(BOUNDARIES).view(torch.int32)[:, None] + torch.arange(-40, 40)
    x_N = bits.clamp(min=0).to(torch.int32).view(torch.float32).flatten()
    special = torch.tensor([0.0, torch.inf, torch.nan, 1e-45, 1e-38, 3.4e38, 448.0, 2.0**22])
    x_N = torch.cat([x_N, special])
    negative = torch.where(x_N.isnan(), x_N, -x_N)  # the sign of a NaN is not defined
    return torch.cat([x_N, negative])


def test_every_boundary_and_its_neighbours() -> None:
    x_N = near_boundaries()
    assert torch.equal(words(x_N), wanted(x_N))
    rolled = x_N.roll(3)  # other numbers of a word beside it
    assert torch.equal(words(rolled), wanted(rolled))


def test_strides_of_all_bit_patterns() -> None:
    for start in range(0, 1 << 32, 1 << 30):
        bits = torch.arange(start, start + (1 << 30), 4099, dtype=torch.int64)[: 8 * 32_000]
        x_N = ops.number_of(bits)
        x_N = torch.where(x_N.isnan(), torch.tensor(torch.nan).abs(), x_N)
        assert torch.equal(words(x_N), wanted(x_N))


def test_python_numbers_give_the_same_word() -> None:
    numbers = [0.3, -0.75, 1.25, -5.0, 1e9, -0.0, 2.5, -3.51]
    assert e2m1_word(numbers) == int(wanted(torch.tensor(numbers))[0])


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
