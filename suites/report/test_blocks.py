from __future__ import annotations

import math

import pytest

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.harness.report.blocks import BLOCKS, Block, Column, HeatMap, HeatScale, Table


def test_every_block_has_one_name() -> None:
    assert set(BLOCKS.values()) == set(Block.__args__)


def test_a_ragged_table_is_refused_with_its_row() -> None:
    with pytest.raises(ShapeMismatch, match=r"row 1 of table 'cells' = 1: expected 2 cells"):
        Table("cells", (Column("a"), Column("b")), (("x", 1), ("y",)))


@pytest.mark.parametrize(
    ("values", "anchors"),
    [
        (((1.0,), (1.0, 2.0)), ()),
        (((1.0, 2.0),), ()),
        ((), ()),
        (((1.0, 2.0), (3.0, 4.0)), (("a", "b"),)),
    ],
)
def test_a_ragged_heat_map_is_refused(
    values: tuple[tuple[float, ...], ...], anchors: tuple[tuple[str, ...], ...]
) -> None:
    with pytest.raises(ShapeMismatch, match="heat map 'map'"):
        HeatMap("map", "r", "c", ("0", "1"), ("a", "b"), values, HeatScale(0, 1), anchors)


@pytest.mark.parametrize("end", [1.0, math.nan])
def test_a_scale_without_extent_is_refused(end: float) -> None:
    with pytest.raises(InvalidArgument, match="two different finite ends"):
        HeatScale(end, end)


def test_a_scale_clips_and_turns_round() -> None:
    rising, falling = HeatScale(1.0, 3.0), HeatScale(1.0, 0.98)
    assert [rising.position(v) for v in (0.0, 1.0, 2.0, 9.0)] == [0, 0, 0.5, 1]
    assert falling.position(1.0) == 0
    assert falling.position(0.5) == 1
    assert math.isnan(rising.position(math.nan))
