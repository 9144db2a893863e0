"""What the museum says, word for word, with every kind of miss in it."""

from __future__ import annotations

import math

from degarble.harness.museum.museum import Museum, report_lines
from degarble.harness.museum.plants import CauseAnswer, PlaceAnswer, PlantOutcome, RepeatedRun
from degarble.harness.museum.scores import HealthyRun
from degarble.harness.report.verdict import Verdict
from degarble.suites.snapshots import assert_as_kept

W2 = "layers.1.ffn.experts.w2"
CASE = "v4 nvfp4-full, 133+17 tokens, seed 1, official"


def museum() -> Museum:
    right = PlantOutcome(
        "M10.nibble_order", W2, "swapping the two nibbles", CASE, 812.0, PlaceAnswer.EXACT,
        CauseAnswer.FIRST, "M10.nibble_order", CauseAnswer.UNKNOWN, (W2,), (W2,),
    )  # fmt: skip
    nowhere = PlantOutcome(
        "M06.up", W2, "rounding scales up", CASE, 4.5, truth=(W2,), sentence="not a word"
    )
    wrong = PlantOutcome(
        "M01.inverse", W2, "dividing by the scale", CASE, 33.0, PlaceAnswer.ALSO_ELSEWHERE,
        CauseAnswer.WRONG, "M02.missing", None, ("head", W2), (W2,), "a \x1b[31mhostile sentence",
    )  # fmt: skip
    edge = PlantOutcome(
        "M34.stale", "layers.1.attn.attend", "reading stale rows", CASE, math.inf,
        PlaceAnswer.EXACT, CauseAnswer.SAME, "M36.stale", None, ("layers.1.attn.kv_write",),
        ("layers.1.attn.kv_write",),
    )  # fmt: skip
    healthy = (HealthyRun("v4"), HealthyRun("v32", ("norm: 1.2 of its budget",)))
    outcomes = (right, nowhere, wrong, edge)
    race = RepeatedRun("M37.tile", W2, "a lost tile", CASE, Verdict.UNSTABLE, (W2,))
    missed = RepeatedRun("M37.tile", W2, "a lost tile", CASE, Verdict.UNSTABLE, ("head",))
    twice = (race, missed, RepeatedRun("", "", "", CASE, Verdict.AGREES))
    return Museum(outcomes, healthy, ("M19.nvfp4",), 61.4, twice)


def test_it_is_as_kept() -> None:
    assert_as_kept("museum/museum.txt", "\n".join(report_lines(museum())) + "\n")


def test_misses_and_alarms_decide() -> None:
    made = museum()
    assert made.missed == ("M01.inverse", "M06.up", "M37.tile")
    assert made.verdict is Verdict.DIFFERS
    clean = Museum(made.outcomes[:1], made.healthy[:1], ())
    assert clean.verdict is Verdict.AGREES
    assert Museum(made.outcomes[:1], made.healthy, ()).verdict is Verdict.DIFFERS
