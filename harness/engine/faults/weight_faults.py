"""Build a ModelFault from a function that damages one weight.

A change of one weight is lifted to ways over the spots of a component (all weights, one part, one
expert, half of the experts, a run of rows); planting and naming use the same change. `of_tensor`
lifts faults of quantised tensors, `of_values` changes of numbers. A change returns None where it
does not apply; `needs` decides by format alone where it can.

Shape letters: N rows, K elements of a row, R and C block scales along them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.engine.faults.decoding import numbers_of, scale_numbers, with_scales
from degarble.harness.engine.faults.model_faults import ModelFault, Way, with_weights
from degarble.harness.engine.faults.weight_regions import (
    expert_of,
    full_name,
    matrices,
    plantable,
    suggested,
)
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.formats.weight import Weight
from degarble.harness.model.parameters import parameter_named
from degarble.harness.model.types import Dtype, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from degarble.harness.engine.faults.family import Fault
    from degarble.harness.engine.faults.model_faults import Scene, Sight
    from degarble.harness.engine.faults.weight_regions import Spot
    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.formats.quantise import QuantisedTensor

    Change = Callable[[Scene, str, Weight], Weight | None]
    Needs = Callable[["Kept"], bool]


class Words(NamedTuple):
    """The texts of a fault; `doing` begins a sentence that a spot completes."""

    id: str
    title: str
    effect: str
    remedy: str
    doing: str


@dataclass(frozen=True)
class Kept:
    """How the recipe stores one weight of a component; `form` is None for plain numbers."""

    form: BlockFormat | None
    linear: bool
    stored: Dtype  # unquantised
    shape: tuple[int, ...]
    role: str
    name: str

    @property
    def routed(self) -> bool:
        """Return whether it belongs to one of several experts."""
        return expert_of(self.name) >= 0


def has_tensor_scale(kept: Kept) -> bool:
    """Accept formats with a tensor scale: NVFP4."""
    return kept.form is not None and kept.form.tensor_scale


def is_packed(kept: Kept) -> bool:
    """Accept formats with two codes a byte."""
    return kept.form is not None and kept.form.packed


def has_scale_bytes(kept: Kept) -> bool:
    """Accept block scales of one byte each."""
    return kept.form is not None and kept.form.scale.bits == 8


def has_float_scales(kept: Kept) -> bool:
    """Accept block scales in float32."""
    return kept.form is not None and kept.form.scale.bits == 32


def has_codes(kept: Kept) -> bool:
    """Accept any quantised weight."""
    return kept.form is not None


def is_plain_matrix(kept: Kept) -> bool:
    """Accept a matrix that the recipe does not quantise."""
    return kept.form is None and kept.linear


def is_matrix(kept: Kept) -> bool:
    """Accept any matrix that multiplies inputs."""
    return kept.linear


def is_number(kept: Kept) -> bool:
    """Accept everything except a table of integers."""
    return kept.stored is not Dtype.I64


def is_gate_or_up(kept: Kept) -> bool:
    """Accept one half of w13."""
    return kept.linear and kept.name.rpartition(".")[2] in {"w1", "w3"}


def is_routed(kept: Kept) -> bool:
    """Accept a matrix of one of several experts."""
    return kept.linear and kept.routed


def kept(scene: Scene) -> Iterator[Kept]:
    """Yield how each weight is stored, without reading any."""
    for name in matrices(scene):
        parameter = parameter_named(scene.bound.config, full_name(scene, name))
        form = BLOCK_FORMATS.get(scene.recipe.format_of(parameter).weight)
        linear = parameter.kind is Kind.LINEAR
        yield Kept(form, linear, parameter.row.dtype, parameter.shape, scene.role, name)


def weight_fault(
    words: Words,
    change: Change,
    needs: Needs = has_codes,
    *,
    whole: bool = False,
    moves: bool = False,
) -> ModelFault:
    """Make a fault of a change of one weight; `whole` ones concern every part of an expert.

    A fault that `moves` numbers is not proposed for rows that differ by a single factor.
    """

    def sits(scene: Scene) -> bool:
        # Quantisation before a linear reads only its input scale.
        return not scene.role.endswith("act_quant") and any(map(needs, kept(scene)))

    def ways(scene: Scene) -> Iterator[Way]:
        for spot in _fitting(plantable(scene), whole, scene):
            yield way_at(scene, spot, change, words.doing, moves=moves)

    def signature(scene: Scene, sight: Sight) -> Iterator[Way]:
        for spot in _fitting(suggested(scene, sight), whole, scene):
            yield way_at(scene, spot, change, words.doing, moves=moves)

    return ModelFault(words.id, words.title, words.effect, words.remedy, sits, ways, signature)


def _fitting(spots: tuple[Spot, ...], whole: bool, scene: Scene) -> Iterator[Spot]:
    """Skip spots with only some parts of an expert, if the fault concerns all parts."""
    together = len({name.rpartition(".")[2] for name in matrices(scene)})
    for spot in spots:
        parts = len({name.rpartition(".")[2] for name in spot.names})
        if not whole or (spot.rows is None and parts == together):
            yield spot


def way_at(scene: Scene, spot: Spot, change: Change, doing: str, *, moves: bool = False) -> Way:
    """Return one change at one spot."""
    names = frozenset(spot.names)

    def changed(name: str, weight: Weight) -> Weight:
        if name not in names:
            return weight
        made = change(scene, name, weight)
        if made is None:
            return weight
        if spot.rows is None:
            return made
        some = _in_rows(weight, made, spot.rows)
        gain = moves and _is_gain(numbers_of(weight), numbers_of(some), spot.rows)
        return weight if gain else some

    return Way(f"{doing} {spot}", with_weights(changed), spot.where)


def _in_rows(weight: Weight, made: Weight, rows: tuple[int, int]) -> Weight:
    """Take some rows of the changed weight, the others from the original."""
    value = numbers_of(weight).clone()
    chosen = numbers_of(made)
    if chosen.shape == value.shape:
        value[rows[0] : rows[1]] = chosen[rows[0] : rows[1]]
    return Weight(value=value, input_scale=weight.input_scale)


def _is_gain(was: Tensor, now: Tensor, rows: tuple[int, int]) -> bool:
    """Return whether the rows changed by a single factor, as rows with a single scale always do."""
    a, b = (side[rows[0] : rows[1]].double() for side in (was, now))
    seen = a != 0
    # NaN ratios compare unequal, so a non-finite row is no gain.
    ratio = b[seen] / a[seen]
    return bool((ratio == ratio[:1]).all()) and not bool(b[~seen].any())


def of_tensor(inject: Callable[[QuantisedTensor], QuantisedTensor | None]) -> Change:
    """Lift the damage of one quantised tensor."""

    def change(_scene: Scene, _name: str, weight: Weight) -> Weight | None:
        if not weight.is_quantised:
            return None
        made = inject(weight.quantised())
        return None if made is None else Weight.of(made, weight.input_scale)

    return change


def of_fault(fault: Fault, doing: str, needs: Needs) -> ModelFault:
    """Lift a known fault of one tensor, under its own id."""
    words = Words(fault.id, fault.title, fault.effect, fault.remedy, doing)
    return weight_fault(words, of_tensor(fault.inject), needs)


def of_values(change: Callable[[Tensor], Tensor]) -> Change:
    """Lift a change of a weight's numbers, however it is stored."""

    def changed(_scene: Scene, _name: str, weight: Weight) -> Weight | None:
        value = change(numbers_of(weight))
        return Weight(value=value, input_scale=weight.input_scale)

    return changed


def of_scales(change: Callable[[QuantisedTensor, Tensor], Tensor | None]) -> Change:
    """Lift a change of block scales [R, C], as numbers, when they are read."""

    def changed(_scene: Scene, _name: str, weight: Weight) -> Weight | None:
        if not weight.is_quantised:
            return None
        tensor = weight.quantised()
        scales = change(tensor, scale_numbers(tensor))
        if scales is None:
            return None
        return Weight(value=with_scales(tensor, scales), input_scale=weight.input_scale)

    return changed


def with_tensor_scale(change: Callable[[Tensor], Tensor]) -> Change:
    """Lift a change of the tensor scale."""

    def changed(_scene: Scene, _name: str, weight: Weight) -> Weight | None:
        if weight.tensor_scale is None:
            return None
        scale = change(weight.tensor_scale.float()).float().reshape(weight.tensor_scale.shape)
        return replace(weight, tensor_scale=scale, _decoded={})

    return changed


fault_of_tensor_scale = partial(weight_fault, needs=has_tensor_scale)
