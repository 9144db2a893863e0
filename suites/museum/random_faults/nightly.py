"""The step of a night that plants random faults; the same ones every night, scored by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.history.ledger import Failure
from degarble.harness.history.records import RANDOM_FAULTS
from degarble.harness.nightly.night import NightStep, StepResult
from degarble.harness.report.verdict import Verdict
from degarble.suites.campaigns.causes.random_faults import FALSE, answered, outcome, plain, shares

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from degarble.harness.nightly.night import NightConfig

SEEDS = range(40)
_WRONG = ("false", "missed", "elsewhere")


def random_faults(_: NightConfig, __: Mapping[str, StepResult]) -> StepResult:
    """Plant the faults of some seeds, and keep the shares that were placed and told."""
    answers, wrong, rows = [], [], []
    for seed in SEEDS:
        name, answer = answered(seed)
        what = outcome(answer)
        answers += [plain(each) for each in answer.answers]
        if what in _WRONG:
            wrong.append(seed)
            rows.append((f"seed {seed}", what, f"{name}: {answer.answers[0].truth}"))
    found = shares(answers)
    places = {claim: hits / total for claim, (hits, total) in found.items() if total}
    places = {
        f"no {claim}" if claim == FALSE else claim: 1 - share if claim == FALSE else share
        for claim, share in places.items()
    }
    rows += [(claim, str(share), f"{share:.1%}") for claim, share in places.items()]
    count = f"{len(SEEDS)} random faults"
    sentence = f"{count}: all were placed, and nothing false was said."
    if wrong:
        sentence = f"{count}: {len(wrong)} were missed or told falsely, such as seed {wrong[0]}."
    return StepResult(
        Verdict.DIFFERS if wrong else Verdict.AGREES,
        sentence,
        values={RANDOM_FAULTS.name: places},
        failures=tuple(
            Failure(f"random_faults.{seed}", Verdict.DIFFERS, None, "missed, or told falsely")
            for seed in wrong
        ),
        judged=tuple(f"random_faults.{seed}" for seed in SEEDS),
        rows=tuple(rows),
    )


def with_random_faults(steps: Sequence[NightStep]) -> tuple[NightStep, ...]:
    """Return the steps of a night, with this one after the museum's."""
    at = 1 + next(number for number, step in enumerate(steps) if step.name == "museum")
    return (*steps[:at], NightStep("random faults", random_faults), *steps[at:])
