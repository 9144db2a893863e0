"""Gate, head and projections become ours by class, and the kernel gets what vLLM's own read."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.vllm.parts import PluginOptions
from degarble.harness.vllm.proof import StartProof

pytestmark = pytest.mark.vllm

HIDDEN, EXPERTS, WORDS = 128, 8, 24


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = import_module("degarble.harness.vllm.bound.linears")
    monkeypatch.setattr(module, "widely", product)
    monkeypatch.setattr(module, "by_bf16", lambda x, weight: product(x, weight).bfloat16())
    return module


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.float() @ weight.float().T


def bare(kind: type[torch.nn.Module], rows: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    made: Any = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    made.weight = torch.nn.Parameter(torch.randn(rows, HIDDEN).to(dtype), requires_grad=False)
    return made


def start(**said: str) -> Any:
    made = import_module("degarble.harness.vllm.bound.start").Start
    return made(PluginOptions(parts=said), StartProof("", "", "", {}, {}), "sm_90a", "x")


def rows(count: int = 3) -> torch.Tensor:
    return torch.randn(count, HIDDEN).bfloat16()


def test_a_gate_is_ours_and_stays_float32(wide: Any) -> None:
    gate, begun, x = bare(wide.GateLinear, EXPERTS), start(), rows()
    wide.adopt_gate(gate, "g", begun)
    logits, bias = gate(x)
    assert (logits.dtype, bias) == (torch.float32, None)
    assert torch.equal(logits, product(x, gate.weight))
    assert [each.part for each in begun.running] == ["gate"]


def test_a_gate_that_was_left_to_vllm_is_its_own(wide: Any) -> None:
    gate = bare(wide.GateLinear, EXPERTS)
    wide.adopt_gate(gate, "g", start(gate="vllm"))
    assert type(gate) is wide.GateLinear


def test_a_gate_in_another_dtype_is_refused(wide: Any) -> None:
    with pytest.raises(InvalidArgument, match="float32"):
        wide.adopt_gate(bare(wide.GateLinear, EXPERTS, torch.float32), "g", start())


@pytest.mark.parametrize("indexed", [True, False])
def test_projections_come_in_the_order_that_vllm_reads(wide: Any, *, indexed: bool) -> None:
    def scoring(count: int) -> Any:
        return SimpleNamespace(fused_wkv_wgate=bare(torch.nn.Module, count))

    indexer = SimpleNamespace(compressor=scoring(16), weights_proj=bare(torch.nn.Module, 8))
    layer = SimpleNamespace(compressor=scoring(32), indexer=indexer if indexed else None)
    x = rows()
    own, scores, weights = wide.projected(layer, x)
    assert torch.equal(own, product(x, layer.compressor.fused_wkv_wgate.weight))
    if not indexed:
        assert (scores, weights) == (None, None)
        return
    assert torch.equal(scores, product(x, indexer.compressor.fused_wkv_wgate.weight))
    assert (tuple(weights.shape), weights.dtype) == ((3, 8), torch.bfloat16)


def test_a_layer_without_a_compressor_projects_nothing(wide: Any) -> None:
    assert wide.projected(SimpleNamespace(compressor=None, indexer=None), rows()) == (None,) * 3


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = import_module("degarble.harness.vllm.bound.model")
    monkeypatch.setattr(module, "widely", product)
    monkeypatch.setattr(module, "normed", lambda x, weight, epsilon: x * weight[:1] * epsilon)
    monkeypatch.setattr(module, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True))
    return module


def causal(layers: Any) -> Any:
    norm = bare(layers.RMSNorm, HIDDEN)
    norm.weight = torch.nn.Parameter(torch.ones(HIDDEN).bfloat16(), requires_grad=False)
    norm.variance_epsilon = 2.0
    return SimpleNamespace(
        model=SimpleNamespace(norm=norm), logits_processor=bare(layers.LogitsProcessor, 1)
    )


def test_the_head_is_ours_and_logits_stay_float32(layers: Any) -> None:
    model, begun, x = causal(layers), start(), rows()
    layers.adopt_head(model, begun)
    assert torch.equal(model.model.norm(x), x * 2)
    head = bare(torch.nn.Module, WORDS)
    logits = model.logits_processor._apply_head(head, x, None)
    assert logits.dtype is torch.float32
    assert torch.equal(logits, product(x, head.weight))
    with pytest.raises(InvalidArgument, match="bias of the head"):
        model.logits_processor._apply_head(head, x, torch.zeros(WORDS))


def test_a_head_of_another_class_is_refused(layers: Any) -> None:
    model = causal(layers)
    model.logits_processor.__class__ = type("Other", (layers.LogitsProcessor,), {})
    with pytest.raises(InvalidArgument, match="the head = 'Other'"):
        layers.adopt_head(model, start())
    layers.adopt_head(model, start(head="vllm"))
    assert type(model.model.norm) is layers.RMSNorm


def test_a_stage_that_is_not_the_last_has_no_head(
    layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "get_pp_group", lambda: SimpleNamespace(is_last_rank=False))
    begun = start()
    layers.adopt_head(causal(layers), begun)
    assert begun.running == []
