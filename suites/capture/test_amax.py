"""`capture --amax-only`: records against a dense evaluation, and the path to input scales."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.amax import InputRanges
from degarble.harness.checkpoint.transform.quantise.calibration import FULL_SCALE, Calibration
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.inference.model import open_model
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import recipe_named
from degarble.harness.model.types import Kind
from degarble.references.model import Sequence
from degarble.references.weights import InputAmax
from degarble.suites.commands.calls import call
from degarble.suites.serve.talking_cases import CONFIGS, WORDS, write_speaker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

PROMPTS = ["w7 w8 w9", " ".join(WORDS[10:40]), "w9"]


@pytest.fixture(scope="module", params=["v4", "v32"])
def captured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_speaker(folder / "model", request.param)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
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
    tokens = sum(len(prompt.split()) + 1 for prompt in PROMPTS)
    assert {each.tokens for name, each in records.items() if ".experts." not in name} == {tokens}
    for prefix in {n.split(".experts.")[0] for n in records if ".experts." in n}:
        own = [e.tokens for n, e in records.items() if n.startswith(f"{prefix}.experts.")
               and n.endswith(".w1")]  # fmt: skip
        assert sum(own) == tokens * config.num_experts_per_tok
    # Alone, prompt by prompt, with the observer of the references.
    with open_model(captured / "model", "bf16", absorbed=False) as model:
        watch = InputAmax(config)
        model.speaker.bound.observer = watch
        for prompt in PROMPTS:
            ids = [0, *(WORDS.index(word) for word in prompt.split())]
            model.speaker.logits(model.speaker.hidden([Sequence()], [torch.tensor(ids)]))
    assert {n: float(v) for n, v in watch.largest.items()} == {
        name: each.amax for name, each in records.items() if each.tokens
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
    unreached = {name for name, each in records.items() if not each.tokens}
    assert unreached == {n for n in report["flagged"]["unreached_experts"] if n in records}
    assert checked or family == "v32"


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
def test_a_run_that_is_killed_leaves_no_file(captured: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("\n".join([" ".join(WORDS[6:60])] * 3000))
    command = [sys.executable, "-m", "degarble.harness.cli.main", "capture", "--amax-only"]
    line = [*command, str(captured / "model"), "--prompts", str(tmp_path / "long.txt")]
    with subprocess.Popen([*line, "--out", str(tmp_path / "out")]) as running:
        while not (tmp_path / "out").exists() and running.poll() is None:
            time.sleep(0.05)
        time.sleep(1.0)
        assert running.poll() is None
        running.send_signal(signal.SIGKILL)
    assert [path.name for path in (tmp_path / "out").iterdir()] == []
