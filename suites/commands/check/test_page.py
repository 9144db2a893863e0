from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from degarble.harness.capture.files.reader import Capture
from degarble.harness.commands.check import page as check_page
from degarble.harness.commands.check.output_statistics import Looker
from degarble.harness.commands.check.page import (
    Checked,
    origin_of,
    page_of,
    replay_record,
    sentence_of,
    write_check_page,
)
from degarble.harness.commands.report_folder import write_page
from degarble.harness.engine.localise.localise import localise
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.page import Page, Panel, PanelKind, from_plain, page_from_json
from degarble.harness.report.replay_record import ReplayRecord
from degarble.harness.report.verdict import Verdict
from degarble.suites.capture.files.capture_cases import old_capture
from degarble.suites.museum.demo_cases import PROVENANCE, story_telling, whole_story

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def plain() -> Checked:
    """The default story as a check would tell it."""
    return replace(story_telling(), sentence="", preface=())


def test_the_first_screen_has_origin_cause_evidence_and_command() -> None:
    page = page_of(plain(), replay_record(plain()))
    assert page.sentence == "Layer 3, ffn.experts.w2: The two nibbles of every byte are swapped."
    origin = page.findings[0].origin
    assert (origin.layer, origin.component, origin.fault) == (
        3, "ffn.experts.w2", "M10.nibble_order",
    )  # fmt: skip
    assert origin.site == "layers.3.ffn.experts.w2.out"
    assert origin.where["expert"] == 4
    assert origin.confidence == 1.0
    assert origin.cosine is not None
    assert origin.cosine < 0.999
    assert origin.difference is not None
    assert origin.budget is not None
    assert origin.difference > 5 * origin.budget


def test_every_output_is_in_the_record_with_its_cosines_and_look() -> None:
    record = replay_record(plain())
    assert len(record.outputs) == len(whole_story().sick.localised.rows)
    sick = next(each for each in record.outputs if each.site == record.origins[0])
    assert sick.verdict is Verdict.DIFFERS
    assert sick.ratio is not None
    assert sick.ratio > 1
    twin, candidate_reference, reference = sick.cosines
    assert twin is not None
    assert reference is not None
    assert candidate_reference is not None
    assert reference > candidate_reference
    look = sick.look
    assert {each.name for each in look.along} >= {"position", "expert"}
    expert = next(each for each in look.along if each.name == "expert")
    values = dict(zip(expert.labels, expert.values, strict=True))
    assert (values["4"] or 0.0) > 100 * max(v or 0.0 for k, v in values.items() if k != "4")
    assert look.worst is not None
    assert look.worst.candidate_code.startswith("0x")
    assert look.derivation
    healthy = [each for each in record.outputs if each.verdict is Verdict.AGREES]
    assert all(each.ratio is None or each.ratio <= 0.7 for each in healthy)


def test_tables_lie_beside_the_page_and_say_the_same(tmp_path: Path) -> None:
    page = write_check_page(tmp_path, plain())
    record = replay_record(plain())
    with (tmp_path / f"{page.stem}-outputs.csv").open(newline="", encoding="utf-8") as stream:
        rows = {row["site"]: row for row in csv.DictReader(stream)}
    assert len(rows) == len(record.outputs)
    for each in record.outputs:
        row = rows[each.site]
        assert row["verdict"] == each.verdict
        if each.ratio is not None:
            assert math.isclose(float(row["difference_in_budgets"]), each.ratio)
        if each.cosines[0] is not None:
            assert float(row["cosine_candidate_twin"]) == each.cosines[0]
    with (tmp_path / f"{page.stem}-budgets.csv").open(newline="", encoding="utf-8") as stream:
        wide = {row["role"]: row for row in csv.DictReader(stream)}
    sick = rows["layers.3.ffn.experts.w2.out"]["difference_in_budgets"]
    assert float(wide["ffn.experts.w2"]["3"]) == float(sick)
    document = json.loads((tmp_path / f"{page.stem}-replay.json").read_text(encoding="utf-8"))
    assert from_plain(ReplayRecord, document["record"], "record") == record
    markup = page.read_text(encoding="utf-8")
    for name in ("outputs.csv", "budgets.csv", "replay.json"):
        assert f'href="{page.stem}-{name}"' in markup


