from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.version import VERSION
from degarble.harness.cli import main as entry
from degarble.harness.cli.imports import EXIT_INTERRUPTED
from degarble.suites.commands.calls import call
from degarble.suites.hang_guard import HANG_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

START = "import sys; from degarble.harness.cli.main import main; "
HEAVY = "print(sorted({'torch', 'numpy', 'numba', 'rich', 'pandas'} & set(sys.modules)))"


def _python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_SECONDS)


def test_the_version_is_printed_without_importing_anything_heavy() -> None:
    done = _python(f"{START}main(['--version']); {HEAVY}")
    assert done.stdout == f"degarble {VERSION}\n[]\n"


def test_help_does_not_import_torch() -> None:
    code = f"{START}assert main(['check', '--help']) == 0; {HEAVY}"
    assert _python(code).stdout.endswith("['rich']\n")


def test_the_import_check_detects_torch() -> None:
    code = f"{START}main(['faults', 'list']); {HEAVY}"
    assert "'torch'" in _python(code).stdout


def test_it_starts_at_once() -> None:
    """Half a second of processor time; the best of three. Wall time is the machine's business."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        _python(f"{START}main(['--version'])")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert 0.0 < min(times) < 0.5


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_command_of_the_contract(
    capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    result = call(capsys, flag)
    assert result.status == 0
    listed = {line.split()[1] for line in result.out.splitlines() if line.startswith("│ ")}
    assert listed >= {
        *("demo", "capture", "check", "compare", "audit", "quantise", "convert", "generate"),
        *("serve", "faults", "history", "bisect", "--json", "--quiet", "--cluster", "--version"),
    }


def test_the_entry_point_ends_with_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["degarble", "nonsense"])
    with pytest.raises(SystemExit) as caught:
        entry.run()
    assert caught.value.code == 2
    assert "nonsense" in capsys.readouterr().err


def test_a_reader_that_went_away_is_no_error_of_ours() -> None:
    command = [sys.executable, "-m", "degarble.harness.cli.main", "--help"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, check=False, timeout=HANG_SECONDS
    )
    os.close(writer)
    assert done.returncode == entry.EXIT_PIPE_CLOSED
    assert done.stderr == b""


def test_ctrl_c_ends_quietly(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "from degarble.harness.cli import main as program\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # none in the background
        "def slow(*_): print('on', flush=True); [time.sleep(0.05) for _ in range(600)]\n"
        "program.dispatch = slow\n"
        "sys.exit(program.main([]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"on\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == EXIT_INTERRUPTED
    assert err == b"\ndegarble: interrupted\n"


LINE = f"{sys.executable} -m degarble.harness.cli.main"


@pytest.mark.parametrize(
    ("rest", "status", "said"),
    [
        ("--version >&-", 0, b""),
        ("nonsense 2>&-", 2, b""),
        ("nonsense >&- 2>&-", 2, b""),
        ("--version >/dev/full", 2, b"degarble: REFUSED: output = 'No space left on device'"),
        ("--version >/dev/full 2>&1", 2, b""),
    ],
)
def test_an_output_that_takes_nothing_never_looks_like_a_difference(
    rest: str, status: int, said: bytes
) -> None:
    done = subprocess.run(f"{LINE} {rest}", shell=True, capture_output=True, check=False)
    assert done.returncode == status
    assert done.stderr.splitlines()[:1] == ([said] if said else [])


@pytest.mark.slow
def test_an_output_that_is_not_utf8_gets_escapes(tmp_path: Path) -> None:
    done = subprocess.run(
        [*LINE.split(), "demo", "--out", str(tmp_path)],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\u2260 DIFFERS" in done.stdout
