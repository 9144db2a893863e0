"""A memory checker watches every kernel: what it finds fails; where it cannot look: UNDECIDED."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache

import pytest

from degarble.harness.base.errors import UnknownName
from degarble.suites.kernels import memory_checks as checks

PROGRAM = "compute-sanitizer"
SECONDS = 240
FOUND = 99  # its exit status where it found something
# Bytes between allocations: a read far past a small tensor's end would else meet the next tensor,
# as reads of 123 rows past the compressor's projections did.
PADDING = 1 << 20
NOT_WATCHED = {  # probes of a chip's arithmetic, watched with the kernels that they came before
    "simt_probe_formats", "simt_probe_requantise",
}  # fmt: skip

pytestmark = pytest.mark.needs("cutlass")


def watched(group: str) -> tuple[int, str]:
    """Run a group's launches under the checker; exit status and all that was said."""
    words = (
        PROGRAM, "--tool", "memcheck", "--error-exitcode", str(FOUND),
        "--padding", str(PADDING),
        # What a driver does not know is asked for at every start, and is no error of a kernel.
        "--report-api-errors", "no", "--kernel-name", "kns=cutlass",
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
    # It has seen the planted read: a group without a summary or an end is no open question.
    status, text = watched(group)
    assert not told(status, text)
    assert not missing(group, text)


def missing(group: str, text: str) -> set[str]:
    """Return the kernels of a group's list that were not launched."""
    launched = set(re.findall(r"(?m)^launched ([\w.]+)$", text))
    wanted = (checks.kernels_of(module) for module in checks.GROUPS[group].kernels)
    return {name for names in wanted for name in names} - launched


def test_every_kernel_is_watched() -> None:
    """A module that defines a kernel is in a group, or its kernels are those of one that is."""
    kept = {name for group in checks.GROUPS.values() for name in group.kernels}
    there = {
        path.stem
        for folder in (checks.SOURCES, checks.PROBES)
        for path in folder.rglob("*.py")
        if "@cute.kernel" in path.read_text() and not path.stem.startswith("sm100_")
    }
    shared = {name.rpartition("/")[2] for names in checks.OF_SHARED.values() for name in names}
    assert there - NOT_WATCHED == kept | shared
    assert all(map(checks.kernels_of, kept)), "a module without a kernel"


def test_a_kernel_of_the_list_that_was_not_launched_is_reported() -> None:
    assert checks.kernels_of("simt_kv_write") == {
        "simt_kv_write.claim_kernel", "simt_kv_write.write_kernel",
    }  # fmt: skip
    rest = "launched simt_quantise_fp8.quantise_kernel\nlaunched sm90_gemm_fp8_block.gemm_kernel\n"
    some = rest + "launched sm90_moe_nvfp4.grouped_kernel\n"
    assert missing("shared expert", some) == {"sm90_moe_nvfp4.few_kernel"}
    assert not missing("shared expert", some + "launched sm90_moe_nvfp4.few_kernel\n")


CLEAN = "launched simt_embed.embed_kernel\n========= ERROR SUMMARY: 0 errors\n"
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


def test_an_unknown_group_is_refused() -> None:
    with pytest.raises(UnknownName, match="group of launches"):
        checks.launched("expert")
    assert checks.main(["expert"]) == 2
