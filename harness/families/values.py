"""How many values V4 and V3.2 alike hold for a call: indexer, router and experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from degarble.harness.capture.captured_size import ValueCounts

if TYPE_CHECKING:
    from collections.abc import Collection

    from degarble.harness.capture.captured_size import SequenceTokens
    from degarble.harness.model.types import Block


def shared_counts(c: Any) -> dict[str, ValueCounts]:
    """Return the values for a token of the indexer, the router and the experts."""
    d, f, k = c.hidden_size, c.moe_intermediate_size, c.num_experts_per_tok
    queries = ValueCounts(c.index_n_heads * c.index_head_dim)
    return {
        "embed": ValueCounts(d),
        "attn.wq_a": ValueCounts(c.q_lora_rank),
        "attn.q_norm": ValueCounts(c.q_lora_rank),
        "attn.indexer.wq_b": queries,
        "attn.indexer.q": queries,
        "attn.indexer.weights_proj": ValueCounts(c.index_n_heads),
        "attn.indexer.topk": ValueCounts(integers=c.index_topk),
        "ffn.gate": ValueCounts(work=c.n_routed_experts),
        "ffn.topk": ValueCounts(work=k, integers=k),
        "ffn.experts.w13": ValueCounts(2 * k * f),
        "ffn.experts.act_quant": ValueCounts(k * f),
        "ffn.experts.w2": ValueCounts(k * d),
        "ffn.experts.combine": ValueCounts(work=d),
        "ffn.shared.w13": ValueCounts(2 * f),
        "ffn.shared.act": ValueCounts(f),
        "ffn.shared.w2": ValueCounts(d),
        "ffn.moe_sum": ValueCounts(d),
        "head": ValueCounts(work=c.vocab_size),
    }


def score_values(c: Any, block: Block, step: Collection[SequenceTokens]) -> int:
    """Return the indexer's scores of a step, and the keys that they are made of."""
    ratio = block.ratio or 1
    widest = max((each.before + each.tokens) // ratio for each in step)
    keys: int = sum(each.before // ratio for each in step) * c.index_head_dim
    return widest * sum(each.tokens for each in step) + keys
