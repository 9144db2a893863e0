"""`degarble check` over processes, GPUs and machines, and after a kill: one verdict."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import MissingDevice, WorkerLost
from degarble.harness.capture.capture import CaptureSettings
from degarble.harness.capture.options import CaptureFilter
from degarble.harness.checkpoint.audit.structure import manifest_check
from degarble.harness.checkpoint.write import finished_parts, workers
from degarble.harness.checkpoint.write.disk import DISK
from degarble.harness.checkpoint.write.manifest import hash_of_file
from degarble.harness.commands.check import check as checking
from degarble.harness.commands.check import spread
from degarble.harness.commands.check.check import CheckRun, CheckSettings
from degarble.harness.engine.budget import roles
from degarble.harness.engine.localise.answers import JudgingTask
from degarble.harness.engine.localise.localise import Localisation
from degarble.harness.inference import devices
from degarble.suites.checkpoint.write.test_finished_parts import Killed, KilledDisk
from degarble.suites.commands.calls import call
from degarble.suites.commands.check.test_check import NAME, captured
from degarble.suites.commands.cluster_cases import played_cluster
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from degarble.suites.commands.calls import Result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a capture of one layer of a run with one fault."""
    made = tmp_path_factory.mktemp("spread")
    settings = CaptureSettings(CaptureFilter.from_options("1", None, None))
    captured(write_speaker(made / "model", "v4"), made / "capture", NAME, settings)
    return made


