"""Compare the kernels of query heads and of attention's outputs on a GPU with the stated order.

Cases vary tokens, heads, spreads, and positions inside and outside of the table. Results are equal
bit for bit; outputs are poisoned before. The arithmetic is that of latent_checks, whose suite holds
it to the references. Shape letters: T tokens, H heads, L width.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.rows.problem import InverseRopeProblem, QNormRopeProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import kernel_named
from degarble.suites.kernels import latent_checks as plain
from degarble.suites.kernels.format_checks import difference

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = CompileSettings()
POSITIONS = 300
KINDS = ("norm", "back", "back in place")
LENGTHS = (1, 3, 4, 5, 127, 128, 129)  # ratio and window, and their neighbours


@dataclass(frozen=True)
class Case:
    """One launch; everything follows from these facts."""

    kind: str
    tokens: int
    heads: int
    spread: str = "ordinary"
    seed: int = 0
    width: int = rows.WIDTH

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        return f"{self.kind} {self.tokens}x{self.heads}x{self.width} {self.spread} seed={self.seed}"

    @cached_property
    def values(self) -> Tensor:
        """Draw heads."""
        return plain.drawn(self.spread, (self.tokens, self.heads, self.width), self.seed)

    @cached_property
    def positions(self) -> Tensor:
        """Draw positions; the last token of many lies outside of the table."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        positions_T = torch.randint(POSITIONS, (self.tokens,), generator=generator)
        if self.tokens > 100:
            positions_T[-1], positions_T[-2] = POSITIONS, -1
        return positions_T

    @property
    def in_place(self) -> bool:
        """Whether the result lies where the heads were."""
        return self.kind == "back in place"


def by_definition(case: Case, device: str = "cpu") -> Tensor:
    """Return what a launch has to give; torch rounds every step alike wherever it computes."""
    x_RL = case.values.to(device).reshape(-1, case.width)
    table_P = plain.table_of_turns(POSITIONS).to(device)
    turns_TP = plain.turns_at(table_P, case.positions.to(device))
    turns_RP = turns_TP.repeat_interleave(case.heads, 0)
    if case.kind == "norm":
        made = plain.turned_tail(plain.normed_rows(x_RL, None, 1e-6), turns_RP)
        return plain.with_the_machines_nan(made).view(case.values.shape)
    made = plain.with_the_machines_nan(plain.turned_tail(x_RL.float(), turns_RP, back=True))
    plain_width = case.width - rows.ROTATED
    made[:, :plain_width] = x_RL[:, :plain_width]  # moved, not computed: a NaN keeps its bits
    return made.view(case.values.shape)


def on_device(case: Case) -> Tensor:
    """Run a case on the GPU; the result stays there."""
    x_THL, positions_T = case.values.cuda(), case.positions.cuda()
    turns = plain.table_of_turns(POSITIONS).cuda()
    return run(case, (x_THL, turns, positions_T), outputs(case, x_THL))


def outputs(case: Case, x_THL: Tensor) -> Tensor:
    """Return where the result goes: poisoned memory, or the heads."""
    return x_THL if case.in_place else torch.full_like(x_THL, 7.0)


def run(case: Case, operands: tuple[Tensor, Tensor, Tensor], out: Tensor) -> Tensor:
    """Launch on tensors of the GPU: heads, turns and positions."""
    given = dict(zip(("heads", "turns", "positions"), operands, strict=True))
    if case.kind == "norm":
        heads = QNormRopeProblem(case.tokens, case.heads, POSITIONS, width=case.width)
        return kernel_named("simt_qnorm_rope").run_one(heads, SETTINGS, **given, out=out)
    back = InverseRopeProblem(case.tokens, case.heads, POSITIONS, case.in_place, case.width)
    return kernel_named("simt_inverse_rope").run_one(back, SETTINGS, **given, out=out)


def mismatch(case: Case) -> str:
    """Say how a case differs from its definition on the GPU; empty where it does not."""
    got = on_device(case)
    return difference(case.name, plain.bits(got), plain.bits(by_definition(case, got.device.type)))


def replay_mismatch(case: Case, seeds: range) -> str:
    """Say how a captured launch differs on changed data; empty where it does not."""
    operands = (
        case.values.cuda(),
        plain.table_of_turns(POSITIONS).cuda(),
        case.positions.cuda(),
    )
    out = outputs(case, operands[0])
    run(case, operands, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(case, operands, out)
    found = []
    for seed in seeds:
        other = replace(case, seed=seed)
        operands[0].copy_(other.values)
        operands[2].copy_(other.positions)
        if not case.in_place:
            out.fill_(7.0)
        graph.replay()
        torch.cuda.synchronize()
        want = plain.bits(by_definition(other, "cuda"))
        found.append(difference(other.name, plain.bits(out), want))
    return "; ".join(filter(None, found))


def cases(kind: str) -> list[Case]:
    """Return the named cases: lengths, heads, spreads."""
    made = [Case(kind, tokens, 64, "wide", tokens) for tokens in LENGTHS]
    made += [Case(kind, 130, heads, "wide", heads) for heads in (1, 7, 8, 9, 16, 128)]
    made += [Case(kind, 110, 16, spread) for spread in plain.SPREADS]
    made += [Case(kind, 129, heads, "wide", heads, width=128) for heads in (1, 8, 33)]
    made += [Case(kind, 5, 8, spread, width=128) for spread in plain.SPREADS]
    return made


def fuzzed(kind: str, seed: int, count: int) -> list[Case]:
    """Draw cases."""
    drawn = random.Random(seed)
    return [
        Case(
            kind,
            drawn.choice((drawn.randint(1, 5), drawn.randint(1, 160))),
            drawn.choice((8, 16, 64, 128, drawn.randint(1, 40))),
            drawn.choice(plain.SPREADS),
            drawn.randrange(1 << 30),
            drawn.choice((512, 512, 128)),
        )
        for _ in range(count)
    ]
