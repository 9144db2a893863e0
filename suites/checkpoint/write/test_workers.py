"""Work shared out over processes and machines, and what becomes of those that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import (
    InvalidArgument,
    MissingDependency,
    UnwritablePath,
    WorkerLost,
)
from degarble.harness.base.version import VERSION
from degarble.harness.checkpoint.write import workers
from degarble.harness.checkpoint.write.workers import WorkerProcess, ray_cluster, run_each
from degarble.suites.hang_guard import HANG_SECONDS

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


def dies_twice_at_three(folder: Path, number: int) -> int:
    if number == 3 and len(list(folder.iterdir())) < 2:
        (folder / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def has_lost_its_gpu(place: str, number: int) -> str:
    if place == "bad":
        raise WorkerLost("GPU", place, "one that answers", "Leave it out.")
    return f"{place} {number}"


def test_a_worker_that_dies_is_replaced_and_its_task_runs_again(tmp_path: Path) -> None:
    work = partial(dies_twice_at_three, tmp_path)
    assert dict(run_each(work, range(5), 2, again=2)) == {n: n for n in range(5)}
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(WorkerLost, match="for 3 = 'killed by SIGKILL, 3 times'"):
        list(run_each(dies_at_three, range(5), 2, again=2))


def test_a_lost_process_that_forks_workers_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = WorkerProcess.start
    lost: list[Exception] = [EOFError(), ConnectionResetError()]

    def begin(process: WorkerProcess) -> None:
        if lost:
            raise lost.pop()
        start(process)

    monkeypatch.setattr(WorkerProcess, "start", begin)
    assert {n for n, _ in run_each(squared, range(3), 2)} == {0, 1, 2}
    lost += [EOFError() for _ in range(3)]
    with pytest.raises(WorkerLost, match="process that starts workers = 'ended 3 times'"):
        list(run_each(squared, range(3), 2))


def test_whoever_takes_over_for_a_lost_worker_gets_the_next_place() -> None:
    found = dict(run_each(has_lost_its_gpu, range(4), 2, again=1, places=("bad", "good")))
    assert found == {n: f"good {n}" for n in range(4)}
    with pytest.raises(WorkerLost, match="GPU = 'bad'"):
        list(run_each(has_lost_its_gpu, range(4), 2, again=1, places=("bad",)))


def test_the_others_are_ended_at_once(tmp_path: Path) -> None:
    with pytest.raises(WorkerLost, match="last"):  # else this would wait for ever
        list(run_each(waits_for_ever, [tmp_path / "first", tmp_path / "last"], 2, str))
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_no_worker_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least 1"):
        list(run_each(squared, [1, 2], 0))


# --------------------------------------------------------------------------------------------------
# Workers of a script that has no guard, of a forked process, and of a process without children.

# A main without a guard: whoever imports it again would start workers again.
_SCRIPT = """
import math, multiprocessing, os, signal, sys
from degarble.harness.checkpoint.write import workers

workers._IMPORTED = "json"  # the real one takes seconds
WANTED = {n: float(n) for n in (0, 1)}

def done():
    return dict(workers.run_each(math.fabs, [0, 1], 2)) == WANTED

