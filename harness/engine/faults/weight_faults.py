"""Build a fault of a running model from a function that damages one weight.

A change of one weight becomes variants over the regions of a component: all weights, one part, one
expert. Weights are decoded by lookup tables, to the same bits as dequantise gives.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.nn.functional import embedding

from degarble.harness.engine.faults.model_faults import FaultVariant, ModelFault, with_weights
from degarble.harness.engine.faults.regions import (
    expert_of,
    full_name,
    matrices,
    plantable,
    suggested,
)
from degarble.harness.formats.codec import decode_array
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    WHOLE,
    NibbleOrder,
    ScaleDirection,
)
from degarble.harness.formats.quantise import spread_blocks
from degarble.harness.formats.weight import Weight
from degarble.harness.model.parameters import parameter_named
from degarble.harness.model.types import Dtype, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
    from degarble.harness.engine.faults.regions import WeightRegion
    from degarble.harness.engine.faults.tensor_faults import TensorFault
    from degarble.harness.formats.number_formats import BlockFormat, NumberFormat
    from degarble.harness.formats.quantise import QuantisedTensor

    Change = Callable[[ComponentContext, str, Weight], Weight | None]
    Needs = Callable[["WeightStorage"], bool]


# --------------------------------------------------------------------------------------------------
# Decode quantised weights to float64 by lookup tables: the same bits as dequantise, but faster.
#
# A diagnosis decodes one weight about a hundred times, each time with another damage. Within
# `remembering` each weight is decoded once, in bounded memory. `Decoding` decodes only what a fault
# has changed, and only the rows that are needed.
#
# Shape letters: N rows, K elements, R and C block scales along them.

REMEMBERED = 256 << 20  # bytes of decoded weights at most
_CHANGED = 128  # changed weights that are remembered
_SMALL = 1 << 21  # elements of a weight up to which its changes are remembered
_FEW = 8  # weights of a component that are decoded before
_SMALLEST = 1 << 18  # elements of one of these
_RESULTS = 8  # of other work that are remembered

Made = TypeVar("Made")


class _Memory:
    """A bounded cache of decoded weights; the oldest are evicted."""

    def __init__(self) -> None:
        self._held: OrderedDict[int, tuple[Weight, Tensor]] = OrderedDict()
        self._bytes = 0
        self._results: OrderedDict[tuple[int, ...], tuple[Sequence[object], Any]] = OrderedDict()
        self._changed: OrderedDict[tuple[Any, ...], tuple[Sequence[object], Any]] = OrderedDict()
        self._made: set[int] = set()  # ids of the weights in _changed

    def changed(
        self, change: Change, context: ComponentContext, name: str, weight: Weight
    ) -> Weight | None:
        """Change once: a weight is part of several regions. Trap: as in `once`."""
        key = id(change), id(context), name, id(weight)
        known = self._changed.get(key)
        if known is None:
            made = change(context, name, weight)
            known = self._changed[key] = (change, context, weight), made
            self._made.add(id(made))
            while len(self._changed) > _CHANGED:
                _, (_, oldest) = self._changed.popitem(last=False)
                self._made.discard(id(oldest))
        found: Weight | None = known[1]
        return found

    def is_kept(self, weight: Weight) -> bool:
        """Tell whether a weight was made by `changed`, so that its numbers are asked for again."""
        return id(weight) in self._made

    def once(self, given: Sequence[object], make: Callable[[], Made]) -> Made:
        """Compute once. Trap: the sources are kept alive, or their ids could be reused."""
        key = tuple(map(id, given))
        known = self._results.pop(key, None) or (given, make())
        self._results[key] = known
        while len(self._results) > _RESULTS:
            self._results.popitem(last=False)
        made: Made = known[1]
        return made

    def numbers(self, weight: Weight) -> Tensor:
        """Decode once. Trap: the weight is kept alive, or its id could be reused."""
        known = self._held.get(id(weight))
        if known is not None:
            self._held.move_to_end(id(weight))
            return known[1]
        values = _decoded(weight)
        self._held[id(weight)] = weight, values
        self._bytes += values.nbytes
        while self._bytes > REMEMBERED and self._held:
            _, (_, oldest) = self._held.popitem(last=False)
            self._bytes -= oldest.nbytes
        return values


_MEMORY: ContextVar[_Memory | None] = ContextVar("decoded", default=None)


@contextmanager
def remembering() -> Iterator[None]:
    """Cache decoded weights within this context; nobody may write into weights meanwhile."""
    if (
        _MEMORY.get() is not None
    ):  # who asks several times about one discrepancy holds it around them
        yield
        return
    token = _MEMORY.set(_Memory())
    try:
        yield
    finally:
        _MEMORY.reset(token)


def once(given: Sequence[object], make: Callable[[], Made]) -> Made:
    """Cache a value derived from these objects while remembering; callers must not change it."""
    memory = _MEMORY.get()
    return make() if memory is None else memory.once(given, make)


@cache
def _table(element: NumberFormat, order: NibbleOrder | None) -> Tensor:
    """Return what each byte stands for: one element, or two if packed."""
    with torch.inference_mode(mode=False):
        octets = torch.arange(256)
        if order is None:
            return decode_array(octets % element.code_count, element).double()[:, None]
        low, high = octets % 16, octets // 16
        pair = (low, high) if order is NibbleOrder.LOW_EVEN else (high, low)
        return torch.stack([decode_array(tensor, element).double() for tensor in pair], dim=-1)


def elements(tensor: QuantisedTensor) -> Tensor:
    """Return the elements [..., N, K] that codes stand for, without any scale."""
    return _elements(tensor, tensor.codes)


def _elements(tensor: QuantisedTensor, codes: Tensor) -> Tensor:
    table = _table(tensor.format.element, tensor.nibble_order)
    pairs: Tensor = embedding(codes.int(), table)
    return pairs.flatten(-2)


def scale_numbers(tensor: QuantisedTensor) -> Tensor:
    """Return block scales [..., R, C] as float32."""
    stored = tensor.linear_scale_codes()
    if stored.dtype is torch.float32:
        return stored
    return embedding(stored.int(), _table(tensor.format.scale, None)).squeeze(-1).float()


def with_scales(
    tensor: QuantisedTensor,
    scales: Tensor,
    element: Tensor | None = None,
    *,
    tensor_scale: bool = True,
) -> Tensor:
    """Return elements times block scales [..., R, C] times the tensor scale.

    Zero points are subtracted from elements first.
    """
    values = elements(tensor) if element is None else element.double()
    if _is_affine(tensor):
        return _affine(tensor, values, scales)
    high = tensor.format.block[0]
    spread = scales.double()
    if high > 1:
        spread = spread.repeat_interleave(high, -2)[..., : tensor.shape[-2], :]
    values = _scaled(values, spread, tensor.format.block[1])
    return by_tensor_scale(values, tensor) if tensor_scale else values


def _is_affine(tensor: QuantisedTensor) -> bool:
    """Return whether a column's block follows from an index, or a block's own extents or zero."""
    has_parts = tensor.zero_point is not None or tensor.group_index is not None
    return has_parts or WHOLE in tensor.format.block


def _affine(
    tensor: QuantisedTensor, values: Tensor, scales: Tensor, rows: Tensor | None = None
) -> Tensor:
    """Return (values - zero points) * scales, of all rows or of the chosen ones."""
    if tensor.zero_point is not None:
        values = values - spread_blocks(tensor, tensor.zero_point.double(), rows)
    return values * spread_blocks(tensor, scales.double(), rows)


def _scaled(values: Tensor, scales_NC: Tensor, wide: int) -> Tensor:
    columns = values.shape[-1]
    if columns % wide:
        return values * scales_NC.repeat_interleave(wide, -1)[..., :columns]
    blocks: Tensor = values.unflatten(-1, (-1, wide)) * scales_NC[..., None]
    return blocks.flatten(-2)


def by_tensor_scale(values: Tensor, tensor: QuantisedTensor) -> Tensor:
    """Multiply values by the tensor scale, or divide by it, as it is stored."""
    if tensor.tensor_scale is None:
        return values
    factor = tensor.tensor_scale.double()
    factor = factor.reshape(*factor.shape, *[1] * (values.ndim - factor.ndim))
    return values * factor if tensor.direction is ScaleDirection.DECODE else values / factor


def numbers_of(weight: Weight) -> Tensor:
    """Return the values of any weight, cached while remembering; callers must not change them.

    Factors of its input are not in them.
    """
    if not weight.is_quantised:
        return weight.without_factors().values(torch.float64)
    memory = _MEMORY.get()
    return _decoded(weight) if memory is None else memory.numbers(weight)


def decode_small(weights: Mapping[str, Weight], products: torch.dtype) -> None:
    """Decode a few small weights where results are kept: in inference mode none are."""
    if len(weights) > _FEW:
        return
    for weight in dict(weights).values():
        if weight.is_quantised and math.prod(weight.shape) <= _SMALLEST:
            for dtype in (products, torch.float32):  # budgets read them in float32
                weight.values(dtype)


def _changed_once(
    change: Change, context: ComponentContext, name: str, weight: Weight
) -> Weight | None:
    memory = _MEMORY.get()
    if memory is None or math.prod(weight.shape) > _SMALL:
        return change(context, name, weight)
    return memory.changed(change, context, name, weight)


def _numbers_of_changed(weight: Weight, rows: Tensor | None) -> Tensor:
    memory = _MEMORY.get()
    if memory is None or rows is not None or not memory.is_kept(weight):
        return _decoded(weight, rows)
    return memory.numbers(weight)


def _decoded(weight: Weight, rows: Tensor | None = None) -> Tensor:
    tensor = weight.quantised()
    scales = scale_numbers(tensor)
    if rows is None:
        return with_scales(tensor, scales)
    if _is_affine(tensor):
        return _affine(tensor, _elements(tensor, tensor.codes[rows]), scales, rows)
    high, wide = tensor.format.block
    values = _scaled(_elements(tensor, tensor.codes[rows]), scales[rows // high].double(), wide)
    return by_tensor_scale(values, tensor)


def some_rows(weight: Weight, rows: Tensor) -> Tensor:
    """Return the values of a few rows of a matrix, without decoding the others."""
    if weight.is_quantised:
        return _decoded(weight, rows)
    return weight.values(torch.float64)[rows] if weight.value is None else weight.value[rows]


class Decoding(Mapping[str, Weight]):
    """Weights as numbers: `kept` are unchanged, changed ones are decoded again.

    `rows` are the only rows that are needed, None for all of them.
    """

    def __init__(
        self,
        weights: Mapping[str, Weight],
        kept: Mapping[str, Weight],
        rows: Tensor | None = None,
    ) -> None:
        self._weights = weights
        self._kept = kept
        self._rows = rows

    def __getitem__(self, key: str) -> Weight:
        weight, rows = self._weights[key], self._rows
        if not weight.is_quantised and rows is None:
            return weight
        if weight.is_quantised and weight is not self._kept.get(key):
            value = _numbers_of_changed(weight, rows)
        else:
            value = numbers_of(weight)
            value = value if rows is None else value[rows]
        return Weight(
            value=value, input_scale=weight.input_scale, channel_scale=weight.channel_scale,
            from_codes=weight.is_decoded,
        )  # fmt: skip

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


# --------------------------------------------------------------------------------------------------
# Build a ModelFault from a function that damages one weight.
#
# A change of one weight is lifted to variants over the regions of a component (all weights, one
# part, one expert, half of the experts, a run of rows); planting and naming use the same change.
# `of_tensor` lifts faults of quantised tensors, `of_values` changes of numbers. A change returns
# None where it does not apply; `needs` decides by format alone where it can.
#
# Shape letters: N rows, K elements of a row, R and C block scales along them.


class FaultTexts(NamedTuple):
    """The texts of a fault; `action` begins a sentence that a spot completes."""

    id: str
    title: str
    effect: str
    remedy: str
    action: str


@dataclass(frozen=True)
class WeightStorage:
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


def has_tensor_scale(kept: WeightStorage) -> bool:
    """Accept formats with a tensor scale: NVFP4."""
    return kept.form is not None and kept.form.tensor_scale


def is_packed(kept: WeightStorage) -> bool:
    """Accept formats with two codes a byte."""
    return kept.form is not None and kept.form.packed


def has_scale_bytes(kept: WeightStorage) -> bool:
    """Accept block scales of one byte each."""
    return kept.form is not None and kept.form.scale.bits == 8


def has_float_scales(kept: WeightStorage) -> bool:
    """Accept block scales in float32."""
    return kept.form is not None and kept.form.scale.bits == 32


def has_codes(kept: WeightStorage) -> bool:
    """Accept any quantised weight."""
    return kept.form is not None


def is_plain_matrix(kept: WeightStorage) -> bool:
    """Accept a matrix that the recipe does not quantise."""
    return kept.form is None and kept.linear


def is_matrix(kept: WeightStorage) -> bool:
    """Accept any matrix that multiplies inputs."""
    return kept.linear


def is_number(kept: WeightStorage) -> bool:
    """Accept everything except a table of integers."""
    return kept.stored is not Dtype.I64


def is_gate_or_up(kept: WeightStorage) -> bool:
    """Accept one half of w13."""
    return kept.linear and kept.name.rpartition(".")[2] in {"w1", "w3"}


def is_routed(kept: WeightStorage) -> bool:
    """Accept a matrix of one of several experts."""
    return kept.linear and kept.routed


def kept(context: ComponentContext) -> Iterator[WeightStorage]:
    """Yield how each weight is stored, without reading any."""
    for name in matrices(context):
        parameter = parameter_named(context.bound.config, full_name(context, name))
        form = BLOCK_FORMATS.get(context.recipe.format_of(parameter).weight)
        linear = parameter.kind is Kind.LINEAR
        yield WeightStorage(form, linear, parameter.row.dtype, parameter.shape, context.role, name)


def weight_fault(
    words: FaultTexts,
    change: Change,
    needs: Needs = has_codes,
    *,
    whole: bool = False,
    moves: bool = False,
) -> ModelFault:
    """Make a fault of a change of one weight; `whole` ones concern every part of an expert.

    A fault that `moves` numbers is not proposed for rows that differ by a single factor.
    """

    def applies_to(context: ComponentContext) -> bool:
        # Quantisation before a linear reads only its input scale.
        return not context.role.endswith("act_quant") and any(map(needs, kept(context)))

    def variants(context: ComponentContext) -> Iterator[FaultVariant]:
        for spot in _fitting(plantable(context), whole, context):
            yield variant_at(context, spot, change, words.action, moves=moves)

    def signature(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
        for spot in _fitting(suggested(context, record), whole, context):
            yield variant_at(context, spot, change, words.action, moves=moves)

    return ModelFault(
        words.id, words.title, words.effect, words.remedy, applies_to, variants, signature
    )


class FaultFamily(NamedTuple):
    """The texts that the faults of weights of one family share."""

    id: str
    effect: str
    remedy: str

    def fault(
        self,
        name: str,
        title: str,
        action: str,
        change: Change,
        needs: Needs = has_codes,
        **how: bool,
    ) -> ModelFault:
        """Make one of them; `how` is as in `weight_fault`."""
        words = FaultTexts(f"{self.id}.{name}", title, self.effect, self.remedy, action)
        return weight_fault(words, change, needs, **how)


def _fitting(
    spots: tuple[WeightRegion, ...], whole: bool, context: ComponentContext
) -> Iterator[WeightRegion]:
    """Skip spots with only some parts of an expert, if the fault concerns all parts."""
    together = len({name.rpartition(".")[2] for name in matrices(context)})
    for spot in spots:
        parts = len({name.rpartition(".")[2] for name in spot.names})
        if not whole or (spot.rows is None and parts == together):
            yield spot


def variant_at(
    context: ComponentContext,
    spot: WeightRegion,
    change: Change,
    action: str,
    *,
    moves: bool = False,
) -> FaultVariant:
    """Return one change at one spot."""
    names = frozenset(spot.names)

    def changed(name: str, weight: Weight) -> Weight:
        if name not in names:
            return weight
        made = _changed_once(change, context, name, weight)
        if made is None:
            return weight
        if spot.rows is None:
            return made
        some = _in_rows(weight, made, spot.rows)
        gain = moves and _is_gain(numbers_of(weight), numbers_of(some), spot.rows)
        return weight if gain else some

    return FaultVariant(f"{action} {spot}", with_weights(changed), spot.where)


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

    def change(_context: ComponentContext, _name: str, weight: Weight) -> Weight | None:
        if not weight.is_quantised:
            return None
        made = inject(weight.quantised())
        return None if made is None else Weight.of(made, weight.input_scale)

    return change


def of_fault(fault: TensorFault, action: str, needs: Needs) -> ModelFault:
    """Lift a known fault of one tensor, under its own id."""
    words = FaultTexts(fault.id, fault.title, fault.effect, fault.remedy, action)
    return weight_fault(words, of_tensor(fault.inject), needs)


def of_values(change: Callable[[Tensor], Tensor]) -> Change:
    """Lift a change of a weight's numbers, however it is stored."""

    def changed(_context: ComponentContext, _name: str, weight: Weight) -> Weight | None:
        value = change(numbers_of(weight))
        return Weight(value=value, input_scale=weight.input_scale)

    return changed


def of_scales(change: Callable[[QuantisedTensor, Tensor], Tensor | None]) -> Change:
    """Lift a change of block scales [R, C], as numbers, when they are read."""

    def changed(_context: ComponentContext, _name: str, weight: Weight) -> Weight | None:
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

    def changed(_context: ComponentContext, _name: str, weight: Weight) -> Weight | None:
        if weight.tensor_scale is None:
            return None
        scale = change(weight.tensor_scale.float()).float().reshape(weight.tensor_scale.shape)
        return replace(weight, tensor_scale=scale, _decoded={})

    return changed
