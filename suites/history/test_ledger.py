"""Runs of a history, checks read as runs, and the ledger of known failures."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import InvalidArgument, Refused, UnknownName
from degarble.harness.history.ledger import Failure, Ledger, read_ledger
from degarble.harness.history.records import (
    MEASURES,
    failures_of,
    measure_named,
    read_check,
    values_of,
)
from degarble.harness.report.verdict import Verdict
from degarble.suites.history.history_cases import run

if TYPE_CHECKING:
    from pathlib import Path

# --------------------------------------------------------------------------------------------------
# The ledger of known failures: every entry earns its place, every night.

TODAY = date(2026, 11, 22)
W2 = "layers.3.ffn.experts.w2"
GOOD = """
- component: layers.3.ffn.experts.*
  verdict: DIFFERS
  fault: M10.nibble_order
  issue: https://example.org/issues/12
  until: 2026-12-01
  why: the converter of expert 3 is being mended
"""
JUDGED = (W2, "layers.3.attn.wq_a")
WRONG = Failure(W2, Verdict.DIFFERS, "M10.nibble_order", "61 times its budget")


def ledger(tmp_path: Path, text: str = GOOD, today: date = TODAY) -> Ledger:
    path = tmp_path / "ledger.yaml"
    path.write_text(text)
    return read_ledger(path, today)


def test_a_known_failure_stays_green_and_is_reported(tmp_path: Path) -> None:
    settled = ledger(tmp_path).settle([WRONG], "tiny", TODAY, JUDGED)
    assert not settled.red
    assert settled.lines() == [
        f"known until 2026-12-01: {W2} DIFFERS, https://example.org/issues/12"
    ]


@pytest.mark.parametrize(
    "other",
    [
        Failure("layers.4.ffn.experts.w2", Verdict.DIFFERS, "M10.nibble_order"),
        Failure(W2, Verdict.UNSTABLE, "M10.nibble_order"),
        Failure(W2, Verdict.DIFFERS, "M11.scale_layout"),
        Failure(W2, Verdict.DIFFERS, None),
    ],
    ids=["another place", "another verdict", "another cause", "no cause"],
)
def test_what_the_entry_does_not_cover_is_new(other: Failure, tmp_path: Path) -> None:
    settled = ledger(tmp_path).settle([WRONG, other], "tiny", TODAY, JUDGED)
    assert settled.red
    assert settled.new == (other,)


def test_a_healed_entry_is_red_until_it_is_removed(tmp_path: Path) -> None:
    settled = ledger(tmp_path).settle([], "tiny", TODAY, JUDGED)
    assert settled.red
    assert "remove the entry" in settled.lines()[0]
    assert not Ledger().settle([], "tiny", TODAY, JUDGED).red


def test_an_expired_entry_is_red_though_its_failure_is_there(tmp_path: Path) -> None:
    known = ledger(tmp_path)
    assert not known.settle([WRONG], "tiny", date(2026, 12, 1), JUDGED).red
    late = known.settle([WRONG], "tiny", date(2026, 12, 2), JUDGED)
    assert late.red
    assert late.lines()[0].startswith("expired on 2026-12-01")


def test_an_entry_whose_component_was_not_looked_at_is_not_healed(tmp_path: Path) -> None:
    assert not ledger(tmp_path).settle([], "tiny", TODAY, ["head"]).red


def test_an_entry_of_another_subject_sleeps(tmp_path: Path) -> None:
    known = ledger(tmp_path, f"{GOOD}  subject: V4-Pro*\n")
    assert known.settle([], "tiny", TODAY, JUDGED).asleep == known.entries
    assert known.settle([WRONG], "tiny", TODAY, JUDGED).new == (WRONG,)
    assert not known.settle([WRONG], "V4-Pro-NVFP4", TODAY, JUDGED).red


def test_an_empty_file_is_an_empty_ledger(tmp_path: Path) -> None:
    assert ledger(tmp_path, "# nothing is known to fail\n").entries == ()


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("  issue: https://example.org/issues/12\n", "", "issue of ledger.yaml[0]"),
        ("why: the converter of expert 3 is being mended", "why: ' '", "why of ledger.yaml[0]"),
        ("until: 2026-12-01", "until: 2027-12-01", "until of ledger.yaml[0]"),
        ("until: 2026-12-01", "until: soon", "until of ledger.yaml[0]"),
        ("until: 2026-12-01", "until: 2026-12-01 10:00:00", "until of ledger.yaml[0]"),
        ("DIFFERS", "AGREES", "verdict of ledger.yaml[0]"),
        ("layers.3.ffn.experts.*", "'*'", "component of ledger.yaml[0]"),
        ("  why:", "  whi: x\n  why:", "key of ledger.yaml[0]"),
        ("- component", "component", "ledger ledger.yaml"),
        ("- component", "- just words\n- component", "ledger.yaml[0]"),
        ("verdict: DIFFERS", "verdict: [", "ledger ledger.yaml"),
    ],
)
def test_an_entry_that_could_hide_something_is_refused_by_name(
    old: str, new: str, name: str, tmp_path: Path
) -> None:
    assert old in GOOD
    with pytest.raises(Refused) as refusal:
        ledger(tmp_path, GOOD.replace(old, new, 1))
    assert refusal.value.name == name


def test_two_entries_for_one_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="entry 0 says the same"):
        ledger(tmp_path, GOOD + GOOD)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="missing"):
        read_ledger(tmp_path / "missing.yaml", TODAY)


# --------------------------------------------------------------------------------------------------
# What a run of the history may say, and what is refused.


def test_a_run_has_one_id_whoever_adds_it() -> None:
    assert run(3).id == run(3).id
    assert run(3).id != replace(run(3), commit="another").id
    assert run(3).id != run(3, {"head": 0.25000001}).id
    assert run(3, {"a": 1.0, "b": 2.0}).id == run(3, {"b": 2.0, "a": 1.0}).id


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"night": "last"}, "night"),
        ({"night": "2026-1-1"}, "night"),
        ({"night": "2026-99-99"}, "night"),
        ({"night": "20261122"}, "night"),
        ({"subject": "a\x1b[31m"}, "subject"),
        ({"subject": "a\ud800"}, "subject"),
        ({"subject": " "}, "subject"),
        ({"subject": "x" * 501}, "subject"),
        ({"machine": ""}, "machine"),
        ({"values": {}}, "values of the run"),
        ({"values": {"budgets": {}}}, "values of the run"),
        ({"values": {"budgets": {"head": float("nan")}}}, "budgets at head"),
        ({"values": {"budgets": {"head": float("inf")}}}, "budgets at head"),
        ({"values": {"budgets": {"": 1.0}}}, "place of budgets"),
        ({"values": {"buget": {"head": 1.0}}}, "measure"),
    ],
)
def test_a_run_that_says_nothing_is_refused_by_name(changed: dict[str, object], name: str) -> None:
    with pytest.raises(Refused) as refusal:
        run(0, None, **changed)
    assert refusal.value.name == name


def test_measures_are_known_by_name() -> None:
    assert all(measure_named(name) is measure for name, measure in MEASURES.items())
    with pytest.raises(UnknownName, match="budgets"):
        measure_named("budget")
    assert issubclass(InvalidArgument, Refused)


# --------------------------------------------------------------------------------------------------
# Checks as runs of the history, and what is no check.

LINES: list[dict[str, Any]] = [
    {"layer": 3, "component": "attn.wq_a", "output": "a", "budgets": 0.2,
     "candidate_reference": 0.99},
    {"layer": 3, "component": "attn.wq_a", "output": "b", "budgets": 0.4,
     "candidate_reference": None},
    {"layer": None, "component": "head", "output": "logits", "budgets": None},
    {"layer": None, "component": "attn.norm", "name": "mtp.0.attn.norm", "budgets": 0.1},
]  # fmt: skip
DOCUMENT: dict[str, Any] = {"schema": 1, "verdict": "DIFFERS", "cosines": LINES}


def test_the_worst_output_of_a_component_is_its_number() -> None:
    assert values_of(DOCUMENT) == {
        "budgets": {"layers.3.attn.wq_a": 0.4, "mtp.0.attn.norm": 0.1},
        "distance": {"layers.3.attn.wq_a": pytest.approx(0.01)},
    }


def test_origins_and_unstable_components_are_failures() -> None:
    origin = {"layer": 7, "component": "ffn.experts.w2", "fault": "M10.nibble_order",
              "evidence": "100 % of codes"}  # fmt: skip
    failures = failures_of({"origins": [origin], "unstable": ["layers.1.ffn.topk"]})
    assert [(f.component, f.verdict, f.fault) for f in failures] == [
        ("layers.7.ffn.experts.w2", Verdict.DIFFERS, "M10.nibble_order"),
        ("layers.1.ffn.topk", Verdict.UNSTABLE, None),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[]",
        "{}",
        json.dumps({**DOCUMENT, "schema": 2}),
        json.dumps({**DOCUMENT, "verdict": "FINE"}),
        json.dumps({**DOCUMENT, "cosines": [1]}),
        "[" * 100_000,
        json.dumps({**DOCUMENT, "facts": [1]}),
        json.dumps({**DOCUMENT, "verdict": []}),
        json.dumps({**DOCUMENT, "checkpoint": 7}),
        json.dumps({**DOCUMENT, "cosines": [{**LINES[0], "budgets": float("nan")}]}),
    ],
)
def test_what_is_no_check_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(Refused):
        read_check(path)


def test_numbers_beyond_every_float_are_no_values() -> None:
    lines = [{**LINES[0], "budgets": 10**400}, LINES[3]]
    assert values_of({**DOCUMENT, "cosines": lines})["budgets"] == {"mtp.0.attn.norm": 0.1}


def test_a_check_without_a_judged_output_is_refused() -> None:
    with pytest.raises(Refused, match="judged outputs"):
        values_of({**DOCUMENT, "cosines": LINES[2:3]})
