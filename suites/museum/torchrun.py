"""Ranks of a suite: torchrun in a session of its own, of which nothing is left behind."""

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
    """Run a module on so many ranks, until it ends."""
    command = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(ranks), "-m", module, *arguments,
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
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
