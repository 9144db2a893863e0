from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.commands.audit import document as comparison
from degarble.harness.commands.audit.audit import AuditRequest, audit
from degarble.harness.commands.audit.document import (
    comparison_by_role,
    comparison_document,
    cosines,
    farthest,
)
from degarble.harness.commands.audit.page import weight_blocks
from degarble.harness.commands.audit.spread import compared
from degarble.harness.report.blocks import Details, Facts, Table
from degarble.suites.checkpoint.audit.planted_numbers import Bytes
from degarble.suites.commands.audit.audit_cases import healthy_checkpoint, sick_checkpoint
from degarble.suites.commands.calls import call
from degarble.suites.commands.cluster_cases import PlayedCluster

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.commands.audit.audit import Audit


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return sick_checkpoint(tmp_path_factory), healthy_checkpoint(tmp_path_factory)


@pytest.fixture(scope="module")
def found(folders: tuple[Path, Path]) -> Audit:
    sick, healthy = folders
    return audit(AuditRequest(sick, against=healthy))


def test_a_checkpoint_beside_itself_agrees(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, healthy = folders
    done = call(capsys, "--json", "audit", healthy, "--against", healthy)
    document = done.document
    assert done.status == 0
    assert document["judged"]["against"].endswith("/s). The reference's hashes were verified.")
    assert document["against"]["weights"] == document["numbers"]["weights"]
    assert all(role["error"] == [0, 0, 0] for role in document["against"]["roles"])
    assert document["against"]["farthest"] == []


def test_faults_are_named_beside_the_source(found: Audit) -> None:
    rules = {finding.rule for finding in found.findings if finding.level == "error"}
    assert {"against.other_tensor", "against.not_finite"} <= rules
    assert [part.name for part in found.judged] == ["structure", "numbers", "against"]


def test_the_farthest_come_first_and_few(found: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found.beside is not None
    table = found.beside.table
    names = [table.pairs[row].unit.name for row in farthest(table)]
    assert "layers.2.attn.wkv" in names
    assert len(names) == len(set(names)) < 20
    monkeypatch.setattr(comparison, "FARTHEST", 1)
    assert len(farthest(table)) <= 2


def test_the_document_is_strict_json(found: Audit) -> None:
    assert found.beside is not None
    told = comparison_document(found.beside)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["reference"] == "small-v4"
    sites = [each["site"] for each in cosines(found.beside)]
    assert sites == [each["name"] for each in told["farthest"]]


def test_roles_and_weights_tell_the_comparison(found: Audit) -> None:
    assert found.beside is not None
    details = comparison_by_role(found.beside)
    assert isinstance(details, Details)
    (table,) = details.blocks
    assert isinstance(table, Table)
    rows = {row[0]: row for row in table.rows}
    assert rows["embed"][1:] == (1, 1.0, 1.0, 1.0, 0.0, None)
    *_, listed, told = weight_blocks(found)
    (entry,) = (each for each in listed.entries if each.cells[-1] == "layers.2.attn.wkv")  # type: ignore[union-attr]
    (facts,) = entry.blocks
    assert isinstance(facts, Facts)
    values = {fact.name: fact.value for fact in facts.rows}
    assert values["In the reference"] == "FP8_128X128_UE8M0, layers.2.attn.wkv"
    assert values["Relative error"].startswith("1.")
    assert "the farthest from the reference" in told.text  # type: ignore[union-attr]


def test_joined_tables_are_the_table_of_one_walk(folders: tuple[Path, Path]) -> None:
    sick, healthy = folders
    asked: list[str | None] = []
    counted: list[int] = []
    with Checkpoint.survey(sick) as here, Checkpoint.open(healthy) as there:
        alone = compared(here, there, folders, 1, lambda _: None)
        joined = compared(here, there, folders, PlayedCluster(asked), counted.append)
    assert len(asked) > 1
    assert joined.pairs == alone.pairs
    assert sum(counted) == sum(pair.nbytes for pair in alone.pairs)
    assert joined.data.tobytes() == alone.data.tobytes()
    assert np.array_equal(joined.sketches, alone.sketches, equal_nan=True)
    assert (joined.unlike, joined.only_here) == (alone.unlike, alone.only_here)


@pytest.mark.parametrize("what", ["nothing", "a file", "another model"])
def test_what_is_no_reference_is_refused_before_the_walk(
    folders: tuple[Path, Path],
    what: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("numbers were read")

    monkeypatch.setattr("degarble.harness.commands.audit.spread.measured", never)
    _, healthy = folders
    reference = tmp_path / "reference"
    if what == "a file":
        reference.write_text("no checkpoint")
    if what == "another model":
        reference.mkdir()
        for path in healthy.iterdir():
            (reference / path.name).symlink_to(path)
        config = json.loads((healthy / "config.json").read_text(encoding="utf-8"))
        (reference / "config.json").unlink()
        config |= {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]}
        (reference / "config.json").write_text(json.dumps(config))
    done = call(capsys, "audit", healthy, "--against", reference)
    assert done.status == 2, done.err
    assert "expected" in done.err
    assert "Traceback" not in done.err


def test_a_damaged_reference_is_refused_before_the_walk(
    folders: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("numbers were read")

    _, healthy = folders
    damaged = tmp_path / "damaged"
    shutil.copytree(healthy, damaged)
    Bytes(damaged)["layers.1.attn.wkv.weight"][0, 0] ^= 1
    monkeypatch.setattr("degarble.harness.commands.audit.spread.measured", never)
    done = call(capsys, "--json", "audit", healthy, "--against", damaged)
    assert done.status == 2, done.err
    assert done.document["verdict"] == "REFUSED"
    assert "the reference's file" in done.err
    assert "layers.1.attn.wkv.weight" in done.err
    assert f"degarble audit {damaged}" in done.err
