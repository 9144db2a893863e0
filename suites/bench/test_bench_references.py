"""The bench of decoding at a small size: every arm of ours runs and names tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.suites.bench import bench_references as bench
from degarble.suites.bench.figures import measure
from degarble.suites.bench.timing import Settings

if TYPE_CHECKING:
    import torch


@pytest.mark.slow
def test_it_measures_without_peers() -> None:
    section = measure("references", Settings(size=64, rounds=1, threads=1, peers=False))
    (table,) = section.tables
    ours = ["degarble, BF16", "degarble, float32", "degarble generate, BF16"]
    assert [row[0] for row in table.rows] == ours
    assert all(float(row[1]) > 1 for row in table.rows)
    assert section.targets == ()


def test_an_arm_continues_its_own_text() -> None:
    given = []

    def step(ids: torch.Tensor) -> torch.Tensor:
        given.append(ids.tolist())
        return ids[-1] + 1

    arm = bench.Arm(step)
    arm()
    assert len(given) == 1 + bench.TOKENS
    assert given[1:3] == [[int(bench.PROMPT[-1]) + 1], [int(bench.PROMPT[-1]) + 2]]
    assert arm.named == [int(bench.PROMPT[-1]) + n for n in range(1, bench.TOKENS + 2)]
