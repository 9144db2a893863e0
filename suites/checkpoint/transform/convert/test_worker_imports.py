"""Memory of whole runs, all processes together: far below what they read, and below 1 GB."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from degarble.suites.checkpoint.transform.convert.memory_watch import watched

BOUND = 1_000_000_000
PROGRAM = (sys.executable, "-m", "degarble.suites.checkpoint.transform.convert.memory_runs")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["quantise", "convert"])
def test_all_processes_together_stay_below_the_bound(mode: str, tmp_path: Path) -> None:
    assert watched(*PROGRAM, "write", str(tmp_path)).status == 0
    read = sum(path.stat().st_size for path in (tmp_path / "source").glob("*.safetensors"))
    found = watched(*PROGRAM, mode, str(tmp_path))
    assert found.status == 0, found.told
    assert found.processes >= 4  # the caller, two workers, and whom they were forked from
    assert read > 1.2 * BOUND, "what it reads would not fit"
    assert found.peak < BOUND, f"{found.peak} bytes at the peak"


def test_a_process_that_takes_memory_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: a worker that holds 300 MB."""
    hold = "b = bytearray(300_000_000)\nfor i in range(0, len(b), 4096): b[i] = 1\n"
    hold += "import pathlib, time; pathlib.Path('held').touch()\n"
    hold += "while not pathlib.Path('seen').exists(): time.sleep(0.01)"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}], check=True)"
    monkeypatch.chdir(tmp_path)
    looks = []

    def look() -> None:
        looks.append(Path("held").exists())
        if looks[:-1].count(True):  # it was there before the last look
            Path("seen").touch()

    found = watched(sys.executable, "-c", nested, each=look)
    assert found.status == 0
    assert found.processes == 2
    assert 300_000_000 < found.peak < 500_000_000
