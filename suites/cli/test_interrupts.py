"""Ctrl-C inside torch's own start, elsewhere, and where somebody else has decided about it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from degarble.harness.cli.imports import EXIT_INTERRUPTED, INTERRUPTED_MESSAGE

if TYPE_CHECKING:
    from pathlib import Path

# A torch whose start is interrupted, and that says of it what numpy says: a broken installation.
STARTING = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    [None for _ in range(10**6)]
except KeyboardInterrupt as error:
    raise ImportError("broken") from error
"""
COMMAND = """
import signal
from degarble.harness.cli.imports import interruptible
signal.signal(signal.SIGINT, signal.default_int_handler)
with interruptible():
    import torch
"""
ELSEWHERE = """
import os, signal
from degarble.harness.cli import imports, main
signal.signal(signal.SIGINT, signal.default_int_handler)

def dispatched(*_):
    assert signal.getsignal(signal.SIGINT) is imports._interrupted
    os.kill(os.getpid(), signal.SIGINT)
    [None for _ in range(10**6)]

main.dispatch = dispatched
assert main.main(["faults", "list"]) == imports.EXIT_INTERRUPTED
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
signal.signal(signal.SIGINT, signal.SIG_IGN)
with imports.interruptible():
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
"""


def test_it_ends_at_once_while_torch_starts(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(STARTING)
    line = [sys.executable, "-c", COMMAND]
    ran = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (EXIT_INTERRUPTED, INTERRUPTED_MESSAGE)


def test_elsewhere_it_is_an_exception_and_stays_with_who_decided_about_it() -> None:
    line = [sys.executable, "-c", ELSEWHERE]
    ran = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, INTERRUPTED_MESSAGE)
