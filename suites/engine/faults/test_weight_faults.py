"""Faults of weights: where each applies, what it changes, and how weights are decoded."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import pad

from degarble.harness.engine.faults import weight_faults
from degarble.harness.engine.faults.layouts import chunks_behind, words_behind
from degarble.harness.engine.faults.regions import plantable
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.engine.faults.weight_faults import (
    Decoding,
    numbers_of,
    once,
    remembering,
    scale_numbers,
    variant_at,
    with_scales,
)
from degarble.harness.formats.layouts import SWIZZLE_128X4, from_layout, to_layout
from degarble.harness.formats.number_formats import BLOCK_FORMATS, NibbleOrder, ScaleDirection
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.harness.formats.weight import Weight
from degarble.suites.engine.diagnosing import FAULTS, OURS, double
from degarble.suites.engine.weights import heavy_tailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.engine.faults.model_faults import ComponentContext, FaultVariant


# --------------------------------------------------------------------------------------------------
# Every family of weights: where it sits, what it changes, and that it changes nothing else.


def test_every_family_has_three_variants_and_words() -> None:
    variants = Counter(model_fault.family for model_fault in FAULTS)
    assert set(variants) == set(OURS)
    assert min(variants.values()) >= 3
    for name, fault in MODEL_FAULTS.items():
        assert name == fault.id
        assert re.fullmatch(r"[MO]\d\d\.[a-z0-9_]+", name)
        assert fault.title[0].isupper()
        assert fault.remedy.endswith(".")


# It takes what another layer's call was given: suites/museum/test_plants.py runs both.
WHOLE_RUNS = {"M12.layer_view"}


@pytest.mark.parametrize("fault", [fault.id for fault in FAULTS if fault.id not in WHOLE_RUNS])
def test_it_sits_somewhere_and_has_an_effect(fault: str) -> None:
    """On small models, of which no weight has a small block scale."""
    silent = {"M08.subnormal", "M08.flushed", "M08.five_bits"}
    for family, recipe in (("v4", "nvfp4-full"), ("v32", "nvfp4-experts"), ("v4", "nvfp4-experts")):
        model = double(family, recipe)
        for place in model.calls:
            context = model.planting(place)
            if not MODEL_FAULTS[fault].applies_to(context):
                continue
            variant = next(MODEL_FAULTS[fault].variants(context))
            if model.ratio(place, model.sights(place, variant, calls=1)[0]) > 1:
                return
    assert fault in silent


def test_weights_stay_as_they_were() -> None:
    model = double("v4", "nvfp4-full")
    place = "layers.1.ffn.experts.w13"
    context = model.planting(place)
    before = {name: context.weights[name].values(torch.float32).clone() for name in context.weights}
    inputs = {
        name: tensor[:2] if tensor.ndim else tensor
        for name, tensor in model.calls[place][0].items()
    }
    for fault in FAULTS:
        if fault.applies_to(context):
            next(fault.variants(context)).apply(context.call)(inputs, context.weights)
    for name, values in before.items():
        assert torch.equal(context.weights[name].values(torch.float32), values)


def test_only_the_weights_of_a_spot_change() -> None:
    model = double("v4", "nvfp4-full")
    context = model.planting("layers.1.ffn.experts.w13")
    variant = list(MODEL_FAULTS["M10.nibble_order"].variants(context))[1]
    seen = {}

    def look(_inputs: object, weights: dict[str, object]) -> dict[str, torch.Tensor]:
        seen.update({name: weights[name] for name in weights})
        return {}

    variant.apply(look)({}, context.weights)  # type: ignore[arg-type]
    changed = {name for name in seen if seen[name] is not context.weights[name]}
    assert changed == {"ffn.experts.2.w1", "ffn.experts.2.w3"}


@pytest.mark.parametrize("fault", ["M11.groups_of_four", "M12.row_off"])
def test_what_moves_scales_is_no_name_for_one_factor(fault: str) -> None:
    """One scale that is doubled often has a neighbour that is twice as large."""
    context = double("v4", "nvfp4-experts").planting("layers.1.attn.wq_b")
    (name,) = context.weights
    scales = torch.tensor([[121], [120], [121], [119]], dtype=torch.uint8)
    weight = replace(context.weights[name], block_scale=scales, _decoded={})
    was, seen = weight.values(torch.float32), dict[object, bool]()
    for variant in MODEL_FAULTS[fault].variants(context):

        def look(
            inputs: Mapping[str, Any],
            weights: Mapping[str, Any],
            fault_variant: FaultVariant = variant,
        ) -> Any:
            seen[fault_variant.where.get("rows")] = torch.equal(
                weights[name].values(torch.float32), was
            )
            return inputs

        variant.apply(look)({}, {name: weight})
    assert seen == {None: False, "256 to 511": False, "128 to 191": True}


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
    for quantised_tensor in forms:
        assert torch.equal(
            numbers_of(Weight.of(quantised_tensor)), dequantise(quantised_tensor, torch.float64)
        )
        assert torch.equal(scale_numbers(quantised_tensor), quantised_tensor.scale_values())


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
    monkeypatch.setattr(weight_faults, "REMEMBERED", 2 * 16 * 32 * 8)
    with remembering():
        first = numbers_of(weights[0])
        assert numbers_of(weights[0]) is first
        for weight in weights[1:]:
            numbers_of(weight)
        assert numbers_of(weights[0]) is not first
        assert torch.equal(numbers_of(weights[0]), first)
    assert numbers_of(weights[0]) is not numbers_of(weights[0])


def test_a_change_is_made_once_for_all_regions_of_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = double("v4", "nvfp4-full"), list[str]()
    context = model.planting("layers.1.ffn.experts.w13")

    def change(_context: ComponentContext, name: str, weight: Weight) -> Weight:
        made.append(name)
        return Weight.of(weight.quantised())

    spots = [spot for spot in plantable(context) if spot.rows is None]
    names = {name for spot in spots for name in spot.names}
    assert sum(len(spot.names) for spot in spots) > len(names)

    with remembering():
        for spot in spots:
            weights = _read(context, variant_at(context, spot, change, "changed"))
            numbers = Decoding(weights, context.weights)
            for name in spot.names:
                assert numbers[name].value is Decoding(weights, context.weights)[name].value
        assert sorted(made) == sorted(names)
        monkeypatch.setattr(weight_faults, "_SMALL", 0)
        weights = _read(context, variant_at(context, spots[0], change, "changed"))
        assert weights[spots[0].names[0]] is not weights[spots[0].names[0]]


def _read(context: ComponentContext, variant: FaultVariant) -> Mapping[str, Weight]:
    """Return the weights that a component gets under a variant."""
    seen: list[Mapping[str, Weight]] = []

    def call(inputs: Any, weights: Any) -> dict[str, torch.Tensor]:
        del inputs
        seen.append(weights)
        return {}

    variant.apply(call)({}, context.weights)
    return seen[0]


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


# --------------------------------------------------------------------------------------------------
# What lies a word or a chunk on is that of the layout's own addresses.


@pytest.mark.parametrize("rows", [3, 40, 128])
@pytest.mark.parametrize("columns", [4, 6, 12])
def test_words_lie_as_the_swizzle_has_them(rows: int, columns: int) -> None:
    scales = torch.randint(1, 255, (rows, columns), dtype=torch.uint8)
    stored = to_layout(scales, SWIZZLE_128X4)
    behind = from_layout(pad(stored[4:], (0, 4)), SWIZZLE_128X4, rows, columns)
    assert torch.equal(words_behind(scales), behind)


def test_the_last_row_of_all_tiles_is_followed_by_nothing() -> None:
    made = words_behind(torch.ones(300, 8, dtype=torch.uint8))
    assert made[127].tolist() == made[255].tolist() == [1] * 4 + [0] * 4
    assert made[254].tolist() == [1] * 8


@pytest.mark.parametrize("tile", [8, 64])
def test_chunks_change_places_every_four_rows(tile: int) -> None:
    codes = torch.randint(1, 255, (16, 96), dtype=torch.uint8)
    made, lies = chunks_behind(tile, codes), {}
    for row in range(16):
        for chunk in range(6):
            step, half = divmod(chunk, 2)
            place = step * 2 * tile + row % tile * 2 + (row // 4 % 2 ^ half)
            lies[row // tile, place] = row, chunk
    nothing = torch.zeros(16, dtype=torch.uint8)
    for (part, place), (row, chunk) in lies.items():
        behind = lies.get((part, place + 1))
        expected = nothing if behind is None else codes[behind[0]].unflatten(0, (6, 16))[behind[1]]
        assert torch.equal(made[row].unflatten(0, (6, 16))[chunk], expected), (row, chunk)
