from __future__ import annotations

import pytest

from degarble.harness.record.blocks import HeatMap, Table
from degarble.harness.runs.demo_evidence import evidence_blocks
from degarble.suites.runs.test_demo import whole_story

COPIES = {copy.fault.id: copy for copy in whole_story().damaged if copy.fault is not None}


def test_swapped_neighbours_can_be_seen_by_eye() -> None:
    (table,) = evidence_blocks(COPIES["M10.nibble_order"])
    assert isinstance(table, Table)
    found = [row[1] for row in table.rows]
    expected = [row[2] for row in table.rows]
    assert found[0::2] == expected[1::2]
    assert found[1::2] == expected[0::2]
    assert found != expected


@pytest.mark.parametrize("name", [name for name in COPIES if name.startswith("M11")])
def test_misplaced_scales_are_mapped(name: str) -> None:
    table, heat = evidence_blocks(COPIES[name])
    assert isinstance(table, Table)
    assert isinstance(heat, HeatMap)
    values = [value for row in heat.values for value in row if value is not None]
    assert len(values) == 32 * 32
    assert sum(value > 0 for value in values) > 500


def test_one_number_needs_no_map() -> None:
    assert evidence_blocks(COPIES["M01.inverse"]) == []


def test_a_healthy_copy_has_nothing_to_show() -> None:
    assert evidence_blocks(whole_story().healthy) == []
