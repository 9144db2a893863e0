"""What was done to a whole operand, a quantiser or any other component is told by its rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    with_config,
    with_facts,
    with_inputs,
    with_outputs,
    with_weights,
)
from degarble.harness.engine.recover.numbers import grids, places, power_of_two
from degarble.harness.engine.recover.operands import operand_of, operand_of_input
from degarble.suites.campaigns.causes.recovered_weights import edited
from degarble.suites.engine.recover.test_described import model, of_weight, told

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.formats.weight import Weight

LINEAR, WEIGHT = "layers.1.attn.wq_a", "attn.wq_a"


def swapped(codes: Tensor, _scales: Tensor) -> None:
    codes.copy_(codes.unflatten(1, (-1, 2)).flip(2).flatten(1))


def transposed(_codes: Tensor, scales: Tensor) -> None:
    scales.copy_(scales.T.reshape(scales.shape).clone())


def next_rows(_codes: Tensor, scales: Tensor) -> None:
    scales.copy_(scales.roll(-1, 0))


def six_read_as_four(codes: Tensor, _scales: Tensor) -> None:
    codes[codes == 7] = 6


def larger_scales(_codes: Tensor, scales: Tensor) -> None:
    scales[scales > 0x70] = 0x70


def arbitrary(_codes: Tensor, scales: Tensor) -> None:
    drawn = torch.randint(0x60, 0x78, scales.shape, generator=torch.Generator().manual_seed(5))
    scales.copy_(drawn.to(torch.uint8))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (swapped, "elements of columns are exchanged with those 1 apart"),
        (transposed, "block scales are row by row, read in columns"),
        (next_rows, "block scales of rows are those of rows 1 after them, around the end"),
        (six_read_as_four, "code 0x7 stood for 4 in place of 6"),
        (larger_scales, "block scales are not above 128.0"),
        (arbitrary, "block scales are others, by no rule that was found"),
    ],
    ids=["nibbles", "transposed", "rows", "codes", "clamped", "arbitrary"],
)  # fmt: skip
def test_a_weight_as_a_whole_is_told_by_a_rule_or_by_a_table(
    edit: Callable[[Tensor, Tensor], None], words: str
) -> None:
    description = told(LINEAR, of_weight(WEIGHT, edit))
    assert description is not None
    assert words in description.sentence


def test_a_tensor_scale_is_told_by_the_weight_that_it_is_of() -> None:
    other = model().planting("layers.2.attn.wq_a").weights[WEIGHT]
    assert other.tensor_scale is not None
    own = model().planting(LINEAR).weights[WEIGHT].tensor_scale
    assert own is not None
    factor = other.tensor_scale.double() / own.double()

    def scaled(name: str, weight: Weight) -> Weight:
        if name != WEIGHT:
            return weight
        made = operand_of(weight).numbers * factor
        return type(weight)(value=made, input_scale=weight.input_scale)

    description = told(LINEAR, FaultVariant("scaled", with_weights(scaled)))
    assert description is not None
    assert "the tensor scale is that of layers.2.attn.wq_a" in description.sentence


def test_scales_of_the_input_are_told_like_those_of_a_weight() -> None:
    def reversed_scales(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {**inputs, "block_scale": inputs["block_scale"].flip(-1)}

    description = told(LINEAR, FaultVariant("reversed", with_inputs(reversed_scales)))
    assert description is not None
    assert "in the quantised input block scales of a row are" in description.sentence
    assert "reversed" in description.sentence or "reverse order" in description.sentence


def test_two_weights_with_changes_of_their_own_are_told_each() -> None:
    name = "layers.1.ffn.shared.w13"
    kinds: dict[str, Any] = dict(
        zip(model().planting(name).weights, (swapped, next_rows), strict=True)
    )
    variant = FaultVariant("both", with_weights(lambda n, own: edited(own, kinds[n])))
    description = told(name, variant)
    assert description is not None
    assert "exchanged with those 1 apart" in description.sentence
    assert "those of rows 1 after them" in description.sentence


@pytest.mark.parametrize(
    ("name", "variant", "words"),
    [
        (
            "layers.1.attn.norm",
            with_weights(lambda _, own: type(own)(value=own.values(torch.float64) * 0 + 1)),
            "in layers.1.attn_norm, all numbers are 1",
        ),
        pytest.param(
            "layers.1.attn.q_head_norm_rope",
            with_inputs(lambda given: {**given, "positions": given["positions"] + 3}),
            "positions are 3 too large",
            marks=pytest.mark.slow,
        ),
        (
            "layers.1.attn.attend",
            with_inputs(lambda given: {**given, "q": given["q"].float() * 0.9}),
            "the input q is multiplied by 0.9000",
        ),
        (
            "layers.1.ffn.moe_sum",
            with_inputs(lambda given: {**given, "shared": -given["shared"]}),
            "in the input shared, all numbers are turned in sign",
        ),
        (
            "layers.1.attn.norm",
            with_outputs(lambda given, made: {**made, "out": given["x"]}),
            "the output is the input x, unchanged",
        ),
        pytest.param(
            "layers.1.attn.q_head_norm_rope",
            with_inputs(lambda given: {**given, "positions": given["positions"] // 17}),
            "positions are divided by 17, rounded down",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["gain", "positions", "logits", "missing", "passed", "coarse"],
)
def test_other_components_are_told_by_what_they_computed_with(
    name: str, variant: Any, words: str
) -> None:
    description = told(name, FaultVariant("an edit", variant))
    assert description is not None
    assert words in description.sentence


def test_a_number_of_the_config_is_fitted() -> None:
    name = "layers.1.attn.norm"

    def other(facts: Any) -> Any:
        return with_config(facts, rms_norm_eps=0.01)

    planting = model().planting(name)
    description = told(name, FaultVariant("epsilon", with_facts(planting, other)))
    assert description is not None
    assert "rms_norm_eps is 0.01000" in description.sentence


def test_codes_that_are_rounded_otherwise_are_told_by_the_rounding() -> None:
    name = "layers.1.attn.wq_a.act_quant"

    def by_bf16_scale(given: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> Any:
        del given
        return {**made, "block_scale": made["block_scale"] - 1}

    description = told(name, FaultVariant("smaller", with_outputs(by_bf16_scale)))
    assert description is not None
    assert "block scales are one code too small after the codes are made" in description.sentence


def test_an_operand_is_the_numbers_that_are_multiplied() -> None:
    record = model().sights(LINEAR, None)[0]
    weight = model().planting(LINEAR).weights[WEIGHT]
    operand, given = operand_of(weight), operand_of_input(record.inputs, "NVFP4")
    product = given.numbers @ operand.numbers.T
    gap = (product - record.expected["out"].double()).abs().max()
    assert float(gap) < 0.1 * float(product.abs().max())
    assert torch.equal(operand.numbers, weight.values(torch.float64))


def test_rules_for_places_and_layouts_move_every_number_to_a_place() -> None:
    for rule in places(24):
        index = rule.of(24)
        assert index.shape == (24,)
        assert 0 <= int(index.min()) <= int(index.max()) < 24, rule.words
    for grid in grids():
        where = grid.of(128, 8)
        assert where.shape == (1024,)
        assert -1 <= int(where.min()) <= int(where.max()) < 1024, grid.words


def test_powers_of_two_are_those_above_below_and_beside() -> None:
    x = torch.tensor([0.0, 1.0, 1.4, 1.6, -3.0, 6.0]).double()
    assert power_of_two(x, torch.ceil).tolist() == [0.0, 1.0, 2.0, 2.0, -4.0, 8.0]
    assert power_of_two(x, torch.floor).tolist() == [0.0, 1.0, 1.0, 1.0, -2.0, 4.0]
