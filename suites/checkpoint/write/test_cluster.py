"""Work on a Ray cluster: the same bytes, and what becomes of workers and machines that die.

The clusters are real, on this machine, each in a process of its own that ends with them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from degarble.harness.base.errors import InvalidArgument, MissingDependency
from degarble.harness.base.version import VERSION
from degarble.harness.checkpoint.write import workers
from degarble.harness.checkpoint.write.workers import ray_cluster, run_each
from degarble.suites.hang_guard import HANG_SECONDS

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
        told = "somebody"

        def run_each(self, work: Any, tasks: Any, name: Any) -> Any:
            for task in reversed(list(tasks)):
                yield task, (name(task), work(task))

    found: list[Any] = list(run_each(abs, [-1, -2], Somebody(), str))
    assert found == [(-2, ("-2", 2)), (-1, ("-1", 1))]
