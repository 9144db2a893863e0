"""Hyper-connections (mHC): four residual streams collapse into a sublayer's input and expand again.

Legend: T tokens, S streams (4), D hidden width, N coefficients (S + S + S*S).
Parameters `fn` [N, S*D], `base` [N], `scale` [3] in float32; rows of `fn`: S pre, S post, S*S mix.
Trap: new stream k takes old stream j with mix[j, k], a sum over the FIRST index.
Sources: DeepSeek-V4 inference/model.py and kernel.py (hc_split_sinkhorn).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from degarble.references.facts import MixingFacts, MixingWeights
from degarble.references.numerics import cast

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.references.numerics import Numerics


__all__ = (
    "MixingFacts",
    "MixingWeights",
    "collapse",
    "expand",
    "mixing_post",
    "mixing_pre",
    "mixing_pre_definition",
    "sinkhorn",
)
_FEW_TOKENS = 64  # from there on torch's calls are no longer what costs


def expand(h_TD: Tensor, streams: int) -> Tensor:
    """Make identical streams [T, S, D], as they enter the first layer."""
    return h_TD.unsqueeze(1).repeat(1, streams, 1)


def _projected(
    x_TSD: Tensor, weights: MixingWeights, facts: MixingFacts, numerics: Numerics
) -> Tensor:
    """Return `(fn . x) * rho`: the norm factor after the product, as in the official code."""
    flat = x_TSD.flatten(1).to(numerics.work)
    rho = torch.rsqrt(flat.square().mean(-1, keepdim=True) + facts.norm_epsilon)
    return (flat @ weights.fn.to(numerics.work).T) * rho


def sinkhorn(logits_TSS: Tensor, iterations: int, epsilon: float) -> Tensor:
    """Return row softmax, then alternate normalisation; the first pass counts as one iteration."""
    mix = torch.softmax(logits_TSS, dim=-1) + epsilon
    mix = mix / (mix.sum(dim=-2, keepdim=True) + epsilon)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(dim=-1, keepdim=True) + epsilon)
        mix = mix / (mix.sum(dim=-2, keepdim=True) + epsilon)
    return mix


@lru_cache(maxsize=8)
def _scale_of_row(streams: int, device: torch.device) -> Tensor:
    """Return which of the three scales each of the N rows takes."""
    rows = [0] * streams + [1] * streams + [2] * (streams * streams)
    return torch.tensor(rows, device=device)


def mixing_pre(
    x_TSD: Tensor, weights: MixingWeights, facts: MixingFacts, numerics: Numerics
) -> tuple[Tensor, Tensor, Tensor]:
    """Return collapsed input [T, D], post [T, S] and mix [T, S, S]; the last two stay in `work`.

    A few tokens on the CPU take the compiled loop.
    """
    parts = (x_TSD, weights.fn, weights.base, weights.scale)
    few = x_TSD.shape[0] <= _FEW_TOKENS and x_TSD.device.type == "cpu"
    # Compiled loops do not look where extents end, so what does not fit is left to torch's refusal.
    rows, flat = (2 + facts.streams) * facts.streams, facts.streams * x_TSD.shape[2]
    fits = weights.fn.shape == (rows, flat) and weights.base.shape == (rows,)
    fits = fits and weights.scale.shape == (3,) and x_TSD.shape[1] == facts.streams
    if not (few and fits) or any(part.requires_grad for part in parts):
        return mixing_pre_definition(x_TSD, weights, facts, numerics)
    from degarble.references import compiled  # noqa: PLC0415  numba is heavy

    x, fn, base, scale = [cast(part, numerics.work).contiguous() for part in parts]
    collapsed, post, mix = compiled.mixing_pre(x, MixingWeights(fn, base, scale), facts)
    return cast(collapsed, numerics.store), post, mix


def mixing_pre_definition(
    x_TSD: Tensor, weights: MixingWeights, facts: MixingFacts, numerics: Numerics
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute mixing_pre in torch, for any number of tokens and with gradients."""
    streams = facts.streams
    m = _projected(x_TSD, weights, facts, numerics)
    scale, base = weights.scale.to(numerics.work), weights.base.to(numerics.work)
    m = torch.addcmul(base, m, scale[_scale_of_row(streams, m.device)])
    gates = torch.sigmoid(m[:, : 2 * streams])
    pre, post = gates[:, :streams] + facts.epsilon, gates[:, streams:] * 2.0
    logits_TSS = m[:, 2 * streams :].reshape(-1, streams, streams)
    mix = sinkhorn(logits_TSS, facts.iterations, facts.epsilon)
    return _weighted(pre, x_TSD, numerics), post, mix


def mixing_post(
    v_TD: Tensor, x_TSD: Tensor, post_TS: Tensor, mix_TSS: Tensor, numerics: Numerics
) -> Tensor:
    """Return new streams: `post_k * v + sum_j mix[j, k] * x_j`, one rounding at the end."""
    work = numerics.work
    if numerics.switches.mixing_in_storage_dtype:
        work = numerics.store
    mixed = torch.bmm(cast(mix_TSS, work).transpose(1, 2), cast(x_TSD, work))
    added = cast(post_TS, work).unsqueeze(-1), cast(v_TD, work).unsqueeze(1)
    return torch.addcmul(mixed, *added).to(numerics.store)


def collapse(
    x_TSD: Tensor, weights: MixingWeights, facts: MixingFacts, numerics: Numerics
) -> Tensor:
    """Collapse the streams after the last layer [T, D]: gates only, no Sinkhorn."""
    m = _projected(x_TSD, weights, facts, numerics)
    scale, base = weights.scale.to(numerics.work), weights.base.to(numerics.work)
    pre = torch.sigmoid(m * scale + base) + facts.epsilon
    return _weighted(pre, x_TSD, numerics)


def _weighted(pre_TS: Tensor, x_TSD: Tensor, numerics: Numerics) -> Tensor:
    """Sum the streams with one gate each [T, D]."""
    collapsed = torch.bmm(pre_TS.unsqueeze(1), cast(x_TSD, numerics.work))
    return collapsed.squeeze(1).to(numerics.store)
