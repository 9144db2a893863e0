"""Legal differences: each changes something, and none is a finding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.faults.model_faults import Scene, Sight, Way
from degarble.harness.engine.faults.negative_controls import (
    CONTROLS,
    WHOLE_RUN_CONTROLS,
    Control,
)
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.references.binding import Bound
from degarble.references.model.v4 import ModelV4
from degarble.references.numerics import Numerics
from degarble.references.state import Sequence
from degarble.suites.engine.planting import V4, has_effect, run, same

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

SAME = {"unread_scales"}  # nothing changes at all; others move some number


def seen_with(scene: Scene, twin: Scene, way: Way, inputs: Mapping[str, Tensor]) -> Sight:
    outputs = way.apply(scene.call)(inputs, scene.weights)
    return Sight(inputs, outputs, twin.call(inputs, twin.weights))


@pytest.mark.parametrize("family", ["v4", "v32"])
@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.id)
def test_a_control_is_within_every_budget(control: Control, family: str) -> None:
    made, moved, places = run(family), False, set()
    with torch.inference_mode():
        for name, calls in made.calls.items():
            scene, twin = made.scene(name, twin=False), made.scene(name, twin=True)
            if not control.sits(scene) or scene.role in places:
                continue
            places.add(scene.role)
            for way in control.ways(scene):
                for seen in (calls[0], calls[-1]):
                    sight = seen_with(scene, twin, way, seen.inputs)
                    assert not has_effect(twin, sight), f"{name}: {way.words}"
                    moved |= any(not same(seen.outputs[n], x) for n, x in sight.outputs.items())
    assert places or family == "v32"
    assert moved == (control.id not in SAME) or not places, "a control that changes nothing"


def logits_with(ways: Mapping[str, Way]) -> Tensor:
    """A prompt and a token in float64, with ways in front of some components."""
    made = run("v4")
    weights = made.twin.weights
    bound = Bound(V4, Numerics.definition(), weights)
    for name, way in ways.items():
        bound.calls[name] = way.apply(bound.calls[name])
    sequence, model = Sequence(), ModelV4(bound, V4)
    with torch.inference_mode():
        model.forward([sequence], [torch.arange(30) % 50])
        return model.forward([sequence], [torch.tensor([3])])


def test_a_shift_in_a_layer_of_windows_changes_nothing() -> None:
    """But in a layer with entries it does: their positions are absolute."""
    control = next(each for each in WHOLE_RUN_CONTROLS if each.id == "window_shift")
    made = run("v4")
    scenes = [made.scene(name, twin=True) for name in made.calls]
    sliding = [scene for scene in scenes if control.sits(scene)]
    assert {scene.role for scene in sliding} == {
        "attn.q_head_norm_rope", "attn.kv_norm_rope", "attn.inverse_rope",
    }  # fmt: skip
    ways = {scene.name: next(control.ways(scene)) for scene in sliding}
    plain = logits_with({})
    assert float((logits_with(ways) - plain).abs().max()) < 1e-9
    moved = {name.replace("layers.0", "layers.1"): way for name, way in ways.items()}
    assert float((logits_with(moved) - plain).abs().max()) > 1e-6


def test_streams_that_grow_are_collapsed_like_others() -> None:
    control = next(each for each in WHOLE_RUN_CONTROLS if each.id == "growth")
    made = run("v4")
    name = "layers.1.attn.hc_pre"
    scene, seen = made.scene(name, twin=True), made.calls[name][0]
    (way,) = control.ways(scene)
    own, grown = scene.call(seen.inputs, scene.weights), way.apply(scene.call)
    made_by = grown(seen.inputs, scene.weights)
    assert torch.allclose(made_by["out"].double(), own["out"].double() * 2, rtol=1e-2, atol=1e-3)
    assert torch.allclose(made_by["mix"].double(), own["mix"].double(), rtol=1e-3, atol=1e-4)


def test_controls_have_names_of_their_own() -> None:
    names = {control.id for control in (*CONTROLS, *WHOLE_RUN_CONTROLS)}
    assert len(names) == len(CONTROLS) + len(WHOLE_RUN_CONTROLS)
    assert not names & set(MODEL_FAULTS)
