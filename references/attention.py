"""Attention of both families: shared keys and values with a sink (V4), and MLA in two forms (V3.2).

Legend: T tokens, H heads, X key width, V value width, R rows, L latent width (V4: X = V = L).
`seen` [T, R] is the mask: which rows a token attends to; None means all. A token that attends to no
row yields zero. A masked row cannot affect a token, not even with a NaN.

Sources: inference/model.py of DeepSeek-V4 and V3.2-Exp; V4's kernel.py (sparse_attn).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from degarble.references import elementary
from degarble.references.numerics import cast, compiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from degarble.harness.model.config.config import V32Config
    from degarble.references.elementary import RotationTable
    from degarble.references.numerics import Numerics


# --------------------------------------------------------------------------------------------------
# Shared keys and values: a masked softmax, for V4 with an attention sink
#
# The sink takes part in the softmax's sum only.

if TYPE_CHECKING:
    # Masked logits [T, H, R] become weights [T, H, R] and their divisor [T, H], None for 1.
    Weighed = tuple[Tensor, Tensor | None]
    Weigh = Callable[[Tensor], Weighed]

_LOGIT_BYTES = 64 << 20  # bounds the logits of one step; no result depends on it


def query_heads(q_THL: Tensor, table: RotationTable, epsilon: float, numerics: Numerics) -> Tensor:
    """Apply weightless RMS per head, then rotate the tail; round once, after the rotation."""
    q = elementary.head_rms(q_THL, epsilon, numerics)
    return elementary.rotate_tail(q, elementary.over_heads(table)).to(numerics.store)


def latent(
    kv_TL: Tensor, norm_L: Tensor, table: RotationTable, epsilon: float, numerics: Numerics
) -> Tensor:
    """Norm and rotate the shared latent row; the norm's result is stored before the rotation."""
    fused = not numerics.switches.latent_rounded_before_rotation
    norm = elementary.rms_norm_unrounded if fused else elementary.rms_norm
    normed = norm(kv_TL, norm_L, epsilon, numerics)
    return elementary.rotate_tail(cast(normed, numerics.work), table).to(numerics.store)


def window_rows(positions_T: Tensor, first: int, rows: int, window: int) -> Tensor:
    """Return which of the rows of positions `first`, `first` + 1, ... lie in each window [T, R].

    The window ends with the token itself: positions t - window + 1 to t.
    """
    row_R = torch.arange(first, first + rows, device=positions_T.device)
    behind = positions_T[:, None] - row_R
    return (behind >= 0) & (behind < window)


def listed_rows(chosen_TK: Tensor, rows: int) -> tuple[Tensor | slice, Tensor | None]:
    """Turn listed row numbers into an index of rows and a mask [T, indexed rows], None for all.

    -1 is skipped, and so are rows that do not exist, which a faulty list may name.
    """
    if chosen_TK.shape[0] == 1:
        kept = [number for number in chosen_TK[0].tolist() if 0 <= number < rows]
        return torch.tensor(kept, dtype=torch.int64, device=chosen_TK.device), None
    exists = (chosen_TK >= 0) & (chosen_TK < rows)
    reach = int(torch.where(exists, chosen_TK, -1).max()) + 1 if chosen_TK.numel() else 0
    seen = torch.zeros(chosen_TK.shape[0], reach + 1, dtype=torch.bool, device=chosen_TK.device)
    seen.scatter_(1, torch.where(exists, chosen_TK, reach), value=True)
    return slice(0, reach), seen[:, :reach]


def attend(
    q_THL: Tensor,
    rows: Sequence[Tensor],
    seen_TR: Tensor | None,
    sink_H: Tensor,
    numerics: Numerics,
) -> Tensor:
    """Return V4's output [T, H, L] over rows [R, L], given in parts, and a sink."""
    softmax = sink_softmax
    if numerics.switches.attention_in_storage_dtype and not numerics.exact:
        softmax = _stored_sink_softmax
    scale, sink = q_THL.shape[-1] ** -0.5, cast(sink_H, numerics.work)
    if softmax is sink_softmax and seen_TR is None and len(q_THL) == 1:
        q, parts = cast(q_THL[0], numerics.work), [cast(part, numerics.work) for part in rows]
        fits = numerics.store is torch.bfloat16 and any(map(len, parts))
        if fits and compiles(numerics, q, sink, *parts):
            from degarble.references import compiled  # noqa: PLC0415  numba is heavy

            return cast(compiled.attend(q, parts, sink, scale)[None], numerics.store)
    weigh = partial(softmax, scale=scale, sink_H=sink, numerics=numerics)
    return over_rows(q_THL, rows, q_THL.shape[-1], seen_TR, weigh, numerics)


