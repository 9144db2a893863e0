"""Draw random configs of both families for property suites, and name what they cover.

Extents are small and mostly no powers of two, so that two dimensions are seldom equal by accident;
`aligned=True` keeps them at what every format and fused layout can hold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from degarble.harness.model.config.config import Dspark, V4Config, V32Config, small_v4, small_v32
from degarble.harness.model.types import Yarn

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

# Every extent that a fused tensor or a block of scales must not cut is 128.
TINY_V4 = small_v4(
    hidden_size=128, num_hidden_layers=3, compress_ratios=(0, 4, 128), num_attention_heads=2,
    o_groups=2, moe_intermediate_size=128, n_routed_experts=3, num_hash_layers=1, vocab_size=64,
)  # fmt: skip
TINY_V32 = small_v32(
    hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
    moe_intermediate_size=128, n_routed_experts=4, vocab_size=64,
)  # fmt: skip

MSCALES = st.none() | st.sampled_from([0, 0.7, 1.0])
YARN = st.none() | st.builds(
    Yarn,
    factor=st.sampled_from([4, 16, 40.0]),
    original_max_position_embeddings=st.sampled_from([64, 4096]),
    beta_fast=st.sampled_from([32, 16.0]),
    beta_slow=st.sampled_from([1, 2.0]),
    mscale=MSCALES,
    mscale_all_dim=MSCALES,
    attention_factor=st.none() | st.sampled_from([0, 1.0, 1.3]),
)
V32_YARN = YARN.flatmap(
    lambda yarn: (
        st.none() if yarn is None else st.booleans().map(lambda cut: replace(yarn, truncate=cut))
    )
)


def _extents(unit: int, most: int = 4) -> SearchStrategy[int]:
    return st.integers(1, most).map(lambda count: count * unit)


@st.composite
def v4_configs(draw: DrawFn, *, aligned: bool = False, drafters: bool = True) -> V4Config:
    """Draw a V4 model of one to five layers, with any mixture of layer types."""
    unit = 128 if aligned else 16
    layers = draw(st.integers(1, 5))
    groups, dims = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([16, 32]))
    heads = groups * draw(st.integers(1, 3))
    experts = draw(st.integers(2, 6))
    mtp = draw(st.integers(0, 2)) if drafters else 0
    dspark = None
    if drafters and draw(st.integers(0, 4)) == 0:
        targets = draw(st.lists(st.integers(0, layers - 1), min_size=1, max_size=3, unique=True))
        dspark = Dspark(
            target_layer_ids=tuple(targets), markov_rank=24, block_size=3, noise_token_id=5
        )
    return small_v4(
        vocab_size=draw(st.sampled_from([96, 250])),
        hidden_size=draw(_extents(unit)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        head_dim=dims * draw(st.integers(1, 2)) if not aligned else 128,
        qk_rope_head_dim=dims,
        q_lora_rank=draw(_extents(unit)),
        o_groups=groups,
        o_lora_rank=draw(_extents(unit)),
        compress_ratios=tuple(draw(st.sampled_from([0, 4, 128])) for _ in range(layers)),
        index_n_heads=draw(st.integers(1, 3)),
        index_head_dim=dims * (1 if not aligned else 128 // dims),
        moe_intermediate_size=draw(_extents(unit)),
        n_routed_experts=experts,
        num_experts_per_tok=draw(st.integers(1, experts)),
        num_hash_layers=draw(st.integers(0, layers)),
        hc_mult=draw(st.integers(2, 4)),
        yarn=draw(YARN),
        num_nextn_predict_layers=1 if dspark else mtp,
        dspark=dspark,
    )


@st.composite
def v32_configs(draw: DrawFn, *, aligned: bool = False, drafters: bool = True) -> V32Config:
    """Draw a V3.2 model of one to four layers, dense or not."""
    unit = 128 if aligned else 16
    layers, groups = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2]))
    experts = groups * draw(st.integers(2, 4))
    return small_v32(
        vocab_size=draw(st.sampled_from([96, 250])),
        hidden_size=draw(_extents(unit)),
        num_hidden_layers=layers,
        num_attention_heads=draw(st.integers(1, 4)),
        q_lora_rank=draw(_extents(unit)),
        kv_lora_rank=draw(_extents(unit)),
        qk_nope_head_dim=draw(_extents(unit, 2)),
        qk_rope_head_dim=draw(st.sampled_from([16, 32])),
        v_head_dim=draw(_extents(unit, 2)),
        index_n_heads=draw(st.integers(1, 3)),
        index_head_dim=unit * 2,
        intermediate_size=draw(_extents(unit)),
        first_k_dense_replace=draw(st.integers(0, layers)),
        moe_intermediate_size=draw(_extents(unit)),
        n_routed_experts=experts,
        n_shared_experts=draw(st.integers(1, 2)),
        num_experts_per_tok=2,
        n_group=groups,
        topk_group=draw(st.integers(1, groups)),
        yarn=draw(V32_YARN),
        num_nextn_predict_layers=draw(st.integers(0, 1)) if drafters else 0,
    )


def configs(
    *, aligned: bool = False, drafters: bool = True
) -> SearchStrategy[V4Config | V32Config]:
    """Draw a model of either family."""
    return v4_configs(aligned=aligned, drafters=drafters) | v32_configs(
        aligned=aligned, drafters=drafters
    )
