"""Rules for places that are tried many at once are those that hold one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.recover.changes import (
    HOLDS,
    MOST_AT_ONCE,
    Equations,
    OperandChange,
    changes_of,
)
from degarble.harness.engine.recover.operands import StoredOperand

if TYPE_CHECKING:
    from torch import Tensor

ROWS, COLUMNS, OTHERS = 6, 48, 40


def equations(used: Tensor, own: Tensor) -> Equations:
    """Return what numbers of an operand gave, with those that it stores."""
    one = torch.ones(len(own), 1, dtype=torch.float64)
    other = torch.randn(OTHERS, own.shape[1], dtype=torch.float64)
    right = own @ other.T
    allowed = torch.full_like(right, 1e-6)
    operand = StoredOperand(own, one, one[:1], 1)
    return Equations(operand, torch.arange(len(own)), other, used @ other.T, right, allowed)


def test_what_is_tried_at_once_holds_alone(seed: int) -> None:
    torch.manual_seed(seed)
    own = torch.randn(ROWS, COLUMNS, dtype=torch.float64)
    given = equations(own.roll(-7, 1), own)
    tried = [own.roll(-by % COLUMNS, 1) for by in range(2 * COLUMNS)]  # more than one batch
    assert len(tried) > MOST_AT_ONCE
    named = [OperandChange(str(by), lambda _operand: own) for by in range(len(tried))]
    found = [each.words for each in given.giving(zip(named, tried, strict=True))]
    assert found == [str(by) for by, x in enumerate(tried) if given.given_by(x) >= HOLDS]
    assert len(found) == 2


def test_a_rotation_of_columns_and_one_of_rows_are_told(seed: int) -> None:
    torch.manual_seed(seed)
    own = torch.randn(ROWS, COLUMNS, dtype=torch.float64)
    for axis, by, words in ((1, 7, "of columns are those of columns 7 after"),
                            (0, 2, "of rows are those of rows 2 after")):  # fmt: skip
        found = changes_of(equations(own.roll(-by, axis), own), constant=False)
        assert any(words in change.words for change in found)
