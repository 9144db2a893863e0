"""The record of one parameter: plain or quantised, replaceable by field, decoded once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.harness.formats.number_formats import NVFP4, NibbleOrder, ScaleDirection
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.harness.formats.weight import Weight


def quantised(seed: int) -> Weight:
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    return Weight.of(quantise(values, NVFP4), torch.tensor(0.25))


def test_plain_weights_are_their_values() -> None:
    value = torch.arange(6.0).reshape(2, 3).bfloat16()
    weight = Weight(value=value)
    assert weight.values(torch.bfloat16) is value
    assert not weight.is_quantised
    assert weight.shape == (2, 3)
    wide = weight.values(torch.float64)
    assert torch.equal(wide, value.double())
    assert weight.values(torch.float64) is wide


def test_codes_stand_for_their_values(seed: int) -> None:
    weight = quantised(seed)
    assert weight.is_quantised
    assert weight.shape == (8, 64)
    assert torch.equal(weight.values(torch.float64), dequantise(weight.quantised(), torch.float64))
    assert weight.values(torch.float32) is weight.values(torch.float32)
    assert float(weight.input_scale or 0) == 0.25


def test_a_replaced_field_is_read(seed: int) -> None:
    weight = quantised(seed)
    before = weight.values(torch.float32).clone()
    assert weight.tensor_scale is not None
    weight.tensor_scale = weight.tensor_scale * 2
    assert torch.equal(weight.values(torch.float32), before * 2)
    weight.tensor_scale = weight.tensor_scale / 2
    assert torch.equal(weight.values(torch.float32), before)


def test_a_field_written_to_in_place_is_read(seed: int) -> None:
    weight = quantised(seed)
    before = weight.values(torch.float32).clone()
    assert weight.codes is not None
    weight.codes ^= 0x88  # both signs of every byte
    assert torch.equal(weight.values(torch.float32), -before)
    plain = Weight(value=torch.ones(2, 2))
    assert float(plain.values(torch.float64).sum()) == 4
    assert plain.value is not None
    plain.value.zero_()
    assert float(plain.values(torch.float64).sum()) == 0


def test_under_inference_nothing_is_kept(seed: int) -> None:
    with torch.inference_mode():
        weight = quantised(seed)
        before = weight.values(torch.float32).clone()
        assert weight.codes is not None
        weight.codes ^= 0x88
        assert torch.equal(weight.values(torch.float32), -before)


def test_the_reading_belongs_to_the_storage(seed: int) -> None:
    weight = quantised(seed)
    assert weight.storage is not None
    encoded = replace(weight.storage, direction=ScaleDirection.ENCODE)
    inverted = replace(weight, storage=encoded, _decoded={})
    assert weight.tensor_scale is not None
    ratio = inverted.values(torch.float64) / weight.values(torch.float64)
    expected = weight.tensor_scale.double() ** -2
    assert torch.allclose(ratio[torch.isfinite(ratio)], expected)  # 1/s for s: off by its square


def test_what_does_not_fit_is_refused_when_it_is_read(seed: int) -> None:
    weight = quantised(seed)
    assert weight.block_scale is not None
    weight.block_scale = weight.block_scale[:4]
    with pytest.raises(ShapeMismatch, match="block_scale"):
        weight.values(torch.float32)
    weight.block_scale = None
    with pytest.raises(InvalidArgument, match="without codes"):
        weight.values(torch.float32)
    with pytest.raises(InvalidArgument, match="empty"):
        Weight().values(torch.float32)
    with pytest.raises(InvalidArgument, match="without codes"):
        Weight(value=torch.zeros(2, 16)).quantised()


def test_codes_that_are_to_be_read_otherwise_are(seed: int) -> None:
    weight = quantised(seed)
    before = weight.values(torch.float32).clone()
    assert weight.storage is not None
    weight.storage = replace(weight.storage, nibble_order=NibbleOrder.HIGH_EVEN)
    swapped = before.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    assert torch.equal(weight.values(torch.float32), swapped)


def test_writing_into_the_values_changes_no_weight(seed: int) -> None:
    weight = quantised(seed)
    values = weight.values(torch.float32)
    before = values.clone()
    values.zero_()
    assert torch.equal(weight.values(torch.float32), before)
