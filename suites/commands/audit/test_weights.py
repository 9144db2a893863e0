from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from degarble.harness.commands.audit import page as audit_weights
from degarble.harness.commands.audit.audit import AuditRequest, audit
from degarble.harness.commands.audit.page import loader_blocks, weight_blocks
from degarble.harness.report.blocks import Catalogue, Details, Facts, Sentence, Table
from degarble.suites.commands.audit.audit_cases import sick_checkpoint

if TYPE_CHECKING:
    from degarble.harness.commands.audit.audit import Audit


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    return audit(AuditRequest(sick_checkpoint(tmp_path_factory), loader="vllm:tp=2"))


def _listed(found: Audit) -> tuple[Catalogue, str]:
    *_, listed, told = weight_blocks(found)
    assert isinstance(listed, Catalogue)
    assert isinstance(told, Sentence)
    return listed, told.text


def _facts(found: Audit, weight: str) -> dict[str, str]:
    listed, _ = _listed(found)
    (entry,) = (each for each in listed.entries if each.cells[-1] == weight)
    (facts,) = entry.blocks
    assert isinstance(facts, Facts)
    return {fact.name: fact.value for fact in facts.rows}


def test_those_with_findings_come_first_and_every_role_is_there(sick: Audit) -> None:
    listed, told = _listed(sick)
    tones = [str(entry.cells[0]) for entry in listed.entries]
    assert tones == sorted(tones, key=["bad", "warning", "note", "good"].index)
    names = [entry.cells[-1] for entry in listed.entries]
    assert len(names) == len(set(names))
    for name in ("layers.1.ffn.experts.0.w1", "layers.0.attn_norm", "embed"):
        assert name in names
    assert sick.table is not None
    assert told.startswith(f"{len(names)} of {len(sick.table)} weights")


def test_a_packed_weight_tells_scales_magnitude_entropy_layout_and_order(sick: Audit) -> None:
    facts = _facts(sick, "layers.2.ffn.experts.2.w2")
    assert facts["Tensor scale"] == "0 is stored, decodes by 0"
    assert facts["As"] == "NVFP4, modelopt names"
    assert "bits a code" in facts["Entropy"]
    assert facts["Layout of scales"].startswith("row-major: scales and codes correlate by -0.")
    assert facts["Magnitude"] == "rms 0, amax 0"
    assert set(facts) >= {"Stored in", "Size", "Input scale", "Block scales", "Packing order"}
    assert set(_facts(sick, "layers.0.attn_norm")) == {
        *("Stored in", "As", "Size", "Magnitude", "Zeros", "Entropy")
    }
    assert _facts(sick, "layers.1.ffn.experts.0.w1")["Tensor scale"] == (
        "nan is stored, decodes by nan"
    )


def test_what_has_no_room_is_counted(sick: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = _listed(sick)
    monkeypatch.setattr(audit_weights, "SHOWN_WEIGHTS", 10)
    listed, told = _listed(sick)
    assert len(listed.entries) == 10
    assert told.endswith(f" {len(whole.entries) - 10} more of these have no room here.")


def test_roles_are_a_table_and_the_dialect_a_sentence(sick: Audit) -> None:
    dialect, roles, *_ = weight_blocks(sick)
    assert isinstance(dialect, Sentence)
    assert "NVFP4 matrices under modelopt names" in dialect.text
    assert isinstance(roles, Details)
    (table,) = roles.blocks
    assert isinstance(table, Table)
    assert f"{len(table.rows)} roles" in roles.summary


def test_without_numbers_or_map_there_is_nothing_to_tell(sick: Audit) -> None:
    assert weight_blocks(replace(sick, table=None)) == []
    assert loader_blocks(replace(sick, loader=None)) == []


def test_loading_is_told_in_counts_and_by_rank(sick: Audit) -> None:
    counts, ranks = loader_blocks(sick)
    assert isinstance(counts, Facts)
    assert isinstance(ranks, Table)
    assert ("Ranks", "2") in [(fact.name, fact.value) for fact in counts.rows]
    assert ranks.rows[0][0] == "0-1"
