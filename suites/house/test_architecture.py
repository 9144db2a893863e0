"""The picture and the walks of docs/architecture.md are those of the sources."""

from __future__ import annotations

import pytest

from degarble.suites.house import walks
from degarble.suites.house.floors import UNITS
from degarble.suites.house.pages import architecture
from degarble.suites.house.walks import Record, Step, breaks, files_of, is_class

# --------------------------------------------------------------------------------------------------
# The picture and the walks of docs/architecture.md are those of the sources.

WRITE = "write them anew: python -m degarble.suites.house.pages.architecture"


@pytest.mark.slow
def test_the_picture_is_that_of_the_imports() -> None:
    assert architecture.PICTURE.read_text(encoding="utf-8") == architecture.draw(), WRITE


def test_the_page_has_the_walks_as_they_are() -> None:
    page = architecture.PAGE.read_text(encoding="utf-8")
    assert architecture.with_tables(page) == page, WRITE
    for name in architecture.WALKS:
        assert f"<!-- walk: {name} -->" in page


def test_every_unit_is_drawn() -> None:
    assert set(architecture.ROOMS) == set(UNITS) - {"conftest"}


def test_imports_that_follow_from_others_are_not_drawn() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set[str]()}
    assert architecture.reduced(graph) == {("a", "b"), ("b", "c")}


# --------------------------------------------------------------------------------------------------
# The walks of the house lead through the sources as they are.

WALKS = {
    "capture to page": walks.CAPTURE_TO_PAGE,
    "checkpoint to shard": walks.CHECKPOINT_TO_SHARD,
    "call to launch": walks.CALL_TO_LAUNCH,
}


@pytest.mark.parametrize("name", WALKS)
def test_each_step_is_called_by_one_above_it(name: str) -> None:
    assert list(breaks(WALKS[name])) == []


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_is_short(name: str) -> None:
    assert len(files_of(WALKS[name])) <= walks.MOST_FILES


def test_the_records_of_one_number_exist() -> None:
    assert [record for record in walks.RECORDS if not is_class(record)] == []


def test_a_wrong_walk_is_found() -> None:
    first, second = walks.CAPTURE_TO_PAGE[:2]
    assert list(breaks((first, second._replace(function="CheckRun.missing")))) == [
        "harness/commands/check/check.py has no function CheckRun.missing"
    ]
    absent = Step("harness/nowhere.py", "check", "")
    assert list(breaks((first, absent))) == ["harness/nowhere.py has no function check"]
    skipping = (second, Step("reports/page_html.py", "page_html", ""))
    assert list(breaks(skipping)) == ["no step before it calls page_html of reports/page_html.py"]
    assert not is_class(Record("harness/report/blocks.py", "replay_panel"))
    assert not is_class(Record("harness/nowhere.py", "JudgedCell"))
