"""The indexer by other means: heads in another order, split sums, butterflies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.budget.budget import HEADROOM
from degarble.harness.engine.budget.judging import judge_outputs
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.formats.weight import Weight
from degarble.harness.model.presets import small_v4, small_v32
from degarble.references.binding import Bound
from degarble.references.numerics import Numerics, switches_of

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.model.config.config import Config

V4 = small_v4(num_hidden_layers=3, compress_ratios=(0, 4, 128, 0))
V32 = small_v32(num_hidden_layers=2)
TOKENS = 40


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def numerics(config: Config, work: torch.dtype) -> Numerics:
    source = "official-v4" if config is V4 else "official-v32"
    return replace(Numerics.twin(switches_of(source)), work=work)


def call_of(
    config: Config, role: str, inputs: dict[str, Tensor], weights: dict[str, Tensor]
) -> JudgeableCall:
    twin, name = Bound(config, numerics(config, torch.float64), {}), f"layers.1.attn.indexer.{role}"
    what, facts = twin.bound_to(name)
    held = {local: Weight(value=value) for local, value in weights.items()}
    made = twin.calls[name](inputs, held)
    outputs = {
        key: each.float() if each.dtype is torch.float64 else each for key, each in made.items()
    }
    return JudgeableCall(what.role, inputs, outputs, held, facts=facts)


def scores_call(config: Config) -> JudgeableCall:
    entries, width = TOKENS // 4 if config is V4 else TOKENS, config.index_head_dim
    given = {
        "q": random(TOKENS, config.index_n_heads, width, seed=1),
        "keys": random(entries, width, seed=2),
        "weights": random(TOKENS, config.index_n_heads, seed=3) / 16,
        "positions": torch.arange(TOKENS),
        "token_offsets": torch.tensor([0, TOKENS]),
    }
    return call_of(config, "scores", given, {})


def scored_otherwise(call: JudgeableCall, in_steps: bool) -> Tensor:
    """In float32, halves of the width apart and heads backwards."""
    q, keys = call.inputs["q"].float(), call.inputs["keys"].float()
    half = q.shape[-1] // 2
    dot = q[..., half:] @ keys[:, half:].T + q[..., :half] @ keys[:, :half].T
    dot = dot.relu()
    weights = call.inputs["weights"].float()[..., None]
    terms = dot.bfloat16().float() * weights if in_steps else dot * weights
    if in_steps:
        terms = terms.bfloat16().float()
    total = torch.zeros(terms.shape[0], terms.shape[2])
    for head in reversed(range(terms.shape[1])):
        total = total + terms[:, head]
    total = total.bfloat16().float() if in_steps else total
    return total.masked_fill(call.outputs["out"].isneginf(), -torch.inf)


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
def test_scores_in_another_order_are_healthy(config: Config) -> None:
    call = scores_call(config)
    made = scored_otherwise(call, in_steps=config is V4)
    found = judge_outputs(call, {"out": made})["out"]
    assert found.ratio <= HEADROOM, str(found.worst)
    seen = made.clone()
    seen[3, -1] = 0.5
    assert judge_outputs(call, {"out": seen})["out"].ratio > 1, "an entry that is not visible yet"
    assert judge_outputs(call, {"out": made * (1 + 2.0**-6)})["out"].ratio > 1


@pytest.mark.parametrize(  # V4's keys are pooled: test_budget_pooling
    ("config", "role"), [(V4, "q"), (V32, "q"), (V32, "k")], ids=["v4-q", "v32-q", "v32-k"]
)
def test_operands_in_float32_are_healthy_and_another_pairing_is_not(
    config: Config, role: str
) -> None:
    width = config.index_head_dim * (config.index_n_heads if role == "q" else 1)
    given = {"x": random(TOKENS, width, seed=4), "positions": torch.arange(TOKENS) * 91}
    held = {}
    if role == "k":
        held = {
            "attn.indexer.k_norm": random(width, seed=5),
            "attn.indexer.k_norm.bias": random(width, seed=6),
        }
    call = call_of(config, role, given, held)
    single = Bound(config, numerics(config, torch.float32), {}).calls[
        f"layers.1.attn.indexer.{role}"
    ]
    made = dict(single(call.inputs, call.weights))
    found = judge_outputs(call, made)["out"]
    assert found.ratio <= HEADROOM, str(found.worst)
    moved = dict(single(given | {"positions": given["positions"] + 1}, call.weights))
    assert judge_outputs(call, moved)["out"].ratio > 1
    step = made["out"].clone().flatten()
    at = int(step.abs().argmax())
    step[at] = step[at] * 0.75
    assert judge_outputs(call, {"out": step.reshape(made["out"].shape)})["out"].ratio > 1


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
def test_head_weights_in_another_order_are_healthy(config: Config) -> None:
    x, weight = (
        random(TOKENS, config.hidden_size, seed=7),
        random(config.index_n_heads, config.hidden_size, seed=8),
    )
    call = call_of(config, "weights_proj", {"x": x}, {"attn.indexer.weights_proj": weight})
    parts = zip(x.float().flip(1).split(32, 1), weight.float().flip(1).split(32, 1), strict=True)
    made = torch.stack([a @ b.T for a, b in parts]).cumsum(0)[-1]
    if config is V4:
        made = made.bfloat16().float()
    made = made * (config.index_head_dim * config.index_n_heads) ** -0.5
    out = made.to(call.outputs["out"].dtype)
    found = judge_outputs(call, {"out": out})["out"]
    assert found.ratio <= HEADROOM, str(found.worst)
    assert judge_outputs(call, {"out": out * 2})["out"].ratio > 1
