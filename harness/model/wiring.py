"""The component tables of each model family: which outputs feed which inputs.

One line a component: name, inputs with their producers, outputs, and the blocks it is in.
A producer is an output in the same block (`attn.norm.out`) or a word with an `@`:

    @tokens @positions @offsets @state   from outside: ids, positions, where sequences begin, what
                                         earlier calls left of every sequence
    @streams @stream @residual           what enters the block
    @previous @context @targets          what a drafter takes from the main model

A word after a colon says how the input comes from its producers; without one it is equal:

    :streams   repeated, one a stream      :latent :rope   these columns of it

An input whose producer does not exist in a block is left out there, and its `state_` with it.
`<linear>.act_quant` is inserted in front of every linear whose input the recipe quantises, so it
has no line here; but `ffn.experts.act_quant` has one, because it also computes SwiGLU and applies
the routing weight.
"""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """One line of a table."""

    name: str
    inputs: str
    outputs: str = "out"
    where: str = "all"


_X = "x=attn.norm.out"
_POS = "positions=@positions"
# Inputs and outputs of a pooling component.
_POOLED = (
    f"{_POS} token_offsets=@offsets state_latent=@state state_gate=@state",
    "out entry_offsets state_latent state_gate",
)
_RAGGED = f"{_POS} token_offsets=@offsets"
_SCORED = f"{_RAGGED} state_keys=@state"
_ROUTED = "experts=ffn.topk.experts"

V4_BLOCK = (
    Line("attn.hc_pre", "streams=@streams", "out post mix"),
    Line("attn.norm", "x=attn.hc_pre.out"),
    Line("attn.wq_a", _X),
    Line("attn.q_norm", "x=attn.wq_a.out"),
    Line("attn.wq_b", "x=attn.q_norm.out"),
    Line("attn.q_head_norm_rope", f"x=attn.wq_b.out {_POS}"),
    Line("attn.wkv", f"{_X} context=@context"),
    Line("attn.kv_norm_rope", f"x=attn.wkv.out {_POS}"),
    Line("attn.kv_write", "x=attn.kv_norm_rope.out"),
    Line("attn.compressor.proj", _X, "latent gate", "compressor"),
    Line(
        "attn.compressor.pool",
        f"latent=attn.compressor.proj.latent gate=attn.compressor.proj.gate {_POOLED[0]}",
        _POOLED[1],
        "compressor",
    ),
    Line("attn.compressor.write", "x=attn.compressor.pool.out", "out", "compressor"),
    Line("attn.indexer.wq_b", "x=attn.q_norm.out", "out", "indexer"),
    Line("attn.indexer.q", f"x=attn.indexer.wq_b.out {_POS}", "out", "indexer"),
    Line("attn.indexer.weights_proj", _X, "out", "indexer"),
    Line("attn.indexer.compressor.proj", _X, "latent gate", "indexer"),
    Line(
        "attn.indexer.compressor.pool",
        "latent=attn.indexer.compressor.proj.latent gate=attn.indexer.compressor.proj.gate"
        f" {_POOLED[0]}",
        _POOLED[1],
        "indexer",
    ),
    Line(
        "attn.indexer.scores",
        "q=attn.indexer.q.out weights=attn.indexer.weights_proj.out"
        f" keys=attn.indexer.compressor.pool.out {_SCORED}",
        "out",
        "indexer",
    ),
    Line("attn.indexer.topk", "scores=attn.indexer.scores.out", "out", "indexer"),
    Line(
        "attn.attend",
        "q=attn.q_head_norm_rope.out window=attn.kv_write.out state_window=@state"
        " compressed=attn.compressor.write.out chosen=attn.indexer.topk.out"
        f" state_compressed=@state {_RAGGED}",
    ),
    Line("attn.inverse_rope", f"x=attn.attend.out {_POS}"),
    Line("attn.wo_a", "x=attn.inverse_rope.out"),
    Line("attn.wo_b", "x=attn.wo_a.out"),
    Line(
        "attn.hc_post",
        "x=attn.wo_b.out streams=@streams post=attn.hc_pre.post mix=attn.hc_pre.mix",
    ),
    Line("ffn.hc_pre", "streams=attn.hc_post.out", "out post mix"),
    Line("ffn.norm", "x=ffn.hc_pre.out"),
    Line("ffn.gate", "x=ffn.norm.out"),
    Line("ffn.topk", "logits=ffn.gate.out tokens=@tokens", "experts weights", "hash"),
    Line("ffn.topk", "logits=ffn.gate.out", "experts weights", "scored"),
    Line("ffn.experts.w13", f"x=ffn.norm.out {_ROUTED}"),
    Line("ffn.experts.act_quant", f"x=ffn.experts.w13.out {_ROUTED} weights=ffn.topk.weights"),
    Line("ffn.experts.w2", f"x=ffn.experts.act_quant.out {_ROUTED}"),
    Line("ffn.experts.combine", "x=ffn.experts.w2.out weights=ffn.topk.weights"),
    Line("ffn.shared.w13", "x=ffn.norm.out"),
    Line("ffn.shared.act", "x=ffn.shared.w13.out"),
    Line("ffn.shared.w2", "x=ffn.shared.act.out"),
    Line("ffn.moe_sum", "routed=ffn.experts.combine.out shared=ffn.shared.w2.out"),
    Line(
        "ffn.hc_post",
        "x=ffn.moe_sum.out streams=attn.hc_post.out post=ffn.hc_pre.post mix=ffn.hc_pre.mix",
    ),
)
# The ends of the model: lines before the first block and after the last.
V4_FIRST = (Line("embed", "tokens=@tokens"),)
V4_LAST = (
    Line("hc_head", "streams=@streams"),
    Line("norm", "x=hc_head.out"),
    Line("head", "x=norm.out"),
)
# `mtp` lines exist in MTP blocks; DSpark's drafter has several blocks, so its ends differ.
V4_DRAFTER_FIRST = (
    Line("embed", f"tokens=@tokens {_POS}", "out", "mtp, dspark first"),
    Line("enorm", "x=embed.out", "out", "mtp"),
    Line("hnorm", "x=@previous", "out", "mtp"),
    Line("e_proj", "x=enorm.out", "out", "mtp"),
    Line("h_proj", "x=hnorm.out", "out", "mtp"),
    Line("join", "e=e_proj.out h=h_proj.out", "out", "mtp"),
    Line("main_mean", "@targets", "out", "dspark first"),
    Line("main_proj", "x=main_mean.out", "out", "dspark first"),
    Line("main_norm", "x=main_proj.out", "out", "dspark first"),
)
V4_DRAFTER_LAST = (
    Line("hc_head", "streams=ffn.hc_post.out", "out", "mtp, dspark last"),
    Line("norm", "x=hc_head.out", "out", "mtp, dspark last"),
    Line("head", "x=norm.out", "out", "mtp, dspark last"),
    Line("markov", "tokens=@tokens", "out hidden", "dspark last"),
    Line("confidence", "x=norm.out markov=markov.hidden", "out", "dspark last"),
)

