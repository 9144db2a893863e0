from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from degarble.harness.engine.faults.family import (
    Case,
    Part,
    element_codes,
    read_scales,
    reproduction,
    same_values,
    share_equal,
)
from degarble.harness.formats.layouts import SWIZZLE_128X4
from degarble.harness.formats.number_formats import FP8_128X128_F32, NVFP4, NibbleOrder
from degarble.harness.formats.quantise import quantise
from degarble.suites.engine.weights import heavy_tailed


def test_parts_are_compared_as_they_are_read(seed: int) -> None:
    plain = quantise(heavy_tailed(5, 32, seed, 2), NVFP4)
    other = plain.with_layout(SWIZZLE_128X4).with_nibble_order(NibbleOrder.HIGH_EVEN)
    assert element_codes(plain).shape == (10, 32)
    assert read_scales(plain).shape == (10, 2)
    assert torch.equal(element_codes(plain), element_codes(other))
    assert torch.equal(read_scales(plain), read_scales(other))


def test_a_scale_of_many_rows_stands_in_each_of_them(seed: int) -> None:
    scales = read_scales(quantise(heavy_tailed(130, 256, seed), FP8_128X128_F32))
    assert scales.shape == (130, 2)
    assert torch.equal(scales[0], scales[127])
    assert not torch.equal(scales[127], scales[128])


def test_only_the_rows_in_question_count() -> None:
    left, right = torch.tensor([[1, 1], [2, 3]]), torch.tensor([[1, 9], [2, 3]])
    assert share_equal(left, right, torch.tensor([True, False])) == 0.5
    assert share_equal(left, right, torch.tensor([False, True])) == 1.0
    assert share_equal(left, right, torch.tensor([False, False])) == 1.0


def test_a_fault_that_cannot_be_reproduces_nothing(seed: int) -> None:
    tensor = quantise(heavy_tailed(2, 32, seed), NVFP4)
    case = Case(tensor, tensor, torch.tensor([True, True]))
    assert reproduction(case, None, Part.CODES) == (0.0, 1.0)


@pytest.mark.parametrize(("bit", "same"), [(0, True), (1, False)])
def test_effect_is_a_matter_of_values(bit: int, same: bool, seed: int) -> None:
    tensor = quantise(heavy_tailed(2, 32, seed), NVFP4)
    assert same_values(tensor, replace(tensor, codes=tensor.codes ^ bit)) is same
    assert same_values(tensor, tensor.with_nibble_order(NibbleOrder.HIGH_EVEN))
