"""An epsilon that is none of the known ones is read off the roundings of an output."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.engine.faults.layout.fused_operands import epsilon_way
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.suites.engine.planting import reproduces, run, sights


@pytest.mark.parametrize("epsilon", [0.00164, 0.0353])
@pytest.mark.parametrize("role", ["attn.q_norm", "attn.norm", "attn.kv_norm_rope"])
def test_an_epsilon_is_fitted(role: str, epsilon: float) -> None:
    made, fault, name = run("v4"), MODEL_FAULTS["M24.epsilon"], f"layers.1.{role}"
    way = epsilon_way(made.scene(name, twin=False), epsilon)
    twin = made.scene(name, twin=True)
    with torch.inference_mode():
        sight = sights(fault, made, name, way, slice(0, 1))[0]
        fitted = [each for each in fault.signature(twin, sight) if "epsilon" in each.where]
        assert any(reproduces(twin, each, sight) for each in fitted)
    nearest = min(abs(float(each.where["epsilon"]) / epsilon - 1) for each in fitted)
    assert nearest < 2e-3
