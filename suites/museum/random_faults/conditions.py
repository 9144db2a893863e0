"""When a random fault acts: from a call on, in one phase, on one sequence, expert or rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.capture.files.records import Phase

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from degarble.harness.capture.files.records import CapturedStep

ALWAYS = "always"
OF_STEPS = ("from step", "to step", "one step", "phase", "calls of tokens")
OF_ROWS = ("sequence", "length", "position")
OF_EXPERTS = "expert"
OF_COLUMNS = "rank"


@dataclass(frozen=True)
class Condition:
    """When a fault acts; `value` is a number, a phase, or a rank of `of`."""

    kind: str = ALWAYS
    value: Any = None
    of: int = 1

    @property
    def truth(self) -> dict[str, Any]:
        return {} if self.kind == ALWAYS else {self.kind: self.value}

    def holds_in(self, step: CapturedStep) -> bool:
        """Return whether it can act in a step at all."""
        holds = {
            "from step": lambda: step.number >= self.value,
            "to step": lambda: step.number <= self.value,
            "one step": lambda: step.number == self.value,
            "phase": lambda: step.phase == self.value,
            "calls of tokens": lambda: len(step.tokens) > self.value,
        }.get(self.kind)
        return holds is None or bool(holds())

    def rows(self, step: CapturedStep, count: int) -> Tensor | None:
        """Return on which rows of a step it acts; None where rows are no tokens or sequences."""
        positions, owners = list(step.positions), list(step.sequences)
        lengths = {owner: at + 1 for owner, at in zip(owners, positions, strict=True)}
        if count != len(owners):
            owners = list(dict.fromkeys(owners))
            positions = [lengths[owner] - 1 for owner in owners]
        if count != len(owners):
            return None
        match self.kind:
            case "sequence":
                return torch.tensor([owner == self.value for owner in owners])
            case "length":
                return torch.tensor([lengths[owner] > self.value for owner in owners])
            case "position":
                return torch.tensor([position >= self.value for position in positions])
        return torch.ones(count, dtype=torch.bool)

    def mixed(
        self,
        step: CapturedStep,
        inputs: Mapping[str, Tensor],
        right: Mapping[str, Tensor],
        wrong: Mapping[str, Tensor],
    ) -> Mapping[str, Tensor]:
        """Return the wrong outputs where the fault acts, the right ones elsewhere."""
        if self.kind == ALWAYS or (self.kind in OF_STEPS and self.holds_in(step)):
            return wrong
        if self.kind in OF_STEPS:
            return right
        made = {}
        for name, good in right.items():
            bad = wrong[name]
            mask = self._mask(step, inputs, good)
            made[name] = good if mask is None or bad.shape != good.shape else _chosen(
                mask, bad, good
            )  # fmt: skip
        return made

    def _mask(
        self, step: CapturedStep, inputs: Mapping[str, Tensor], output: Tensor
    ) -> Tensor | None:
        """Return a mask of the leading axes of an output, or of its last one."""
        if not output.ndim:
            return None
        if self.kind == OF_EXPERTS:
            experts = inputs.get("experts")
            if experts is None or output.shape[:2] != experts.shape:
                return None
            return experts.eq(self.value)
        if self.kind == OF_COLUMNS:
            width = output.shape[-1]
            inside = torch.arange(width) * self.of // width == self.value
            return inside.expand(output.shape) if output.ndim > 1 else None
        return self.rows(step, len(output))


def _chosen(mask: Tensor, bad: Tensor, good: Tensor) -> Tensor:
    wide = mask.reshape(*mask.shape, *[1] * (good.ndim - mask.ndim))
    if good.dtype.itemsize == 1 and good.is_floating_point():  # torch cannot choose among FP8
        code = torch.where(wide, bad.view(torch.uint8), good.view(torch.uint8))
        return code.view(good.dtype)
    return torch.where(wide, bad, good)


def drawn_condition(
    drawn: random.Random, steps: Sequence[CapturedStep], inputs: Mapping[str, Tensor]
) -> Condition:
    """Draw a condition; in three of five cases there is none."""
    if drawn.random() < 0.6:
        return Condition()
    kinds = [*OF_STEPS, *OF_ROWS, OF_COLUMNS]
    if "experts" in inputs:
        kinds += [OF_EXPERTS] * 3
    kind = drawn.choice(kinds)
    numbers = [step.number for step in steps]
    lengths = sorted({position + 1 for step in steps for position in step.positions})
    match kind:
        case "from step" | "to step" | "one step":
            return Condition(kind, drawn.choice(numbers[1:-1]))
        case "phase":
            return Condition(kind, drawn.choice((Phase.PREFILL, Phase.DECODE)))
        case "calls of tokens":
            counts = sorted({len(step.tokens) for step in steps})
            return Condition(kind, drawn.choice(counts[:-1]))
        case "sequence":
            return Condition(kind, drawn.choice(sorted({o for s in steps for o in s.sequences})))
        case "length" | "position":
            return Condition(kind, drawn.randrange(4, max(5, lengths[-1] * 3 // 4)))
        case "expert":
            return Condition(kind, drawn.choice(inputs["experts"].flatten().tolist()))
    of = drawn.choice((2, 4))
    return Condition(OF_COLUMNS, drawn.randrange(of), of)
