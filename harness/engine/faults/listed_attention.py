"""V4's sparse attention over index lists, as a kernel computes it, with faults of those lists.

Each token has two lists, its window's positions and its entries. The softmax runs over them with
places left out, with empty places read, or with parts merged wrongly. The rows themselves are those
that the reference attends to; with nothing changed the output is the component's own.

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

FAR = 1 << 20  # places of entries begin here, after those of any window
_TILE = 64  # places that a kernel looks at together: none has those of both lists
_AT_ONCE = 32  # tokens, whose logits are held together


@dataclass(frozen=True, eq=False)
class Listed:
    """One sequence's queries [T, H, L] and rows [R, L], and each row's place [T, R] in the lists.

    A place is -1 if the row is in neither list, and FAR or more if it is in the list of entries.
    `near` and `far` are the lengths of the lists.
    """

    q: Tensor
    rows: Tensor
    place: Tensor
    near: int
    far: int
    first: tuple[Tensor, Tensor]  # rows [1, L] of slot 0: of the call's window, of its entries

    def absent(self, step: int) -> tuple[Tensor, Tensor]:
        """Return how many places [T] of each list are empty, with lengths rounded up to `step`."""
        far = self.place >= FAR
        taken = ((self.place >= 0) & ~far).sum(1), far.sum(1)
        held = (-(-count // step) * step for count in (self.near, self.far))
        near, entries = (count - used for count, used in zip(held, taken, strict=True))
        return near, entries

    def behind(self, some: slice) -> Tensor:
        """Return the places of some tokens, entries numbered on after the window's last tile."""
        place, held = self.place[some], -(-self.near // _TILE) * _TILE
        return torch.where(place >= FAR, place - FAR + held, place)


def by_lists(
    attend: Callable[[Any, Listed, Tensor], Tensor], facts: Any, inputs: Tensors, weights: Any
) -> Tensors:
    """Run a component with another attention over each sequence's lists."""
    sink = single(weights).values(facts.numerics.work)
    out = [attend(facts, each, sink) for each in lists_of(facts, inputs)]
    return {"out": torch.cat(out).to(facts.numerics.store)}


def lists_of(facts: Any, inputs: Tensors) -> Iterator[Listed]:
    """Yield the lists of every sequence of a call."""
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
        # The token at position p attends to p - window + 1 .. p: places 0 .. window - 1.
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
    """Return each sequence's rows: those of earlier calls, then those of this one."""
    kept, made = ([pair[i] for pair in counts] for i in (0, 1))
    new = inputs[name]
    old = inputs.get(f"state_{name}", new[:0])[: sum(kept)].to(new.dtype)
    return [torch.cat(pair) for pair in zip(old.split(kept), new.split(made), strict=True)]


def _numbers(inputs: Tensors, span: Any, entries: int, visible: Tensor | None) -> Tensor:
    """Return the place of every entry in each token's list, -1 for none."""
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
    """Attend with nothing changed."""
    return _attended(facts, listed, sink_H, listed.place >= 0)


def without(gone: Callable[[Listed], Tensor], facts: Any, listed: Listed, sink_H: Tensor) -> Tensor:
    """Attend with some places [T, R] left out."""
    return _attended(facts, listed, sink_H, (listed.place >= 0) & ~gone(listed))


def with_empty(step: int, facts: Any, listed: Listed, sink_H: Tensor) -> Tensor:
    """Read empty places as slot 0 of their cache, without a mask."""
    times = [*listed.absent(step)]
    rows, counts = [listed.rows], [(listed.place >= 0).to(sink_H.dtype)]
    for first, absent in zip(listed.first, times, strict=True):
        if len(first):
            rows.append(first)
            counts.append(absent[:, None].to(sink_H.dtype))
    more = Listed(listed.q, torch.cat(rows), listed.place, listed.near, listed.far, listed.first)
    return _attended(facts, more, sink_H, torch.cat(counts, dim=1))


def in_parts(part: int, facts: Any, listed: Listed, sink_H: Tensor) -> Tensor:
    """Sum parts of `part` places, each relative to its own maximum, without rescaling them.

    Parts are cut out of both lists, entries after the window.
    """
    return _attended(facts, listed, sink_H, listed.place >= 0, part)


def _attended(
    facts: Any, listed: Listed, sink_H: Tensor, times_TR: Tensor, part: int = 0
) -> Tensor:
    """Attend to rows with multiplicities; the sink adds to the denominator only."""
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
        # Probabilities are rounded to the storage dtype before the second product.
        stored = power if numerics.exact else power.to(numerics.store).to(numerics.work)
        out = torch.einsum("thr,rl->thl", stored * times, listed.rows)
        made.append(out / total[..., None])
    return torch.cat(made)


def _peaks(logit_THR: Tensor, part_TR: Tensor) -> Tensor:
    """Return the largest logit of the part that each row is in."""
    found = torch.zeros_like(logit_THR)
    for number in part_TR.unique().tolist():
        inside = (part_TR == number)[:, None]
        peak = _finite(logit_THR.masked_fill(~inside, -torch.inf).amax(-1, keepdim=True))
        found = torch.where(inside, peak, found)
    return found


def _finite(peak: Tensor) -> Tensor:
    """Replace -inf: a token that sees nothing has no maximum, and -inf - -inf is NaN."""
    return peak.clamp(min=torch.finfo(peak.dtype).min)
