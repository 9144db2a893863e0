from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from degarble.harness.capture.files.reader import Capture, capture_document, capture_lines
from degarble.suites.capture.files.capture_cases import old_capture, write_capture

if TYPE_CHECKING:
    from pathlib import Path

TOLD = """\
Capture {hash}, complete, by degarble {version}
  run         toy, toy, torch, bf16
  steps       1 of prefill (3 tokens)
  calls       4 of 4 components
  tensors     10, 6 stored: 248 B
  changed     2 calls wrote into their inputs, first layers.0.attn.wq_a (x)"""


def test_an_old_capture_still_renders_without_torch(tmp_path: Path) -> None:
    old = old_capture(tmp_path / "old")
    code = (
        "import sys; from pathlib import Path\n"
        "from degarble.harness.capture.files.reader import Capture\n"
        "from degarble.harness.capture.files.reader import capture_lines\n"
        "print(*capture_lines(Capture.open(Path(sys.argv[1]))), sep='\\n')\n"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(old)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    capture = Capture.open(old)
    told = TOLD.format(hash=capture.hash[:12], version=capture.tool_version)
    assert done.stdout == told + "\n"
    assert capture_document(capture)["changed"] == 2


def test_an_incomplete_one_says_so_first(tmp_path: Path) -> None:
    write_capture(tmp_path / "capture")
    file = tmp_path / "capture" / "manifest.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    raw |= {"complete": False, "facts": {"source": {"name": "\x1b[2J"}}}
    file.write_text(json.dumps(raw), encoding="utf-8")
    lines = capture_lines(Capture.open(tmp_path / "capture"))
    assert lines[0].startswith("Capture, incomplete")
    assert "\x1b" not in "".join(lines)
