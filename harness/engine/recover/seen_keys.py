"""Recover which keys attention saw, and say by which rule.

What attention returns is the mean of the values that it saw, by shares that queries and keys
determine. So whether a key counts is a linear unknown, 1 or 0: it is solved for by the distance
between token and key, and by the key's position, over all rows that differ. The sets that come out
are read as ranges, all but a range, or every so many.

Shape letters: T queries, S keys, H heads, D width of a head, U unknowns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.faults.attention import FAR, by_lists, lists_of, without
from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    facts_at,
    has_facts,
    with_facts,
    with_function,
)
from degarble.harness.engine.recover.stated import operation
from degarble.references.facts import single
from degarble.references.traced.attention import MASK, SINK, admitted_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.attention import ListedAttention
    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

ATTENTION = "traced.attention"
DISTANCE, KEY = "distance", "key"
MOST_ROWS = 192  # queries whose outputs are solved, fewer where their equations are large
_MOST_BYTES = 1 << 30  # of equations
_MOST_EQUATIONS = 4096  # of a query
MOST_KEYS = 1024
KNOWN = 0.2  # error of an unknown, up to which it is taken for 0 or 1
_FEWEST = 2  # queries
_AGAIN = 4  # times that odd queries are left out
_ODD = 30.0  # times the square that other queries leave
_FEW_ODD = 0.2  # of the queries
_DIFFERS = 0.003  # of a query's output, that roundings do not change
_RIDGE = 1e-12
_TINY = 1e-300


@operation
class KeyRule(NamedTuple):
    """The keys that are seen, by distance or position: those in a range, or all but those."""

    feature: str
    low: int
    high: int | None
    step: int = 1
    outside: bool = False
    first: int = 0  # position of a query from which on it holds
    all_else: bool = False  # whoever would see nothing sees everything

    @property
    def words(self) -> str:
        """Say what a token sees."""
        text = self._of_distances() if self.feature == DISTANCE else self._of_keys()
        text += " (where that is none, it sees all)" if self.all_else else ""
        return f"{text}, from position {self.first} on" if self.first else text

    def _of_distances(self) -> str:
        if self.step > 1:
            of = f" within {self.high} tokens" if self.high is not None else ""
            start = "itself" if not self.low else f"the key {self.low} back"
            return f"a token sees every {self.step}. key{of} only, counted back from {start}"
        if self.outside or self.low > 0:
            ends = (self.low, self.high) if self.outside else (0, self.low - 1)
            if ends == (0, 0):
                text = "a token does not see its own key"
            elif ends[0] == ends[1]:
                text = f"a token does not see the key {ends[0]} back"
            else:
                text = f"a token does not see the keys {ends[0]} to {ends[1]} back"
            if self.outside or self.high is None:
                return text
            return f"{text}, and none more than {self.high} back"
        text = f"a token sees keys up to {-self.low} ahead of it" if self.low else ""
        if self.high is None:
            return text or "a token sees all keys up to its own"
        window = f"a token sees the {self.high + 1} latest keys only, its own among them"
        return f"{text}, and {window}" if text else window

    def _of_keys(self) -> str:
        ends = f"{self.low} to {self.high}" if self.high is not None else f"{self.low} on"
        one = self.high == self.low
        where = f"at position {self.low}" if one else f"at positions {ends}"
        if self.step > 1:
            where = f"at every {self.step}. position from {self.low} on"
        key = "key" if one else "keys"
        if self.outside:
            return f"the {key} {where} {'is' if one else 'are'} seen by no other token"
        return f"only the {key} {where} and its own {'are'} seen by a token"

    def holds(self, value: Tensor) -> Tensor:
        """Return which distances or positions are seen."""
        inside = (value >= self.low) & ((value - self.low) % self.step == 0)
        if self.high is not None:
            inside &= value <= self.high
        return inside ^ self.outside


@operation
def admits(rule: KeyRule, own: Any, *at: Tensor) -> Tensor:
    """Return which keys are seen by a rule; a mask function like those of a model."""
    _batch, _head, query, key = at
    admitted = own(*at).bool() if own is not None else key <= query
    return _seen(rule, admitted, query, key)


def _seen(rule: KeyRule, admitted: Tensor, query: Tensor, key: Tensor) -> Tensor:
    if rule.feature == KEY:
        seen = admitted & (rule.holds(key) | (key == query))
    else:
        seen = rule.holds(query - key)
        if rule.outside:
            seen &= admitted
    if rule.all_else:
        seen |= ~seen.any(-1, keepdim=True)
    some = seen.any(-1, keepdim=True) & (query >= rule.first)
    return torch.where(some, seen, admitted)


@operation
def with_rule(rule: KeyRule, facts: Any) -> Any:
    """Return facts of attention in which a rule says which keys are seen."""
    own = facts.traced.facts.get(MASK)
    known = {**facts.traced.facts, MASK: partial(admits, rule, own)}
    return replace(facts, traced=replace(facts.traced, facts=known))


@dataclass(frozen=True, eq=False)
class _Queries:
    """Rows of one sequence that differ; all keys have weights, as if there were no mask."""

    weights: Tensor  # [H, T, S]
    values: Tensor  # [H, S, D]
    outputs: Tensor  # [T, H, D]
    sinks: Tensor | None  # [H, T]
    positions: Tensor  # [T]
    admitted: Tensor  # [T, S], by the model


def rules_of_keys(
    context: ComponentContext, calls: Sequence[CallRecord]
) -> list[list[FaultVariant]]:
    """Return rules for the keys that were seen, which the rows that differ suggest.

    Those that hold everywhere come first, then the same from a position on.
    """
    if context.component.kind != ATTENTION or not has_facts(context):
        return []
    if any(MASK in record.inputs or record.implied for record in calls):
        return []
    try:
        rows, healthy = _rows(context, calls)
    except CANNOT_RUN:
        return []
    if sum(len(each.positions) for each in rows) < _FEWEST:
        return []
    first = min(int(each.positions.min()) for each in rows)
    rules = [
        rule
        for rule in (*_of_feature(rows, DISTANCE), *_of_feature(rows, KEY))
        if not _is_own(rule, rows)
    ]
    rules += [r._replace(all_else=True) for r in rules if r.feature == DISTANCE and r.low > 0]
    later = [rule._replace(first=first) for rule in rules] if healthy and first else []
    return [
        [FaultVariant(rule.words, with_facts(context, partial(with_rule, rule))) for rule in group]
        for group in (rules, later)
    ]


def _is_own(rule: KeyRule, rows: Sequence[_Queries]) -> bool:
    """Tell whether a rule changes nothing."""
    for each in rows:
        shape = each.admitted.shape
        query, key = each.positions[:, None].expand(shape), torch.arange(shape[1]).expand(shape)
        if not torch.equal(_seen(rule, each.admitted, query, key), each.admitted):
            return False
    return True


def _rows(
    context: ComponentContext, calls: Sequence[CallRecord]
) -> tuple[list[_Queries], list[int]]:
    """Return the queries whose outputs differ, and the positions of those that do not."""
    rows: list[_Queries] = []
    healthy: list[int] = []
    left = MOST_ROWS
    for record in calls:
        shown = _shown(record)
        if shown is None:
            continue
        heads, columns = shown
        for query, key, value, *outputs in _by_sequence(record):
            if len(key) > MOST_KEYS or not bool(outputs[0].isfinite().all()):
                continue
            seen, right = (side[:, heads][..., columns] for side in outputs)
            gap, size = ((x.flatten(1).norm(dim=1)) for x in (seen - right, right))
            wrong = gap > _DIFFERS * size
            at = torch.arange(len(key) - len(query), len(key))
            healthy += at[~wrong].tolist()
            chosen = wrong.nonzero().flatten()
            chosen, left = _spread(chosen, left, (len(key), seen[0].numel()))
            if len(chosen):
                weights, sinks, admitted = _shares(context, query, key)
                group = query.shape[1] // key.shape[1]
                values = value.repeat_interleave(group, 1).transpose(0, 1)[heads][..., columns]
                sinks = None if sinks is None else sinks[heads][:, chosen]
                some = _solved_columns(*seen.shape[1:])
                own = _Queries(
                    weights[heads][:, chosen], values[..., some], seen[chosen][..., some], sinks,
                    at[chosen], admitted[chosen],
                )  # fmt: skip
                rows.append(own)
    return rows, healthy


def _spread(queries: Tensor, left: int, each_has: tuple[int, int]) -> tuple[Tensor, int]:
    """Return evenly spread queries for which there is room, and what room of MOST_ROWS is left.

    Each has so many unknowns and outputs.
    """
    unknowns, outputs = each_has
    size = torch.float64.itemsize * unknowns * min(outputs, _MOST_EQUATIONS)
    each = max(1, -(-size * MOST_ROWS // _MOST_BYTES))
    most = max(0, left) // each
    if len(queries) > most:
        queries = queries[torch.linspace(0, len(queries) - 1, most).long()]
    return queries, left - each * len(queries)


def _solved_columns(heads: int, wide: int) -> Tensor:
    """Return the columns of each head that give equations: all, or some spread evenly."""
    count = min(wide, -(-_MOST_EQUATIONS // max(1, heads)))
    return torch.linspace(0, wide - 1, count).round().long()


def _shown(record: CallRecord) -> tuple[Tensor, Tensor] | None:
    """Return which heads and columns of outputs are looked at; None where rows differ in that."""
    heads, wide = record.inputs["query"].shape[1], record.inputs["value"].shape[-1]
    held = record.held.get("out")
    if held is None:
        return torch.arange(heads), torch.arange(wide)
    by_head = held.reshape(len(held), heads, -1)
    of_heads, of_columns = by_head.any(2).any(0), by_head.any(1).any(0)
    if not torch.equal(by_head, (of_heads[:, None] & of_columns).expand_as(by_head)):
        return None
    return of_heads.nonzero().flatten(), of_columns.nonzero().flatten()


def _by_sequence(record: CallRecord) -> Iterator[tuple[Tensor, ...]]:
    """Yield query, key, value, output and right output of each sequence; none if they are unclear.

    The keys of a sequence are those of all its tokens so far.
    """
    query, key, value = (record.inputs[n].double() for n in ("query", "key", "value"))
    seen, right = (side["out"].double() for side in (record.outputs, record.expected))
    if seen.shape != right.shape or len(seen) != len(query):
        return
    seen, right = (side.reshape(*query.shape[:2], -1) for side in (seen, right))
    positions = record.inputs.get("positions")
    ends = record.inputs.get("token_offsets", torch.tensor([0, len(query)])).tolist()
    spans = [(a, b) for a, b in pairwise(ends) if b > a]
    lengths = [len(key)]
    if positions is not None:
        lengths = [int(positions[b - 1]) + 1 for _, b in spans]
    if sum(lengths) != len(key) or len(lengths) != len(spans):
        return
    begin = 0
    for (a, b), length in zip(spans, lengths, strict=True):
        of = slice(begin, begin + length)
        yield query[a:b], key[of], value[of], seen[a:b], right[a:b]
        begin += length


def _shares(
    context: ComponentContext, query: Tensor, key: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return shares of keys [H, T, S] as if all were seen, those of sinks, and what is admitted."""
    facts = facts_at(context).traced.facts
    heads = query.shape[1]
    scale = facts.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    all_keys = key.repeat_interleave(heads // key.shape[1], 1)
    scores = torch.einsum("thd,shd->hts", query, all_keys) * scale
    cap = facts.get("softcap")
    if cap:
        scores = torch.tanh(scores / cap) * cap
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    sink = _sink(context, heads)
    sinks = None if sink is None else (sink[:, None] - top[..., 0]).exp() / total[..., 0]
    return weights / total, sinks, admitted_keys(facts.get(MASK), len(query), len(key))


def _sink(context: ComponentContext, heads: int) -> Tensor | None:
    if facts_at(context).traced.facts.get(SINK) is None:
        return None
    held = [w for w in dict(context.weights).values() if w.shape == torch.Size((heads,))]
    return held[0].values(torch.float64).double() if len(held) == 1 else None


class KeyEquations(NamedTuple):
    """Equations of one query: what each unknown adds [S, E], which those are, and the rest [E]."""

    unknowns: Tensor
    pulls: Tensor
    rest: Tensor
    mass: Tensor  # [S], shares before a mask


def _of_feature(rows: Sequence[_Queries], feature: str) -> Iterator[KeyRule]:
    """Solve for which distances, or positions, are seen; yield the rules that the known ones obey.

    By position, a token sees its own key, and none that the model does not admit. Few queries may
    follow no rule: those that would see nothing.
    """
    most = max(each.weights.shape[2] for each in rows)
    shift = most - 1 if feature == DISTANCE else 0
    fixed = feature == KEY or any(each.sinks is not None for each in rows)
    queries = [part for each in rows for part in _equations(each, feature, shift)]
    known = seen_and_unseen(queries, most + shift, fixed=fixed)
    if known is not None:
        seen, unseen = ((at.nonzero().flatten() - shift).tolist() for at in known)
        yield from rules_that_give(feature, seen, unseen)


def seen_and_unseen(
    queries: Sequence[KeyEquations], size: int, *, fixed: bool
) -> tuple[Tensor, Tensor] | None:
    """Mark the unknowns that are 1 and those that are 0; None where one is neither."""
    for _ in range(_AGAIN):
        found, error = _solved(queries, size, fixed=fixed)
        lefts = torch.stack(
            [(found[q.unknowns] @ q.pulls + q.rest).square().sum() for q in queries]
        )
        odd = lefts > _ODD * lefts.median()
        if not bool(odd.any()) or int(odd.sum()) > _FEW_ODD * len(queries):
            break
        queries = [q for q, out in zip(queries, odd.tolist(), strict=True) if not out]
    sure = error < KNOWN
    seen, unseen = (sure & ((found - one).abs() < KNOWN + error) for one in (1, 0))
    return None if bool((sure & ~seen & ~unseen).any()) else (seen, unseen)


def _equations(rows: _Queries, feature: str, shift: int) -> Iterator[KeyEquations]:
    keys = torch.arange(rows.weights.shape[2])
    for t, at in enumerate(rows.positions.tolist()):
        out_HD, share_HS = rows.outputs[t], rows.weights[:, t]
        weigh_H = 1 / out_HD.square().mean(1).sqrt().clamp(min=_TINY)
        pull_SHD = (rows.values - out_HD[:, None]).transpose(0, 1)
        pull_SHD = pull_SHD * (share_HS * weigh_H[:, None]).T[..., None]
        rest_HD = torch.zeros_like(out_HD)
        if rows.sinks is not None:
            rest_HD = -out_HD * (rows.sinks[:, t] * weigh_H)[:, None]
        free = torch.ones_like(keys, dtype=torch.bool)
        if feature == KEY:
            rest_HD = rest_HD + pull_SHD[at]
            free = rows.admitted[t] & (keys != at)
        index = (at - keys + shift if feature == DISTANCE else keys)[free]
        yield KeyEquations(
            index, pull_SHD[free].flatten(1), rest_HD.flatten(), share_HS[:, free].sum(0)
        )


def _solved(queries: Sequence[KeyEquations], size: int, *, fixed: bool) -> tuple[Tensor, Tensor]:
    """Return unknowns and their errors, infinite where nothing is known of one.

    Where no term is fixed, all may have a factor: they are 0 or 1 in the mean of their shares.
    """
    gram = torch.zeros(size, size, dtype=torch.float64)
    known, mass = gram[0].clone(), gram[0].clone()
    for each in queries:
        gram[each.unknowns[:, None], each.unknowns[None]] += each.pulls @ each.pulls.T
        known[each.unknowns] += each.pulls @ each.rest
        mass[each.unknowns] += each.mass
    constant = sum(float(each.rest.square().sum()) for each in queries)
    count = sum(each.rest.numel() for each in queries)
    values = torch.zeros(size, dtype=torch.float64)
    errors = torch.full_like(values, torch.inf)
    held = gram.diagonal() > 0
    if not bool(held.any()):
        return values, errors
    own, scale = gram[held][:, held], gram.diagonal()[held].rsqrt()
    even = own * scale[:, None] * scale[None] + _RIDGE * torch.eye(len(own), dtype=own.dtype)
    inverse = torch.linalg.inv(even) * scale[:, None] * scale[None]
    if fixed:
        found = -inverse @ known[held]
        left = constant + float(found @ own @ found) + 2 * float(found @ known[held])
    else:
        found = inverse @ mass[held]
        weighed = mass[held] * found
        found = found * float(weighed.sum()) / float((weighed * found).sum() or 1.0)
        left = float(found @ own @ found)
    variance = max(left, 0.0) / max(1, count - len(found))
    values[held] = found
    errors[held] = (variance * inverse.diagonal().clamp(min=0)).sqrt()
    return values, errors


def rules_that_give(feature: str, seen: list[int], unseen: list[int]) -> Iterator[KeyRule]:
    """Yield the rules that give all that is known, the simplest first."""
    if not seen or not unseen:
        return
    tried = []
    low, high = min(seen), max(seen)
    top = None if high > max(unseen) else high
    bottom = low if feature == DISTANCE or low > min(unseen) else 0
    tried.append(KeyRule(feature, bottom, top))
    inner = [each for each in unseen if each >= 0]
    tried += [
        KeyRule(feature, min(part), max(part), outside=True) for part in (inner, unseen) if part
    ]
    step = gcd(*(each - low for each in seen))
    if step > 1:
        tried += [KeyRule(feature, low, None, step), KeyRule(feature, low, high, step)]
    gaps = gcd(*(each - min(unseen) for each in unseen))
    if gaps > 1:
        tried.append(KeyRule(feature, min(unseen), None, gaps, outside=True))
    given, missing = torch.tensor(seen), torch.tensor([u for u in unseen if u >= 0] or unseen)
    for rule in tried:
        if bool(rule.holds(given).all()) and not bool(rule.holds(missing).any()):
            yield rule
            return


# ---- lists of sparse attention -------------------------------------------------------------------
#
# A token of V4 has a window of latents and a list of compressed entries. Whether a row counts is a
# linear unknown as well: by how far back in the window it is, or by its place in the list of
# entries, which is the entry's number where none are chosen. The other list is taken as it is.
#
# Shape letters: L row width, R rows of a sequence.

WINDOW, RANK, ENTRY = "window", "rank", "entry"


@operation
class ListRule(NamedTuple):
    """The rows of one list that are seen."""

    feature: str
    keys: KeyRule

    @property
    def words(self) -> str:
        """Say what a token sees."""
        rule = self.keys
        if self.feature == WINDOW:
            return f"in its window, {rule.words}"
        what = "chosen entry" if self.feature == RANK else "entry"
        listed = "chosen entries" if self.feature == RANK else "entries"
        if rule.step > 1:
            which = f"every {rule.step}. of the {listed} from {rule.low} on"
        elif rule.high is None:
            which = f"the {listed} from {rule.low} on"
        elif rule.low == rule.high:
            which = f"the {what} {rule.low}"
        else:
            which = f"the {listed} {rule.low} to {rule.high}"
        return f"a token does not see {which}" if rule.outside else f"a token sees {which} only"


def feature_of(feature: str, listed: ListedAttention) -> tuple[Tensor, Tensor]:
    """Return a feature of the rows [T, R] of a list, and which rows are in it."""
    far = listed.place >= FAR
    if feature == WINDOW:
        return listed.near - 1 - listed.place, (listed.place >= 0) & ~far
    return listed.place - FAR, far


@operation
def entries_gone(rule: ListRule, listed: ListedAttention) -> Tensor:
    """Mark the places [T, R] that a rule leaves out."""
    value, inside = feature_of(rule.feature, listed)
    return inside & ~rule.keys.holds(value)


def rules_of_entries(
    context: ComponentContext, calls: Sequence[CallRecord]
) -> Iterator[FaultVariant]:
    """Yield rules for the rows of lists that were seen, which the tokens that differ suggest."""
    if context.role != "attn.attend" or not has_facts(context):
        return
    if any("window" not in record.inputs or record.implied or record.held for record in calls):
        return
    chosen = all("chosen" in record.inputs for record in calls)
    for feature in (WINDOW, RANK if chosen else ENTRY):
        try:
            queries = list(_of_lists(context, calls, feature))
        except CANNOT_RUN:
            return
        if len(queries) < _FEWEST or not any(len(each.unknowns) for each in queries):
            continue
        size = 1 + max(int(each.unknowns.max()) for each in queries if len(each.unknowns))
        if size > MOST_KEYS:
            continue
        known = seen_and_unseen(queries, size, fixed=True)
        if known is None:
            continue
        of = DISTANCE if feature == WINDOW else KEY
        seen, unseen = (at.nonzero().flatten().tolist() for at in known)
        rules = rules_that_give(of, seen, unseen)
        if unseen and not seen:  # no token has another row in its list
            rules = iter([KeyRule(of, min(unseen), max(unseen), outside=True)])
        for keys in rules:
            rule = ListRule(feature, keys)
            change = with_function(
                context, partial(by_lists, partial(without, partial(entries_gone, rule)))
            )
            yield FaultVariant(rule.words, change)


def _of_lists(
    context: ComponentContext, calls: Sequence[CallRecord], feature: str
) -> Iterator[KeyEquations]:
    """Yield what each wrong token says of the rows of one list."""
    facts: Any = facts_at(context)
    sink_H = single(context.weights).values(torch.float64).double()
    left = MOST_ROWS
    for record in calls:
        seen, right = (side["out"].double() for side in (record.outputs, record.expected))
        if seen.shape != right.shape or not bool(seen.isfinite().all()):
            continue
        begin = 0
        for listed in lists_of(facts, record.inputs):
            count = len(listed.q)
            own = seen[begin : begin + count].reshape(listed.q.shape)
            gap = (own - right[begin : begin + count].reshape(own.shape)).flatten(1).norm(dim=1)
            wrong = (gap > _DIFFERS * own.flatten(1).norm(dim=1)).nonzero().flatten()
            begin += count
            value, inside = feature_of(feature, listed)
            if not len(wrong) or bool((inside & (value >= MOST_KEYS)).any()):
                continue
            wrong, left = _spread(wrong, left, (int(inside.sum(1).max()), own[0].numel()))
            yield from _of_tokens(listed, own, wrong, sink_H, (value, inside))


def _of_tokens(
    listed: ListedAttention, out_THL: Tensor, wrong: Tensor, sink_H: Tensor,
    of_rows: tuple[Tensor, Tensor],
) -> Iterator[KeyEquations]:  # fmt: skip
    """Yield the equations of some tokens; `of_rows` is the feature of rows, and which have one."""
    value, inside = of_rows
    rows = listed.rows.double()
    some = _solved_columns(*out_THL.shape[1:])
    for t in wrong.tolist():
        there = listed.place[t] >= 0
        logit_HR = listed.q[t].double() @ rows.T * listed.q.shape[-1] ** -0.5
        top = torch.maximum(logit_HR[:, there].amax(1), sink_H)
        share_HR = (logit_HR - top[:, None]).exp()[:, there]
        out_HL = out_THL[t]
        weigh_H = 1 / out_HL.square().mean(1).sqrt().clamp(min=_TINY)
        out_HL = out_HL[:, some]
        pull_RHL = rows[there][:, None, some] - out_HL[None]
        pull_RHL *= (share_HR * weigh_H[:, None]).T[..., None]
        free = inside[t][there]
        rest_HL = pull_RHL[~free].sum(0) - out_HL * ((sink_H - top).exp() * weigh_H)[:, None]
        index, mass = value[t][there][free], share_HR[:, free].sum(0)
        yield KeyEquations(index, pull_RHL[free].flatten(1), rest_HL.flatten(), mass)
