"""Error budgets of attention outputs: errors of the softmax shares, then of the sums over rows.

A share is one normalised softmax weight. It errs by its logit's error (half the sum's length in u
of |q| |k|), by its peers' errors through their sum, and by the exponential. Kernels that never
store a logit round shares relative to a peak of their own choice, the twin relative to the row's
peak: each is off by half a spacing of BF16, together 2^-8 of the share. Implementations that store
logits and normalised shares step only at rounding boundaries. The output errs by the sum over rows
of a share's error times the row.

V3.2 in absorbed form stores the query after the key projection and the mixed latent before the
value projection. Its error is the smaller of two bounds: through each latent's own error, or
through the shares and the expanded values plus one spacing a latent.

Shape letters: T tokens, H heads, R rows, C latent width, n nope width, v value width, L row width
of V4.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from degarble.harness.engine.budget.bounded_values import FUNCTION, Near, exactly, memories, stored
from degarble.harness.engine.budget.budget import Budget, spacing
from degarble.harness.engine.budget.rules import ALIGNED_TERMS, UNDERFLOW, U, output_format
from degarble.harness.engine.budget.shares import ShareStatistics, Weighed
from degarble.harness.formats.element_formats import BF16
from degarble.harness.report.number_text import number
from degarble.references import attention, indexer, latent_attention
from degarble.references.facts import V4Facts, V32Facts, single, spans_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.budget.call import Call
    from degarble.references.facts import Span
    from degarble.references.latent_attention import Form

    _Key = tuple[object, ...]
    _Kept = tuple[list[object], Budget]

_MOST_KEPT = 1 << 18  # numbers of an output whose budget is kept
_CALLS_KEPT = 8
_CHUNK = 1 << 22  # shares [T, H, R] of one step
_BESIDE_PEAKS = "each share is rounded beside a peak of the kernel's choice: 2^-8 on both sides"
_IN_STEPS = "logits and normalised shares are stored: steps at rounding boundaries only"
_CHECKPOINTS = 4  # partial sums of a logit that are computed
_CUT_TOGETHER = 16  # products of BF16 in one step of a tensor core
_LOG2E = 1.0 / math.log(2.0)
_HALF = 2.0 ** -(BF16.mantissa_bits + 1)  # half a spacing, of the number that is stored


_KEPT: ContextVar[OrderedDict[_Key, _Kept] | None] = ContextVar("budgets", default=None)


@contextmanager
def keeping_budgets() -> Iterator[None]:
    """Cache budgets of the same inputs and weights in this context; none of these may be mutated.

    Diagnosis derives a budget for every variant that it tries, and many variants change the output
    alone.
    """
    if _KEPT.get() is not None:
        yield
        return
    token = _KEPT.set(OrderedDict())
    try:
        yield
    finally:
        _KEPT.reset(token)


def attended(call: Call) -> dict[str, Budget]:
    """Return the budget of the attention's output."""
    kept, out = _KEPT.get(), call.outputs["out"]
    if kept is None or out.numel() > _MOST_KEPT:
        return {"out": _attended(call)}
    # Trap: Python reuses the id of a freed object, so the cache holds every object whose id is in
    # the key.
    held = [*call.inputs.items(), *call.weights.items()]
    names = tuple((name, id(each)) for name, each in held)
    key = (names, id(call.facts), out.dtype, tuple(out.shape))
    known = kept.pop(key, None) or ([*held, call.facts], _attended(call))
    kept[key] = known
    while len(kept) > _CALLS_KEPT:
        kept.popitem(last=False)
    return {"out": known[1]}


def _attended(call: Call) -> Budget:
    facts, out = call.known_facts, call.outputs["out"]
    laws = ShareStatistics(*call.inputs["q"].shape[:2])
    if isinstance(facts, V4Facts):
        slack, beside_peaks = _attended_v4(call, facts, laws)
    else:
        assert isinstance(facts, V32Facts), "there are two families"
        slack, beside_peaks = _attended_v32(call, facts, laws)
    average = float(slack.mean()) if slack.numel() else 0.0
    words = [
        "logits: half their length in u of |q| |k|, 2 u of themselves",
        "shares: their logit's error, that of the sum, the exponential (2 u of its argument, 4 u)",
        _BESIDE_PEAKS if beside_peaks else _IN_STEPS,
        f"sum over rows of error times row: {number(average)} on average",
        *laws.words,
    ]
    if "expanded" not in call.inputs and isinstance(facts, V32Facts):
        words.append("the query and the mixed latents are stored in between: one spacing each")
    slack = slack.reshape(out.shape) + UNDERFLOW
    return Budget(output_format(out), slack, tuple(words), laws=laws)


