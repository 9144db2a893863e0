"""Router and activation become ours by class, and hand the kernels what vLLM's own read."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from degarble.harness.vllm.parts import PluginOptions
from degarble.harness.vllm.proof import StartProof

pytestmark = pytest.mark.vllm

MODULE = "model.layers.0.ffn"


@pytest.fixture
def module() -> Any:
    return import_module("degarble.harness.vllm.bound.experts")


def block(module: Any) -> Any:
    router = module.FusedTopKBiasRouter(
        2, 4, torch.zeros(4), routed_scaling_factor=1.5, scoring_func="sqrtsoftplus"
    )
    act = module.SiluAndMulWithClamp.__new__(module.SiluAndMulWithClamp)
    torch.nn.Module.__init__(act)
    act.swiglu_limit = 10.0
    gate = SimpleNamespace(weight=torch.zeros(1))  # of another class: it stays vLLM's
    return SimpleNamespace(
        gate=gate,
        experts=SimpleNamespace(router=router),
        shared_experts=SimpleNamespace(act_fn=act),
    )


def start(**said: str) -> Any:
    made = import_module("degarble.harness.vllm.bound.start").Start
    return made(PluginOptions(parts=said), StartProof("", "", "", {}, {}), "sm_90a", "x")


def test_adopted_both_call_our_kernels(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ffn, begun = block(module), start()
    module.adopt_block(ffn, MODULE, begun)
    assert [(each.module, each.part, each.by) for each in begun.running] == [
        (f"{MODULE}.gate", "gate", "vllm"),
        (f"{MODULE}.gate", "router", "degarble"),
        (f"{MODULE}.shared_experts", "act", "degarble"),
    ]
    seen: list[Any] = []

    def routed(router: Any, logits: Any, source: Any, ids: Any) -> Any:
        seen.extend((router.top_k, logits, source, ids))
        return torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int32)

    monkeypatch.setattr(module, "routed", routed)
    monkeypatch.setattr(module, "activated", lambda x, limit: x[..., ::2] * limit)
    logits = torch.randn(3, 4)
    weights, experts = ffn.experts.router._compute_routing(None, logits, torch.int64)
    assert (seen[0], seen[1] is logits, seen[2].shape, seen[3]) == (2, True, (4,), None)
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int64)
    assert torch.equal(ffn.shared_experts.act_fn(torch.ones(3, 4)), torch.full((3, 2), 10.0))


def test_what_has_another_class_stays_vllms_and_the_log_says_so(module: Any) -> None:
    ffn, begun = block(module), start()
    ffn.experts.router, ffn.shared_experts.act_fn = SimpleNamespace(), SimpleNamespace()
    module.adopt_block(ffn, MODULE, begun)
    assert [(each.part, each.by, each.tactic) for each in begun.running] == [
        (part, "vllm", "SimpleNamespace is not on record") for part in ("gate", "router", "act")
    ]
    ffn.shared_experts = None
    module.adopt_block(ffn, MODULE, begun)


def test_a_table_is_indexed_by_token_ids(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ffn = block(module)
    seen: dict[str, Any] = {}
    module.adopt_block(ffn, MODULE, start())
    router = ffn.experts.router
    router._hash_indices_table = torch.nn.Parameter(
        torch.zeros(8, 2, dtype=torch.int32), requires_grad=False
    )

    def routed(_: Any, __: Any, source: Any, ids: Any) -> Any:
        seen.update(source=source, ids=ids)
        return torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int32)

    monkeypatch.setattr(module, "routed", routed)
    ids = torch.tensor([5, 6, 7])
    router._compute_routing(None, torch.randn(3, 4), None, input_ids=ids)
    assert seen["source"].shape == (8, 2)
    assert seen["ids"] is ids


def test_they_stay_vllms_where_requested(module: Any) -> None:
    ffn, begun = block(module), start(router="vllm", act="vllm")
    module.adopt_block(ffn, MODULE, begun)
    assert type(ffn.experts.router) is module.FusedTopKBiasRouter
    assert type(ffn.shared_experts.act_fn) is module.SiluAndMulWithClamp
    assert {each.by for each in begun.running} == {"vllm"}
