"""Put the outcomes of a doctor's steps together: verdict, page, next command, document."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from degarble.harness.commands.doctor.plan import next_command, same_command
from degarble.harness.report.verdict import NO_ERRORS, SEVERITY, Verdict

if TYPE_CHECKING:
    from degarble.harness.commands.doctor.plan import DoctorOptions, DoctorPlan, DoctorStep


@dataclass
class DoctorOutcome:
    """What a step gave."""

    step: DoctorStep
    verdict: Verdict | None  # None where it judges nothing
    sentence: str
    text: str = ""
    document: dict[str, Any] = field(default_factory=dict)


@dataclass
class DoctorResult:
    """What was planned, and what came of it so far."""

    plan: DoctorPlan
    options: DoctorOptions
    outcomes: list[DoctorOutcome] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """Return the worst verdict; UNDECIDED where nothing was judged."""
        told = [outcome.verdict for outcome in self.outcomes if outcome.verdict is not None]
        return max(told, key=SEVERITY.index, default=Verdict.UNDECIDED)

    @property
    def wrong(self) -> list[DoctorOutcome]:
        """Return the steps that found something wrong."""
        bad = (Verdict.DIFFERS, Verdict.UNSTABLE)
        return [outcome for outcome in self.outcomes if outcome.verdict in bad]

    @property
    def kernel_tested(self) -> bool:
        """Return whether anything but degarble's own references was run or asked."""
        return any(
            outcome.document.get("kernel_tested", outcome.step.name in ("probe", "judge"))
            for outcome in self.outcomes
            if outcome.verdict is not None
        )

    @property
    def report(self) -> str | None:
        """Return the page that the last step wrote."""
        pages = [outcome.document.get("report") for outcome in self.outcomes]
        return next((page for page in reversed(pages) if page), None)

    @property
    def sentence(self) -> str:
        """Return the verdict in one sentence."""
        if self.wrong:
            first = self.wrong[0]
            return f"{first.step.name}: {first.sentence}"
        if self.verdict is Verdict.UNDECIDED:
            refused = next((o for o in self.outcomes if o.verdict is Verdict.UNDECIDED), None)
            if refused is None:
                return "Nothing was judged."
            return f"{refused.step.name} could not be decided."
        told = [outcome for outcome in self.outcomes if outcome.verdict is not None]
        if len(told) == 1 and told[0].sentence and told[0].step.name != "audit":
            return told[0].sentence
        judged = [outcome.step.name for outcome in told]
        alone = "" if self.kernel_tested else " No kernel was tested."
        return f"Nothing wrong was found by {' and '.join(judged)}.{alone}"

    @property
    def next(self) -> str:
        """Return the command to type next."""
        for outcome in self.wrong:
            for origin in outcome.document.get("origins") or ():
                run = getattr(origin, "reproducer", None)
                if run and outcome.step.name == "check":
                    return shlex.join(["python", str(run)])
            for cause in outcome.document.get("causes") or ():
                return f"degarble faults show {cause['fault']}"
        if self._refused:
            return same_command(self.plan.target, self.options)
        names = [outcome.step.name for outcome in self.wrong]
        return next_command(self.plan.target, self.options, names)

    @property
    def headline(self) -> str:
        """Return the word for the verdict: AGREES only where something foreign was compared."""
        compared = self.kernel_tested or any(
            outcome.document.get("against") for outcome in self.outcomes
        )
        return self.verdict if compared or self.verdict is not Verdict.AGREES else NO_ERRORS

    @property
    def before_next(self) -> str:
        """Return what the next command needs: a mended input, or the engine started again."""
        if self.next == same_command(self.plan.target, self.options):
            return ", once that is mended"
        stopped = self.options.engine is not None and self.next.startswith("degarble probe")
        return ", with the server started as you run it" if stopped else ""

    @property
    def _refused(self) -> bool:
        """Return whether a step that decides was refused, and nothing was found wrong."""
        refused = (outcome.verdict is Verdict.UNDECIDED for outcome in self.outcomes)
        return not self.wrong and any(refused)

    def document(self) -> dict[str, Any]:
        """Return all of it as a JSON document: the verdict, and the document of each step."""
        steps = [
            {"step": outcome.step.name, "verdict": outcome.verdict, "sentence": outcome.sentence,
             "document": outcome.document}
            for outcome in self.outcomes
        ]  # fmt: skip
        return {
            "verdict": self.verdict,
            "headline": self.headline,
            "origins": [o for step in self.outcomes for o in step.document.get("origins") or ()],
            "cosines": [c for step in self.outcomes for c in step.document.get("cosines") or ()],
            "sentence": self.sentence,
            "target": {"kind": self.plan.target.kind, "name": self.plan.target.name},
            "plan": self.plan.sentence,
            "steps": steps,
            "left_out": {step.name: step.left_out for step in self.plan.steps if step.left_out},
            "kernel_tested": self.kernel_tested,
            "report": self.report,
            "next": self.next,
        }
