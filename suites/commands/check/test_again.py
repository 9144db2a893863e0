"""`degarble check --backend`: the prompts of a capture on other kernels, in one command."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.capture import CaptureSettings
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.options import CaptureFilter
from degarble.harness.commands.check.again import prompts_of
from degarble.suites.commands.calls import call
from degarble.suites.commands.check.test_check import captured
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from degarble.suites.commands.calls import Result

MODULE = """
import torch

def linear(inputs, weights):
    (weight,) = weights.values()
    x, w = inputs["x"].float(), weight.values(torch.float32)
    return {"out": (x @ w.T).to(inputs["x"].dtype)}

def sound():
    return {"attn.wq_b": linear}

def doubled(inputs, weights):
    return {"out": linear(inputs, weights)["out"] * 2}

class Sick:
    name = "sick"
    def components(self):
        return {"attn.wq_b": linear, "layers.1.attn.wq_b": doubled}

def late():
    return {"attn.wq_b": lambda i, w: {"out": 1 / 0}}
"""


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("v4") / "model")


@pytest.fixture(scope="module")
def healthy(v4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(v4, tmp_path_factory.mktemp("healthy") / "capture")


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of kernels, under a name that no other test imports; temporary files go here."""
    name = f"again_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return name


def check(capsys: pytest.CaptureFixture[str], capture: Path, v4: Path, *more: object) -> Result:
    return call(capsys, "--json", "check", capture, "--reference", v4, *more)


def test_sound_kernels_agree_and_the_report_says_who_computed_what(
    v4: Path, healthy: Path, kernels: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = check(capsys, healthy, v4, "--backend", f"{kernels}:sound")
    assert done.status == 0, done.err
    told = done.document
    assert (told["verdict"], told["origins"], told["not_judged"]) == ("AGREES", [], [])
    assert told["facts"]["backend"] == f"{kernels}:sound"
    assert told["facts"]["computed by the backend"].endswith("attn.wq_b")
    assert "attn.wq_a" in told["facts"]["fell to torch"]
    assert told["steps"] == 4
    assert not any((Path.cwd() / "temporary").iterdir())


def test_a_sick_kernel_is_found_as_with_capture_and_check(
    v4: Path, healthy: Path, kernels: str, capsys: pytest.CaptureFixture[str]
) -> None:
    backend, here = ("--backend", f"{kernels}:Sick"), Path.cwd()
    report = here / "report"
    done = check(capsys, healthy, v4, *backend, "--report", report)
    assert done.status == 1, done.err
    (prompts,) = (here / "prompts.txt",)
    prompts.write_text("w7 w8 w9 w31\nw9\n")
    line = ("capture", v4, "--prompts", prompts, "--out", here / "two", *backend)
    assert call(capsys, *line).status == 0
    twice = check(capsys, here / "two", v4)
    names = ("component", "site", "where", "fault", "difference", "cosine")
    one, two = ([{n: o[n] for n in names} for o in each.document["origins"]]
                for each in (done, twice))  # fmt: skip
    assert one == two
    assert one[0]["site"] == "layers.1.attn.wq_b.out"
    assert done.document["capture"] == twice.document["capture"]
    (origin,) = done.document["origins"]
    assert Path(origin["reproducer"]).exists()
    (page,) = report.glob("*.html")
    assert "fell to torch" in page.read_text()
    assert f"--backend {kernels}:Sick" in page.read_text()


def test_filters_hold_and_statistics_are_enough_to_run_again(
    v4: Path, kernels: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = CaptureSettings(CaptureFilter.of("1", "attn.*"), 3, statistics_only=True)
    seen = captured(v4, Path.cwd() / "few", "", few)
    done = check(capsys, seen, v4, "--backend", f"{kernels}:Sick")
    assert done.status == 1, done.err
    lines = done.document["cosines"]
    assert {each["layer"] for each in lines} == {1}
    assert {each["component"].partition(".")[0] for each in lines} == {"attn"}
    assert done.document["steps"] == 3


def test_what_cannot_run_is_refused_and_nothing_stays(
    v4: Path, healthy: Path, kernels: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    here = Path.cwd()
    for value, words in (
        (f"{kernels}:late", "ZeroDivisionError"),
        (f"{kernels}:nothing", "factory in"),
        ("vllm", "a backend with kernels"),
    ):
        done = check(capsys, healthy, v4, "--backend", value)
        assert done.status == 2
        assert words in done.err, done.err
    seen: Any = Capture.open(healthy)
    later = [replace(each, positions=tuple(n + 3 for n in each.positions)) for each in seen.steps]
    with pytest.raises(InvalidArgument, match="Capture a run from its beginning"):
        prompts_of(cast("Any", SimpleNamespace(steps=later, facts=seen.facts)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for more in ((), ("--backend", f"{kernels}:sound")):
        done = check(capsys, healthy, v4, "--device", "cuda", *more)
        assert done.status == 2
        assert "an NVIDIA GPU that torch can use" in done.err
    assert not any((here / "temporary").iterdir())
