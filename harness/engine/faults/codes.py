"""Faults of codes: M05 wrong format, M09 codec, M10 nibble order, O01 sign, O03 table edges."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults import operand_faults as operands
from degarble.harness.engine.faults.tensor_faults import (
    Match,
    TensorFault,
    TensorPart,
    element_codes,
    reproduction,
)
from degarble.harness.engine.faults.weight_faults import (
    FaultFamily,
    FaultTexts,
    elements,
    has_codes,
    has_float_scales,
    has_scale_bytes,
    has_tensor_scale,
    is_packed,
    of_fault,
    of_scales,
    of_tensor,
    scale_numbers,
    weight_fault,
    with_scales,
    with_tensor_scale,
)
from degarble.harness.formats.codec import decode_array
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import E4M3, UE8M0, Rounding
from degarble.harness.formats.weight import Weight
from degarble.harness.model.types import Dtype
from degarble.harness.report.number_text import share

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ComponentContext, ModelFault
    from degarble.harness.engine.faults.operand_faults import Making
    from degarble.harness.engine.faults.tensor_faults import DifferingPart
    from degarble.harness.engine.faults.weight_faults import Change, WeightStorage
    from degarble.harness.formats.quantise import QuantisedTensor


# --------------------------------------------------------------------------------------------------
# M05: the bytes of a number are read as another number format.
#
# Producer and consumer follow different switches: E4M3 bytes read as exponents, exponent bytes as
# numbers, float32 bits as four exponents, float32 as BF16 (mlx issue 3762, DeepGEMM issue 417,
# flashinfer issue 3497, atlas issue 341). The shapes fit, so nothing fails.

_FORMAT_REMEDY = "Tag scales with their format, and assert it where they are read."


def _as_exponents(tensor: QuantisedTensor, _scales: Tensor) -> Tensor | None:
    if tensor.format.scale != E4M3:
        return None
    return decode_array(tensor.linear_scale_codes(), UE8M0)


def _as_e4m3(tensor: QuantisedTensor, _scales: Tensor) -> Tensor | None:
    if tensor.format.scale != UE8M0:
        return None
    return decode_array(tensor.linear_scale_codes(), E4M3)


def _as_numbers(tensor: QuantisedTensor, _scales: Tensor) -> Tensor | None:
    return tensor.linear_scale_codes().float() if tensor.format.scale.bits == 8 else None


def _bits_as_exponents(tensor: QuantisedTensor, scales: Tensor) -> Tensor | None:
    """Read the bytes of a row's first float32 words as exponents, one a byte."""
    if tensor.format.scale.bits != 32:
        return None
    octets = scales.contiguous().view(torch.uint8)[..., : scales.shape[-1]]
    exponents = decode_array(octets.contiguous(), UE8M0)
    return torch.where(octets == 0xFF, math.inf, exponents)  # a reader's 2^128


def _half_as_bf16(scale: Tensor) -> Tensor:
    """Read the low half of a float32 as BF16; in little-endian order it comes first."""
    return scale.reshape(-1, 1).view(torch.bfloat16)[:, 0].float()


def _pair_as_float(scale: Tensor) -> Tensor:
    """Read two copies of one BF16 value as one float32."""
    twice = scale.to(torch.bfloat16).reshape(-1, 1).expand(-1, 2).contiguous()
    return twice.view(torch.float32)[:, 0]


def _vector_as_bf16(_context: ComponentContext, _name: str, weight: Weight) -> Weight | None:
    if weight.value is None or weight.value.ndim != 1:
        return None
    value = weight.value.float().contiguous().view(torch.bfloat16)[: len(weight.value)]
    return Weight(value=value.to(weight.value.dtype))


def _is_float_vector(kept: WeightStorage) -> bool:
    return kept.form is None and kept.stored is Dtype.F32 and len(kept.shape) == 1


