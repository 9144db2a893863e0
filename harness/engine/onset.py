"""Where in a tensor a difference sits, and where it starts: told by the config's own constants.

Owns the narrowing of an origin: phase, sequence, first position, stream or head, expert, half,
columns. A place is only named where it is a strict part of what was seen, so that `where` stays
empty for a difference that is everywhere. An onset at a constant of the config names the constant:
128 is the sliding window, 4 a compress ratio, and what is exact at position 0 turns with positions.

Refuses nothing. Kept honest by suites/engine/test_onset.py.
Shape letters: R rows (tokens), W columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from degarble.harness.anatomy.config import V4Config
from degarble.harness.engine.budget import HEADROOM, spacing
from degarble.harness.engine.comparison import TILE
from degarble.harness.formats.arrays import FORMAT_OF_DTYPE
from degarble.harness.record.capture_types import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.anatomy.components import Component
    from degarble.harness.anatomy.config import Config
    from degarble.harness.engine.replay import Batch
    from degarble.harness.record.capture_types import Step

    Where = dict[str, str | int | float]

_AXES = MappingProxyType(
    {
        "attn.q_head_norm_rope": "head", "attn.attend": "head", "attn.indexer.q": "head",
        "attn.indexer.weights_proj": "head", "attn.hc_post": "stream", "ffn.hc_post": "stream",
        "ffn.experts.w13": "slot", "ffn.experts.w2": "slot", "ffn.experts.act_quant": "slot",
    }
)  # fmt: skip
_HALVES = ("w13",)
_MOST_SPANS = 4  # ranges that are written out; beyond that their number is


@dataclass(frozen=True)
class Onset:
    """Where a difference sits, as data and as the end of a sentence."""

    where: Mapping[str, str | int | float] = field(default_factory=dict)
    sentence: str = ""


@dataclass(frozen=True, eq=False)
class RowsOf:
    """What the rows of a batch are."""

    position: Tensor  # -1 where rows are no tokens
    decode: Tensor
    sequence: Tensor
    experts: Tensor | None = None  # [T, K], of routed rows

    def at(self, chosen: Tensor) -> RowsOf:
        """Some of them."""
        experts = None if self.experts is None else self.experts[chosen]
        return RowsOf(self.position[chosen], self.decode[chosen], self.sequence[chosen], experts)

    @classmethod
    def of(cls, batch: Batch, steps: Mapping[int, Step]) -> RowsOf:
        """Look the rows up in their steps."""
        if batch.whole is not None and batch.kept is not None:
            return cls.of(batch.whole, steps).at(batch.kept)
        decode = torch.zeros(len(batch.step_of), dtype=torch.bool)
        sequence = torch.full((len(batch.step_of),), -1)
        for call, span in zip(batch.calls, batch.spans, strict=True):
            step = steps[call.step]
            decode[span] = step.phase is Phase.DECODE
            count = span.stop - span.start
            owners = step.sequences
            if count != len(owners):
                owners = tuple(dict.fromkeys(owners))
            if count == len(owners):
                sequence[span] = torch.tensor(owners)
        return cls(batch.position_of, decode, sequence, batch.inputs.get("experts"))


def onset_of(
    config: Config,
    component: Component,
    pair: tuple[Tensor, Tensor],
    rows: RowsOf | None = None,
    slack: Tensor | None = None,
) -> Onset:
    """Say where a candidate, the first of `pair`, differs from its twin."""
    bad = beyond(*pair, slack)
    if not bad.ndim or not bool(bad.any()):
        return Onset()
    where: Where = {}
    words: list[str] = []
    count = bad.shape[0]
    by_row = bad.reshape(count, -1).any(1)
    if rows is not None and len(rows.position) == count:
        asked = torch.ones(count, dtype=torch.bool)
        told: list[str] = []
        if rows.experts is not None and rows.experts.shape[:1] == (count,):
            told, asked = _by_expert(bad, rows.experts, where)
        words += _in_time(config, component, by_row[asked], rows.at(asked), where)
        words += told
    words += _by_axis(component, bad, where)
    words += _by_column(config, component, bad, where)
    if count > 1 and int(by_row.sum()) == 1 and "first position" not in where:
        where["row"] = int(by_row.nonzero()[0])
    return Onset(where, f" ({', '.join(words)})" if words else "")


def beyond(candidate: Tensor, twin: Tensor, slack: Tensor | None) -> Tensor:
    """Which elements are further from the twin than an element may be; all that differ, else."""
    if candidate.dtype.itemsize == 1 and candidate.dtype.is_floating_point:
        candidate, twin = candidate.view(torch.uint8), twin.view(torch.uint8)
    differs = (candidate != twin) & ~(candidate.isnan() & twin.isnan())
    if slack is None or candidate.dtype not in FORMAT_OF_DTYPE:
        return differs
    c, t = candidate.double(), twin.double()
    known = c.isfinite() & t.isfinite()
    room = slack.double()
    step = torch.from_numpy(
        spacing((t.abs().nan_to_num(0, 0, 0) + room).numpy(), FORMAT_OF_DTYPE[candidate.dtype])
    )
    far = torch.where(known, (c - t).abs() > (room + step) / HEADROOM, differs)
    return far if bool(far.any()) else differs


def _in_time(
    config: Config, component: Component, by_row: Tensor, rows: RowsOf, where: Where
) -> Iterator[str]:
    """Phase, sequence, first position."""
    if bool(rows.decode.any()) and not bool(rows.decode.all()):
        if bool(rows.decode[by_row].all()):
            where["phase"] = "decode"
            yield "only in decode"
        elif not bool(rows.decode[by_row].any()):
            where["phase"] = "prefill"
            yield "only in prefill"
    owners = rows.sequence.unique()
    of_bad = rows.sequence[by_row].unique()
    if len(owners) > 1 and len(of_bad) < len(owners) and int(owners.min()) >= 0:
        where["sequence"] = spans(of_bad.tolist())
        yield f"only sequence {where['sequence']} of {len(owners)}"
    positions = rows.position
    if not len(positions) or int(positions.min()) < 0:
        return
    first = int(positions[by_row].min())
    before = positions < first
    if bool(before.any()) and first > 0:
        where["first position"] = first
        named = constant_at(config, component, first)
        if int(by_row.sum()) == 1:
            yield f"only position {first}" + (f", {named}" if named else "")
        elif bool(before[positions == 0].any()) and first <= 1:
            yield "exact at position 0"
        elif "phase" not in where or named:
            yield f"from position {first} on" + (f", {named}" if named else "")


def constant_at(config: Config, component: Component, position: int) -> str:
    """The constant of the config at which a position lies; empty where it lies at none."""
    block = component.block
    known: dict[int, str] = {}
    if isinstance(config, V4Config):
        known[config.sliding_window] = f"the sliding window of {config.sliding_window}"
        if block is not None and block.ratio:
            ratio = block.ratio
            known[ratio - 1] = f"the first entry of {ratio} tokens"
            known[ratio] = f"the compress ratio {ratio}"
            top = config.index_topk * ratio
            if component.role.startswith("attn.indexer") or ratio == min_ratio(config):
                known.setdefault(top + ratio - 1, f"behind index_topk = {config.index_topk}")
                known.setdefault(top, f"index_topk = {config.index_topk} entries")
    else:
        known[config.index_topk] = f"index_topk = {config.index_topk}"
    if position in known:
        return known[position]
    if position and position % TILE[0] == 0:
        return f"{position // TILE[0]} x {TILE[0]}"
    return ""


def min_ratio(config: V4Config) -> int:
    """The smallest compress ratio, that of layers with an indexer; 0 where none compresses."""
    return min((block.ratio for block in config.layers if block.ratio), default=0)


def _by_expert(bad: Tensor, experts: Tensor, where: Where) -> tuple[list[str], Tensor]:
    """Which experts, in words; and the rows that visited them, which alone can tell more."""
    everyone = torch.ones(len(bad), dtype=torch.bool)
    if bad.ndim < 3 or bad.shape[:2] != experts.shape:
        return [], everyone
    hit = bad.reshape(*experts.shape, -1).any(-1)
    visited, struck = experts.unique().tolist(), experts[hit].unique().tolist()
    if not 1 <= len(struck) < len(visited):
        return [], everyone
    where["expert"] = struck[0] if len(struck) == 1 else spans(struck)
    clean = sorted(set(visited) - set(struck))
    words = f"only expert {where['expert']} of the {len(visited)} that were visited"
    if len(clean) == 1:
        words = f"expert {clean[0]} exact"
    return [words], torch.isin(experts, torch.tensor(struck)).any(1)


def _by_axis(component: Component, bad: Tensor, where: Where) -> Iterator[str]:
    axis = _AXES.get(component.role)
    if axis is None or bad.ndim != 3 or "expert" in where:
        return
    hit = bad.any(2).any(0)
    struck = hit.nonzero().flatten().tolist()
    if len(struck) < len(hit):
        where[axis] = struck[0] if len(struck) == 1 else spans(struck)
        yield f"only {axis} {where[axis]} of {len(hit)}"


def _by_column(config: Config, component: Component, bad: Tensor, where: Where) -> Iterator[str]:
    """Heads or halves that lie side by side; else a range of columns."""
    width = bad.shape[-1]
    struck = bad.reshape(-1, width).any(0).nonzero().flatten().tolist()
    if len(struck) == width or bad.ndim < 2:
        return
    if component.role.endswith(_HALVES) and width % 2 == 0:
        halves = {at * 2 // width for at in struck}
        if len(halves) == 1:
            where["half"] = ("gate", "up")[halves.pop()]
            yield f"only the {where['half']} half"
    heads = getattr(config, "num_attention_heads", 0)
    if component.role == "attn.wq_b" and heads and width % heads == 0:
        hit = sorted({at * heads // width for at in struck})
        if len(hit) < heads:
            where["head"] = hit[0] if len(hit) == 1 else spans(hit)
            yield f"only head {where['head']} of {heads}"
            return
    whole = struck == list(range(struck[0], struck[-1] + 1))
    if whole or len(struck) <= _MOST_SPANS:
        where["columns"] = spans(struck)
        yield f"only columns {where['columns']} of {width}"


def spans(numbers: list[int]) -> str:
    """Numbers as ranges: 0-3, 7. Many ranges are counted instead."""
    found = sorted(set(numbers))
    breaks = [0, *(at for at in range(1, len(found)) if found[at] != found[at - 1] + 1), len(found)]
    parts = [(found[a], found[b - 1]) for a, b in pairwise(breaks)]
    if len(parts) > _MOST_SPANS:
        return f"{len(found)} from {found[0]} to {found[-1]}"
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
