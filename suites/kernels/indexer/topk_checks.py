"""Compare top-k selection on a GPU with a stable sort of the same keys, entry by entry.

The definition uses the keys of router_problem, torch's stable descending sort, and the chosen
entries in ascending order. Cases have lengths around k and around every form, ties, NaN and
infinities. Entries beyond what a token sees hold NaN and may not be read.

Shape letters: T rows, W entries, K chosen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import TopkProblem, visible_entries
from degarble.kernels.rows.router_problem import key_of
from degarble.kernels.runtime.compiling import CompileSettings

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = CompileSettings()
POISON = -7_777
HASH = 0x9E37_79B1
SPREADS = (
    "ordinary", "ties", "equal", "special", "unseen", "rising", "bin", "high sample", "low sample",
)  # fmt: skip
COUNTS = (512, 1024, 2048)


@dataclass(frozen=True)
class TopkCase:
    """One launch; everything follows from these facts."""

    problem: TopkProblem
    spread: str = "ordinary"
    seed: int = 0

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        p = self.problem
        what = f"{p.rows} rows of {p.entries}, top {p.count}, ratio {p.ratio}"
        return f"{what}, {self.spread} seed={self.seed}"

    @cached_property
    def positions(self) -> Tensor | None:
        """Draw positions: some before the first entry, some that see every one."""
        p = self.problem
        if not p.ratio:
            return None
        generator = torch.Generator().manual_seed(self.seed + 1)
        last = p.ratio * (p.entries + 3)
        position_T = torch.randint(0, last, (p.rows,), generator=generator)
        edges = [p.ratio * length - 1 for length in (p.count - 1, p.count, p.count + 1, p.entries)]
        for row, position in enumerate((0, *edges)):
            if row < p.rows and position < last:
                position_T[row] = position
        return position_T

    @cached_property
    def visible(self) -> Tensor:
        """Return how many entries of each row count."""
        p = self.problem
        if self.positions is None:
            return torch.full((p.rows,), p.entries)
        seen: Tensor = visible_entries(self.positions, p.ratio)
        return seen.clamp(0, p.entries)

    @cached_property
    def sampled(self) -> Tensor:
        """Return the entries that a sample of a row reads, whatever the form: eight a part."""
        pairs, first = self.problem.entries // 8, []
        for parts in (256, 512):
            for part in range(parts):
                begin, end = pairs * part // parts, pairs * (part + 1) // parts
                first.append(8 * (begin + ((part * HASH % 2**32 >> 16) * (end - begin) >> 16)))
        entries = (torch.tensor(first)[:, None] + torch.arange(8)).flatten()
        return entries[entries < self.problem.entries]

    @cached_property
    def scores(self) -> Tensor:
        """Draw float32 scores; what a row does not see is NaN, which would be chosen first."""
        p = self.problem
        generator = torch.Generator().manual_seed(self.seed)
        score_TW = torch.randn((p.rows, p.entries), generator=generator)
        if self.spread == "ties":
            score_TW = (score_TW * 3).round() / 3
            score_TW[score_TW == 0] = -0.0
            score_TW[:, ::3] = score_TW[:, ::3].abs()
        if self.spread == "equal":
            score_TW = torch.full_like(score_TW, -1.25)
        if self.spread == "special":
            for number in (torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-42, -1e-42):
                score_TW[torch.rand(score_TW.shape, generator=generator) < 0.02] = number
        if self.spread == "unseen":
            score_TW[torch.rand(score_TW.shape, generator=generator) < 0.97] = -torch.inf
        if self.spread == "rising":
            score_TW = score_TW.sort(dim=-1).values
        if self.spread == "bin":
            # As many in one bin of the first digit as are compared all with all, or a few more.
            many = min(p.entries, facts.LISTED - 2)
            for row in range(p.rows):
                score_TW[row] -= 9
                some = torch.randperm(p.entries, generator=generator)[: many + row % 6]
                steps = torch.randint(1, 4000, some.shape, generator=generator)
                score_TW[row, some] = 1 + steps / 2**20
        if self.spread.endswith("sample"):
            score_TW[:, self.sampled] += 9 if self.spread == "high sample" else -9
        hidden = torch.arange(p.entries) >= self.visible[:, None]
        return score_TW.masked_fill(hidden, torch.nan)


def by_definition(case: TopkCase, device: str) -> Tensor:
    """Return the chosen entries in ascending order, -1 behind them."""
    p = case.problem
    hidden = torch.arange(p.entries, device=device) >= case.visible.to(device)[:, None]
    key_TW = key_of(case.scores.to(device)).masked_fill(hidden, 0)
    order = torch.sort(key_TW, dim=-1, descending=True, stable=True)
    chosen, keys = order.indices[:, : p.count], order.values[:, : p.count]
    chosen = torch.where(keys > facts.NEVER, chosen, facts.MOST_ENTRIES)
    chosen = torch.nn.functional.pad(
        chosen, (0, p.count - chosen.shape[1]), value=facts.MOST_ENTRIES
    )
    chosen = chosen.sort(dim=-1).values
    return torch.where(chosen == facts.MOST_ENTRIES, facts.NONE, chosen).int()


def on_device(case: TopkCase) -> Tensor:
    """Run a case on the GPU, into poisoned memory; the result stays there."""
    from degarble.kernels.indexer import simt_indexer_topk as kernels  # noqa: PLC0415  needs the DSL

    p, score_TW = case.problem, case.scores.cuda()
    out = torch.full((p.rows, p.count), POISON, dtype=torch.int32, device=score_TW.device)
    positions = None if case.positions is None else case.positions.cuda()
    return kernels.KERNEL.run_one(p, SETTINGS, scores=score_TW, positions=positions, out=out)


def difference(case: TopkCase, got: Tensor) -> str:
    """Say how chosen entries differ from the definition; empty where they do not."""
    want = by_definition(case, got.device.type)
    wrong = (got != want).nonzero()
    if not len(wrong):
        return ""
    row, place = wrong[0].tolist()
    rows = int((got != want).any(-1).sum())
    return (
        f"{case.name}: {len(wrong)} entries in {rows} rows, first at row {row}, place {place}: "
        f"got {int(got[row, place])}, want {int(want[row, place])}"
    )


def mismatch(case: TopkCase) -> str:
    """Say how a case differs from its definition on the GPU."""
    return difference(case, on_device(case))


def cases() -> list[TopkCase]:
    """Return the named cases: every form, lengths around k and around the forms' own."""
    problems = [TopkProblem(9, 4 * count + 4, count, 4) for count in COUNTS]
    problems += [TopkProblem(5, entries, 2048) for entries in (2047, 2048, 2049)]
    lengths = (1, 31, 32, 33, 127, 128, 129, 4095)
    problems += [TopkProblem(7, entries, 32, 1) for entries in lengths]
    problems.append(TopkProblem(300, 8192, 512, 4))
    problems.append(TopkProblem(150, 16_384, 1024, 4))
    problems.append(TopkProblem(140, 20_001, 2048, 1))
    for entries in (8193, 32_768, 131_072, 262_144):
        problems += [TopkProblem(3, entries, 1024, 4), TopkProblem(1, entries, 2048)]
    problems += [TopkProblem(20, 131_072, 2048, 1), TopkProblem(40, 30_000, 2048)]
    problems += [TopkProblem(40, 65_536, 512, 1), TopkProblem(133, 65_540, 2048)]
    return [
        TopkCase(problem, spread, number)
        for number, spread in enumerate(SPREADS)
        for problem in problems
    ]


def fuzzed(seed: int, count: int) -> list[TopkCase]:
    """Draw cases."""
    drawn = random.Random(f"top-k {seed}")
    made = []
    for _ in range(count):
        rows, ratio = drawn.randint(1, 90), drawn.choice((0, 1, 4))
        entries = drawn.choice((drawn.randint(1, 300), drawn.randint(1, 40_000)))
        chosen = drawn.choice((drawn.randint(1, 64), drawn.randint(1, 2048)))
        problem = TopkProblem(rows, entries, chosen, ratio)
        made.append(TopkCase(problem, drawn.choice(SPREADS), drawn.randrange(1 << 30)))
    return made
