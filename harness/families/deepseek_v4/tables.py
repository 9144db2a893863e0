"""The tables of V4: parameters, wiring, forms, sharding, recipes.

V4-Pro has 145,116 tensors. Sources: deepseek-ai/DeepSeek-V4-Pro inference/model.py, convert.py and
shard headers; transformers 5.20 conversion_mapping.py; vLLM 0.33 models/deepseek_v4.
Shape letters: V vocabulary, D hidden, H heads, d head dim, ql and ol low ranks, g groups,
G features of a group, E experts, I their width, k experts a token, S streams, M mix rows, m ratio,
c windows an entry sees, IH and id indexer heads and head dim, T target layers, r Markov rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from degarble.harness.families.deepseek import (
    FP8,
    NVFP4,
    POOLED,
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
from degarble.harness.model.layouts import FUSED_COMPRESSOR, V4_LAYOUTS, Fusion, Layout, Spelling
from degarble.harness.model.parameters import Row
from degarble.harness.model.recipes import BF16 as AS_STORED
from degarble.harness.model.recipes import Rule
from degarble.harness.model.sharding import COLUMNS, ROWS, ShardCut
from degarble.harness.model.site_forms import ElementKind, FormRow, RowUnit
from degarble.harness.model.types import Dtype, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.model.config.config import V4Config
    from degarble.harness.model.types import Block

L, E, N, P = Kind.LINEAR, Kind.EMBEDDING, Kind.NORM, Kind.PLAIN
BF16, F32, I64 = Dtype.BF16, Dtype.F32, Dtype.I64


# --------------------------------------------------------------------------------------------------
# Parameters

# fmt: off
V4_ENDS = (
    Row("embed",         "embed_tokens",     "V D",   E, BF16, "embed"),
    Row("hc_head_fn",    "hc_head.hc_fn",    "S S*D", P, F32,  "hc_head"),
    Row("hc_head_base",  "hc_head.hc_base",  "S",     P, F32,  "hc_head"),
    Row("hc_head_scale", "hc_head.hc_scale", "1",     P, F32,  "hc_head"),
    Row("norm",          "norm",             "D",     N, BF16, "norm"),
    Row("head",          "lm_head",          "V D",   L, BF16, "head"),
)
_C, _I = "self_attn.compressor", "self_attn.compressor.indexer"
V4_BLOCK = (
    Row("hc_attn_fn",            "attn_hc.fn",         "M S*D",    P, F32,  "attn.hc_pre"),
    Row("hc_attn_base",          "attn_hc.base",       "M",        P, F32,  "attn.hc_pre"),
    Row("hc_attn_scale",         "attn_hc.scale",      "3",        P, F32,  "attn.hc_pre"),
    Row("attn_norm",             "input_layernorm",    "D",        N, BF16, "attn.norm"),
    Row("attn.wq_a",             "self_attn.q_a_proj", "ql D",     L, BF16, "attn.wq_a"),
    Row("attn.q_norm",           "self_attn.q_a_norm", "ql",       N, BF16, "attn.q_norm"),
    Row("attn.wq_b",             "self_attn.q_b_proj", "H*d ql",   L, BF16, "attn.wq_b"),
    Row("attn.wkv",              "self_attn.kv_proj",  "d D",      L, BF16, "attn.wkv"),
    Row("attn.kv_norm",          "self_attn.kv_norm",  "d",        N, BF16, "attn.kv_norm_rope"),
    Row("attn.attn_sink",        "self_attn.sinks",    "H",        P, F32,  "attn.attend"),
    Row("attn.wo_a",             "self_attn.o_a_proj", "g*ol G",   L, BF16, "attn.wo_a"),
    Row("attn.wo_b",             "self_attn.o_b_proj", "D g*ol",   L, BF16, "attn.wo_b"),
    Row("attn.compressor.ape",   f"{_C}.position_bias", "m c*d",   P, F32,
        "attn.compressor.pool", "compressor"),
    Row("attn.compressor.wkv",   f"{_C}.kv_proj",      "c*d D",    L, BF16,
        "attn.compressor.proj", "compressor"),
    Row("attn.compressor.wgate", f"{_C}.gate_proj",    "c*d D",    L, BF16,
        "attn.compressor.proj", "compressor"),
    Row("attn.compressor.norm",  f"{_C}.kv_norm",      "d",        N, BF16,
        "attn.compressor.pool", "compressor"),
    Row("attn.indexer.wq_b",     f"{_I}.q_b_proj",     "IH*id ql", L, BF16,
        "attn.indexer.wq_b", "indexer"),
    Row("attn.indexer.weights_proj", f"{_I}.scorer.weights_proj", "IH D", L, BF16,
        "attn.indexer.weights_proj", "indexer"),
    Row("attn.indexer.compressor.ape",   f"{_I}.position_bias", "m c*id", P, F32,
        "attn.indexer.compressor.pool", "indexer"),
    Row("attn.indexer.compressor.wkv",   f"{_I}.kv_proj",   "c*id D", L, BF16,
        "attn.indexer.compressor.proj", "indexer"),
    Row("attn.indexer.compressor.wgate", f"{_I}.gate_proj", "c*id D", L, BF16,
        "attn.indexer.compressor.proj", "indexer"),
    Row("attn.indexer.compressor.norm",  f"{_I}.kv_norm",   "id",     N, BF16,
        "attn.indexer.compressor.pool", "indexer"),
    Row("hc_ffn_fn",             "ffn_hc.fn",          "M S*D",    P, F32,  "ffn.hc_pre"),
    Row("hc_ffn_base",           "ffn_hc.base",        "M",        P, F32,  "ffn.hc_pre"),
    Row("hc_ffn_scale",          "ffn_hc.scale",       "3",        P, F32,  "ffn.hc_pre"),
    Row("ffn_norm",              "post_attention_layernorm", "D",  N, BF16, "ffn.norm"),
    Row("ffn.gate",              "mlp.gate",           "E D",      L, BF16, "ffn.gate"),
    Row("ffn.gate.bias",         "mlp.gate.e_score_correction_bias", "E", P, F32,
        "ffn.topk", "scored"),
    Row("ffn.gate.tid2eid",      "mlp.gate.tid2eid",   "V k",      P, I64, "ffn.topk", "hash"),
    Row("ffn.experts.{e}.w1",    "mlp.experts.{e}.gate_proj", "I D", L, BF16, "ffn.experts.w13"),
    Row("ffn.experts.{e}.w2",    "mlp.experts.{e}.down_proj", "D I", L, BF16, "ffn.experts.w2"),
    Row("ffn.experts.{e}.w3",    "mlp.experts.{e}.up_proj",   "I D", L, BF16, "ffn.experts.w13"),
    Row("ffn.shared_experts.w1", "mlp.shared_experts.gate_proj", "I D", L, BF16, "ffn.shared.w13"),
    Row("ffn.shared_experts.w2", "mlp.shared_experts.down_proj", "D I", L, BF16, "ffn.shared.w2"),
    Row("ffn.shared_experts.w3", "mlp.shared_experts.up_proj",   "I D", L, BF16, "ffn.shared.w13"),
)
# transformers leaves V4's drafter out, so these rows have no second name.
V4_MTP = (
    Row("enorm",         "", "D",     N, BF16, "enorm",   "mtp"),
    Row("hnorm",         "", "D",     N, BF16, "hnorm",   "mtp"),
    Row("e_proj",        "", "D D",   L, BF16, "e_proj",  "mtp"),
    Row("h_proj",        "", "D D",   L, BF16, "h_proj",  "mtp"),
    Row("main_proj",     "", "D T*D", L, BF16, "main_proj", "dspark first"),
    Row("main_norm",     "", "D",     N, BF16, "main_norm", "dspark first"),
    Row("hc_head_fn",    "", "S S*D", P, F32,  "hc_head", "mtp, dspark last"),
    Row("hc_head_base",  "", "S",     P, F32,  "hc_head", "mtp, dspark last"),
    Row("hc_head_scale", "", "1",     P, F32,  "hc_head", "mtp, dspark last"),
    Row("norm",          "", "D",     N, BF16, "norm",    "mtp, dspark last"),
    Row("markov_head.markov_w1", "", "V r",   E, BF16, "markov",     "dspark last"),
    Row("markov_head.markov_w2", "", "V r",   L, BF16, "markov",     "dspark last"),
    Row("confidence_head.proj",  "", "1 D+r", L, BF16, "confidence", "dspark last"),
)
# fmt: on


def v4_letters(config: V4Config) -> dict[str, int]:
    """Return the numbers of V4's letters."""
    dspark = config.dspark
    return shared_letters(config) | {
        "d": config.head_dim,
        "g": config.o_groups,
        "G": config.group_features,
        "ol": config.o_lora_rank,
        "S": config.hc_mult,
        "M": config.hc_rows,
        "T": dspark.blocks if dspark else 0,
        "r": dspark.markov_rank if dspark else 0,
    }


