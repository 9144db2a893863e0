"""The bench of the history at a small size: what it plants is what it finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.suites.bench import bench_history as bench

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import pytest
    from numpy.typing import NDArray


def test_the_planted_shift_is_reported_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_AT", 60)
    monkeypatch.setattr(bench, "_SHIFTED", "layers.0.component 07")
    url = str(tmp_path / "h.sqlite")
    bench.filled(url, 70, 40)
    page, moves = bench.asked(url)
    assert moves == [("layers.0.component 07", "2021-03-02")]
    assert "layers.0.component 07" in page


def test_more_runs_a_night_find_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LAYERS", 5)
    one, four = bench.found_within(1, (2, 8)), bench.found_within(4, (2, 8))
    assert four[0] > 0.9 > one[0]
    assert one[1] > 0.9


def test_alarms_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_HEALTHY", 1)

    def stepping(rng: np.random.Generator) -> NDArray[np.float64]:
        values = rng.standard_normal((100, 10))
        values[50:] += 20
        return values

    assert bench.alarms_a_year(stepping) == 10 / bench.YEARS
