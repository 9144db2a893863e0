"""Run one function over many tasks on the machines of a Ray cluster.

`ray_cluster` joins the cluster at an address or starts one on this machine. Tasks are spread over
the machines, one a core, and never retried. A cluster started here listens on loopback only,
requires a token, has no dashboard, and ends with the run, as do its files. Every machine must see
source and target under the same path.

Errors: Ray is not installed, the cluster cannot be reached, or a machine has another version of
degarble. A worker or machine that dies raises WorkerLost with its task; finished tasks are kept.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from degarble.harness.base.errors import InvalidArgument, MissingDependency, WorkerLost
from degarble.harness.base.version import VERSION
from degarble.harness.checkpoint.write.worker_pool import answered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Task = TypeVar("Task")
Result = TypeVar("Result")

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
    def told(self) -> str:
        """A description of the cluster in one line."""
        alive = sum(bool(node["Alive"]) for node in self._ray.nodes())
        where = "started here for this run" if self.local else "joined"
        return f"Ray cluster, {where}: machines {alive}, cores {self.cores}."

    def run_each(
        self, work: Callable[[Task], Result], tasks: Iterable[Task], name: Callable[[Task], str]
    ) -> Iterator[tuple[Task, Result]]:
        """Yield each task with its result as it completes; the first failure cancels the rest."""
        remote = self._ray.remote(_served).options(
            num_cpus=1, max_retries=0, scheduling_strategy="SPREAD"
        )
        # Stored once in the cluster, and not sent with every task.
        shared = self._ray.put(work)
        waiting = list(reversed(list(tasks)))
        running: dict[Any, Task] = {}
        try:
            while running or waiting:
                while waiting and len(running) < self.cores * _IN_FLIGHT_A_CORE:
                    task = waiting.pop()
                    running[remote.remote(VERSION, shared, task)] = task
                done, _ = self._ray.wait(list(running), num_returns=1)
                for each in done:
                    task = running.pop(each)
                    yield task, self._answer(each, name(task))
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
    return answered(work, task)


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