# --------------------------------------------------------------------------------------------------
# Wiring: harness/model/components.py explains its words

V4_BLOCK_WIRING = (
    ComponentWiring("attn.hc_pre", "streams=@streams", "out post mix"),
    ComponentWiring("attn.norm", "x=attn.hc_pre.out"),
    ComponentWiring("attn.wq_a", X),
    ComponentWiring("attn.q_norm", "x=attn.wq_a.out"),
    ComponentWiring("attn.wq_b", "x=attn.q_norm.out"),
    ComponentWiring("attn.q_head_norm_rope", f"x=attn.wq_b.out {POS}"),
    ComponentWiring("attn.wkv", f"{X} context=@context"),
    ComponentWiring("attn.kv_norm_rope", f"x=attn.wkv.out {POS}"),
    ComponentWiring("attn.kv_write", "x=attn.kv_norm_rope.out"),
    ComponentWiring("attn.compressor.proj", X, "latent gate", "compressor"),
    ComponentWiring(
        "attn.compressor.pool",
        f"latent=attn.compressor.proj.latent gate=attn.compressor.proj.gate {POOLED[0]}",
        POOLED[1],
        "compressor",
    ),
    ComponentWiring("attn.compressor.write", "x=attn.compressor.pool.out", "out", "compressor"),
    ComponentWiring("attn.indexer.wq_b", "x=attn.q_norm.out", "out", "indexer"),
    ComponentWiring("attn.indexer.q", f"x=attn.indexer.wq_b.out {POS}", "out", "indexer"),
    ComponentWiring("attn.indexer.weights_proj", X, "out", "indexer"),
    ComponentWiring("attn.indexer.compressor.proj", X, "latent gate", "indexer"),
    ComponentWiring(
        "attn.indexer.compressor.pool",
        "latent=attn.indexer.compressor.proj.latent gate=attn.indexer.compressor.proj.gate"
        f" {POOLED[0]}",
        POOLED[1],
        "indexer",
    ),
    ComponentWiring(
        "attn.indexer.scores",
        "q=attn.indexer.q.out weights=attn.indexer.weights_proj.out"
        f" keys=attn.indexer.compressor.pool.out {SCORED}",
        "out",
        "indexer",
    ),
    ComponentWiring("attn.indexer.topk", "scores=attn.indexer.scores.out", "out", "indexer"),
    ComponentWiring(
        "attn.attend",
        "q=attn.q_head_norm_rope.out window=attn.kv_write.out state_window=@state"
        " compressed=attn.compressor.write.out chosen=attn.indexer.topk.out"
        f" state_compressed=@state {RAGGED}",
    ),
    ComponentWiring("attn.inverse_rope", f"x=attn.attend.out {POS}"),
    ComponentWiring("attn.wo_a", "x=attn.inverse_rope.out"),
    ComponentWiring("attn.wo_b", "x=attn.wo_a.out"),
    ComponentWiring(
        "attn.hc_post",
        "x=attn.wo_b.out streams=@streams post=attn.hc_pre.post mix=attn.hc_pre.mix",
    ),
    ComponentWiring("ffn.hc_pre", "streams=attn.hc_post.out", "out post mix"),
    ComponentWiring("ffn.norm", "x=ffn.hc_pre.out"),
    ComponentWiring("ffn.gate", "x=ffn.norm.out"),
    ComponentWiring("ffn.topk", "logits=ffn.gate.out tokens=@tokens", "experts weights", "hash"),
    ComponentWiring("ffn.topk", "logits=ffn.gate.out", "experts weights", "scored"),
    ComponentWiring("ffn.experts.w13", f"x=ffn.norm.out {ROUTED}"),
    ComponentWiring(
        "ffn.experts.act_quant", f"x=ffn.experts.w13.out {ROUTED} weights=ffn.topk.weights"
    ),
    ComponentWiring("ffn.experts.w2", f"x=ffn.experts.act_quant.out {ROUTED}"),
    ComponentWiring("ffn.experts.combine", "x=ffn.experts.w2.out weights=ffn.topk.weights"),
    ComponentWiring("ffn.shared.w13", "x=ffn.norm.out"),
    ComponentWiring("ffn.shared.act", "x=ffn.shared.w13.out"),
    ComponentWiring("ffn.shared.w2", "x=ffn.shared.act.out"),
    ComponentWiring("ffn.moe_sum", "routed=ffn.experts.combine.out shared=ffn.shared.w2.out"),
    ComponentWiring(
        "ffn.hc_post",
        "x=ffn.moe_sum.out streams=attn.hc_post.out post=ffn.hc_pre.post mix=ffn.hc_pre.mix",
    ),
)
# The ends of the model: lines before the first block and after the last.
V4_FIRST_WIRING = (ComponentWiring("embed", "tokens=@tokens"),)
V4_LAST_WIRING = (
    ComponentWiring("hc_head", "streams=@streams"),
    ComponentWiring("norm", "x=hc_head.out"),
    ComponentWiring("head", "x=norm.out"),
)
# `mtp` lines exist in MTP blocks; DSpark's drafter has several blocks, so its ends differ.
V4_DRAFTER_FIRST_WIRING = (
    ComponentWiring("embed", f"tokens=@tokens {POS}", "out", "mtp, dspark first"),
    ComponentWiring("enorm", "x=embed.out", "out", "mtp"),
    ComponentWiring("hnorm", "x=@previous", "out", "mtp"),
    ComponentWiring("e_proj", "x=enorm.out", "out", "mtp"),
    ComponentWiring("h_proj", "x=hnorm.out", "out", "mtp"),
    ComponentWiring("join", "e=e_proj.out h=h_proj.out", "out", "mtp"),
    ComponentWiring("main_mean", "@targets", "out", "dspark first"),
    ComponentWiring("main_proj", "x=main_mean.out", "out", "dspark first"),
    ComponentWiring("main_norm", "x=main_proj.out", "out", "dspark first"),
)
V4_DRAFTER_LAST_WIRING = (
    ComponentWiring("hc_head", "streams=ffn.hc_post.out", "out", "mtp, dspark last"),
    ComponentWiring("norm", "x=hc_head.out", "out", "mtp, dspark last"),
    ComponentWiring("head", "x=norm.out", "out", "mtp, dspark last"),
    ComponentWiring("markov", "tokens=@tokens", "out hidden", "dspark last"),
    ComponentWiring("confidence", "x=norm.out markov=markov.hidden", "out", "dspark last"),
)

