"""One number of a weight's row that was another one is found by what each output allows."""

from __future__ import annotations

import random

import pytest
import torch

from degarble.harness.engine.recover.products import ProductView
from degarble.harness.engine.recover.weights import Element, RecoveredRow, recovered_weight
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import FP8_ROW, NVFP4, BlockFormat
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.weight import Weight
from degarble.suites.campaigns.causes.flipped_bits import KINDS, flip, flipped

N, K = 8, 128


def recovered(
    form: BlockFormat, rows: int, at: tuple[int, int, int], alike: int | None = None
) -> RecoveredRow | None:
    """Multiply by a weight with one flipped bit, round to BF16, and solve for the weight."""
    given, x = torch.randn(N, K), torch.randn(rows, K, dtype=torch.float64)
    if alike is not None:
        given[:, alike], x[:, alike] = given[:, at[1]], x[:, at[1]]
    weight = Weight.of(quantise(given, form, CANONICAL))
    numbers = weight.values(torch.float64)
    seen = (x @ flipped(weight, *at).values(torch.float64).T).bfloat16().double()
    product = x @ numbers.T
    size = torch.maximum(seen.abs(), product.abs())
    allowed = torch.exp2(torch.frexp(size).exponent.double() - 8)
    view = ProductView("w", weight, x, numbers, seen, product, allowed, torch.arange(rows))
    found = recovered_weight(view, "w", {"w": numbers.float()})
    return None if found is None else found[0].rows[0]


@pytest.mark.parametrize("form", [NVFP4, FP8_ROW], ids=lambda form: form.name)
def test_a_flipped_bit_is_told_by_eight_rows(form: BlockFormat, seed: int) -> None:
    drawn, told = random.Random(seed), 0
    torch.manual_seed(seed)
    for _ in range(24):
        bit = form.element.bits - 1 - drawn.randrange(2)  # a sign, or the exponent's first
        at = drawn.randrange(N), drawn.randrange(K), bit
        row = recovered(form, 8, at)
        if row is None or row.others:
            continue
        (change,) = row.changes
        assert isinstance(change, Element)
        assert (row.row, change.column, change.bits) == (at[0], at[1], (bit,))
        told += not change.as_well
    assert told >= 22


def test_elements_that_explain_it_as_well_are_counted(seed: int) -> None:
    torch.manual_seed(seed)
    found = [recovered(NVFP4, 8, (3, 17, 3), alike=18) for _ in range(8)]
    assert {row.others for row in found if row is not None} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("seed_of_flip", range(4 * len(KINDS)))
def test_flips_in_models_are_told(seed_of_flip: int) -> None:
    assert flip(seed_of_flip).outcome in ("ok", "unseen")
