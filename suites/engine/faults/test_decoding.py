from __future__ import annotations

import pytest
import torch

from degarble.harness.engine.faults import decoding
from degarble.harness.engine.faults.decoding import (
    Decoding,
    numbers_of,
    once,
    remembering,
    scale_numbers,
    with_scales,
)
from degarble.harness.formats.layouts import SWIZZLE_128X4
from degarble.harness.formats.number_formats import BLOCK_FORMATS, NibbleOrder, ScaleDirection
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.harness.formats.weight import Weight
from degarble.suites.engine.weights import heavy_tailed


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_numbers_are_those_of_dequantise(name: str, seed: int) -> None:
    form = BLOCK_FORMATS[name]
    tensor = quantise(heavy_tailed(160, 256, seed), form)
    forms = [tensor]
    if form.tensor_scale:
        forms += [
            tensor.with_layout(SWIZZLE_128X4),
            tensor.with_nibble_order(NibbleOrder.HIGH_EVEN),
            tensor.with_direction(ScaleDirection.ENCODE),
        ]
    for each in forms:
        assert torch.equal(numbers_of(Weight.of(each)), dequantise(each, torch.float64))
        assert torch.equal(scale_numbers(each), each.scale_values())


def test_cut_off_blocks_are_decoded(seed: int) -> None:
    tensor = quantise(heavy_tailed(130, 200, seed), BLOCK_FORMATS["FP8_128X128_F32"])
    assert torch.equal(numbers_of(Weight.of(tensor)), dequantise(tensor, torch.float64))


def test_scales_of_ones_leave_elements(seed: int) -> None:
    tensor = quantise(heavy_tailed(4, 32, seed), BLOCK_FORMATS["NVFP4"])
    ones = torch.ones_like(tensor.scale_values())
    assert with_scales(tensor, ones, tensor_scale=False).abs().max() == 6


def test_only_changed_weights_are_decoded_again(seed: int) -> None:
    weight = Weight.of(quantise(heavy_tailed(4, 32, seed), BLOCK_FORMATS["NVFP4"]))
    other = Weight.of(weight.quantised())
    seen = Decoding({"a": weight, "b": other}, {"a": weight, "b": weight})
    with remembering():
        a, b = ([seen[name].values(torch.float64) for _ in range(2)] for name in "ab")
    assert a[0] is a[1]
    assert b[0] is not b[1]
    assert torch.equal(a[0], weight.values(torch.float64))
    assert torch.equal(b[0], a[0])
    assert list(seen) == ["a", "b"]


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_chosen_rows_are_those_of_the_whole(name: str, seed: int) -> None:
    weight = Weight.of(quantise(heavy_tailed(160, 256, seed), BLOCK_FORMATS[name]))
    rows = torch.tensor([0, 3, 127, 128, 159])
    for kept in ({"a": weight}, {}):
        seen = Decoding({"a": weight}, kept, rows)["a"].values(torch.float64)
        assert torch.equal(seen, weight.values(torch.float64)[rows])


def test_what_is_remembered_is_bounded_and_forgotten(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [
        Weight.of(quantise(heavy_tailed(16, 32, seed + n), BLOCK_FORMATS["NVFP4"]))
        for n in range(3)
    ]
    monkeypatch.setattr(decoding, "REMEMBERED", 2 * 16 * 32 * 8)
    with remembering():
        first = numbers_of(weights[0])
        assert numbers_of(weights[0]) is first
        for weight in weights[1:]:
            numbers_of(weight)
        assert numbers_of(weights[0]) is not first
        assert torch.equal(numbers_of(weights[0]), first)
    assert numbers_of(weights[0]) is not numbers_of(weights[0])


def test_a_result_is_made_once_of_the_same_objects() -> None:
    made: list[object] = []
    one, other = torch.zeros(1), torch.zeros(1)

    def make() -> object:
        made.append(object())
        return made[-1]

    assert once([one], make) is not once([one], make)
    with remembering():
        first = once([one], make)
        with remembering():
            assert once([one], make) is first
        assert once([other], make) is not first
        assert once([one, other], make) is not first
        assert once([one], make) is first
        for _ in range(100):
            assert once([torch.zeros(1)], make) is made[-1]
        assert once([one], make) is not first, "few are remembered"