# The residual is a stream of its own: each norm adds its input to it and puts out both.


def entering_v4(config: V4Config, block: Block | None, before: Block | None) -> Mapping[str, str]:
    """Return what enters a block of V4: the residual streams."""
    streams = f"{before.prefix}.ffn.hc_post.out" if before else "embed.out:streams"
    if block is None or not block.is_drafter:
        return {"streams": streams}
    if config.dspark is None:
        return {"previous": streams, "streams": f"{block.prefix}.join.out"}
    behind = enumerate(config.dspark.target_layer_ids)
    return {
        "streams": streams if block.index else f"{block.prefix}.embed.out:streams",
        "context": "mtp.0.main_norm.out",
        **{f"target_{i}": f"layers.{layer}.ffn.hc_post.out" for i, layer in behind},
    }


# --------------------------------------------------------------------------------------------------
# Forms of outputs

_INTEGERS = ElementKind.INTEGERS
_POOL, _INDEXER_POOL = "attn.compressor.pool", "attn.indexer.compressor.pool"
V4_FORMS = (
    *SHARED_FORMS,
    FormRow("attn.hc_pre ffn.hc_pre attn.norm ffn.norm attn.wo_b hc_head norm", "D"),
    FormRow("attn.hc_pre ffn.hc_pre", "S", "post"),
    FormRow("attn.hc_pre ffn.hc_pre", "S S", "mix"),
    FormRow("attn.hc_post ffn.hc_post", "S D"),
    FormRow("attn.wq_b attn.inverse_rope", "H*d"),
    FormRow("attn.q_head_norm_rope attn.attend", "H d"),
    FormRow("attn.wkv attn.kv_norm_rope attn.kv_write", "d"),
    FormRow("attn.compressor.proj", "c*d", "latent gate"),
    FormRow(_POOL, "d", counts=RowUnit.OTHERS),
    FormRow(_POOL, "m*c c*d", "state_latent state_gate", counts=RowUnit.SEQUENCES),
    FormRow("attn.compressor.write", "d", counts=RowUnit.OTHERS),
    FormRow("attn.indexer.compressor.proj", "c*id", "latent gate"),
    FormRow(_INDEXER_POOL, "id", counts=RowUnit.OTHERS),
    FormRow(_INDEXER_POOL, "m*c c*id", "state_latent state_gate", counts=RowUnit.SEQUENCES),
    FormRow(f"{_POOL} {_INDEXER_POOL}", "", "entry_offsets", _INTEGERS, RowUnit.BOUNDS),
    FormRow("attn.wo_a", "g*ol"),
    FormRow("ffn.shared.w13", "2*I"),
    FormRow("ffn.shared.act", "I"),
)


