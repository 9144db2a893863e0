"""The tables of V3.2: parameters, wiring, forms, sharding, recipes.

Sources: deepseek-ai/DeepSeek-V3.2-Exp inference/{model,convert}.py; transformers 5.20
conversion_mapping.py. Shape letters are V4's, and kl KV low rank, n and p nope and rope dims,
v value dim, F dense and X shared width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.families.deepseek import (
    FP8_F32,
    NVFP4,
    POS,
    RAGGED,
    ROUTED,
    SCORED,
    SHARDED_EXPERTS,
    SHARED_FORMS,
    X,
    shared_letters,
    with_experts,
)
from degarble.harness.model.components import ComponentWiring
from degarble.harness.model.parameters import Row
from degarble.harness.model.recipes import BF16 as AS_STORED
from degarble.harness.model.recipes import Rule
from degarble.harness.model.sharding import COLUMNS, ROWS, ShardCut
from degarble.harness.model.site_forms import FormRow
from degarble.harness.model.types import Dtype, Kind, MlpType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.model.config.config import V32Config
    from degarble.harness.model.types import Block

L, E, N, P = Kind.LINEAR, Kind.EMBEDDING, Kind.NORM, Kind.PLAIN
BF16, F32, I64 = Dtype.BF16, Dtype.F32, Dtype.I64


# --------------------------------------------------------------------------------------------------
# Parameters

# fmt: off
# Norms are F32 here: with them the sizes add up to the published checkpoint, byte for byte.
V32_ENDS = (
    Row("embed", "embed_tokens", "V D", E, BF16, "embed"),
    Row("norm",  "norm",         "D",   N, F32,  "norm"),
    Row("head",  "lm_head",      "V D", L, BF16, "head"),
)
V32_BLOCK = (
    Row("attn_norm",    "input_layernorm",              "D",           N, F32,  "attn.norm"),
    Row("attn.wq_a",    "self_attn.q_a_proj",           "ql D",        L, BF16, "attn.wq_a"),
    Row("attn.q_norm",  "self_attn.q_a_layernorm",      "ql",          N, F32,  "attn.q_norm"),
    Row("attn.wq_b",    "self_attn.q_b_proj",           "H*n+H*p ql",  L, BF16, "attn.wq_b"),
    Row("attn.wkv_a",   "self_attn.kv_a_proj_with_mqa", "kl+p D",      L, BF16, "attn.wkv_a"),
    Row("attn.kv_norm", "self_attn.kv_a_layernorm",     "kl",          N, F32,  "attn.kv_norm"),
    Row("attn.wkv_b",   "self_attn.kv_b_proj",          "H*n+H*v kl",  L, BF16, "attn.wkv_b"),
    Row("attn.wo",      "self_attn.o_proj",             "D H*v",       L, BF16, "attn.wo"),
    Row("attn.indexer.wq_b", "self_attn.indexer.wq_b",  "IH*id ql",    L, BF16,
        "attn.indexer.wq_b"),
    Row("attn.indexer.wk", "self_attn.indexer.wk",      "id D",        L, BF16,
        "attn.indexer.wk"),
    Row("attn.indexer.k_norm", "self_attn.indexer.k_norm", "id",       N, F32,
        "attn.indexer.k"),
    Row("attn.indexer.k_norm.bias", "self_attn.indexer.k_norm.bias", "id", P, F32,
        "attn.indexer.k"),
    Row("attn.indexer.weights_proj", "self_attn.indexer.weights_proj", "IH D", L, BF16,
        "attn.indexer.weights_proj"),
    Row("ffn_norm",     "post_attention_layernorm",     "D",           N, F32,  "ffn.norm"),
    Row("ffn.w1",       "mlp.gate_proj",                "F D",         L, BF16, "ffn.w13", "dense"),
    Row("ffn.w2",       "mlp.down_proj",                "D F",         L, BF16, "ffn.w2", "dense"),
    Row("ffn.w3",       "mlp.up_proj",                  "F D",         L, BF16, "ffn.w13", "dense"),
    Row("ffn.gate",     "mlp.gate",                     "E D",         L, BF16, "ffn.gate", "moe"),
    Row("ffn.gate.bias", "mlp.gate.e_score_correction_bias", "E",      P, F32, "ffn.topk", "moe"),
    Row("ffn.experts.{e}.w1", "mlp.experts.{e}.gate_proj", "I D", L, BF16,
        "ffn.experts.w13", "moe"),
    Row("ffn.experts.{e}.w2", "mlp.experts.{e}.down_proj", "D I", L, BF16,
        "ffn.experts.w2", "moe"),
    Row("ffn.experts.{e}.w3", "mlp.experts.{e}.up_proj",   "I D", L, BF16,
        "ffn.experts.w13", "moe"),
    Row("ffn.shared_experts.w1", "mlp.shared_experts.gate_proj", "X D", L, BF16,
        "ffn.shared.w13", "moe"),
    Row("ffn.shared_experts.w2", "mlp.shared_experts.down_proj", "D X", L, BF16,
        "ffn.shared.w2", "moe"),
    Row("ffn.shared_experts.w3", "mlp.shared_experts.up_proj",   "X D", L, BF16,
        "ffn.shared.w13", "moe"),
)
# V3.2 stores embedding and head a second time with the drafter.
V32_MTP = (
    Row("embed",   "embed_tokens",     "V D",     E, BF16, "embed"),
    Row("enorm",   "enorm",            "D",       N, F32,  "enorm"),
    Row("hnorm",   "hnorm",            "D",       N, F32,  "hnorm"),
    Row("eh_proj", "eh_proj",          "D D+D",   L, BF16, "eh_proj"),
    Row("norm",    "shared_head.norm", "D",       N, F32,  "norm"),
    Row("head",    "shared_head.head", "V D",     L, BF16, "head"),
)
# fmt: on


def v32_letters(config: V32Config) -> dict[str, int]:
    """Return the numbers of V3.2's letters."""
    return shared_letters(config) | {
        "kl": config.kv_lora_rank,
        "n": config.qk_nope_head_dim,
        "p": config.qk_rope_head_dim,
        "v": config.v_head_dim,
        "F": config.intermediate_size,
        "X": config.shared_intermediate_size,
    }


