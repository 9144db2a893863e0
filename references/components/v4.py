"""Components of DeepSeek-V4 alone, each a pure function on named tensors.

Legend: T tokens, B sequences, D hidden, S streams, H heads, L latent width, N indexer heads,
I indexer width, K experts a token, W entries, R rows of a sequence.
The tables at the end map the component names of harness.model to functions. references/model.py is
composed of exactly these, so replaying one component and running the model execute the same code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from degarble.harness.model.config.config import compressor_windows
from degarble.references import (
    attention,
    elementary,
    experts,
    mixing,
    sparse_attention,
)
from degarble.references import (
    numerics as rounding,
)
from degarble.references.components import common
from degarble.references.facts import MixingFacts, ModelFacts, ReferenceTable, single, spans_of
from degarble.references.linears import activation_values, product, reads_as_stored, weight_values
from degarble.references.numerics import cast
from degarble.references.sparse_attention import PoolFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.model.config.config import V4Config
    from degarble.harness.model.types import Block, Rope
    from degarble.references.facts import Inputs, Outputs, Span, Weights

    Function = Callable[["V4Facts", Inputs, Weights], Outputs]

_TOKENS_AT_ONCE = 128  # attended to together; bounds how many masked rows a step multiplies


@dataclass(frozen=True)
class V4Facts(ModelFacts):
    """Facts of a V4 model."""

    config: V4Config

    def activation(self, weight: str) -> str | None:
        """Return the recipe's format; a switch keeps the input of wo_a unquantised."""
        if weight == "attn.wo_a" and not self.numerics.switches.wo_a_follows_recipe:
            return None
        return super().activation(weight)

    @cached_property
    def rope(self) -> Rope:
        """Return the RoPE of this block."""
        return self.config.rope(self.decoder_block)

    @cached_property
    def mixing(self) -> MixingFacts:
        """Return the facts of the streams' mixing."""
        c = self.config
        return MixingFacts(c.hc_mult, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)

    def pool(self, width: int) -> PoolFacts:
        """Return how this block pools tokens into entries: attention's or the indexer's width."""
        # Kept by width: attention and the indexer pool the same windows at different widths.
        known = self._pools.get(width)
        if known is None:
            block, epsilon = self.decoder_block, self.config.rms_norm_eps
            overlap = compressor_windows(block) == 2
            known = PoolFacts(block.ratio, overlap, width, epsilon, self.rope)
            self._pools[width] = known
        return known

    @cached_property
    def _pools(self) -> dict[int, PoolFacts]:
        return {}

    @property
    def decoder_block(self) -> Block:
        """Return the block; the ends have none."""
        assert self.block is not None, "called only inside a block"
        return self.block

    @property
    def weight_before_w2(self) -> bool:
        """Return the switch; official code and ModelOpt: in front of w2 and of its quantisation."""
        return self.numerics.switches.routing_weight_before_w2

    @property
    def limit(self) -> float | None:
        """Return the SwiGLU clamp; 0 in the config means none."""
        return self.config.swiglu_limit or None

    @property
    def shared_limit(self) -> float | None:
        """Return the clamp of the shared expert; sources disagree on whether it has one."""
        return self.limit if self.numerics.switches.shared_expert_clamped else None


