"""Lines of progress: on the terminal amid a test, and in a file from whatever thread."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

TEST = """
from pathlib import Path
from threading import Thread
from degarble.harness.plugins.progress import tell

LOG = Path(__file__).with_name("progress.log")

def test_tells(pytestconfig):
    print("a word of the test")
    tell(pytestconfig, LOG, "\\nthe plan")
    thread = Thread(target=tell, args=(pytestconfig, LOG, "beside"))
    thread.start()
    thread.join()
    print("its last word")
"""


@pytest.mark.parametrize("how", [(), ("-s",), ("-p", "no:terminal")])
def test_a_test_that_passes_has_told_how_far_it_is(tmp_path: Path, how: tuple[str, ...]) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *how, "test_it.py"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = (tmp_path / "progress.log").read_text().splitlines()
    assert [re.sub(r"^\d\d:\d\d:\d\d ", "", each) for each in kept] == ["the plan", "beside"]
    assert ("the plan" in done.stdout) == (how != ("-p", "no:terminal"))
    assert "beside" not in done.stdout, "capturing belongs to the main thread"
    assert ("its last word" in done.stdout) == (how == ("-s",)), "and goes on afterwards"