_EACH = "every block is wrong by a factor of its own, of many orders"
NUMBER_FORMATS_FAULTS = (
    weight_fault(
        FaultTexts(
            "M05.e4m3_as_exponent", "E4M3 block scales are read as exponents", _EACH,
            _FORMAT_REMEDY,
            "reading E4M3 scale bytes as exponents on",
        ),
        of_scales(_as_exponents),
        lambda kept: has_scale_bytes(kept) and has_tensor_scale(kept),
    ),
    weight_fault(
        FaultTexts(
            "M05.exponent_as_e4m3", "Exponent bytes are read as E4M3 numbers", _EACH,
            _FORMAT_REMEDY,
            "reading exponent bytes as E4M3 on",
        ),
        of_scales(_as_e4m3),
        lambda kept: has_scale_bytes(kept) and not has_tensor_scale(kept),
    ),
    weight_fault(
        FaultTexts(
            "M05.byte_as_number", "The byte of a scale is taken for its value", _EACH,
            _FORMAT_REMEDY,
            "scale bytes taken for numbers on",
        ),
        of_scales(_as_numbers),
        has_scale_bytes,
    ),
    weight_fault(
        FaultTexts(
            "M05.float_as_exponents", "The bits of float32 scales are read as packed exponents",
            _EACH, _FORMAT_REMEDY, "reading the bits of float32 scales as exponents on",
        ),
        of_scales(_bits_as_exponents),
        has_float_scales,
    ),
    weight_fault(
        FaultTexts(
            "M05.float_as_bf16", "A float32 tensor scale is read as BF16",
            "all values are wrong by one factor, of many orders", _FORMAT_REMEDY,
            "reading the float32 tensor scale as BF16 on",
        ),
        with_tensor_scale(_half_as_bf16),
        has_tensor_scale,
    ),
    weight_fault(
        FaultTexts(
            "M05.bf16_pair_as_float", "Two BF16 tensor scales are read as one float32",
            "all values are wrong by one factor, near 1 where the neighbour is the same",
            _FORMAT_REMEDY,
            "reading a pair of BF16 tensor scales as one float32 on",
        ),
        with_tensor_scale(_pair_as_float),
        has_tensor_scale,
    ),
    weight_fault(
        FaultTexts(
            "M05.vector_as_bf16", "A float32 vector is read as BF16",
            "every second number is noise, the others are those of half their index",
            "Compare the dtype of the parameter with the one that the kernel indexes by.",
            "reading the float32 vector as BF16 on",
        ),
        _vector_as_bf16,
        _is_float_vector,
    ),
)  # fmt: skip


# --------------------------------------------------------------------------------------------------
# M09: a codec rounds, saturates or decodes by other rules than its format.
#
# E2M1 with ties away from zero, or truncated; E4M3 that saturates at 240 or 256 instead of 448, or
# that uses the codes of another E4M3 with another bias (sglang issue 40581, aiter issue 3992).

_CODEC_REMEDY = "Round to nearest even and saturate at the largest number; prove it over all codes."


def _of_e4m3(change: Callable[[Tensor], Tensor]) -> Change:
    """Change how E4M3 decodes, for elements or for the block scales of narrower elements."""

    def changed(context: ComponentContext, name: str, weight: Weight) -> Weight | None:
        if not weight.is_quantised:
            return None
        tensor = weight.quantised()
        if tensor.format.element == E4M3:
            element = change(elements(tensor))
            value = with_scales(tensor, scale_numbers(tensor), element)
            return Weight(value=value, input_scale=weight.input_scale)
        if tensor.format.scale != E4M3:
            return None
        return of_scales(lambda _tensor, scales: change(scales))(context, name, weight)

    return changed


def _has_e4m3(kept: WeightStorage) -> bool:
    return (
        has_codes(kept) and kept.form is not None and E4M3 in (kept.form.element, kept.form.scale)
    )


