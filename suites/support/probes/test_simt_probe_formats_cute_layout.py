"""The 128x4 scale layout is CuTe's own, at every coordinate, padding of each expert included."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest

from degarble.harness.formats.layouts import SWIZZLE_8X4, SWIZZLE_128X4, round_up
from degarble.suites.support.thinned import thinned

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

# matrices (experts), rows, scale columns: whole tiles, ragged in either direction, one scale.
SHAPES = ((1, 256, 16), (2, 300, 10), (3, 129, 5), (1, 1, 1), (2, 128, 4), (1, 37, 21))


@pytest.fixture
def cute_layouts() -> ModuleType:
    return import_module("degarble.suites.support.probes.cute_layouts")


@pytest.mark.parametrize(("matrices", "rows", "columns"), thinned(SHAPES))
def test_equals_cute_everywhere(
    matrices: int, rows: int, columns: int, cute_layouts: ModuleType
) -> None:
    compared, found = cute_layouts.layout_mismatches(
        SWIZZLE_128X4.batched_offset, matrices, rows, columns
    )
    assert found == []
    assert compared == matrices * rows * columns


@pytest.mark.parametrize(("matrices", "rows", "columns"), SHAPES)
def test_takes_the_storage_that_cute_spans(
    matrices: int, rows: int, columns: int, cute_layouts: ModuleType
) -> None:
    ours = matrices * SWIZZLE_128X4.storage_size(rows, columns)
    assert ours == cute_layouts.storage_bytes(matrices, rows, columns)
    assert ours == matrices * round_up(rows, 128) * round_up(columns, 4)


def test_one_wrong_coordinate_is_detected(cute_layouts: ModuleType) -> None:
    def planted(matrix: int, coordinate: tuple[int, int], rows: int, columns: int) -> int:
        offset: int = SWIZZLE_128X4.batched_offset(matrix, coordinate, rows, columns)
        return offset ^ (4 if (matrix, coordinate) == (1, (299, 9)) else 0)

    compared, found = cute_layouts.layout_mismatches(planted, 2, 300, 10)
    assert compared == 6000
    assert len(found) == 1
    assert found[0].startswith("(1, 299, 9): got ")


def test_another_layout_is_detected(cute_layouts: ModuleType) -> None:
    compared, found = cute_layouts.layout_mismatches(SWIZZLE_8X4.batched_offset, 1, 128, 4)
    assert len(found) > compared // 2
