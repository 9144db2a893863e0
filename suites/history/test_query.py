"""Which histories a question is about, and what it refuses by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import UnknownName
from degarble.harness.history.query import HistoryQuery, histories
from degarble.harness.history.store import HistoryStore
from degarble.suites.history.history_cases import W2, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LAYERS = 300


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HistoryStore]:
    """Two checkpoints, one of them with many components."""
    with HistoryStore(str(tmp_path / "history.sqlite"), create=True) as opened:
        opened.add(run(0, {f"layers.{layer}.attn.wq_a": 0.25 for layer in range(LAYERS)}))
        opened.add(run(0, {W2: 0.5}, subject="V4-Pro"))
        yield opened


def test_a_pattern_leaves_what_fits_of_every_history(store: HistoryStore) -> None:
    found = histories(store, HistoryQuery(place="layers.23.*"))
    places = {each.stream.subject: [n.places for _, n in each.measured] for each in found}
    assert places == {"tiny": [("layers.23.attn.wq_a",)], "V4-Pro": [(W2,)]}
    [only] = histories(store, HistoryQuery(place="layers.23.*", subject="tiny"))
    assert only.stream.subject == "tiny"


@pytest.mark.parametrize(
    ("question", "remedy"),
    [
        (HistoryQuery(place="xyz*"), r"and 201 more\.$"),  # of 301 components
        (HistoryQuery(place="layers.23.attn.wq_b"), r"Did you mean layers\.23\.attn\.wq_a"),
        (HistoryQuery(subject="V4-Pr"), r"V4-Pro"),
        (HistoryQuery(machine="B300"), r"CPU: a processor"),
        (HistoryQuery(measure="budget"), r"budgets"),
    ],
)
def test_what_the_store_does_not_have_is_refused_by_name(
    store: HistoryStore, question: HistoryQuery, remedy: str
) -> None:
    with pytest.raises(UnknownName, match=remedy):
        histories(store, question)
