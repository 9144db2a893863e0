"""The bench of peers at a small size: its targets but the time are met there as well."""

from __future__ import annotations

from degarble.suites.bench import bench_peers as bench
from degarble.suites.bench.timing import Settings
from degarble.suites.engine.diagnose.judge.decoder_toy import FAULTS, toy


def test_scenarios_of_the_toy_are_distinguished() -> None:
    made = toy(layers=9, width=64, wide=128, tokens=32)
    found = bench.scenarios(made)
    assert [each.name for each in found] == ["clean", *FAULTS]
    assert all(each.right for each in found)
    wrong = found[0]._replace(expected="M10.nibble_order")
    assert not wrong.right


def test_gates_miss_what_they_are_known_to_miss() -> None:
    settings = Settings(size=16, rounds=1, threads=1, peers=False)
    section = bench.run(settings)
    by_claim = {target.claim: target for target in section.targets}
    assert all(by_claim[claim].met for claim in by_claim if not claim.endswith(", s"))
    gates = {row[0]: row[1:] for row in section.tables[1].rows}
    assert gates["judge (this project)"] == ("yes", "0")
    assert int(gates["cosine with BF16 > 0.97"][1]) > 4
