"""Pooling by other means, and the carried state: what is read later is exact, the rest is free."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.budget.budget import HEADROOM
from degarble.harness.engine.budget.judging import judge_outputs
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.formats.weight import Weight
from degarble.harness.model.presets import small_v4
from degarble.harness.report.verdict import Verdict
from degarble.references import elementary
from degarble.references.binding import Bound
from degarble.references.numerics import Numerics, switches_of

if TYPE_CHECKING:
    from torch import Tensor

V4 = small_v4(num_hidden_layers=3, compress_ratios=(0, 4, 128, 0))
NUMERICS = Numerics.twin(switches_of("official-v4"))
TWIN = Bound(V4, replace(NUMERICS, work=torch.float64), {})


def call_of(
    layer: int, start: int, tokens: int, size: float = 1.0, part: str = ""
) -> JudgeableCall:
    """Tokens `start` onward of one sequence, pooled by 4 (overlapping) or by 128."""
    name = f"layers.{layer}.attn.{part}compressor.pool"
    generator = torch.Generator().manual_seed(start)
    what, facts = TWIN.bound_to(name)
    ratio, wide = (4, 2) if layer == 1 else (128, 1)
    width = V4.index_head_dim if part else V4.head_dim

    def random(*shape: int, by: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * by

    weights = {}
    for local in TWIN.weights_of(name):
        shape = (width,) if local.endswith("norm") else (ratio, wide * width)
        weights[local] = Weight(value=random(*shape))
    inputs = {
        "latent": random(tokens, wide * width),
        "gate": random(tokens, wide * width, by=size),
        "positions": torch.arange(start, start + tokens),
        "token_offsets": torch.tensor([0, tokens]),
        "state_latent": random(1, wide * ratio, wide * width),
        "state_gate": random(1, wide * ratio, wide * width, by=size),
    }
    made = TWIN.calls[name](inputs, weights)
    outputs = {
        key: each.float() if each.dtype is torch.float64 else each for key, each in made.items()
    }
    return JudgeableCall(what.role, inputs, outputs, weights, facts=facts)


def pooled_online(call: JudgeableCall, ratio: int) -> Tensor:
    """The first window of a sequence without overlap, slot by slot beside a running peak."""
    bias, norm = (
        next(w for n, w in call.weights.items() if n.endswith(part)).values(torch.float32)
        for part in ("ape", "norm")
    )
    peak = torch.full((V4.head_dim,), -torch.inf)
    total, out = torch.zeros(V4.head_dim), torch.zeros(V4.head_dim)
    for slot in reversed(range(ratio)):
        gate = (call.inputs["gate"][slot] + bias[slot]) * 1.4426950408889634
        higher = torch.maximum(peak, gate)
        fade, share = torch.exp2(peak - higher), torch.exp2(gate - higher)
        total, out = total * fade + share, out * fade + share * call.inputs["latent"][slot]
        peak = higher
    entry = (out / total).bfloat16().float()
    normed = (norm * (entry * (entry.square().mean() + V4.rms_norm_eps).rsqrt())).bfloat16()
    table = elementary.rotation_table(call.facts.rope, torch.tensor([0]), NUMERICS)  # type: ignore[union-attr]
    return elementary.rotate_tail(normed.float()[None], table).bfloat16()


@pytest.mark.parametrize("size", [0.1, 1.0, 6.0])
def test_a_running_peak_is_healthy(size: float) -> None:
    call = call_of(2, 0, 128, size)
    made = dict(call.outputs) | {"out": pooled_online(call, 128)}
    found = judge_outputs(call, made)["out"]
    assert found.ratio <= HEADROOM, str(found.worst)
    made["out"] = (made["out"].float() * 1.02).bfloat16()
    assert judge_outputs(call, made)["out"].ratio > 1


@pytest.mark.parametrize("part", ["", "indexer."])
@pytest.mark.parametrize(("start", "tokens"), [(0, 9), (3, 1), (5, 22), (6, 1)])
def test_float32_is_healthy_wherever_a_call_begins(part: str, start: int, tokens: int) -> None:
    call = call_of(1, start, tokens, part=part)
    name = f"layers.1.attn.{part}compressor.pool"
    made = dict(Bound(V4, NUMERICS, {}).calls[name](call.inputs, call.weights))
    for key, found in judge_outputs(call, made).items():
        assert found.ratio <= HEADROOM, (key, str(found.worst))


@pytest.mark.parametrize("name", ["state_latent", "state_gate"])
def test_rows_that_are_read_later_are_exact_and_others_are_free(name: str) -> None:
    call = call_of(1, 0, 10)  # two windows; tokens 8 and 9 wait in rows 4 and 5
    for row, free in ((0, False), (3, False), (4, False), (5, False), (6, True), (7, True)):
        state = call.outputs[name].clone()
        state[0, row, 17] += 1e-3
        found = judge_outputs(call, dict(call.outputs) | {name: state})[name]
        assert (found.verdict is Verdict.AGREES) is free, row
    first = call_of(1, 0, 2)  # no window yet: what would be the one before may hold anything
    state = first.outputs[name].clone()
    state[0, :4], state[0, 6:] = torch.nan, torch.nan
    assert judge_outputs(first, dict(first.outputs) | {name: state})[name].ratio == 0


def test_a_window_that_took_the_wrong_neighbour_is_caught() -> None:
    call = call_of(1, 8, 8)
    other = JudgeableCall(
        call.role,
        dict(call.inputs) | {"state_latent": call.inputs["state_latent"].roll(1, 1)},
        {},
        call.weights,
        facts=call.facts,
    )
    made = TWIN.calls["layers.1.attn.compressor.pool"](other.inputs, call.weights)
    outputs = {key: each.to(call.outputs[key].dtype) for key, each in made.items()}
    assert judge_outputs(call, outputs)["out"].ratio > 1
