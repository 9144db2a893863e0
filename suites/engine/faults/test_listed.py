"""Attention by lists is the component's own where nothing is changed, and another where it is."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from degarble.harness.engine.faults import listed
from degarble.harness.engine.faults.rebinding import facts_at
from degarble.suites.engine.faults.planting import few_apart, run

LAYERS = ("layers.0", "layers.1", "layers.2")  # the window alone, chosen entries, all entries


@pytest.mark.parametrize("layer", LAYERS)
def test_with_nothing_changed_it_is_the_components_own(layer: str) -> None:
    made, name = run("v4"), f"{layer}.attn.attend"
    scene = made.scene(name, twin=True)
    with torch.inference_mode():
        for seen in (made.calls[name][0], made.calls[name][-1]):
            own = scene.call(seen.inputs, scene.weights)["out"]
            given = facts_at(scene), seen.inputs, scene.weights
            for attend in (listed.whole, partial(listed.in_parts, 1 << 30)):
                assert few_apart(listed.by_lists(attend, *given)["out"], own)


@pytest.mark.parametrize("layer", LAYERS)
def test_places_are_those_of_the_lists(layer: str) -> None:
    made, name = run("v4"), f"{layer}.attn.attend"
    scene, seen = made.scene(name, twin=True), made.calls[name][0]
    window = scene.bound.config.sliding_window  # type: ignore[union-attr]
    found = list(listed.lists_of(facts_at(scene), seen.inputs))
    assert [len(each.q) for each in found] == [262, 19]
    for each in found:
        near = (each.place >= 0) & (each.place < listed.FAR)
        tokens = torch.arange(len(each.q))
        assert torch.equal(near.sum(1), (tokens + 1).clamp(max=window))
        assert (each.place == window - 1).nonzero()[:, 1].tolist() == tokens.tolist()
        absent = each.absent(1)
        assert torch.equal(absent[0], (window - 1 - tokens).clamp(min=0))
        assert int(absent[1].min()) >= 0
    if layer == "layers.1":
        chosen = seen.inputs["chosen"][:262]
        far = (found[0].place >= listed.FAR).sum(1)
        assert torch.equal(far, (chosen >= 0).sum(1))
