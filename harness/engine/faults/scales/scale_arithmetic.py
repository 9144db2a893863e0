"""M12: the address of scales or codes is computed wrongly: offsets, strides, shared views.

An expert's offset without rounding up to 128 rows, a view of the first layer for all layers, a
strided row read as dense, a scale column off by one (flashinfer issue 4044, vllm issues 42984 and
56248, ATOM issue 1466). The first expert, layer, row or column is exact; later ones are not.

Shape letters: E experts, R and C block scales along rows and columns.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from degarble.harness.engine.faults.activation_regions import differing, likeness, wrong_slots
from degarble.harness.engine.faults.decoding import scale_numbers, with_scales
from degarble.harness.engine.faults.model_faults import (
    ChangedWeights,
    ModelFault,
    Way,
)
from degarble.harness.engine.faults.weight_faults import (
    Words,
    has_codes,
    has_scale_bytes,
    kept,
    of_scales,
    weight_fault,
)
from degarble.harness.engine.faults.weight_regions import expert_of
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.engine.faults.model_faults import Scene, Sight
    from degarble.harness.engine.faults.weight_faults import Change, Kept
    from degarble.harness.formats.quantise import QuantisedTensor

_ALIKE = 0.2  # cosine of outputs of which parts have another scale
_FEW = 0.02  # of numbers that differ
_PART = 64  # rows of gate in a tile that holds gate and up
_TILE = 128  # rows to which every expert's scales are padded
_REMEDY = "Take strides and offsets from the tensor, and pad every expert on its own."


def _with_scales_of(weight: Weight, scales: Tensor) -> Weight | None:
    if not weight.is_quantised or scale_numbers(weight.quantised()).shape != scales.shape:
        return None
    value = with_scales(weight.quantised(), scales)
    return Weight(value=value, input_scale=weight.input_scale)


def _of_expert(scene: Scene, name: str, number: int) -> Weight | None:
    stem, _, rest = name.partition(".experts.")
    other = f"{stem}.experts.{number}.{rest.partition('.')[2]}"
    return scene.weights.get(other)


def _unrounded_offset(scene: Scene, name: str, weight: Weight) -> Weight | None:
    """Read scales from row e * R on, though every expert begins at a multiple of 128."""
    number = expert_of(name)
    if number < 0 or not weight.is_quantised:
        return None
    own = scale_numbers(weight.quantised())
    rows = own.shape[-2]
    padded = -(-rows // _TILE) * _TILE
    begin = number * rows
    found = []
    for row in range(begin, begin + rows):
        holder = _of_expert(scene, name, row // padded)
        if holder is None or row % padded >= rows:
            found.append(torch.zeros_like(own[0]))
        else:
            found.append(_scales(holder)[row % padded])
    return _with_scales_of(weight, torch.stack(found))


def _scales(weight: Weight) -> Tensor:
    return scale_numbers(weight.quantised())


def _previous_expert(scene: Scene, name: str, weight: Weight) -> Weight | None:
    holder = _of_expert(scene, name, expert_of(name) - 1)
    return None if holder is None else _with_scales_of(weight, _scales(holder))


def _first_layer(scene: Scene, name: str, weight: Weight) -> Weight | None:
    """Return the scales of the first layer that has such a weight."""
    for layer in range(scene.component.layer or 0):
        other = scene.sibling(f"layers.{layer}.{scene.role}")
        if other is not None and name in other.weights:
            holder = other.weights[name]
            return _with_scales_of(weight, _scales(holder)) if holder.is_quantised else None
    return None


def _dense_rows(_scene: Scene, _name: str, weight: Weight) -> Weight | None:
    """Read rows that are one block apart as if they were contiguous."""
    if weight.codes is None or weight.storage is None or weight.codes.ndim != 2:
        return None
    codes = weight.codes
    gap = 8 if weight.storage.format.packed else 16
    stored = torch.nn.functional.pad(codes, (0, gap)).flatten()[: codes.numel()]
    return replace(weight, codes=stored.reshape(codes.shape).contiguous(), _decoded={})


def _visited_before(call: ComponentCall) -> ComponentCall:
    """Combine an expert's codes with the scales of the previous expert that the call visits."""

    def faulty(inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Mapping[str, Tensor]:
        visited = [number for number in inputs["experts"].unique().tolist() if number >= 0]
        before = dict(pairwise(reversed(visited)))

        def changed(name: str, weight: Weight) -> Weight:
            number = before.get(expert_of(name))
            if number is None:
                return weight
            holder = weights[name.replace(f".{expert_of(name)}.", f".{number}.")]
            return _with_scales_of(weight, _scales(holder)) or weight

        return call(inputs, ChangedWeights(weights, changed))

    return faulty


def _visited_ways(scene: Scene) -> Iterator[Way]:
    words = f"the scales of the visited expert before on {scene.name}"
    yield Way(words, _visited_before, whole=True)


def _visited_signature(scene: Scene, sight: Sight) -> Iterator[Way]:
    """Propose if outputs resemble the expected ones and the first expert is mostly right."""
    wrong, experts = wrong_slots(sight), sight.inputs["experts"]
    if wrong is None or not bool(wrong.any()) or likeness(sight) < _ALIKE:
        return
    if float(wrong[experts == experts[experts >= 0].min()].double().mean()) < 0.5:
        yield from _visited_ways(scene)


def _up_offset(part: int) -> Change:
    """Look up's scales up `part` rows after gate's, though tiles of 128 rows alternate."""

    def change(scene: Scene, name: str, weight: Weight) -> Weight | None:
        stem, _, which = name.rpartition(".")
        gate = scene.weights.get(f"{stem}.w1")
        if which != "w3" or gate is None or not weight.is_quantised or not gate.is_quantised:
            return None
        of_gate, own = _scales(gate), _scales(weight)
        if own.ndim != 2 or of_gate.shape != own.shape:
            return None
        height = -(-len(own) // _TILE) * _TILE
        of_gate, of_up = (pad(each, (0, 0, 0, height - len(own))) for each in (of_gate, own))
        row = torch.arange(len(own))
        tile, within = row // _TILE * _TILE, row % _TILE // part * part + part + row % part
        near = of_gate[tile + within.clamp(max=_TILE - 1)]
        far = of_up[tile + (within - _TILE).clamp(min=0)]
        return _with_scales_of(weight, torch.where((within < _TILE)[:, None], near, far))

    return change


def _of_up() -> ModelFault:
    fault = weight_fault(
        Words(
            "M12.up_offset",
            "Scales of up are read behind a tile of gate that is not filled up to 128 rows",
            "up is scaled by gate's numbers or by padding; gate is exact",
            _REMEDY,
            f"the scales behind {_PART} rows of gate on",
        ),
        _up_offset(_PART),
        lambda kept: has_scale_bytes(kept) and kept.name.endswith(".w3"),
    )

    def signature(scene: Scene, sight: Sight) -> Iterator[Way]:
        """Propose if nearly all of gate is right."""
        mask = differing(sight)
        if mask is None or float(mask[:, : mask.shape[1] // 2].double().mean()) < _FEW:
            yield from fault.signature(scene, sight)

    return replace(fault, signature=signature)


def _step_before(call: ComponentCall) -> ComponentCall:
    """Use both operands' scales of the previous step of K; the first step has its own."""

    def delayed(scales: Tensor) -> Tensor:
        return torch.cat((scales[..., :1], scales[..., :-1]), dim=-1)

    def changed(_name: str, weight: Weight) -> Weight:
        if not weight.is_quantised:
            return weight
        return _with_scales_of(weight, delayed(_scales(weight))) or weight

    def faulty(inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Mapping[str, Tensor]:
        if "block_scale" not in inputs:  # with some switches a linear gets plain numbers
            return call(inputs, weights)
        given = {**inputs, "block_scale": delayed(inputs["block_scale"])}
        return call(given, ChangedWeights(weights, changed))

    return faulty


def _step_ways(scene: Scene) -> Iterator[Way]:
    yield Way(f"scales of the step of K before on {scene.name}", _step_before)


def _step_signature(scene: Scene, sight: Sight) -> Iterator[Way]:
    if "out" not in sight.outputs or likeness(sight) > _ALIKE:
        yield from _step_ways(scene)


def _reads_codes(scene: Scene) -> bool:
    coded = any(each.name == "codes" for each in scene.component.inputs)
    return coded and any(map(has_codes, kept(scene)))


def _column_off(_tensor: QuantisedTensor, scales: Tensor) -> Tensor:
    return scales.roll(-1, -1)


def _row_off(_tensor: QuantisedTensor, scales: Tensor) -> Tensor:
    return scales.roll(-1, -2)


def _takes_slots(scene: Scene) -> bool:
    return any(each.name == "experts" for each in scene.component.inputs)


def _routed(kept: Kept) -> bool:
    return has_codes(kept) and kept.routed


def _fault(
    variant: str, title: str, doing: str, change: Change, *, routed: bool, moves: bool = False
) -> ModelFault:
    words = Words(f"M12.{variant}", title, "exact at first, wrong behind it", _REMEDY, doing)
    return weight_fault(words, change, _routed if routed else has_codes, moves=moves)


MODEL_FAULTS = (
    _fault(
        "expert_offset",
        "Scales of an expert are read from an offset that is not rounded up to 128 rows",
        "expert offsets without rounding up to 128 rows on",
        _unrounded_offset,
        routed=True,
    ),
    _fault(
        "previous_expert",
        "Every expert reads the scales of the one before it",
        "the scales of the expert before on",
        _previous_expert,
        routed=True,
    ),
    _fault(
        "first_layer",
        "Every layer reads the scales of the first one",
        "the scales of the first such layer on",
        _first_layer,
        routed=False,
    ),
    _fault(
        "dense_rows",
        "Rows of codes with a gap between them are read as dense",
        "reading strided rows of codes as dense on",
        _dense_rows,
        routed=False,
    ),
    _fault(
        "column_off",
        "The columns of the block scales are off by one",
        "scale columns off by one on",
        of_scales(_column_off),
        routed=False,
        moves=True,
    ),
    _fault(
        "row_off",
        "The rows of the block scales are off by one",
        "scale rows off by one on",
        of_scales(_row_off),
        routed=False,
        moves=True,
    ),
    ModelFault(
        id="M12.visited_before",
        title="Every expert of a call reads the scales of the one before it in that call",
        effect="the first expert is exact, all others are scaled by another's numbers",
        remedy=_REMEDY,
        sits=lambda scene: any(map(_routed, kept(scene))) and _takes_slots(scene),
        ways=_visited_ways,
        signature=_visited_signature,
    ),
    _of_up(),
    ModelFault(
        id="M12.step_before",
        title="Every step of K is scaled by the scales of the step before",
        effect="the first step is exact, what follows is wrong by ratios of scales",
        remedy=_REMEDY,
        sits=_reads_codes,
        ways=_step_ways,
        signature=_step_signature,
    ),
)
