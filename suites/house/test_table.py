from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.suites.house import table
from degarble.suites.house.repository import ROOT, modules

if TYPE_CHECKING:
    from pathlib import Path

TEXT = '''"""One
two."""

import a
from b import c  # noqa: F401

x = 1  # why


class Public:
    """Owns x."""

    # another reason


class _Private:
    pass


@c
def test_x() -> None:
    a("degarble.suites.x")
'''


def test_each_figure_counts_what_it_says() -> None:
    assert table.lines_of(TEXT) == 22
    assert table.head_lines(TEXT) == 4
    assert table.comment_lines(TEXT) == 2
    assert table.public_classes(TEXT) == ["Public"]
    assert table.lines_in_tests(TEXT) == 3
    assert table.formulas(TEXT) == 1
    assert table.names_test_tree(TEXT)
    assert not table.names_test_tree('"""suites/x.py"""\n')


def test_no_two_classes_of_the_product_have_one_name() -> None:
    texts = [path.read_text() for path in modules() if table.is_product(path)]
    assert table.repeated_classes(texts) == []
    assert table.repeated_classes([TEXT, TEXT]) == ["Public"]


def test_no_file_has_an_old_formula() -> None:
    assert table.formulas_by_file(modules()) == {}
    assert all(table.formulas((ROOT / file).read_text()) for file in table.FORMULAS_EXEMPT)


@pytest.mark.parametrize(
    "text",
    [
        '"""Kept honest by suites/a/test_b.py."""',
        '"""Reads bytes. Kept\nhonest by test_b.py."""',
        "# Adds rows. Refuses\n# nothing.",
    ],
)
def test_a_planted_formula_is_counted(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "shown", lambda path: path.name)
    (tmp_path / "planted.py").write_text(text)
    (tmp_path / "plain.py").write_text('"""Add rows. Owners are kept."""')
    planted = table.formulas_by_file(sorted(tmp_path.iterdir()))
    assert planted == {"planted.py": 1}
