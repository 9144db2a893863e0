"""The bench of checks: captures have the status that they are timed for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.suites.bench import bench_check as bench

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_arms_end_as_they_should(tmp_path: Path) -> None:
    for arm in bench.arms_in(tmp_path).values():
        assert bench.seconds_of(arm, tmp_path) > 0
