"""Write audits as JSON and as text, with roles and comparisons."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from degarble.harness.checkpoint.audit.findings import RULES, Finding, FindingLocation, Findings
from degarble.harness.checkpoint.audit.rules import AuditRule, Level
from degarble.harness.checkpoint.audit.statistics.inference import ORDER_NAMES
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.cli.terminal import json_text
from degarble.harness.commands.audit import document as comparison
from degarble.harness.commands.audit import text as audit_text
from degarble.harness.commands.audit.audit import (
    Audit,
    AuditedCheckpoint,
    AuditPart,
    AuditRequest,
    audit,
)
from degarble.harness.commands.audit.document import (
    MOST_ORIGINS,
    NOT_PACKED,
    audit_document,
    comparison_by_role,
    comparison_document,
    cosines,
    farthest,
    order_text,
    roles_of,
    span,
)
from degarble.harness.commands.audit.page import weight_blocks
from degarble.harness.commands.audit.spread import compared
from degarble.harness.commands.audit.text import audit_text as text
from degarble.harness.report.blocks import Details, Facts, Table
from degarble.suites.checkpoint.audit.planted_numbers import Bytes
from degarble.suites.commands.audit.audit_cases import healthy_checkpoint, sick_checkpoint
from degarble.suites.commands.calls import call
from degarble.suites.commands.cluster_cases import PlayedCluster
from degarble.suites.house.repository import ROOT
from degarble.suites.reports.page_cases import HOSTILE
from degarble.suites.snapshots import assert_as_kept

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.checkpoint.audit.table import NumberTable


# --------------------------------------------------------------------------------------------------
# The document of `degarble audit --json`, and docs/audit.md, which tells its fields.

PAGE = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8").partition("## The JSON")[2]
TOLD = set(re.findall(r"^\| (`.*?) \|", PAGE.partition("## ")[0], re.MULTILINE))
FIELDS = {name for cell in TOLD for name in re.findall(r"`([^`]+)`", cell)}
# Their keys are names, or are described in the text of the row.
OPEN = {
    *("origins[]", "cosines[]", "judged", "not_judged", "counts", "findings[].evidence"),
    *("numbers.unread", "against.unlike", "against.only_here", "against.only_there"),
    *("against.farthest[]", "loader.ranks", "loader.counts", "loader.shares[].bytes_by_kind"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    healthy = healthy_checkpoint(tmp_path_factory)
    sick = sick_checkpoint(tmp_path_factory)
    return audit(AuditRequest(sick, loader="vllm:tp=2", against=healthy))


def _paths(value: Any, path: str = "") -> set[str]:
    if path in OPEN:
        return set()
    if isinstance(value, dict):
        inner = {f"{path}.{name}".lstrip("."): each for name, each in value.items()}
        return set(inner).union(*(_paths(each, name) for name, each in inner.items()))
    if isinstance(value, list):
        return set().union(*(_paths(each, f"{path}[]") for each in value))
    return set()


def test_the_page_documents_every_field_and_no_other(found: Audit) -> None:
    document = json.loads(json_text(audit_document(found, "degarble audit sick-v4")))
    not_here = {"report", "against.roles[].over_floor"}  # a page; a reference of another format
    assert _paths(document) | not_here == FIELDS


def test_an_undocumented_field_is_detected(found: Audit) -> None:
    document = audit_document(found, "x") | {"schema": 1}
    document["numbers"]["roles"][0]["new"] = 1
    assert _paths(document) - FIELDS == {"numbers.roles[].new"}


def test_the_document_is_strict_json(found: Audit) -> None:
    text = json_text(audit_document(found, "degarble audit sick-v4"))
    document = json.loads(text, parse_constant=pytest.fail)
    assert document["schema"] == 1
    assert sum(each["count"] for each in document["findings"]) == sum(document["counts"].values())
    assert set(document["judged"]) == {"structure", "numbers", "against", "loader"}
    assert document["not_judged"] == {}


def test_origins_are_errors_and_bounded(found: Audit) -> None:
    findings = Findings()
    for layer in range(3):
        for rule in RULES.values():
            findings.add(rule, FindingLocation(f"layers.{layer}.x", None, layer), "m", "r")
    flooded = replace(found, findings=tuple(findings.sorted()))
    document = audit_document(flooded, "x")
    assert len(document["origins"]) == MOST_ORIGINS
    assert len(document["findings"]) == 3 * len(RULES)
    rules = {origin.where["rule"] for origin in document["origins"]}
    assert all(RULES[str(rule)].level == "error" for rule in rules)


def test_what_was_not_judged_is_null(found: Audit) -> None:
    document = audit_document(replace(found, table=None, loader=None, comparison=None), "x")
    assert [document[name] for name in ("numbers", "loader", "against")] == [None, None, None]
    assert document["cosines"] == []


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return sick_checkpoint(tmp_path_factory), healthy_checkpoint(tmp_path_factory)


@pytest.fixture(scope="module")
def comparison_found(folders: tuple[Path, Path]) -> Audit:
    sick, healthy = folders
    return audit(AuditRequest(sick, against=healthy))


def test_a_checkpoint_compared_with_itself_agrees(
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


def test_faults_are_named_when_compared_with_the_source(comparison_found: Audit) -> None:
    rules = {finding.rule for finding in comparison_found.findings if finding.level == "error"}
    assert {"against.other_tensor", "against.not_finite"} <= rules
    assert [part.name for part in comparison_found.judged] == ["structure", "numbers", "against"]


def test_the_farthest_come_first_and_few(
    comparison_found: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert comparison_found.comparison is not None
    table = comparison_found.comparison.table
    names = [table.pairs[row].unit.name for row in farthest(table)]
    assert "layers.2.attn.wkv" in names
    assert len(names) == len(set(names)) < 20
    monkeypatch.setattr(comparison, "FARTHEST", 1)
    assert len(farthest(table)) <= 2


def test_comparison_the_document_is_strict_json(comparison_found: Audit) -> None:
    assert comparison_found.comparison is not None
    fields = comparison_document(comparison_found.comparison)
    assert json.loads(json.dumps(fields, allow_nan=False)) == fields
    assert fields["reference"] == "small-v4"
    sites = [cosine["site"] for cosine in cosines(comparison_found.comparison)]
    assert sites == [each["name"] for each in fields["farthest"]]


def test_roles_and_weights_show_the_comparison(comparison_found: Audit) -> None:
    assert comparison_found.comparison is not None
    details = comparison_by_role(comparison_found.comparison)
    assert isinstance(details, Details)
    (table,) = details.blocks
    assert isinstance(table, Table)
    rows = {row[0]: row for row in table.rows}
    assert rows["embed"][1:] == (1, 1.0, 1.0, 1.0, 0.0, None)
    *_, listed, told = weight_blocks(comparison_found)
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
    assert np.array_equal(joined["sketches"], alone["sketches"], equal_nan=True)
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


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> NumberTable:
    number_table = audit(AuditRequest(sick_checkpoint(tmp_path_factory))).table
    assert number_table is not None
    return number_table


def test_every_weight_is_in_one_role(table: NumberTable) -> None:
    roles = roles_of(table)
    assert sum(role.weights for role in roles) == len(table)
    assert sum(role.nbytes for role in roles) == table["nbytes"].sum()
    assert [role.name for role in roles] == sorted({unit.role for unit in table.units})


def test_spans_leave_out_what_is_not_there_and_what_is_no_number(table: NumberTable) -> None:
    roles = {role.name: role for role in roles_of(table)}
    experts = roles["layers.*.ffn.experts.*.w1"]
    scale = experts.spans["decode_scale"]
    assert scale is not None
    assert 0 < scale[0] <= scale[1] <= scale[2] < 1  # three are NaN
    assert experts.formats == ("NVFP4",)
    norm = roles["layers.*.attn_norm"]
    assert (norm.spans["decode_scale"], norm.spans["pairing"], norm.order) == (None, None, "")
    rms = norm.spans["rms"]
    assert rms is not None
    assert rms[0] == 0 < rms[1]


def test_span() -> None:
    assert span(np.array([3.0, math.nan, 1.0, math.inf, 2.0])) == (1.0, 2.0, 3.0)
    assert span(np.array([math.nan])) is None


def test_orders_in_words() -> None:
    assert [order_text(order) for order in (NOT_PACKED, -1, 0)] == [
        "not packed",
        "undecided",
        ORDER_NAMES[0],
    ]


SCREEN = 50  # lines


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    return audit(AuditRequest(sick_checkpoint(tmp_path_factory)))


RULES_OF_A_SUITE = {
    rule.id: rule
    for rule in (
        AuditRule(
            "scales.missing", Level.ERROR, "codes have every scale of their format", "a source"
        ),
        AuditRule("numbers.far", Level.WARNING, "a matrix is near its siblings", "a source"),
        AuditRule("numbers.who", Level.NOTE, "the bytes say who wrote them", "a source"),
    )
}


def _found(rule: str, name: str | None, layer: int | None, count: int) -> Finding:
    message = f"{name or 'All of it'} was looked at, and this is what was found there."
    level = RULES_OF_A_SUITE[rule].level
    return Finding(level, rule, name, None, layer, message, {}, "Do this.", count)


def test_the_words_are_as_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_text, "RULES", RULES_OF_A_SUITE)
    about = AuditedCheckpoint(
        "a-checkpoint", "sha256:0123456789abcdef", "deepseek_v4", "modelopt", 61, 1, 95,
        285_123, 881_000_000_000, {},
    )  # fmt: skip
    parts = (
        AuditPart(
            "structure", "285,123 tensors in 95 files, against the config of deepseek_v4.", True
        ),
        AuditPart("numbers", "143,000 weights, 881 GB read in 11 min 03 s (1.33 GB/s).", True),
        AuditPart("loader", "No map was given.", False),
    )
    findings = (
        _found("scales.missing", "layers.3.attn.wq_a.weight", 3, 1),
        _found("scales.missing", "layers.4.ffn.experts.0.w1.weight", 4, 384),
        _found("scales.missing", "layers.9.ffn.experts.0.w1.weight", 9, 384),
        _found("numbers.far", "layers.3.attn.wq_a", 3, 1),
        _found("numbers.who", None, None, 1),
    )
    bad = Audit(about, parts, findings)
    good = Audit(about, parts, findings[4:])
    sentence = "\n".join(
        text(each, width=width) for each, width in ((bad, 100), (bad, 60), (good, 100))
    )
    assert_as_kept("commands/audit/audit.txt", sentence)


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_it_fits_one_screen(sick: Audit, width: int) -> None:
    lines = text(sick, width=width).splitlines()
    assert max(map(len, lines)) <= max(width, 78)  # ids of rules are not broken
    assert width < 80 or len(lines) <= SCREEN


def test_a_flood_of_findings_fits_too(sick: Audit) -> None:
    findings = Findings()
    for rule in RULES.values():
        for layer in range(61):
            findings.add(rule, FindingLocation(f"layers.{layer}.x", None, layer), "m " * 900, "r")
    flooded = replace(sick, findings=tuple(findings.sorted()))
    shown = text(flooded)
    assert len(shown.splitlines()) <= SCREEN
    assert f"and {len(RULES) - 12} rules more" in shown
    assert "in 61 places, layers 0-60" in shown


def test_a_healthy_one_has_its_notes(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = audit(AuditRequest(healthy_checkpoint(tmp_path_factory), numbers=False))
    quiet = replace(found, findings=())
    assert text(quiet).splitlines()[-1].startswith("            loader ")
    notes = replace(found, findings=tuple(f for f in found.findings if f.level == "note"))
    assert "\nNotes:\n   note     config.ignore_keeps_source" in text(notes)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_shown_and_not_obeyed(sick: Audit, name: str) -> None:
    findings = Findings()
    rule = next(iter(RULES.values()))
    findings.add(rule, FindingLocation(name, None, None), name, name)
    shown = text(replace(sick, findings=tuple(findings.sorted())))
    assert not set(shown) & {"\x1b", "\x07", "\x00", "\r", "\u202e"}


def test_colour_is_never_alone(sick: Audit) -> None:
    coloured = text(sick, colour=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == text(sick)