def _rounded(rounding: Rounding) -> Making:
    """Requantise with another rounding of elements."""
    rules = tuple(replace(rule, element_rounding=rounding) for rule in CANONICAL.rules)
    dialect = replace(CANONICAL, rules=rules, name=f"canonical, {rounding}")

    def making(
        context: ComponentContext, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return operands.requantised(context, inputs, outputs, dialect=dialect)

    return making


def _decoder(variant: str, what: str, change: Callable[[Tensor], Tensor]) -> ModelFault:
    words = FaultTexts(
        f"M09.{variant}",
        f"E4M3 numbers {what} when decoded",
        "the largest values are too small, or all by one factor",
        _CODEC_REMEDY,
        f"E4M3 numbers that {what} on",
    )
    return weight_fault(words, _of_e4m3(change), _has_e4m3)


def _encoder(variant: str, what: str, rounding: Rounding) -> ModelFault:
    words = FaultTexts(
        f"M09.{variant}",
        f"Activations are rounded {what} when encoded",
        "a few codes step to a neighbour: noise above the format's own",
        _CODEC_REMEDY,
        f"rounding {what} at",
    )
    return operands.making_fault(words, _rounded(rounding), operands.any_format)


CODECS_FAULTS = (
    _decoder("saturates_at_240", "saturate at 240", lambda values: values.clamp(-240, 240)),
    _decoder("saturates_at_256", "saturate at 256", lambda values: values.clamp(-256, 256)),
    _decoder("other_bias", "have a bias of 8 in place of 7", lambda values: values / 2),
    _encoder("ties_away", "half away from zero", Rounding.NEAREST_AWAY),
    _encoder("truncated", "toward zero", Rounding.TOWARD_ZERO),
    _encoder("upward", "toward plus infinity", Rounding.UP),
)


# --------------------------------------------------------------------------------------------------
# M10: the two nibbles of every packed byte are swapped.
#
# One producer stores the even K index in the high nibble, the reader expects it in the low nibble
# (sglang issue 23625). The values stay finite and in range, so nothing crashes: the text is
# garbled.


def inject_nibble_order(tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Swap the nibbles of every byte; the label stays as it was."""
    if not tensor.format.packed:
        return None
    return replace(tensor, codes=(tensor.codes << 4) | (tensor.codes >> 4))


def signature_nibble_order(case: DifferingPart) -> Match | None:
    """Compare the codes with the twin's after exchanging neighbours."""
    fault = inject_nibble_order(case.twin)
    if fault is None:
        return None
    reproduced, untouched = reproduction(case, fault, TensorPart.CODES)
    count = int(case.rows.sum()) * element_codes(case.twin).shape[-1]
    return Match(
        reproduced,
        untouched,
        "Swapping the two nibbles of every byte reproduces "
        f"{share(reproduced)} of {count:,} codes; "
        f"in the order as declared {share(untouched)} agree.",
    )


NIBBLE_ORDER_TENSOR_FAULTS = (
    TensorFault(
        id="M10.nibble_order",
        title="The two nibbles of every byte are swapped",
        effect="neighbouring values change places: text is garbled, nothing is NaN",
        remedy="Pack the even K index into the low half, or declare the order as high_even.",
        part=TensorPart.CODES,
        inject=inject_nibble_order,
        signature=signature_nibble_order,
    ),
)


def _words_turned(tensor: QuantisedTensor, count: int, swap: bool) -> QuantisedTensor | None:
    """Reverse the bytes of every run of `count`, and optionally the nibbles within them."""
    if not tensor.format.packed or tensor.codes.shape[-1] % count:
        return None
    runs = tensor.codes.unflatten(-1, (-1, count)).flip(-1)
    runs = (runs << 4) | (runs >> 4) if swap else runs
    return replace(tensor, codes=runs.flatten(-2).contiguous())


def _read_swapped(_context: ComponentContext, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {**inputs, "codes": (inputs["codes"] << 4) | (inputs["codes"] >> 4)}


def _blocks_changed(
    context: ComponentContext, _inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> Mapping[str, Tensor] | None:
    """Exchange codes and scales of blocks j and j ^ 1."""
    form = operands.activation_format(context)
    if form is None or outputs["block_scale"].shape[-1] % 2:
        return None
    wide = {"codes": form.block[1] // (2 if form.packed else 1), "block_scale": 1}
    changed = {
        name: outputs[name].unflatten(-1, (-1, 2, width)).flip(-2).flatten(-3)
        for name, width in wide.items()
    }
    return {**outputs, **changed}


NIBBLE_ORDER_FAULTS = (
    of_fault(NIBBLE_ORDER_TENSOR_FAULTS[0], "a nibble swap on", is_packed),
    weight_fault(
        FaultTexts(
            "M10.bytes_swapped",
            "The bytes of every 16-bit word are swapped",
            "pairs of neighbouring values change places: text is garbled, nothing is NaN",
            "Read packed codes byte by byte, never as 16-bit words of another byte order.",
            "swapping neighbouring bytes on",
        ),
        of_tensor(lambda tensor: _words_turned(tensor, 2, swap=False)),
        is_packed,
    ),
    weight_fault(
        FaultTexts(
            "M10.word_reversed",
            "The eight codes of every 32-bit word are in reversed order",
            "values change places within runs of eight: text is garbled, nothing is NaN",
            "Unpack 32-bit words from the low end: code j is shifted by 4 j.",
            "reversing the eight codes of every word on",
        ),
        of_tensor(lambda tensor: _words_turned(tensor, 4, swap=True)),
        is_packed,
    ),
    operands.reading_fault(
        FaultTexts(
            "M10.activation_order",
            "The nibbles of packed activations are read in the other order",
            "neighbouring inputs change places: outputs are noise of the right size",
            "Producer and consumer of activations must agree: low half, even index.",
            "a nibble swap of the activations of",
        ),
        _read_swapped,
        operands.is_packed,
    ),
    operands.making_fault(
        FaultTexts(
            "M10.activation_blocks",
            "Neighbouring blocks of activations change places",
            "inputs meet the weights of others: outputs are noise of the right size",
            "Block j of a row holds its numbers from j times the block on.",
            "neighbouring blocks in each other's place at",
        ),
        _blocks_changed,
        operands.is_packed,
    ),
)


# --------------------------------------------------------------------------------------------------
# O01: the sign of 4-bit codes is lost or misread.
#
# Suspected in the first field report: magnitudes without sign, negative numbers clipped to zero,
# the sign of one nibble in two lost, nibbles read as 4-bit integers in two's complement.


def of_elements(change: Callable[[QuantisedTensor, Tensor], Tensor]) -> Change:
    """Lift a change of decoded elements; scales stay."""

    def changed(_context: ComponentContext, _name: str, weight: Weight) -> Weight | None:
        if not weight.is_quantised:
            return None
        tensor = weight.quantised()
        element = change(tensor, elements(tensor))
        value = with_scales(tensor, scale_numbers(tensor), element)
        return Weight(value=value, input_scale=weight.input_scale)

    return changed


def _one_nibble(_tensor: QuantisedTensor, element: Tensor) -> Tensor:
    made = element.clone()
    made[..., 0::2] = made[..., 0::2].abs()
    return made


def _twos_complement(tensor: QuantisedTensor, element: Tensor) -> Tensor:
    """Read code 8 + m as m - 8 instead of minus the m-th magnitude."""
    codes = tensor.element_codes()
    below = 8 - (codes % 8).to(torch.uint8)
    magnitude = decode_array(below.clamp(max=7), tensor.format.element)
    return torch.where(codes >= 8, -magnitude, element)


_SIGN = FaultFamily(
    "O01",
    "half of the values are wrong: text is garbled, nothing is NaN",
    "Take the sign from the top bit of each code; prove the decoder over all of them.",
)

LOST_SIGN_FAULTS = (
    _SIGN.fault(
        "magnitudes", "Codes are decoded without their sign", "magnitudes alone on",
        of_elements(lambda _tensor, element: element.abs()), has_codes,
    ),
    _SIGN.fault(
        "negative_lost", "Negative values become zero", "negative values cut to zero on",
        of_elements(lambda _tensor, element: element.clamp(min=0)), has_codes,
    ),
    _SIGN.fault(
        "one_nibble", "The low nibble of every byte loses its sign",
        "low nibbles without sign on", of_elements(_one_nibble), is_packed,
    ),
    _SIGN.fault(
        "twos_complement", "Nibbles are taken for integers in two's complement",
        "negative codes in two's complement on", of_elements(_twos_complement), is_packed,
    ),
)  # fmt: skip


# --------------------------------------------------------------------------------------------------
# O03: the lookup table that decodes 4-bit codes is wrong at its edges.
#
# Suspected in the first field report: the largest code is missing or saturates at 4, the subnormal
# code 0.5 is read as zero, the table continues in even steps.

_LARGEST, _SMALLEST = 6.0, 0.5  # of E2M1
_EVEN = 0.5  # the step of a table that forgets its exponent


def _magnitudes(change: Callable[[Tensor], Tensor]) -> Change:
    return of_elements(lambda _tensor, element: change(element.abs()) * element.sign())


def _in_even_steps(magnitude: Tensor) -> Tensor:
    codes = torch.where(magnitude < 2, magnitude / _EVEN, magnitude + 2)
    return torch.where(magnitude == _LARGEST, 7.0, codes) * _EVEN


def _edge_fault(
    variant: str, title: str, action: str, change: Callable[[Tensor], Tensor]
) -> ModelFault:
    words = FaultTexts(
        f"O03.{variant}",
        title,
        "the values of one code are wrong, all others right",
        "E2M1 has 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; prove all 16.",
        action,
    )
    return weight_fault(words, _magnitudes(change), is_packed)


LOOKUP_EDGES_FAULTS = (
    _edge_fault(
        "six_as_four",
        "The largest code decodes to 4 in place of 6",
        "6 decoded as 4 on",
        lambda magnitude: magnitude.clamp(max=4.0),
    ),
    _edge_fault(
        "six_as_zero",
        "The largest code is missing from the table",
        "6 decoded as 0 on",
        lambda magnitude: torch.where(magnitude == _LARGEST, 0.0, magnitude),
    ),
    _edge_fault(
        "half_as_zero",
        "The code of 0.5 decodes to zero",
        "0.5 decoded as 0 on",
        lambda magnitude: torch.where(magnitude == _SMALLEST, 0.0, magnitude),
    ),
    _edge_fault(
        "even_steps",
        "The table goes on in even steps",
        "a table of even steps on",
        _in_even_steps,
    ),
)
