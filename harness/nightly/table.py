"""The table of a nightly run's steps, in their order."""

from __future__ import annotations

from degarble.harness.nightly import closing, kernels, steps
from degarble.harness.nightly.metamorphic import metamorphic
from degarble.harness.nightly.night import Step
from degarble.harness.nightly.texts import texts

STEPS = (
    Step("environment", steps.environment),
    Step("audit", steps.audit),
    Step("codecs", steps.codecs),
    Step("kernels", kernels.kernels),
    Step("captures", steps.captures),
    Step("repeats", steps.repeats, ("captures",)),
    Step("check", steps.check, ("captures", "repeats")),
    Step("metamorphic", metamorphic),
    Step("text", texts, ("captures",)),
    Step("museum", closing.museum),
    Step("figures", kernels.figures),
    Step("history", closing.history, all_before=True),
    Step("ledger", closing.ledger, all_before=True),
)
