"""The picture and the walks of docs/architecture.md are those of the sources."""

from __future__ import annotations

from degarble.suites.house import architecture
from degarble.suites.house.floors import UNITS

WRITE = "write them anew: python -m degarble.suites.house.architecture"


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
