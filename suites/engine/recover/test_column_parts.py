"""Describe one operation in some columns by fewer rows than columns, and never by one row."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.diagnose.trial import calls_in
from degarble.harness.engine.faults.model_faults import (
    CallRecord,
    FaultVariant,
    RowPositions,
    with_inputs,
)
from degarble.harness.engine.recover import column_parts, shares
from degarble.harness.engine.recover.column_parts import (
    LEAVES,
    InputColumns,
    ProductColumns,
    _best,
    rules_in_columns,
)
from degarble.harness.engine.recover.described import shows_enough
from degarble.harness.engine.recover.numbers import functions
from degarble.harness.engine.recover.responses import Seen
from degarble.suites.engine.recover.test_described import model, told
from degarble.suites.engine.recover.test_differences import drawn, in_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    Change = Callable[[Tensor], Tensor]

LINEAR, WEIGHT = "layers.1.attn.wq_a", "attn.wq_a"
ROUNDED = 2.0**-12
CHANGES = {
    "scaled": (in_columns(slice(3, 9), lambda x: x * 0.83),
               "the numbers of columns 3 to 8 are multiplied by 0.8300"),
    "shifted": (in_columns(slice(5, 6), lambda x: x - 1.25),
                "the numbers of column 5 are 1.250 too small"),
    "every": (in_columns(slice(1, None, 4), torch.abs),
              "the numbers of columns 1, 5, ... (every 4) are without their sign"),
    "emptied": (in_columns(slice(4, 20), torch.zeros_like), "the numbers of columns 4 to 19 are 0"),
    "all": (torch.relu, "all numbers are 0 where they are negative"),
}  # fmt: skip


def gap_of(made: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return a difference as it is after rounding, and what is allowed."""
    allowed = ROUNDED * right.abs().clamp(min=0.1)
    noise = 2 * torch.rand(made.shape, generator=torch.Generator().manual_seed(3)) - 1
    return made - right + allowed * noise / 2, allowed


@pytest.mark.parametrize("name", CHANGES)
def test_an_operand_of_a_product_is_told_from_few_rows(name: str) -> None:
    change, words = CHANGES[name]
    own, other = drawn(0, 5), drawn(1, 12)  # 60 numbers of 5 by 32 unknown ones
    gap, allowed = gap_of(change(own) @ other.T, own @ other.T)
    rule = rules_in_columns(ProductColumns(own, other, gap, allowed))[0]
    assert words in rule.words
    assert torch.allclose(rule.apply(drawn(2)), change(drawn(2)), atol=1e-3)


def test_one_number_in_some_columns_is_told() -> None:
    change = in_columns(slice(6, 14), lambda x: torch.full_like(x, 0.3))
    own, other = drawn(0, 5), drawn(1, 12)
    gap, allowed = gap_of(change(own) @ other.T, own @ other.T)
    words = [rule.words for rule in rules_in_columns(ProductColumns(own, other, gap, allowed))]
    assert "columns 6 to 13 hold 0.3000" in words[0]


@pytest.mark.parametrize("name", ["scaled", "every", "all"])
def test_an_input_of_an_activation_is_told_though_half_as_much_comes_out(name: str) -> None:
    change, words = CHANGES[name]
    own = drawn(0, 6)

    def call(inputs: Mapping[str, Tensor]) -> Tensor:
        gate, up = inputs["x"].double().chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    right = call({"x": own})
    gap, allowed = gap_of(call({"x": change(own)}), right)
    tables = InputColumns(Seen({"x": own}, right + gap, allowed, call), "x")
    assert words in rules_in_columns(tables)[0].words


