"""`degarble capture`: what it writes, estimates and refuses, with `--amax-only` and over ranks."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.harness.capture import amax
from degarble.harness.capture.amax import InputRanges
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.records import Phase
from degarble.harness.capture.ranks import plan_over
from degarble.harness.checkpoint.transform.quantise.calibration import FILE, FULL_SCALE, Calibration
from degarble.harness.checkpoint.view.view import Checkpoint, fingerprint
from degarble.harness.checkpoint.write import finished_parts
from degarble.harness.checkpoint.write.disk import DISK
from degarble.harness.checkpoint.write.manifest import UNFINISHED
from degarble.harness.inference.model import open_model
from degarble.harness.model.parameters import parameters, shape_letters
from degarble.harness.model.recipes import recipe_named
from degarble.harness.model.types import Kind
from degarble.references.model import Sequence
from degarble.references.weights import InputAmax
from degarble.suites.capture.capture_rank_faulty import DAMAGED
from degarble.suites.checkpoint.reading_cases import TINY_V4
from degarble.suites.checkpoint.write.test_finished_parts import Killed, KilledDisk
from degarble.suites.commands.calls import call
from degarble.suites.museum.torchrun import run_ranks
from degarble.suites.serve.talking_cases import CONFIGS, WORDS, write_speaker, write_tokenizer
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.checkpoint.write.disk import Disk


# --------------------------------------------------------------------------------------------------
# `degarble capture` from the command line: what it writes and says, and what it refuses.

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
        bound = opened.logits_model.bound
        seen = set()
        for captured_call in capture.calls:
            with torch.inference_mode():
                outputs = bound(captured_call.component, **capture.inputs(captured_call))
            for name, kept in captured_call.outputs.items():
                found, made = capture.tensor(kept), outputs[name]
                assert torch.equal(made.nan_to_num(7), found.nan_to_num(7)), captured_call.component
            seen.add(captured_call.component)
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
    for wrong, text in (
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
        assert text in done.err
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


# --------------------------------------------------------------------------------------------------
# `capture --amax-only`: records against a dense evaluation, and the path to input scales.

AMAX_PROMPTS = ["w7 w8 w9", " ".join(WORDS[10:40]), "w9"]


@pytest.fixture(scope="module", params=["v4", "v32"])
def captured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_speaker(folder / "model", request.param)
    (folder / "prompts.txt").write_text("\n".join(AMAX_PROMPTS))
    return folder


def test_records_become_input_scales(captured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family = "v32" if captured.name.startswith("v32") else "v4"
    config = replace(CONFIGS[family], num_nextn_predict_layers=0)
    line = ("capture", captured / "model", "--amax-only", "--prompts", captured / "prompts.txt")
    done = call(capsys, *line, "--out", captured / "amax")
    assert done.status == 0, done.err
    assert call(capsys, *line, "--out", captured / "amax").status == 2  # nothing is replaced
    records = Calibration.load(captured / "amax").records
    linear = {each.name for each in parameters(config) if each.kind is Kind.LINEAR}
    assert set(records) == linear
    tokens = sum(len(prompt.split()) + 1 for prompt in AMAX_PROMPTS)
    assert {record.tokens for name, record in records.items() if ".experts." not in name} == {
        tokens
    }
    for prefix in {n.split(".experts.")[0] for n in records if ".experts." in n}:
        own = [e.tokens for n, e in records.items() if n.startswith(f"{prefix}.experts.")
               and n.endswith(".w1")]  # fmt: skip
        assert sum(own) == tokens * shape_letters(config)["k"]
    # Alone, prompt by prompt, with the observer of the references.
    with open_model(captured / "model", "bf16", absorbed=False) as model:
        watch = InputAmax(config)
        model.logits_model.bound.observer = watch
        for prompt in AMAX_PROMPTS:
            ids = [0, *(WORDS.index(word) for word in prompt.split())]
            model.logits_model.logits(model.logits_model.hidden([Sequence()], [torch.tensor(ids)]))
    assert {n: float(v) for n, v in watch.largest.items()} == {
        name: record.amax for name, record in records.items() if record.tokens
    }
    made = captured / "nvfp4"
    wanted = ("--recipe", "nvfp4-experts", "--calibration", captured / "amax")
    assert call(capsys, "quantise", captured / "model", made, *wanted).status == 0
    recipe, checked = recipe_named("nvfp4-experts", config), 0
    with Checkpoint.open(made) as checkpoint:
        for parameter in parameters(config):
            if recipe.format_of(parameter).activation == "NVFP4" and family == "v4":
                both = [n for n in (parameter.name, _partner(parameter.name)) if n in records]
                amax = max(records[name].amax for name in both)
                scale = checkpoint.weights[parameter.name].input_scale
                assert scale is not None
                if amax:
                    assert float(scale) == pytest.approx(amax / float(FULL_SCALE), rel=1e-6)
                    checked += 1
    report = json.loads((made / "conversion_report.json").read_text())
    unreached = {name for name, record in records.items() if not record.tokens}
    assert unreached == {n for n in report["flagged"]["unreached_experts"] if n in records}
    assert checked or family == "v32"


@pytest.mark.parametrize("captured", ["v4"], indirect=True)
def test_records_that_were_interrupted_are_finished_by_the_same_command(
    captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(amax, "STEP", 4)  # each prompt goes alone
    ran: list[object] = []
    once = amax._run

    def counted(*given: Any) -> None:
        ran.append(given)
        once(*given)

    monkeypatch.setattr(amax, "_run", counted)

    def capture(name: str, disk: Disk) -> bytes:
        monkeypatch.setattr(finished_parts, "DISK", disk)
        watch: Any = lambda _streamed: nullcontext()  # noqa: E731
        amax.capture_amax(captured / "model", list(AMAX_PROMPTS), tmp_path / name, watch)
        assert [path.name for path in (tmp_path / name).iterdir()] == [FILE]
        return (tmp_path / name / FILE).read_bytes()

    disk = KilledDisk(1 << 30)
    alone, used = capture("alone", disk), (1 << 30) - disk.last
    groups = len(ran)
    assert groups > 1
    for moment in random.Random(seed).sample(range(used), 3):
        ran.clear()
        with pytest.raises(Killed):
            capture(f"killed-{moment}", KilledDisk(moment))
        assert capture(f"killed-{moment}", DISK) == alone
        assert len(ran) <= groups + 1


def _partner(name: str) -> str:
    stem, _, part = name.rpartition(".")
    return f"{stem}.{ {'w1': 'w3', 'w3': 'w1'}.get(part, part) }".replace(" ", "")


def test_inputs_that_are_not_finite_are_refused_by_component() -> None:
    watch = InputRanges(CONFIGS["v4"])
    inputs: Mapping[str, Tensor] = {"x": torch.tensor([[1.0, -3.0], [float("nan"), 0.0]])}
    with pytest.raises(InvalidArgument, match=r"input of layers\.1\.attn\.wq_a"):
        watch("layers.1.attn.wq_a", inputs, {})


def test_what_is_not_recorded_yet_is_refused(
    captured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("capture", captured / "model", "--out", tmp_path / "new", "--amax-only")
    assert "exactly one of --prompt, --prompts" in call(capsys, *line).err
    other = call(capsys, *line, "--prompt", "w7", "--backend", "cutedsl")
    assert "--amax-only and --backend" in other.err
    assert call(capsys, *line, "--prompt", "unheard").status == 2
    assert list((tmp_path).rglob("*.json")) == []


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
@pytest.mark.parametrize(
    "captured", ["v4", pytest.param("v32", marks=pytest.mark.slow)], indirect=True
)
def test_a_run_that_is_killed_leaves_no_records(captured: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("\n".join([" ".join(WORDS[6:60])] * 3000))
    command = [sys.executable, "-m", "degarble.harness.cli.main", "capture", "--amax-only"]
    line = [*command, str(captured / "model"), "--prompts", str(tmp_path / "long.txt")]
    with subprocess.Popen([*line, "--out", str(tmp_path / "out")]) as running:
        while not (tmp_path / "out").exists() and running.poll() is None:
            time.sleep(0.05)
        time.sleep(1.0)
        assert running.poll() is None
        running.send_signal(signal.SIGKILL)
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left <= {UNFINISHED}  # from which the same command goes on


# --------------------------------------------------------------------------------------------------
# Captures over ranks: joined they have the sites of one rank, agree, and name a planted fault.

RANKS = 2


@pytest.fixture(scope="module", params=["v4", pytest.param("v32", marks=pytest.mark.slow)])
def line(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command line that captures a model which two ranks can share; `--out` is missing."""
    folder = tmp_path_factory.mktemp(request.param)
    config = CONFIGS[request.param]
    if request.param == "v4":
        config = replace(config, moe_intermediate_size=128 * RANKS)
    write_checkpoint(folder / "model", Synthetic(config, "bf16", seed=3))
    write_tokenizer(folder / "model")
    (folder / "prompts.txt").write_text("w7 w8 w9\nw9\n")
    return ["capture", str(folder / "model"), "--prompts", str(folder / "prompts.txt")]


