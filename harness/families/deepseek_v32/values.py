"""How many values the components of V3.2 hold for a call of so many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.capture.captured_size import ValueCounts
from degarble.harness.families.values import score_values, shared_counts

if TYPE_CHECKING:
    from collections.abc import Collection

    from degarble.harness.capture.captured_size import SequenceTokens
    from degarble.harness.model.config.config import V32Config
    from degarble.harness.model.types import Block


def value_counts(c: V32Config) -> dict[str, ValueCounts]:
    """Return how many values each component returns for a token."""
    d, p = c.hidden_size, c.qk_rope_head_dim
    queries = c.num_attention_heads * (c.qk_nope_head_dim + p)
    return shared_counts(c) | {
        **{name: ValueCounts(2 * d) for name in ("attn.norm", "ffn.norm", "norm")},  # with residual
        "attn.wq_b": ValueCounts(queries),
        "attn.wkv_a": ValueCounts(c.kv_lora_rank + p),
        "attn.rope": ValueCounts(queries + 2 * p),  # and the key that goes in, a slice
        "attn.kv_norm": ValueCounts(2 * c.kv_lora_rank),  # as above
        "attn.kv_write": ValueCounts(c.kv_lora_rank + p),
        "attn.indexer.weights_proj": ValueCounts(work=c.index_n_heads),
        "attn.indexer.wk": ValueCounts(c.index_head_dim),
        "attn.indexer.k": ValueCounts(c.index_head_dim),
        "attn.attend": ValueCounts(c.num_attention_heads * c.v_head_dim),
        "attn.wo": ValueCounts(d),
        "ffn.w13": ValueCounts(2 * c.intermediate_size),
        "ffn.act": ValueCounts(c.intermediate_size),
        "ffn.w2": ValueCounts(d),
    }


def remembered(c: V32Config, block: Block, role: str, step: Collection[SequenceTokens]) -> int:
    """Return the working values that grow with what a sequence had before."""
    if role == "attn.indexer.scores":
        return score_values(c, block, step)
    rows = sum(each.before for each in step) * (c.kv_lora_rank + c.qk_rope_head_dim)
    return rows if role == "attn.attend" else 0
