from __future__ import annotations

from degarble.suites.house import table

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
