"""What lies a word or a chunk on is that of the layout's own addresses."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad

from degarble.harness.engine.faults.layout.swizzled_words import chunks_behind, words_behind
from degarble.harness.formats.layouts import SWIZZLE_128X4, from_layout, to_layout


@pytest.mark.parametrize("rows", [3, 40, 128])
@pytest.mark.parametrize("columns", [4, 6, 12])
def test_words_lie_as_the_swizzle_has_them(rows: int, columns: int) -> None:
    scales = torch.randint(1, 255, (rows, columns), dtype=torch.uint8)
    stored = to_layout(scales, SWIZZLE_128X4)
    behind = from_layout(pad(stored[4:], (0, 4)), SWIZZLE_128X4, rows, columns)
    assert torch.equal(words_behind(scales), behind)


def test_the_last_row_of_all_tiles_has_nothing_behind_it() -> None:
    made = words_behind(torch.ones(300, 8, dtype=torch.uint8))
    assert made[127].tolist() == made[255].tolist() == [1] * 4 + [0] * 4
    assert made[254].tolist() == [1] * 8


@pytest.mark.parametrize("tile", [8, 64])
def test_chunks_change_places_every_four_rows(tile: int) -> None:
    codes = torch.randint(1, 255, (16, 96), dtype=torch.uint8)
    made, lies = chunks_behind(tile, codes), {}
    for row in range(16):
        for chunk in range(6):
            step, half = divmod(chunk, 2)
            place = step * 2 * tile + row % tile * 2 + (row // 4 % 2 ^ half)
            lies[row // tile, place] = row, chunk
    nothing = torch.zeros(16, dtype=torch.uint8)
    for (part, place), (row, chunk) in lies.items():
        behind = lies.get((part, place + 1))
        expected = nothing if behind is None else codes[behind[0]].unflatten(0, (6, 16))[behind[1]]
        assert torch.equal(made[row].unflatten(0, (6, 16))[chunk], expected), (row, chunk)
