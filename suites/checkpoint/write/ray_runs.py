"""Runs on a Ray cluster, in a process of its own: `python -m
degarble.suites.checkpoint.write.ray_runs`.

The argument names what is shown; each prints JSON with what was found. `started`: a cluster of this
machine, started and ended by the run, quantises and converts as local processes do. `joined`: two
machines (both played by this one), a worker that is killed, a machine that is, and the runs that
take up. Tasks and producers stand here, because workers import them.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import DegarbleError, UnwritablePath
from degarble.harness.checkpoint.write.workers import ray_cluster, run_each
from degarble.harness.checkpoint.write.writer import write
from degarble.suites.checkpoint.writing_cases import (
    ENDING,
    broken_promises,
    produce,
    quick_folder,
    small_plan,
    tree,
    write_all,
)
from degarble.suites.hang_guard import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.checkpoint.write.plan import PlannedTensor
    from degarble.harness.checkpoint.write.workers import RayCluster

PLAN = small_plan()
LISTENS = "0A"  # of a socket, in /proc/net/tcp
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")


def squared(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def fails_at_three(number: int) -> int:
    if number == 3:
        raise UnwritablePath("shard", number, "another", "Try.")
    return number


def produce_unless(flags: Path, tensor: PlannedTensor) -> Iterator[bytes]:
    """Produce; where a flag says so, die once at the eighth tensor, or wait at every later one."""
    if int(tensor.name.split(".")[1]) >= 7:
        if (flags / "die").exists():
            (flags / "die").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        node = import_module("ray").get_runtime_context().get_node_id()
        (flags / f"at-{node}").touch()
        while (flags / "hold").exists():
            time.sleep(0.01)
    yield from produce(tensor)


def listening(root: int) -> list[str]:
    """List the addresses at which a process and its descendants accept connections."""
    family, inodes = {root}, set()
    for _ in range(6):
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent in family:
                    family.add(int(entry.name))
            except OSError:
                continue
    for process in family:
        for descriptor in Path(f"/proc/{process}/fd").glob("*"):
            try:
                inodes.add(str(descriptor.readlink()))
            except OSError:
                continue
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [
        r[1].partition(":")[0] for r in rows if r[3] == LISTENS and f"socket:[{r[9]}]" in inodes
    ]


def refusal_of(work: Any) -> list[str]:
    """Return the class and the text of a refusal."""
    try:
        work()
    except DegarbleError as error:
        return [type(error).__name__, f"{error}"]
    return ["none", ""]


def started(folder: Path) -> dict[str, Any]:
    """Do real jobs on a cluster of this machine, and compare every byte."""
    from degarble.harness.checkpoint.transform.convert.job import job_for, prove  # noqa: PLC0415  imports torch
    from degarble.suites.checkpoint.transform.quantise.test_job import SHARD, job_of, source_of  # noqa: PLC0415

    source = source_of(folder, "v4", "official")
    quantising, converting = job_of(source, "v4", "nvfp4-experts"), job_for(source, "bf16")
    quantising.run(folder / "quantised", shard_bytes=SHARD)
    converting.run(folder / "converted", shard_bytes=SHARD)
    before = tree(folder)
    home = sorted(path.name for path in Path.home().iterdir())
    with ray_cluster(None, 2) as cluster:
        squares = dict(run_each(squared, range(20), cluster))
        refused = refusal_of(lambda: list(run_each(fails_at_three, range(6), cluster)))
        addresses = listening(os.getpid())
        quantising.run(folder / "quantised-2", workers=cluster, shard_bytes=SHARD)
        converting.run(folder / "converted-2", workers=cluster, shard_bytes=SHARD)
        holds = prove(source, folder / "converted-2", workers=cluster).holds
        text = cluster.description
    after = tree(folder)
    for name in ("quantised", "converted"):
        after |= {
            key.replace(f"{name}-2/", f"{name}/", 1): data
            for key, data in after.items()
            if key.startswith(f"{name}-2/")
        }
    return {
        "told": text,
        "squares": {task: answer for task, (answer, _) in squares.items()},
        "elsewhere": os.getpid() not in {process for _, process in squares.values()},
        "refused": refused,
        "listening": len(addresses),
        "beyond loopback": [address for address in addresses if address not in LOOPBACK],
        "same bytes": {k: v for k, v in after.items() if "-2/" not in k} == before,
        "holds": holds,
        "left at home": [p.name for p in Path.home().iterdir() if p.name not in home],
    }


def joined(folder: Path) -> dict[str, Any]:
    """Kill a worker, then a machine, of two; take up after each."""
    os.environ |= {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_TMPDIR": str(folder),
        "RAY_DEDUP_LOGS": "0",
    }
    head = {"num_cpus": 1, "include_dashboard": False}
    machines = import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=head)
    second = machines.add_node(num_cpus=1)
    write_all(folder / "whole", PLAN)
    try:
        with ray_cluster(machines.address, 1) as cluster:
            found = {"told": cluster.description, "worker": killed_worker(folder, cluster)}
            found["machine"] = killed_machine(
                folder, cluster, lambda: machines.remove_node(second, allow_graceful=False)
            )
    finally:
        machines.shutdown()
    nowhere = refusal_of(lambda: ray_cluster("127.0.0.1:1", 1).__enter__())
    return {**found, "nowhere": nowhere}


def killed_worker(folder: Path, cluster: RayCluster) -> dict[str, Any]:
    flags, target = folder / "worker-flags", folder / "worker"
    flags.mkdir()
    (flags / "die").touch()
    return _broken_and_taken_up(folder, flags, target, cluster)


def killed_machine(folder: Path, cluster: RayCluster, kill: Any) -> dict[str, Any]:
    flags, target = folder / "machine-flags", folder / "machine"
    flags.mkdir()
    (flags / "hold").touch()

    def kill_when_both_hold() -> None:
        while len(list(flags.glob("at-*"))) < 2:
            time.sleep(0.01)
        kill()

    killer = threading.Thread(target=kill_when_both_hold)
    killer.start()
    return _broken_and_taken_up(folder, flags, target, cluster, killer)


def _broken_and_taken_up(
    folder: Path,
    flags: Path,
    target: Path,
    cluster: RayCluster,
    killer: threading.Thread | None = None,
) -> dict[str, Any]:
    work = partial(produce_unless, flags)
    refused = refusal_of(lambda: write(target, PLAN, work, ENDING, workers=cluster))
    if killer:
        killer.join()
        _wait_for_its_loss()
    (flags / "hold").unlink(missing_ok=True)
    whole = tree(folder / "whole")
    broken = broken_promises(target, whole)
    kept = sum(path.suffix == ".safetensors" for path in target.iterdir())
    write(target, PLAN, work, ENDING, workers=cluster)
    return {"refused": refused, "broken": broken, "kept": kept, "same": tree(target) == whole}


def _wait_for_its_loss() -> None:
    """Let the cluster notice that a machine is gone; until then it sends tasks there."""
    ray = import_module("ray")
    until(lambda: sum(bool(node["Alive"]) for node in ray.nodes()) <= 1)


if __name__ == "__main__":
    with quick_folder() as place:
        found = {"started": started, "joined": joined}[sys.argv[1]](place)
    sys.stdout.write(json.dumps(found))
