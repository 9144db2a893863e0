"""Results survive the journal; files tell that they changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from degarble.harness.history.ledger import Failure
from degarble.harness.nightly.night import (
    NightConfig,
    NightJournal,
    StepResult,
    files_digest,
    from_plain,
    to_plain,
)
from degarble.harness.report.verdict import Verdict

RESULT = StepResult(
    Verdict.UNSTABLE,
    "Two answers.",
    asked=False,
    values={"budgets": {"head": 0.5}},
    failures=(Failure("head", Verdict.UNSTABLE, None, "two"),),
    judged=("head", "norm"),
    facts={"machine": "CPU"},
    lines=("a", "b"),
    rows=(("run-1", "AGREES", "equal"),),
)


def test_a_result_round_trips_through_json() -> None:
    assert from_plain(json.loads(json.dumps(to_plain(RESULT)))) == RESULT


def test_a_journal_answers_for_the_same_key_alone(tmp_path: Path) -> None:
    journal = NightJournal(tmp_path / "work")
    assert not journal.continues
    journal.write("check", "key", RESULT)
    again = NightJournal(tmp_path / "work")
    assert again.continues
    assert again.started == journal.started
    assert again.read("check", "key") == RESULT
    assert again.read("check", "other") is None
    assert again.read("audit", "key") is None
    again.finish()
    assert NightJournal(tmp_path / "work").read("check", "key") is None


def test_a_changed_file_is_reported(tmp_path: Path) -> None:
    assert files_digest(None) == files_digest(tmp_path / "nothing") == []
    file = tmp_path / "a" / "b"
    file.parent.mkdir()
    file.write_text("one")
    told = files_digest(tmp_path)
    assert told[0][:2] == ("a/b", 3)
    assert files_digest(file)[0][:2] == ("b", 3)
    file.write_text("longer")
    assert files_digest(tmp_path) != told


def test_a_name_never_leads_out_of_the_folder(tmp_path: Path) -> None:
    for name in ("..", "../x", "/", "a/b", "\N{SNOWMAN}"):
        asked = NightConfig(tmp_path, tmp_path, tmp_path, "2026-11-22", subject=name)
        assert asked.work.parent == tmp_path / "work"
        assert asked.work.name not in ("", ".", "..")


@pytest.mark.parametrize("killed_at", [0, 1, 2])
def test_a_journal_that_is_killed_while_it_is_cleared_begins_anew(
    killed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = NightJournal(tmp_path)
    journal.write("one", "key", StepResult(Verdict.AGREES, "Well."))
    journal.finish()
    removed: list[Path] = []
    unlink = Path.unlink

    def until_killed(path: Path, **named: bool) -> None:
        if path.parent == tmp_path and not path.name.startswith("."):
            if len(removed) == killed_at:
                raise KeyboardInterrupt
            removed.append(path)
        unlink(path, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", until_killed)
        with pytest.raises(KeyboardInterrupt):
            NightJournal(tmp_path)
    assert not NightJournal(tmp_path).continues
