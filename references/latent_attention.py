"""Multi-head latent attention (MLA) of V3.2 in two forms that are equal in exact arithmetic.

Legend: T tokens, H heads, C latent width, P rotated width, n nope width, v value width, R rows.
`wkv_b` [H * (n + v), C] holds, per head, n key rows and then v value rows. A cached row is the
latent (C) followed by the rotated key (P).
Naive: keys and values of every head are expanded. Absorbed: the query goes through the key rows and
the result through the value rows, so that attention runs over the latents themselves.
Source: DeepSeek-V3.2-Exp inference/model.py, MLA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from degarble.references import attention

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.model.config.config import V32Config
    from degarble.references.numerics import Numerics


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


def naive(
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
        out.append(_over(q, rows, form.value, seen_TR, form, numerics))
    return torch.cat(out, dim=1).flatten(1)


def absorbed(
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
    mixed_THC = _over(query, rows_RX, wkv_b.shape[1], seen_TR, form, inner).to(work)
    out_HTv = torch.bmm(mixed_THC.transpose(0, 1), value_HvC.transpose(1, 2))
    return out_HTv.transpose(0, 1).flatten(1).to(numerics.store)


def _over(
    q: Tensor, rows: Tensor, width: int, seen_TR: Tensor | None, form: Form, numerics: Numerics
) -> Tensor:
    """Attend to rows; normalised weights are stored, and logits before them where sources do."""
    store, work = numerics.on_the_way.store, numerics.work

    def weigh(logit: Tensor) -> tuple[Tensor, None]:
        logit = logit * form.scale
        if form.logits_stored:
            logit = logit.to(store).to(work)
        return row_softmax(logit).to(store).to(work), None

    return attention.over_rows(q, [rows], width, seen_TR, weigh, numerics)


def row_softmax(logit_THR: Tensor) -> Tensor:
    """Return the softmax over rows; a token that attends to none gets zeros, a NaN stays one."""
    if not logit_THR.shape[-1]:
        return logit_THR
    blind = torch.isneginf(logit_THR.amax(-1, keepdim=True))
    return torch.softmax(logit_THR.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
