"""Components of DeepSeek-V3.2 alone, each a pure function on named tensors.

They are the fused residual, MLA in two forms, the indexer's keys, and expert groups; what V4 has as
well is in components/common.py and experts.py.
Legend: T tokens, H heads, C latent width (kv_lora_rank), P rotated width, n nope width,
v value width, R rows of a sequence, N indexer heads, I indexer width, K experts a token.
A cached row is the latent (C) followed by the rotated key (P).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from degarble.harness.model.config.config import INDEXER_NORM_EPSILON
from degarble.references import (
    attention,
    elementary,
    experts,
    sparse_attention,
)
from degarble.references import (
    numerics as rounding,
)
from degarble.references.components import common
from degarble.references.facts import ModelFacts, ReferenceTable, single, spans_of
from degarble.references.linears import product

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.model.config.config import V32Config
    from degarble.references.facts import Inputs, Outputs, Span, Weights

    Function = Callable[["V32Facts", Inputs, Weights], Outputs]

_TOKENS_AT_ONCE = 128


@dataclass(frozen=True)
class V32Facts(ModelFacts):
    """Facts of a V3.2 model."""

    config: V32Config

    def norm_epsilon(self, weight: str) -> float:
        """Return the config's epsilon, unless a source builds a norm without passing it on."""
        if weight == "attn.indexer.k_norm":
            return INDEXER_NORM_EPSILON
        if weight in ("attn.q_norm", "attn.kv_norm"):
            return self.numerics.switches.latent_epsilon(self.config.rms_norm_eps)
        return self.config.rms_norm_eps


