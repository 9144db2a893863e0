"""Faults of a linear whose operands are known as they were before they were quantised.

They are made for one call: a silent fallback that multiplies what was not quantised, and codes that
another rule of rounding gives.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.faults.model_faults import ModelFault, with_inputs, with_weights
from degarble.harness.engine.faults.traced.operations import variant_of
from degarble.harness.formats.codec import encode_array, pack_nibbles
from degarble.harness.formats.number_formats import NibbleOrder, Rounding
from degarble.harness.formats.quantise import dequantise, quantise, spread_blocks
from degarble.harness.formats.weight import Weight
from degarble.references.linears import BLOCK_SCALE, CODES, TENSOR_SCALE, X_LOOSE, X

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ComponentContext, FaultVariant
    from degarble.harness.formats.quantise import QuantisedTensor

    Tensors = Mapping[str, Tensor]
    Quantised = Mapping[str, "QuantisedTensor | None"]

_CODED = frozenset({CODES, BLOCK_SCALE, TENSOR_SCALE, X_LOOSE})
_ENCODERS = (
    ("truncated", "toward zero", Rounding.TOWARD_ZERO),
    ("ties_away", "half away from zero", Rounding.NEAREST_AWAY),
    ("upward", "toward plus infinity", Rounding.UP),
)


def unquantised_faults(known: Tensors, quantised: Quantised) -> tuple[ModelFault, ...]:
    """Return the faults of a linear whose operands `x` and `w` are known unquantised, or one."""
    return (
        ModelFault(
            "M19.unquantised", "A silent fallback: an operand went in unquantised",
            "nothing to be seen: the product is better than it should be",
            "Find out why this product fell back to another kernel.",
            _everywhere, partial(_plain, known),
        ),
        *(
            ModelFault(
                f"M09.{variant}", f"An operand is rounded {how} when it is quantised",
                "noise that leans to one side", "Round elements to nearest even.",
                _everywhere, partial(_encoded, (how, rounding), known, quantised),
            )
            for variant, how, rounding in _ENCODERS
        ),
    )  # fmt: skip


def _everywhere(_context: ComponentContext) -> bool:
    return True


def _plain(known: Tensors, context: ComponentContext) -> Iterator[FaultVariant]:
    ways = [*([("w", "x")] if len(known) > 1 else []), *((name,) for name in known)]
    for names in ways:
        values = {name: known[name] for name in names}
        words = f"unquantised {' and '.join(sorted(names, reverse=True))}"
        yield variant_of(context, words, partial(_with, values))


def _encoded(
    how: tuple[str, Rounding], known: Tensors, quantised: Quantised, context: ComponentContext
) -> Iterator[FaultVariant]:
    words, rounding = how
    for name, tensor in quantised.items():
        if tensor is None or name not in known:
            continue
        for other in _requantised(tensor, known[name], rounding):
            values = {name: dequantise(other, torch.float64)}
            text = f"rounding the elements of {name} {words}"
            yield variant_of(context, text, partial(_with, values))


def _with(values: Tensors, call: Any) -> Any:
    """Run a linear on other numbers of its input, of its weight, or of both."""

    def given(inputs: Tensors) -> Tensors:
        kept = {name: each for name, each in inputs.items() if name not in _CODED}
        return {**kept, X: values["x"].reshape(-1, values["x"].shape[-1])}

    def weight(name: str, own: Weight) -> Weight:
        return Weight(value=values["w"]) if name.endswith("weight") else own

    made: Callable[..., Any] = call
    if "w" in values:
        made = with_weights(weight)(made)
    return with_inputs(given)(made) if "x" in values else made


def _requantised(
    tensor: QuantisedTensor, values: Tensor, rounding: Rounding
) -> Iterator[QuantisedTensor]:
    """Quantise again with another rounding rule: quotients as rounded, and exact ones.

    The largest of a block is 6 in one arithmetic and 5.9999 in another, which truncates to 4.
    """
    rules = tuple(replace(rule, element_rounding=rounding) for rule in tensor.dialect.rules)
    dialect = replace(tensor.dialect, rules=rules, name=f"{tensor.dialect.name}, {rounding}")
    scale = None if tensor.tensor_scale is None else tensor.decode_scale
    rows = values.reshape(tensor.shape).float().contiguous()
    try:
        yield quantise(rows, tensor.format, dialect, decode_scale=scale)
    except CANNOT_RUN:
        return  # the rule needs another kind of scale
    if tensor.format.block[0] != 1 or not tensor.format.packed or tensor.zero_point is not None:
        return
    steps = tensor.scale_values().double() * (1.0 if scale is None else scale.double())
    steps = spread_blocks(tensor, steps)
    exact = rows.double() / steps.where(steps > 0, float("inf"))
    codes = encode_array(exact.float(), tensor.format.element, rounding)
    order = tensor.nibble_order or NibbleOrder.LOW_EVEN
    yield replace(tensor, codes=pack_nibbles(codes, order))
