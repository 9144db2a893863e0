"""A capturing run that is killed at any moment leaves a capture that opens, marked incomplete."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from degarble.harness.capture.files.reader import Capture
from degarble.suites.capture.files.capture_cases import arrays
from degarble.suites.hang_guard import until

if TYPE_CHECKING:
    from pathlib import Path


def _exists_or_ended(path: Path, run: subprocess.Popen[bytes]) -> bool:
    return path.exists() or run.poll() is not None


@pytest.mark.parametrize("trials", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_at_any_moment(trials: int, tmp_path: Path, seed: int) -> None:
    chance, calls = random.Random(seed), 0
    for trial in range(trials):
        folder = tmp_path / str(trial)
        command = [sys.executable, "-m", "degarble.suites.capture.files.capture_cases", str(folder)]
        with subprocess.Popen(command) as run:
            third = folder / "part-000003.safetensors"
            until(partial(_exists_or_ended, third, run))
            assert run.poll() is None
            time.sleep(chance.random() * 0.05)
            run.kill()
        capture = Capture.open(folder)
        assert not capture.complete
        assert list(capture.damage()) == []
        assert len(capture.parts) >= 4
        first = capture.calls[0]
        assert capture.array(first.inputs["x"]).tolist() == arrays(0)[0].tolist()
        calls += len(capture.calls)
        shutil.rmtree(folder)
    assert calls > 8 * trials