def residual_norm(facts: V32Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Add to the residual in the working dtype and norm that sum; the sum is stored rounded.

    The first layer has no residual.
    """
    numerics = facts.numerics
    total = inputs["x"].to(numerics.work)
    if "residual" in inputs:
        total = total + inputs["residual"].to(numerics.work)
    stored = total.to(numerics.store)
    normed = stored if numerics.switches.residual_rounded_before_norm else total
    weight = single(weights).values(numerics.work)
    out = elementary.rms_norm(normed, weight, facts.config.rms_norm_eps, numerics)
    return {"out": out, "residual": stored}


def rope(facts: V32Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Rotate the last P dims of every query head, and the shared key [T, P]."""
    del weights
    c, numerics = facts.config, facts.numerics
    assert facts.block is not None, "called only inside a block"
    table = elementary.rotation_table(c.rope(facts.block), inputs["positions"], numerics)
    x = inputs["q"]
    q_THd = x.reshape(x.shape[0], -1, c.qk_head_dim).to(numerics.work)
    q_THd = elementary.rotate_tail(q_THd, elementary.over_heads(table))
    key_TP = elementary.rotate_interleaved(inputs["key"].to(numerics.work), table)
    return {"q": q_THd.to(numerics.store), "key": key_TP.to(numerics.store)}


def kv_write(facts: V32Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return rows [T, C + P] as read back: latent rounded in blocks of 128, key unchanged."""
    del weights
    # 128-wide blocks, as in the official V3.2 cache.
    latent = rounding.through_cache(inputs["latent"], 128, facts.numerics)
    return {"out": torch.cat((latent, inputs["key"]), dim=-1)}


def attend(facts: V32Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Attend to the chosen tokens, in absorbed form unless expanded keys and values arrive.

    `rows` is what this call wrote, `state_rows` all that earlier ones did; `expanded` likewise.
    """
    c, spans = facts.config, spans_of(inputs)
    # None means the official V3.2 code, which stores logits and weights.
    stored = facts.numerics.switches.attention_in_storage_dtype is not False
    form = attention.Form(c.qk_nope_head_dim, c.v_head_dim, attention.softmax_scale(c), stored)
    # [R, C + P] a sequence: the latent, then the rotated key.
    rows = _memories(spans, inputs.get("state_rows"), inputs["rows"])
    naive, expanded = "expanded" in inputs, rows
    if naive:
        expanded = _memories(spans, inputs.get("state_expanded"), inputs["expanded"])
    out = []
    for span, own, wide in zip(spans, rows, expanded, strict=True):
        for begin in range(span.begin, span.end, _TOKENS_AT_ONCE):
            tokens = slice(begin, min(begin + _TOKENS_AT_ONCE, span.end))
            q = inputs["q"][tokens]
            index, seen = attention.listed_rows(inputs["chosen"][tokens], own.shape[0])
            if naive:
                key = own[index, c.kv_lora_rank :]
                made = attention.attend_naive(q, key, wide[index], seen, form, facts.numerics)
            else:
                weight = single(weights).values(facts.numerics.work)
                made = attention.attend_absorbed(q, own[index], weight, seen, form, facts.numerics)
            out.append(made)
    return {"out": common.joined(out)}


def _memories(spans: Sequence[Span], before: Tensor | None, made: Tensor) -> list[Tensor]:
    """Return each sequence's rows: those of earlier calls, then those of this one."""
    found, old = [], 0
    for span in spans:
        own = made[span.tokens]
        if span.start and before is not None:
            own = torch.cat((before[old : old + span.start], own))
        found.append(own)
        old += span.start
    return found


def indexer_q(facts: V32Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return indexer queries [T, N, I]."""
    del weights
    x = inputs["x"]
    q_TNI = x.reshape(x.shape[0], -1, facts.config.index_head_dim)
    return {"out": _index_operand(facts, q_TNI, inputs["positions"])}


def indexer_k(facts: V32Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return indexer keys [T, I]: LayerNorm, then the transforms of the queries."""
    work = facts.numerics.work
    by_part = {name.rpartition(".")[2]: weights[name].values(work) for name in weights}
    weight, bias = by_part["k_norm"], by_part["bias"]
    epsilon = facts.norm_epsilon("attn.indexer.k_norm")
    normed = elementary.layer_norm(inputs["x"], weight, bias, epsilon, facts.numerics)
    return {"out": _index_operand(facts, normed, inputs["positions"])}


def _index_operand(facts: V32Facts, x: Tensor, positions: Tensor) -> Tensor:
    """Rotate the FIRST P dims by halves, then Hadamard and rounding where switched on."""
    # Trap: the release code before 2025-11-17 paired (2i, 2i + 1) here.
    numerics, width = facts.numerics, facts.config.qk_rope_head_dim
    table = elementary.rotation_table(facts.config.indexer_rope(), positions, numerics)
    if x.ndim == 3:
        table = elementary.over_heads(table)
    wide = x.to(numerics.work)
    rotated = elementary.rotate_halves(wide[..., :width], table)
    x = torch.cat((rotated, wide[..., width:]), dim=-1)
    if numerics.switches.indexer_operand_rounded_in_between:
        x = x.to(numerics.store)
    if numerics.transforms(x.shape[-1]):
        x = elementary.hadamard(x.to(numerics.work))
        if numerics.switches.indexer_operand_rounded_in_between:
            x = x.to(numerics.store)
    return rounding.through_indexer(x, numerics).to(numerics.store)


def indexer_weights(facts: V32Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return head weights [T, N], scaled by (I * N)^-1/2; the official code computes in float32."""
    c = facts.config
    made = product(inputs["x"], single(weights), facts.numerics.work, facts.numerics)
    return {"out": made * (c.index_head_dim * c.index_n_heads) ** -0.5}


def indexer_scores(facts: V32Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return scores [T, longest sequence], -inf beyond the token's own position."""
    del weights
    spans, q = spans_of(inputs), inputs["q"]
    keys = _memories(spans, inputs.get("state_keys"), inputs["keys"])
    # A token attends to itself: it has position + 1 visible keys.
    widest, visible = max(key.shape[0] for key in keys), inputs["positions"] + 1
    # Only V4 stores these products; V3.2 keeps them in the working dtype.
    plain = facts.numerics.with_switches(indexer_in_storage_dtype=False)
    made = []
    for span, key in zip(spans, keys, strict=True):
        i = span.tokens
        part = sparse_attention.indexer_scores(q[i], key, inputs["weights"][i], visible[i], plain)
        made.append(torch.nn.functional.pad(part, (0, widest - key.shape[0]), value=-torch.inf))
    return {"out": common.joined(made)}


def indexer_topk(facts: V32Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return token numbers [T, K] within the token's own sequence, -1 for none."""
    del weights
    return {"out": sparse_attention.top_k(inputs["scores"], facts.config.index_topk)}


def topk(facts: V32Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Choose experts by biased sigmoid scores inside the best groups; weight them by plain ones."""
    c = facts.config
    score_TE = torch.sigmoid(inputs["logits"])
    # The bias takes part in the choice only: weights use the unbiased scores.
    biased = score_TE + single(weights).values(facts.numerics.work)
    kept = experts.grouped_scores(biased, experts.GroupFacts(c.n_group, c.topk_group))
    expert_TK = experts.largest_experts(kept, c.num_experts_per_tok)
    epsilon = facts.numerics.switches.routing_epsilon
    weight_TK = experts.router_weights(score_TE, expert_TK, c.routed_scaling_factor, epsilon)
    return {"experts": expert_TK, "weights": weight_TK}


def join(facts: V32Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return the drafter's input: normed embedding, then normed hidden state."""
    del facts, weights
    return {"out": torch.cat((inputs["e"], inputs["h"]), dim=-1)}


_ENDS: Mapping[str, Function] = MappingProxyType(
    {"embed": common.embed, "norm": residual_norm, "head": common.head}
)
_DRAFTER: Mapping[str, Function] = MappingProxyType(
    {
        "embed": common.embed,
        "enorm": common.norm,
        "hnorm": common.norm,
        "join": join,
        "eh_proj": common.linear,
        "norm": residual_norm,
        "head": common.head,
    }
)
_BLOCK: Mapping[str, Function] = MappingProxyType(
    {
        "attn.norm": residual_norm,
        "attn.wq_a": common.linear,
        "attn.q_norm": common.norm,
        "attn.wq_b": common.linear,
        "attn.wkv_a": common.linear,
        "attn.rope": rope,
        "attn.kv_norm": common.norm,
        "attn.kv_write": kv_write,
        "attn.wkv_b": common.linear,
        "attn.indexer.wq_b": common.linear,
        "attn.indexer.q": indexer_q,
        "attn.indexer.wk": common.linear,
        "attn.indexer.k": indexer_k,
        "attn.indexer.weights_proj": indexer_weights,
        "attn.indexer.scores": indexer_scores,
        "attn.indexer.topk": indexer_topk,
        "attn.attend": attend,
        "attn.wo": common.linear,
        "ffn.norm": residual_norm,
        "ffn.w13": common.stacked,
        "ffn.act": common.shared_act,
        "ffn.w2": common.linear,
        "ffn.gate": common.gate,
        "ffn.topk": topk,
        "ffn.experts.w13": experts.routed_w13,
        "ffn.experts.act_quant": experts.routed_act,
        "ffn.experts.w2": experts.routed_w2,
        "ffn.experts.combine": experts.combine,
        "ffn.shared.w13": common.stacked,
        "ffn.shared.act": common.shared_act,
        "ffn.shared.w2": common.linear,
        "ffn.moe_sum": experts.moe_sum,
    }
)
REFERENCE = ReferenceTable(V32Facts, _ENDS, _BLOCK, _DRAFTER, scoring="sigmoid")
