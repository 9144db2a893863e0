from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

from degarble.suites.mutation.mutants import Mutant, drawn, mutants_of, mutated
from degarble.suites.mutation.plan import Reach, Selection, Sources
from degarble.suites.mutation.results import compare, table, wilson

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).resolve().parents[2] / ".types"
MODULE = """
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    WIDTH = 1 + 2

LIMIT = 7


def over(value: int | None, *, spare: int = 0) -> bool:
    return value is not None and value > LIMIT - spare


@cache
def table() -> list[int]:
    return [1, 2, 3]


def endless(count: int) -> int:
    while count > 0:
        count -= 1
    return count


def unreached() -> int:
    return 1 + 1
"""
OTHER = """
def alone() -> int:
    return 3 * 3
"""
SUITE = """
import subprocess
import sys

import pytest
from toy.module import endless, over, table


@pytest.fixture(scope="module")
def rows():
    return [over(value) for value in range(9)]


def test_rows(rows):
    assert len(rows) == 9


def test_over(rows):
    assert rows[8]


@pytest.mark.parametrize("index", [0, 1])
def test_table(index):
    assert table()[index] == index + 1


def test_endless():
    assert endless(3) == 0


def test_process():
    program = "from toy.other import alone; assert alone() == 9"
    assert not subprocess.run([sys.executable, "-c", program], check=False).returncode
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A tree of one module and one suite, as a worker finds it."""
    for name, text in {
        "toy/module.py": MODULE,
        "toy/other.py": OTHER,
        "toy/test_toy.py": SUITE,
    }.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for folder in ("tmp", "cache"):
        (tmp_path / folder).mkdir()
    return tmp_path


def found(toy: Path) -> dict[tuple[str, str], list[Mutant]]:
    mutants: dict[tuple[str, str], list[Mutant]] = {}
    for mutant in mutants_of(toy / "tree", "toy/module.py") + mutants_of(
        toy / "tree", "toy/other.py"
    ):
        mutants.setdefault((mutant.scope, mutant.operator), []).append(mutant)
    return mutants


def test_only_what_runs_is_mutated(toy: Path) -> None:
    pytest.importorskip("cosmic_ray", reason="make setup EXTRAS=dev,mutation")
    mutants = found(toy)
    texts = {mutant.text for several in mutants.values() for mutant in several}
    assert "WIDTH = 1 + 2" not in texts  # for a type checker alone
    assert "@cache" not in texts  # without it nothing is different
    assert ("over", "ReplaceBinaryOperator_BitOr_BitAnd") not in mutants  # an annotation
    assert len(mutants["", "NumberReplacer"]) == 4  # LIMIT and a default, one more and one less
    assert [m.text for m in mutants["over", "ReplaceComparisonOperator_Gt_GtE"]] == [
        "return value is not None and value > LIMIT - spare"
    ]


def test_a_loop_under_any_name_of_the_compiler_is_known(tmp_path: Path) -> None:
    pytest.importorskip("cosmic_ray", reason="make setup EXTRAS=dev,mutation")
    for decorator in ("@compiled", "@_compiled_ieee", "@loops.compiled_with(boundscheck=True)"):
        (tmp_path / "a.py").write_text(
            f"{decorator}\ndef loop(a):\n    return a + 1\n", encoding="utf-8"
        )
        assert {mutant.compiled for mutant in mutants_of(tmp_path, "a.py")} == {"loop"}


def test_a_sample_stays_where_other_functions_change(toy: Path) -> None:
    pytest.importorskip("cosmic_ray", reason="make setup EXTRAS=dev,mutation")
    path = toy / "tree" / "toy" / "module.py"
    before = [m.key for m in drawn(mutants_of(toy / "tree", "toy/module.py"), 3)]
    path.write_text(MODULE.replace("LIMIT = 7", "LIMIT = 7\nMORE = -5"), encoding="utf-8")
    after = [m.key for m in drawn(mutants_of(toy / "tree", "toy/module.py"), 3)]
    assert len(after) == len(before) + 3
    assert [key for key in after if key in before] == before
    assert before != [m.key for m in drawn(mutants_of(toy / "tree", "toy/module.py"), 4)]


def test_a_mutant_that_means_the_same_is_none(toy: Path) -> None:
    pytest.importorskip("cosmic_ray", reason="make setup EXTRAS=dev,mutation")
    (minus,) = found(toy)["over", "ReplaceBinaryOperator_Sub_Add"]
    text = mutated(MODULE, minus)
    assert text == MODULE.replace("LIMIT - spare", "LIMIT + spare")
    assert mutated(MODULE.replace("LIMIT - spare", "LIMIT"), minus) is None


