"""Signs that are not the reference's are told by row or column, and only where there is a line."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.checkpoint.audit.against.causes import describe_signs

Y_MK = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))


def turned(rows: object, columns: object) -> torch.Tensor:
    x_MK = Y_MK * (1 + 0.08 * torch.randn(96, 64, generator=torch.Generator().manual_seed(2)))
    x_MK[rows, columns] *= -1  # type: ignore[index]
    return x_MK


EVERY = slice(None)
TOLD = {
    "one row": (turned(7, EVERY), "every sign turned in row 307."),
    "rows": (turned([3, 5, 6], EVERY), "every sign turned in 3 rows (rows 303, 305-306)."),
    "many runs": (turned(slice(0, 40, 2), EVERY), "310, 312, 314 and 12 runs more)."),
    "one column": (turned(EVERY, 9), "every sign turned in column 9."),
    "every sign": (turned(EVERY, EVERY), "with every sign turned."),
    "no line": (turned(slice(0, 48), slice(0, 32)), "its sign in 75.0% of the places."),
    "lost": (Y_MK.abs(), "It has no negative value."),
}


@pytest.mark.parametrize("what", TOLD)
def test_what_is_turned_is_named(what: str) -> None:
    x_MK, told = TOLD[what]
    said = describe_signs(x_MK, Y_MK, 300)
    assert said is not None
    assert said.endswith(told)


def test_healthy_and_foreign_values_say_nothing() -> None:
    assert describe_signs(turned([], EVERY), Y_MK) is None
    assert describe_signs(torch.rand(96, 64), Y_MK) is None


def test_rows_of_zeros_are_no_turned_rows() -> None:
    x_MK, y_MK = turned(7, EVERY), Y_MK.clone()
    x_MK[20:30] = y_MK[20:30] = 0
    said = describe_signs(x_MK, y_MK)
    assert said is not None
    assert said.endswith("in row 7.")
