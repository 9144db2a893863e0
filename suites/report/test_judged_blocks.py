from __future__ import annotations

import math

import pytest

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.harness.report.blocks import JudgedCell, JudgedMap, Profile


def judged(steps: tuple[float, ...], rows: int = 1) -> JudgedMap:
    readings = ((JudgedCell(1.0),),) * rows
    return JudgedMap("map", "r", "c", ("0",), ("a",), readings, steps)


def test_a_shade_begins_at_its_step() -> None:
    rising = judged((0.5, 1.0, 10.0))
    assert [rising.passed(v) for v in (0.0, 0.5, 0.9, 1.0, 99.0, math.inf, math.nan)] == [
        0, 1, 1, 2, 3, 3, 3,
    ]  # fmt: skip
    falling = judged((0.9999, 0.99, 0.5))
    assert [falling.passed(v) for v in (1.0, 0.9999, 0.995, 0.5, -1.0, math.nan)] == [
        0, 1, 1, 3, 3, 3,
    ]  # fmt: skip


@pytest.mark.parametrize("steps", [(), (1.0, 3.0, 2.0), (1.0, math.nan), (0.0, math.inf)])
def test_steps_that_are_no_steps_are_refused(steps: tuple[float, ...]) -> None:
    with pytest.raises(InvalidArgument, match="finite numbers that rise or fall"):
        judged(steps)


def test_a_ragged_map_and_an_unlabelled_profile_are_refused() -> None:
    with pytest.raises(ShapeMismatch, match="readings of map 'map'"):
        judged((1.0,), rows=2)
    with pytest.raises(ShapeMismatch, match="labels of profile 'p' = 1: expected 2"):
        Profile("p", ("0",), (1.0, 2.0))
