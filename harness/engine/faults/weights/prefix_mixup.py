"""O07: a parameter is loaded under the prefix of another module.

Found in the first field report: the indexer's compressor was read from the main compressor, which
has four times as many rows, so that the first of them fit. Variants: the same module of the next
layer, and parts of one module exchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.engine.faults.decoding import numbers_of
from degarble.harness.engine.faults.weight_faults import Words, is_number, weight_fault
from degarble.harness.engine.faults.weight_regions import matrices
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from degarble.harness.engine.faults.model_faults import ModelFault, Scene
    from degarble.harness.engine.faults.weight_faults import Change, Kept, Needs


def _taken(weight: Weight, other: Weight | None) -> Weight | None:
    """Return the rows and columns of another parameter that fit, if it has enough of them."""
    if other is None or len(other.shape) != len(weight.shape):
        return None
    if any(there < here for there, here in zip(other.shape, weight.shape, strict=True)):
        return None
    value = numbers_of(other)
    for axis, extent in enumerate(weight.shape):
        value = value.narrow(axis, 0, extent)
    return Weight(value=value.contiguous(), input_scale=weight.input_scale)


def _from_main(scene: Scene, name: str, weight: Weight) -> Weight | None:
    other = scene.sibling(scene.name.replace(".indexer.", "."))
    if other is None or other.name == scene.name:
        return None
    return _taken(weight, other.weights.get(name.replace(".indexer.", ".")))


def _from_layer(step: int) -> Change:
    def change(scene: Scene, name: str, weight: Weight) -> Weight | None:
        layer = scene.component.layer
        if layer is None:
            return None
        other = scene.sibling(f"layers.{layer + step}.{scene.role}")
        return None if other is None else _taken(weight, other.weights.get(name))

    return change


def _from_partner(scene: Scene, name: str, weight: Weight) -> Weight | None:
    """Take the next part of the same module: gate for latent, up for gate."""
    stem = name.rpartition(".")[0]
    parts = [each for each in matrices(scene) if each.rpartition(".")[0] == stem]
    other = parts[(parts.index(name) + 1) % len(parts)]
    return _taken(weight, scene.weights[other]) if other != name else None


def _in_indexer(kept: Kept) -> bool:
    return ".indexer.compressor" in kept.role


def _in_layer(kept: Kept) -> bool:
    return is_number(kept) and kept.role not in {"embed", "head", "norm", "hc_head"}


def _has_partner(kept: Kept) -> bool:
    return kept.linear and kept.role.rpartition(".")[2] in {"w13", "proj"}


def _fault(variant: str, what: str, change: Change, needs: Needs) -> ModelFault:
    words = Words(
        f"O07.{variant}",
        f"A parameter is read from {what}",
        "right size, wrong numbers: scores or values mean nothing",
        "Map every parameter by its full name; a tensor that is read twice is a warning.",
        f"reading {what} in place of",
    )
    return weight_fault(words, change, needs)


MODEL_FAULTS = (
    _fault("main_compressor", "the main compressor", _from_main, _in_indexer),
    _fault("layer_before", "the layer before", _from_layer(-1), _in_layer),
    _fault("layer_behind", "the layer behind", _from_layer(1), _in_layer),
    _fault("other_part", "the other part of its module", _from_partner, _has_partner),
)
