"""The export: every number of the store, and no half file."""

from pathlib import Path

import pytest

from degarble.harness.base.errors import UnwritablePath
from degarble.harness.history.store import COLUMNS, HistoryStore, write_parquet
from degarble.suites.history.history_cases import W2, budget, history

pytestmark = pytest.mark.needs("pyarrow")


def test_every_number_is_a_row(tmp_path: Path, seed: int) -> None:
    import pandas as pd  # noqa: PLC0415

    runs = history(4, 2, seed)
    path = tmp_path / "h.parquet"
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        for each in runs:
            store.add(each)
        assert write_parquet(store, path) == 12
    found = pd.read_parquet(path)
    assert tuple(found.columns) == COLUMNS
    kept = found[found.place == W2].sort_values("night")
    assert kept["value"].tolist() == [budget(each) for each in runs]
    assert kept.run.tolist() == [each.id for each in runs]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["h.parquet", "h.sqlite"]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, seed: int) -> None:
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        store.add(history(1, 1, seed)[0])
        (tmp_path / "h.parquet").mkdir()
        with pytest.raises(UnwritablePath):
            write_parquet(store, tmp_path / "h.parquet")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["h.parquet", "h.sqlite"]
