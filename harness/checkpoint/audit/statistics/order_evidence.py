"""Collect the column profiles of a block's weights, and infer the packing orders from them.

For each packed matrix it finds the profiles that can decide: linears with the same input, the norm
before it, and the rows of the linear that produces its columns. The model's wiring gives these
relations; without a config, matrices of equal width have no known relation and nothing is inferred.
Profiles are dropped with their block: a layer of 384 experts has 50 MB of them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from degarble.harness.checkpoint.audit.statistics.inference_order import (
    Kinship,
    Reference,
    infer_order,
    infer_shared_order,
    logs_of,
)
from degarble.harness.model.types import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from degarble.harness.checkpoint.audit.statistics.inferred import Inferred
    from degarble.harness.checkpoint.audit.statistics.records import TensorStatistics
    from degarble.harness.checkpoint.view.weight_units import WeightUnit

_FEWEST_POOLED = 3  # experts of a layer
_FEWEST_PACKED = 3  # others, whose mean stands for the order of packed siblings
_HOPS = 2  # from an input back to the linear whose rows make it: over an activation or a norm


class Profile(NamedTuple):
    """One weight's energies by column and by row, float32."""

    row: int
    unit: WeightUnit
    is_packed: bool
    columns: NDArray[np.float32]
    rows: NDArray[np.float32] | None


class Judged(NamedTuple):
    """The inferred order of one packed weight; `kinship`: relation of the deciding reference."""

    row: int
    inferred: Inferred
    kinship: Kinship | None


@dataclass
class Block:
    """The profiles of one block; `feeds` maps each component to the site that feeds it."""

    feeds: Mapping[str, str]
    profiles: list[Profile] = field(default_factory=list)
    _rows: dict[tuple[str, int | None], list[NDArray[np.float32]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, row: int, unit: WeightUnit, found: TensorStatistics) -> None:
        """Keep the profile of a weight if it can serve as evidence or be judged."""
        if found.columns is not None and (unit.feed or unit.kind is Kind.NORM):
            is_packed = found.blocks is not None and len(found.counts) == 16
            self.profiles.append(Profile(row, unit, is_packed, found.columns, found.rows))
            if unit.is_linear and found.rows is not None:
                self._rows[unit.component, unit.expert].append(found.rows)

    def judge(self) -> Iterator[Judged]:
        """Infer the packing order of every packed weight of the block."""
        by_feed: dict[str, list[Profile]] = defaultdict(list)
        for each in self.profiles:
            if each.is_packed:
                by_feed[each.unit.feed].append(each)
        for feed, packed in by_feed.items():
            shared = list(self._shared(feed))
            found = []
            for each in packed:
                references = [*shared, *self._producers(feed, each.unit.expert)]
                found.append(infer_order(each.columns, references))
            self._pool(feed, packed, found)
            yield from _with_company(packed, found)

    def _pool(self, feed: str, packed: list[Profile], found: list[Inferred]) -> None:
        """Judge the undecided experts of a layer together, each by its own producers' rows.

        Trap: a producer shared by all experts would count the same chance once for each expert.
        """
        members, references = [], []
        for i, each in enumerate(packed):
            if each.unit.expert is None or found[i].is_decided:
                continue
            for reference in self._producers(feed, each.unit.expert, alone=True):
                members.append(i)
                references.append(reference)
        if len(members) < _FEWEST_POOLED:
            return
        together = infer_shared_order([packed[i].columns for i in members], references)
        if together.is_decided:
            for i in members:
                found[i] = together

    def _shared(self, feed: str) -> Iterator[Reference]:
        """Yield the references for an input, whichever matrix reads it."""
        siblings = [p for p in self.profiles if p.unit.feed == feed and not p.is_packed]
        yield from _reference(Kinship.SIBLING, (each.columns for each in siblings))
        maker = _component(feed)
        norms = [p for p in self.profiles if p.unit.kind is Kind.NORM]
        gains = (each.columns for each in norms if each.unit.component == maker)
        yield from _reference(Kinship.NORM, gains)

    def _producers(
        self, feed: str, expert: int | None, *, alone: bool = False
    ) -> Iterator[Reference]:
        """Yield the rows of the linears that produce an input, the same expert's where it has one.

        `alone`: only that expert's own linears.
        """
        experts = (expert,) if alone or expert is None else (None, expert)
        # Walk back over activations and norms, which have no rows, to the linear before them.
        for _ in range(_HOPS + 1):
            component = _component(feed)
            makers = [rows for each in experts for rows in self._rows.get((component, each), ())]
            if makers:
                yield from _reference(Kinship.PRODUCER, makers)
                return
            feed = self.feeds.get(component, "")


def _with_company(packed: list[Profile], found: list[Inferred]) -> Iterator[Judged]:
    """Yield each inference; undecided ones are compared with the mean of the other packed ones."""
    open_ones = [i for i, inferred in enumerate(found) if not inferred.is_decided]
    if open_ones and len(packed) > _FEWEST_PACKED:
        total = sum(logs_of(each.columns) for each in packed)
        for i in open_ones:
            others = (total - logs_of(packed[i].columns)) / (len(packed) - 1)
            found[i] = infer_order(packed[i].columns, [Reference(Kinship.PACKED, others)])
    for each, inferred in zip(packed, found, strict=True):
        kinship = Kinship(inferred.because) if inferred.is_decided else None
        yield Judged(each.row, inferred, kinship)


def _reference(kinship: Kinship, energies: Iterable[NDArray[np.float32]]) -> Iterator[Reference]:
    """Yield the mean of profiles of one width; nothing if there are none or widths differ."""
    logs = [logs_of(each) for each in energies]
    if logs and len({len(each) for each in logs}) == 1:
        yield Reference(kinship, np.mean(logs, axis=0))


def _component(site: str) -> str:
    """Return the component whose output is a site such as `layers.3.ffn.norm.out`."""
    return site.rpartition(".out")[0]
