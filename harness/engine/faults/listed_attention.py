"""V4's attention by lists, as a kernel has it: which rows a token is given, and at which place.

Owns the two lists of a token, its window's positions and its entries, as places beside the rows of
its sequence, and the softmax over them with places left out, empty ones read, or parts merged. The
rows themselves are those that the reference attends to. Kept honest by
suites/engine/faults/test_listed_attention.py: with nothing changed it is the component's own
output.

Shape letters: T tokens of a sequence, H heads, L row width, R rows of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from degarble.references.facts import single, spans_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    Tensors = Mapping[str, Tensor]

FAR = 1 << 20  # places of entries begin here, behind those of any window
_TILE = 64  # places that a kernel looks at together: none has those of both lists
_AT_ONCE = 32  # tokens, whose logits are held together


@dataclass(frozen=True, eq=False)
class Listed:
    """One sequence's queries [T, H, L] and rows [R, L], and the places [T, R] of rows in lists.

    A place is -1 where a row is in neither list. `near` and `far` count the places of each.
    """

    q: Tensor
    rows: Tensor
    place: Tensor
    near: int
    far: int
    first: tuple[Tensor, Tensor]  # rows [1, L] of slot 0: of the call's window, of its entries

    def absent(self, step: int) -> tuple[Tensor, Tensor]:
        """How many places [T] of each list are empty, up to a multiple of `step`."""
        far = self.place >= FAR
        taken = ((self.place >= 0) & ~far).sum(1), far.sum(1)
        held = (-(-count // step) * step for count in (self.near, self.far))
        near, entries = (count - used for count, used in zip(held, taken, strict=True))
        return near, entries

    def behind(self, some: slice) -> Tensor:
        """Places of some tokens, those of entries counted on behind the window's last tile."""
        place, held = self.place[some], -(-self.near // _TILE) * _TILE
        return torch.where(place >= FAR, place - FAR + held, place)


def by_lists(
    attend: Callable[[Any, Listed, Tensor], Tensor], facts: Any, inputs: Tensors, weights: Any
) -> Tensors:
    """A component's output with another attention over each sequence's lists."""
    sink = single(weights).values(facts.numerics.work)
    out = [attend(facts, each, sink) for each in lists_of(facts, inputs)]
    return {"out": torch.cat(out).to(facts.numerics.store)}


def lists_of(facts: Any, inputs: Tensors) -> Iterator[Listed]:
    """The lists of every sequence of a call."""
    window, ratio = facts.config.sliding_window, facts.decoder_block.ratio
    spans, work = spans_of(inputs), facts.numerics.work
    near = joined(inputs, "window", [(min(s.start, window - 1), s.count) for s in spans])
    counts = [(s.entries_before(ratio), s.entries_made(ratio)) if ratio else (0, 0) for s in spans]
    far = joined(inputs, "compressed", counts) if ratio else [near[0][:0] for _ in spans]
    widest = inputs["chosen"].shape[1] if "chosen" in inputs else max(map(len, far))
    firsts = tuple(torch.cat(each)[:1].to(work) for each in (near, far))
    for span, rows, entries in zip(spans, near, far, strict=True):
        positions = inputs["positions"][span.tokens]
        begin = span.start - min(span.start, window - 1)
        place = torch.arange(len(rows)) + begin - positions[:, None] + window - 1
        place = torch.where((place >= 0) & (place < window), place, -1)
        numbers = _numbers(inputs, span, len(entries), (positions + 1) // ratio if ratio else None)
        yield Listed(
            inputs["q"][span.tokens].to(work),
            torch.cat((rows, entries.to(rows.dtype))).to(work),
            torch.cat((place, numbers), dim=1),
            window,
            widest,
            firsts,  # type: ignore[arg-type]
        )


def joined(inputs: Tensors, name: str, counts: list[tuple[int, int]]) -> list[Tensor]:
    """Rows of each sequence: those of earlier calls, then those of this one."""
    kept, made = ([pair[i] for pair in counts] for i in (0, 1))
    new = inputs[name]
    old = inputs.get(f"state_{name}", new[:0])[: sum(kept)].to(new.dtype)
    return [torch.cat(pair) for pair in zip(old.split(kept), new.split(made), strict=True)]


def _numbers(inputs: Tensors, span: Any, entries: int, visible: Tensor | None) -> Tensor:
    """The place of every entry in a token's list, -1 for none."""
    place = torch.full((span.count, entries + 1), -1)
    if "chosen" in inputs:
        chosen = inputs["chosen"][span.tokens].long()
        index = torch.where((chosen >= 0) & (chosen < entries), chosen, entries)
        place.scatter_(1, index, FAR + torch.arange(chosen.shape[1]).expand(chosen.shape))
        place = place[:, :entries]
    elif visible is not None:
        number = torch.arange(entries)
        place = torch.where(number < visible[:, None], FAR + number, -1)
    else:
        place = place[:, :entries]
    return place


def whole(facts: Any, listed: Listed, sink_H: Tensor) -> Tensor:
    """Nothing changed."""
    return _attended(facts, listed, sink_H, listed.place >= 0)


def without(gone: Callable[[Listed], Tensor], facts: Any, listed: Listed, sink_H: Tensor) -> Tensor:
    """Some places [T, R] left out."""
    return _attended(facts, listed, sink_H, (listed.place >= 0) & ~gone(listed))


def with_empty(step: int, facts: Any, listed: Listed, sink_H: Tensor) -> Tensor:
    """Empty places read as slot 0 of their cache, and masked by nothing."""
    times = [*listed.absent(step)]
    rows, counts = [listed.rows], [(listed.place >= 0).to(sink_H.dtype)]
    for first, absent in zip(listed.first, times, strict=True):
        if len(first):
            rows.append(first)
            counts.append(absent[:, None].to(sink_H.dtype))
    more = Listed(listed.q, torch.cat(rows), listed.place, listed.near, listed.far, listed.first)
    return _attended(facts, more, sink_H, torch.cat(counts, dim=1))


def in_parts(part: int, facts: Any, listed: Listed, sink_H: Tensor) -> Tensor:
    """Sums of `part` places each, every one beside its own peak, added as if peaks were one.

    Parts are cut out of both lists, one behind the other.
    """
    return _attended(facts, listed, sink_H, listed.place >= 0, part)


def _attended(
    facts: Any, listed: Listed, sink_H: Tensor, times_TR: Tensor, part: int = 0
) -> Tensor:
    """Softmax over rows that each count a number of times; a sink takes part in the sum only."""
    numerics, made = facts.numerics, []
    for begin in range(0, len(listed.q), _AT_ONCE):
        some = slice(begin, begin + _AT_ONCE)
        q, times = listed.q[some], times_TR[some].to(sink_H.dtype)[:, None]
        logit = torch.einsum("thl,rl->thr", q, listed.rows) * q.shape[-1] ** -0.5
        logit = logit.masked_fill(times == 0, -torch.inf)
        largest = _finite(logit.amax(-1, keepdim=True))
        peak = _peaks(logit, listed.behind(some) // part) if part else largest
        power = torch.exp(logit - peak)
        total = (power * times).sum(-1) + torch.exp(sink_H - largest.squeeze(-1))
        stored = power if numerics.exact else power.to(numerics.store).to(numerics.work)
        out = torch.einsum("thr,rl->thl", stored * times, listed.rows)
        made.append(out / total[..., None])
    return torch.cat(made)


def _peaks(logit_THR: Tensor, part_TR: Tensor) -> Tensor:
    """The largest logit of the part that a row is in."""
    found = torch.zeros_like(logit_THR)
    for number in part_TR.unique().tolist():
        inside = (part_TR == number)[:, None]
        peak = _finite(logit_THR.masked_fill(~inside, -torch.inf).amax(-1, keepdim=True))
        found = torch.where(inside, peak, found)
    return found


def _finite(peak: Tensor) -> Tensor:
    """Trap: a token that sees nothing has no peak, and -inf - -inf is NaN."""
    return peak.clamp(min=torch.finfo(peak.dtype).min)
