"""Bisect git history for the commit that moved a component's numerical difference.

Every tested commit gets its own work tree, so the user's is never touched; the command runs there,
and the JSON of the check that it writes contains the component's difference. A commit belongs to
the end whose number is nearer; without a component the command's exit status decides (0 good, 1
bad). If a commit cannot be measured, or its command ends with another status, its neighbours are
tried. The result is UNDECIDED if both ends measure the same, or if only unmeasurable commits are
left.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import (
    EXIT_AGREES,
    EXIT_DIFFERS,
    InvalidArgument,
    Undecided,
    UnreadableFile,
)
from degarble.harness.history.query import HistoryQuery, histories
from degarble.harness.history.records import BUDGETS, read_check, values_of
from degarble.harness.history.store import HistoryStore
from degarble.harness.report.number_text import number
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

_SHORT = 12
_SAME = 1e-9  # relative: two ends that measure the same


@dataclass(frozen=True)
class BisectSearch:
    """What is searched for, and where."""

    command: tuple[str, ...]
    repository: Path = Path()
    component: str | None = None
    result: str = "check.json"
    good: str | None = None
    bad: str | None = None
    store: str | None = None


@dataclass(frozen=True)
class BisectResult:
    """The commit, its subject line, and the measurements on the way."""

    commit: str
    title: str
    before: float
    after: float
    component: str | None
    measured: tuple[tuple[str, float | None], ...]

    @property
    def sentence(self) -> str:
        """Return one line that names the commit."""
        what = self.component or "the command's status"
        return (
            f"{self.commit[:_SHORT]} moved {what}: {number(self.before)} -> "
            f"{number(self.after)}. {self.title}"
        )

    def document(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "verdict": Verdict.DIFFERS,
            "commit": self.commit,
            "title": self.title,
            "component": self.component,
            "before": self.before,
            "after": self.after,
            "measured": [{"commit": name, "value": value} for name, value in self.measured],
        }


def bisected(
    search: BisectSearch, report: Callable[[str], None] = lambda _line: None
) -> BisectResult:
    """Return the first commit on the bad side."""
    inside = Path(search.result)
    if inside.is_absolute() or ".." in inside.parts or not inside.name:
        raise InvalidArgument(
            "--result", search.result, "a file inside of the work tree", "Name it as CMD sees it."
        )
    good, bad = _ends(search)
    commits = _between(search.repository, good, bad)
    work = _Work(search, report)
    first, last = work.value(commits[0]), work.value(commits[-1])
    if first is None or last is None:
        at = commits[0] if first is None else commits[-1]
        raise Undecided(
            f"value at {at[:_SHORT]}", None, "a check at both ends of the range",
            f"Run the command there by hand: it must write {search.result}.",
        )  # fmt: skip
    if abs(first - last) <= _SAME * max(abs(first), abs(last)):
        raise Undecided(
            f"{search.component or 'status'} at both ends", number(first), "two numbers",
            "Widen the range: nothing moved between these commits.",
        )  # fmt: skip
    # Invariant of the bisection: `low` is good, `high` is bad.
    low, high = 0, len(commits) - 1  # known good, known bad
    while high - low > 1:
        middle = _next(work, commits, low, high)
        if middle is None:
            names = ", ".join(commit[:_SHORT] for commit in commits[low + 1 : high + 1])
            raise Undecided(
                "commits left", names, "one commit that can be measured",
                "None of those between could be measured: one of these it is.",
            )  # fmt: skip
        value = work.known[commits[middle]]
        assert value is not None, "_next returns measured commits"
        if abs(value - first) <= abs(value - last):
            low = middle
        else:
            high = middle
    before, after = work.known[commits[low]], work.known[commits[high]]
    assert before is not None, "measured"
    assert after is not None, "measured"
    title = _git(search.repository, "log", "-1", "--format=%s", commits[high])
    return BisectResult(
        commits[high], title, before, after, search.component, tuple(work.known.items())
    )


def _next(work: _Work, commits: list[str], low: int, high: int) -> int | None:
    """Return the commit nearest to the middle that can be measured."""
    middle = (low + high) // 2
    for at in sorted(range(low + 1, high), key=lambda each: abs(each - middle)):
        if work.value(commits[at]) is not None:
            return at
    return None


@dataclass
class _Work:
    """Measures commits, each once."""

    search: BisectSearch
    report: Callable[[str], None]
    known: dict[str, float | None] = field(default_factory=dict)

    def value(self, commit: str) -> float | None:
        if commit not in self.known:
            self.known[commit] = found = self._measured(commit)
            said = "cannot be measured" if found is None else number(found)
            self.report(f"{commit[:_SHORT]}: {said}")
        return self.known[commit]

    def _measured(self, commit: str) -> float | None:
        repository = self.search.repository
        with tempfile.TemporaryDirectory(prefix="degarble-bisect-") as folder:
            tree = Path(folder) / "tree"
            _git(repository, "worktree", "add", "--detach", "--quiet", str(tree), commit)
            try:
                return self._run_in(tree, commit)
            finally:
                _git(repository, "worktree", "remove", "--force", str(tree))

    def _run_in(self, tree: Path, commit: str) -> float | None:
        environment = {**os.environ, "DEGARBLE_COMMIT": commit}
        # Trap: a result that is part of a commit would speak for a command that wrote none.
        (tree / self.search.result).unlink(missing_ok=True)
        try:
            done = subprocess.run(  # noqa: S603  the user's own command
                self.search.command, cwd=tree, env=environment, check=False, capture_output=True
            )
        except OSError as error:
            raise InvalidArgument(
                "CMD", " ".join(self.search.command), "a command that can be run",
                f"It says: {error.strerror}. Give it after --, as in a shell.",
            ) from error  # fmt: skip
        if done.returncode not in (EXIT_AGREES, EXIT_DIFFERS):
            return None
        if self.search.component is None:
            return float(done.returncode)
        try:
            values = values_of(read_check(tree / self.search.result))
        except (UnreadableFile, InvalidArgument):
            return None
        return values[BUDGETS.name].get(self.search.component)


def _ends(search: BisectSearch) -> tuple[str, str]:
    """Return the two commits: as given, or those of the latest change in the store."""
    good, bad = search.good, search.bad
    if search.store is not None and (good is None or bad is None):
        with HistoryStore(search.store) as store:
            found = histories(store, HistoryQuery(search.component, measure=BUDGETS.name))
        moves = [move for history in found for move in history.moves if move.good != move.bad]
        if not moves:
            raise Undecided(
                "changes in the store", 0, "one whose commits differ",
                "Give --good REV and --bad REV.",
            )  # fmt: skip
        latest = max(moves, key=lambda change: change.first)
        good, bad = good or latest.good, bad or latest.bad
    if not good or not bad:
        raise InvalidArgument(
            "--good and --bad", [good, bad], "two commits, or a store that saw the change",
            "Pass --good REV and --bad REV, or --store URL.",
        )  # fmt: skip
    return _commit(search.repository, good), _commit(search.repository, bad)


def _commit(repository: Path, name: str) -> str:
    return _git(repository, "rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}")


def _between(repository: Path, good: str, bad: str) -> list[str]:
    """Return the commits from good to bad, both included, along first parents."""
    listed = _git(repository, "rev-list", "--first-parent", "--reverse", f"{good}..{bad}")
    ahead = listed.splitlines()
    if not ahead or _git(repository, "merge-base", good, bad) != good:
        raise InvalidArgument(
            "--good and --bad", [good[:_SHORT], bad[:_SHORT]], "a commit and a later one",
            "Swap them, or take their common ancestor as --good.",
        )  # fmt: skip
    return [good, *ahead]


def _git(repository: Path, *words: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603  fixed words, and revisions that cannot be options
            ["git", "-C", str(repository), *words],  # noqa: S607  git is found on PATH
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise InvalidArgument("git", "not found", "git on PATH", "Install git.") from error
    except subprocess.CalledProcessError as error:
        line = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise InvalidArgument(
            f"git {words[0]}", line, "a repository that knows these commits",
            "Check --repository, --good and --bad.",
        ) from error  # fmt: skip
    return done.stdout.strip()
