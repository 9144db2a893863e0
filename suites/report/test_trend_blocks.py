"""Series of a history: what does not fit is refused."""

import pytest

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.report.blocks import Trend, Trends


def test_a_move_outside_of_the_nights_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match="bands 0 to 0"):
        Trend("a", ((0.0, 1.0),), 1.0, None, (1,))


def test_series_of_unequal_nights_are_refused() -> None:
    rows = (Trend("a", (None,), None, None), Trend("b", (None, None), None, None))
    with pytest.raises(ShapeMismatch, match="one length"):
        Trends("c", "x", "y", "", rows)
