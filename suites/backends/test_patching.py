"""`capture --patch`: what a patch may change, what the manifest says of it, and what is refused."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.capture.files.reader import Capture
from degarble.harness.inference.model import open_model
from degarble.suites.commands.calls import call
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("v4") / "model", "v4")


@pytest.fixture
def run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def captured(patch: str | None, *more: object) -> Any:
        out = tmp_path / "capture"
        line: list[object] = ["--json", "capture", model, "--prompt", "w7 w8", "--out", out]
        line += ["--max-new-tokens", 2, *more]
        if patch is not None:
            (tmp_path / "fault.py").write_text(patch)
            line += ["--patch", tmp_path / "fault.py"]
        return call(capsys, *line), out

    return captured


def first_difference(capture: Capture, model: Path) -> set[str]:
    """Components whose outputs are not what the checkpoint gives on their captured inputs."""
    found = set()
    with open_model(model) as opened, torch.inference_mode():
        bound = opened.logits_model.bound
        for captured_call in capture.calls:
            outputs = bound(captured_call.component, **capture.inputs(captured_call))
            for name, kept in captured_call.outputs.items():
                if not torch.equal(outputs[name].nan_to_num(7), capture.tensor(kept).nan_to_num(7)):
                    found.add(captured_call.component)
    return found


WAYS = {
    "field": "w = candidate.weights[NAME]; w.value = w.value * 2",
    "written into": "candidate.weights[NAME].value[0] = 0",
    "whole": "candidate.weights[NAME] = candidate.weights[NAME].value.flip(0).contiguous()",
    "stored name": "candidate.weights[NAME + '.weight'].value.mul_(1.5)",
    "component": (
        "own = candidate.components[NAME]\n"
        "    candidate.components[NAME] = lambda i, w: {k: v * 2 for k, v in own(i, w).items()}"
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_replaced_shows_in_its_component_alone(run: Any, model: Path, way: str) -> None:
    text = f"NAME = 'layers.1.attn.wq_b'\ndef patch(candidate):\n    {WAYS[way]}\n"
    done, out = run(text)
    assert done.status == 0, done.err
    capture = Capture.open(out)
    told = capture.facts["patch"]
    assert told["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert told["file"] == "fault.py"
    replaced = {**told["weights"], **dict.fromkeys(told["components"])}
    assert set(replaced) == {"layers.1.attn.wq_b"}
    assert first_difference(capture, model) == {"layers.1.attn.wq_b"}
    assert done.document["patch"] == told


def test_v32_is_patched_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_speaker(tmp_path / "model", "v32")
    (tmp_path / "fault.py").write_text(
        "def patch(candidate):\n    candidate.weights['layers.1.attn.wo'].value.mul_(2)\n"
    )
    line = ("capture", model, "--prompt", "w7 w8", "--out", tmp_path / "capture")
    done = call(capsys, *line, "--patch", tmp_path / "fault.py", "--max-new-tokens", 1)
    assert done.status == 0, done.err
    assert "Patched by fault.py: layers.1.attn.wo" in done.out
    found = first_difference(Capture.open(tmp_path / "capture"), model)
    assert found == {"layers.1.attn.wo"}


def test_a_patch_that_only_looks_changes_nothing(run: Any, model: Path) -> None:
    text = (
        "def patch(candidate):\n"
        "    for name in candidate.weights:\n        candidate.weights[name].value.sum()\n"
        "    assert len(candidate.weights) == len(list(candidate.weights))\n"
        "    assert 'attn' in ' '.join(candidate.components)\n"
    )
    done, out = run(text)
    assert done.status == 0, done.err
    capture = Capture.open(out)
    assert (capture.facts["patch"]["weights"], capture.facts["patch"]["components"]) == ({}, [])
    assert first_difference(capture, model) == set()


SHORT = """
def patch(candidate):
    candidate.components["layers.0.attn.wq_a"] = lambda i, w: {"out": i["x"][1:, :2]}
"""
REFUSED = {
    "def patch(candidate:\n": ("fault.py:1: SyntaxError",),
    "x = 1 / 0\n": ("fault.py:1: ZeroDivisionError",),
    "import nowhere_at_all\n": ("fault.py:1: ModuleNotFoundError",),
    "raise SystemExit(0)\n": ("fault.py:1: SystemExit",),
    "y = 1\n": ("no function patch", "def patch(candidate)"),
    "def patch(candidate):\n    candidate.weights['nope']\n": ("fault.py:2", "candidate.weights"),
    "def patch(candidate):\n    candidate.components['nope'] = len\n": ("fault.py:2", "'nope'"),
    "def patch(candidate):\n    candidate.components['embed'] = 3\n": ("a callable of inputs",),
    "def patch(candidate):\n    del candidate.weights['embed']\n": ("all of its parameters",),
    "def patch(candidate):\n    candidate.weights['embed'] = 3\n": ("fault.py:2", "a record of"),
    "def patch(c):\n    w = c.weights['embed']\n    w.value = w.value[1:]\n": ("Keep the extents",),
    "def patch(c):\n    c.weights['embed'].value = None\n": ("fields that fit each other",),
    "def patch(c):\n    c.weights['embed'].value = 3\n": ("embed'].value = 'int'",),
    "def patch():\n    pass\n": ("TypeError",),
    "import sys\ndef patch(c):\n    sys.exit(0)\n": ("fault.py:3: SystemExit",),
    # While it runs:
    "def patch(c):\n    c.components['norm'] = lambda i, w: {'out': 1 / 0}\n": (
        "--patch fault.py: norm", "fault.py:2: ZeroDivisionError",
    ),
    "def patch(c):\n    c.components['norm'] = lambda i, w: 3\n": ("a dict of out",),
    "def patch(c):\n    c.components['attn'] = 0\n": ("fault.py:2", "'attn'"),
    SHORT: (
        "--patch fault.py", "next components can take",
    ),
}  # fmt: skip


@pytest.mark.parametrize("patch", REFUSED)
def test_errors_are_reported_with_file_and_line_and_leave_nothing(run: Any, patch: str) -> None:
    done, out = run(patch)
    assert done.status == 2, done.out
    assert all(each in done.err for each in REFUSED[patch]), done.err
    assert "Traceback" not in done.err
    assert not out.exists()


def test_amax_only_has_no_patch(run: Any) -> None:
    (done, out) = run("def patch(c):\n    pass\n", "--amax-only")
    assert done.status == 2
    assert "--amax-only and --" in done.err
    assert not out.exists()