# --------------------------------------------------------------------------------------------------
# By style of an engine. What no line names is repeated on every rank of its stage. Experts are cut
# only where ep is 1.

_BLOCKS_OF_ROWS, _BLOCKS_OF_COLUMNS = ShardCut(0, 128, padded=True), ShardCut(1, 128, padded=True)
V4_SHARDING: Mapping[str, Mapping[str, ShardCut]] = {
    "vllm": {
        "embed": ROWS,
        "head": ROWS,
        "attn.wq_b": ROWS,
        "attn.wo_a": ROWS,
        "attn.wo_b": COLUMNS,
        "attn.attn_sink": ROWS,
        # Padded so that every rank has whole 128-blocks.
        "ffn.shared_experts.w1": _BLOCKS_OF_ROWS,
        "ffn.shared_experts.w2": _BLOCKS_OF_COLUMNS,
        "ffn.shared_experts.w3": _BLOCKS_OF_ROWS,
        **SHARDED_EXPERTS,
    },
    # The official convert.py cuts the indexer's heads and repeats the shared expert.
    "official": {
        "embed": ROWS,
        "head": ROWS,
        "attn.wq_b": ROWS,
        "attn.wo_a": ROWS,
        "attn.wo_b": COLUMNS,
        "attn.attn_sink": ROWS,
        "attn.indexer.wq_b": ROWS,
        "attn.indexer.weights_proj": ROWS,
    },
}


