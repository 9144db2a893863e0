"""Error budgets of V3.2's attention, over expanded keys and values or over latents.

In absorbed form the query is stored after the key projection, and the mixed latent before the value
projection. The error is the smaller of two bounds: through each latent's own error, or through the
shares and the expanded values plus one spacing a latent.

Shape letters: T tokens, H heads, R rows, C latent width, n nope width, v value width.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
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
from degarble.harness.engine.budget.bounded_values import BoundedValue, exactly, memories, stored
from degarble.harness.engine.budget.budget import spacing
from degarble.harness.engine.budget.rules import U
from degarble.harness.formats.number_formats import BF16
from degarble.references import attention
from degarble.references.facts import single, spans_of

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.budget.attention import ShareStatistics
    from degarble.harness.engine.budget.rules import JudgeableCall
    from degarble.references.attention import Form
    from degarble.references.components.v32 import V32Facts

_STORED_BETWEEN = "the query and the mixed latents are stored in between: one spacing each"


def attention_error(
    call: JudgeableCall, laws: ShareStatistics
) -> tuple[Tensor, bool, tuple[str, ...]]:
    """Return what ModelFamily.attention_error does: listed rows, expanded or latent."""
    facts: V32Facts = call.known_facts
    inputs, c = call.inputs, facts.config
    logits_stored = facts.numerics.switches.attention_in_storage_dtype is not False
    form = attention.Form(
        c.qk_nope_head_dim, c.v_head_dim, attention.softmax_scale(c), logits_stored
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
        for tokens in token_steps(span, q.shape[1] * len(own)):
            seen = listed_rows(inputs["chosen"][tokens], len(own))
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
                laws.add(where, partial(_weighed, few, seen[kept], how, facts))
    return slack, not logits_stored, () if naive else (_STORED_BETWEEN,)


def _weighed(
    operands: tuple[Tensor, Tensor, Tensor], seen: Tensor, how: tuple[Form, bool], facts: V32Facts
) -> AttentionShares:
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
        logit, chance = logit_in_part(own, keys[head], form.scale)
        moved = torch.zeros(())
        # The naive form has an exact query, with a scalar error.
        if query.error.ndim:  # few of its numbers lie at a rounding boundary and may step
            steps = query.error[:, head : head + 1].square()
            moved = torch.matmul(steps, keys[head][:, : steps.shape[-1]].square().T).sqrt()
            moved = moved * form.scale
        if form.logits_stored:
            exact = BoundedValue(
                logit.value, bounded_logit(own, keys[head], form.scale).error + moved
            )
            share = bounded_shares(exact, seen, (None, True, False), store)
        else:
            chance = (chance.square() + moved.square()).sqrt()
            share = exact_shares(logit, seen, None)
        octaves = logit.value.masked_fill(~seen[:, None], -torch.inf) * LOG2E
        made.append((share.value, share.error, chance, octaves))
    value, error, chance, octaves = (torch.cat(parts, 1) for parts in zip(*made, strict=True))
    near = BoundedValue(value, error)
    return AttentionShares(near, chance, octaves, None, values, not form.logits_stored, expand)


def _through_keys(
    q_THd: Tensor, wkv_b: Tensor, form: Form, store: torch.dtype
) -> tuple[BoundedValue, Tensor]:
    """Return the stored absorbed query [T, H, C + P], and the weight's value rows [H, v, C]."""
    per_head = wkv_b.reshape(q_THd.shape[1], form.nope + form.value, -1)
    key_HnC, value_HvC = per_head[:, : form.nope], per_head[:, form.nope :]
    nope, rope = q_THd[..., : form.nope], q_THd[..., form.nope :]
    made = torch.einsum("thn,hnc->thc", nope, key_HnC)
    size = torch.einsum("thn,hnc->thc", nope.abs(), key_HnC.abs())
    query = stored(BoundedValue(made, U * (form.nope / 2 + 2) * size), store)
    return BoundedValue(torch.cat((query.value, rope), dim=-1), query.error), value_HvC


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
        share = bounded_shares(
            bounded_logit(q_THd[:, head : head + 1], rows, form.scale), seen, how, store
        )
        error = share.error + U * (len(rows) + 1) * share.value
        out.append(torch.matmul(error, both[:, head, form.nope :].abs()))
    return torch.cat(out, dim=1)


def _absorbed(
    operands: tuple[Tensor, Tensor, Tensor], seen: Tensor, form: Form, facts: V32Facts
) -> Tensor:
    q_THd, row_RX, wkv_b = operands
    width, store = wkv_b.shape[1], facts.numerics.store
    query, value_HvC = _through_keys(q_THd, wkv_b, form, store)
    logit = bounded_logit(query.value, row_RX, form.scale)
    moved = torch.matmul(query.error, row_RX[:, :width].abs().T) * form.scale
    how = None, form.logits_stored, not form.logits_stored
    share = bounded_shares(BoundedValue(logit.value, logit.error + moved), seen, how, store)
    latent = row_RX[:, :width]
    error = share.error + U * (len(row_RX) + 1) * share.value
    mixed = BoundedValue(torch.matmul(share.value, latent), torch.matmul(error, latent.abs()))
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
