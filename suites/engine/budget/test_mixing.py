"""mHC by other means: sums in other orders, exponentials to the base 2, reciprocals 2 units off."""

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
from degarble.references.binding import Bound
from degarble.references.numerics import Numerics

if TYPE_CHECKING:
    from torch import Tensor

V4 = small_v4(num_hidden_layers=3, compress_ratios=(0, 4, 128, 0))
EPSILON, PASSES = V4.hc_eps, V4.hc_sinkhorn_iters


def call_of(strength: float, kind: str = "normal", tokens: int = 70) -> JudgeableCall:
    """A call whose logits have about `strength` as deviation."""
    generator = torch.Generator().manual_seed(3)
    twin = Bound(V4, replace(Numerics.twin(), work=torch.float64), {})
    what, facts = twin.bound_to("layers.0.attn.hc_pre")
    streams = torch.randn(tokens, 4, V4.hidden_size, generator=generator)
    if kind == "constant":
        streams = torch.full_like(streams, 0.75)
    streams = streams.bfloat16()
    fn = torch.randn(24, 4 * V4.hidden_size, generator=generator) / 32
    base = torch.randn(24, generator=generator)
    if kind == "permutation":
        base[8:] = 12 * torch.eye(4).flatten() - 6
    parts = {"fn": fn, "base": base, "scale": torch.tensor([1.0, 1.0, strength])}
    weights = {f"hc_attn_{name}": Weight(value=part) for name, part in parts.items()}
    inputs = {"streams": streams}
    made = twin.calls["layers.0.attn.hc_pre"](inputs, weights)
    outputs = {"out": made["out"], "post": made["post"].float(), "mix": made["mix"].float()}
    return JudgeableCall(what.role, inputs, outputs, weights, facts=facts)


def exponential(x: Tensor) -> Tensor:
    return torch.exp2(x * 1.4426950408889634)


def over(a: Tensor, b: Tensor, off: float) -> Tensor:
    return a * (b.reciprocal() * (1 + off))


def otherwise(call: JudgeableCall, off: float) -> dict[str, Tensor]:
    """The component in float32, summed backwards in blocks, with approximate functions."""
    fn, base, scale = (each.value for each in call.weights.values() if each.value is not None)
    streams = call.inputs["streams"].float()
    flat = streams.flatten(1).flip(1)
    parts = zip(flat.split(64, 1), fn.flip(1).split(64, 1), strict=True)
    dot = torch.stack([x @ w.T for x, w in parts]).cumsum(0)[-1]
    square = flat.square().split(64, 1)
    mean = torch.stack([part.sum(1, keepdim=True) for part in square]).cumsum(0)[-1]
    m = dot * ((mean / flat.shape[1] + V4.rms_norm_eps).rsqrt() * (1 + off))
    m = m * scale.repeat_interleave(torch.tensor([4, 4, 16])) + base
    gates = over(torch.ones(()), 1 + exponential(-m[:, :8]), off)
    pre, post = gates[:, :4] + EPSILON, 2 * gates[:, 4:]
    out = sum(pre[:, k : k + 1] * streams[:, k] for k in (3, 1, 0, 2))
    logits = m[:, 8:].reshape(-1, 4, 4)
    mix = exponential(logits - logits.amax(-1, keepdim=True))
    mix = over(mix, mix.sum(-1, keepdim=True), off) + EPSILON
    mix = over(mix, mix.sum(-2, keepdim=True) + EPSILON, off)
    for _ in range(PASSES - 1):
        mix = over(mix, mix.sum(-1, keepdim=True) + EPSILON, off)
        mix = over(mix, mix.sum(-2, keepdim=True) + EPSILON, off)
    assert not isinstance(out, int)
    return {"out": out.bfloat16(), "post": post, "mix": mix}


@pytest.mark.parametrize("kind", ["normal", "constant", "permutation"])
@pytest.mark.parametrize("strength", [0.1, 1.0, 8.0])
def test_other_orders_and_functions_are_healthy(kind: str, strength: float) -> None:
    call = call_of(strength, kind)
    for off in (0.0, 2.0**-22, -(2.0**-22)):
        for name, found in judge_outputs(call, otherwise(call, off)).items():
            assert found.ratio <= HEADROOM, (name, str(found.worst))


@pytest.mark.parametrize("strength", [0.1, 1.0, 8.0])
def test_faults_of_mixing_are_caught(strength: float) -> None:
    call = call_of(strength)
    twin = call.outputs
    short = dict(twin)
    short["mix"] = twin["mix"].transpose(1, 2).contiguous()
    assert judge_outputs(call, short)["mix"].ratio > 1, "the other direction"
    short["mix"] = twin["mix"] * (1 + 1e-3 * max(1.0, strength))
    assert judge_outputs(call, short)["mix"].ratio > 1
    short["post"] = twin["post"] * (1 + 1e-3)
    assert judge_outputs(call, short)["post"].ratio > 1
    assert judge_outputs(call, short)["out"].ratio == 0
