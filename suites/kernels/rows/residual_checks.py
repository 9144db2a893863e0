"""Compare the residual addition before a norm on a GPU with its stated order, bit for bit.

The sum is one addition of float32 and one rounding; the normed values have row_checks' order of the
norm. Outputs are filled with 0xAA before a launch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.kernels.rows import problem as rmsnorm_problem
from degarble.kernels.rows.problem import ResidualProblem
from degarble.kernels.runtime.modules import kernel_named
from degarble.suites.kernels import row_checks as checks

if TYPE_CHECKING:
    from torch import Tensor


OPERANDS = ("values", "residual", "weight")


class ResidualNormed(NamedTuple):
    """Results: normed values and the stored sum."""

    normed: Tensor
    total: Tensor


@dataclass(frozen=True)
class Case:
    """One launch; everything follows from these facts."""

    problem: ResidualProblem
    spread: str = "ordinary"
    seed: int = 0

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        p = self.problem
        what = f"residual {p.rows}x{p.columns} {p.weight} {'stored' if p.rounded else 'wide'}"
        return f"{what} {self.spread} seed={self.seed}"

    @cached_property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Draw values, residual and weight; half of the residual lies far below or above."""
        p = self.problem
        x, residual = (
            checks.spread((p.rows, p.columns), self.spread, self.seed + n) for n in range(2)
        )
        residual[1::2] *= 2.0 ** (self.seed % 17 - 8)
        generator = torch.Generator().manual_seed(self.seed + 2)
        weight = torch.rand(p.columns, generator=generator) * 2 - 0.25
        return x, residual, weight if p.weight == "fp32" else weight.bfloat16()


def by_definition(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """Return normed values and the stored sum."""
    x, residual, weight = (operand.to(device) for operand in case.operands)
    total = x.float() + residual.float()
    stored = total.bfloat16()
    normed = stored.float() if case.problem.rounded else total
    return checks.normed_by_definition(normed, weight, case.problem.epsilon), stored


def on_device(case: Case) -> ResidualNormed:
    """Run a case on the GPU, into poisoned memory; outputs stay there."""
    kernel = kernel_named("simt_residual_norm")
    given = dict(zip(OPERANDS, (operand.cuda() for operand in case.operands), strict=True))
    out = kernel.allocate(case.problem, given["values"].device)
    for each in out.values():
        each.view(torch.uint8).fill_(checks.POISON)
    return ResidualNormed(**kernel.run(case.problem, checks.SETTINGS, **given, **out))


def mismatch(case: Case) -> str:
    """Say how a case differs from its definition on the GPU; empty where it does not."""
    got = on_device(case)
    want = by_definition(case, got.total.device.type)
    pairs = zip(("normed values", "sum"), got, want, strict=True)
    found = [checks.bits_differ(f"{case.name}, {name}", a, b) for name, a, b in pairs]
    return "; ".join(filter(None, found))


def cases() -> list[Case]:
    """Return the named cases: widths of the models, tails, spreads, weights, both norms."""
    made = []
    for rounded in (False, True):
        for columns in (64, 128, 1024, 1040, 4096, 7168, 16_384):
            made += [
                Case(ResidualProblem(37, columns, 1e-6, weight, rounded), "rows", columns)
                for weight in rmsnorm_problem.NORM_WEIGHTS
            ]
        for kind in checks.SPREADS:
            made.append(Case(ResidualProblem(70, 2064, 1e-6, "fp32", rounded), kind, 3))
            made.append(Case(ResidualProblem(70, 272, 1e-20, "bf16", rounded), kind, 4))
        made.append(Case(ResidualProblem(3000, 7168, rounded=rounded), "rows", 5))
    return made


def fuzzed(seed: int, count: int) -> list[Case]:
    """Draw cases."""
    drawn = random.Random(seed)
    made = []
    for _ in range(count):
        problem = ResidualProblem(
            rows=drawn.choice((drawn.randint(1, 20), drawn.randint(1, 700))),
            columns=16 * drawn.choice((drawn.randint(4, 70), drawn.randint(4, 600))),
            epsilon=drawn.choice((1e-6, 1e-20, 1e-5)),
            weight=drawn.choice(rmsnorm_problem.NORM_WEIGHTS),
            rounded=drawn.random() < 0.5,
        )
        made.append(Case(problem, drawn.choice(checks.SPREADS), drawn.randrange(1 << 30)))
    return made
