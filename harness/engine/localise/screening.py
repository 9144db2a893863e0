"""Look at sampled rows of every component, and say what size of fault that would miss.

Rows that are independent are drawn at random, so that every call, and as far as possible every
visited expert, has one. Where the rows of a sequence depend on each other, the first rows of its
first call and a few later calls are taken. Each sampled row is judged by its own budget. A
difference of all rows together grows with their number, and what rounding may add with the root of
it: from N rows a sample of n shows what is sqrt(N / n) times as far beyond its budget.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.localise.judgeable_rows import part_without
from degarble.harness.engine.localise.replay import Replay, is_ragged, replayed, taken
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from degarble.harness.engine.localise.judged_run import JudgedComponent
    from degarble.harness.engine.localise.replay import Batch, TwinComponents
    from degarble.harness.model.components import Component

NEAR = 0.8  # of a budget: from here on a component is judged whole; healthy kernels reach 0.7
_ONE_IN = 16  # rows, where they are independent
_FIRST_OF = 4  # of a sequence the first rows, one part in so many
_LEAST = 16  # rows
_LATER_CALLS = 2


@dataclass(frozen=True)
class SampledRows:
    """What a screening looked at in one component, of what was recorded."""

    looked: int
    rows: int
    at_random: bool  # else first rows and a few calls
    experts: int = 0
    visited: int = 0

    @property
    def size(self) -> float:
        """Return the size in budgets from which a fault of all rows together is seen."""
        return math.sqrt(self.rows / self.looked) if self.looked else math.inf

    def missed(self, share: float) -> float | None:
        """Return how probably no sampled row is among `share` of all; None if not at random."""
        if not self.at_random:
            return None
        wrong = math.ceil(share * self.rows)
        fewer, more = sorted((wrong, self.looked))
        return math.prod(max(0, self.rows - more - n) / (self.rows - n) for n in range(fewer))


def screened(
    known: TwinComponents, component: Component, found: Sequence[Batch]
) -> tuple[list[Replay], SampledRows]:
    """Replay sampled rows of a component's calls, and say which part of them they are."""
    chance = random.Random(component.name)  # noqa: S311  the same rows wherever it is judged
    ragged = is_ragged(component)
    replays = [_sampled(known, batch, chance) for batch in (_few(found) if ragged else found)]
    rows, looked = (
        sum(len(batch.step_of) for batch in side)
        for side in (found, [replay.batch for replay in replays])
    )
    visited, experts = (
        len(_experts_of(side)) for side in (found, [replay.batch for replay in replays])
    )
    at_random = not ragged or looked == rows
    return replays, SampledRows(looked, rows, at_random, experts, visited)


def needs_more(judged: JudgedComponent) -> bool:
    """Tell whether a screened component has to be judged whole."""
    return judged.non_finite is not None or any(
        row.verdict is not Verdict.AGREES or row.ratio >= NEAR or row.left_out
        for row in judged.rows.values()
    )


def _few(found: Sequence[Batch]) -> Iterator[Batch]:
    """Yield the first call, and a few later ones."""
    later = found[1:]
    yield from found[:1]
    for number in range(min(_LATER_CALLS, len(later))):
        yield later[-1 - number * len(later) // _LATER_CALLS]


def _sampled(known: TwinComponents, batch: Batch, chance: random.Random) -> Replay:
    count = len(batch.step_of)
    kept = torch.zeros(count, dtype=torch.bool)
    if is_ragged(batch.component):
        for first, length in _sequences(batch):
            taken_rows = min(length, max(_LEAST, -(-length // _FIRST_OF)))
            kept[first : first + taken_rows] = True
    else:
        kept[_drawn(batch, count, chance)] = True
    whole = Replay(batch, undecided="only sampled rows are replayed", inputs=taken(batch))
    part = None if bool(kept.all()) else part_without(known, whole, ~kept)
    return replayed(known, batch) if part is None else part.replay


def _sequences(batch: Batch) -> list[tuple[int, int]]:
    """Return where each sequence of a call begins, and its length."""
    offsets = batch.inputs.get("token_offsets")
    bounds = [0, len(batch.step_of)] if offsets is None else offsets.tolist()
    return [(a, b - a) for a, b in pairwise(bounds)]


def _drawn(batch: Batch, count: int, chance: random.Random) -> list[int]:
    """Draw rows: evenly over all, over the steps, and one for each expert that is left."""
    wanted = max(_LEAST, -(-count // _ONE_IN))
    if count <= 2 * wanted:
        return list(range(count))
    half = wanted // 2
    drawn = {chance.randrange(n * count // half, (n + 1) * count // half) for n in range(half)}
    steps, sizes = batch.step_of.unique_consecutive(return_counts=True)
    begins = (sizes.cumsum(0) - sizes).tolist()
    for at in sorted(chance.sample(range(len(steps)), min(half, len(steps)))):
        drawn.add(begins[at] + chance.randrange(int(sizes[at])))
    experts = batch.inputs.get("experts")
    if experts is not None and experts.ndim == 2 and len(experts) == count:
        drawn |= _one_each(experts, drawn, wanted)
    while len(drawn) < wanted:
        drawn.add(chance.randrange(count))
    return sorted(drawn)


def _one_each(experts_TK: Tensor, drawn: set[int], most: int) -> set[int]:
    """Return further rows, at most so many, with experts that no drawn row visits."""
    seen = set(experts_TK[sorted(drawn)].flatten().tolist())
    more: set[int] = set()
    for row, own in enumerate(experts_TK.tolist()):
        if len(more) >= most:
            break
        if not seen.issuperset(own):
            more.add(row)
            seen.update(own)
    return more


def _experts_of(found: Sequence[Batch]) -> set[int]:
    return {
        number
        for batch in found
        if "experts" in batch.inputs
        for number in batch.inputs["experts"].unique().tolist()
    }
