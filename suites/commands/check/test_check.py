"""`degarble check` from end to end: healthy, with a fault, on other kernels, with texts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from xml.etree import ElementTree as ET

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture import capture as run
from degarble.harness.capture.capture import CaptureSettings
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.records import CapturedStep, Phase
from degarble.harness.capture.options import CaptureFilter
from degarble.harness.commands.check.check import (
    PROMPTS,
    CheckRun,
    captured_texts,
    pieces,
    prompts_of,
    texts_of,
)
from degarble.harness.commands.check.check import CheckSettings as WantedCheck
from degarble.harness.commands.check.report import junit
from degarble.harness.inference.model import open_model
from degarble.references import tiny
from degarble.suites.capture.files.capture_cases import marked_incomplete, old_capture
from degarble.suites.checkpoint.audit.planted_numbers import Bytes
from degarble.suites.commands.calls import call
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from degarble.harness.engine.localise.recorded_run import RecordedRun
    from degarble.harness.inference.model import OpenModel
    from degarble.suites.commands.calls import Result


# --------------------------------------------------------------------------------------------------
# `degarble check` from end to end: healthy, with a fault, against what was not captured.

NAME = "layers.1.attn.q_norm"


def gain(inner: Any, inputs: Any, weights: Any) -> Mapping[str, Any]:
    made = dict(inner(inputs, weights))
    made["out"] = (made["out"].float() * 1.25).to(made["out"].dtype)
    return made


def captured(
    source: Path,
    folder: Path,
    faulty: str = "",
    capture_settings: run.CaptureSettings | None = None,
) -> Path:
    """Capture a run in which one component may be wrong."""
    healthy = open_model

    def opened(*args: Any, **named: Any) -> Any:
        model = healthy(*args, **named)
        if faulty:
            calls = model.logits_model.bound.calls
            calls[faulty] = partial(gain, calls[faulty])
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "open_model", opened)
        run.capture(
            source,
            ["w7 w8 w9 w31", "w9"],
            folder,
            lambda _streamed: nullcontext(),
            capture_settings,
        )
    return folder


@pytest.fixture(scope="module", params=["v4", "v32"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("v4") / "model", "v4")


def check(capsys: Any, capture: Path, reference: Path, *more: object) -> Result:
    return call(capsys, "check", capture, "--reference", reference, *more)


def test_a_healthy_run_agrees(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capture = captured(model, tmp_path / "capture")
    done = call(capsys, "--json", "check", capture, "--reference", model)
    assert done.status == 0, done.err
    fields = done.document
    assert (fields["schema"], fields["verdict"], fields["origins"]) == (1, "AGREES", [])
    assert not fields["not_judged"]
    lines = {(each["layer"], each["component"], each["output"]): each for each in fields["cosines"]}
    assert lines[1, "attn.q_norm", "out"]["candidate_reference"] == pytest.approx(1)
    assert all(each["budgets"] <= 0.7 for each in fields["cosines"])


def test_a_fault_is_an_origin_with_share_reproducer_page_and_junit(
    v4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capture = captured(v4, tmp_path / "capture", NAME)
    report, file = tmp_path / "report", tmp_path / "found.json"
    done = check(capsys, capture, v4, "--report", report, "--json", file)
    assert done.status == 1, done.err
    assert "DIFFERS" in done.out
    assert f"{NAME}.out" in done.out
    told = json.loads(file.read_text())
    (origin,) = told["origins"]
    assert (origin["layer"], origin["component"], origin["site"]) == (
        1,
        "attn.q_norm",
        f"{NAME}.out",
    )
    assert origin["difference"] == pytest.approx(0.25, rel=0.01)
    assert origin["budget"] < 0.02
    assert told["shares"]["alone"][0] == pytest.approx(1, abs=0.02)
    script = Path(origin["reproducer"])
    assert len(script.read_text().splitlines()) <= 14
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    assert NAME in ran.stdout
    assert (script.parent / "case.safetensors").stat().st_size < 1 << 20
    (page,) = report.glob("*.html")
    assert NAME in page.read_text()
    (junit,) = report.glob("*-junit.xml")
    suite = ET.fromstring(junit.read_text())
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == [NAME]


_TOLD = st.text(st.characters(codec=None), max_size=40) | st.text(
    st.sampled_from(
        "a<&'\"]\t\n\r\0\x1f\x7f\x85\ud7ff\ud800\udfff\ue000\ufffd\ufffe\uffff\U0001ffff"
    ),
    max_size=20,
)


@given(_TOLD, _TOLD)
def test_whatever_was_found_junit_is_xml(found: str, sentence: str) -> None:
    """Names and sentences of foreign captures may hold any character."""
    trouble = SimpleNamespace(component=NAME, sentence=found)
    origins = [SimpleNamespace(discrepancy=trouble)]
    checked: Any = SimpleNamespace(localised=SimpleNamespace(rows=[]), origins=origins)
    suite = ET.fromstring(junit(checked, sentence).encode())
    text = suite.findtext("system-out") or ""
    assert len(text) == len(sentence)
    kept = [(a, b) for a, b in zip(sentence, text, strict=True) if b != "\N{REPLACEMENT CHARACTER}"]
    assert all(a == b for a, b in kept)
    lost = {a for a, b in zip(sentence, text, strict=True) if a != b}
    assert not any(each.isalnum() or each in "\t\n<&" for each in lost)
    assert suite.find("testcase/failure") is not None


def test_a_filtered_capture_is_judged_as_far_as_it_goes(
    v4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = run.CaptureSettings(CaptureFilter.from_options("1", "attn.*", "0-2"))
    capture = captured(v4, tmp_path / "capture", NAME, some)
    done = call(capsys, "--json", "check", capture, "--reference", v4)
    assert done.status == 1, done.err
    assert [each["component"] for each in done.document["origins"]] == ["attn.q_norm"]
    reasons = {each["component"]: each["reason"] for each in done.document["not_judged"]}
    assert "only some rows" in reasons["layers.1.attn.attend"]


def test_another_checkpoint_and_captures_that_cannot_be_judged_are_refused(
    v4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = run.CaptureSettings(CaptureFilter.from_options("0", "attn.w*"), 1)
    moved = tmp_path / "moved"
    shutil.copytree(v4, moved)
    capture = captured(moved, tmp_path / "capture", "", few)
    other = write_speaker(tmp_path / "other", "v4", "nvfp4-experts")
    done = check(capsys, capture, v4, "--checkpoint", other)
    assert done.status == 2
    assert "fingerprint of other" in done.err
    moved.rename(tmp_path / "elsewhere")
    done = check(capsys, capture, v4)
    assert done.status == 2
    assert "pass --checkpoint" in done.err
    assert check(capsys, capture, v4, "--checkpoint", tmp_path / "elsewhere").status == 0
    v32 = write_speaker(tmp_path / "v32", "v32")
    done = check(capsys, capture, v32, "--checkpoint", tmp_path / "elsewhere")
    assert done.status == 2
    assert "family of v32" in done.err
    left = marked_incomplete(capture)
    done = check(capsys, left, v4, "--checkpoint", tmp_path / "elsewhere")
    assert done.status == 2
    assert "incomplete" in done.err
    assert "--partial" in done.err
    done = check(capsys, left, v4, "--checkpoint", tmp_path / "elsewhere", "--partial")
    assert done.status == 0
    assert "The capture is incomplete" in done.out
    capture_settings = run.CaptureSettings(
        CaptureFilter.from_options("0", "attn.w*"), 1, statistics_only=True
    )
    counted = captured(tmp_path / "elsewhere", tmp_path / "statistics", "", capture_settings)
    done = check(capsys, counted, v4)
    assert done.status == 2
    assert "statistics only" in done.err


def test_a_reference_with_a_flipped_bit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_speaker(tmp_path / "source", "v4", "nvfp4-experts")
    reference = write_speaker(tmp_path / "reference")
    capture = captured(
        source,
        tmp_path / "capture",
        "",
        run.CaptureSettings(CaptureFilter.from_options("0", "attn.w*"), 1),
    )
    done = call(capsys, "--json", "check", capture, "--reference", reference)
    assert done.status == 0, done.err
    assert done.document["facts"]["the reference's hashes"] == "verified"
    name = "layers.1.ffn.experts.2.w1.weight"
    Bytes(reference)[name][3, 5] ^= 1
    done = check(capsys, capture, reference)
    assert (done.status, done.out) == (2, "")
    assert f"1 tensor differs, {name} first" in done.err
    done = check(capsys, captured(reference, tmp_path / "own"), reference)
    assert done.status == 2
    (reference / "manifest.json").unlink()
    assert check(capsys, capture, reference).status == 0


def test_a_narrow_model_is_checked_on_one_thread(v4: Path, tmp_path: Path) -> None:
    folder, before = captured(v4, tmp_path / "capture"), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with CheckRun(WantedCheck(folder, v4)):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_run_whose_logits_are_nan_is_captured_and_its_origin_found(
    v4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fault.py").write_text(
        f"def patch(candidate):\n    candidate.weights['{NAME}'].value[3] = float('nan')\n"
    )
    line = ("--prompt", "w7 w8 w9", "--max-new-tokens", 2, "--patch", tmp_path / "fault.py")
    done = call(capsys, "capture", v4, *line, "--out", tmp_path / "capture")
    assert done.status == 0, done.err
    done = check(capsys, tmp_path / "capture", v4, "--json", tmp_path / "found.json")
    assert done.status == 1, done.err
    assert "NaN or infinite on one side only" in done.out
    assert f"not finite   The first value that is not finite came out of {NAME}" in done.out
    told = json.loads((tmp_path / "found.json").read_text())
    (origin,) = told["origins"]
    assert (origin["site"], origin["cosine"], origin["difference"]) == (f"{NAME}.out", None, None)
    assert told["first_non_finite"]["component"] == NAME


# --------------------------------------------------------------------------------------------------
# `degarble check --backend`: the prompts of a capture on other kernels, in one command.

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
def again_v4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("v4") / "model")


@pytest.fixture(scope="module")
def healthy(again_v4: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(again_v4, tmp_path_factory.mktemp("healthy") / "capture")


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of kernels, under a name that no other test imports; temporary files go here."""
    name = f"again_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return name


