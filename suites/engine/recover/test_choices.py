"""Whole numbers that stand for others are told: chosen rows, experts, and rows of a call."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.faults.model_faults import (
    CallRecord,
    FaultVariant,
    with_inputs,
    with_outputs,
)
from degarble.harness.engine.recover.choices import never_chosen
from degarble.suites.engine.recover.test_described import model, told

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    Tensors = Mapping[str, Tensor]


ROWS = 8  # few enough that some numbers are in none


def replaced(x: Tensor) -> Tensor:
    return torch.where(x == 1, 3, x)


def of_input(name: str) -> FaultVariant:
    return FaultVariant("replaced", with_inputs(lambda own: {**own, name: replaced(own[name])}))


def shuffled(_inputs: Tensors, outputs: Tensors) -> Tensors:
    """Replace a choice, and return them in another order."""
    return {**outputs, "out": replaced(outputs["out"]).flip(1)}


@pytest.mark.parametrize(("component", "variant", "words"), [
    ("layers.1.ffn.experts.w13.act_quant", of_input("experts"), "the input experts 1 is 3"),
    ("embed", of_input("tokens"), "the input tokens 1 is 3"),
    ("layers.1.attn.indexer.topk", FaultVariant("choices", with_outputs(shuffled)), "1 is 3"),
])  # fmt: skip
def test_numbers_that_stand_for_others_are_told(
    component: str, variant: FaultVariant, words: str
) -> None:
    found = told(component, variant)
    assert found is not None
    assert words in found.sentence


def losing(begin: int, end: int | None) -> FaultVariant:
    def lost(own: Tensors) -> Tensors:
        scores = own["scores"].clone()
        scores[:, begin:end] = -torch.inf
        return {**own, "scores": scores}

    return FaultVariant("lost", with_inputs(lost))


@pytest.mark.parametrize(
    ("begin", "end", "words"),
    [(20, None, "nothing after 19 is chosen, where 2"), (0, 4, "nothing before 4 is chosen"),
     (7, 8, "7 is never chosen")],
)  # fmt: skip
def test_what_is_never_chosen_is_told(begin: int, end: int | None, words: str) -> None:
    found = told("layers.1.attn.indexer.topk", losing(begin, end))
    assert found is not None
    assert words in found.sentence


def test_what_few_rows_had_to_choose_is_not_told_as_never_chosen() -> None:
    seen = torch.tensor([[0, 1], [1, 2], [0, 2], [1, 0]])
    right = seen.clone()
    right[:, 1] = 5
    scores = torch.zeros(4, 6)
    whole = CallRecord({"scores": scores}, {"out": seen}, {"out": right})
    assert [each.words for each in never_chosen([whole])] == [
        "nothing after 2 is chosen, where 5 had to be"
    ]
    right[0, 1] = 2
    assert not list(never_chosen([whole]))
    right[0, 1] = 5
    seen[1, 0] = 5
    assert not list(never_chosen([whole])), "it is chosen"
    assert not list(never_chosen([replace(whole, inputs={"scores": scores[:, :5]})]))


def test_an_exchange_is_named_beside_what_the_calls_cannot_tell_from_it() -> None:
    tokens = model().sights("embed", None)[0].inputs["tokens"][:ROWS]
    numbers = range(int(tokens.max()))
    one, other = tokens.unique()[0].item(), next(n for n in numbers if n not in tokens)
    variant = FaultVariant("replaced", with_inputs(
        lambda own: {**own, "tokens": torch.where(own["tokens"] == one, other, own["tokens"])}
    ))  # fmt: skip
    found = told("embed", variant, rows=ROWS)
    assert found is not None
    assert f"tokens {one} is {other}, wherever it stands (or" in found.sentence
    assert "explain it as well" in found.sentence


def test_a_token_that_is_read_as_another_of_the_call_is_no_matter_of_its_rows() -> None:
    """Rows of one token hold those of another one's row: true of this call, and of no other."""
    tokens = model().sights("embed", None)[0].inputs["tokens"].tolist()
    one, other = tokens[5], tokens[20]  # every 60th is the same
    variant = FaultVariant("read", with_inputs(
        lambda own: {**own, "tokens": torch.where(own["tokens"] == one, other, own["tokens"])}
    ))  # fmt: skip
    found = told("embed", variant, rows=70)
    assert found is not None
    assert f"tokens {one} is {other}, wherever it stands" in found.sentence
    assert not found.here


def test_the_row_before_is_told() -> None:
    late = FaultVariant("late", with_outputs(lambda _, made: {"out": made["out"].roll(1, 0)}))
    found = told("embed", late)
    assert found is not None
    assert "holds the numbers of the row before it" in found.sentence
