"""What the tables of V4 and V3.2 have in common."""

from __future__ import annotations

from typing import Any

from degarble.harness.model.recipes import Rule
from degarble.harness.model.sharding import COLUMNS, ROWS
from degarble.harness.model.site_forms import ANY, ElementKind, FormRow

# Words of the wiring.
X = "x=attn.norm.out"
POS = "positions=@positions"
# Inputs and outputs of a pooling component.
POOLED = (
    f"{POS} token_offsets=@offsets state_latent=@state state_gate=@state",
    "out entry_offsets state_latent state_gate",
)
RAGGED = f"{POS} token_offsets=@offsets"
SCORED = f"{RAGGED} state_keys=@state"
ROUTED = "experts=ffn.topk.experts"

_I = ElementKind.INTEGERS
SHARED_FORMS = (
    FormRow("embed", "D"),
    FormRow("head", "V"),
    FormRow("attn.wq_a attn.q_norm", "ql"),
    FormRow("attn.indexer.wq_b", "IH*id"),
    FormRow("attn.indexer.q", "IH id"),
    FormRow("attn.indexer.weights_proj", "IH"),
    FormRow("attn.indexer.scores", ANY),
    FormRow("attn.indexer.topk", ANY, holds=_I),
    FormRow("ffn.gate", "E"),
    FormRow("ffn.topk", "k", "experts", _I),
    FormRow("ffn.topk", "k", "weights"),
    FormRow("ffn.experts.w13", "k 2*I"),
    FormRow("ffn.experts.act_quant", "k I"),
    FormRow("ffn.experts.w2", "k D"),
    FormRow("ffn.experts.combine ffn.shared.w2 ffn.moe_sum", "D"),
)

SHARDED_EXPERTS = {
    "ffn.experts.{e}.w1": ROWS,
    "ffn.experts.{e}.w2": COLUMNS,
    "ffn.experts.{e}.w3": ROWS,
}

FP8 = ("FP8_128X128_UE8M0", "FP8_1X128_UE8M0")
FP8_F32 = ("FP8_128X128_F32", "FP8_1X128_F32")
NVFP4 = ("NVFP4", "NVFP4")
NVFP4_EXPERTS = Rule("layers.*.ffn.experts.*", *NVFP4)


def with_experts(recipe: str, source: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return the rules of a source, with routed experts in NVFP4 where the recipe says so."""
    # The drafter keeps its source format: layers.* only.
    return (NVFP4_EXPERTS, *source) if recipe == "nvfp4-experts" else source


def shared_letters(config: Any) -> dict[str, int]:
    """Return the numbers of the letters that V4 and V3.2 share."""
    return {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "H": config.num_attention_heads,
        "ql": config.q_lora_rank,
        "E": config.n_routed_experts,
        "I": config.moe_intermediate_size,
        "k": config.num_experts_per_tok,
        "IH": config.index_n_heads,
        "id": config.index_head_dim,
    }
