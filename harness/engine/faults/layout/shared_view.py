"""M12: one layer's cache view is used for all layers.

A view by absolute offset ignores the layer, so that all layers read the rows of the first one, or a
page table is off by one layer (ATOM issue 1466). Rows have the right shape and the right tokens,
and every component replays clean. The fault is recognised by comparing the received rows with those
that the same component of other layers received in the same step.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.memory.cache_pages import CACHES, caches
from degarble.harness.engine.faults.memory.stale_memory import differs
from degarble.harness.engine.faults.model_faults import ModelFault, Reach, Way, with_inputs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene, Sight

    Tensors = Mapping[str, Tensor]

_ROLES = ("attn.attend", "attn.indexer.scores")


def _lower(scene: Scene) -> list[int]:
    """Yield the layers of the same kind before this one, the nearest first."""
    block = scene.component.block
    found = []
    for layer in reversed(range(scene.component.layer or 0)):
        other = scene.sibling(f"layers.{layer}.{scene.role}")
        if other is None or other.component.block is None or block is None:
            continue
        kinds = [(each.layer_type, each.ratio) for each in (block, other.component.block)]
        if kinds[0] == kinds[1]:
            found.append(layer)
    return found


def _names(scene: Scene) -> list[str]:
    """Return the inputs that are cache rows, new and older ones."""
    return [name for new in caches(scene) for name in (new, CACHES[new])]


def _told(layer: int) -> str:
    return f"rows of layer {layer}'s cache"


def _taken(held: Tensors, inputs: Tensors) -> Tensors:
    """Replace inputs by another layer's rows where the shapes match."""
    fitting = {
        name: each.to(inputs[name].dtype)
        for name, each in held.items()
        if name in inputs and inputs[name].shape == each.shape
    }
    return {**inputs, **fitting}


def _ways(scene: Scene) -> Iterator[Way]:
    layers, names = _lower(scene), _names(scene)
    for layer in dict.fromkeys((*layers[:1], *layers[-1:])):
        held: dict[str, Tensor] = {}

        def spied(call: Any, held: dict[str, Tensor] = held) -> Any:
            def watching(inputs: Tensors, weights: Mapping[str, Any]) -> Any:
                held.clear()
                held.update({name: inputs[name] for name in names if name in inputs})
                return call(inputs, weights)

            return watching

        beside = {f"layers.{layer}.{scene.role}": spied}
        change = with_inputs(partial(_taken, held))
        yield Way(_told(layer), change, {"layer": layer}, beside)


def _signature(scene: Scene, sight: Sight) -> Iterator[Way]:
    names = _names(scene)
    if not any(differs(sight, name) for name in names):
        return
    for layer, given in sight.elsewhere.items():
        held = {name: given[name] for name in names if name in given}
        if any(_equal(held[name], sight.inputs.get(name)) for name in held):
            yield Way(_told(layer), with_inputs(partial(_taken, held)), {"layer": layer})


def _equal(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one, other.to(one.dtype))


MODEL_FAULTS = (
    ModelFault(
        id="M12.layer_view",
        title="A layer reads the rows of another layer's cache",
        effect="attention sees the right tokens as another layer keeps them",
        remedy="Put the layer into the offset of every view; no two views may share memory.",
        sits=lambda scene: scene.role in _ROLES and bool(caches(scene)) and bool(_lower(scene)),
        ways=_ways,
        signature=_signature,
        reach=Reach.EDGE,
        per_call=True,
    ),
)
