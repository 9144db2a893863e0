"""How many values the components of V4 hold for a call of so many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.capture.captured_size import ValueCounts
from degarble.harness.families.values import score_values, shared_counts
from degarble.harness.model.config.config import compressor_windows

if TYPE_CHECKING:
    from collections.abc import Collection

    from degarble.harness.capture.captured_size import SequenceTokens
    from degarble.harness.model.config.config import V4Config
    from degarble.harness.model.types import Block


def value_counts(c: V4Config) -> dict[str, ValueCounts]:
    """Return how many values each component returns for a token."""
    d, s, heads = c.hidden_size, c.hc_mult, ValueCounts(c.num_attention_heads * c.head_dim)
    mixed, streams, row = ValueCounts(d, s + s * s), ValueCounts(s * d), ValueCounts(c.head_dim)
    return shared_counts(c) | {
        **{f"{half}.hc_pre": mixed for half in ("attn", "ffn")},
        **{f"{half}.norm": ValueCounts(d) for half in ("attn", "ffn")},
        **{f"{half}.hc_post": streams for half in ("attn", "ffn")},
        "attn.wq_b": heads,
        "attn.q_head_norm_rope": heads,
        "attn.wkv": row,
        "attn.kv_norm_rope": row,
        "attn.attend": heads,
        "attn.inverse_rope": heads,
        "attn.wo_a": ValueCounts(c.o_groups * c.o_lora_rank),
        "attn.wo_b": ValueCounts(d),
        "hc_head": ValueCounts(d),
        "norm": ValueCounts(d),
    }


def remembered(c: V4Config, block: Block, role: str, step: Collection[SequenceTokens]) -> int:
    """Return the working values that grow with what a sequence had before."""
    if role == "attn.indexer.scores":
        return score_values(c, block, step)
    width = c.index_head_dim if role.startswith("attn.indexer.") else c.head_dim
    width *= compressor_windows(block)
    if role.endswith("compressor.proj"):
        return 2 * width * sum(each.tokens for each in step)
    if role.endswith("compressor.pool"):
        return 2 * width * block.ratio * compressor_windows(block) * len(step)
    if role != "attn.attend":
        return 0
    rows = sum(min(each.before, c.sliding_window - 1) for each in step)
    entries = sum(each.before // block.ratio for each in step) if block.ratio else 0
    return (rows + entries) * c.head_dim
