"""Attention by lists is the component's own where nothing is changed, and another where it is."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from degarble.harness.engine.faults import listed_attention
from degarble.harness.engine.faults.rebinding import facts_at
from degarble.suites.engine.planting import few_apart, run

LAYERS = ("layers.0", "layers.1", "layers.2")  # the window alone, chosen entries, all entries


@pytest.mark.parametrize("layer", LAYERS)
def test_with_nothing_changed_it_is_the_components_own(layer: str) -> None:
    made, name = run("v4"), f"{layer}.attn.attend"
    scene = made.scene(name, twin=True)
    with torch.inference_mode():
        for seen in (made.calls[name][0], made.calls[name][-1]):
            own = scene.call(seen.inputs, scene.weights)["out"]
            given = facts_at(scene), seen.inputs, scene.weights
            for attend in (listed_attention.whole, partial(listed_attention.in_parts, 1 << 30)):
                assert few_apart(listed_attention.by_lists(attend, *given)["out"], own)


@pytest.mark.parametrize("layer", LAYERS)
def test_places_are_those_of_the_lists(layer: str) -> None:
    made, name = run("v4"), f"{layer}.attn.attend"
    scene, seen = made.scene(name, twin=True), made.calls[name][0]
    window = scene.bound.config.sliding_window  # type: ignore[union-attr]
    found = list(listed_attention.lists_of(facts_at(scene), seen.inputs))
    assert [len(each.q) for each in found] == [262, 19]
    for each in found:
        near = (each.place >= 0) & (each.place < listed_attention.FAR)
        tokens = torch.arange(len(each.q))
        assert torch.equal(near.sum(1), (tokens + 1).clamp(max=window))
        assert (each.place == window - 1).nonzero()[:, 1].tolist() == tokens.tolist()
        absent = each.absent(1)
        assert torch.equal(absent[0], (window - 1 - tokens).clamp(min=0))
        assert int(absent[1].min()) >= 0
    if layer == "layers.1":
        chosen = seen.inputs["chosen"][:262]
        far = (found[0].place >= listed_attention.FAR).sum(1)
        assert torch.equal(far, (chosen >= 0).sum(1))


@pytest.mark.parametrize("part", [64, 192])
@pytest.mark.parametrize("layer", LAYERS)
def test_parts_are_cut_out_of_both_lists_one_behind_the_other(layer: str, part: int) -> None:
    """As the kernel has it: the window's whole tiles of 64, then the entries."""
    made, name = run("v4"), f"{layer}.attn.attend"
    scene, seen = made.scene(name, twin=True), made.calls[name][0]
    facts, sink = facts_at(scene), torch.linspace(-1.0, 1.0, scene.bound.config.num_attention_heads)
    each = next(listed_attention.lists_of(facts, seen.inputs))
    token, sink = len(each.q) - 1, sink.to(each.q.dtype)
    place, held = each.place[token].tolist(), -(-each.near // 64) * 64
    at = [p - listed_attention.FAR + held if p >= listed_attention.FAR else p for p in place]
    power, largest = torch.zeros(len(sink), len(place), dtype=sink.dtype), torch.tensor(-torch.inf)
    logit = each.q[token] @ each.rows.T * each.q.shape[-1] ** -0.5
    for begin in range(0, max(at) + 1, part):
        own = [row for row, p in enumerate(at) if begin <= p < begin + part]
        power[:, own] = torch.exp(logit[:, own] - logit[:, own].amax(1, keepdim=True))
        largest = torch.maximum(largest, logit[:, own].amax(1))
    total = power.sum(1) + torch.exp(sink - largest)
    expected = power.to(facts.numerics.store).to(sink.dtype) @ each.rows / total[:, None]
    with torch.inference_mode():
        got = listed_attention.in_parts(part, facts, each, sink)[token]
    assert torch.allclose(got, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))
