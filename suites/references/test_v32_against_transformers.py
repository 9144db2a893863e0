"""DeepSeek-V3.2: every site that transformers has as well agrees with it, in float32.

Each component runs on the inputs that their module saw, so no error is inherited; then whole
prompts, ragged batches and cached decoding are compared end to end, in both forms of MLA.
Scores of exactly zero are common with few indexer heads (every ReLU shut), and their choice among
equals is theirs alone: such ties are left out and counted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.model.config.config import small_v32
from degarble.harness.model.types import MlpType, Yarn
from degarble.references.binding import BoundModel
from degarble.references.model import ModelV32
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
    from degarble.harness.model.config.config import V32Config
    from degarble.harness.model.types import Block

NUMERICS = Numerics.definition(torch.float32, SOURCES["transformers"])
LENGTHS = (160, 97, 12)  # of a ragged batch: beyond the top-k, and not
SMALL = small_v32(
    vocab_size=96, hidden_size=64, q_lora_rank=32, kv_lora_rank=48, qk_nope_head_dim=24,
    qk_rope_head_dim=16, v_head_dim=20, index_n_heads=16, index_head_dim=32, index_topk=24,
    intermediate_size=80, moe_intermediate_size=40,
)  # fmt: skip
# Three heads: one score in eight is exactly zero, so the choice is full of ties.
TIED = replace(
    SMALL, index_n_heads=3, n_routed_experts=6, n_group=3, topk_group=1, num_experts_per_tok=2,
    first_k_dense_replace=0, index_topk=7,
    yarn=Yarn(factor=4, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.7),
)  # fmt: skip


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    asked = {
        "small": Case(SMALL, tokens(3, 160, 96, 1), seed=1),
        "tied": Case(TIED, tokens(2, 90, 96, 2), seed=2),
        "decode": Case(SMALL, tokens(2, 60, 96, 3), seed=1, decode=25),
    }
    answers(list(asked.values()), tmp_path_factory.mktemp("transformers"))
    return asked


def judge_linear(judge: Judge, case: Case, name: str, module: str) -> None:
    judge.same(name, case.flat(module), x=case.flat(module, "in"))


def judge_block(judge: Judge, case: Case, config: V32Config, block: Block, scored: int) -> None:
    """One layer; `scored` is the number of their top-k call that its indexer made."""
    p, theirs = f"{block.prefix}.", f"model.{block.prefix}."
    entering = case.flat(f"{theirs}input_layernorm", "in")
    judge.same(f"{p}attn.norm", case.flat(f"{theirs}input_layernorm"), x=entering)
    judge_attention(judge, case, config, block, scored)
    x = case.flat(f"{theirs}self_attn")
    normed = judge.same(
        f"{p}ffn.norm", case.flat(f"{theirs}post_attention_layernorm"), x=x, residual=entering
    )
    middle = case.flat(f"{theirs}post_attention_layernorm", "in")
    judge.expect("ffn.norm.residual", normed["residual"], middle)
    if block.mlp_type is MlpType.DENSE:
        judge_dense(judge, case, block)
    else:
        judge_experts(judge, case, block)
    following = f"model.layers.{block.index + 1}.input_layernorm"
    if (following, "in", 0) in case.seen:  # the next norm adds what this layer put out
        name = f"layers.{block.index + 1}.attn.norm"
        added = judge.run(name, x=case.flat(f"{theirs}mlp"), residual=middle)
        judge.expect("attn.norm.residual", added["residual"], case.flat(following, "in"))


def judge_attention(judge: Judge, case: Case, config: V32Config, block: Block, scored: int) -> None:
    p, theirs = f"{block.prefix}.attn.", f"model.{block.prefix}.self_attn."
    at = {"positions": case.positions}
    for ours, module in (
        ("wq_a", "q_a_proj"), ("q_norm", "q_a_layernorm"), ("wq_b", "q_b_proj"),
        ("wkv_a", "kv_a_proj_with_mqa"), ("wo", "o_proj"),
    ):  # fmt: skip
        judge_linear(judge, case, p + ours, theirs + module)
    raw = case.flat(f"{theirs}kv_a_proj_with_mqa")
    latent = judge.same(
        f"{p}kv_norm", case.flat(f"{theirs}kv_a_layernorm"), x=raw[:, : config.kv_lora_rank]
    )["out"]
    attention = f"{block.prefix}.attention"
    q, k = (case.seen[attention, "in", n].transpose(1, 2).flatten(0, 1) for n in (0, 1))
    rotated = judge.run(
        f"{p}rope", q=case.flat(f"{theirs}q_b_proj"), key=raw[:, config.kv_lora_rank :], **at
    )
    nope = config.qk_nope_head_dim
    # They leave the rotated pairs apart, evens first, in q and k alike.
    judge.expect("rope.q", _apart(rotated["q"], nope), q)
    judge.expect("rope.k", _apart(rotated["key"], 0), k[:, 0, nope:])
    written = judge.run(f"{p}kv_write", latent=latent, key=rotated["key"])["out"]
    expanded = judge.same(f"{p}wkv_b", case.flat(f"{theirs}kv_b_proj").flatten(1), x=latent)["out"]
    judge_indexer(judge, case, config, block, scored)
    chosen = case.flat(f"{theirs}indexer").long()
    chosen = torch.where(chosen <= case.positions[:, None], chosen, -1)  # masked, if not seen yet
    given = {"rows": written, "chosen": chosen, "token_offsets": case.offsets, **at}
    out = case.flat(attention).flatten(1)
    judge.same(f"{p}attend", out, q=rotated["q"], **given)
    judge.same(f"{p}attend", out, q=rotated["q"], expanded=expanded, **given)


def _apart(x: torch.Tensor, nope: int) -> torch.Tensor:
    return torch.cat((x[..., :nope], x[..., nope::2], x[..., nope + 1 :: 2]), dim=-1)


def judge_indexer(judge: Judge, case: Case, config: V32Config, block: Block, scored: int) -> None:
    p, theirs = f"{block.prefix}.attn.indexer.", f"model.{block.prefix}.self_attn.indexer."
    at = {"positions": case.positions}
    judge_linear(judge, case, f"{p}wq_b", f"{theirs}wq_b")
    judge_linear(judge, case, f"{p}wk", f"{theirs}wk")
    scale = (config.index_head_dim * config.index_n_heads) ** -0.5
    weights = case.flat(f"{theirs}weights_proj") * scale
    judge.same(f"{p}weights_proj", weights, x=case.flat(f"{theirs}weights_proj", "in"))
    q = judge.run(f"{p}q", x=case.flat(f"{theirs}wq_b"), **at)["out"]
    k = judge.run(f"{p}k", x=case.flat(f"{theirs}wk"), **at)["out"]
    scores = judge.run(
        f"{p}scores", q=q, keys=k, weights=weights, token_offsets=case.offsets, **at
    )["out"]
    visible = torch.isfinite(scores)
    assert torch.equal(visible.sum(-1), case.positions + 1)
    masked = case.flat("topk", "in", scored).masked_fill(~visible, -torch.inf)
    judge.expect("indexer.scores", scores[visible], masked[visible])
    chosen = judge.run(f"{p}topk", scores=masked)["out"]
    seen = case.flat(f"{theirs[:-1]}").long()
    seen = torch.where(seen <= case.positions[:, None], seen, -1)
    judge.same_choice(f"{p}topk", chosen, seen, masked)


def judge_dense(judge: Judge, case: Case, block: Block) -> None:
    judge_gated(judge, case, f"{block.prefix}.ffn.", f"model.{block.prefix}.mlp.")


def judge_gated(judge: Judge, case: Case, ours: str, theirs: str) -> None:
    """Gate and up, SwiGLU, down."""
    halves = [case.flat(f"{theirs}{part}") for part in ("gate_proj", "up_proj")]
    judge.same(f"{ours}w13", torch.cat(halves, -1), x=case.flat(f"{theirs}gate_proj", "in"))
    act = case.flat(f"{theirs}down_proj", "in")
    judge.same(f"{ours}act", act, x=torch.cat(halves, -1))
    judge.same(f"{ours}w2", case.flat(f"{theirs}down_proj"), x=act)


def judge_experts(judge: Judge, case: Case, block: Block) -> None:
    p, theirs = f"{block.prefix}.ffn.", f"model.{block.prefix}.mlp."
    x = case.flat(f"{theirs}gate", "in")
    logits, shares, chosen = (case.seen[f"{theirs}gate", "out", n] for n in (0, 1, 2))
    judge.same(f"{p}gate", logits, x=x)
    made = judge.run(f"{p}topk", logits=logits)
    order, their_order = made["experts"].argsort(-1), chosen.argsort(-1)
    assert torch.equal(made["experts"].gather(1, order), chosen.gather(1, their_order))
    judge.expect("ffn.topk", made["weights"].gather(1, order), shares.gather(1, their_order))
    routed = case.seen[f"{theirs}experts", "out", 0]
    both = judge.run(f"{p}experts.w13", x=x, experts=chosen)["out"]
    act = judge.run(f"{p}experts.act_quant", x=both, experts=chosen, weights=shares)["out"]
    down = judge.run(f"{p}experts.w2", x=act, experts=chosen)["out"]
    judge.same(f"{p}experts.combine", routed, x=down, weights=shares)
    judge_gated(judge, case, f"{p}shared.", f"{theirs}shared_experts.")
    shared = case.flat(f"{theirs}shared_experts")
    judge.same(f"{p}moe_sum", case.flat(f"{theirs[:-1]}"), routed=routed, shared=shared)


def judged(case: Case, config: V32Config) -> Judge:
    judge = Judge(BoundModel(config, NUMERICS, case.weights))
    judge.same("embed", case.flat("model.embed_tokens"), tokens=case.tokens.flatten())
    calls = sorted(n for name, _, n in case.seen if name == "topk")
    time = case.tokens.shape[1]
    scored = [n for n in calls if case.seen["topk", "in", n].shape[-1] == time]
    for block, number in zip(config.layers, scored, strict=True):
        judge_block(judge, case, config, block, number)
    judge.same("norm", case.flat("model.norm"), x=case.flat("model.norm", "in"))
    judge_linear(judge, case, "head", "lm_head")
    missing = {n for n in judge.bound.calls if not n.startswith("mtp.")} - judge.judged
    assert not missing
    return judge


def test_every_component_agrees_on_the_same_inputs(cases: dict[str, Case]) -> None:
    judge = judged(cases["small"], SMALL)
    assert judge.near_ties <= 0.001 * judge.choices, f"{judge.near_ties} of {judge.choices}"


def test_with_few_heads_only_exact_ties_are_chosen_differently(cases: dict[str, Case]) -> None:
    judge = judged(cases["tied"], TIED)
    assert 0 < judge.near_ties <= 0.5 * judge.choices, f"{judge.near_ties} of {judge.choices}"


@pytest.mark.parametrize("absorbed", [True, False], ids=["absorbed", "naive"])
def test_ragged_prompts_agree_end_to_end(cases: dict[str, Case], absorbed: bool) -> None:
    case = cases["small"]
    model = ModelV32(BoundModel(SMALL, NUMERICS, case.weights), SMALL, absorbed=absorbed)
    require_ragged(model, case, LENGTHS)


def test_cached_decoding_agrees_end_to_end(cases: dict[str, Case]) -> None:
    case = cases["decode"]
    model = ModelV32(BoundModel(SMALL, NUMERICS, case.weights), SMALL)
    require_cached(model, case)


def test_the_release_before_the_rotation_fix_is_detected(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs (2i, 2i + 1) in the indexer: the fault of the release code before 2025-11-17."""
    from degarble.references import elementary  # noqa: PLC0415  only to be changed

    monkeypatch.setattr(elementary, "rotate_halves", elementary.rotate_interleaved)
    with pytest.raises(AssertionError, match=r"indexer\.scores"):
        judged(cases["small"], SMALL)
