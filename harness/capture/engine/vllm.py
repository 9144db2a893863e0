"""Map the modules of vLLM's DeepSeek-V4 to our components and sites.

The names are those of vLLM 0.33's models/deepseek_v4; vLLM is not imported. Fused modules are split
(fused_wqa_wkv, fused_wkv_wgate, gate_up_proj). Sharding follows vLLM's layers: attention by heads
and groups, routed and shared experts along the intermediate dimension.

What vLLM fuses into kernels without a module or method (mHC, norm of the rotated key, cache writes,
attention itself, inverse RoPE with wo_a) is left out, or read from the arguments of its neighbours.
Routed experts are one block: its input, the chosen experts, and the summed output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.engine.maps import (
    TERM,
    WHOLE,
    Of,
    Rows,
    Seen,
    Share,
    Sighting,
    made,
    part,
    taken,
)
from degarble.harness.model.config.config import V4Config, compressor_windows
from degarble.harness.model.types import LayerType, MlpType

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.model.config.config import Config
    from degarble.harness.model.types import Block

_HIDDEN = 1  # argument of the attention's forward: (positions, hidden_states, ...)


def sightings_of(config: Config, ranks: int = 1) -> list[Sighting]:
    """Map vLLM's causal language model of a config; drafters are models of their own there.

    On several `ranks` nobody shows the terms of moe_sum as they are added: each rank adds its own.
    """
    if not isinstance(config, V4Config):
        raise InvalidArgument(
            "family", config.family, V4Config.family,
            "Capture this model through our own references: leave --backend vllm out.",
        )  # fmt: skip
    tokens = taken("model.embed_tokens")
    found = [Sighting("embed", {"tokens": tokens}, {"out": made("model.embed_tokens")})]
    for block in config.layers:
        found += _attention(block, config)
        found += _ffn(block, config, ranks)
    last = Seen("model.norm", Of.ARGUMENT, rows=Rows.LAST)
    normed = Seen("model.norm", rows=Rows.LAST)
    found.append(Sighting("norm", {"x": last}, {"out": normed}))
    head = Seen("logits_processor", Of.ARGUMENT, 1, rows=Rows.SEQUENCES)
    logits = Seen("logits_processor", rows=Rows.SEQUENCES)
    return [*found, Sighting("head", {"x": head}, {"out": logits})]


def _attention(block: Block, c: V4Config) -> Iterator[Sighting]:
    ours, theirs = f"{block.prefix}.attn.", f"model.{block.prefix}.attn"
    ranks, both = c.q_lora_rank, c.q_lora_rank + c.head_dim
    fused, x = f"{theirs}.fused_wqa_wkv", taken(theirs, _HIDDEN)
    low = made(fused, columns=(0, ranks))
    queries, heads = f"{theirs}.wq_b", part(c.num_attention_heads * c.head_dim)
    yield Sighting(f"{ours}norm", outputs={"out": x})
    yield Sighting(f"{ours}wq_a", {"x": taken(fused)}, {"out": low})
    yield Sighting(f"{ours}wkv", {"x": taken(fused)}, {"out": made(fused, columns=(ranks, both))})
    yield Sighting(f"{ours}q_norm", {"x": low}, {"out": taken(queries)})
    yield Sighting(f"{ours}wq_b", {"x": taken(queries)}, {"out": made(queries, share=heads)})
    if block.ratio:
        yield _projections(f"{ours}compressor.proj", f"{theirs}.compressor", x, block, c.head_dim)
    if block.layer_type is LayerType.SPARSE:
        yield from _indexer(block, c, x)
    groups = part(c.o_groups * c.o_lora_rank)
    summed = f"{theirs}.wo_b"
    yield Sighting(f"{ours}wo_a", outputs={"out": taken(summed, share=groups)})
    yield Sighting(f"{ours}wo_b", {"x": taken(summed, share=groups)}, {"out": made(summed)})


def _indexer(block: Block, c: V4Config, x: Seen) -> Iterator[Sighting]:
    """Map the indexer, replicated on every rank; its weights are scaled elsewhere than ours."""
    ours, theirs = f"{block.prefix}.attn.indexer.", f"model.{block.prefix}.attn.indexer."
    queries = f"{theirs}wq_b"
    yield Sighting(f"{ours}wq_b", {"x": taken(queries)}, {"out": made(queries)})
    inner = f"{theirs}compressor"
    yield _projections(f"{ours}compressor.proj", inner, x, block, c.index_head_dim)


def _projections(component: str, module: str, x: Seen, block: Block, width: int) -> Sighting:
    """fused_wkv_wgate is multiplied without a call of its module: the compressor shows it."""
    each = width * compressor_windows(block)
    latent = Seen(module, Of.ARGUMENT, 0, (0, each))
    gate = Seen(module, Of.ARGUMENT, 0, (each, 2 * each))
    return Sighting(component, {"x": x}, {"latent": latent, "gate": gate})


def _ffn(block: Block, c: V4Config, ranks: int) -> Iterator[Sighting]:
    ours, theirs = f"{block.prefix}.ffn.", f"model.{block.prefix}.ffn"
    yield Sighting(f"{ours}norm", outputs={"out": taken(theirs)})
    gate = f"{theirs}.gate"
    yield Sighting(f"{ours}gate", {"x": taken(gate)}, {"out": made(gate)})
    choice = f"{theirs}.experts:router.select_experts"
    asked = {"logits": taken(choice, "router_logits")}
    if block.mlp_type is MlpType.HASH:
        asked["tokens"] = taken(choice, "input_ids")
    weights, experts = made(choice, 0), made(choice, 1)
    yield Sighting(f"{ours}topk", asked, {"weights": weights, "experts": experts})
    routed = f"{theirs}.experts:routed_experts.forward_modular"
    given = {"x": taken(routed, "x"), "experts": taken(routed, "topk_ids")}
    yield Sighting(f"{ours}experts.w13", given)
    summed = {"weights": taken(routed, "topk_weights")}
    yield Sighting(f"{ours}experts.combine", summed, {"out": made(routed, share=TERM)})
    yield from _shared(f"{ours}shared.", f"{theirs}.shared_experts.", c)
    terms = {
        "routed": made(routed, share=TERM),
        "shared": made(f"{theirs}.shared_experts.down_proj", share=TERM),
    }
    yield Sighting(f"{ours}moe_sum", {} if ranks > 1 else terms, {"out": made(theirs)})


def _shared(ours: str, theirs: str, c: V4Config) -> Iterator[Sighting]:
    width = c.moe_intermediate_size
    halves, half = part(width, width), part(width)
    both, act, down = f"{theirs}gate_up_proj", f"{theirs}act_fn", f"{theirs}down_proj"
    yield _linear(f"{ours}w13", both, WHOLE, halves)
    yield _linear(f"{ours}act", act, halves, half)
    yield _linear(f"{ours}w2", down, half, TERM)


def _linear(component: str, module: str, x: Share, out: Share) -> Sighting:
    return Sighting(component, {"x": taken(module, share=x)}, {"out": made(module, share=out)})
