"""The same code with other facts: what changes, what stays, and whose call is taken."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults import rebinding
from degarble.suites.engine.planting import run

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "layers.1.ffn.shared.act"


def test_other_facts_run_the_same_function() -> None:
    made = run("v4")
    scene, seen = made.scene(NAME, twin=True), made.calls[NAME][0]
    assert rebinding.facts_at(scene).shared_limit == 0.5
    opened = rebinding.with_facts(scene, partial(rebinding.with_config, swiglu_limit=0.0))
    call = opened(scene.call)
    facts = rebinding.facts_of(call)
    assert facts is not None
    assert facts.shared_limit is None
    assert not torch.equal(call(seen.inputs, {})["out"], scene.call(seen.inputs, {})["out"])
    assert rebinding.facts_at(scene).shared_limit == 0.5


def test_the_facts_are_those_of_the_call_that_is_wrapped() -> None:
    """The candidate's arithmetic stays the candidate's, the twin's the twin's."""
    made = run("v4")
    scene, candidate = made.scene(NAME, twin=True), made.scene(NAME, twin=False)
    call = rebinding.with_facts(scene, lambda facts: facts)(candidate.call)
    found = rebinding.facts_of(call)
    assert found is not None
    assert found.numerics == rebinding.facts_at(candidate).numerics
    assert found.numerics != rebinding.facts_at(scene).numerics


def test_a_call_without_facts_falls_to_the_scenes_own() -> None:
    scene = run("v4").scene(NAME, twin=True)

    def kernel(inputs: Mapping[str, Any], weights: Mapping[str, Any]) -> Mapping[str, Any]:
        del weights
        return inputs

    assert rebinding.facts_of(kernel) is None
    call = rebinding.with_facts(scene, lambda facts: facts)(kernel)
    assert rebinding.facts_of(call) == rebinding.facts_at(scene)


def test_unrounded_outputs_round_to_the_stored_ones() -> None:
    made = run("v4")
    name = "layers.1.attn.wo_b"
    scene, seen = made.scene(name, twin=True), made.calls[name][-1]
    fine = rebinding.with_facts(scene, rebinding.unrounded)(scene.call)
    exact = fine(seen.inputs, scene.weights)["out"]
    assert exact.dtype is torch.float64
    stored = scene.call(seen.inputs, scene.weights)["out"]
    assert torch.equal(exact.to(stored.dtype), stored)
    assert not torch.equal(exact, stored.double())


def test_another_epsilon_reaches_norms_that_have_their_own() -> None:
    scene = run("v32").scene("layers.1.attn.q_norm", twin=True)
    for own in (None, 1e-6):
        facts = rebinding.with_switches(rebinding.facts_at(scene), latent_norm_epsilon=own)
        changed = rebinding.with_epsilon(0.25, facts)
        roles = ("attn.q_norm", "attn.kv_norm", "attn.norm")
        assert {changed.norm_epsilon(role) for role in roles} == {0.25}
        assert changed.norm_epsilon("attn.indexer.k_norm") == 1e-6
