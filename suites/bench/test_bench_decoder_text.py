"""The bench of what is known through kernels: when a share is out of noise, and a row."""

from __future__ import annotations

from degarble.references.tiny import figures
from degarble.suites.bench import bench_decoder_text as bench


def found(right: int, asked: int = 100) -> bench.Found:
    score = figures.ProbeScore()
    score.asked["sum"], score.right["sum"] = asked, right
    score.tokens = 1
    return bench.Found("any", score, (3, 4))


def test_shares_are_apart_where_neither_lies_in_the_others_interval() -> None:
    assert found(90).apart_from(found(50)) == ["sums"]
    assert found(90).apart_from(found(86)) == []
    assert found(2, 2).apart_from(found(60)) == [], "two answers say little"


def test_a_row_shows_share_interval_and_number() -> None:
    row = found(90).row()
    assert "90.0 % [82.6, 94.5] of 100" in row
    assert row.endswith("| 75.0 % of 4 |")
