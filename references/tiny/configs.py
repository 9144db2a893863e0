"""Configs of the small trained models: real heads and cache rows, few and narrow otherwise."""

from __future__ import annotations

from degarble.harness.model.config.config import V4Config, V32Config
from degarble.harness.model.types import Yarn
from degarble.references.tiny.language import SIZE

# hidden 192 and o_groups * o_lora_rank 256 are multiples of 32; 192 and 96 are no multiples of 128,
# so tails of tiles are exercised.
TINY_V4 = V4Config(
    vocab_size=SIZE,
    hidden_size=192,
    num_hidden_layers=4,
    max_position_embeddings=4096,
    num_attention_heads=8,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=64,
    o_groups=8,
    o_lora_rank=32,
    sliding_window=128,
    compress_ratios=(0, 4, 128, 4),
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    yarn=Yarn(factor=16, original_max_position_embeddings=65536, beta_fast=32, beta_slow=1),
    index_n_heads=8,
    index_head_dim=128,
    index_topk=32,
    moe_intermediate_size=96,
    n_routed_experts=8,
    num_experts_per_tok=2,
    num_hash_layers=1,
    scoring_func="sqrtsoftplus",
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    num_nextn_predict_layers=0,
)

# Two layers are enough to recall: the first gathers what precedes a word, the second looks it up.
TINY_V32 = V32Config(
    vocab_size=SIZE,
    hidden_size=128,
    num_hidden_layers=2,
    max_position_embeddings=4096,
    num_attention_heads=4,
    q_lora_rank=64,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope_theta=10000.0,
    yarn=Yarn(
        factor=40,
        original_max_position_embeddings=4096,
        beta_fast=32,
        beta_slow=1,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
    index_n_heads=4,
    index_head_dim=128,
    index_topk=64,
    intermediate_size=192,
    first_k_dense_replace=1,
    moe_intermediate_size=64,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    scoring_func="sigmoid",
    routed_scaling_factor=2.5,
    num_nextn_predict_layers=0,
)
