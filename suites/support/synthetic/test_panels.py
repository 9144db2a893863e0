from __future__ import annotations

import pytest
import torch

from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import FP8_128X128_UE8M0
from degarble.harness.formats.quantise import quantise
from degarble.suites.support.synthetic import panels as synthetic_panels
from degarble.suites.support.synthetic.panels import quantise_panels


def agrees(values: torch.Tensor) -> bool:
    codes, scales = quantise_panels(values)
    made = quantise(values, FP8_128X128_UE8M0, CANONICAL)
    return torch.equal(codes, made.codes.view(torch.uint8)) and torch.equal(
        scales, made.block_scale.view(torch.uint8)
    )


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 128), (128, 200), (1, 1)])
@pytest.mark.parametrize("exponent", [-40, -7, 0, 30])
def test_panels_are_what_the_definition_makes(
    shape: tuple[int, int], exponent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 2.0**exponent
    values[0, 0] *= 1000
    values[-1, -1] = 0
    assert agrees(values.bfloat16())


def test_every_finite_number_of_one_binade_and_all_edges() -> None:
    bits = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16)
    numbers = numbers[numbers.isfinite() & (numbers.abs() <= 448)]
    padded = torch.zeros(128 * 256 * 4, dtype=torch.bfloat16)
    padded[: len(numbers)] = numbers
    assert agrees(padded.view(512, 256))


def test_blocks_of_zeros_have_the_definitions_scale() -> None:
    assert agrees(torch.zeros(128, 256, dtype=torch.bfloat16))


def test_a_planted_error_in_the_table_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    table = synthetic_panels._codes().copy()
    table[0x3F80] ^= 1
    monkeypatch.setattr(synthetic_panels, "_codes", lambda: table)
    values = torch.full((128, 128), 256.0, dtype=torch.bfloat16)
    values[5, 7] = 1.0
    assert not agrees(values)
