"""`degarble convert`: what it writes, what --prove finds, and what it refuses by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.checkpoint.transform.convert.job import (
    CONVERSIONS,
    OF_DIALECTS,
    OF_INTEGERS,
    ConversionJob,
    prove,
)
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.write.manifest import Manifest
from degarble.harness.cli.commands.checkpoints import TARGETS
from degarble.suites.checkpoint.converting_cases import damage, source
from degarble.suites.commands.calls import call
from degarble.suites.commands.cluster_cases import played_cluster

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.checkpoint.transform.units import ConversionProof


def test_the_command_offers_every_conversion() -> None:
    assert set(TARGETS) == {*CONVERSIONS, *OF_INTEGERS, *OF_DIALECTS}


@pytest.mark.parametrize(
    ("kind", "to"), [("nvfp4-full", "bf16"), ("official", "nvfp4-lossless"), ("nvfp4-full", "vllm")]
)
def test_a_conversion_is_written_and_proven(
    kind: str, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("convert", source(kind), tmp_path / "new", "--to", to, "--prove")
    done = call(capsys, *line)
    assert (done.status, done.err) == (0, "")
    assert f"The promise of {to} holds" in done.out
    document = call(capsys, "--json", *line).document
    assert (document["verdict"], document["origins"], document["cosines"]) == ("AGREES", [], [])
    assert document["proof"]["holds"]
    assert not document["proof"]["broken"]
    assert document["content"] == Manifest.read(tmp_path / "new").content
    with Checkpoint.open(tmp_path / "new") as checkpoint:
        assert len(checkpoint.entries) == document["converted"] + document["copied"]


def test_without_proof_nothing_is_claimed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("convert", source("nvfp4-full"), tmp_path / "new", "--to", "fused-compressor")
    assert "not compared" in call(capsys, *line).out
    document = call(capsys, "--json", *line).document
    assert (document["verdict"], document["proof"]) == (None, None)


@pytest.mark.parametrize("json", [False, True])
def test_damage_between_writing_and_proving_is_named(
    json: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def damaged(job: ConversionJob, target: Path, **given: Any) -> ConversionProof:
        damage(target, "norm.weight", lambda values: -values)
        return prove(job.source, target, **given)

    monkeypatch.setattr(ConversionJob, "prove", damaged)
    line = ("convert", source("nvfp4-full"), tmp_path / "new", "--to", "bf16", "--prove")
    done = call(capsys, *(("--json",) if json else ()), *line)
    assert done.status == 1
    if json:
        assert done.document["verdict"] == "DIFFERS"
        broken = done.document["proof"]["broken"]
        assert [each["tensor"] for each in broken] == ["norm.weight"]
    else:
        assert "is broken" in done.out
        assert "norm.weight" in done.out


def test_a_finished_target_that_was_changed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("convert", source("nvfp4-full"), tmp_path / "new", "--to", "bf16", "--prove")
    assert call(capsys, *line).status == 0
    damage(tmp_path / "new", "norm.weight", lambda values: -values)
    done = call(capsys, *line)
    assert done.status == 2
    assert "Somebody changed it" in done.err


def test_a_target_of_another_source_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new"
    assert call(capsys, "convert", source("nvfp4-full"), target, "--to", "bf16").status == 0
    before = Manifest.read(target).content
    done = call(capsys, "convert", source("v32-nvfp4"), target, "--to", "bf16")
    assert done.status == 2
    assert str(target) in done.err
    assert Manifest.read(target).content == before


def test_a_fused_source_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fused = tmp_path / "fused"
    assert call(capsys, "convert", source("nvfp4-full"), fused, "--to", "vllm").status == 0
    done = call(capsys, "convert", fused, tmp_path / "new", "--to", "bf16")
    assert done.status == 2
    assert "layout of" in done.err or "source of" in done.err
    assert not (tmp_path / "new").exists()


def test_a_cluster_does_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = played_cluster(monkeypatch)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    line = ("convert", source("nvfp4-full"), tmp_path / "new", "--to", "bf16", "--cluster", "ray")
    done = call(capsys, "--quiet", *line)
    assert (done.status, done.out, done.err) == (0, "", "")
    assert asked == [None, "shard model-00001-of-00001.safetensors"]
