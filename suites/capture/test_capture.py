"""`degarble capture` from the command line: what it writes and says, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.records import Phase
from degarble.harness.checkpoint.view.view import Checkpoint, fingerprint
from degarble.harness.inference.model import open_model
from degarble.suites.commands.calls import call
from degarble.suites.serve.talking_cases import WORDS, write_speaker

PROMPTS = ("w7 w8 w9", "w9")


@pytest.fixture(scope="module", params=["v4", "v32"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    return write_speaker(folder / "model", request.param)


def test_a_run_is_captured_and_replays(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("capture", model, "--prompts", model.parent / "prompts.txt", "--max-new-tokens", 3)
    done = call(capsys, *line, "--out", tmp_path / "capture")
    assert done.status == 0, done.err
    assert ", complete, by degarble" in done.out
    assert "will be written" in done.err
    capture = Capture.open(tmp_path / "capture")
    assert [step.phase for step in capture.steps][:2] == [Phase.PREFILL, Phase.DECODE]
    assert capture.steps[0].tokens == (0, 7, 8, 9, 0, 9)
    assert capture.steps[0].sequences == (0, 0, 0, 0, 1, 1)
    facts = capture.facts
    with Checkpoint.open(model) as checkpoint:
        assert facts["source"]["fingerprint"] == fingerprint(checkpoint)
    assert [each["prompt"] for each in facts["sequences"]] == [[0, 7, 8, 9], [0, 9]]
    assert list(capture.damage()) == []
    with open_model(model) as opened:
        bound = opened.speaker.bound
        seen = set()
        for each in capture.calls:
            with torch.inference_mode():
                outputs = bound(each.component, **capture.inputs(each))
            for name, kept in each.outputs.items():
                found, made = capture.tensor(kept), outputs[name]
                assert torch.equal(made.nan_to_num(7), found.nan_to_num(7)), each.component
            seen.add(each.component)
        unseen = {name.rpartition(".")[2] for name in set(bound.calls) - seen}
        assert unseen <= {"wkv_b"}  # the absorbed form of V3.2 has no use for it
    # What it said is what the model says without a capture, and the next tokens' inputs.
    said = call(capsys, "--json", "generate", *line[1:]).document["texts"]
    assert [each["tokens"] for each in said] == [each["new"] for each in facts["sequences"]]


def test_estimate_filters_and_statistics(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("--json", "capture", model, "--prompt", PROMPTS[0], "--max-new-tokens", 1)
    chosen = ("--layers", "1", "--components", "attn.w*", "--tokens", "2")
    done = call(capsys, *line, *chosen, "--out", tmp_path / "some")
    assert (done.status, done.err) == (0, "")
    assert done.document["complete"]
    capture = Capture.open(tmp_path / "some")
    assert {c.component.split("attn.")[0] for c in capture.calls} == {"layers.1."}
    assert {kept.rows for c in capture.calls for _, kept in c.sites()} == {(2,)}
    done = call(capsys, *line, "--tokens", "4-9", "--out", tmp_path / "none")
    assert (done.status, (tmp_path / "none").exists()) == (2, False)
    assert done.document["error"]["expectation"] == "some of 0 to 3"
    done = call(capsys, *line, "--statistics-only", "--out", tmp_path / "told")
    assert done.status == 0
    told = Capture.open(tmp_path / "told")
    assert {kept.at for c in told.calls for _, kept in c.sites()} == {None}


def test_what_is_refused_leaves_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("capture", model, "--out", tmp_path / "capture")
    for wrong, told in (
        (("--prompt", PROMPTS[0], "--layers", "77"), "--layers"),
        (("--prompt", PROMPTS[0], "--components", "attn.wq"), "Did you mean"),
        (("--prompt", PROMPTS[0], "--tokens", "x"), "--tokens"),
        (("--prompt", PROMPTS[0], "--max-new-tokens", 0), "--max-new-tokens"),
        (("--prompt", PROMPTS[0], "--amax-only", "--tokens", "1"), "--amax-only and --tokens"),
        (("--prompt", ""), "a text of one token at least"),
        ((), "--prompt"),
    ):
        done = call(capsys, *line, *wrong)
        assert (done.status, done.out) == (2, ""), wrong
        assert told in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_weight_refused_after_the_first_parts_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another shape of as many elements is met when the weight is used, not before."""
    model = write_speaker(tmp_path / "model", "v4")
    (shard,) = model.glob("*.safetensors")
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8 : 8 + length])
    head["head.weight"]["shape"].reverse()
    head["head.weight"]["shape"] = [1, math.prod(head["head.weight"]["shape"])]
    text = json.dumps(head).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    out = tmp_path / "deep" / "capture"
    for there in (False, True):
        if there:
            out.mkdir(parents=True)
        done = call(capsys, "capture", model, "--prompt", PROMPTS[0], "--out", out)
        assert done.status == 2, done.err
        assert "head" in done.err
        assert out.exists() == there
        assert not there or list(out.iterdir()) == []


def test_a_disk_without_room_is_refused_before_the_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _path: Usage)
    line = ("capture", model, "--out", tmp_path / "capture", "--prompt", " ".join(WORDS[9:20]))
    done = call(capsys, *line)
    assert done.status == 2
    assert "room for about" in done.err
    assert list(tmp_path.iterdir()) == []
    assert call(capsys, *line, "--statistics-only").status == 0


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a system without /proc")
def test_a_place_where_nothing_can_be_written_is_called_that(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file system that keeps no files has no room either; that is not why."""
    done = call(capsys, "capture", model, "--out", "/proc/degarble/capture", "--prompt", "w7")
    assert (done.status, done.out) == (2, "")
    assert "a place where a file can be written" in done.err
    assert "free" not in done.err


def test_a_capture_is_not_written_over(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("capture", model, "--out", tmp_path, "--prompt", "w7", "--layers", "ends")
    assert call(capsys, *line).status == 0
    before = (tmp_path / "manifest.json").read_bytes()
    done = call(capsys, *line)
    assert done.status == 2
    assert "a folder without a capture" in done.err
    assert (tmp_path / "manifest.json").read_bytes() == before