class Asked:
    """A worker on the toy."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path[1:]])}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "degarble.suites.mutation.worker", str(folder)],
            cwd=folder / "tree",
            env={**environment, "PYTHONPATH": f"{folder / 'tree'}:{environment['PYTHONPATH']}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture
def ask(toy: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    asked = Asked(toy)
    yield asked
    asked.process.communicate()


def test_a_worker_records_who_reaches_a_line_and_tries_mutants(
    toy: Path, ask: Callable[..., dict[str, Any]]
) -> None:
    pytest.importorskip("cosmic_ray", reason="make setup EXTRAS=dev,mutation")
    answer = ask(
        do="record", file="toy/test_toy.py", trace=["toy/module.py", "toy/other.py"], part=[0, 1]
    )
    reach = Reach()
    reach.add("toy/test_toy.py", answer["map"])
    assert reach.failed == []
    selection = Selection(Sources(toy / "tree"), reach, ["toy/module.py"])
    names = toy / "names.json"
    names.write_text(json.dumps(reach.names), encoding="utf-8")
    ask(do="know", path=str(names))

    def tried(scope: str, operator: str, index: int = 0) -> tuple[list[str], str, str]:
        mutant = found(toy)[scope, operator][index]
        tests = selection.tests(mutant)
        answer = ask(
            do="trial", mutant=asdict(mutant), stale=[], options=["-x"], collecting=60.0,
            tests=[[test.name, 1.0, 600.0] for test in tests],
        )  # fmt: skip
        chosen = sorted(test.name.partition("::")[2] for test in tests)
        killer = answer["failed"][0][0].partition("::")[2] if answer.get("failed") else ""
        return chosen, answer["outcome"], killer

    # The fixture ran `over` for the first test, and `table` is cached after its first use.
    rows, rest = ["test_over", "test_rows"], ["test_endless", "test_table[0]", "test_table[1]"]
    assert tried("over", "ReplaceComparisonOperator_Gt_LtE") == (rows, "killed", "test_over")
    assert tried("over", "ReplaceComparisonOperator_Gt_GtE") == (rows, "survived", "")
    assert tried("table", "NumberReplacer", 2) == (rest[1:], "killed", "test_table[1]")
    assert tried("endless", "ReplaceComparisonOperator_Gt_GtE")[:2] == (rest[:1], "killed")
    assert tried("endless", "NumberReplacer", 3)[:2] == (rest[:1], "timed out")
    assert tried("alone", "NumberReplacer") == (["test_process"], "killed", "test_process")
    assert tried("unreached", "NumberReplacer") == ([], "not reached", "")
    assert tried("", "NumberReplacer", 1) == (
        sorted([*rows, *rest, "test_process"]),
        "survived",
        "",
    )
    assert (toy / "tree" / "toy" / "module.py").read_text(encoding="utf-8") == MODULE


def test_an_interval_is_wilsons() -> None:
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def result(key: str, outcome: str, test: str = "") -> dict[str, Any]:
    return {
        "key": key, "room": "formats", "file": "a.py", "line": 1, "operator": "AddNot",
        "occurrence": 0, "text": "if a:", "outcome": outcome, "test": test,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("after", "same"),
    [
        (["killed", "timed out", "survived"], True),
        (["timed out", "killed", "killed"], True),
        (["killed", "survived", "survived"], False),
        (["not reached", "killed", "survived"], False),
    ],
)
def test_a_lost_kill_is_found(tmp_path: Path, after: list[str], same: bool) -> None:
    paths = []
    for name, outcomes in {"before": ["killed", "timed out", "survived"], "after": after}.items():
        mutants = [result(str(key), outcome) for key, outcome in enumerate(outcomes)]
        paths.append(tmp_path / name)
        paths[-1].write_text(json.dumps({"mutants": mutants}), encoding="utf-8")
    text, kept = compare(*paths)
    assert kept is same
    assert ("lost: a.py:1" in text) is not same


def test_a_table_counts_what_was_judged() -> None:
    outcomes = ("killed", "killed", "timed out", "survived", "not reached", "broken")
    lines = table([result(o, o) for o in outcomes], {"formats": 90}).splitlines()
    assert lines[-1] == "| formats | 90 | 6 | 2 | 1 | 1 | 1 | 60.0 % | 23.1 % to 88.2 % |"


def test_sources_follow_imports_and_callers(tmp_path: Path) -> None:
    texts = {
        "base.py": "BITS = 4\n",
        "loops.py": "from degarble.base import BITS\ndef inner(): ...\ndef outer(): inner()\n",
        "user.py": "def use():\n    from degarble.loops import outer\n    return outer()\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(dedent(text), encoding="utf-8")
    sources = Sources(tmp_path)
    assert sources.closure("user.py") == {"user.py", "loops.py", "base.py"}
    assert sources.callers("loops.py", "inner") == {"inner", "outer"}
    assert sources.mentions("user.py", {"outer"}) == {3}
    assert sources.defined("base.py", 1) == {"BITS"}
