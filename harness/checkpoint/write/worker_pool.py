"""Run one function over many tasks, in several processes of this machine.

A worker holds one task at a time, so if it dies (a signal, too little memory, a crash of native
code) WorkerLost names the task, the signal or status, and the remedy. The first failure ends the
others; finished tasks are kept. With one worker everything runs in the calling process. A `Cluster`
may replace the number of workers: same tasks, same results.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from multiprocessing import current_process, get_context
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from degarble.harness.base.errors import InvalidArgument, WorkerLost
from degarble.harness.checkpoint.write.worker_process import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.connection import Connection

_IMPORTED = "degarble.harness.checkpoint.transform.convert.worker_imports"

Task = TypeVar("Task")
Result = TypeVar("Result")


class Cluster(Protocol):
    """Several machines that run tasks; harness.checkpoint.write.cluster implements it."""

    @property
    def told(self) -> str:
        """A description of the cluster in one line."""
        ...

    def run_each(
        self,
        work: Callable[[Task], Result],
        tasks: Iterable[Task],
        name: Callable[[Task], str],
        /,
    ) -> Iterator[tuple[Task, Result]]:
        """Yield each task with its result as it completes."""
        ...


Workers = int | Cluster  # processes of this machine, or whoever else does the work


class _Worker(NamedTuple):
    process: WorkerProcess
    connection: Connection[Any, Any]


def run_each(
    work: Callable[[Task], Result],
    tasks: Iterable[Task],
    workers: Workers,
    name: Callable[[Task], str] = repr,
) -> Iterator[tuple[Task, Result]]:
    """Yield each task with its result as it completes; `name` formats a task for messages.

    With several workers, `work`, tasks and results are pickled between processes.
    """
    if not isinstance(workers, int):
        yield from workers.run_each(work, tasks, name)
        return
    if workers < 1:
        raise InvalidArgument("workers", workers, "at least 1", "Use one for each free core.")
    listed = list(tasks)
    # A daemonic process, such as one of multiprocessing.Pool, may not have children of its own.
    if workers == 1 or len(listed) < 2 or current_process().daemon:
        for task in listed:
            yield task, work(task)
        return
    pool = [_start(work) for _ in range(min(workers, len(listed)))]
    try:
        yield from _share_out(pool, listed, name)
    finally:
        for worker in pool:
            worker.connection.close()
            worker.process.terminate()
        for worker in pool:
            worker.process.join()


def _start(work: Callable[[Task], Result]) -> _Worker:
    # Trap: a forked copy of a process with threads (torch has some) may hang for ever. These are
    # forked from a process that has imported everything and started no thread: they begin at once,
    # and share what was imported, so that sixteen take little more memory than two.
    context = get_context("forkserver")
    context.set_forkserver_preload([_IMPORTED])
    ours, theirs = context.Pipe()
    process = WorkerProcess(target=_serve, args=(theirs, work, dict(os.environ)), daemon=True)
    process.start()
    theirs.close()  # Trap: while we hold their end, a dead worker looks like a silent one
    return _Worker(process, ours)


def _serve(
    connection: Connection[Any, Any], work: Callable[[Any], Any], environment: dict[str, str]
) -> None:
    """Run tasks until the other side closes the connection."""
    os.environ.update(environment)  # the process that it was forked from may be older
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller is interrupted, and ends us
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # there is a worker for each core
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(answered(work, task))


def answered(work: Callable[[Any], Any], task: Any) -> tuple[bool, Any]:
    """Run one task, and return whether it succeeded, with its result or its error."""
    try:
        return True, work(task)
    except Exception as error:  # noqa: BLE001  returned to the caller, who raises it again
        error.add_note("In a worker process:\n" + traceback.format_exc())
        return False, error


def _share_out(
    pool: list[_Worker], tasks: list[Task], name: Callable[[Task], str]
) -> Iterator[tuple[Task, Any]]:
    """Keep every worker busy with one task; yield the results."""
    waiting = list(reversed(tasks))
    busy: dict[Connection[Any, Any], tuple[_Worker, Task]] = {}
    idle = list(pool)
    while busy or waiting:
        while idle and waiting:
            worker, task = idle.pop(), waiting.pop()
            busy[worker.connection] = worker, task
            _send(worker, task, name)
        ready = wait(list(busy))
        for connection in [each for each in busy if each in ready]:
            worker, task = busy.pop(connection)
            succeeded, answer = _receive(worker, task, name)
            if not succeeded:
                raise answer
            idle.append(worker)
            yield task, answer


def _send(worker: _Worker, task: Task, name: Callable[[Task], str]) -> None:
    try:
        worker.connection.send(task)
    except BrokenPipeError as error:
        raise _lost(worker, name(task)) from error


def _receive(worker: _Worker, task: Task, name: Callable[[Task], str]) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = worker.connection.recv()
    except (EOFError, ConnectionResetError) as error:
        raise _lost(worker, name(task)) from error
    return answer


def _lost(worker: _Worker, task: str) -> WorkerLost:
    worker.process.join()
    code = worker.process.exitcode or 0
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return WorkerLost(
        f"worker process for {task}",
        how,
        "a worker that lives until its task is done",
        "Run again: what is finished is kept. SIGKILL mostly means too little memory:"
        " use fewer workers.",
    )
