"""The attention and the rotation that faults are made of equal the components' own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from degarble.harness.engine.faults import attention
from degarble.harness.engine.faults.model_faults import (
    facts_at,
    function_at,
    with_config,
    with_switches,
)
from degarble.harness.engine.faults.rope import (
    ROTATING,
    changed,
    rope_variant_of,
    rotate,
    shift_between,
    turned,
)
from degarble.references.numerics import HeadNorm
from degarble.suites.engine.planting import few_apart, run, same

# --------------------------------------------------------------------------------------------------
# Attention by lists is the component's own where nothing is changed, and another where it is.

LAYERS = ("layers.0", "layers.1", "layers.2")  # the window alone, chosen entries, all entries


@pytest.mark.parametrize("layer", LAYERS)
def test_with_nothing_changed_it_is_the_components_own(layer: str) -> None:
    made, name = run("v4"), f"{layer}.attn.attend"
    context = made.scene(name, twin=True)
    with torch.inference_mode():
        for seen in (made.calls[name][0], made.calls[name][-1]):
            own = context.call(seen.inputs, context.weights)["out"]
            given = facts_at(context), seen.inputs, context.weights
            for attend in (attention.whole, partial(attention.in_parts, 1 << 30)):
                assert few_apart(attention.by_lists(attend, *given)["out"], own)


@pytest.mark.parametrize("layer", LAYERS)
def test_places_are_those_of_the_lists(layer: str) -> None:
    made, name = run("v4"), f"{layer}.attn.attend"
    context, seen = made.scene(name, twin=True), made.calls[name][0]
    window = context.bound.config.sliding_window
    attentions = list(attention.lists_of(facts_at(context), seen.inputs))
    assert [len(each.q) for each in attentions] == [262, 19]
    for listed_attention in attentions:
        near = (listed_attention.place >= 0) & (listed_attention.place < attention.FAR)
        tokens = torch.arange(len(listed_attention.q))
        assert torch.equal(near.sum(1), (tokens + 1).clamp(max=window))
        assert (listed_attention.place == window - 1).nonzero()[:, 1].tolist() == tokens.tolist()
        absent = listed_attention.absent(1)
        assert torch.equal(absent[0], (window - 1 - tokens).clamp(min=0))
        assert int(absent[1].min()) >= 0
    if layer == "layers.1":
        chosen = seen.inputs["chosen"][:262]
        far = (attentions[0].place >= attention.FAR).sum(1)
        assert torch.equal(far, (chosen >= 0).sum(1))


@pytest.mark.parametrize("part", [64, 192])
@pytest.mark.parametrize("layer", LAYERS)
def test_parts_are_cut_out_of_both_lists_one_after_the_other(layer: str, part: int) -> None:
    """As the kernel has it: the window's whole tiles of 64, then the entries."""
    made, name = run("v4"), f"{layer}.attn.attend"
    context, seen = made.scene(name, twin=True), made.calls[name][0]
    facts, sink = (
        facts_at(context),
        torch.linspace(-1.0, 1.0, context.bound.config.num_attention_heads),
    )
    listed_attention = next(attention.lists_of(facts, seen.inputs))
    token, sink = len(listed_attention.q) - 1, sink.to(listed_attention.q.dtype)
    place, held = listed_attention.place[token].tolist(), -(-listed_attention.near // 64) * 64
    at = [p - attention.FAR + held if p >= attention.FAR else p for p in place]
    power, largest = torch.zeros(len(sink), len(place), dtype=sink.dtype), torch.tensor(-torch.inf)
    logit = (
        listed_attention.q[token] @ listed_attention.rows.T * listed_attention.q.shape[-1] ** -0.5
    )
    for begin in range(0, max(at) + 1, part):
        own = [row for row, p in enumerate(at) if begin <= p < begin + part]
        power[:, own] = torch.exp(logit[:, own] - logit[:, own].amax(1, keepdim=True))
        largest = torch.maximum(largest, logit[:, own].amax(1))
    total = power.sum(1) + torch.exp(sink - largest)
    expected = (
        power.to(facts.numerics.store).to(sink.dtype) @ listed_attention.rows / total[:, None]
    )
    with torch.inference_mode():
        got = attention.in_parts(part, facts, listed_attention, sink)[token]
    assert torch.allclose(got, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))


# --------------------------------------------------------------------------------------------------
# The healthy rotation done through the one function for all is each component's, bit by bit.


@pytest.mark.parametrize("family", ["v4", "v32"])
@pytest.mark.parametrize("factor", [None, 1.3])
def test_the_healthy_rotation_is_the_components_own(family: str, factor: float | None) -> None:
    made, roles = run(family), set()
    for name, calls in made.calls.items():
        context = made.scene(name, twin=True)
        if context.role not in ROTATING:
            continue
        roles.add(context.role)
        facts, call = facts_at(context), context.call
        if factor is not None:  # YaRN that scales what it turns
            yarn = replace(facts.config.yarn, attention_factor=factor)
            facts = with_config(facts, yarn=yarn)
            call = partial(function_at(context), facts)
        turn = rope_variant_of(facts, context.role)
        for seen in (calls[0], calls[-1]):
            with torch.inference_mode():
                own = call(seen.inputs, context.weights)
                ours = turned(
                    facts, context.role, seen.inputs, context.weights,
                    lambda x, at: rotate(x, at, turn, facts.numerics),  # noqa: B023  used here
                )  # fmt: skip
            assert all(same(ours[key], own[key]) for key in own), name
    assert len(roles) == {"v4": 6, "v32": 3}[family]


@pytest.mark.parametrize("role", ["q_head_norm_rope", "kv_norm_rope"])
def test_what_a_norm_stores_is_stored_where_queries_are_not(role: str) -> None:
    """The kernels' own convention: queries are rounded once, behind their rotation."""
    made, name = run("v4"), f"layers.1.attn.{role}"
    context, seen = made.scene(name, twin=True), made.calls[name][0]
    facts = with_switches(facts_at(context), head_norm=HeadNorm.ONCE)
    turn = rope_variant_of(facts, context.role)
    with torch.inference_mode():
        own = function_at(context)(facts, seen.inputs, context.weights)["out"]
        ours = turned(
            facts, context.role, seen.inputs, context.weights,
            lambda x, at: rotate(x, at, turn, facts.numerics),
        )["out"]  # fmt: skip
    assert same(ours, own)


@pytest.mark.parametrize("shift", [1, -3, 100, -4000])
def test_a_shift_is_read_off_rotated_values(shift: int) -> None:
    made = run("v4")
    name = "layers.1.attn.kv_norm_rope"
    context, seen = made.scene(name, twin=True), made.calls[name][0]
    facts = facts_at(context)
    turn = rope_variant_of(facts, context.role)
    outs = [
        turned(
            facts, context.role, seen.inputs, context.weights,
            lambda x, at, how=variant: rotate(x, at, how, facts.numerics),  # type: ignore[misc]
        )["out"]
        for variant in (changed(turn, shift=shift), turn)
    ]  # fmt: skip
    assert shift_between(outs[0], outs[1], turn, 4096) == shift
    assert shift_between(outs[1], outs[1], turn, 4096) is None
    assert shift_between(torch.randn_like(outs[1].float()), outs[1], turn, 4096) is None