def over_rows(
    q_THX: Tensor,
    rows: Sequence[Tensor],
    width: int,
    seen_TR: Tensor | None,
    weigh: Weigh,
    numerics: Numerics,
) -> Tensor:
    """Attend with rows as keys and their first `width` features as values, in steps of tokens."""
    q, parts = cast(q_THX, numerics.work), [cast(part, numerics.work) for part in rows if len(part)]
    count, item = sum(len(part) for part in parts), torch.finfo(numerics.work).bits // 8
    step = max(1, _LOGIT_BYTES // max(1, q.shape[1] * count * item))
    tensors = [
        _over_part(q[i : i + step], parts, width, _some(seen_TR, i, step), weigh)
        for i in range(0, q.shape[0], step)
    ]
    out = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    # A sum is finite only where all its terms are; one that overflows costs time, no more.
    if seen_TR is not None and not math.isfinite(out.sum().item()):
        out = _around_spoilt(q, torch.cat(parts), width, seen_TR, weigh)
    return cast(out, numerics.store)


def _some(seen_TR: Tensor | None, begin: int, step: int) -> Tensor | None:
    return None if seen_TR is None else seen_TR[begin : begin + step]


def _over_part(
    q_THX: Tensor, rows: Sequence[Tensor], width: int, seen_TR: Tensor | None, weigh: Weigh
) -> Tensor:
    tokens, heads, _ = q_THX.shape
    q, counts = q_THX.flatten(0, 1), [len(part) for part in rows]
    if not rows:
        logit = q.new_empty(tokens, heads, 0)
    else:
        logits = [torch.mm(q, part.T) for part in rows]
        logit = (logits[0] if len(logits) == 1 else torch.cat(logits, dim=1)).reshape(
            tokens, heads, -1
        )
    if seen_TR is not None:
        logit = logit.masked_fill(~seen_TR[:, None], -torch.inf)
    weight, total = weigh(logit)
    out = q.new_zeros(tokens * heads, width) if not rows else None
    shares = torch.split(weight.flatten(0, 1), counts, dim=1) if counts else ()
    for share, part in zip(shares, rows, strict=True):
        added = torch.mm(share, part[:, :width])
        out = added if out is None else out + added
    assert out is not None, "there are rows, or there is nothing"
    out = out.reshape(tokens, heads, width)
    return out if total is None else out / total[..., None]


def _around_spoilt(
    q_THX: Tensor, rows_RX: Tensor, width: int, seen_TR: Tensor, weigh: Weigh
) -> Tensor:
    """Keep rows that are not finite from tokens that mask them: 0 * NaN is NaN."""
    made = []
    for token in range(q_THX.shape[0]):
        listed = rows_RX[seen_TR[token]]
        parts = [listed] if len(listed) else []
        made.append(_over_part(q_THX[token : token + 1], parts, width, None, weigh))
    return torch.cat(made)


def sink_softmax(logit_THR: Tensor, scale: float, sink_H: Tensor, numerics: Numerics) -> Weighed:
    """Return unnormalised weights, as stored, and their sum with the sink."""
    logit_THR = logit_THR * scale
    if not logit_THR.shape[-1]:
        return logit_THR, None
    peak = logit_THR.amax(-1, keepdim=True)
    # A token that sees nothing has no peak. Trap: -inf - -inf would be NaN.
    peak = peak.clamp(min=torch.finfo(peak.dtype).min)
    weight = torch.exp(logit_THR - peak)
    total = weight.sum(-1) + torch.exp(sink_H - peak.squeeze(-1))
    # The official kernel rounds the unnormalised weights, not the normalised ones.
    store = numerics.on_the_way.store
    stored = weight if numerics.exact else cast(weight, store).to(numerics.work)
    return stored, total


def _stored_sink_softmax(
    logit_THR: Tensor, scale: float, sink_H: Tensor, numerics: Numerics
) -> Weighed:
    """Compute transformers' softmax: logits, sink, difference to the peak and shares are stored."""
    store, work = numerics.on_the_way.store, numerics.work
    logit = (cast(logit_THR, store) * scale).to(store)
    sink = cast(sink_H, store).expand(*logit.shape[:2]).unsqueeze(-1)
    both = torch.cat((logit, sink), dim=-1)
    share = torch.softmax(both - both.amax(-1, keepdim=True), dim=-1)[..., :-1]
    return cast(share, work), None


def unrotate(o_THL: Tensor, table: RotationTable, numerics: Numerics) -> Tensor:
    """Rotate back at the query's position: the rows carried their rotation into the values."""
    o = cast(o_THL, numerics.work)
    return elementary.rotate_tail(o, elementary.over_heads(table), inverse=True).to(numerics.store)


def grouped(o_TF: Tensor, weight_GOK: Tensor, numerics: Numerics) -> Tensor:
    """Multiply each group of consecutive heads by its matrix: [T, G * K] to [T, G * O]."""
    groups, _, width = weight_GOK.shape
    o_GTK = o_TF.reshape(-1, groups, width).to(numerics.products).transpose(0, 1)
    z_GTO = torch.bmm(o_GTK, cast(weight_GOK, numerics.products).transpose(1, 2))
    return z_GTO.transpose(0, 1).flatten(1).to(numerics.store)


def grouped_as_stored(o_TF: Tensor, value_GOK: Tensor, numerics: Numerics) -> Tensor:
    """Do the same as `grouped` in a compiled loop that reads BF16 weights as they are stored."""
    from degarble.references import compiled  # noqa: PLC0415  numba is heavy

    groups, _, width = value_GOK.shape
    o_TGK = o_TF.reshape(-1, groups, width)
    return cast(compiled.grouped(o_TGK, value_GOK), numerics.store)


# --------------------------------------------------------------------------------------------------
# Multi-head latent attention (MLA) of V3.2 in two forms that are equal in exact arithmetic
#
# Legend: C latent width, P rotated width, n nope width, v value width. `wkv_b` [H * (n + v), C]
# holds, per head, n key rows and then v value rows. A cached row is the latent (C) followed by the
# rotated key (P).
# Naive: keys and values of every head are expanded. Absorbed: the query goes through the key rows
# and the result through the value rows, so that attention runs over the latents themselves.


@dataclass(frozen=True)
class Form:
    """Nope width, value width, softmax scale, and whether the logits are stored."""

    nope: int
    value: int
    scale: float
    logits_stored: bool


def softmax_scale(config: V32Config) -> float:
    """Return qk_head_dim^-1/2, times YaRN's mscale_all_dim squared if the context was extended."""
    scale = float(config.qk_head_dim**-0.5)
    return scale if config.yarn is None else scale * config.yarn.logit_scale


def attend_naive(
    q_THd: Tensor,
    rotated_RP: Tensor,
    expanded_RF: Tensor,
    seen_TR: Tensor | None,
    form: Form,
    numerics: Numerics,
) -> Tensor:
    """Return the output [T, H * v] over expanded keys and values [R, H * (n + v)]."""
    work, heads = numerics.work, q_THd.shape[1]
    both = expanded_RF.reshape(-1, heads, form.nope + form.value).to(work)
    q_THd = q_THd.to(work)
    out = []
    for head in range(heads):
        rotated = rotated_RP.to(work)
        rows = torch.cat((both[:, head, form.nope :], both[:, head, : form.nope], rotated), dim=-1)
        # Rows are value, key, rotated key; zeros in the query leave the value out of the logits.
        q = torch.nn.functional.pad(q_THd[:, head : head + 1], (form.value, 0))
        out.append(_attend_latent(q, rows, form.value, seen_TR, form, numerics))
    return torch.cat(out, dim=1).flatten(1)


def attend_absorbed(
    q_THd: Tensor,
    rows_RX: Tensor,
    wkv_b: Tensor,
    seen_TR: Tensor | None,
    form: Form,
    numerics: Numerics,
) -> Tensor:
    """Return the output [T, H * v] over the latents themselves."""
    work, heads = numerics.work, q_THd.shape[1]
    per_head = wkv_b.to(work).reshape(heads, form.nope + form.value, -1)
    key_HnC, value_HvC = per_head[:, : form.nope], per_head[:, form.nope :]
    q_nope, q_rope = q_THd[..., : form.nope].to(work), q_THd[..., form.nope :].to(work)
    inner = numerics.on_the_way
    q_HTC = torch.bmm(q_nope.transpose(0, 1), key_HnC).to(inner.store).to(work)
    query = torch.cat((q_HTC.transpose(0, 1), q_rope), dim=-1)
    mixed_THC = _attend_latent(query, rows_RX, wkv_b.shape[1], seen_TR, form, inner).to(work)
    out_HTv = torch.bmm(mixed_THC.transpose(0, 1), value_HvC.transpose(1, 2))
    return out_HTv.transpose(0, 1).flatten(1).to(numerics.store)


def _attend_latent(
    q: Tensor, rows: Tensor, width: int, seen_TR: Tensor | None, form: Form, numerics: Numerics
) -> Tensor:
    """Attend to rows; normalised weights are stored, and logits before them where sources do."""
    store, work = numerics.on_the_way.store, numerics.work

    def weigh(logit: Tensor) -> tuple[Tensor, None]:
        logit = logit * form.scale
        if form.logits_stored:
            logit = logit.to(store).to(work)
        return row_softmax(logit).to(store).to(work), None

    return over_rows(q, [rows], width, seen_TR, weigh, numerics)


def row_softmax(logit_THR: Tensor) -> Tensor:
    """Return the softmax over rows; a token that attends to none gets zeros, a NaN stays one."""
    if not logit_THR.shape[-1]:
        return logit_THR
    blind = torch.isneginf(logit_THR.amax(-1, keepdim=True))
    return torch.softmax(logit_THR.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