print("main", done(), flush=True)
child = os.fork()
if child == 0:
    print("forked", done(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
with multiprocessing.get_context("fork").Pool(1) as pool:
    print("daemon", pool.apply(done), flush=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, signal.SIGKILL)
while True:
    try:
        os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, 0)
    except ProcessLookupError:
        break
print("reaped", done(), flush=True)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
server = multiprocessing.forkserver._forkserver
before = server._forkserver_pid
workers.begin_imports(["json"])
workers.end_server_without(["json"])
print("kept", server._forkserver_pid == before, done(), flush=True)
workers.end_server_without(["json", "csv"])
print("another", server._forkserver_pid is None, done(), server._forkserver_pid != before)
"""
_SAID = "main True\nforked True\ndaemon True\nreaped True\nkept True True\nanother True True True\n"


def test_a_script_without_a_guard_has_workers(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(_SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert (done.returncode, done.stdout) == (0, _SAID), done.stderr


_INTERRUPTED = """
import math, os, signal, sys, threading, time
from pathlib import Path
from degarble.harness.checkpoint.write import workers

Path("slow.py").write_text(sys.argv[2])
sys.path.insert(0, "")
signal.signal(signal.SIGINT, lambda *_: None)

def interrupt():
    while not Path("begun").exists():
        time.sleep(0.01)
    os.killpg(0, signal.SIGINT)
    Path("sent").touch()

threading.Thread(target=interrupt).start()
workers._IMPORTED = "slow"
if sys.argv[1] == "ahead":
    workers.begin_imports(["slow"])
print(sorted(workers.run_each(math.fabs, [0, 1], 2)), Path("ended").exists())
"""
_SLOW = """
import time
from pathlib import Path
Path("begun").touch()
while not Path("sent").exists():
    time.sleep(0.01)
Path("ended").touch()
"""


@pytest.mark.parametrize("start", ["ahead", "with the first worker"])
def test_ctrl_c_never_reaches_the_imports_of_workers(tmp_path: Path, start: str) -> None:
    """A terminal sends it to all processes of a command."""
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, start, _SLOW], capture_output=True, text=True,
        cwd=tmp_path, start_new_session=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[(0, 0.0), (1, 1.0)] True\n"


# --------------------------------------------------------------------------------------------------
# Work on a Ray cluster: the same bytes, and what becomes of workers and machines that die.
#
# The clusters are real, on this machine, each in a process of its own that ends with them.

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="ray is not installed: the extra `cluster` brings it"
)


def shown_by(mode: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "degarble.suites.checkpoint.write.ray_runs",
        mode,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)  # and nothing else: Ray prints reports there
    return found


@needs_ray
@pytest.mark.slow
def test_a_cluster_of_this_machine_writes_the_same_bytes_and_is_gone() -> None:
    found = shown_by("started")
    assert found["told"] == "Ray cluster, started here for this run: machines 1, cores 2."
    assert found["squares"] == {str(n): n * n for n in range(20)}
    assert found["elsewhere"]
    assert found["refused"] == ["UnwritablePath", "shard = 3: expected another. Try."]
    assert found["listening"] > 3
    assert found["beyond loopback"] == []
    assert found["same bytes"]
    assert found["holds"]
    assert found["left at home"] == []


@needs_ray
@pytest.mark.slow
def test_dead_workers_and_machines_are_named_and_the_next_run_goes_on() -> None:
    found = shown_by("joined")
    assert found["told"] == "Ray cluster, joined: machines 2, cores 2."
    for who, how in (("worker", "WorkerCrashedError"), ("machine", "NodeDiedError")):
        kind, text = found[who]["refused"]
        assert kind == "WorkerLost"
        assert "worker of the cluster for shard model-0000" in text
        assert how in text
        assert found[who]["broken"] == []
        assert found[who]["same"]
    assert found["machine"]["kept"] >= 1
    assert found["nowhere"][0] == "InvalidArgument"
    assert "127.0.0.1:1" in found["nowhere"][1]


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(workers, "import_module", absent)
    with pytest.raises(MissingDependency, match=r"degarble\[cluster\]"):
        ray_cluster(None, 1).__enter__()


def test_another_version_does_no_work() -> None:
    succeeded, error = workers._served("another", repr, 1)
    assert not succeeded
    assert isinstance(error, InvalidArgument)
    assert VERSION in str(error)
    assert workers._served(VERSION, repr, 1) == (True, "1")


def test_whoever_stands_in_place_of_a_number_does_the_work() -> None:
    class Somebody:
        description = "somebody"

        def run_each(self, work: Any, tasks: Any, name: Any, again: int = 0) -> Any:
            assert again == 0
            for task in reversed(list(tasks)):
                yield task, (name(task), work(task))

    found: list[Any] = list(run_each(abs, [-1, -2], Somebody(), str))
    assert found == [(-2, ("-2", 2)), (-1, ("-1", 1))]