def _shapes(capture: Capture) -> list[object]:
    return [
        (call.step, call.component, {n: k.shape for n, k in kept.items()})
        for call in capture.calls
        for kept in (call.inputs, call.outputs)
    ]


@pytest.mark.slow
def test_ranks_make_one_capture_that_agrees(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    over, alone = tmp_path / "over", tmp_path / "alone"
    run_ranks("degarble.harness.cli.main", RANKS, *line, "--out", str(over))
    assert call(capsys, *line, "--out", alone).status == 0
    joined, single = Capture.open(over), Capture.open(alone)
    assert joined.facts["ranks"] == RANKS
    assert "ranks_apart" not in joined.facts
    assert _shapes(joined) == _shapes(single)
    assert joined.steps[0] == single.steps[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "over"]
    done = call(capsys, "check", over, "--reference", line[1])
    assert done.status == 0, done.out


@pytest.mark.slow
def test_a_part_that_every_rank_loads_is_named(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "capture"
    faulty = "degarble.suites.capture.capture_rank_faulty"
    run_ranks(faulty, RANKS, *line, "--out", str(out))
    done = call(capsys, "--json", "check", out, "--reference", line[1])
    assert done.status == 1
    found = [f"layers.{each['layer']}.{each['component']}" for each in done.document["origins"]]
    assert found == [DAMAGED]


def test_a_cut_that_engines_pad_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match="moe_intermediate_size"):
        plan_over(TINY_V4, RANKS)


@pytest.mark.parametrize("more", [("--amax-only",), ("--patch", "prompts.txt")])
def test_what_ranks_cannot_do_is_refused(
    line: list[str],
    more: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("")
    done = call(capsys, *line, "--out", tmp_path / "capture", *more)
    assert done.status == 2
    assert more[0] in done.err
    assert not (tmp_path / "capture").exists()
