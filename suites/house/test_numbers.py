"""House numbers hold for every file; what exceeds them has a reason in the table."""

from __future__ import annotations

from functools import cache

import pytest

from degarble.suites.house.numbers import EXCEPTIONS, Offence, accepted, offences
from degarble.suites.house.repository import modules, shown, tree


@cache
def found() -> tuple[Offence, ...]:
    return tuple(
        offence
        for path in modules()
        for offence in offences(shown(path), path.read_text(encoding="utf-8"), tree(path))
    )


def test_house_numbers_hold() -> None:
    over = [str(offence) for offence in found() if not accepted(offence)]
    assert not over, "\n" + "\n".join(over)


def test_every_exception_is_still_needed() -> None:
    needed = {(offence.place, offence.what) for offence in found()}
    assert set(EXCEPTIONS) <= needed
    assert all(reason for _, reason in EXCEPTIONS.values())


DOC = '"""What it owns."""\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (DOC + "\n" * 1000, "planted.py: file lines 1001, limit 1000"),
        (
            DOC + "def f():\n" + "    x = 1\n" * 60,
            "planted.py::f: function lines 61, limit 60",
        ),
        (
            DOC + "class C:\n def f(self, a, b, c, *, d, e, f, g):\n  pass\n",
            "planted.py::C.f: parameters 7, limit 6",
        ),
        ("x = 1\n", "planted.py: docstring missing 0, limit 1"),
        ('"""A\n' + "b\n" * 40 + '"""\n', "planted.py: docstring lines 41, limit 40"),
        (
            DOC + 'def f():\n    """A\n' + "    b\n" * 20 + '    """\n',
            "planted.py::f: docstring lines 21, limit 20",
        ),
        (
            DOC + "@cute.kernel\ndef f():\n" + "    x = 1\n" * 200,
            "planted.py::f: function lines 201, limit 200",
        ),
    ],
)
def test_planted_offence_is_found(text: str, expected: str) -> None:
    assert [str(offence) for offence in offences("planted.py", text)] == [expected]


def test_inner_functions_are_judged_by_themselves() -> None:
    body = "        x = 1\n" * 40
    text = DOC + "def f():\n    def g():\n" + body + "    def h():\n" + body + "    return g, h\n"
    assert list(offences("planted.py", text)) == []
