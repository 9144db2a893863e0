"""The ledger of known failures: every entry earns its place, every night."""

from datetime import date
from pathlib import Path

import pytest

from degarble.harness.base.errors import Refused
from degarble.harness.history.ledger import Failure, Ledger, read_ledger
from degarble.harness.report.verdict import Verdict

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
