"""Run one function over many tasks: in processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import io
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from importlib import import_module
from multiprocessing import (
    current_process,
    forkserver,
    get_context,
    popen_forkserver,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess, set_spawning_popen
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TextIO, TypeVar

from degarble.harness.base.errors import InvalidArgument, MissingDependency, WorkerLost
from degarble.harness.base.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from multiprocessing.connection import Connection


# --------------------------------------------------------------------------------------------------
# Worker processes that never import the caller's main module.
#
# multiprocessing imports the main module into every worker, to find functions that were defined
# there. A script without `if __name__ == "__main__"` would then run again in each worker. Our
# workers run functions of modules only, so they do not need it.

_OF_MAIN = ("init_main_from_name", "init_main_from_path")


class _Popen(popen_forkserver.Popen):
    """A process start like the library's, without the name of the main module."""

    def _launch(self, process_obj: Any) -> None:
        prepared = spawn.get_preparation_data(process_obj.name)
        for name in _OF_MAIN:
            prepared.pop(name, None)
        sent = io.BytesIO()
        set_spawning_popen(self)
        try:
            for each in (prepared, process_obj):
                reduction.dump(each, sent)
        finally:
            set_spawning_popen(None)
        _ensure_server()
        self.sentinel, to_child = forkserver.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        kept = os.dup(to_child)  # the child ends when its other end is closed
        closing = util.close_fds  # type: ignore[attr-defined]
        self.finalizer = util.Finalize(self, closing, (kept, self.sentinel))
        with os.fdopen(to_child, "wb") as stream:
            stream.write(sent.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class WorkerProcess(ForkServerProcess):
    """A process of the fork server that does not import the main module."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  the library's name
        return _Popen(process_obj)


def _forget_lost_server() -> None:
    """Make the library start another fork server if the one it knows is not our child.

    After os.fork() it is the parent's; with SIGCHLD ignored, or a caller that waits for any child,
    it may be gone. The library would raise ChildProcessError.
    """
    server: Any = forkserver._forkserver  # noqa: SLF001  there is no public way
    if server._forkserver_pid is None:  # noqa: SLF001  as above
        return
    try:
        os.waitid(os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # noqa: SLF001  as above
    except ChildProcessError:
        _forget_server(server)


def _forget_server(server: Any) -> None:
    """Have the library start another fork server; this one ends with its workers."""
    with suppress(OSError):
        os.close(server._forkserver_alive_fd)  # noqa: SLF001  there is no public way
    server._forkserver_address = server._forkserver_alive_fd = None  # noqa: SLF001  as above
    server._forkserver_pid = None  # noqa: SLF001  as above


def begin_imports(imported: Sequence[str]) -> None:
    """Start the process that forks workers: it imports these modules while the caller goes on."""
    get_context("forkserver").set_forkserver_preload(list(imported))
    _ensure_server()


def _ensure_server() -> None:
    """Start the process that forks workers if none runs.

    Ctrl-C in a terminal reaches it as well: it would print a traceback amid its imports, so it and
    its workers never see the signal.
    """
    resource_tracker.ensure_running()  # Trap: where it starts, it unblocks the signal
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # is inherited
    try:
        _forget_lost_server()
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def end_server_without(imported: Sequence[str]) -> None:
    """Forget a fork server that has not imported these: the next worker starts another one."""
    server: Any = forkserver._forkserver  # noqa: SLF001  there is no public way
    if server._forkserver_pid is not None and not set(imported) <= set(server._preload_modules):  # noqa: SLF001  as above
        _forget_server(server)


# --------------------------------------------------------------------------------------------------
# Processes of this machine. A worker holds one task at a time, so if it dies (a signal, too little
# memory, a crash of native code) its task is known. Another worker takes its place, and the task
# runs `again` as often as the caller allows; then WorkerLost names the task, the signal or status,
# and the remedy. A task that raises WorkerLost itself (its GPU has failed) counts as such a death.
# The first failure ends the others; finished tasks are kept. With one worker everything runs in the
# calling process. A `Cluster` may replace the number of workers: same tasks, same results. Workers
# may have `places`, such as GPUs: `work` is called with the worker's place, then the task. Whoever
# takes over for a dead worker gets the next place.

CHECK_IMPORTS = "degarble.harness.commands.check.worker_imports"  # of workers of `check`
_STARTS = 3  # of a worker, where the process that forks it has ended
_IMPORTED = "degarble.harness.checkpoint.transform.convert.worker_imports"

Task = TypeVar("Task")
Result = TypeVar("Result")


class Cluster(Protocol):
    """Several machines that run tasks; harness.checkpoint.write.workers implements it."""

    @property
    def description(self) -> str:
        """A description of the cluster in one line."""
        ...

    def run_each(
        self,
        work: Callable[[Task], Result],
        tasks: Iterable[Task],
        name: Callable[[Task], str],
        again: int = 0,
        /,
    ) -> Iterator[tuple[Task, Result]]:
        """Yield each task with its result as it completes."""
        ...


Workers = int | Cluster  # processes of this machine, or whoever else does the work


class _Worker(NamedTuple):
    process: WorkerProcess
    connection: Connection[Any, Any]
    place: int


def run_each(
    work: Callable[..., Result],
    tasks: Iterable[Task],
    workers: Workers,
    name: Callable[[Task], str] = repr,
    *,
    again: int = 0,
    places: Sequence[Any] = (),
) -> Iterator[tuple[Task, Result]]:
    """Yield each task with its result as it completes; `name` formats a task for messages.

    With several workers, `work`, tasks and results are pickled between processes. A task whose
    worker died runs `again` so many times. With `places`, `work` is called with one, then the task.
    """
    if not isinstance(workers, int):
        yield from workers.run_each(work, tasks, name, again)
        return
    if workers < 1:
        raise InvalidArgument("workers", workers, "at least 1", "Use one for each free core.")
    listed = list(tasks)
    # A daemonic process, such as one of multiprocessing.Pool, may not have children of its own.
    if workers == 1 or len(listed) < 2 or current_process().daemon:
        here = partial(work, places[0]) if places else work
        for task in listed:
            yield task, here(task)
        return
    with Pool(work, workers, places) as pool:
        yield from pool.run_each(listed, name, again)


class Pool:
    """Up to `count` worker processes, of which each that dies is replaced; a context ends them.

    They start when there are tasks for them, and then stay for later ones. `imported` are modules
    that are imported once for all workers.
    """

    def __init__(
        self,
        work: Callable[..., Any],
        count: int,
        places: Sequence[Any] = (),
        imported: Sequence[str] = (),
    ) -> None:
        self._work, self._count, self._places = work, count, places
        self._imported = imported or (_IMPORTED,)
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.connection.close()
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()
        self._workers, self._idle = [], []

    def start(self, count: int) -> None:
        """Have at least so many workers, as far as the pool may."""
        for place in range(len(self._workers), min(count, self._count)):
            self._add(place)

    def run_each(
        self, tasks: Sequence[Task], name: Callable[[Task], str], again: int = 0
    ) -> Iterator[tuple[Task, Any]]:
        """Keep every worker busy with one task; yield each task with its result."""
        self.start(len(tasks))
        waiting = list(reversed([(task, again) for task in tasks]))
        busy: dict[Connection[Any, Any], tuple[_Worker, Task, int]] = {}
        while busy or waiting:
            while self._idle and waiting:
                worker, (task, left) = self._idle.pop(), waiting.pop()
                busy[worker.connection] = worker, task, left
                with suppress(BrokenPipeError):  # it died idle: what is received says so
                    worker.connection.send(task)
            ready = wait(list(busy))
            for connection in [each for each in busy if each in ready]:
                worker, task, left = busy.pop(connection)
                succeeded, answer = _received(worker, name(task), 1 + again - left)
                if succeeded:
                    self._idle.append(worker)
                    yield task, answer
                    continue
                if not isinstance(answer, WorkerLost) or not left:
                    raise answer
                waiting.append((task, left - 1))
                self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.connection.close()
        worker.process.terminate()
        worker.process.join()
        self._add(worker.place + 1)

    def _add(self, place: int) -> None:
        work = self._work
        if self._places:
            work = partial(work, self._places[place % len(self._places)])
        worker = _start(work, place, self._imported)
        self._workers.append(worker)
        self._idle.append(worker)


def _start(work: Callable[[Task], Result], place: int, imported: Sequence[str]) -> _Worker:
    # Trap: a forked copy of a process with threads (torch has some) may hang for ever. These are
    # forked from a process that has imported everything and started no thread: they begin at once,
    # and share what was imported, so that sixteen take little more memory than two.
    context = get_context("forkserver")
    context.set_forkserver_preload(list(imported))
    for _ in range(_STARTS):
        ours, theirs = context.Pipe()
        process = WorkerProcess(target=_serve, args=(theirs, work, dict(os.environ)), daemon=True)
        try:
            process.start()
        except (EOFError, ConnectionError):  # the process that forks has ended: the next start
            ours.close()  # begins another one
            theirs.close()
            continue
        theirs.close()  # Trap: while we hold their end, a dead worker looks like a silent one
        return _Worker(process, ours, place)
    raise WorkerLost(
        "process that starts workers", f"ended {_STARTS} times", "a process that lives",
        "Look for what kills it; mostly that is too little memory: use fewer workers.",
    )  # fmt: skip


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
        connection.send(run_task(work, task))


def run_task(work: Callable[[Any], Any], task: Any) -> tuple[bool, Any]:
    """Run one task, and return whether it succeeded, with its result or its error."""
    try:
        return True, work(task)
    except Exception as error:  # noqa: BLE001  returned to the caller, who raises it again
        error.add_note("In a worker process:\n" + traceback.format_exc())
        return False, error


def _received(worker: _Worker, task: str, times: int) -> tuple[bool, Any]:
    """Return what a worker sent; that it is lost if it died at this attempt at its task."""
    try:
        answer: tuple[bool, Any] = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        return False, _lost(worker, task, times)
    return answer


def _lost(worker: _Worker, task: str, times: int) -> WorkerLost:
    worker.process.join()
    code = worker.process.exitcode or 0
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return WorkerLost(
        f"worker process for {task}",
        how if times == 1 else f"{how}, {times} times",
        "a worker that lives until its task is done",
        "Run again: what is finished is kept. SIGKILL mostly means too little memory:"
        " use fewer workers.",
    )


# --------------------------------------------------------------------------------------------------
# Machines of a Ray cluster. `ray_cluster` joins the cluster at an address or starts one on this
# machine. Tasks are spread over the machines, one a core, and Ray itself repeats none. A cluster
# started here listens on loopback only, requires a token, has no dashboard, and ends with the run,
# as do its files. Every machine must see source and target under the same path.
#
# Errors: Ray is not installed, the cluster cannot be reached, or a machine has another version of
# degarble. A worker or machine that dies raises WorkerLost with its task; finished tasks are kept.

_OBJECTS_BYTES = 80 << 20  # shared memory for what tasks return; 75 MiB is the least that Ray takes
_SECONDS_TO_ANSWER = 10.0
_ENDING_SECONDS = 10.0
_IN_FLIGHT_A_CORE = 2  # one runs, one waits, so that no core does
_ALONE = {
    # Read when ray is imported: everything binds to 127.0.0.1, as it does on laptops.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
}


class RayCluster:
    """A joined cluster. `local`: it was started here and ends with the run."""

    def __init__(self, ray: Any, *, local: bool) -> None:
        self._ray = ray
        self.local = local

    @property
    def cores(self) -> int:
        """The number of tasks that run at once."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    @property
    def description(self) -> str:
        """A description of the cluster in one line."""
        alive = sum(bool(node["Alive"]) for node in self._ray.nodes())
        where = "started here for this run" if self.local else "joined"
        return f"Ray cluster, {where}: machines {alive}, cores {self.cores}."

    def run_each(
        self,
        work: Callable[[Task], Result],
        tasks: Iterable[Task],
        name: Callable[[Task], str],
        again: int = 0,
    ) -> Iterator[tuple[Task, Result]]:
        """Yield each task with its result as it completes; the first failure cancels the rest.

        A task whose worker or machine died runs `again` so many times.
        """
        remote = self._ray.remote(_served).options(
            num_cpus=1, max_retries=0, scheduling_strategy="SPREAD"
        )
        # Stored once in the cluster, and not sent with every task.
        shared = self._ray.put(work)
        waiting = list(reversed([(task, again) for task in tasks]))
        running: dict[Any, tuple[Task, int]] = {}
        try:
            while running or waiting:
                while waiting and len(running) < self.cores * _IN_FLIGHT_A_CORE:
                    task, left = waiting.pop()
                    running[remote.remote(VERSION, shared, task)] = task, left
                done, _ = self._ray.wait(list(running), num_returns=1)
                for each in done:
                    task, left = running.pop(each)
                    try:
                        answer = self._answer(each, name(task))
                    except WorkerLost:
                        if not left:
                            raise
                        waiting.append((task, left - 1))
                        continue
                    yield task, answer
        finally:
            for each in running:
                self._ray.cancel(each, force=True)
            if running:  # a worker that is about to be ended would take the next run's task along
                self._ray.wait(list(running), num_returns=len(running), timeout=_ENDING_SECONDS)

    def _answer(self, reference: Any, task: str) -> Any:
        try:
            succeeded, answer = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            first = str(error).strip().partition("\n")[0]
            raise WorkerLost(
                f"worker of the cluster for {task}",
                f"{type(error).__name__}: {first}",
                "a worker that lives until its task is done",
                "Run again: what is finished is kept. Every machine needs this version of degarble,"
                " and memory for one worker a core.",
            ) from error
        if not succeeded:
            raise answer
        return answer


@contextmanager
def ray_cluster(address: str | None, cores: int) -> Iterator[RayCluster]:
    """Join the cluster at `address`; without one, start a cluster of `cores` on this machine."""
    if address is not None:
        ray = _imported()
        _require_reachable(address)
        with _started(ray, address, address=address):
            yield RayCluster(ray, local=False)
        return
    folder = tempfile.mkdtemp(prefix="degarble-ray-")
    with _environment({**_ALONE, "RAY_AUTH_TOKEN": secrets.token_hex(32)}):
        try:
            ray = _imported()
            own = {"include_dashboard": False, "object_store_memory": _OBJECTS_BYTES}
            with _started(ray, "one here", num_cpus=cores, _temp_dir=folder, **own):
                yield RayCluster(ray, local=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _served(version: str, work: Callable[[Any], Any], task: Any) -> tuple[bool, Any]:
    """Run one task on some machine of the cluster."""
    if version != VERSION:
        return False, InvalidArgument(
            "degarble on a machine of the cluster",
            VERSION,
            f"version {version}, as where the run was started",
            "Install one version everywhere: another one may write other bytes.",
        )
    return run_task(work, task)


def _imported() -> Any:
    try:
        with _environment({"RAY_DEDUP_LOGS": "0"}):  # what is held back would be printed at the end
            return import_module("ray")
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "ray",
            "not installed",
            "the extra `cluster`",
            "pip install 'degarble[cluster]', on every machine of the cluster.",
        ) from error


def _require_reachable(address: str) -> None:
    """Raise for an address where nothing answers; Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_SECONDS_TO_ANSWER).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _unusable(address, error) from error


@contextmanager
def _started(ray: Any, place: str, **given: Any) -> Iterator[None]:
    """Connect to Ray, and disconnect at the end; any error of Ray's becomes one of ours."""
    clean: Any = _WithoutRay(sys.stdout)
    with redirect_stdout(clean):
        try:
            ray.init(configure_logging=False, log_to_driver=False, **given)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise _unusable(place, error) from error
        try:
            yield
        finally:
            ray.shutdown()


def _unusable(place: str, error: Exception) -> InvalidArgument:
    first = str(error).strip().partition("\n")[0]
    return InvalidArgument(
        "Ray cluster",
        f"{place}: {first}",
        "host:port of one that this machine reaches, with the same versions of Python and Ray",
        "Set RAY_ADDRESS to its address, or unset it to have one started on this machine.",
    )


class _WithoutRay:
    """A stream that drops what Ray's threads print, because results go to stdout.

    Trap: reports of dead workers go to stdout whatever log_to_driver says.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, unless the calling thread is one of Ray's."""
        if threading.current_thread().name.startswith("ray_"):
            return len(text)
        return self._stream.write(text)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables that Ray and its processes read, and restore them at the end."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
