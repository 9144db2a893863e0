"""Workers of a script that has no guard, of a forked process, and of a process without children."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from degarble.suites.hang_guard import HANG_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

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
"""
_SAID = "main True\nforked True\ndaemon True\nreaped True\n"


def test_a_script_without_a_guard_has_workers(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(_SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert (done.returncode, done.stdout) == (0, _SAID), done.stderr