def test_an_audit_that_was_there_stays(tmp_path: Path) -> None:
    telling = plain()
    audit = Panel(PanelKind.AUDIT, "All rules hold.", Verdict.AGREES)
    write_page(tmp_path, Page(telling.subject, PROVENANCE, Verdict.AGREES, "Fine.", (), (audit,)))
    path = write_check_page(tmp_path, telling)
    page = page_from_json(path.with_suffix(".json").read_text(encoding="utf-8"))
    ran = [panel.kind for panel in page.ordered_panels if panel.verdict]
    assert ran == [PanelKind.AUDIT, PanelKind.REPLAY, PanelKind.TEXT]
    assert page.verdict is Verdict.DIFFERS
    again = write_check_page(tmp_path, telling)
    assert again == path


def test_close_looks_give_way_until_the_page_can_be_mailed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_page, "SIZE_LIMIT", 400_000)
    path = write_check_page(tmp_path, plain())
    markup = path.read_text(encoding="utf-8")
    assert len(markup.encode()) <= 400_000
    assert "outputs can be looked at closely here" in markup
    assert 'id="look-0"' in markup


def test_a_healthy_run_an_unstable_one_and_one_of_which_nothing_is_known() -> None:
    healthy = whole_story().healthy
    fine = replace(plain(), localised=healthy.localised, found=())
    assert sentence_of(fine).startswith("Every component does what its twin does: ")
    own = sentence_of(replace(fine, built_in=True))
    assert own.startswith("Built-in reference: no kernel was tested. ")
    unstable = replace(fine, localised=replace(healthy.localised, unstable=("layers.1.ffn.gate",)))
    assert sentence_of(unstable) == "layers.1.ffn.gate gave two answers to the same question."
    blank = replace(healthy.localised, verdict=Verdict.UNDECIDED, rows=())
    assert sentence_of(replace(fine, localised=blank)).startswith("Nothing is claimed")
    twice = replace(plain(), found=plain().found * 3)
    assert sentence_of(twice).endswith("2 more places.")


def test_an_origin_without_a_cause_keeps_its_place() -> None:
    (found,) = plain().found
    origin = origin_of(replace(found, diagnosed=None))
    assert (origin.layer, origin.component, origin.fault) == (3, "ffn.experts.w2", None)
    assert origin.confidence == 0
    assert origin.evidence == found.trouble.sentence


def test_a_reproducer_is_told_as_a_command_and_a_capture_says_where_it_ran() -> None:
    telling = plain()
    found = replace(telling.found[0], reproduction="a b/reproduce.py", share=0.75)
    page = page_of(replace(telling, found=(found,)), replay_record(telling))
    assert page.findings[0].reproduction == "python 'a b/reproduce.py'"
    assert page.findings[0].origin.reproducer == "a b/reproduce.py"
    assert "removes 75.0 % of the difference of the logits" in page.findings[0].note
    hiding = replace(telling, found=(replace(found, share=-0.153),))
    assert "15.3 % larger" in page_of(hiding, replay_record(hiding)).findings[0].note
    recipe = whole_story().model.museum.recipe
    facts = dict(check_page.captured_facts({"versions": {"torch": "2"}, "sums": 7}, recipe))
    assert facts["captured with"] == "torch 2"
    assert "NVFP4 x NVFP4" in facts["recipe"]
    assert facts["sums"] == "7"
    assert "captured with" not in dict(check_page.captured_facts({"versions": []}, recipe))


def test_a_capture_of_version_1_still_renders(tmp_path: Path) -> None:
    """Its model is a toy, so that nothing can be claimed; the page says so."""
    capture = Capture.open(old_capture(tmp_path / "capture"))
    twin = whole_story().model.twin
    looker = Looker(twin.config)
    recipe = recipe_named("bf16", twin.config)
    found = localise(twin, recipe, capture, None, lambda _name: None, looker)
    telling = replace(plain(), localised=found, found=(), looker=looker, texts=None)
    path = write_check_page(tmp_path / "report", telling)
    page = page_from_json(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert page.verdict in {Verdict.UNDECIDED, Verdict.DIFFERS}
    assert "<html" in path.read_text(encoding="utf-8")
