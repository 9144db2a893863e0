"""The set-up says in one line what is missing, repeats nothing, and leaves nothing half-done."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from degarble.suites.hang_guard import HANG_SECONDS
from degarble.suites.house.repository import ROOT

if TYPE_CHECKING:
    from pathlib import Path

TOOLS = ("sh", "make", "cat", "cksum", "uname", "dirname", "rm", "grep", "sed", "head")
HAS_TOOLS = os.name == "posix" and all(shutil.which(tool) for tool in TOOLS)
pytestmark = pytest.mark.skipif(not HAS_TOOLS, reason="needs make and the POSIX tools")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the set-up reads, beside a folder of programs without any Python."""
    for name in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/setup"):
        target = tmp_path / "checkout" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    return tmp_path / "checkout"


def make(
    checkout: Path, *arguments: str, target: str = "setup", **environment: str
) -> subprocess.CompletedProcess[str]:
    programs = {"PATH": str(checkout.parent / "bin"), "HOME": str(checkout)}
    return subprocess.run(
        ["make", target, *arguments],
        cwd=checkout,
        env=programs | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_SECONDS,
    )


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_missing_python_is_reported(checkout: Path) -> None:
    done = make(checkout)
    assert done.returncode == 2
    assert done.stderr.startswith("setup: no Python from 3.11 to 3.13 among: python3.11 ")
    assert "make demo PYTHON=/path/to/python3.12" in done.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("version", ["3.9.7", "3.14.0"])
def test_unsuitable_python_is_reported_with_its_version(checkout: Path, version: str) -> None:
    text = f'case "$1" in --version) echo Python {version};; *) exit 1;; esac'
    program(checkout.parent / "bin" / "python3", text)
    done = make(checkout)
    assert done.returncode == 2
    assert f"python3 is Python {version}." in done.stderr


def test_named_python_alone_is_tried(checkout: Path) -> None:
    done = make(checkout, "PYTHON=nowhere/python3.12")
    assert done.returncode == 2
    assert done.stderr.startswith("setup: no Python from 3.11 to 3.13 among: nowhere/python3.12.")


@pytest.mark.slow
def test_unreachable_index_is_reported(checkout: Path) -> None:
    """Port 9 of the loopback address refuses at once, as a machine without a network does."""
    done = make(
        checkout,
        f"PYTHON={sys.executable}",
        PIP_INDEX_URL="http://127.0.0.1:9/",
        PIP_CONFIG_FILE=os.devnull,
    )
    assert done.returncode == 2
    assert "setup: the package index cannot be reached. Is there a network?" in done.stderr
    assert "KEY=\n" not in (checkout / ".venv" / "degarble-setup").read_text()


def stand_in(checkout: Path) -> tuple[Path, Path]:
    """A program in place of the environment's Python, which notes each installation."""
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    notes = checkout / "notes"
    program(
        python,
        f'case "$*" in *pip*) echo "$*" >>{notes};; *--version*) echo Python 3.12.1;; '
        '*print*) echo "3 12";; esac',
    )
    return python, notes


def test_second_run_does_nothing_until_an_input_changes(checkout: Path) -> None:
    python, notes = stand_in(checkout)
    arguments = (f"PYTHON={python}", "EXTRAS=dev")
    assert make(checkout, *arguments).returncode == 0
    installed = notes.read_text()
    assert "-c constraints.txt --no-build-isolation -e .[dev]" in installed
    second = make(checkout, *arguments)
    assert (second.returncode, second.stdout, notes.read_text()) == (0, "", installed)
    with (checkout / "constraints.txt").open("a") as constraints:
        constraints.write("# changed\n")
    make(checkout, *arguments)
    assert notes.read_text() == installed * 2


def test_settings_of_make_are_remembered(checkout: Path) -> None:
    python, notes = stand_in(checkout)
    said = (f"PYTHON={python}", "EXTRAS=dev,server", "TORCH_INDEX_URL=file:///index")
    assert make(checkout, *said).returncode == 0
    installed = notes.read_text()
    assert "--index-url file:///index --no-deps torch" in installed
    assert installed.endswith("-e .[dev,server]\n")
    assert make(checkout).returncode == 0
    assert notes.read_text() == installed
    make(checkout, "EXTRAS=dev")
    assert notes.read_text().endswith("-e .[dev]\n")


def test_a_failed_set_up_is_repeated(checkout: Path) -> None:
    python, notes = stand_in(checkout)
    arguments = (f"PYTHON={python}", "EXTRAS=dev")
    make(checkout, *arguments)
    text = python.read_text()
    program(python, text.removeprefix("#!/bin/sh\n").replace(f">>{notes}", "; exit 1"))
    assert make(checkout, *arguments, "EXTRAS=server").returncode == 2
    python.write_text(text)
    assert "packages" in make(checkout, *arguments).stdout
