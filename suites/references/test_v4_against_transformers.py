"""DeepSeek-V4: every site that transformers has as well agrees with it, in float32.

Each component runs on the inputs that their module saw, so no error is inherited; then whole
prompts, ragged batches and cached decoding are compared end to end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.model.config.config import small_v4
from degarble.harness.model.types import LayerType, MlpType, Yarn
from degarble.references.binding import BoundModel
from degarble.references.model import ModelV4
from degarble.references.numerics import SOURCES, Numerics
from degarble.suites.references.transformers_cases import (
    Case,
    Judge,
    answers,
    require_cached,
    require_ragged,
    tokens,
)

if TYPE_CHECKING:
    from degarble.harness.model.config.config import V4Config
    from degarble.harness.model.types import Block

NUMERICS = Numerics.definition(torch.float32, SOURCES["transformers"])
LENGTHS = (300, 171, 45)  # of a ragged batch: beyond window, top-k and a ratio of 128, and not
SMALL = small_v4(
    vocab_size=96, hidden_size=64, num_hidden_layers=6, compress_ratios=(0, 4, 128, 4, 128, 0, 0),
    head_dim=64, qk_rope_head_dim=16, q_lora_rank=32, o_lora_rank=24, sliding_window=32,
    index_n_heads=16, index_head_dim=32, moe_intermediate_size=48,
)  # fmt: skip
OTHER = replace(
    SMALL, num_hidden_layers=3, compress_ratios=(128, 0, 4, 0), num_attention_heads=6,
    head_dim=48, o_groups=1, num_hash_layers=0, n_routed_experts=5, num_experts_per_tok=3,
    swiglu_limit=0.4, sliding_window=7, index_topk=3, hc_sinkhorn_iters=3,
    yarn=Yarn(factor=4, original_max_position_embeddings=64, beta_fast=16, beta_slow=2),
)  # fmt: skip


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    asked = {
        "small": Case(SMALL, tokens(3, 300, 96, 1), seed=1),
        "other": Case(OTHER, tokens(2, 150, 96, 2), seed=2),
        "decode": Case(SMALL, tokens(2, 150, 96, 3), seed=1, decode=25),
    }
    answers(list(asked.values()), tmp_path_factory.mktemp("transformers"))
    return asked


def judge_block(judge: Judge, case: Case, config: V4Config, block: Block) -> None:
    p, theirs = f"{block.prefix}.", f"model.{block.prefix}."
    streams = case.flat(f"{theirs}attn_hc", "in")
    after = case.flat(f"{theirs}ffn_hc", "in")
    for half, hc, norm in (
        ("attn", "attn_hc", "input_layernorm"),
        ("ffn", "ffn_hc", "post_attention_layernorm"),
    ):
        made = judge.run(f"{p}{half}.hc_pre", streams=case.flat(f"{theirs}{hc}", "in"))
        for number, name in enumerate(("post", "mix", "out")):
            judge.expect(
                f"{half}.hc_pre.{name}", made[name], case.flat(f"{theirs}{hc}", "out", number)
            )
        x = case.flat(theirs + norm, "in")
        judge.same(f"{p}{half}.norm", case.flat(theirs + norm), x=x)
    post, mix = (case.flat(f"{theirs}attn_hc", "out", n) for n in (0, 1))
    x = case.flat(f"{theirs}self_attn")
    judge.same(f"{p}attn.hc_post", after, x=x, streams=streams, post=post, mix=mix)
    judge_attention(judge, case, config, block)
    judge_ffn(judge, case, block)
    following = f"model.layers.{block.index + 1}.attn_hc"
    if (following, "in", 0) not in case.seen:
        following = "model.hc_head"
    post, mix = (case.flat(f"{theirs}ffn_hc", "out", n) for n in (0, 1))
    x = case.flat(f"{theirs}mlp")
    judge.same(
        f"{p}ffn.hc_post", case.flat(following, "in"), x=x, streams=after, post=post, mix=mix
    )


def judge_linear(judge: Judge, case: Case, name: str, module: str) -> None:
    judge.same(name, case.flat(module), x=case.flat(module, "in"))


def judge_attention(judge: Judge, case: Case, config: V4Config, block: Block) -> None:
    p, theirs = f"{block.prefix}.attn.", f"model.{block.prefix}.self_attn."
    at = {"positions": case.positions}
    for ours, module in (
        ("wq_a", "q_a_proj"), ("q_norm", "q_a_norm"), ("wq_b", "q_b_proj"),
        ("wkv", "kv_proj"), ("wo_b", "o_b_proj"),
    ):  # fmt: skip
        judge_linear(judge, case, p + ours, theirs + module)
    attention = f"{block.prefix}.attention"
    q = case.seen[attention, "in", 0].transpose(1, 2).flatten(0, 1)
    rows = case.seen[attention, "in", 1][:, 0]
    batch, time = case.tokens.shape
    window = rows[:, :time].flatten(0, 1)
    judge.same(f"{p}q_head_norm_rope", q, x=case.flat(f"{theirs}q_b_proj"), **at)
    judge.same(f"{p}kv_norm_rope", window, x=case.flat(f"{theirs}kv_proj"), **at)
    given = {"window": window, "token_offsets": case.offsets, **at}
    if block.ratio:
        given["compressed"] = rows[:, time:].flatten(0, 1)
        judge_pool(judge, case, block, "compressor.", given["compressed"])
    if block.layer_type is LayerType.SPARSE:
        judge_indexer(judge, case, config, block)
        given["chosen"] = case.flat(f"{theirs}compressor.indexer")
    out = case.flat(attention)
    judge.same(f"{p}attend", out, q=q, **given)
    turned = case.flat(f"{theirs}o_a_proj", "in").flatten(1)
    judge.same(f"{p}inverse_rope", turned, x=out, **at)
    judge.same(f"{p}wo_a", case.flat(f"{theirs}o_a_proj").flatten(1), x=turned)
    del batch


def judge_pool(judge: Judge, case: Case, block: Block, branch: str, entries: torch.Tensor) -> None:
    """A compressor: projections, then pooled entries [B * W, E]."""
    theirs = f"model.{block.prefix}.self_attn.compressor."
    theirs += "indexer." if branch.startswith("indexer") else ""
    name = f"{block.prefix}.attn.{branch}"
    made = judge.run(f"{name}proj", x=case.flat(f"{theirs}kv_proj", "in"))
    x, gate = case.flat(f"{theirs}kv_proj"), case.flat(f"{theirs}gate_proj")
    judge.expect(f"{branch}proj", made["latent"], x)
    judge.expect(f"{branch}proj.gate", made["gate"], gate)
    rows = block.ratio * (2 if block.ratio == 4 else 1)
    state = torch.full((case.tokens.shape[0], rows, x.shape[1]), torch.nan)  # never to be read
    judge.same(
        f"{name}pool", entries, latent=x, gate=gate, positions=case.positions,
        token_offsets=case.offsets, state_latent=state, state_gate=state,
    )  # fmt: skip


def judge_indexer(judge: Judge, case: Case, config: V4Config, block: Block) -> None:
    p, theirs = (
        f"{block.prefix}.attn.indexer.",
        f"model.{block.prefix}.self_attn.compressor.indexer",
    )
    at = {"positions": case.positions}
    judge_linear(judge, case, f"{p}wq_b", f"{theirs}.q_b_proj")
    scorer, weights = f"{theirs}.scorer", f"{theirs}.scorer.weights_proj"
    q, k = case.flat(scorer, "in"), case.flat(scorer, "in", 1)
    judge.same(f"{p}q", q, x=case.flat(f"{theirs}.q_b_proj"), **at)
    judge_pool(judge, case, block, "indexer.compressor.", k)
    scale = (config.index_head_dim * config.index_n_heads) ** -0.5
    scaled = case.flat(weights) * scale
    judge.same(f"{p}weights_proj", scaled, x=case.flat(weights, "in"))
    scores = judge.run(f"{p}scores", q=q, keys=k, weights=scaled, token_offsets=case.offsets, **at)[
        "out"
    ]
    visible = torch.isfinite(scores)
    judge.expect("indexer.scores", scores[visible], case.flat(scorer)[visible])
    threshold = (case.positions + 1) // 4
    assert torch.equal(visible.sum(-1), threshold)
    masked = case.flat(scorer).masked_fill(~visible, -torch.inf)
    chosen = judge.run(f"{p}topk", scores=masked)["out"]
    judge.same_choice(f"{p}topk", chosen, case.flat(theirs), masked)


def judge_ffn(judge: Judge, case: Case, block: Block) -> None:
    p, theirs = f"{block.prefix}.ffn.", f"model.{block.prefix}.mlp."
    x, logits = case.flat(f"{theirs}gate", "in"), case.seen[f"{theirs}gate", "out", 0]
    judge.same(f"{p}gate", logits, x=x)
    hashed = {"tokens": case.tokens.flatten()} if block.mlp_type is MlpType.HASH else {}
    made = judge.run(f"{p}topk", logits=logits, **hashed)
    shares, chosen = (case.seen[f"{theirs}gate", "out", n] for n in (1, 2))
    order, their_order = made["experts"].argsort(-1), chosen.argsort(-1)
    assert torch.equal(made["experts"].gather(1, order), chosen.gather(1, their_order))
    judge.expect("ffn.topk", made["weights"].gather(1, order), shares.gather(1, their_order))
    routed = case.seen[f"{theirs}experts", "out", 0]
    both = judge.run(f"{p}experts.w13", x=x, experts=chosen)["out"]
    act = judge.run(f"{p}experts.act_quant", x=both, experts=chosen, weights=shares)["out"]
    down = judge.run(f"{p}experts.w2", x=act, experts=chosen)["out"]
    judge.same(f"{p}experts.combine", routed, x=down, weights=shares)
    shared = f"{theirs}shared_experts."
    halves = [case.flat(f"{shared}{part}") for part in ("gate_proj", "up_proj")]
    judge.same(f"{p}shared.w13", torch.cat(halves, -1), x=case.flat(f"{shared}gate_proj", "in"))
    act = case.flat(f"{shared}down_proj", "in")
    judge.same(f"{p}shared.act", act, x=torch.cat(halves, -1))
    judge.same(f"{p}shared.w2", case.flat(f"{shared}down_proj"), x=act)
    out = case.flat(f"{theirs}shared_experts")
    judge.same(f"{p}moe_sum", case.flat(f"{theirs[:-1]}"), routed=routed, shared=out)


@pytest.mark.parametrize("name", ["small", "other"])
def test_every_component_agrees_on_the_same_inputs(cases: dict[str, Case], name: str) -> None:
    case, config = cases[name], {"small": SMALL, "other": OTHER}[name]
    bound = BoundModel(config, NUMERICS, case.weights)
    judge = Judge(bound)
    judge.same("embed", case.flat("model.embed_tokens"), tokens=case.tokens.flatten())
    for block in config.layers:
        judge_block(judge, case, config, block)
    judge.same("hc_head", case.flat("model.hc_head"), streams=case.flat("model.hc_head", "in"))
    judge_linear(judge, case, "norm", "model.norm")
    judge_linear(judge, case, "head", "lm_head")
    # What transformers has no place for: rounding of cache rows, which changes nothing here.
    missing = {n for n in bound.calls if not n.startswith("mtp.")} - judge.judged
    assert {name.split(".", 2)[-1] for name in missing} == {
        "attn.kv_write",
        "attn.compressor.write",
    }
    assert judge.near_ties <= 0.001 * judge.choices, f"{judge.near_ties} of {judge.choices}"


def test_ragged_prompts_agree_end_to_end(cases: dict[str, Case]) -> None:
    case = cases["small"]
    model = ModelV4(BoundModel(SMALL, NUMERICS, case.weights), SMALL)
    require_ragged(model, case, LENGTHS)


def test_cached_decoding_agrees_end_to_end(cases: dict[str, Case]) -> None:
    case = cases["decode"]
    model = ModelV4(BoundModel(SMALL, NUMERICS, case.weights), SMALL)
    require_cached(model, case)


def test_a_planted_deviation_is_detected(cases: dict[str, Case]) -> None:
    case = cases["other"]
    bound = BoundModel(OTHER, NUMERICS, case.weights)
    plain = bound.calls["layers.2.attn.hc_pre"]

    def transposed(inputs: object, weights: object) -> object:
        outputs = dict(plain(inputs, weights))  # type: ignore[arg-type]
        return outputs | {"mix": outputs["mix"].transpose(1, 2)}

    bound.calls["layers.2.attn.hc_pre"] = transposed  # type: ignore[assignment]
    with pytest.raises(AssertionError, match=r"hc_pre\.mix"):
        judge_block(Judge(bound), case, OTHER, OTHER.layers[2])
