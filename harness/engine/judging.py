"""All outputs of a component, judged alike: numbers, codes with their scales, and choices.

Owns the one entry for whoever replays a call:
`judge_outputs(Call.of(twin, component, inputs), outputs)`.
Numbers are judged by their budget, codes and scales by budget_codes, chosen rows and experts by
budget_choices. What has no derivation is UNDECIDED by name; it never passes for healthy. An output
that is missing, or has another shape, differs beyond every budget.

Refuses nothing that a candidate may put out. Kept honest by suites/engine/test_judging.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from degarble.harness.engine.budget import Finding, judge
from degarble.harness.engine.budget_roles import budgets_of
from degarble.harness.errors import Undecided
from degarble.harness.record.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.budget_call import Call
    from degarble.harness.engine.comparison import Comparison, Places


@dataclass(frozen=True)
class Flips:
    """Legal differences of a choice or of codes, reported apart: how many of how many, and where.

    `rows` are the tokens (or rows) that hold one, at most a few of them.
    """

    count: int = 0
    total: int = 0
    rows: tuple[int, ...] = ()
    words: str = ""


@dataclass(frozen=True, eq=False)
class Judged:
    """One output: the findings (the worst first), what was legal all the same, and the reasons."""

    output: str
    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    flips: Flips = Flips()
    comparison: Comparison | None = None
    derivation: tuple[str, ...] = ()
    undecided: str = ""  # why nothing is claimed
    allowed_length: float = math.nan  # what the whole difference's length may be

    @property
    def ratio(self) -> float:
        """The worst difference in units of budget; NaN where nothing is claimed."""
        if self.verdict is Verdict.UNDECIDED:
            return math.nan
        return self.findings[0].ratio if self.findings else 0.0

    @property
    def worst(self) -> Finding | None:
        """The finding that decides."""
        return self.findings[0] if self.findings else None


def judge_outputs(
    call: Call, outputs: Mapping[str, Tensor], places: Mapping[str, Places] | None = None
) -> dict[str, Judged]:
    """Judge what a candidate put out against the twin's outputs on the same inputs."""
    try:
        budgets = budgets_of(call)
    except Undecided as reason:
        return {
            name: Judged(name, Verdict.UNDECIDED, undecided=str(reason)) for name in call.outputs
        }
    made = {}
    for name, budget in budgets.items():
        twin = call.outputs[name]
        if name not in outputs or outputs[name].shape != twin.shape:
            made[name] = Judged(name, Verdict.DIFFERS, (Finding("shape", (), 1.0, 0.0),))
            continue
        found = judge(outputs[name], twin, budget, (places or {}).get(name))
        made[name] = Judged(
            name,
            found.verdict,
            found.findings,
            comparison=found.comparison,
            derivation=budget.derivation,
            allowed_length=found.allowed_length,
        )
    return made