# --------------------------------------------------------------------------------------------------
# Wiring: harness/model/components.py explains its words

V32_BLOCK_WIRING = (
    ComponentWiring("attn.norm", "x=@stream residual=@residual", "out residual"),
    ComponentWiring("attn.wq_a", X),
    ComponentWiring("attn.q_norm", "x=attn.wq_a.out"),
    ComponentWiring("attn.wq_b", "x=attn.q_norm.out"),
    ComponentWiring("attn.wkv_a", X),
    ComponentWiring("attn.rope", f"q=attn.wq_b.out key=attn.wkv_a.out:rope {POS}", "q key"),
    ComponentWiring("attn.kv_norm", "x=attn.wkv_a.out:latent"),
    ComponentWiring("attn.kv_write", "latent=attn.kv_norm.out key=attn.rope.key"),
    ComponentWiring("attn.wkv_b", "x=attn.kv_write.out:latent"),
    ComponentWiring("attn.indexer.wq_b", "x=attn.q_norm.out"),
    ComponentWiring("attn.indexer.q", f"x=attn.indexer.wq_b.out {POS}"),
    ComponentWiring("attn.indexer.wk", X),
    ComponentWiring("attn.indexer.k", f"x=attn.indexer.wk.out {POS}"),
    ComponentWiring("attn.indexer.weights_proj", X),
    ComponentWiring(
        "attn.indexer.scores",
        "q=attn.indexer.q.out weights=attn.indexer.weights_proj.out"
        f" keys=attn.indexer.k.out {SCORED}",
    ),
    ComponentWiring("attn.indexer.topk", "scores=attn.indexer.scores.out"),
    ComponentWiring(
        "attn.attend",
        "q=attn.rope.q rows=attn.kv_write.out expanded=attn.wkv_b.out chosen=attn.indexer.topk.out"
        f" state_rows=@state state_expanded=@state {RAGGED}",
    ),
    ComponentWiring("attn.wo", "x=attn.attend.out"),
    ComponentWiring("ffn.norm", "x=attn.wo.out residual=attn.norm.residual", "out residual"),
    ComponentWiring("ffn.w13", "x=ffn.norm.out", "out", "dense"),
    ComponentWiring("ffn.act", "x=ffn.w13.out", "out", "dense"),
    ComponentWiring("ffn.w2", "x=ffn.act.out", "out", "dense"),
    ComponentWiring("ffn.gate", "x=ffn.norm.out", "out", "moe"),
    ComponentWiring("ffn.topk", "logits=ffn.gate.out", "experts weights", "moe"),
    ComponentWiring("ffn.experts.w13", f"x=ffn.norm.out {ROUTED}", "out", "moe"),
    ComponentWiring(
        "ffn.experts.act_quant",
        f"x=ffn.experts.w13.out {ROUTED} weights=ffn.topk.weights",
        "out",
        "moe",
    ),
    ComponentWiring("ffn.experts.w2", f"x=ffn.experts.act_quant.out {ROUTED}", "out", "moe"),
    ComponentWiring(
        "ffn.experts.combine", "x=ffn.experts.w2.out weights=ffn.topk.weights", "out", "moe"
    ),
    ComponentWiring("ffn.shared.w13", "x=ffn.norm.out", "out", "moe"),
    ComponentWiring("ffn.shared.act", "x=ffn.shared.w13.out", "out", "moe"),
    ComponentWiring("ffn.shared.w2", "x=ffn.shared.act.out", "out", "moe"),
    ComponentWiring(
        "ffn.moe_sum", "routed=ffn.experts.combine.out shared=ffn.shared.w2.out", "out", "moe"
    ),
)
V32_FIRST_WIRING = (ComponentWiring("embed", "tokens=@tokens"),)
V32_LAST_WIRING = (
    ComponentWiring("norm", "x=@stream residual=@residual", "out residual"),
    ComponentWiring("head", "x=norm.out"),
)
V32_DRAFTER_FIRST_WIRING = (
    ComponentWiring("embed", "tokens=@tokens"),
    ComponentWiring("enorm", "x=embed.out"),
    ComponentWiring("hnorm", "x=@previous"),
    ComponentWiring("join", "e=enorm.out h=hnorm.out"),
    ComponentWiring("eh_proj", "x=join.out"),
)
V32_DRAFTER_LAST_WIRING = (
    ComponentWiring("norm", "x=ffn.moe_sum.out residual=ffn.norm.residual", "out residual"),
    ComponentWiring("head", "x=norm.out"),
)


