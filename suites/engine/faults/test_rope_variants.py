"""The healthy rotation done through the one function for all is each component's, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from degarble.harness.engine.faults.rebinding import (
    facts_at,
    function_at,
    with_config,
    with_switches,
)
from degarble.harness.engine.faults.rope_variants import (
    ROTATING,
    changed,
    rotate,
    shift_between,
    turn_of,
    turned,
)
from degarble.references.numerics import HeadNorm
from degarble.suites.engine.planting import run, same


@pytest.mark.parametrize("family", ["v4", "v32"])
@pytest.mark.parametrize("factor", [None, 1.3])
def test_the_healthy_rotation_is_the_components_own(family: str, factor: float | None) -> None:
    made, roles = run(family), set()
    for name, calls in made.calls.items():
        scene = made.scene(name, twin=True)
        if scene.role not in ROTATING:
            continue
        roles.add(scene.role)
        facts, call = facts_at(scene), scene.call
        if factor is not None:  # YaRN that scales what it turns
            yarn = replace(facts.config.yarn, attention_factor=factor)
            facts = with_config(facts, yarn=yarn)
            call = partial(function_at(scene), facts)
        turn = turn_of(facts, scene.role)
        for seen in (calls[0], calls[-1]):
            with torch.inference_mode():
                own = call(seen.inputs, scene.weights)
                ours = turned(
                    facts, scene.role, seen.inputs, scene.weights,
                    lambda x, at: rotate(x, at, turn, facts.numerics),  # noqa: B023  used here
                )  # fmt: skip
            assert all(same(ours[key], own[key]) for key in own), name
    assert len(roles) == {"v4": 6, "v32": 3}[family]


@pytest.mark.parametrize("role", ["q_head_norm_rope", "kv_norm_rope"])
def test_what_a_norm_stores_is_stored_where_queries_are_not(role: str) -> None:
    """The kernels' own convention: queries are rounded once, behind their rotation."""
    made, name = run("v4"), f"layers.1.attn.{role}"
    scene, seen = made.scene(name, twin=True), made.calls[name][0]
    facts = with_switches(facts_at(scene), head_norm=HeadNorm.ONCE)
    turn = turn_of(facts, scene.role)
    with torch.inference_mode():
        own = function_at(scene)(facts, seen.inputs, scene.weights)["out"]
        ours = turned(
            facts, scene.role, seen.inputs, scene.weights,
            lambda x, at: rotate(x, at, turn, facts.numerics),
        )["out"]  # fmt: skip
    assert same(ours, own)


@pytest.mark.parametrize("shift", [1, -3, 100, -4000])
def test_a_shift_is_read_off_rotated_values(shift: int) -> None:
    made = run("v4")
    name = "layers.1.attn.kv_norm_rope"
    scene, seen = made.scene(name, twin=True), made.calls[name][0]
    facts = facts_at(scene)
    turn = turn_of(facts, scene.role)
    outs = [
        turned(
            facts, scene.role, seen.inputs, scene.weights,
            lambda x, at, how=each: rotate(x, at, how, facts.numerics),  # type: ignore[misc]
        )["out"]
        for each in (changed(turn, shift=shift), turn)
    ]  # fmt: skip
    assert shift_between(outs[0], outs[1], turn, 4096) == shift
    assert shift_between(outs[1], outs[1], turn, 4096) is None
    assert shift_between(torch.randn_like(outs[1].float()), outs[1], turn, 4096) is None
