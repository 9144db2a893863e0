from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import InvalidArgument, UnwritablePath, WorkerLost
from degarble.harness.checkpoint.write.workers import run_each

if TYPE_CHECKING:
    from pathlib import Path


def squared(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def fails_at_three(number: int) -> int:
    if number == 3:
        raise UnwritablePath("shard", number, "another", "Try.")
    return number


def dies_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
    return number


def exits_at_three(number: int) -> int:
    if number == 3:
        os._exit(7)
    return number


def waits_for_ever(path: Path) -> None:
    path.write_text(str(os.getpid()))
    if path.name == "last":
        while len(list(path.parent.iterdir())) < 2:
            time.sleep(0.01)
        os._exit(1)
    signal.pause()


@pytest.mark.parametrize("workers", [1, 3])
def test_every_task_is_done_once(workers: int) -> None:
    found = dict(run_each(squared, range(20), workers))
    assert {task: answer for task, (answer, _) in found.items()} == {n: n * n for n in range(20)}
    processes = {process for _, process in found.values()}
    assert (processes == {os.getpid()}) == (workers == 1)


def test_no_task_needs_no_worker() -> None:
    assert list(run_each(squared, [], 3)) == []
    assert list(run_each(squared, [2], 3)) == [(2, (4, os.getpid()))]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_refusal_comes_through(workers: int) -> None:
    with pytest.raises(UnwritablePath, match="shard = 3") as caught:
        list(run_each(fails_at_three, range(6), workers))
    assert ("In a worker process" in "".join(getattr(caught.value, "__notes__", []))) == (
        workers > 1
    )


def test_a_killed_worker_is_named_with_its_task() -> None:
    with pytest.raises(WorkerLost, match="worker process for number 3 = 'killed by SIGKILL'"):
        list(run_each(dies_at_three, range(6), 2, "number {}".format))
    with pytest.raises(WorkerLost, match="3 = 'ended with status 7'"):
        list(run_each(exits_at_three, range(6), 2))


def test_the_others_are_ended_at_once(tmp_path: Path) -> None:
    with pytest.raises(WorkerLost, match="last"):  # else this would wait for ever
        list(run_each(waits_for_ever, [tmp_path / "first", tmp_path / "last"], 2, str))
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_no_worker_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least 1"):
        list(run_each(squared, [1, 2], 0))
