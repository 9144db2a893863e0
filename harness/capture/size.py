"""Estimate the size of a capture of our references before anything is written.

One table holds how many values of which dtype a component returns for a token. An input was the
output of another component and is stored once. State from earlier calls (windows, entries, rows)
counts for each step that reads it. The estimate ignores tensors that happen to be equal, and a
filter of tokens counts as if it kept its share of everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.model.components import component_named
from degarble.harness.model.config.config import V4Config, V32Config, compressor_windows
from degarble.harness.model.parameters import parameter_named
from degarble.harness.model.sites import Port, Site

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from degarble.harness.capture.filter import Wanted
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.types import Block
    from degarble.references.binding import Bound

_INTEGER = 8  # ids, experts, positions: int64
_ACT_QUANT = ".act_quant"


class Values(NamedTuple):
    """Values for a token, by what holds them: stored ones, working ones, integers."""

    store: int = 0
    work: int = 0
    integers: int = 0


class Fed(NamedTuple):
    """What one sequence brings to a step: tokens, and how many it had before."""

    tokens: int
    before: int


def captured_bytes(bound: Bound, steps: Iterable[Sequence[Fed]], wanted: Wanted) -> int:
    """Bytes of tensors that a capture of these steps stores."""
    table = _values(bound.config)
    names = [name for name in bound.calls if wanted.takes(name) and not name.startswith("mtp.")]
    total = 0
    for step in steps:
        fed = [Fed(_among(wanted, each), each.before) for each in step]
        fed = [each for each in fed if each.tokens]
        if fed:
            total += 2 * _INTEGER * sum(each.tokens for each in fed)  # ids and positions
            total += sum(_bytes_of(bound, name, fed, table) for name in names)
    return total


def steps_of(prompts: Sequence[int], new_tokens: int, piece: int) -> list[list[Fed]]:
    """Return the steps of prompts of these lengths, in pieces, and of the tokens after them."""
    found = [
        [Fed(min(piece, count - begin), begin) for count in prompts if count > begin]
        for begin in range(0, max(prompts), piece)
    ]
    return found + [[Fed(1, count + at) for count in prompts] for at in range(new_tokens - 1)]


def _among(wanted: Wanted, fed: Fed) -> int:
    rows = wanted.rows(range(fed.before, fed.before + fed.tokens))
    return fed.tokens if rows is None else len(rows)


def _bytes_of(bound: Bound, name: str, step: list[Fed], table: dict[str, Values]) -> int:
    """Return how many bytes one component adds in one step."""
    config, numerics, role = bound.config, bound.numerics, Site(name, Port.OUT).role
    tokens = sum(each.tokens for each in step)
    if role.endswith(_ACT_QUANT) and role != "ffn.experts.act_quant":
        # Codes, a byte each at most; scales are few.
        linear = component_named(config, name.removesuffix(_ACT_QUANT))
        return tokens * parameter_named(config, linear.weights[0]).shape[-1]
    if role in {"hc_head", "head"} or (role == "norm" and isinstance(config, V4Config)):
        tokens = len(step)  # logits are those behind each sequence's last token
    each = table.get(role, Values())
    block = component_named(config, name).block
    remembered = 0 if block is None else _remembered(config, block, role, step)
    stored = tokens * (each.store * numerics.store.itemsize + each.integers * _INTEGER)
    return stored + (tokens * each.work + remembered) * numerics.work.itemsize


def _values(c: Config) -> dict[str, Values]:
    """Return how many values each component returns for a token."""
    d, f, k = c.hidden_size, c.moe_intermediate_size, c.num_experts_per_tok
    queries = Values(c.index_n_heads * c.index_head_dim)
    both = {
        "embed": Values(d),
        "attn.wq_a": Values(c.q_lora_rank),
        "attn.q_norm": Values(c.q_lora_rank),
        "attn.indexer.wq_b": queries,
        "attn.indexer.q": queries,
        "attn.indexer.weights_proj": Values(c.index_n_heads),
        "attn.indexer.topk": Values(integers=c.index_topk),
        "ffn.gate": Values(work=c.n_routed_experts),
        "ffn.topk": Values(work=k, integers=k),
        "ffn.experts.w13": Values(2 * k * f),
        "ffn.experts.act_quant": Values(k * f),
        "ffn.experts.w2": Values(k * d),
        "ffn.experts.combine": Values(work=d),
        "ffn.shared.w13": Values(2 * f),
        "ffn.shared.act": Values(f),
        "ffn.shared.w2": Values(d),
        "ffn.moe_sum": Values(d),
        "head": Values(work=c.vocab_size),
    }
    return both | (_values_v4(c) if isinstance(c, V4Config) else _values_v32(c))


def _values_v4(c: V4Config) -> dict[str, Values]:
    d, s, heads = c.hidden_size, c.hc_mult, Values(c.num_attention_heads * c.head_dim)
    mixed, streams, row = Values(d, s + s * s), Values(s * d), Values(c.head_dim)
    return {
        **{f"{half}.hc_pre": mixed for half in ("attn", "ffn")},
        **{f"{half}.norm": Values(d) for half in ("attn", "ffn")},
        **{f"{half}.hc_post": streams for half in ("attn", "ffn")},
        "attn.wq_b": heads,
        "attn.q_head_norm_rope": heads,
        "attn.wkv": row,
        "attn.kv_norm_rope": row,
        "attn.attend": heads,
        "attn.inverse_rope": heads,
        "attn.wo_a": Values(c.o_groups * c.o_lora_rank),
        "attn.wo_b": Values(d),
        "hc_head": Values(d),
        "norm": Values(d),
    }


def _values_v32(c: V32Config) -> dict[str, Values]:
    d, p = c.hidden_size, c.qk_rope_head_dim
    queries = c.num_attention_heads * (c.qk_nope_head_dim + p)
    return {
        **{name: Values(2 * d) for name in ("attn.norm", "ffn.norm", "norm")},  # with residual
        "attn.wq_b": Values(queries),
        "attn.wkv_a": Values(c.kv_lora_rank + p),
        "attn.rope": Values(queries + 2 * p),  # and the key that goes in, a slice
        "attn.kv_norm": Values(2 * c.kv_lora_rank),  # as above
        "attn.kv_write": Values(c.kv_lora_rank + p),
        "attn.indexer.weights_proj": Values(work=c.index_n_heads),
        "attn.indexer.wk": Values(c.index_head_dim),
        "attn.indexer.k": Values(c.index_head_dim),
        "attn.attend": Values(c.num_attention_heads * c.v_head_dim),
        "attn.wo": Values(d),
        "ffn.w13": Values(2 * c.intermediate_size),
        "ffn.act": Values(c.intermediate_size),
        "ffn.w2": Values(d),
    }


def _remembered(c: Config, block: Block, role: str, step: list[Fed]) -> int:
    """Working values that grow with what a sequence had before: rows read, scores, pools."""
    if role == "attn.indexer.scores":
        ratio = block.ratio or 1
        widest = max((each.before + each.tokens) // ratio for each in step)
        keys = sum(each.before // ratio for each in step) * c.index_head_dim
        return widest * sum(each.tokens for each in step) + keys
    if isinstance(c, V32Config):
        rows = sum(each.before for each in step) * (c.kv_lora_rank + c.qk_rope_head_dim)
        return rows if role == "attn.attend" else 0
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
