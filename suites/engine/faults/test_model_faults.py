"""Ways wrap calls: weights, inputs and outputs are changed behind the caller, and only there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.model_faults import (
    Way,
    with_inputs,
    with_outputs,
    with_weights,
)
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Mapping

X = torch.arange(4.0)
WEIGHTS = {"a": Weight(value=torch.full((4,), 2.0)), "b": Weight(value=torch.ones(4))}


def call(inputs: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    total = sum(each.values(torch.float32) for each in weights.values())
    return {"out": inputs["x"] * total}


def doubled(name: str, weight: Weight) -> Weight:
    return Weight(value=2 * weight.values(torch.float32)) if name == "a" else weight


def test_a_weight_is_another_one_while_names_and_order_stay() -> None:
    seen: list[list[str]] = []

    def look(inputs: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
        seen.append(list(weights))
        return call(inputs, weights)

    faulty = with_weights(doubled)(look)
    assert torch.equal(faulty({"x": X}, WEIGHTS)["out"], 5 * X)
    assert seen == [["a", "b"]]
    assert torch.equal(call({"x": X}, WEIGHTS)["out"], 3 * X)


def test_inputs_and_outputs_are_changed_on_their_way() -> None:
    halved = with_inputs(lambda inputs: {"x": inputs["x"] / 2})
    assert torch.equal(halved(call)({"x": X}, WEIGHTS)["out"], 1.5 * X)
    added = with_outputs(lambda inputs, outputs: {"out": outputs["out"] + inputs["x"]})
    assert torch.equal(added(call)({"x": X}, WEIGHTS)["out"], 4 * X)


def test_an_edge_tells_what_its_consumer_receives() -> None:
    way = Way("zeros in place of x", with_inputs(lambda inputs: {"x": 0 * inputs["x"]}))
    assert torch.equal(way.passed_on({"x": X}, WEIGHTS)["x"], 0 * X)
