from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from degarble.harness.report.number_text import number, share, span, visible


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "-0"),
        (1.0, "1.000"),
        (0.09062, "0.09062"),
        (0.000101, "0.0001010"),
        (0.00001, "1.000e-05"),
        (1234.5678, "1,235"),
        (999999.4, "999,999"),
        (1e6, "1.000e+06"),
        (-2.5, "-2.500"),
        (12345678, "12,345,678"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@given(st.floats(-1e300, 1e300, allow_subnormal=False))
def test_numbers_keep_four_digits(value: float) -> None:
    read = float(number(value).replace(",", ""))
    assert math.isclose(read, value, rel_tol=6e-4)


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "100.0 %"), (0.0, "0.0 %"), (0.5, "50.0 %"), (1 - 1e-6, "99.9999 %")],
)
def test_shares(value: float, text: str) -> None:
    assert share(value) == text


@given(st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_only_all_is_100_percent_and_only_none_is_0_percent(value: float) -> None:
    text = share(value)
    assert text not in ("100.0 %", "0.0 %")
    assert not text.startswith("100")


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([0, 1, 2, 3], "0 to 3 (all)"),
        ([2], "2"),
        ([1, 2], "1 to 2"),
        ([0, 3], "2 between 0 and 3"),
    ],
)
def test_spans(indices: list[int], text: str) -> None:
    assert span(indices, 4) == text


def test_what_has_no_look_of_its_own_is_written_as_an_escape() -> None:
    assert visible("a\x1bb\u202ec\ud800d\x00e\u200b") == (
        "a\\u001bb\\u202ec\\ud800d\\u0000e\\u200b"
    )
    assert visible("tab\tand\nline, ≠ and 数 stay") == "tab\tand\nline, ≠ and 数 stay"


@given(st.text(st.characters()))
def test_visible_text_can_be_sent_anywhere(text: str) -> None:
    shown = visible(text)
    assert all(c.isprintable() or c in "\n\t" or c.isspace() for c in shown)
    shown.encode("utf-8")
    assert visible(shown) == shown