@pytest.fixture
def check(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    def run(*more: object) -> Result:
        place = ("--json", tmp_path / "found.json")
        known = (folder / "capture", "--reference", folder / "model")
        return call(capsys, "check", *known, *more, *place)

    return run


def document(tmp_path: Path) -> str:
    assert [each.name for each in tmp_path.iterdir() if "unfinished" in each.name] == []
    return (tmp_path / "found.json").read_text()


def test_one_process_or_two_on_gpus_of_their_own_or_a_cluster_say_the_same(
    check: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check("--workers", "1").status == 1
    alone = document(tmp_path)
    assert [each["component"] for each in json.loads(alone)["origins"]] == ["attn.q_norm"]
    asked = played_cluster(monkeypatch)
    assert check("--cluster", "ray").status == 1
    assert document(tmp_path) == alone
    assert len(asked) > 20
    monkeypatch.setattr(devices, "gpus", lambda: ("cpu:0", "cpu:1"))
    monkeypatch.setattr(devices, "processes_on", lambda found, _: len(found))
    assert check("--device", "cuda:all").status == 1  # two processes
    assert document(tmp_path) == alone


def test_workers_import_while_the_command_does(
    check: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[list[str]] = []
    monkeypatch.setattr(workers, "begin_imports", begun.append)
    monkeypatch.setattr(spread.SpreadCheck, "each", lambda *_: iter(()))
    for options in (("--workers", "1"), (), ("--workers", "2")):
        assert not begun
        with suppress(Exception):  # nothing is judged
            check(*options)
    assert begun == [[workers.CHECK_IMPORTS]]


def test_what_workers_import_lets_the_command_keep_their_server() -> None:
    """Modules that every check imports are none that a model alone needs; loops are loaded."""
    code = f"""
import sys
import {workers.CHECK_IMPORTS}
from degarble.harness.commands.check import spread
from degarble.harness.engine.budget import loops
print([name for name in sys.modules if name.startswith(spread._HEAVY)])
print(len(loops.panel.signatures))
import logging
logging.getLogger("a library that a model imports").warning("not on a terminal")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n1\n"
    assert not done.stderr


@pytest.fixture
def verified_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is hashed before a component is kept, however busy the machine is."""
    monkeypatch.setattr(CheckRun, "is_verified", lambda run: run.require_verified() or True)


@pytest.mark.usefixtures("verified_first")
def test_a_killed_check_goes_on_and_says_the_same(
    check: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    disk, judged = KilledDisk(1 << 30), []
    here = Localisation.judged_here

    def counted(self: Localisation, task: JudgingTask) -> Any:
        judged.append(task)
        return here(self, task)

    monkeypatch.setattr(Localisation, "judged_here", counted)
    monkeypatch.setattr(finished_parts, "DISK", disk)
    check()
    alone, used, every = document(tmp_path), (1 << 30) - disk.last, len(judged)
    moments = random.Random(seed).sample(range(used), 3)
    for moment in moments:
        judged.clear()
        (tmp_path / "found.json").unlink()
        monkeypatch.setattr(finished_parts, "DISK", KilledDisk(moment))
        with pytest.raises(Killed):
            check()
        assert not (tmp_path / "found.json").exists() or moment > used // 2
        monkeypatch.setattr(finished_parts, "DISK", DISK)
        check()
        assert document(tmp_path) == alone
        # Twice: the one that was judged when it was killed, and the origin for its tensors.
        assert len(judged) <= every + 2


@pytest.mark.usefixtures("verified_first")
def test_a_file_that_was_written_again_makes_a_killed_check_start_anew(
    folder: Path, check: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fingerprint samples the bytes of a large file: between two runs any of them may change."""
    judged = []
    here = Localisation.judged_here

    def counted(self: Localisation, task: JudgingTask) -> Any:
        judged.append(task)
        if len(judged) == 5:
            raise Killed
        return here(self, task)

    monkeypatch.setattr(Localisation, "judged_here", counted)
    with pytest.raises(Killed):
        check()
    shard = next((folder / "model").glob("*.safetensors"))
    os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))
    check()
    assert judged[5:9] == judged[:4]
    document(tmp_path)


def test_a_reference_is_hashed_while_components_are_judged_and_none_is_kept_before(
    check: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged, hashed, told = threading.Event(), hash_of_file, []
    result = Localisation.result

    def hash_when_all_is_judged(path: Path) -> str:
        told.append(judged.wait(60))
        return hashed(path)

    def resulting(self: Localisation) -> Any:
        assert len(list(tmp_path.glob("*unfinished*/*/*.json"))) == 1, "only what it depends on"
        judged.set()
        return result(self)

    monkeypatch.setattr(manifest_check, "hash_of_file", hash_when_all_is_judged)
    monkeypatch.setattr(Localisation, "result", resulting)
    assert check().status == 1
    document(tmp_path)
    assert told
    assert all(told)
    shutil.rmtree(tmp_path / "found-reproducers")
    monkeypatch.setattr(manifest_check, "hash_of_file", lambda path: hashed(path)[::-1])
    done = check("--workers", "1")
    assert (done.status, done.out) == (2, "")
    assert "the reference's file " in done.err
    assert len(list(tmp_path.glob("*unfinished*/*/*.json"))) == 1
    assert not (tmp_path / "found-reproducers").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--workers", "0"), "--workers = 0"),
        (("--device", "cuda"), "an NVIDIA GPU that torch can use"),
        (("--device", "gpu"), "cuda:all"),
        (("--device", "cpu:1"), "cuda:all"),
        (("--device", "cuda:1,x"), "cuda:all"),
        (("--cluster", "dask"), "--cluster"),
    ],
)
def test_who_cannot_judge_is_refused(
    words: tuple[str, ...], said: str, check: Callable[..., Result]
) -> None:
    done = check(*words)
    assert done.status == 2
    assert said in done.err


def test_more_gpus_than_there_are_and_gpus_of_a_cluster_are_refused(
    check: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: ("cuda:0", "cuda:1"))
    assert devices.devices_of("--device", "cuda:1,0,1") == ("cuda:1", "cuda:0")
    done = check("--device", "cuda:0,2")
    assert done.status == 2
    assert "cuda:2" in done.err
    assert "cuda:0, cuda:1" in done.err
    done = check("--device", "cuda:all", "--cluster", "ray")
    assert done.status == 2
    assert "one of them" in done.err


@pytest.mark.parametrize("where", ["the twin", "a budget", "the diagnosis"])
@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nmore"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
    ],
)
def test_a_gpu_that_fails_is_named_and_is_no_finding(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    settings = CheckSettings(folder / "capture", folder / "model", device="cpu:0")
    first = str(error).partition("\n")[0]
    with CheckRun(settings) as run:
        if where == "the twin":
            run.twin.calls[NAME].wrapped = fails  # type: ignore[attr-defined]
        elif where == "a budget":
            monkeypatch.setattr(roles, "_own_rule", fails)
        else:
            monkeypatch.setattr(checking, "_all_diagnosed", fails)
        with pytest.raises(MissingDevice, match=f"cpu:0: {first}"):
            run.judge()

    class Failing:
        def told(self, _task: JudgingTask) -> Any:
            raise error

    kept = {("key", "cuda:1"): (ExitStack(), Failing())}
    monkeypatch.setattr(spread, "_KEPT", kept)
    with pytest.raises(WorkerLost, match=f"GPU of the worker for a = 'cuda:1: {first}"):
        spread._judged("key", settings, False, "cuda:1", JudgingTask(("a",)))
