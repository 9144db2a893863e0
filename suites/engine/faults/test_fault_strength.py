"""Dials: nothing at 0, more the farther they are turned, and named by the fault's own signature."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.engine.faults.fault_strength import DIALS
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.suites.engine.planting import reproduces, run, sights


@pytest.mark.parametrize("family", ["v4", "v32"])
@pytest.mark.parametrize("name", DIALS)
def test_a_dial_is_its_fault_at_a_strength(name: str, family: str) -> None:
    made, fault = run(family), MODEL_FAULTS[name]
    scene = made.scene(made.sitting(fault)[0], twin=False)
    lengths = []
    with torch.inference_mode():
        for strength in (0.0, 0.02, 0.2):
            way = DIALS[name](scene, strength)
            assert way is not None
            (sight,) = sights(fault, made, scene.name, way, slice(0, 1))
            plain = scene.call(sight.inputs, scene.weights)
            gaps = [
                (sight.outputs[n].double() - each.double()).norm()
                for n, each in plain.items()
                if each.dtype.itemsize > 1
            ]
            lengths.append(float(sum(gaps)))
        twin = made.scene(scene.name, twin=True)
        explained = [reproduces(twin, each, sight) for each in fault.signature(twin, sight)]
    assert lengths[0] <= lengths[1] <= lengths[2], lengths
    assert lengths[2] > lengths[0]
    assert any(explained), "its own signature does not know it"
