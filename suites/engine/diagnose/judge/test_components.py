"""A component of a known architecture alone: its role and a config are enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from degarble.harness.base.errors import DegarbleError, UnknownName
from degarble.harness.engine.diagnose.judge.judge import Setting, judge
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.harness.formats.weight import Weight
from degarble.harness.report.verdict import Verdict
from degarble.references.linears import decode_activations, quantise_activations
from degarble.suites.checkpoint.reading_cases import TINY_V4, TINY_V32

GENERATOR = torch.Generator().manual_seed(11)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


X = random(24, TINY_V4.hidden_size).bfloat16()
W = random(TINY_V4.q_lora_rank, TINY_V4.hidden_size).bfloat16()
OUT = (X.float() @ W.float().T).bfloat16()
SETTING = Setting(config=TINY_V4)


def test_a_role_or_a_full_name_is_enough() -> None:
    for name in ("attn.wq_a", "layers.1.attn.wq_a"):
        found = judge(name, {"x": X}, W, OUT, setting=SETTING)
        assert found.require().component.endswith(".attn.wq_a")
    assert judge("attn.wq_a", X, {"attn.wq_a": W}, {"out": OUT}, setting=SETTING)
    wrong = OUT.clone()
    wrong[3, 5] *= 2
    found = judge("attn.wq_a", X, W, wrong, setting=SETTING)
    assert found.verdict is Verdict.DIFFERS
    assert "first at [3, 5]" in str(found)
    assert not judge("attn.wq_a", X, W, OUT * 2, setting=SETTING)


def test_codes_arrive_as_the_recipe_says() -> None:
    wq = quantise(W, NVFP4)
    coded = quantise_activations(X, "NVFP4", torch.tensor(0.002))
    exact = decode_activations(coded, "NVFP4", torch.float64) @ dequantise(wq, torch.float64).T
    setting = Setting(config=TINY_V4, recipe="nvfp4-full")
    judge("attn.wq_a", coded, Weight.of(wq), exact.bfloat16(), setting=setting).require()
    assert not judge("attn.wq_a", coded, wq, OUT, setting=setting)
    swapped = replace(wq, codes=(wq.codes >> 4) | (wq.codes << 4))
    x = decode_activations(coded, "NVFP4", torch.float64)
    wrong = (x @ dequantise(swapped, torch.float64).T).bfloat16()
    found = judge("attn.wq_a", coded, wq, wrong, setting=setting)
    assert found.cause is not None, str(found)
    assert found.cause.fault.startswith("M10."), str(found)


def test_other_components_by_their_own_budgets() -> None:
    weight = 1 + 0.1 * random(TINY_V32.hidden_size)
    x = random(9, TINY_V32.hidden_size)
    normal = x.bfloat16().float()
    out = normal * torch.rsqrt(normal.square().mean(-1, keepdim=True) + TINY_V32.rms_norm_eps)
    setting = Setting(config=TINY_V32)
    made = {"out": (out * weight).bfloat16(), "residual": x.bfloat16()}
    found = judge("attn.norm", {"x": x.bfloat16()}, weight, made, setting=setting)
    assert found.outputs["out"].verdict is Verdict.AGREES, str(found)


REFUSED: list[tuple[tuple[Any, ...], str]] = [
    (("attn.wq", X, W, OUT), "component = 'attn.wq'"),
    (("attn.wq_a", X, None, OUT), "weights of layers.0.attn.wq_a"),
    (("attn.wq_a", X, {"attn.wq_b": W}, OUT), "weight of layers.0.attn.wq_a"),
    (("attn.wq_a", X, {"attn.wq_a": 3}, OUT), "weight attn.wq_a = 'int'"),
    (("attn.wq_a", {"y": X}, W, OUT), "input of layers.0.attn.wq_a"),
    (("attn.wq_a", {"x": 3}, W, OUT), "x = 'int'"),
    (("attn.wq_a", {}, W, OUT), "Add x"),
    (("attn.wq_a", X, W, {"latent": OUT}), "output of attn.wq_a"),
    (("attn.wq_a", X, W, None), "out = 'NoneType'"),
    (("attn.wq_a", X.bool(), W, OUT), "x of layers.0.attn.wq_a = 'torch.bool': expected numbers"),
    (("attn.wq_a", X[:, 1:], W, OUT), "x: numbers [tokens, 128]"),
    (("attn.wq_a", X.sum(), W, OUT), "inputs of layers.0.attn.wq_a = {'x': []}"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_does_not_fit_is_refused_by_name(case: int) -> None:
    arguments, told = REFUSED[case]
    with pytest.raises(DegarbleError) as raised:
        judge(*arguments, setting=SETTING)
    assert told in str(raised.value), str(raised.value)


def test_tokens_in_more_dimensions_are_taken() -> None:
    assert judge("attn.wq_a", X.reshape(2, 12, -1), W, OUT.reshape(2, 12, -1), setting=SETTING)
    assert judge("attn.wq_a", X[0], W, OUT[0], setting=SETTING)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_an_output_of_another_kind_is_a_finding_without_a_cause(dtype: torch.dtype) -> None:
    found = judge("attn.wq_a", X, W, OUT.to(dtype), setting=SETTING)
    assert (found.verdict, found.cause) == (Verdict.DIFFERS, None)
    assert f"dtype {dtype} in place of numbers" in str(found)


def test_a_component_needs_its_config() -> None:
    with pytest.raises(UnknownName, match="component without a config"):
        judge("attn.wq_a", X, W, OUT)
