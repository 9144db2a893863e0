"""Map the modules of transformers' deepseek_v4 and deepseek_v32 to components.

Modules are found by name; transformers is not imported. Only tensors that mean the same on both
sides are mapped. Not mapped: the indexer's weights, which transformers scales later; V3.2's wkv_b,
which receives all cached rows there; whatever has no module (attention itself, rotations, pooled
entries); drafters. A module that fuses components supplies the inputs of the first and the outputs
of the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.capture.modules import Place
from degarble.harness.model.config.config import V4Config
from degarble.harness.model.types import LayerType, MlpType

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.model.config.config import Config
    from degarble.harness.model.types import Block

_V4_ATTENTION = {
    "wq_a": "q_a_proj", "q_norm": "q_a_norm", "wq_b": "q_b_proj", "wkv": "kv_proj",
    "wo_a": "o_a_proj", "wo_b": "o_b_proj",
}  # fmt: skip
_V32_ATTENTION = {
    "wq_a": "q_a_proj", "q_norm": "q_a_layernorm", "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "wo": "o_proj",
    "indexer.wq_b": "indexer.wq_b", "indexer.wk": "indexer.wk",
}  # fmt: skip


def places_of(config: Config) -> list[Place]:
    """Return the map for the causal language model that transformers makes of a config."""
    found = [Place("embed", ("model.embed_tokens",), {0: "tokens"})]
    v4 = isinstance(config, V4Config)
    for block in config.layers:
        found += _v4_block(block) if v4 else _v32_block(block)
    if v4:
        found.append(Place("hc_head", ("model.hc_head",), {0: "streams"}))
    return [*found, Place("norm", ("model.norm",)), Place("head", ("lm_head",))]


def _v4_block(block: Block) -> Iterator[Place]:
    ours, theirs = f"{block.prefix}.", f"model.{block.prefix}."
    mixed = {(0, 0): "post", (0, 1): "mix", (0, 2): "out"}
    for half, norm in (("attn", "input_layernorm"), ("ffn", "post_attention_layernorm")):
        yield Place(f"{ours}{half}.hc_pre", (f"{theirs}{half}_hc",), {0: "streams"}, mixed)
        yield Place(f"{ours}{half}.norm", (theirs + norm,))
    attention = f"{theirs}self_attn."
    for name, module in _V4_ATTENTION.items():
        yield Place(f"{ours}attn.{name}", (attention + module,))
    if block.ratio:
        yield _projections(f"{ours}attn.compressor.proj", f"{attention}compressor.")
    if block.layer_type is LayerType.SPARSE:
        indexer = f"{attention}compressor.indexer."
        yield Place(f"{ours}attn.indexer.wq_b", (f"{indexer}q_b_proj",))
        yield _projections(f"{ours}attn.indexer.compressor.proj", indexer)
    yield from _experts(f"{ours}ffn.", f"{theirs}mlp")


def _projections(component: str, module: str) -> Place:
    modules = (f"{module}kv_proj", f"{module}gate_proj")
    return Place(component, modules, outputs={(0, 0): "latent", (1, 0): "gate"})


def _v32_block(block: Block) -> Iterator[Place]:
    ours, theirs = f"{block.prefix}.", f"model.{block.prefix}."
    # Their norms see the sum that ours makes of x and residual.
    for half, norm in (("attn", "input_layernorm"), ("ffn", "post_attention_layernorm")):
        yield Place(f"{ours}{half}.norm", (theirs + norm,))
    for name, module in _V32_ATTENTION.items():
        yield Place(f"{ours}attn.{name}", (f"{theirs}self_attn.{module}",))
    if block.mlp_type is MlpType.DENSE:
        yield from _gated(f"{ours}ffn.", f"{theirs}mlp.")
    else:
        yield from _experts(f"{ours}ffn.", f"{theirs}mlp")


def _gated(ours: str, theirs: str) -> Iterator[Place]:
    """Gate and up are one linear of ours; what lies between them and down has no module."""
    modules = (f"{theirs}gate_proj", f"{theirs}up_proj")
    yield Place(f"{ours}w13", modules, outputs={(0, 0): "out", (1, 0): "out"})
    yield Place(f"{ours}w2", (f"{theirs}down_proj",))


def _experts(ours: str, theirs: str) -> Iterator[Place]:
    yield Place(f"{ours}gate", (f"{theirs}.gate",))
    routed = {(0, 1): "weights", (0, 2): "experts"}
    yield Place(f"{ours}topk", (f"{theirs}.gate",), {}, routed)
    experts = f"{theirs}.experts"
    yield Place(f"{ours}experts.w13", (experts,), {0: "x", 1: "experts"}, {})
    yield Place(f"{ours}experts.combine", (experts,), {2: "weights"}, {(0, 0): "out"})
    yield from _gated(f"{ours}shared.", f"{theirs}.shared_experts.")
    yield Place(f"{ours}moe_sum", (theirs,), {})
