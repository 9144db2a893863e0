"""Boxes against arrays that are painted element by element."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.checkpoint.audit.loader import targets
from degarble.harness.checkpoint.audit.loader.targets import byte_runs, cover, joined
from degarble.harness.checkpoint.read.types import TensorEntry
from degarble.harness.model.types import Box

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def covered(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Box, ...]]:
    shape = draw(SHAPES)
    box = st.tuples(
        *(
            st.tuples(st.integers(0, extent), st.integers(0, extent)).map(
                lambda pair: (min(pair), max(pair))
            )
            for extent in shape
        )
    )
    return shape, tuple(map(Box, draw(st.lists(box, max_size=6))))


def painted(shape: tuple[int, ...], held: tuple[Box, ...]) -> np.ndarray:
    found = np.zeros(shape, dtype=int)
    for box in held:
        found[tuple(slice(*each) for each in box.ranges)] += 1
    return found


@given(covered())
def test_cover_is_what_painting_shows(case: tuple[tuple[int, ...], tuple[Box, ...]]) -> None:
    shape, held = case
    counts = painted(shape, held)
    found = cover(shape, held)
    missing, twice = painted(shape, found.missing), painted(shape, found.twice)
    assert ((counts == 0) == (missing == 1)).all()
    assert ((counts >= 2) == (twice == 1)).all()
    assert max(missing.max(initial=0), twice.max(initial=0)) <= 1
    union = painted(shape, joined(shape, held))
    assert ((counts > 0) == (union == 1)).all()


def test_a_planted_gap_of_one_element_is_found() -> None:
    experts = [
        Box(((e, e + 1), (half * 6, half * 6 + 6), (0, 8))) for e in range(48) for half in (0, 1)
    ]
    assert cover((48, 12, 8), tuple(experts)) == ((), ())
    experts[17] = Box(((8, 9), (6, 12), (0, 7)))
    assert cover((48, 12, 8), tuple(experts)).missing == (Box(((8, 9), (6, 12), (7, 8))),)
    experts[17] = Box(((8, 9), (5, 12), (0, 8)))
    assert cover((48, 12, 8), tuple(experts)).twice == (Box(((8, 9), (5, 6), (0, 8))),)


def test_slabs_that_are_alike_are_worked_out_once() -> None:
    experts = [Box(((e, e + 1), (h, h + 1), (0, 8))) for e in range(384) for h in (0, 1)]
    targets._sweep.cache_clear()
    assert cover((384, 2, 8), tuple(experts)) == ((), ())
    assert targets._sweep.cache_info().misses < 10


def test_a_box_outside_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="leaves"):
        cover((4,), (Box(((0, 5),)),))


@given(covered())
def test_runs_are_the_bytes_that_painting_shows(
    case: tuple[tuple[int, ...], tuple[Box, ...]],
) -> None:
    shape, held = case
    count = int(np.prod(shape))
    entry = TensorEntry("t", "F32", shape, Path("f"), 100, 100 + 4 * count)
    for box in held:
        runs = byte_runs(entry, box)
        found = np.zeros(4 * count, dtype=int)
        for begin, end in runs:
            assert end - begin == runs.length
            found[begin - 100 : end - 100] += 1
        inside = np.repeat(painted(shape, (box,)).reshape(-1), 4)
        assert (found == inside).all()
        assert runs.nbytes == 4 * box.count


def test_rows_of_a_matrix_are_one_run() -> None:
    entry = TensorEntry("t", "BF16", (512, 64), Path("f"), 1000, 1000 + 512 * 128)
    runs = byte_runs(entry, Box(((128, 256), (0, 64))))
    assert (runs.count, runs.first, runs.nbytes) == (1, 1000 + 128 * 128, 128 * 128)
    assert byte_runs(entry, Box(((0, 512), (0, 32)))).count == 512


def test_half_a_byte_is_refused() -> None:
    entry = TensorEntry("t", "F4", (2, 6), Path("f"), 0, 6)
    assert byte_runs(entry, Box(((1, 2), (2, 4)))).first == 4
    with pytest.raises(ShapeMismatch, match="whole bytes of F4"):
        byte_runs(entry, Box(((0, 2), (1, 3))))