def draft_embed(facts: V4Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return the embedding for the drafter; one source zeroes it at position 0."""
    outputs = common.embed(facts, inputs, weights)
    if facts.numerics.switches.first_draft_embedding_zeroed:
        outputs["out"] = outputs["out"].masked_fill(inputs["positions"][:, None] == 0, 0.0)
    return outputs


def join(facts: V4Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return the drafter's streams: the embedding's projection is added to every stream's."""
    del weights
    work = facts.numerics.work
    total = cast(inputs["e"], work).unsqueeze(1) + cast(inputs["h"], work)
    return {"out": cast(total, facts.numerics.store)}


def _mixing_weights(weights: Weights, work: torch.dtype) -> mixing.MixingWeights:
    # `hc_attn_fn`, `hc_attn_base`, `hc_attn_scale` become fn, base and scale.
    by_part = {name.rpartition("_")[2]: weights[name].values(work) for name in weights}
    return mixing.MixingWeights(**by_part)


def hc_pre(facts: V4Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Collapse the streams; post and mix go to the sublayer's hc_post."""
    coefficients = _mixing_weights(weights, facts.numerics.work)
    out, post, mix = mixing.mixing_pre(
        inputs["streams"], coefficients, facts.mixing, facts.numerics
    )
    return {"out": out, "post": post, "mix": mix}


def hc_post(facts: V4Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Spread the sublayer's output over the streams."""
    del weights
    out = mixing.mixing_post(
        inputs["x"], inputs["streams"], inputs["post"], inputs["mix"], facts.numerics
    )
    return {"out": out}


def hc_head(facts: V4Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Collapse the streams after the last layer."""
    coefficients = _mixing_weights(weights, facts.numerics.work)
    out = mixing.collapse(inputs["streams"], coefficients, facts.mixing, facts.numerics)
    return {"out": out}


def q_head_norm_rope(facts: V4Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return heads [T, H, L] after weightless RMS and rotation."""
    del weights
    x = inputs["x"]
    q_THL = x.reshape(x.shape[0], -1, facts.config.head_dim)
    table = elementary.rotation_table(facts.rope, inputs["positions"], facts.numerics)
    return {"out": attention.query_heads(q_THL, table, facts.config.rms_norm_eps, facts.numerics)}


def kv_norm_rope(facts: V4Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return the shared latent row [T, L]."""
    table = elementary.rotation_table(facts.rope, inputs["positions"], facts.numerics)
    weight, epsilon = single(weights).values(facts.numerics.work), facts.config.rms_norm_eps
    return {"out": attention.latent(inputs["x"], weight, table, epsilon, facts.numerics)}


def cache_write(facts: V4Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return rows as read back from the cache: leading dims rounded, rotated ones unchanged."""
    del weights
    x, plain = inputs["x"], facts.config.nope_head_dim
    # 64-wide blocks, as in the official V4 cache.
    rounded = rounding.through_cache(x[..., :plain], 64, facts.numerics)
    return {"out": torch.cat((rounded, x[..., plain:]), dim=-1)}


def compressor_proj(facts: V4Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return latent and gate projections, kept in the working dtype."""
    numerics = facts.numerics
    kept = numerics.store if numerics.switches.pooling_in_storage_dtype else numerics.work
    form = facts.activation(next(iter(weights)))
    x = activation_values(inputs, form, numerics.products, numerics)
    made = {}
    for name, weight in weights.items():
        part = cast(product(x, weight, numerics.products, numerics), kept)
        made[name.rpartition(".")[2]] = cast(part, numerics.work)
    return {"latent": made["wkv"], "gate": made["wgate"]}


def compressor_pool(facts: V4Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return the entries that this call completes, by sequence, and the carried state."""
    numerics, ratio = facts.numerics, facts.decoder_block.ratio
    by_part = {name.rpartition(".")[2]: weights[name].values(numerics.work) for name in weights}
    norm_E = by_part["norm"]
    how = facts.pool(norm_E.shape[0])
    spans = spans_of(inputs)
    # One token: a Python index in place of a gather by tensor.
    if len(spans) == spans[0].count == 1:
        gate = inputs["gate"] + by_part["ape"][spans[0].start % ratio]
    else:
        gate = inputs["gate"] + by_part["ape"][inputs["positions"] % ratio]
    made = []
    for number, span in enumerate(spans):
        state = sparse_attention.PoolState(
            inputs["state_latent"][number], inputs["state_gate"][number]
        )
        new = (inputs["latent"][span.tokens], gate[span.tokens])
        made.append(sparse_attention.pool_windows(new, state, span.start, norm_E, how, numerics))
    return {
        "out": common.joined([entries for entries, _ in made]),
        "entry_offsets": torch.tensor([0, *accumulate(len(entries) for entries, _ in made)]),
        "state_latent": common.side_by_side([state.latent for _, state in made]),
        "state_gate": common.side_by_side([state.gate for _, state in made]),
    }


def indexer_pool(facts: V4Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Pool as the main compressor does, then apply Hadamard and rounding of the keys."""
    outputs = compressor_pool(facts, inputs, weights)
    outputs["out"] = _indexer_operand(facts, outputs["out"])
    return outputs


def _indexer_operand(facts: V4Facts, x: Tensor) -> Tensor:
    numerics = facts.numerics
    if numerics.transforms(x.shape[-1]):
        x = elementary.hadamard(cast(x, numerics.work))
        if numerics.switches.indexer_operand_rounded_in_between:
            x = cast(x, numerics.store)
    return cast(rounding.through_indexer(x, numerics), numerics.store)


def indexer_q(facts: V4Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return indexer queries [T, N, I]: rotation, Hadamard, rounding."""
    del weights
    x, numerics = inputs["x"], facts.numerics
    q_TNI = x.reshape(x.shape[0], -1, facts.config.index_head_dim).to(numerics.work)
    table = elementary.rotation_table(facts.rope, inputs["positions"], numerics)
    rotated = elementary.rotate_tail(q_TNI, elementary.over_heads(table))
    if numerics.switches.indexer_operand_rounded_in_between:
        rotated = cast(rotated, numerics.store)
    return {"out": _indexer_operand(facts, rotated)}


def indexer_weights(facts: V4Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return head weights [T, N], scaled by (I * N)^-1/2; the projection is stored first."""
    c, numerics = facts.config, facts.numerics
    made = cast(product(inputs["x"], single(weights), numerics.work, numerics), numerics.store)
    scaled = cast(made, numerics.work) * (c.index_head_dim * c.index_n_heads) ** -0.5
    stored = numerics.switches.indexer_weights_in_storage_dtype
    return {"out": cast(scaled, numerics.store) if stored else scaled}


def indexer_scores(facts: V4Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return scores [T, most entries of a sequence], -inf where no entry is visible."""
    del weights
    ratio, spans = facts.decoder_block.ratio, spans_of(inputs)
    q, visible = inputs["q"], None
    if q.shape[0] > len(spans):
        visible = sparse_attention.visible_entries(inputs["positions"], ratio)
    keys = _memories(spans, inputs.get("state_keys"), inputs["keys"], ratio)
    # Sequences have different numbers of entries; scores are padded with -inf to the longest.
    widest = max(key.shape[0] for key in keys)
    made = []
    for span, key in zip(spans, keys, strict=True):
        i = span.tokens
        # A token that comes alone sees every entry, its own call's included.
        seen = None if visible is None else visible[i]
        part = sparse_attention.indexer_scores(
            q[i], key, inputs["weights"][i], seen, facts.numerics
        )
        if key.shape[0] < widest:
            part = torch.nn.functional.pad(part, (0, widest - key.shape[0]), value=-torch.inf)
        made.append(part)
    return {"out": common.joined(made)}


def _memories(
    spans: Sequence[Span], before: Tensor | None, made: Tensor, ratio: int
) -> list[Tensor]:
    """Return each sequence's entries: those of earlier calls, then those of this one."""
    # `before` and `made` hold all sequences in turn: old and new are offsets into them.
    found, old, new = [], 0, 0
    for span in spans:
        kept, added = span.entries_before(ratio), span.entries_made(ratio)
        own = made[new : new + added]
        if kept and before is not None:
            earlier = before[old : old + kept]
            own = torch.cat((earlier, own)) if added else earlier
        found.append(own)
        old, new = old + kept, new + added
    return found


def indexer_topk(facts: V4Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return entry numbers [T, K] within the token's own sequence, -1 for none."""
    del weights
    return {"out": sparse_attention.top_k(inputs["scores"], facts.config.index_topk)}


def attend(facts: V4Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Attend to each token's window and its entries: the chosen ones, or all visible ones.

    `window` and `compressed` are what this call wrote; `state_window` holds the rows of the
    window - 1 tokens before it, or of all there are, `state_compressed` all earlier entries.
    """
    sink, spans = single(weights).values(facts.numerics.work), spans_of(inputs)
    # The window counts the token itself, so it reaches window - 1 rows back.
    reach, ratio = facts.config.sliding_window - 1, facts.decoder_block.ratio
    # Layers without a compressor have no entries; an empty slice has the right width and dtype.
    entries = [inputs["window"][:0]] * len(spans)
    if ratio:
        before = inputs.get("state_compressed")
        entries = _memories(spans, before, inputs["compressed"], ratio)
    old, out = 0, []
    for span, own in zip(spans, entries, strict=True):
        kept = min(span.start, reach)
        before = inputs["state_window"][old : old + kept] if kept else inputs["window"][:0]
        old += kept
        for begin in range(span.begin, span.end, _TOKENS_AT_ONCE):
            tokens = slice(begin, min(begin + _TOKENS_AT_ONCE, span.end))
            near = _near_rows(before, inputs["window"][span.begin : tokens.stop], tokens, reach)
            # Position in the sequence of the first token after this piece.
            stop = span.start + tokens.stop - span.begin
            out.append(_attend_some(facts, inputs, tokens, (near, own, stop), sink))
    return {"out": common.joined(out)}


def _attend_some(
    facts: V4Facts,
    inputs: Inputs,
    tokens: slice,
    memory: tuple[list[Tensor], Tensor, int],
    sink: Tensor,
) -> Tensor:
    """Attend from some tokens of one sequence to their window rows, in parts, and the entries.

    `memory` ends with the position after these tokens.
    """
    near, entries, stop = memory
    positions, window = inputs["positions"][tokens], facts.config.sliding_window
    count, ratio, seen, listed = positions.shape[0], facts.decoder_block.ratio, None, None
    if count > 1:
        rows = sum(part.shape[0] for part in near)
        seen = attention.window_rows(positions, stop - rows, rows, window)
    if "chosen" in inputs:
        index, listed = attention.listed_rows(inputs["chosen"][tokens], entries.shape[0])
        found = entries[index] if isinstance(index, slice) else entries.index_select(0, index)
        near = [*near, found]
    elif ratio:
        # Entries that are complete before `stop`; later ones are visible to no token here.
        far = entries[: stop // ratio]
        near = [*near, far]
        if count > 1:
            visible = sparse_attention.visible_entries(positions, ratio)
            listed = torch.arange(far.shape[0], device=visible.device) < visible[:, None]
    if seen is not None and listed is not None:
        seen = torch.cat((seen, listed), dim=1)
    return attention.attend(inputs["q"][tokens], near, seen, sink, facts.numerics)


def _near_rows(before: Tensor, since: Tensor, tokens: slice, reach: int) -> list[Tensor]:
    """Return the rows that some tokens' windows span, `before` the call and `since` it began."""
    # Rows needed before the first token of this call; negative if the call has them all.
    missing = tokens.stop - tokens.start + reach - since.shape[0]
    if missing <= 0:
        return [since[-missing:]]
    return [before[max(0, before.shape[0] - missing) :], since]


def inverse_rope(facts: V4Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Undo the rotation that the values carried; heads side by side [T, H * L]."""
    del weights
    table = elementary.rotation_table(facts.rope, inputs["positions"], facts.numerics)
    return {"out": attention.unrotate(inputs["x"], table, facts.numerics).flatten(1)}


def wo_a(facts: V4Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Multiply each output group by its matrix."""
    (name,) = weights
    numerics, rank = facts.numerics, facts.config.o_lora_rank
    x = activation_values(inputs, facts.activation(name), numerics.products, numerics)
    source = weights[name]
    if source.value is not None and reads_as_stored(x, source.value, numerics):
        by_group = source.value.reshape(-1, rank, source.value.shape[1])
        return {"out": attention.grouped_as_stored(x, by_group, numerics)}
    weight = weight_values(source, numerics.products, numerics)
    by_group = weight.reshape(-1, rank, weight.shape[1])
    return {"out": attention.grouped(x, by_group, numerics)}


def topk(facts: V4Facts, inputs: Inputs, weights: Weights) -> Outputs:
    """Return chosen experts [T, K], by score or by the table of token ids, and their weights."""
    c, numerics = facts.config, facts.numerics
    ((name, source),) = weights.items()
    # The bias takes part in the choice only: weights use the unbiased scores.
    score_TE = experts.sqrt_softplus(inputs["logits"])
    if name.endswith("tid2eid"):
        expert_TK = source.values(torch.int64)[inputs["tokens"]]
    else:
        biased = score_TE + source.values(numerics.work)
        expert_TK = experts.largest_experts(biased, c.num_experts_per_tok)
    epsilon = numerics.switches.routing_epsilon
    weight_TK = experts.router_weights(score_TE, expert_TK, c.routed_scaling_factor, epsilon)
    return {"experts": expert_TK, "weights": weight_TK}


_ENDS: Mapping[str, Function] = MappingProxyType(
    {"embed": common.embed, "hc_head": hc_head, "norm": common.norm, "head": common.head}
)
# The MTP block's own components, before and after an ordinary block.
_DRAFTER: Mapping[str, Function] = MappingProxyType(
    {
        "embed": draft_embed,
        "enorm": common.norm,
        "hnorm": common.norm,
        "e_proj": common.linear,
        "h_proj": common.linear,
        "join": join,
        "hc_head": hc_head,
        "norm": common.norm,
        "head": common.head,
    }
)
_BLOCK: Mapping[str, Function] = MappingProxyType(
    {
        "attn.hc_pre": hc_pre,
        "attn.norm": common.norm,
        "attn.wq_a": common.linear,
        "attn.q_norm": common.norm,
        "attn.wq_b": common.linear,
        "attn.q_head_norm_rope": q_head_norm_rope,
        "attn.wkv": common.linear,
        "attn.kv_norm_rope": kv_norm_rope,
        "attn.kv_write": cache_write,
        "attn.compressor.proj": compressor_proj,
        "attn.compressor.pool": compressor_pool,
        "attn.compressor.write": cache_write,
        "attn.indexer.wq_b": common.linear,
        "attn.indexer.q": indexer_q,
        "attn.indexer.weights_proj": indexer_weights,
        "attn.indexer.compressor.proj": compressor_proj,
        "attn.indexer.compressor.pool": indexer_pool,
        "attn.indexer.scores": indexer_scores,
        "attn.indexer.topk": indexer_topk,
        "attn.attend": attend,
        "attn.inverse_rope": inverse_rope,
        "attn.wo_a": wo_a,
        "attn.wo_b": common.linear,
        "attn.hc_post": hc_post,
        "ffn.hc_pre": hc_pre,
        "ffn.norm": common.norm,
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
        "ffn.hc_post": hc_post,
    }
)
REFERENCE = ReferenceTable(V4Facts, _ENDS, _BLOCK, _DRAFTER, scoring="sqrtsoftplus")