def entering_v32(config: V32Config, block: Block | None, before: Block | None) -> Mapping[str, str]:
    """Return what enters a block of V3.2: the stream and its residual."""
    del config
    if block is not None and block.is_drafter:
        # The drafter continues the normed stream (as vLLM's V3 drafter does; no primary source).
        previous = f"mtp.{block.index - 1}.norm.out" if block.index else "norm.out"
        return {"previous": previous, "stream": f"{block.prefix}.eh_proj.out"}
    if before is None:
        return {"stream": "embed.out"}
    last = "ffn.w2.out" if before.mlp_type is MlpType.DENSE else "ffn.moe_sum.out"
    return {
        "stream": f"{before.prefix}.{last}",
        "residual": f"{before.prefix}.ffn.norm.residual",
    }


# --------------------------------------------------------------------------------------------------
# Forms of outputs

V32_FORMS = (
    *SHARED_FORMS,
    FormRow("attn.norm ffn.norm norm", "D", "out residual"),
    FormRow("attn.wo ffn.w2", "D"),
    FormRow("attn.wq_b", "H*n+H*p"),
    FormRow("attn.rope", "H n+p", "q"),
    FormRow("attn.rope", "p", "key"),
    FormRow("attn.wkv_a attn.kv_write", "kl+p"),
    FormRow("attn.kv_norm", "kl"),
    FormRow("attn.wkv_b", "H*n+H*v"),
    FormRow("attn.indexer.wk attn.indexer.k", "id"),
    FormRow("attn.attend", "H*v"),
    FormRow("ffn.w13", "2*F"),
    FormRow("ffn.act", "F"),
    FormRow("ffn.shared.w13", "2*X"),
    FormRow("ffn.shared.act", "X"),
)


# --------------------------------------------------------------------------------------------------
# By style of an engine. What no line names is repeated on every rank of its stage. Experts are cut
# only where ep is 1.

V32_SHARDING: Mapping[str, Mapping[str, ShardCut]] = {
    "vllm": {
        "embed": ROWS,
        "head": ROWS,
        "attn.wq_b": ROWS,
        "attn.wkv_b": ROWS,
        "attn.wo": COLUMNS,
        "ffn.w1": ROWS,
        "ffn.w2": COLUMNS,
        "ffn.w3": ROWS,
        "ffn.shared_experts.w1": ROWS,
        "ffn.shared_experts.w2": COLUMNS,
        "ffn.shared_experts.w3": ROWS,
        **SHARDED_EXPERTS,
    },
}


# --------------------------------------------------------------------------------------------------
# Rules of recipes

# DeepSeek-V3.2: FP8 with fp32 scales, of power-of-two values; quantised dynamically in 1x128.
_V32_SOURCE = (
    Rule("*.attn.indexer.weights_proj", AS_STORED),
    # Decode absorbs this matrix into q and o, so no quantised activation ever meets it there.
    Rule("*.attn.wkv_b", "FP8_128X128_F32"),
    Rule("*.attn.*", *FP8_F32),
    Rule("*.ffn.gate", AS_STORED),
    Rule("*.ffn.*", *FP8_F32),
)
# NVIDIA/Model-Optimizer examples/deepseek/deepseek_v3: experts, shared experts, dense MLPs, o_proj.
_V32_FULL = (
    Rule("layers.*.attn.wo", *NVFP4),
    Rule("layers.*.ffn.gate", AS_STORED),
    Rule("layers.*.ffn.*", *NVFP4),
)


def v32_rules(recipe: str) -> tuple[Rule, ...]:
    """Return the rules of a recipe for V3.2."""
    return _V32_FULL if recipe == "nvfp4-full" else with_experts(recipe, _V32_SOURCE)
