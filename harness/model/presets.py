"""Released geometries (V4_PRO, V4_FLASH, V3_2) and makers of small models of the same families.

The small ones hold every layer type and keep extents at multiples of 128, so that every format and
every fused layout can hold them; pass other fields by name. Sources: as in config/config.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from degarble.harness.model.config.config import V4Config, V32Config
from degarble.harness.model.types import Yarn

V4_PRO = V4Config(
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=61,
    max_position_embeddings=1048576,
    num_attention_heads=128,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1536,
    o_groups=16,
    o_lora_rank=1024,
    sliding_window=128,
    compress_ratios=(128, 128, *(4, 128) * 29, 4, 0),  # the last entry is the MTP block's
    rope_theta=10000,
    compress_rope_theta=160000,
    yarn=Yarn(factor=16, original_max_position_embeddings=65536),
    index_n_heads=64,
    index_head_dim=128,
    index_topk=1024,
    moe_intermediate_size=3072,
    n_routed_experts=384,
    num_experts_per_tok=6,
    num_hash_layers=3,
    scoring_func="sqrtsoftplus",
    routed_scaling_factor=2.5,
    swiglu_limit=10.0,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    num_nextn_predict_layers=1,
)

V4_FLASH = replace(
    V4_PRO,
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    q_lora_rank=1024,
    o_groups=8,
    compress_ratios=(0, 0, *(4, 128) * 20, 4, 0),
    index_topk=512,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    routed_scaling_factor=1.5,
)

V3_2 = V32Config(
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=61,
    max_position_embeddings=163840,
    num_attention_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope_theta=10000,
    yarn=Yarn(factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0),
    index_n_heads=64,
    index_head_dim=128,
    index_topk=2048,
    intermediate_size=18432,
    first_k_dense_replace=3,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    scoring_func="sigmoid",
    routed_scaling_factor=2.5,
    num_nextn_predict_layers=1,
)


def small_v4(**changes: Any) -> V4Config:
    """Make a V4 model of five layers, one of each layer type at least, with one MTP block."""
    small = replace(
        V4_PRO,
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=5,
        num_attention_heads=8,
        head_dim=128,
        q_lora_rank=128,
        o_groups=4,
        o_lora_rank=128,
        compress_ratios=(0, 4, 128, 4, 128, 0),
        index_n_heads=4,
        index_topk=8,
        moe_intermediate_size=256,
        n_routed_experts=8,
        num_experts_per_tok=2,
        num_hash_layers=2,
    )
    return replace(small, **changes)


def small_v32(**changes: Any) -> V32Config:
    """Make a V3.2 model of three layers, the first dense, with one MTP block."""
    small = replace(
        V3_2,
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        v_head_dim=64,
        index_n_heads=4,
        index_topk=8,
        intermediate_size=512,
        first_k_dense_replace=1,
        moe_intermediate_size=256,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
    )
    return replace(small, **changes)
