"""Faults of activation quantisation: how codes are made, and how a linear reads them.

`making_fault` wraps the quantisation before a linear (`*.act_quant`) and changes its outputs;
`reading_fault` wraps the linear and changes how it reads correct codes and scales. Each has two
variants: all columns, or the second half. `numbers` returns what is quantised, after SwiGLU if that
is part of the component.

Shape letters: T tokens (or tokens and slots), C block scales of a token, b elements of a block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    ModelFault,
    with_inputs,
)
from degarble.harness.formats.codec import decode_array, encode_array, pack_nibbles
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import BLOCK_FORMATS, Rounding
from degarble.harness.formats.quantise import quantise
from degarble.harness.model.parameters import parameter_named
from degarble.references import experts
from degarble.references.linears import holds_codes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.engine.faults.model_faults import ComponentContext
    from degarble.harness.engine.faults.weight_faults import FaultTexts
    from degarble.harness.formats.dialects import Dialect
    from degarble.harness.formats.number_formats import BlockFormat

    Parts = Mapping[str, Tensor]
    Making = Callable[[ComponentContext, Parts, Parts], Parts | None]
    Reading = Callable[[ComponentContext, Parts], Parts | None]

_SWIGLU = "ffn.experts.act_quant"
_COLUMNS: tuple[tuple[bool, str, dict[str, str]], ...] = (
    (False, "", {}),
    (True, ", the second half of the columns", {"columns": "second half"}),
)


def any_format(_form: BlockFormat) -> bool:
    """Accept every quantised format."""
    return True


def has_tensor_scale(form: BlockFormat) -> bool:
    """Accept formats with a tensor scale: NVFP4."""
    return form.tensor_scale


def is_packed(form: BlockFormat) -> bool:
    """Accept formats with two codes a byte."""
    return form.packed


def activation_format(context: ComponentContext) -> BlockFormat | None:
    """Return the format of the codes that a component makes or reads; None if it does neither."""
    component = context.component
    is_maker = "codes" in component.outputs
    if not is_maker and not any(each.name == "codes" for each in component.inputs):
        return None
    names = component.input_scales or component.weights
    if not names:  # without calibrated scales the maker names no weights; its linear does
        linear = context.name.removesuffix(".act_quant")
        if context.role == _SWIGLU:
            linear = context.name.replace("act_quant", "w2")
        component_context = context.sibling(linear)
        names = component_context.component.weights if component_context else ()
    if not names:
        return None
    parameter = parameter_named(context.bound.config, names[0])
    return BLOCK_FORMATS.get(context.recipe.format_of(parameter).activation)


def numbers(context: ComponentContext, inputs: Parts) -> Tensor:
    """Return the values that a component quantises: its input, or SwiGLU of it."""
    if context.role != _SWIGLU:
        return inputs["x"]
    facts = replace(context.bound.bound_to(context.name)[1], formats={})
    return experts.routed_act(facts, inputs, {})["out"]


def blocks(context: ComponentContext, inputs: Parts, tensor_scale: Tensor) -> Tensor:
    """Return the values that become NVFP4, in blocks [..., b], once for each expert of a token."""
    form, x = activation_format(context), numbers(context, inputs).float()
    assert form is not None, "called only where codes are made"
    if tensor_scale.ndim == x.ndim:
        x = x.unsqueeze(1).expand(*tensor_scale.shape, -1)
    found: Tensor = x.unflatten(-1, (-1, form.block[1]))
    return found


def requantised(
    context: ComponentContext,
    inputs: Parts,
    outputs: Parts,
    scale: Tensor | None = None,
    dialect: Dialect = CANONICAL,
) -> dict[str, Tensor]:
    """Quantise again with another tensor scale or other rules; the returned tensor scale stays."""
    form, x = activation_format(context), numbers(context, inputs).float().contiguous()
    assert form is not None, "called only where codes are made"
    if not form.tensor_scale:
        made = quantise(x, form, dialect)
        return {**outputs, "codes": made.codes, "block_scale": made.block_scale}
    scale = (outputs["tensor_scale"] if scale is None else scale).float()
    if not scale.ndim:
        made = quantise(x, form, dialect, decode_scale=scale)
        return {**outputs, "codes": made.codes, "block_scale": made.block_scale}
    if scale.ndim == x.ndim:  # a token, quantised for each of its experts
        x = x.unsqueeze(1).expand(*scale.shape, -1)
    made = quantise(x.unsqueeze(-2).contiguous(), form, dialect, decode_scale=scale)
    codes, block_scale = made.codes.squeeze(-2), made.block_scale.squeeze(-2)
    return {**outputs, "codes": codes, "block_scale": block_scale}


def with_block_scales(
    context: ComponentContext,
    inputs: Parts,
    outputs: Parts,
    change: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, Tensor]:
    """Encode NVFP4 again with other block scales, given as E4M3 codes.

    `change` gets blocks [..., b] in units of the tensor scale, and the correct codes [...].
    """
    form, stored = activation_format(context), outputs["block_scale"]
    assert form is not None, "called only where codes are made"
    step = outputs["tensor_scale"].float()
    scaled = blocks(context, inputs, step) / step[..., None, None]
    made = change(scaled, stored).to(stored.dtype)
    scale = decode_array(made, form.scale)[..., None]
    # A block scale of 0 decodes to zeros, whatever its codes.
    quotients = torch.where(scale > 0, scaled / scale, 0.0).flatten(-2)
    codes = pack_nibbles(encode_array(quotients, form.element, Rounding.NEAREST_EVEN))
    return {**outputs, "codes": codes, "block_scale": made}


def making_fault(
    words: FaultTexts, change: Making, needs: Callable[[BlockFormat], bool]
) -> ModelFault:
    """Return a fault that changes quantised outputs; `change` gets inputs and correct outputs."""

    def applies_to(context: ComponentContext) -> bool:
        form = activation_format(context) if "codes" in context.component.outputs else None
        return form is not None and needs(form)

    def variants(context: ComponentContext) -> Iterator[FaultVariant]:
        for half, of, where in _COLUMNS:
            yield FaultVariant(
                f"{words.action} {context.name}{of}", _made(context, change, half), where
            )

    return ModelFault(words.id, words.title, words.effect, words.remedy, applies_to, variants)


def reading_fault(
    words: FaultTexts, change: Reading, needs: Callable[[BlockFormat], bool]
) -> ModelFault:
    """Return a fault of a linear that misreads correct codes and scales."""

    def applies_to(context: ComponentContext) -> bool:
        is_reader = any(each.name == "codes" for each in context.component.inputs)
        form = activation_format(context) if is_reader else None
        return form is not None and needs(form)

    def variants(context: ComponentContext) -> Iterator[FaultVariant]:
        for half, of, where in _COLUMNS:
            yield FaultVariant(
                f"{words.action} {context.name}{of}", _read(context, change, half), where
            )

    return ModelFault(words.id, words.title, words.effect, words.remedy, applies_to, variants)


def _made(
    context: ComponentContext, change: Making, half: bool
) -> Callable[[ComponentCall], ComponentCall]:
    def apply(call: ComponentCall) -> ComponentCall:
        def faulty(inputs: Parts, weights: Mapping[str, Any]) -> Parts:
            outputs = call(inputs, weights)
            return _columns(half, outputs, change(context, inputs, outputs))

        return faulty

    return apply


def _read(
    context: ComponentContext, change: Reading, half: bool
) -> Callable[[ComponentCall], ComponentCall]:
    # Some switches hand numbers to a linear whose recipe has codes: nothing is read wrongly then.
    apply: Callable[[ComponentCall], ComponentCall] = with_inputs(
        lambda inputs: _columns(
            half, inputs, change(context, inputs) if holds_codes(inputs) else None
        )
    )
    return apply


def _columns(half: bool, right: Parts, wrong: Parts | None) -> Parts:
    """Take the wrong tensors, all of them or the second half of their columns without scalars."""
    if wrong is None:
        return right
    joined = dict(right)
    for name, part in wrong.items():
        if part is right.get(name):
            continue
        if not half:
            joined[name] = part
        elif name != "tensor_scale" and part.shape == right[name].shape and part.ndim > 1:
            middle = part.shape[-1] // 2
            joined[name] = right[name].clone()
            joined[name][..., middle:] = part[..., middle:]
    return joined
