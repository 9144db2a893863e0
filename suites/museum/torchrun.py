"""Ranks of a suite, run in a session of their own, of which nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from degarble.suites.hang_guard import HANG_SECONDS


def _environment() -> dict[str, str]:
    """Ranks that run pytest are no workers of who started them: only the first one reports."""
    kept = {name: each for name, each in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return kept | {"OMP_NUM_THREADS": "1"}


def run_ranks(module: str, ranks: int, *arguments: str) -> None:
    """Run a module by torchrun on so many ranks, until it ends."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    run_module(*torchrun, "-m", module, *arguments)


def run_module(module: str, *arguments: str) -> None:
    """Run a module and the processes that it starts, until they end."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=_environment(),
    )
    try:
        _, errors = process.communicate(timeout=HANG_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, errors[-3000:]
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
