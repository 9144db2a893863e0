"""Runs for the suites of the history."""

from __future__ import annotations

from datetime import date, timedelta
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.history.records import HistoryRun
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

FIRST = date(2026, 1, 1)
W2 = "layers.23.ffn.experts.w2"
PLACES = ("layers.0.attn.wq_a", W2, "head")


def night(number: int) -> str:
    """The date of a night."""
    return str(FIRST + timedelta(number))


def run(number: int, budgets: Mapping[str, float] | None = None, **changed: object) -> HistoryRun:
    """One run of one night."""
    given = {
        "subject": "tiny",
        "night": night(number),
        "machine": "CPU: a processor",
        "verdict": Verdict.AGREES,
        "commit": f"{number:08x}" + "0" * 32,
        "started": f"{night(number)}T01:00:00+00:00",
        "facts": {"checkpoint": "c0ffee", "torch": "2.13.0"},
        "values": {"budgets": dict(budgets or dict.fromkeys(PLACES, 0.25))},
    }
    return HistoryRun(**(given | changed))  # type: ignore[arg-type]


def budget(of: HistoryRun) -> float:
    """What a run measured of the component that moves."""
    return of.values["budgets"][W2]


def history(nights: int, moved_from: int, seed: int) -> list[HistoryRun]:
    """Nights of small noise, in which one component moves."""
    rng = np.random.default_rng(seed)
    runs = []
    for number in range(nights):
        values = dict(zip(PLACES, 0.25 + 0.02 * rng.standard_normal(len(PLACES)), strict=True))
        values[W2] += 0.4 if number >= moved_from else 0.0
        facts = {"checkpoint": "c0ffee", "torch": "2.13.0" if number < moved_from else "2.14.0"}
        runs.append(run(number, {k: float(v) for k, v in values.items()}, facts=facts))
    return runs
