"""Planted faults take vLLM's own methods, and do to them what they say."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from degarble.harness.vllm.engine import plants

pytestmark = pytest.mark.vllm


def kept(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, method: str
) -> tuple[Any, list[Any]]:
    """Stand in for a method of vLLM's that a plant wraps; it tells what reached it."""
    kind, seen = getattr(import_module(module), name), []

    def own(_self: Any, *given: Any, **named: Any) -> bool:
        seen.append((given, named))
        return True

    assert callable(getattr(kind, method))
    own.__module__ = module
    monkeypatch.setattr(kind, method, own)
    return kind, seen


def test_gate_and_up_are_swapped_in_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, seen = kept(monkeypatch, plants.LINEAR, "MergedColumnParallelLinear", "weight_loader_v2")
    plants.gate_and_up_swapped()
    plants.gate_and_up_swapped()  # vLLM calls a plugin more than once
    for layer, shard in ((1, 0), (1, 1), (2, 0)):
        module = SimpleNamespace(prefix=f"model.layers.{layer}.ffn.shared_experts.gate_up_proj")
        kind.weight_loader_v2(module, "param", "weight", shard)
    assert [given[2] for given, _ in seen] == [1, 0, 0]


def test_ranks_are_turned_in_one_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = import_module(plants.LINEAR).ColumnParallelLinear
    taken: list[int] = []

    def own(_self: Any, param: Any, _weight: Any) -> None:
        taken.append(param.tp_rank)

    assert callable(kind.weight_loader_v2)
    own.__module__ = plants.LINEAR
    monkeypatch.setattr(kind, "weight_loader_v2", own)
    plants.ranks_turned()
    plants.ranks_turned()
    param = SimpleNamespace(tp_rank=0, tp_size=2)
    for name in ("layers.1.attn.wq_b", "layers.1.attn.indexer.wq_b", "layers.2.attn.wq_b"):
        kind.weight_loader_v2(SimpleNamespace(prefix=f"model.{name}"), param, "weight")
    assert taken == [1, 0, 0]
    assert param.tp_rank == 0


def test_second_matrices_are_exchanged_in_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, seen = kept(monkeypatch, plants.EXPERTS, "RoutedExperts", "weight_loader")
    plants.w2_exchanged()
    plants.w2_exchanged()
    for layer, shard, expert in (
        (2, "w2", 3),
        (2, "w2", 5),
        (2, "w1", 3),
        (1, "w2", 3),
        (2, "w2", 0),
    ):
        name = f"layers.{layer}.ffn.experts.routed_experts.{shard}_weight"
        made = kind.weight_loader(
            None, "param", "weight", name, shard_id=shard, expert_id=expert, return_success=True
        )
        assert made is True
    assert [given[4] for given, _ in seen] == [5, 3, 3, 3, 0]
    assert all(named == {"return_success": True} for _, named in seen)
