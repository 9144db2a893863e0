"""Error budgets of V4's attention: rows of a window, then compressed entries, and a sink.

Shape letters: T tokens, H heads, R rows, L row width.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.budget.attention import (
    LOG2E,
    AttentionShares,
    bounded_logit,
    bounded_shares,
    exact_shares,
    listed_rows,
    logit_in_part,
    token_steps,
)
from degarble.harness.engine.budget.bounded_values import FUNCTION, BoundedValue, memories, stored
from degarble.harness.engine.budget.rules import U
from degarble.references import attention, sparse_attention
from degarble.references.facts import single, spans_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.budget.attention import ShareStatistics
    from degarble.harness.engine.budget.rules import JudgeableCall
    from degarble.references.components.v4 import V4Facts


def attention_error(
    call: JudgeableCall, laws: ShareStatistics
) -> tuple[Tensor, bool, tuple[str, ...]]:
    """Return what ModelFamily.attention_error does: a window, then compressed entries."""
    facts: V4Facts = call.known_facts
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
        for tokens in token_steps(span, q.shape[1] * (len(near) + len(own))):
            seen = _seen(inputs, facts, tokens, (span.start - kept, len(near)), len(own))
            rows = torch.cat((near, own)).double()
            # [T, R] mask over the window rows, then the compressed entries.
            used = seen.any(0)  # most rows of a long window are not used by these tokens
            rows, seen = rows[used], seen[:, used]
            scale = q.shape[-1] ** -0.5
            logit, rest = bounded_logit(q[tokens].double(), rows, 1.0 if in_steps else scale), sink
            if in_steps:
                logit, rest = _below_peak(logit, seen, (scale, sink), facts.numerics.store)
            how = rest, False, not in_steps
            share = bounded_shares(logit, seen, how, facts.numerics.store)
            # float32 accumulation over R rows, and the division by the sum.
            added = U * (rows.shape[0] + FUNCTION) * share.value
            slack[tokens] = torch.matmul(share.error + added, rows.abs())
            some = sample[tokens]
            if not bool(some.any()):
                continue
            octaves = logit.value[some].masked_fill(~seen[some, None], -torch.inf) * LOG2E
            where = torch.arange(tokens.start, tokens.stop)[some]
            tensors = octaves, sink * LOG2E, rows
            if in_steps:
                laws.add(where, partial(_weighed_in_steps, _few(share, some), tensors))
            else:
                laws.add(where, partial(_weighed, q[tokens][some], seen[some], sink, tensors))
    return slack, not in_steps, ()


def _weighed(
    q: Tensor, seen: Tensor, sink: Tensor, stated: tuple[Tensor, Tensor, Tensor]
) -> AttentionShares:
    """Return the shares of some tokens; `stated`: logits and sinks in octaves, and the rows."""
    octaves, octave_sink, rows = stated
    part, chance = logit_in_part(q.double(), rows, q.shape[-1] ** -0.5)
    return AttentionShares(
        exact_shares(part, seen, sink), chance, octaves, octave_sink, rows, rounded=True
    )


def _weighed_in_steps(
    share: BoundedValue, tensors: tuple[Tensor, Tensor, Tensor]
) -> AttentionShares:
    """Return the shares of some tokens where logits and shares are both stored."""
    octaves, octave_sink, rows = tensors
    none = torch.zeros((), dtype=torch.float64)
    return AttentionShares(share, none, octaves, octave_sink, rows, rounded=False)


def _few(near: BoundedValue, kept: Tensor) -> BoundedValue:
    return BoundedValue(near.value[kept], near.error.expand(near.value.shape)[kept])


def _seen(
    inputs: Mapping[str, Tensor], facts: V4Facts, tokens: slice, near: tuple[int, int],
    entries: int,
) -> Tensor:  # fmt: skip
    """Return which window rows, then which entries, each token attends to [T, R]."""
    positions = inputs["positions"][tokens]
    seen = attention.window_rows(positions, *near, facts.config.sliding_window)
    if "chosen" in inputs:
        listed = listed_rows(inputs["chosen"][tokens], entries)
    elif facts.decoder_block.ratio:
        visible = sparse_attention.visible_entries(positions, facts.decoder_block.ratio)
        listed = torch.arange(entries) < visible[:, None]
    else:
        return seen
    return torch.cat((seen, listed), dim=1)


def _below_peak(
    product: BoundedValue, seen: Tensor, how: tuple[float, Tensor], store: torch.dtype
) -> tuple[BoundedValue, Tensor]:
    """Return what transformers stores in turn: product, logit, distance to the peak."""
    scale, sink_H = how[0], how[1].to(store).double()
    near = stored(product, store)
    near = stored(BoundedValue(near.value * scale, near.error * scale), store)
    value = near.value.masked_fill(~seen[:, None], -torch.inf)
    top, at = value.max(-1, keepdim=True) if value.shape[-1] else (sink_H[None, :, None], None)
    off = torch.zeros(()) if at is None else near.error.gather(-1, at)
    peak = torch.maximum(top, sink_H[:, None])
    off = torch.where(top >= sink_H[:, None], off, 0.0)
    below = stored(BoundedValue(near.value - peak, near.error + off), store)
    rest = stored(
        BoundedValue(sink_H[:, None] - peak, off), store
    )  # its own step is the peak's again
    return BoundedValue(below.value, below.error + rest.error), rest.value.squeeze(-1)
