"""Splitting, views and tables: every part once, no copy, refusals by name."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
)
from degarble.harness.formats.fast.buffers import (
    PARTS_A_THREAD,
    bits_of,
    bits_view,
    output_tensor,
    run_parts,
    values_of,
)
from degarble.harness.formats.number_formats import E4M3
from degarble.suites.hang_guard import HANG_SECONDS


@given(count=st.integers(0, 40), grain=st.integers(1, 9), threads=st.integers(1, 5))
def test_parts_cover_the_range_once_and_in_order(count: int, grain: int, threads: int) -> None:
    parts = run_parts(lambda start, stop: (start, stop), count, grain, threads)
    assert len(parts) <= (1 if threads == 1 else threads * PARTS_A_THREAD)
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == count
    if len(parts) > 1:
        assert min(stop - start for start, stop in parts) >= grain


def test_as_many_threads_work_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=HANG_SECONDS)
    seen = set()

    def work(_start: int, _stop: int) -> None:
        meeting.wait()
        seen.add(threading.get_ident())

    run_parts(work, 12, 1, 3)
    assert len(seen) == 3
    assert threading.get_ident() in seen


def test_a_busy_thread_leaves_parts_to_the_others() -> None:
    released = threading.Event()
    done: list[int] = []

    def work(start: int, _stop: int) -> None:
        if start == 0:
            assert released.wait(HANG_SECONDS)
        done.append(start)
        if len(done) == PARTS_A_THREAD * 2 - 1:
            released.set()

    run_parts(work, PARTS_A_THREAD * 2, 1, 2)
    assert done[-1] == 0


def test_the_default_is_the_number_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert len(run_parts(lambda start, _stop: start, 100, 1, None)) == 3 * PARTS_A_THREAD


@pytest.mark.parametrize("error", [ArithmeticError, IndexError])
@pytest.mark.parametrize("broken", [0, 9])
def test_what_a_part_raises_comes_through(error: type[Exception], broken: int) -> None:
    def work(start: int, stop: int) -> None:
        if start <= broken < stop:
            message = "part broken"
            raise error(message)

    with pytest.raises(error, match="part broken"):
        run_parts(work, 10, 1, 2)


def test_no_threads_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="threads"):
        run_parts(lambda _start, _stop: None, 10, 1, 0)


def test_a_view_shares_its_memory() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    view = bits_view("x", tensor, (torch.bfloat16,))
    view[4] = 0x3F80
    assert view.dtype == np.uint16
    assert tensor.tolist() == [[0, 0, 0], [0, 1, 0]]


def test_a_view_refuses_by_name() -> None:
    with pytest.raises(DtypeMismatch, match=r"x = torch\.float32: expected torch\.uint8"):
        bits_view("x", torch.zeros(2), (torch.uint8,))
    with pytest.raises(LayoutMismatch, match="strides"):
        bits_view("x", torch.zeros(4, 4).t(), (torch.float32,))
    with pytest.raises(InvalidArgument, match="device of x"):
        bits_view("x", torch.zeros(2, device="meta"), (torch.float32,))
    with pytest.raises(ShapeMismatch, match="out"):
        output_tensor(torch.zeros(2), (3,), torch.float32)


def test_tables_round_to_nearest_even() -> None:
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, 1e-40], dtype=np.float32)
    expected = torch.from_numpy(ties).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(bits_of(ties, torch.bfloat16), expected)
    np.testing.assert_array_equal(bits_of(ties, torch.float32), ties.view(np.uint32))


def test_the_values_of_a_format_cannot_be_overwritten() -> None:
    values = values_of(E4M3)
    assert values[0x7E] == 448
    assert values_of(E4M3) is values
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 1