def test_few_rows_rule_out_no_operation_that_all_rows_allow() -> None:
    own, some = drawn(0, 12), list(functions())[::4]

    def call(inputs: Mapping[str, Tensor]) -> Tensor:
        gate, up = inputs["x"].double().chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    right = call({"x": own})
    gap, allowed = gap_of(call({"x": CHANGES["every"][0](own)}), right)
    tables = InputColumns(Seen({"x": own}, right + gap, allowed, call), "x")
    skipped = 0
    for each in some:
        delta = each.apply(own) - own
        least = min((columns.left for columns in _best(tables, delta)), default=1.0)
        skipped += tables.leaves_more(delta, LEAVES)
        assert not (tables.leaves_more(delta, LEAVES) and least <= LEAVES), each.words
        assert not tables.leaves_more(delta, least * 1.001)
    assert skipped > len(some) / 2


def test_sets_of_columns_that_add_up_are_not_computed_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sums of an input whose columns add up are those that every set of them gives."""
    own, matrix = drawn(0, 6), drawn(1, 12)

    def call(inputs: Mapping[str, Tensor]) -> Tensor:
        return inputs["x"].double() @ matrix.T

    gap, allowed = gap_of(call({"x": own * 1.1}), call({"x": own}))
    seen = Seen({"x": own}, call({"x": own}) + gap, allowed, call)
    added = list(InputColumns(seen, "x").sets(own * 0.1))
    monkeypatch.setattr(column_parts, "_ADDITIVE", -1.0)
    apart = list(InputColumns(seen, "x").sets(own * 0.1))
    assert len(added) == len(apart) == 2
    for (along, size, ends), (one, other, which) in zip(added, apart, strict=True):
        assert torch.allclose(along, one)
        assert torch.allclose(size, other)
        assert ends(5) == which(5)


def test_noise_and_one_row_give_no_number() -> None:
    own, other = drawn(0, 6), drawn(1, 12)
    assert not rules_in_columns(ProductColumns(own, other, drawn(5, 6, 12), torch.ones(6, 12)))
    few, wide = own[:1], other[:3]
    gap, allowed = gap_of((few * 1.3) @ wide.T, few @ wide.T)
    words = [rule.words for rule in rules_in_columns(ProductColumns(few, wide, gap, allowed))]
    assert not any("multiplied" in each or "too" in each for each in words)


def test_an_input_that_one_rank_misread_is_told_in_its_columns() -> None:
    def turned(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {**inputs, "block_scale": inputs["block_scale"].flip(-1)}

    width = model().planting(LINEAR).weights[WEIGHT].shape[0]
    change = partial(shares.only_in, {"out": (width // 2, width)}, with_inputs(turned))
    description = told(LINEAR, FaultVariant("half", change))
    assert description is not None
    assert f"in columns {width // 2} to {width - 1} of the outputs alone" in description.sentence


def test_other_choices_of_few_rows_are_too_little_for_a_rule() -> None:
    experts, logits = torch.arange(12).reshape(6, 2), drawn(0, 6, 4)
    for count in (1, 3, 4):
        seen = experts.clone()
        seen[:count] += 1
        outputs = {"experts": seen, "weights": logits[:, :2]}
        expected = {"experts": experts, "weights": logits[:, :2]}
        assert shows_enough([CallRecord({}, outputs, expected)]) == (count > 3)
    other = {"experts": seen, "weights": logits[:, 2:]}  # numbers tell more
    assert shows_enough([CallRecord({}, other, expected)])


def test_outputs_as_wide_as_their_call_have_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = iter((33, 34))

    def beyond(*_given: object) -> dict[str, tuple[Tensor, bool]]:
        return {"scores": (torch.ones(2, next(wide), dtype=torch.bool), True)}

    monkeypatch.setattr(shares, "outputs_beyond", beyond)
    record = CallRecord({}, {}, {})
    assert shares.shares_of(model().naming(LINEAR), [record, record]) is None


def test_a_call_that_is_cut_from_several_keeps_its_step() -> None:
    calls = torch.tensor([[4, 2, 9], [4, 2, 9], [7, 1, 10]])
    flat = torch.zeros(3, dtype=torch.int64)
    places = RowPositions(flat, flat.bool(), flat, None, calls)
    x = drawn(0, 3)
    joined = CallRecord({"x": x}, {"out": x}, {"out": x}, step=4, rows=(2, 1), places=places)
    assert [call.step for call in calls_in(joined)] == [4, 7]
