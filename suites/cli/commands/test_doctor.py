"""`degarble doctor` as a user meets it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.cli.commands import checkpoints, judging
from degarble.suites.commands.calls import call
from degarble.suites.commands.doctor.test_doctor import product
from degarble.suites.serve.proven_cases import TINY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.cli.terminal import Terminal


def giving(document: Mapping[str, object], said: list[str]) -> object:
    """A command that gives this document."""

    def body(options: object, terminal: Terminal) -> int:
        said.append(type(options).__name__)
        terminal.emit(document)
        return 0

    return body


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the commands that were run; none computes anything."""
    said: list[str] = []
    clean = {"verdict": "AGREES", "headline": "NO ERRORS FOUND", "sentence": "No error."}
    agrees = {"verdict": "AGREES", "sentence": "Within budgets.", "kernel_tested": False}
    monkeypatch.setattr(checkpoints, "audit", giving(clean, said))
    monkeypatch.setattr(judging, "capture", giving({"verdict": None, "sentence": "Run."}, said))
    monkeypatch.setattr(judging, "check", giving(agrees, said))
    return said


def test_a_kernel_file_is_judged_and_the_cause_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kernel.safetensors"
    save_file(product(), file)
    done = call(capsys, "doctor", file, "--out", tmp_path / "out")
    assert done.status == 0
    assert "✓ AGREES  gemm agrees with its twin" in done.out
    assert 'Next: degarble doctor CKPT --engine "vllm serve CKPT"' in done.out
    assert "[1/1] judge the output" in done.err
    save_file(product(2.0), file)
    done = call(capsys, "doctor", file, "--out", tmp_path / "out")
    assert done.status == 1
    assert "M43.whole" in done.out
    assert done.out.endswith("Next: degarble faults show M43.whole\n")


def test_a_checkpoint_alone_never_claims_that_a_kernel_was_tested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: list[str]
) -> None:
    done = call(capsys, "doctor", TINY, "--out", tmp_path / "out")
    assert done.status == 0
    assert said == ["AuditOptions", "CaptureOptions", "CheckOptions"]
    assert done.out.startswith("v4 is a checkpoint: audit its files, run the built-in references")
    assert "✓ NO ERRORS FOUND" in done.out
    assert "No kernel was tested." in done.out
    assert f'Next: degarble doctor {TINY} --engine "vllm serve {TINY}"' in done.out
    assert "AGREES  " not in done.out


def test_a_reference_that_differs_is_followed_by_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    differs = {"verdict": "DIFFERS", "sentence": "One weight.", "against": {"name": "bf16"}}
    monkeypatch.setattr(checkpoints, "audit", giving(differs, said))
    done = call(capsys, "doctor", TINY, "--reference", TINY, "--out", tmp_path / "out")
    assert done.status == 1
    again = f"Next, once that is mended: degarble doctor {TINY} --reference {TINY}"
    assert done.out.splitlines()[-1] == again


def test_after_a_refusal_the_same_command_comes_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kernel.safetensors"
    save_file({"x": torch.ones(2, 16)}, file)
    for target in (file, "http://127.0.0.1:1"):
        done = call(capsys, "doctor", target, "--out", tmp_path / "out")
        assert done.status == 2
        last = done.out.splitlines()[-1]
        assert last == f"Next, once that is mended: degarble doctor {target}"


def test_a_refused_step_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def refused(*_: object) -> int:
        raise InvalidArgument("head", "3", "4", "Mend it.")

    monkeypatch.setattr(judging, "capture", refused)
    done = call(capsys, "--json", "doctor", TINY, "--out", tmp_path / "out")
    steps = {step["step"]: step for step in done.document["steps"]}
    assert (done.status, done.document["headline"]) == (0, "NO ERRORS FOUND")
    assert "Mend it." in steps["capture"]["sentence"]
    assert steps["check"]["sentence"] == "Left out, since capture was."
    monkeypatch.setattr(checkpoints, "audit", refused)
    done = call(capsys, "--json", "doctor", TINY, "--out", tmp_path / "out")
    assert (done.status, done.document["verdict"]) == (2, "UNDECIDED")
    assert said == ["AuditOptions"]


def test_an_interrupted_run_tells_what_was_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(judging, "check", interrupted)
    done = call(capsys, "doctor", TINY, "--out", tmp_path / "out")
    assert done.status == 130
    assert said == ["AuditOptions", "CaptureOptions"]
    assert "Interrupted" in done.out
    assert "NO ERRORS FOUND. No error." in done.out
    assert "Not done. degarble check" in done.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nobody/nothing",), "hf download nobody/nothing --local-dir nothing"),
        (("localhost:8000",), "degarble doctor http://localhost:8000"),
        ((TINY, "--engine", "vllm serve elsewhere"), "Name the same folder in both."),
        (("http://127.0.0.1:1", "--engine", f"vllm serve {TINY}"), "a checkpoint as TARGET"),
        ((TINY, "--minutes", "0"), "--minutes"),
        ((TINY / "model-00001-of-00001.safetensors", "--prompts", __file__), "with a kernel"),
        ((TINY / "model-00001-of-00001.safetensors", "--reference", TINY), "with a kernel"),
        ((TINY, "--prompts", "nowhere.txt"), "nowhere.txt"),
    ],
    ids=["hub", "address", "other", "server", "minutes", "kernel", "kernel-reference", "prompts"],
)
def test_what_does_not_go_together_is_refused(
    words: tuple[object, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = call(capsys, "doctor", *words, "--out", tmp_path / "out")
    assert done.status == 2
    assert told in done.err
    assert not (tmp_path / "out").exists()


def test_conversations_for_an_engine_are_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text('[{"role": "user", "content": "hello"}]\n')
    words = ("--engine", f"vllm serve {TINY}", "--prompts", file, "--out", tmp_path / "out")
    done = call(capsys, "doctor", TINY, *words)
    assert done.status == 2
    assert "an engine is recorded by completions" in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_small_checkpoint_is_looked_at_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = call(capsys, "--json", "doctor", TINY, "--out", tmp_path / "out")
    document = done.document
    assert (done.status, document["headline"]) == (0, "NO ERRORS FOUND")
    assert [step["step"] for step in document["steps"]] == ["audit", "capture", "check"]
    assert Path(document["report"]).is_file()
    again = call(capsys, "--json", "doctor", TINY, "--out", tmp_path / "out")
    assert again.status == 0
    folders = sorted(path.name for path in (tmp_path / "out" / "captures").iterdir())
    assert folders == ["references", "references-2"]
