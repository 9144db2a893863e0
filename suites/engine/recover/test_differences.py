"""What was done to a matrix is told by a rule, in the part in which it was done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.recover.differences import by_value, rules_of
from degarble.harness.engine.recover.maps import Sides
from degarble.harness.engine.recover.matrices import recovered_matrix
from degarble.harness.engine.recover.products import ProductView
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

EPSILON = 2.0**-20


def drawn(seed: int, rows: int = 24, columns: int = 32) -> Tensor:
    return torch.randn(
        rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )  # fmt: skip


def sides_of(right: Tensor, seen: Tensor) -> Sides:
    return Sides("out", seen, right, EPSILON * (1 + right.abs()))


def in_columns(part: slice, of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def changed(x: Tensor) -> Tensor:
        made = x.clone()
        made[:, part] = of(x[:, part])
        return made

    return changed


CHANGES = {
    "scaled": (in_columns(slice(3, 9), lambda x: x * 0.83),
               "the numbers of columns 3 to 8 are multiplied by 0.8300"),
    "shifted": (lambda x: x - 1.25, "all numbers are 1.250 too small"),
    "every": (in_columns(slice(1, None, 4), lambda x: x.abs()),
              "the numbers of columns 1, 5, ... (every 4) are without their sign"),
    "bounds": (in_columns(slice(7, 8), lambda x: x.clamp(-0.5, 0.5)),
               "the numbers of column 7 are clamped to -0.5000 and 0.5000"),
    "held": (in_columns(slice(0, 4), lambda x: torch.full_like(x, 0.3)),
             "the numbers of columns 0 to 3 hold 0.3000"),
    "rolled": (lambda x: x.roll(5, 1), "columns are rotated by 27"),
    "drawn": (lambda x: x[:, torch.randperm(32, generator=torch.Generator().manual_seed(1))],
              "columns hold the numbers of others"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_rule_is_told_and_holds_for_other_numbers(name: str) -> None:
    change, words = CHANGES[name]
    right, other = drawn(0), drawn(1)
    rule = next(rules_of(sides_of(right, change(right))))
    assert words in rule.words
    assert torch.allclose(rule.apply(other), change(other), atol=1e-4)


def test_lines_that_others_would_do_for_are_said_and_are_few() -> None:
    """Two columns differ too little to be told apart, and one of them stands elsewhere."""
    right = drawn(4)
    right[:, 9] = right[:, 8] + EPSILON / 8
    order = torch.arange(32)
    order[torch.tensor([1, 2, 3, 4])] = torch.tensor([20, 21, 9, 23])
    rule = next(rules_of(sides_of(right, right[:, order])))
    assert "20 in 1, 21 in 2, 9 in 3" in rule.words
    assert "(in column 3 others explain it as well)" in rule.words
    alone = torch.arange(32)
    alone[3] = 9
    assert not any("others" in each.words for each in rules_of(sides_of(right, right[:, alone])))


@pytest.mark.parametrize("part", [(slice(4, 12), slice(None)), (slice(None), slice(2, 20, 3))])
def test_rows_of_a_weight_that_moved_are_told_in_their_part(part: tuple[slice, slice]) -> None:
    right = drawn(2)
    seen = right.clone()
    seen[part] = seen[part].roll(3, 0)
    rule = next(rules_of(sides_of(right, seen), rows=True))
    assert torch.equal(rule.apply(right), seen)


@pytest.mark.parametrize(("begin", "told"), [(6, False), (3, True)])
def test_two_rows_of_tokens_are_not_every_so_many(begin: int, told: bool) -> None:
    right = drawn(2)
    seen = right.clone()
    seen[begin::10, 3:9] += 0.5
    assert bool(list(rules_of(sides_of(right, seen)))) is told
    assert list(rules_of(sides_of(right, seen), rows=True)), "rows of a weight stay what they are"


def test_no_rule_is_told_of_other_numbers() -> None:
    assert not list(rules_of(sides_of(drawn(3), drawn(4))))
    assert not list(rules_of(sides_of(drawn(3), drawn(3))))


def test_nothing_is_told_where_two_columns_may_have_been_meant() -> None:
    right = drawn(5)
    right[:, 9] = right[:, 4] * (1 + EPSILON / 4)
    seen = in_columns(slice(20, 21), lambda _: right[:, 4:5])(right)
    assert not any("hold the numbers" in rule.words for rule in rules_of(sides_of(right, seen)))


def test_numbers_of_a_weight_are_solved_for_in_few_columns_and_anywhere() -> None:
    x, right = drawn(6, 40, 32), drawn(7, 24, 32)
    for part, rows in ((slice(3, 20, 4), 20), (slice(0, 32), 40)):
        used = in_columns(part, lambda w: w.roll(5, 0))(right)
        view = product(x[:rows], used, right)
        found = recovered_matrix(view)
        assert found is not None
        assert torch.allclose(found.seen, used, atol=1e-4)
        assert torch.equal(next(rules_of(found, rows=True)).apply(right), used)
        assert recovered_matrix(view.of_rows(torch.arange(6))) is None


def product(x: Tensor, used: Tensor, right: Tensor) -> ProductView:
    seen, at = x @ used.T, torch.arange(len(x))
    allowed = torch.full_like(seen, 1e-6)
    return ProductView("weight", Weight(value=right), x, right, seen, x @ right.T, allowed, at)


def test_a_part_of_a_table_whose_ends_were_not_looked_up_is_not_told() -> None:
    right = drawn(8)
    seen = in_rows(slice(8, 12), right)
    for unknown, told in ((2, True), (7, False), (12, False)):
        allowed = EPSILON * (1 + right.abs())
        allowed[unknown] = torch.inf
        rules = list(rules_of(Sides("out", seen, right, allowed), rows=True))
        assert bool(rules) is told


def in_rows(part: slice, right: Tensor) -> Tensor:
    made = right.clone()
    made[part] *= 0.5
    return made


def test_columns_without_the_numbers_end_no_part() -> None:
    """Choices that are exchanged in half of the columns, of which the first has none of them."""
    right = torch.randint(10, 60, (24, 12), generator=torch.Generator().manual_seed(4)).double()
    right[::3, 1:] = 53
    right[1::3, 1:] = 54
    seen = right.clone()
    seen[:, :6] = by_value({53.0: 54.0, 54.0: 53.0}, right[:, :6])
    right[:, 0], seen[:, 0] = 7.0, 7.0
    assert not list(rules_of(Sides("out", seen, right, torch.zeros_like(right), 0.0)))
    right[0, 0], seen[0, 0] = 54.0, 53.0
    (rule,) = rules_of(Sides("out", seen, right, torch.zeros_like(right), 0.0))
    assert "columns 0 to 5" in rule.words
