"""Whatever ends a quantising run, and whenever: the next one ends with the same bytes.

Killed at random moments, a limit on file sizes, a disk that is really full, a read-only target. The
gate is shown a run that believes what it finds.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from degarble.harness.checkpoint.write.manifest import WriteJournal
from degarble.suites.checkpoint.transform.quantise.test_job import SHARD, job_of, source_of
from degarble.suites.checkpoint.writing_cases import quick_folder, tree


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modes", "least"),
    [
        (("moments=3", "file-size=1", "read-only=1", "full=1"), 5),
        pytest.param(("moments=170",), 200, marks=pytest.mark.slow),
        pytest.param(("file-size=40", "full=40"), 40, marks=pytest.mark.slow),
    ],
)
def test_dead_runs_are_taken_up_to_the_same_bytes(
    modes: tuple[str, ...], least: int, seed: int
) -> None:
    command = [
        sys.executable,
        "-m",
        "degarble.suites.checkpoint.transform.quantise.doomed_quantise",
    ]
    done = subprocess.run(
        [*command, str(seed), *modes], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["broken"] == []
    assert found["killed"] >= least


def test_resuming_without_a_check_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a shard that was damaged meanwhile is believed."""
    with quick_folder() as folder:
        job = job_of(source_of(folder, "v4", "official"), "v4", "nvfp4-experts")
        job.run(folder / "whole", shard_bytes=SHARD)
        whole = tree(folder / "whole")
        for believing in (False, True):
            target = folder / f"target-{believing}"
            stopped = _StopAfterTwo()
            with pytest.raises(KeyboardInterrupt):
                job.run(target, shard_bytes=SHARD, progress=stopped)
            first = min(target.glob("*.safetensors"))
            data = bytearray(first.read_bytes())
            data[-1] ^= 1
            first.write_bytes(data)
            with monkeypatch.context() as patch:
                if believing:
                    patch.setattr(WriteJournal, "verified", WriteJournal.recorded)
                job.run(target, shard_bytes=SHARD)
            assert (tree(target) == whole) is not believing


class _StopAfterTwo:
    done = 0

    def __call__(self, *_: object) -> None:
        self.done += 1
        if self.done == 2:
            raise KeyboardInterrupt
