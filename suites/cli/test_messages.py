"""The help and the refusals of each command, word for word."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.suites.commands.calls import call
from degarble.suites.snapshots import assert_as_kept

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS = [
    "",
    *(
        "doctor",
        "demo",
        "capture",
        "check",
        "compare",
        "audit",
        "quantise",
        "convert",
        "generate",
        "serve",
    ),
    *("faults", "faults list", "faults run"),
    *(
        "history",
        "history add",
        "history runs",
        "history trends",
        "history changes",
        "history compare",
        "history export",
    ),
    "bisect",
]


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERMINAL_WIDTH", "100")
    monkeypatch.setenv("NO_COLOR", "1")


def test_help_is_as_kept(capsys: pytest.CaptureFixture[str]) -> None:
    parts = []
    for command in COMMANDS:
        result = call(capsys, *command.split(), "--help")
        assert result.status == 0
        text = "\n".join(line.rstrip() for line in result.out.splitlines())
        parts.append(f"$ degarble {command} --help\n{text}\n")
    assert_as_kept("cli/help.txt", "\n".join(parts))


# Each line holds what a person may well type; CKPT and CAPTURE exist.
REFUSED = """
check CAPTURE --reference CKPT
check nowhere --reference CKPT
check CAPTURE --reference CKPT --device tpu
check CAPTURE --reference CKPT --backend cutdsl
check CAPTURE --reference CKPT --backend my-kernels:
capture CKPT --out new --prompt hello
capture CKPT --out new --prompt hello --prompts nowhere
capture CKPT --out new --patch nowhere.py
compare CAPTURE CAPTURE
audit CKPT
audit CKPT --loader vlm
audit CKPT --loader nowhere.yaml
audit CKPT --against nowhere
quantise CKPT new --recipe nvfp4-full
quantise CKPT new --recipe nvfp4-experts --cluster dask
quantise CKPT new --recipe nvfp4_full
quantise CKPT new --recipe nowhere.yaml
quantise CKPT new --recipe bf16 --scale-rule max
convert CKPT new --to bf16 --prove
convert CKPT new --to fp8
generate CKPT --prompt hello --max-new-tokens 4
generate CKPT
generate CKPT --prompt hello --interactive
generate CKPT --prompt hello --top-p 2
generate CKPT --prompt hello --temperature nan
serve CKPT --port 0
serve CKPT --host 0.0.0.0
faults run M10 --whole
history trends
history export all.csv
history export all.parquet
bisect -- make test
--cluster ray demo
"""


def test_refusals_are_as_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "CKPT").mkdir()
    (tmp_path / "CAPTURE").mkdir()
    parts = []
    for line in REFUSED.strip().splitlines():
        result = call(capsys, *line.split())
        assert result.status == 2
        assert result.out == ""
        parts.append(f"$ degarble {line}\n{result.err}")
    assert_as_kept("cli/refusals.txt", "\n".join(parts))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CAPTURE", "CKPT"]