def _steps(span: Span, work: int) -> Iterator[slice]:
    """Yield slices of a sequence's tokens that fit into one step; `work` is the cost of a token."""
    step = max(1, _CHUNK // max(1, work))
    for begin in range(span.begin, span.end, step):
        yield slice(begin, min(begin + step, span.end))


def _attended_v4(call: Call, facts: V4Facts, laws: ShareStatistics) -> tuple[Tensor, bool]:
    inputs, ratio = call.inputs, facts.decoder_block.ratio
    spans, reach = spans_of(inputs), facts.config.sliding_window - 1
    sink = single(call.weights).values(torch.float64)
    q, entries = inputs["q"], [inputs["window"][:0]] * len(spans)
    if ratio:
        entries = memories(spans, inputs.get("state_compressed"), inputs["compressed"], ratio)
    slack, old = torch.zeros(q.shape, dtype=torch.float64), 0
    in_steps = bool(facts.numerics.switches.attention_in_storage_dtype)
    sample = laws.sample(q.shape[-1], max(map(len, entries), default=0) + reach + 1)
    for span, own in zip(spans, entries, strict=True):
        kept = min(span.start, reach)
        parts = [inputs["state_window"][old : old + kept]] if kept else []
        near = torch.cat([*parts, inputs["window"][span.tokens]])
        old += kept
        for tokens in _steps(span, q.shape[1] * (len(near) + len(own))):
            seen = _seen_v4(inputs, facts, tokens, (span.start - kept, len(near)), len(own))
            rows = torch.cat((near, own)).double()
            # [T, R] mask over the window rows, then the compressed entries.
            used = seen.any(0)  # most rows of a long window are not used by these tokens
            rows, seen = rows[used], seen[:, used]
            scale = q.shape[-1] ** -0.5
            logit, rest = _logit(q[tokens].double(), rows, 1.0 if in_steps else scale), sink
            if in_steps:
                logit, rest = _below_peak(logit, seen, (scale, sink), facts.numerics.store)
            how = rest, False, not in_steps
            share = _shares(logit, seen, how, facts.numerics.store)
            # float32 accumulation over R rows, and the division by the sum.
            added = U * (rows.shape[0] + FUNCTION) * share.value
            slack[tokens] = torch.matmul(share.error + added, rows.abs())
            some = sample[tokens]
            if not bool(some.any()):
                continue
            octaves = logit.value[some].masked_fill(~seen[some, None], -torch.inf) * _LOG2E
            where = torch.arange(tokens.start, tokens.stop)[some]
            told = octaves, sink * _LOG2E, rows
            if in_steps:
                laws.add(where, partial(_weighed_v4_in_steps, _few(share, some), told))
            else:
                laws.add(where, partial(_weighed_v4, q[tokens][some], seen[some], sink, told))
    return slack, not in_steps


def _weighed_v4(
    q: Tensor, seen: Tensor, sink: Tensor, told: tuple[Tensor, Tensor, Tensor]
) -> Weighed:
    """Return the shares of some tokens; `told` holds logits and sinks in octaves, and the rows."""
    octaves, octave_sink, rows = told
    part, chance = _logit_in_part(q.double(), rows, q.shape[-1] ** -0.5)
    return Weighed(
        _exact_shares(part, seen, sink), chance, octaves, octave_sink, rows, rounded=True
    )


def _weighed_v4_in_steps(share: Near, told: tuple[Tensor, Tensor, Tensor]) -> Weighed:
    """Return the shares of some tokens where logits and shares are both stored."""
    octaves, octave_sink, rows = told
    none = torch.zeros((), dtype=torch.float64)
    return Weighed(share, none, octaves, octave_sink, rows, rounded=False)


def _few(near: Near, kept: Tensor) -> Near:
    return Near(near.value[kept], near.error.expand(near.value.shape)[kept])


def _logit_in_part(q: Tensor, rows: Tensor, scale: float) -> tuple[Near, Tensor]:
    """Return logits [T, H, R] with the error that many keys have in common, and their random error.

    A bound of each logit by itself lets every addition err in one direction. Additions that round
    err independently, key by key. Steps of a tensor core truncate toward 0 for all keys alike, but
    there are fewer of them. Both err relative to their partial sums, as in budget/rules.py.
    """
    value, width = torch.matmul(q, rows.T) * scale, q.shape[-1]
    partial = torch.zeros_like(value)
    size = value.abs()
    for part in range(_CHECKPOINTS - 1):
        at = slice(width * part // _CHECKPOINTS, width * (part + 1) // _CHECKPOINTS)
        partial += torch.matmul(q[..., at], rows[:, at].T) * scale
        size = torch.maximum(size, partial.abs())
    # |q|_4 |k|_4 bounds the deviation of partial sums in any order (budget/rules.py).
    four = [side.square().square().sum(-1).sqrt().sqrt() for side in (q, rows)]
    size = size + four[0][..., None] * four[1] * scale
    # Truncation by tensor-core steps has one sign for all keys.
    common = U * ((width / _CUT_TOGETHER + ALIGNED_TERMS) * size + 2 * value.abs())
    return Near(value, common), U * math.sqrt(width / 3) * size


def _seen_v4(
    inputs: Mapping[str, Tensor], facts: V4Facts, tokens: slice, near: tuple[int, int],
    entries: int,
) -> Tensor:  # fmt: skip
    """Return which window rows, then which entries, each token attends to [T, R]."""
    positions = inputs["positions"][tokens]
    seen = attention.window_rows(positions, *near, facts.config.sliding_window)
    if "chosen" in inputs:
        listed = _listed(inputs["chosen"][tokens], entries)
    elif facts.decoder_block.ratio:
        visible = indexer.visible_entries(positions, facts.decoder_block.ratio)
        listed = torch.arange(entries) < visible[:, None]
    else:
        return seen
    return torch.cat((seen, listed), dim=1)


def _listed(chosen_TK: Tensor, rows: int) -> Tensor:
    """Return which rows are listed [T, R]; -1 and rows that do not exist are skipped."""
    exists = (chosen_TK >= 0) & (chosen_TK < rows)
    seen = torch.zeros(len(chosen_TK), rows + 1, dtype=torch.bool)
    seen.scatter_(1, torch.where(exists, chosen_TK, rows), value=True)
    return seen[:, :rows]


def _logit(q: Tensor, rows: Tensor, scale: float) -> Near:
    """Return scaled products [T, H, R], with errors bounded by Cauchy-Schwarz from the norms."""
    value = torch.matmul(q, rows.T) * scale
    size = q.norm(dim=-1, keepdim=True) * rows.norm(dim=-1) * scale
    return Near(value, U * ((q.shape[-1] / 2 + 2) * size + 2 * value.abs()))


def _below_peak(
    product: Near, seen: Tensor, how: tuple[float, Tensor], store: torch.dtype
) -> tuple[Near, Tensor]:
    """Return what transformers stores in turn: product, logit, distance to the peak."""
    scale, sink_H = how[0], how[1].to(store).double()
    near = stored(product, store)
    near = stored(Near(near.value * scale, near.error * scale), store)
    value = near.value.masked_fill(~seen[:, None], -torch.inf)
    top, at = value.max(-1, keepdim=True) if value.shape[-1] else (sink_H[None, :, None], None)
    off = torch.zeros(()) if at is None else near.error.gather(-1, at)
    peak = torch.maximum(top, sink_H[:, None])
    off = torch.where(top >= sink_H[:, None], off, 0.0)
    below = stored(Near(near.value - peak, near.error + off), store)
    rest = stored(Near(sink_H[:, None] - peak, off), store)  # its own step is the peak's again
    return Near(below.value, below.error + rest.error), rest.value.squeeze(-1)


def _shares(
    logit: Near, seen: Tensor, how: tuple[Tensor | None, bool, bool], store: torch.dtype
) -> Near:
    """Return normalised shares [T, H, R]; `how`: sink, whether logits are stored, free peaks."""
    sink, logits_stored, beside_peaks = how
    if logits_stored:
        logit = stored(logit, store)
    share = _exact_shares(logit, seen, sink)
    if beside_peaks:
        return Near(share.value, share.error + share.value * 2 * _HALF)
    return stored(share, store)


def _exact_shares(logit: Near, seen: Tensor, sink: Tensor | None) -> Near:
    """Return shares without rounding, and the error that float32 may add."""
    hidden = ~seen[:, None]
    value = logit.value.masked_fill(hidden, -torch.inf)
    if sink is not None:
        value = torch.cat((value, sink.expand(value.shape[:2]).unsqueeze(-1)), dim=-1)
    elif not value.shape[-1]:  # a hostile capture may choose no row for any token
        return Near(value, value)
    # A row that sees nothing has only -inf; zeros avoid the NaN, and its shares are cleared below.
    share = torch.softmax(value.masked_fill(value.amax(-1, keepdim=True).isneginf(), 0.0), dim=-1)
    share = torch.where(value.isneginf(), 0.0, share)
    below = torch.where(share > 0, value.amax(-1, keepdim=True) - value, 0.0)
    if sink is not None:
        share, below = share[..., :-1], below[..., :-1]
    relative = torch.where(hidden, 0.0, logit.error) + U * (2 * below + FUNCTION)
    # The normaliser errs by the share-weighted mean of all relative errors, and by its own R
    # additions.
    relative = relative + (share * relative).sum(-1, keepdim=True) + U * share.shape[-1]
    return Near(share, share * relative + torch.where(hidden, 0.0, UNDERFLOW))


def _attended_v32(call: Call, facts: V32Facts, laws: ShareStatistics) -> tuple[Tensor, bool]:
    inputs, c = call.inputs, facts.config
    logits_stored = facts.numerics.switches.attention_in_storage_dtype is not False
    form = latent_attention.Form(
        c.qk_nope_head_dim, c.v_head_dim, latent_attention.softmax_scale(c), logits_stored
    )
    spans, q, naive = spans_of(inputs), inputs["q"], "expanded" in inputs
    rows = memories(spans, inputs.get("state_rows"), inputs["rows"], 1)
    wide = rows
    if naive:
        wide = memories(spans, inputs.get("state_expanded"), inputs["expanded"], 1)
    slack = torch.zeros(len(q), q.shape[1], c.v_head_dim, dtype=torch.float64)
    length = max(map(len, rows), default=0)
    sample = laws.sample(c.v_head_dim if naive else c.kv_lora_rank, length)
    for span, own, other in zip(spans, rows, wide, strict=True):
        for tokens in _steps(span, q.shape[1] * len(own)):
            seen = _listed(inputs["chosen"][tokens], len(own))
            used, part = seen.any(0), q[tokens].double()
            some, seen = own[used].double(), seen[:, used]
            if naive:
                key = some[:, c.kv_lora_rank :]
                operands = part, key, other[used].double()
                slack[tokens] = _naive(operands, seen, form, facts)
            else:
                operands = part, some, single(call.weights).values(torch.float64)
                slack[tokens] = _absorbed(operands, seen, form, facts)
            kept = sample[tokens]
            if bool(kept.any()):
                few, how = (operands[0][kept], *operands[1:]), (form, naive)
                where = torch.arange(tokens.start, tokens.stop)[kept]
                laws.add(where, partial(_weighed_v32, few, seen[kept], how, facts))
    return slack, not logits_stored


def _weighed_v32(
    operands: tuple[Tensor, Tensor, Tensor], seen: Tensor, how: tuple[Form, bool], facts: V32Facts
) -> Weighed:
    """Return the shares of some tokens, head by head."""
    (form, naive), q_THd = how, operands[0]
    heads, store, expand = q_THd.shape[1], facts.numerics.store, None
    if naive:
        both = operands[2].unflatten(1, (heads, -1)).transpose(0, 1)
        key = operands[1].expand(heads, -1, -1)
        keys, values = torch.cat((both[..., : form.nope], key), -1), both[..., form.nope :]
        query = exactly(q_THd)
    else:
        query, expand = _through_keys(q_THd, operands[2], form, store)
        keys = operands[1].expand(heads, -1, -1)
        values = operands[1][:, : operands[2].shape[1]]
    made = []
    for head in range(heads):
        own = query.value[:, head : head + 1]
        logit, chance = _logit_in_part(own, keys[head], form.scale)
        moved = torch.zeros(())
        # The naive form has an exact query, with a scalar error.
        if query.error.ndim:  # few of its numbers lie at a rounding boundary and may step
            steps = query.error[:, head : head + 1].square()
            moved = torch.matmul(steps, keys[head][:, : steps.shape[-1]].square().T).sqrt()
            moved = moved * form.scale
        if form.logits_stored:
            exact = Near(logit.value, _logit(own, keys[head], form.scale).error + moved)
            share = _shares(exact, seen, (None, True, False), store)
        else:
            chance = (chance.square() + moved.square()).sqrt()
            share = _exact_shares(logit, seen, None)
        octaves = logit.value.masked_fill(~seen[:, None], -torch.inf) * _LOG2E
        made.append((share.value, share.error, chance, octaves))
    value, error, chance, octaves = (torch.cat(parts, 1) for parts in zip(*made, strict=True))
    near = Near(value, error)
    return Weighed(near, chance, octaves, None, values, not form.logits_stored, expand)


def _through_keys(
    q_THd: Tensor, wkv_b: Tensor, form: Form, store: torch.dtype
) -> tuple[Near, Tensor]:
    """Return the stored absorbed query [T, H, C + P], and the weight's value rows [H, v, C]."""
    per_head = wkv_b.reshape(q_THd.shape[1], form.nope + form.value, -1)
    key_HnC, value_HvC = per_head[:, : form.nope], per_head[:, form.nope :]
    nope, rope = q_THd[..., : form.nope], q_THd[..., form.nope :]
    made = torch.einsum("thn,hnc->thc", nope, key_HnC)
    size = torch.einsum("thn,hnc->thc", nope.abs(), key_HnC.abs())
    query = stored(Near(made, U * (form.nope / 2 + 2) * size), store)
    return Near(torch.cat((query.value, rope), dim=-1), query.error), value_HvC


def _naive(
    operands: tuple[Tensor, Tensor, Tensor], seen: Tensor, form: Form, facts: V32Facts
) -> Tensor:
    q_THd, key_RP, wide_RF = operands
    heads, store = q_THd.shape[1], facts.numerics.store
    both = wide_RF.reshape(len(wide_RF), heads, form.nope + form.value)
    how = None, form.logits_stored, not form.logits_stored
    out = []
    for head in range(heads):
        rows = torch.cat((both[:, head, : form.nope], key_RP), dim=-1)
        share = _shares(_logit(q_THd[:, head : head + 1], rows, form.scale), seen, how, store)
        error = share.error + U * (len(rows) + 1) * share.value
        out.append(torch.matmul(error, both[:, head, form.nope :].abs()))
    return torch.cat(out, dim=1)


def _absorbed(
    operands: tuple[Tensor, Tensor, Tensor], seen: Tensor, form: Form, facts: V32Facts
) -> Tensor:
    q_THd, row_RX, wkv_b = operands
    width, store = wkv_b.shape[1], facts.numerics.store
    query, value_HvC = _through_keys(q_THd, wkv_b, form, store)
    logit = _logit(query.value, row_RX, form.scale)
    moved = torch.matmul(query.error, row_RX[:, :width].abs().T) * form.scale
    how = None, form.logits_stored, not form.logits_stored
    share = _shares(Near(logit.value, logit.error + moved), seen, how, store)
    latent = row_RX[:, :width]
    error = share.error + U * (len(row_RX) + 1) * share.value
    mixed = Near(torch.matmul(share.value, latent), torch.matmul(error, latent.abs()))
    stepped = stored(mixed, store)
    # First bound: each stored latent's own error, through the value projection.
    own = torch.einsum("thc,hvc->thv", stepped.error, value_HvC.abs())
    expanded = torch.einsum("rc,hvc->hrv", latent, value_HvC).abs()
    # Second bound: the shares' errors through the expanded value rows, plus one spacing a latent.
    ulp = torch.from_numpy(np.asarray(spacing((mixed.value.abs() + mixed.error).numpy(), BF16)))
    ulp = torch.where(stepped.error > 0, ulp, 0.0)
    through = torch.einsum("thr,hrv->thv", error, expanded)
    through = through + torch.einsum("thc,hvc->thv", ulp, value_HvC.abs())
    sums = torch.einsum("thc,hvc->thv", stepped.value.abs(), value_HvC.abs())
    return torch.minimum(own, through) + U * (width / 2 + 2) * sums
