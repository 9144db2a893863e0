"""A memory checker watches every kernel: what it finds fails; where it cannot look: UNDECIDED."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from degarble.harness.errors import UnknownName
from degarble.suites.kernels import memory_checks as checks

ROOT = Path(__file__).parents[2]
PROGRAM = "compute-sanitizer"
SECONDS = 240
FOUND = 99  # its exit status where it found something
NOT_WATCHED = {  # probes of a chip's arithmetic, watched with the kernels that they came before
    "simt_probe_formats", "simt_probe_requantise",
}  # fmt: skip

pytestmark = pytest.mark.needs("cutlass")


def watched(group: str) -> tuple[int, str]:
    """Run a group's launches under the checker; exit status and all that was said."""
    words = (
        PROGRAM, "--tool", "memcheck", "--error-exitcode", str(FOUND),
        # What a driver does not know is asked for at every start, and is no error of a kernel.
        "--report-api-errors", "no", "--kernel-regex", "kns=cutlass",
        sys.executable, "-m", "degarble.suites.kernels.memory_checks", group,
    )  # fmt: skip
    own = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=SECONDS, env=os.environ | own, check=False
    )
    return done.returncode, done.stdout + done.stderr


def told(status: int, text: str) -> str:
    """Say what the checker found: nothing (empty), errors, or that it could not look."""
    summary = re.search(r"ERROR SUMMARY: (\d+) errors?", text)
    if summary is None:
        return f"UNDECIDED: {PROGRAM} said no summary; status {status}: {text.strip()[-200:]}"
    if int(summary[1]):
        first = re.search(r"(?m)^=+ (Invalid .*|Program hit .*)$", text)
        return f"{summary[1]} errors: {first[1] if first else text[:200]}"
    return f"the launches failed with status {status}: {text.strip()[-300:]}" if status else ""


@cache
def blind() -> str:
    """Return why the checker sees nothing here; empty where it sees a planted fault."""
    if shutil.which(PROGRAM) is None:
        return f"UNDECIDED: no {PROGRAM} on PATH; it comes with the CUDA toolkit"
    try:
        found = told(*watched(checks.PLANTED))
    except subprocess.TimeoutExpired:
        return f"UNDECIDED: {PROGRAM} came to no end within {SECONDS} s"
    if found.startswith("UNDECIDED") or "Invalid" in found:
        return found if found.startswith("UNDECIDED") else ""
    return f"UNDECIDED: {PROGRAM} does not see a read behind a tensor: {found or 'no error'}"


@pytest.mark.h200
@pytest.mark.parametrize("group", checks.GROUPS)
def test_nothing_is_read_or_written_that_is_not_there(group: str) -> None:
    if why := blind():
        pytest.xfail(why)
    try:
        status, text = watched(group)
    except subprocess.TimeoutExpired:
        pytest.xfail(f"UNDECIDED: {PROGRAM} came to no end within {SECONDS} s")
    found = told(status, text)
    if found.startswith("UNDECIDED"):
        pytest.xfail(found)
    assert not found
    launched = set(re.findall(r"(?m)^launched (\w+)$", text))
    assert set(checks.GROUPS[group].kernels) <= launched


def test_every_kernel_is_watched() -> None:
    """A module that has a launch of its own is in a group."""
    kept = {name for group in checks.GROUPS.values() for name in group.kernels}
    there = {
        path.stem
        for pattern in ("sm90_*.py", "simt_*.py")
        for path in (ROOT / "kernels").glob(pattern)
        if "\ndef launch_" in path.read_text()
    }
    assert there - NOT_WATCHED == kept


CLEAN = "launched simt_embed\n========= ERROR SUMMARY: 0 errors\n"
BAD = (
    "========= Invalid __global__ read of size 4 bytes\n=========     at kernel_cutlass_x\n"
    "========= ERROR SUMMARY: 3 errors\n"
)


@pytest.mark.parametrize(
    ("status", "text", "wanted"),
    [
        (0, CLEAN, ""),
        (FOUND, BAD, "3 errors: Invalid __global__ read of size 4 bytes"),
        (2, "REFUSED: no\n" + CLEAN, "the launches failed with status 2"),
        (1, "========= Error: Device not supported\n", "UNDECIDED: compute-sanitizer said no"),
    ],
)
def test_what_the_checker_says_is_read(status: int, text: str, wanted: str) -> None:
    assert told(status, text).startswith(wanted)
    assert bool(told(status, text)) is bool(wanted)


def test_a_group_that_nobody_has_is_refused() -> None:
    with pytest.raises(UnknownName, match="group of launches"):
        checks.launched("expert")
    assert checks.main(["expert"]) == 2