# --------------------------------------------------------------------------------------------------
# Rules of recipes

# DeepSeek-V4-Pro shard headers; quantization_config: activation_scheme dynamic, scale_fmt ue8m0.
# The official code alone dequantises wo_a to BF16 after loading; serving engines keep it FP8.
_V4_SOURCE = (
    Rule("*.compressor.*", AS_STORED),
    Rule("*.attn.indexer.weights_proj", AS_STORED),
    Rule("*.attn.*", *FP8),
    Rule("*.ffn.shared_experts.*", *FP8),
    Rule("mtp.*.e_proj", *FP8),
    Rule("mtp.*.h_proj", *FP8),
    Rule("mtp.*.main_proj", *FP8),
)
_V4_MXFP4_EXPERTS = Rule("*.ffn.experts.*", "MXFP4", "FP8_1X128_UE8M0")
# The -Base releases: expert_dtype fp8, which vLLM reads with fp32 scales.
_V4_FP8_EXPERTS = Rule("*.ffn.experts.*", "FP8_128X128_F32", "FP8_1X128_UE8M0")
# The first field report's checkpoint: linears and compressors NVFP4; o_a, the router, embedding and
# head BF16. Of the indexer it names the compressor alone, so the indexer's other linears stay BF16.
_V4_FULL = (
    Rule("layers.*.attn.wo_a", AS_STORED),
    Rule("layers.*.attn.indexer.wq_b", AS_STORED),
    Rule("layers.*.attn.indexer.weights_proj", AS_STORED),
    Rule("layers.*.attn.*", *NVFP4),
    Rule("layers.*.ffn.experts.*", *NVFP4),
    Rule("layers.*.ffn.shared_experts.*", *NVFP4),
)


def v4_rules(recipe: str, config: V4Config) -> tuple[Rule, ...]:
    """Return the rules of a recipe for V4; they depend on its expert_dtype."""
    if recipe == "nvfp4-full":
        return _V4_FULL
    experts = _V4_FP8_EXPERTS if config.expert_dtype == "fp8" else _V4_MXFP4_EXPERTS
    return with_experts(recipe, (experts, *_V4_SOURCE))


# --------------------------------------------------------------------------------------------------
# Layouts


def with_fused_compressors(layout: Layout) -> Layout:
    """Return a layout of V4 that fuses compressors as vLLM does, and keeps the rest apart."""
    rows = {row.name: row.hf for row in V4_BLOCK}
    renamed = layout.spelling is Spelling.HUGGINGFACE
    fusions = tuple(
        replace(fusion, target=_fused_name(rows[fusion.members[0]], fusion)) if renamed else fusion
        for fusion in V4_LAYOUTS["vllm"].fusions
        if fusion.target.endswith(FUSED_COMPRESSOR)
    )
    return replace(layout, fusions=fusions)


def _fused_name(member: str, fusion: Fusion) -> str:
    return f"{member.rpartition('.')[0]}.{fusion.target.rpartition('.')[2]}"
