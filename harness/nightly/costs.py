"""What the steps of a night cost the last time: the plan of a night, and a limit on its time.

Costs are kept next to the journal, for the same machine, device, backend, prompts, number of
captures and museum. Seconds are those of the clock; bytes are by how much the folder of the night
grew. The one step that can look at less is the check: it is screened where the limit is not certain
to hold otherwise. Where only screened checks have run, a whole one is expected to take as many
times longer as there are rows for a sampled one; so a screened check is not the last of its kind.
A cost that is not known counts as nothing in a sum, and the plan says so.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Protocol

from degarble.harness.report.files import write_text
from degarble.harness.report.progress import duration, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

COSTS_SCHEMA = 1
_ROWS = 16.0  # for one that a screened check samples
_SCREENED = " --screen"  # after the name of a step that looked at samples first


class CostedStep(Protocol):
    """A step of a night."""

    @property
    def name(self) -> str:
        """Return its name."""
        ...

    @property
    def screens(self) -> bool:
        """Return whether it can look at samples first."""
        ...


@dataclass(frozen=True)
class StepCost:
    """What a step cost, and in which night."""

    seconds: float
    nbytes: int
    night: str


@dataclass(frozen=True)
class PlannedStep:
    """A step that is yet to run, screened or whole; without a cost where none is known."""

    name: str
    cost: StepCost | None
    screened: bool = False


@dataclass
class NightCosts:
    """The last costs of each step, in a file of the night's folder."""

    path: Path
    key: tuple[str, ...]
    steps: dict[str, StepCost] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, key: tuple[str, ...]) -> NightCosts:
        """Read what is known for nights of this key."""
        found = cls(path, key)
        # A file that somebody has damaged is that of a night whose costs are unknown.
        with suppress(OSError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError,
                      AttributeError):  # fmt: skip
            raw = json.loads(found.path.read_text(encoding="utf-8"))
            if raw["schema"] == COSTS_SCHEMA and tuple(raw["key"]) == key:
                steps = {
                    str(name): StepCost(float(c["seconds"]), int(c["nbytes"]), str(c["night"]))
                    for name, c in raw["steps"].items()
                }
                if all(0 <= cost.seconds < math.inf for cost in steps.values()):
                    found.steps = steps
        return found

    def known(self, name: str, *, screened: bool = False) -> StepCost | None:
        """Return the last cost of a step."""
        return self.steps.get(name + _SCREENED * screened)

    def add(self, name: str, cost: StepCost, *, screened: bool = False) -> None:
        """Keep the cost of a step that has run."""
        self.steps[name + _SCREENED * screened] = cost
        steps = {name: asdict(each) for name, each in self.steps.items()}
        document = {"schema": COSTS_SCHEMA, "key": list(self.key), "steps": steps}
        write_text(self.path, json.dumps(document, indent=1) + "\n")


@dataclass
class NightBudget:
    """The time that a night may take, from when this process began it."""

    costs: NightCosts
    within: float | None = None
    begun: float = field(default_factory=time.monotonic)

    def must_screen(self, step: CostedStep, later: Sequence[CostedStep]) -> bool:
        """Return whether a step has to look at samples first, so that the rest fits the limit."""
        if self.within is None or not step.screens:
            return False
        whole = self._expected(step)
        if whole is None:
            return True  # nobody knows that it fits
        rest = sum(self._expected(each) or 0.0 for each in later)
        left = self.within - (time.monotonic() - self.begun)
        return whole + rest > left

    def _expected(self, step: CostedStep) -> float | None:
        """Return how long a step may take, if it is not screened."""
        whole = self.costs.known(step.name)
        if whole is not None:
            return whole.seconds
        screened = self.costs.known(step.name, screened=True) if step.screens else None
        return None if screened is None else _ROWS * screened.seconds

    def planned(self, steps: Sequence[CostedStep]) -> list[PlannedStep]:
        """Return what would run, if it took as long as the last time."""
        every = [self._expected(step) for step in steps]
        total = sum(seconds for seconds in every if seconds is not None)
        made = []
        for step, seconds in zip(steps, every, strict=True):
            over = self.within is not None and (seconds is None or total > self.within)
            screened = step.screens and over
            known = self.costs.known(step.name, screened=screened)
            made.append(PlannedStep(step.name, known, screened))
        return made

    def lines(self, steps: Sequence[CostedStep]) -> Iterator[str]:
        """Yield the plan as text: the sum first, then each step."""
        planned = self.planned(steps)
        known = [each.cost for each in planned if each.cost is not None]
        seconds = sum(cost.seconds for cost in known)
        unknown = [each.name for each in planned if each.cost is None]
        text = "cost of this night: "
        if known:
            text += f"{duration(seconds)}, {size(sum(cost.nbytes for cost in known))} written"
            text += f", as {' and '.join(sorted({cost.night for cost in known})[-2:])} took"
        if unknown:
            text += f"{'; ' if known else ''}unknown: {', '.join(unknown)}"
        yield text
        if self.within is not None:
            yield self._limit_line(planned, seconds, whole=not unknown)
        for each in planned:
            name = each.name + _SCREENED * each.screened
            cost = "unknown"
            if each.cost is not None:
                cost = f"{duration(each.cost.seconds)}, {size(each.cost.nbytes)}"
            yield f"  {name}: {cost}"

    def _limit_line(self, planned: Sequence[PlannedStep], seconds: float, *, whole: bool) -> str:
        assert self.within is not None, "asked for only where there is a limit"
        screened = [each.name for each in planned if each.screened]
        how = f", with {', '.join(screened)} screened" if screened else ""
        if seconds > self.within:
            longest = max(planned, key=lambda each: each.cost.seconds if each.cost else 0.0)
            return (
                f"limit {duration(self.within)}: exceeded by {duration(seconds - self.within)} even"
                f" so{how}; {longest.name} takes longest"
            )
        sure = "it holds" if whole else "it holds as far as costs are known"
        return f"limit {duration(self.within)}: {sure}{how}"
