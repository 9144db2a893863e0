"""`degarble history` and `bisect` as a user meets them: words, status, JSON, refusals."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from degarble.harness.history.store import HistoryStore
from degarble.suites.commands.calls import call
from degarble.suites.history.history_cases import W2, history, night

CHECK = {
    "schema": 1,
    "verdict": "AGREES",
    "checkpoint": "tiny",
    "facts": {"fingerprint": "c0ffee"},
    "cosines": [{"name": W2, "budgets": 0.25, "candidate_reference": 0.99}],
}


@pytest.fixture
def store(tmp_path: Path, seed: int) -> str:
    """A store of 48 nights in which one component moved in the 45th."""
    url = str(tmp_path / "h.sqlite")
    with HistoryStore(url, create=True) as opened:
        for run in history(48, 45, seed):
            opened.add(run)
    return url


def test_changes_name_night_and_commits_and_end_with_1(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = call(capsys, "history", "changes", "--store", store)
    assert result.status == 1
    assert f"{W2}: 0.2" in result.out
    assert f"in the night {night(45)} (the one before: {night(44)})" in result.out
    assert "commits 0000002c0000..0000002d0000" in result.out
    document = call(capsys, "--json", "history", "changes", W2, "--store", store).document
    assert [each["place"] for each in document["changes"]] == [W2]
    assert document["changes"][0]["first"] == night(45)
    quiet = call(capsys, "history", "changes", "layers.0.*", "--store", store)
    assert quiet.status == 0
    assert "Nothing moved last night" in quiet.out
    assert "earlier change" not in quiet.out


def test_trends_are_drawn_and_written_to_a_page(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "report"
    result = call(capsys, "history", "trends", "--store", store, "--report", folder)
    assert result.status == 0
    assert W2 in result.out
    assert "▇" in result.out
    [page] = folder.glob("*.html")
    assert W2 in page.read_text()
    document = call(capsys, "--json", "history", "trends", "head", "--store", store).document
    [series] = document["series"]
    assert (series["place"], len(series["values"])) == ("head", 48)


def test_a_check_is_added_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "check.json"
    file.write_text(json.dumps(CHECK))
    words = ("history", "add", file, "--store", tmp_path / "new.sqlite", "--machine", "M",
             "--commit", "abc1234", "--night", "2026-11-22")  # fmt: skip
    assert call(capsys, "--json", *words).document["added"] is True
    assert call(capsys, "--json", *words).document["added"] is False
    listed = call(capsys, "history", "runs", "--store", tmp_path / "new.sqlite")
    assert "2026-11-22  AGREES     abc1234       tiny on M" in listed.out


def test_two_runs_are_compared(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = call(capsys, "history", "compare", "0000002c", "0000002d", "--store", store)
    assert result.status == 1
    assert f"budgets  {W2}" in result.out
    assert "torch: 2.13.0 -> 2.14.0" in result.out
    same = call(capsys, "history", "compare", "0000002c", "0000002c", "--store", store)
    assert same.status == 0
    assert "3 of 3 numbers equal" in same.out


@pytest.mark.needs("pyarrow")
def test_the_store_is_exported(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all.parquet"
    result = call(capsys, "history", "export", path, "--store", store)
    assert "144 numbers" in result.out
    assert path.stat().st_size > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("history", "changes", "--store", "no.sqlite"), "--store = 'no.sqlite'"),
        (("history", "changes", "layers.99.x"), "COMPONENT = 'layers.99.x'"),
        (("history", "changes", "--subject", "nobody"), "--subject = 'nobody'"),
        (("history", "trends", "--machine", "B100"), "--machine = 'B100'"),
        (("history", "trends", "--measure", "taste"), "measure = 'taste'"),
        (("history", "compare", "beef", "f00d"), "run = 'beef'"),
        (("history", "add", "missing.json"), "missing.json"),
        (("history", "export", "no/all.parquet"), "FILE.parquet"),
        (("bisect", "--", "true"), "--good and --bad"),
    ],
)
def test_what_is_not_there_is_refused(
    words: tuple[str, ...], said: str, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with_store = "--store" in words or words[0] == "bisect"
    result = call(capsys, *words, *(() if with_store else ("--store", store)))
    assert result.status == 2
    assert said in result.err
    assert "Traceback" not in result.err


def test_a_bad_row_is_named_and_what_agrees_is_undecided(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(sqlite3.connect(store)) as connection:
        [(bad,)] = connection.execute("SELECT id FROM degarble_runs WHERE night = ?", (night(5),))
        connection.execute("UPDATE degarble_runs SET verdict = 'MAYBE' WHERE id = ?", (bad,))
        connection.commit()
    listed = call(capsys, "history", "runs", "--store", store)
    assert listed.status == 2
    assert len(listed.out.splitlines()) == 47
    assert f"degarble_runs  {bad}: its verdict" in listed.err
    assert "1 row of h.sqlite cannot be read" in listed.err
    still = call(capsys, "--json", "history", "changes", "layers.0.*", "--store", store)
    assert (still.status, still.document["verdict"]) == (2, "UNDECIDED")
    assert [each["key"] for each in still.document["skipped"]] == [bad]
    moved = call(capsys, "--json", "history", "changes", "--store", store)
    assert (moved.status, moved.document["verdict"]) == (1, "DIFFERS")
    refused = call(capsys, "history", "compare", bad[:8], "0000002c", "--store", store)
    assert refused.status == 2
    assert bad in refused.err


@pytest.mark.needs("pyarrow")
def test_an_export_to_a_full_device_is_refused(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "all.parquet"
    link.symlink_to("/dev/full")
    result = call(capsys, "history", "export", link, "--store", store)
    assert result.status == 2
    assert "No space left on device" in result.err
    assert link.is_symlink()


@pytest.mark.parametrize("words", [("runs",), ("add", "check.json"), ("export", "a.parquet")])
def test_a_mistyped_address_is_neither_shown_nor_a_file(
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("check.json").write_text(json.dumps(CHECK))
    for address in ("postgresql:me:secret@host/db", "host=db password=secret"):
        for json_wanted in ((), ("--json",)):
            result = call(capsys, *json_wanted, "history", *words, "--store", address)
            assert result.status == 2
            assert "secret" not in result.out + result.err
    assert [path.name for path in tmp_path.iterdir()] == ["check.json"]
