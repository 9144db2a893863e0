"""`degarble quantise`: what it writes and says, and what it refuses by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.harness.checkpoint.transform.quantise.calibration import Amax, Calibration
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.write.manifest import Manifest
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import recipe_named
from degarble.suites.checkpoint.reading_cases import TINY_V4
from degarble.suites.commands.calls import call
from degarble.suites.commands.cluster_cases import played_cluster
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

RECIPE = ("--recipe", "nvfp4-experts")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantised") / "small-v4"
    write_checkpoint(path, Synthetic(TINY_V4, "official", seed=3))
    return path


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = recipe_named("nvfp4-experts", TINY_V4)
    reached = (p for p in parameters(TINY_V4) if recipe.format_of(p).activation == "NVFP4")
    path = tmp_path_factory.mktemp("calibration") / "amax.json"
    path.write_bytes(
        Calibration.from_records({parameter.name: Amax(1.5, 7) for parameter in reached}).to_bytes()
    )
    return path


def test_a_checkpoint_is_written_and_reported(
    source: Path, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("quantise", source, tmp_path / "new", *RECIPE, "--calibration", calibration)
    done = call(capsys, *line)
    assert (done.status, done.err) == (0, "")
    assert "Wrote" in done.out
    assert "to NVFP4" in done.out
    with Checkpoint.open(tmp_path / "new") as checkpoint:
        assert not checkpoint.problems.found
        tensors = len(checkpoint.entries)
    again = call(capsys, "--json", *line)
    document = again.document
    assert again.status == 0
    assert (document["verdict"], document["origins"], document["cosines"]) == (None, [], [])
    assert document["tensors"] == tensors
    assert document["content"] == Manifest.read(tmp_path / "new").content
    assert any(action.endswith("to NVFP4") for action in document["counts"])
    assert call(capsys, "audit", tmp_path / "new").status == 0


def test_the_scale_rule_reaches_the_bytes(
    source: Path, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bf16 = tmp_path / "bf16"
    write_checkpoint(bf16, Synthetic(TINY_V4, "bf16", seed=3))
    found = {}
    for rule in ("amax", "four-over-six"):
        choices = (*RECIPE, "--calibration", calibration, "--scale-rule", rule)
        document = call(capsys, "--json", "quantise", bf16, tmp_path / rule, *choices).document
        assert document["scale_rule"] == rule
        found[rule] = document["content"]
    assert found["amax"] != found["four-over-six"]
    assert call(capsys, "quantise", source, tmp_path / "amax", *choices).status == 2


def test_missing_input_scales_are_refused_before_writing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = call(capsys, "quantise", source, tmp_path / "new", *RECIPE)
    assert done.status == 2
    assert "calibration" in done.err
    assert not (tmp_path / "new").exists()


def test_a_target_of_another_job_is_refused(
    source: Path, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("quantise", source, tmp_path / "new", *RECIPE, "--calibration", calibration)
    assert call(capsys, *line).status == 0
    done = call(capsys, *line, "--scale-rule", "mse")
    assert done.status == 2
    assert "new" in done.err
    onto_itself = call(capsys, "quantise", source, source, *line[3:])
    assert onto_itself.status == 2
    with Checkpoint.open(source) as kept:
        assert not kept.problems.found


def test_a_source_without_a_known_config_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for shard in source.glob("*.safetensors"):
        (bare / shard.name).write_bytes(shard.read_bytes())
    done = call(capsys, "quantise", bare, tmp_path / "new", *RECIPE)
    assert done.status == 2
    assert "config.json" in done.err
    assert not (tmp_path / "new").exists()


def test_a_cluster_does_the_work_and_is_named(
    source: Path,
    calibration: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = ("quantise", source, tmp_path / "new", *RECIPE, "--calibration", calibration)
    asked = played_cluster(monkeypatch)
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    done = call(capsys, *line, "--cluster", "ray")
    assert (done.status, done.err) == (0, "degarble: A cluster that is played.\n")
    assert asked == ["somewhere:6379", "shard model-00001-of-00001.safetensors"]
    assert call(capsys, *line).status == 0
    assert len(asked) == 2