# The residual is a stream of its own: each norm adds its input to it and puts out both.
V32_BLOCK = (
    Line("attn.norm", "x=@stream residual=@residual", "out residual"),
    Line("attn.wq_a", _X),
    Line("attn.q_norm", "x=attn.wq_a.out"),
    Line("attn.wq_b", "x=attn.q_norm.out"),
    Line("attn.wkv_a", _X),
    Line("attn.rope", f"q=attn.wq_b.out key=attn.wkv_a.out:rope {_POS}", "q key"),
    Line("attn.kv_norm", "x=attn.wkv_a.out:latent"),
    Line("attn.kv_write", "latent=attn.kv_norm.out key=attn.rope.key"),
    Line("attn.wkv_b", "x=attn.kv_write.out:latent"),
    Line("attn.indexer.wq_b", "x=attn.q_norm.out"),
    Line("attn.indexer.q", f"x=attn.indexer.wq_b.out {_POS}"),
    Line("attn.indexer.wk", _X),
    Line("attn.indexer.k", f"x=attn.indexer.wk.out {_POS}"),
    Line("attn.indexer.weights_proj", _X),
    Line(
        "attn.indexer.scores",
        "q=attn.indexer.q.out weights=attn.indexer.weights_proj.out"
        f" keys=attn.indexer.k.out {_SCORED}",
    ),
    Line("attn.indexer.topk", "scores=attn.indexer.scores.out"),
    Line(
        "attn.attend",
        "q=attn.rope.q rows=attn.kv_write.out expanded=attn.wkv_b.out chosen=attn.indexer.topk.out"
        f" state_rows=@state state_expanded=@state {_RAGGED}",
    ),
    Line("attn.wo", "x=attn.attend.out"),
    Line("ffn.norm", "x=attn.wo.out residual=attn.norm.residual", "out residual"),
    Line("ffn.w13", "x=ffn.norm.out", "out", "dense"),
    Line("ffn.act", "x=ffn.w13.out", "out", "dense"),
    Line("ffn.w2", "x=ffn.act.out", "out", "dense"),
    Line("ffn.gate", "x=ffn.norm.out", "out", "moe"),
    Line("ffn.topk", "logits=ffn.gate.out", "experts weights", "moe"),
    Line("ffn.experts.w13", f"x=ffn.norm.out {_ROUTED}", "out", "moe"),
    Line(
        "ffn.experts.act_quant",
        f"x=ffn.experts.w13.out {_ROUTED} weights=ffn.topk.weights",
        "out",
        "moe",
    ),
    Line("ffn.experts.w2", f"x=ffn.experts.act_quant.out {_ROUTED}", "out", "moe"),
    Line("ffn.experts.combine", "x=ffn.experts.w2.out weights=ffn.topk.weights", "out", "moe"),
    Line("ffn.shared.w13", "x=ffn.norm.out", "out", "moe"),
    Line("ffn.shared.act", "x=ffn.shared.w13.out", "out", "moe"),
    Line("ffn.shared.w2", "x=ffn.shared.act.out", "out", "moe"),
    Line("ffn.moe_sum", "routed=ffn.experts.combine.out shared=ffn.shared.w2.out", "out", "moe"),
)
V32_FIRST = (Line("embed", "tokens=@tokens"),)
V32_LAST = (
    Line("norm", "x=@stream residual=@residual", "out residual"),
    Line("head", "x=norm.out"),
)
V32_DRAFTER_FIRST = (
    Line("embed", "tokens=@tokens"),
    Line("enorm", "x=embed.out"),
    Line("hnorm", "x=@previous"),
    Line("join", "e=enorm.out h=hnorm.out"),
    Line("eh_proj", "x=join.out"),
)
V32_DRAFTER_LAST = (
    Line("norm", "x=ffn.moe_sum.out residual=ffn.norm.residual", "out residual"),
    Line("head", "x=norm.out"),
)
