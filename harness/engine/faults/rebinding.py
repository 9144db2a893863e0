"""Run a reference component with other facts: another base, no clamp, other rounding.

A bound call of a reference consists of a function and its facts; these wrappers replace either. A
call that is no reference (a user's kernel) has no facts; a way that needs them starts from the
scene's own call. If several ways are combined, those that change facts have to be applied first,
because a wrapped call hides its facts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.model.config.config import V4Config
from degarble.references.components import v4 as components_v4
from degarble.references.components import v32 as components_v32
from degarble.references.facts import Facts, V4Facts, V32Facts
from degarble.references.linears import BLOCK_SCALE, CODES, TENSOR_SCALE, X, activation_values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.engine.faults.model_faults import Scene

    Inputs = Mapping[str, Tensor]
    Weights = Mapping[str, Any]
    Function = Callable[[Any, Inputs, Weights], Mapping[str, Tensor]]

_CODED = {CODES, BLOCK_SCALE, TENSOR_SCALE}


def is_v4(scene: Scene) -> bool:
    """Return whether the model is a V4."""
    return isinstance(scene.bound.config, V4Config)


def facts_of(call: ComponentCall) -> Facts | None:
    """Return the facts that a reference's call is bound to; None for any other call."""
    if isinstance(call, partial) and call.args and isinstance(call.args[0], Facts):
        found: Facts = call.args[0]
        return found
    return None


def has_facts(scene: Scene) -> bool:
    """Return whether the scene's call is a reference."""
    return facts_of(scene.call) is not None


def facts_at(scene: Scene) -> Any:
    """Return the facts at a scene whose call is a reference."""
    found = facts_of(scene.call)
    assert found is not None, "asked only where has_facts"
    return found


def with_facts(scene: Scene, change: Callable[[Any], Facts]) -> Callable[..., ComponentCall]:
    """Run the same function with other facts."""

    def apply(call: ComponentCall) -> ComponentCall:
        own = call if facts_of(call) is not None else scene.call
        assert isinstance(own, partial), "asked only where has_facts"
        return partial(own.func, change(own.args[0]))

    return apply


def with_function(scene: Scene, function: Function) -> Callable[..., ComponentCall]:
    """Run another function with the same facts; it may call the component's own."""

    def apply(call: ComponentCall) -> ComponentCall:
        own = facts_of(call) or facts_of(scene.call)
        return partial(function, own)

    return apply


def function_at(scene: Scene) -> Function:
    """Return the reference function of a scene."""
    assert isinstance(scene.call, partial), "asked only where has_facts"
    found: Function = scene.call.func
    return found


def with_config(facts: Any, **changes: Any) -> Any:
    """Return the same facts with another config."""
    return replace(facts, config=replace(facts.config, **changes))


def with_epsilon(epsilon: float, facts: Any) -> Any:
    """Return the same facts with another epsilon in every RMSNorm."""
    if facts.numerics.switches.latent_norm_epsilon is not None:
        facts = with_switches(facts, latent_norm_epsilon=epsilon)
    return with_config(facts, rms_norm_eps=epsilon)


def with_numerics(facts: Any, **changes: Any) -> Any:
    """Return the same facts with other fields of Numerics."""
    return replace(facts, numerics=replace(facts.numerics, **changes))


def with_switches(facts: Any, **changes: Any) -> Any:
    """Return the same facts with other switches, where correct implementations disagree."""
    return replace(facts, numerics=facts.numerics.with_switches(**changes))


def unrounded(facts: Any) -> Any:
    """Return the same facts without the rounding of stored values."""
    return with_numerics(facts, store=facts.numerics.products)


def unrounded_output(facts: Any) -> Any:
    """Return the same facts without output rounding; attention's intermediates are rounded."""
    within = facts.numerics.on_the_way.store
    return with_numerics(facts, store=facts.numerics.products, within=within)


def with_x(scene: Scene, change: Callable[[Tensor], Tensor]) -> Callable[..., ComponentCall]:
    """Run a product on another input [..., G, K], given as decoded values; G groups, mostly 1.

    Zeroing part of the input removes it from the sum, far more cheaply than changing a weight.
    """

    def apply(call: ComponentCall) -> ComponentCall:
        facts = facts_of(call) or facts_of(scene.call)

        def faulty(inputs: Inputs, weights: Weights) -> Mapping[str, Tensor]:
            return call(decoded(facts, inputs, weights, change), weights)

        return faulty

    return apply


def decoded(
    facts: Any, inputs: Inputs, weights: Weights, change: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return the inputs of a product with a changed `x` in place of codes."""
    name = next(iter(weights))
    form = facts.activation(name) if facts is not None else None
    dtype = torch.float64 if facts is None else facts.numerics.products
    x = activation_values(inputs, form, dtype)
    width = max(weight.shape[1] for weight in weights.values() if weight.shape)
    made = change(x.reshape(*x.shape[:-1], -1, width))
    parts = {name: each for name, each in inputs.items() if name not in _CODED}
    return {**parts, X: made.reshape(*x.shape[:-1], -1).to(x.dtype)}


def block_function(facts: Any, role: str) -> Function:
    """Return the reference function of a role in this family."""
    family: Any = components_v4 if isinstance(facts, V4Facts) else components_v32
    assert isinstance(facts, V4Facts | V32Facts), "there are two families"
    found: Function = family.BLOCK[role]
    return found
