"""The bench of captures at a small size: every arm runs, and captures what it says."""

from __future__ import annotations

from degarble.suites.bench import bench_capture as bench
from degarble.suites.bench.timing import Settings


def test_it_measures_every_arm() -> None:
    section = bench.run(Settings(size=16, rounds=2, threads=1, peers=False))
    (table,) = section.tables
    assert [row[0] for row in table.rows] == list(bench.ARMS)
    (target,) = section.targets
    assert (target.wanted, target.at_least) == (1.2, False)


def test_arms_write_what_they_say() -> None:
    found = bench.turns(Settings(size=16, rounds=1, threads=1, peers=False))
    sizes = {name: turns[0].nbytes for name, turns in found.items()}
    plain, captured, told, by_hand = sizes.values()
    assert plain == told == 0
    assert by_hand > 512 * 16 * 4 * bench.LAYERS
    # Outputs, and the inputs that no module put out: sums and products between modules.
    assert by_hand < captured < 2 * by_hand