def again_check(
    capsys: pytest.CaptureFixture[str], capture: Path, v4: Path, *more: object
) -> Result:
    return call(capsys, "--json", "check", capture, "--reference", v4, *more)


def test_sound_kernels_agree_and_the_report_names_the_kernel_of_each_component(
    again_v4: Path, healthy: Path, kernels: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = again_check(capsys, healthy, again_v4, "--backend", f"{kernels}:sound")
    assert done.status == 0, done.err
    fields = done.document
    assert (fields["verdict"], fields["origins"], fields["not_judged"]) == ("AGREES", [], [])
    assert fields["facts"]["backend"] == f"{kernels}:sound"
    assert fields["facts"]["computed by the backend"].endswith("attn.wq_b")
    assert "attn.wq_a" in fields["facts"]["fell to torch"]
    assert fields["steps"] == 4
    assert not any((Path.cwd() / "temporary").iterdir())


def test_a_sick_kernel_is_found_as_with_capture_and_check(
    again_v4: Path, healthy: Path, kernels: str, capsys: pytest.CaptureFixture[str]
) -> None:
    backend, here = ("--backend", f"{kernels}:Sick"), Path.cwd()
    report = here / "report"
    done = again_check(capsys, healthy, again_v4, *backend, "--report", report)
    assert done.status == 1, done.err
    (prompts,) = (here / "prompts.txt",)
    prompts.write_text("w7 w8 w9 w31\nw9\n")
    line = ("capture", again_v4, "--prompts", prompts, "--out", here / "two", *backend)
    assert call(capsys, *line).status == 0
    twice = again_check(capsys, here / "two", again_v4)
    names = ("component", "site", "where", "fault", "difference", "cosine")
    one, two = ([{n: o[n] for n in names} for o in result.document["origins"]]
                for result in (done, twice))  # fmt: skip
    assert one == two
    assert one[0]["site"] == "layers.1.attn.wq_b.out"
    assert done.document["capture"] == twice.document["capture"]
    (origin,) = done.document["origins"]
    assert Path(origin["reproducer"]).exists()
    (page,) = report.glob("*.html")
    assert "fell to torch" in page.read_text()
    assert f"--backend {kernels}:Sick" in page.read_text()


def test_filters_hold_and_statistics_are_enough_to_run_again(
    again_v4: Path, kernels: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = CaptureSettings(CaptureFilter.from_options("1", "attn.*"), 3, statistics_only=True)
    seen = captured(again_v4, Path.cwd() / "few", "", few)
    done = again_check(capsys, seen, again_v4, "--backend", f"{kernels}:Sick")
    assert done.status == 1, done.err
    lines = done.document["cosines"]
    assert {line["layer"] for line in lines} == {1}
    assert {line["component"].partition(".")[0] for line in lines} == {"attn"}
    assert done.document["steps"] == 3


def test_what_cannot_run_is_refused_and_nothing_stays(
    again_v4: Path, healthy: Path, kernels: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    here = Path.cwd()
    for value, words in (
        (f"{kernels}:late", "ZeroDivisionError"),
        (f"{kernels}:nothing", "factory in"),
        ("vllm", "a backend with kernels"),
    ):
        done = again_check(capsys, healthy, again_v4, "--backend", value)
        assert done.status == 2
        assert words in done.err, done.err
    seen: Any = Capture.open(healthy)
    later = [replace(step, positions=tuple(n + 3 for n in step.positions)) for step in seen.steps]
    with pytest.raises(InvalidArgument, match="Capture a run from its beginning"):
        prompts_of(cast("Any", SimpleNamespace(steps=later, facts=seen.facts)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for more in ((), ("--backend", f"{kernels}:sound")):
        done = again_check(capsys, healthy, again_v4, "--device", "cuda", *more)
        assert done.status == 2
        assert "an NVIDIA GPU that torch can use" in done.err
    assert not any((here / "temporary").iterdir())


RELEASED = Path(tiny.__file__).parent / "v1" / "v4"


@dataclass
class Run:
    """A run that has said something."""

    facts: dict[str, Any] = field(default_factory=dict)
    steps: tuple[CapturedStep, ...] = ()


def texts_run(*sequences: object, steps: tuple[CapturedStep, ...] = ()) -> RecordedRun:
    facts = {"sequences": list(sequences)} if sequences else {}
    return cast("RecordedRun", Run(facts, steps))


@pytest.fixture(scope="module")
def texts_model() -> Iterator[OpenModel]:
    with open_model(RELEASED, "bf16") as opened:
        yield opened


def test_prompts_come_from_the_capture_or_from_its_steps() -> None:
    assert captured_texts(texts_run({"prompt": [1, 2], "new": [3], "text": "x"})) == [([1, 2], [3])]
    steps = (
        CapturedStep(0, Phase.PREFILL, (5, 6, 7, 8), (0, 1, 0, 1), (0, 0, 1, 1)),
        CapturedStep(1, Phase.DECODE, (9, 4), (2, 2), (0, 1)),
        CapturedStep(2, Phase.DECODE, (3,), (3,), (1,)),
    )
    assert captured_texts(texts_run(steps=steps)) == [([5, 6], [9]), ([7, 8], [4, 3])]


@pytest.mark.parametrize("raw", [7, {}, {"prompt": [1]}, {"prompt": ["a"], "new": [True]}])
def test_a_strange_record_of_a_sequence_is_passed_over(raw: object) -> None:
    assert captured_texts(texts_run(raw)) == []


def test_a_capture_of_version_1_still_gives_its_prompts(tmp_path: Path) -> None:
    with_prompts = captured_texts(Capture.open(old_capture(tmp_path / "capture")))
    assert all(ids for ids, _ in with_prompts)
    assert with_prompts


def test_the_twin_goes_on_from_the_very_same_ids(texts_model: OpenModel) -> None:
    record = texts_of(texts_run({"prompt": [0, 13, 20], "new": [6, 500, 7]}), texts_model)
    (prompt_texts,) = record.said
    names = [name for name, _ in prompt_texts.voices]
    assert names == ["Twin", "Candidate"]
    assert [len(tokens) for _, tokens in prompt_texts.voices] == [3, 3]
    assert prompt_texts.parting is not None


def test_prompts_left_out_are_stated_in_a_note(texts_model: OpenModel) -> None:
    one = {"prompt": [0, 13], "new": [6]}
    many = texts_of(texts_run(*[one] * (PROMPTS + 1)), texts_model)
    assert len(many.said) == PROMPTS
    assert many.notes == (f"The first {PROMPTS} of {PROMPTS + 1} prompts.",)
    long = texts_of(texts_run({"prompt": [0] * 3000, "new": [6]}), texts_model)
    assert long.said == ()
    assert "2,048 tokens" in long.notes[0]


def test_ids_outside_the_vocabulary_do_no_harm(texts_model: OpenModel) -> None:
    (prompt_texts,) = texts_of(
        texts_run({"prompt": [0, 13], "new": [2**61, -4, 10**6]}), texts_model
    ).said
    assert dict(prompt_texts.voices)["Candidate"]
    (lone,) = texts_of(texts_run({"prompt": [10**7], "new": [6]}), texts_model).said
    assert [name for name, _ in lone.voices] == ["Candidate"]
    assert pieces([3, 4], None) == ("3 ", "4 ")
