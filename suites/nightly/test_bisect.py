"""The search through git's history: the commit is named, and what cannot be told is not."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from degarble.harness.base.errors import InvalidArgument, Undecided
from degarble.harness.history.store import HistoryStore
from degarble.harness.nightly.bisect import BisectSearch, bisected
from degarble.suites.history.history_cases import W2, run

SCRIPT = """
import json, pathlib, sys
value = pathlib.Path("value").read_text().strip()
if value == "broken":
    sys.exit(3)
line = {"name": "W2", "component": "w2", "layer": 23, "budgets": float(value)}
json.dump({"schema": 1, "verdict": "AGREES", "cosines": [line]}, open("check.json", "w"))
sys.exit(float(value) > 1)
""".replace("W2", W2)


def git(folder: Path, *words: str) -> str:
    names = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *names, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def repository(folder: Path, values: list[str]) -> tuple[BisectSearch, list[str]]:
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    commits = []
    for number, value in enumerate(values):
        (folder / "value").write_text(f"{value}\n{'#' * number}".split("\n")[0])
        (folder / "step").write_text(str(number))
        (folder / "measure.py").write_text(SCRIPT)
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", f"step {number}")
        commits.append(git(folder, "rev-parse", "HEAD"))
    command = (sys.executable, "measure.py")
    return BisectSearch(command, folder, W2, good=commits[0], bad=commits[-1]), commits


def test_the_commit_that_moved_the_component_is_named(tmp_path: Path) -> None:
    values = ["0.31", "0.32", "0.30", "0.31", "0.31", "4.5", "4.4", "4.5", "4.5"]
    search, commits = repository(tmp_path / "r", values)
    lines: list[str] = []
    result = bisected(search, lines.append)
    assert (result.commit, result.title) == (commits[5], "step 5")
    assert (result.before, result.after) == (0.31, 4.5)
    assert len(result.measured) <= 2 + 4
    assert len(lines) == len(result.measured)
    assert W2 in result.sentence
    assert result.document()["verdict"] == "DIFFERS"
    assert git(tmp_path / "r", "worktree", "list").count("\n") == 0
    assert git(tmp_path / "r", "status", "--porcelain") == ""


def test_without_a_component_the_status_decides(tmp_path: Path) -> None:
    search, commits = repository(tmp_path / "r", ["0.1", "0.2", "3", "3"])
    assert bisected(replace(search, component=None)).commit == commits[2]


def test_commits_that_cannot_be_measured_are_passed_over(tmp_path: Path) -> None:
    search, commits = repository(tmp_path / "r", ["0.1", "0.1", "broken", "0.1", "2", "2"])
    assert bisected(search).commit == commits[4]
    search, commits = repository(tmp_path / "s", ["0.1", "broken", "broken", "2"])
    with pytest.raises(Undecided, match=commits[2][:12]):
        bisected(search)
    search, _ = repository(tmp_path / "t", ["broken", "0.1", "2"])
    with pytest.raises(Undecided, match="both ends"):
        bisected(search)


def test_a_result_that_a_commit_brings_along_counts_for_nothing(tmp_path: Path) -> None:
    search, _ = repository(tmp_path / "r", ["0.1", "2", "2"])
    old = tmp_path / "r" / "check.json"
    old.write_text('{"schema": 1, "verdict": "AGREES", "cosines": []}')
    git(tmp_path / "r", "add", "-A")
    git(tmp_path / "r", "commit", "-q", "-m", "tracked")
    broken = replace(search, command=(sys.executable, "-c", ""), bad="HEAD")
    with pytest.raises(Undecided, match="both ends"):
        bisected(broken)
    written = SCRIPT.replace("sys.exit(float(value) > 1)", "sys.exit(4)")
    with pytest.raises(Undecided, match="both ends"):
        bisected(replace(search, command=(sys.executable, "-c", written)))


def test_ends_that_measure_the_same_are_undecided(tmp_path: Path) -> None:
    search, _ = repository(tmp_path / "r", ["0.5", "9", "0.5"])
    with pytest.raises(Undecided, match="nothing moved"):
        bisected(search)


def test_the_store_gives_the_two_commits(tmp_path: Path) -> None:
    search, commits = repository(tmp_path / "r", ["0.1"] * 3 + ["2"] * 2)
    url = str(tmp_path / "h.sqlite")
    with HistoryStore(url, create=True) as store:
        for number in range(50):
            value = 2.0 if number >= 40 else 0.1
            commit = commits[4] if number >= 40 else commits[1]
            store.add(run(number, {W2: value}, commit=commit))
    result = bisected(replace(search, good=None, bad=None, store=url))
    assert result.commit == commits[3]
    assert commits[0] not in dict(result.measured)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"good": None}, "--good and --bad"),
        ({"result": "/check.json"}, "--result"),
        ({"result": "../check.json"}, "--result"),
        ({"good": "nowhere"}, "git rev-parse"),
        ({"good": "--help"}, "git rev-parse"),
        ({"command": ("no-such-program-at-all",)}, "CMD"),
        ({"repository": Path("/")}, "git rev-parse"),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(
    changed: dict[str, object], name: str, tmp_path: Path
) -> None:
    search, _ = repository(tmp_path / "r", ["0.1", "2"])
    with pytest.raises(InvalidArgument) as refusal:
        bisected(replace(search, **changed))  # type: ignore[arg-type]
    assert refusal.value.name == name


def test_ends_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    search, commits = repository(tmp_path / "r", ["0.1", "2"])
    with pytest.raises(InvalidArgument, match="later one"):
        bisected(replace(search, good=commits[1], bad=commits[0]))
