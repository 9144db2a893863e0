"""Define the quantisation dialects: how each producer chooses tensor scales, block scales, codes.

A dialect is a record of independent facts, without subclasses and without flags that imply others.
The facts cover zero, tiny and non-finite blocks too. They do not cover decoding: bytes, layout and
direction of the stored scale belong to the QuantisedTensor. Each rule is one small function in
scale_rules.py; audits import this module without torch. docs/dialects.md holds the table of edge
cases.

Letters: A largest magnitude of the tensor, a of a block; G encode scale, s decode scale of the
tensor; b block scale after rounding; q largest element value (6), Q largest scale value (448).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.base.errors import DialectMismatch, UnknownName
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    FP8_1X128_F32,
    FP8_1X128_UE8M0,
    FP8_128X128_F32,
    FP8_128X128_UE8M0,
    FP8_ROW,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    NVFP4,
    Rounding,
    ScaleDirection,
    TableFormat,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.formats.number_formats import BlockFormat


# --------------------------------------------------------------------------------------------------
# Facts and records


class TensorScaleRule(StrEnum):
    """Rules by which the tensor scale follows from A where the caller gives none."""

    ENCODE_CAPPED = "G = Q q / A, at most the largest float32; 1 where A is 0 or infinite"
    ENCODE_PLAIN = "G = Q q / A, whatever that is"
    ENCODE_IN_INPUT_DTYPE = "G = Q q * (1 / A) in the dtype of the values; 1 where not finite"
    DECODE = "s = A / (Q q)"
    UNIT = "s = 1"
    ABSENT = "the format has none"


class BlockScaleRule(StrEnum):
    """Rules for the block scale before rounding to its format; all steps round to float32."""

    AMAX_TIMES_ENCODE_SHARE = "a * (G * (1/q))"
    ENCODE_TIMES_AMAX_SHARE = "G * (a * (1/q))"
    AMAX_OVER_DECODE_SHARE = "a / (q * s)"
    QUOTIENT_TIMES_ENCODE = "G * (a / q), the quotient rounded to the dtype of the values"
    QUOTIENT_OVER_DECODE = "(a / q) / s"
    AMAX_SHARE = "max(a, floor) * (1/q)"
    AMAX_OVER_LARGEST = "a / q"


class ValueRule(StrEnum):
    """Rules for the value that is rounded to the element format; all steps round to float32."""

    TIMES_CAPPED_RECIPROCAL = "x * min(1 / (b * (1/G)), largest float32)"
    TIMES_RECIPROCAL = "x * (1 / (b * (1/G)))"
    TIMES_QUOTIENT = "x * ((1/s) / b)"
    OVER_PRODUCT = "x / (b * s)"
    OVER_QUOTIENT = "x / (b / G)"
    OVER_BLOCK = "x / b"


class Guard(StrEnum):
    """Which blocks are multiplied by 0, so that no 1/0 arises."""

    NONE = "none"
    ZERO_AMAX = "a = 0"
    ZERO_AMAX_AND_SCALE = "a = 0, whose block scale is 0 whatever G is"
    ZERO_SCALE = "b = 0"


class NegativeZero(StrEnum):
    """Which scaled values take the sign bit."""

    KEPT = "sign bit of the scaled value"
    DROPPED = "scaled value < 0"  # -0 becomes +0, a small negative that rounds to zero stays -0


class NonFinite(StrEnum):
    """Policies for NaN and infinities."""

    SUPPRESSED = "NaN ignored by every amax, as fmaxf does; infinities follow the arithmetic"
    PROPAGATED = "NaN and infinities follow the arithmetic, through every amax"
    REFUSED = "undefined in this producer, hence refused"


@dataclass(frozen=True)
class BlockRule:
    """The facts of one producer writing one format, each independent of the others."""

    format: BlockFormat
    tensor_scale: TensorScaleRule
    stored_direction: ScaleDirection | None  # None exactly where the format has no tensor scale
    block_scale: BlockScaleRule
    value: ValueRule
    amax_floor: float = 0.0
    scale_rounding: Rounding = Rounding.NEAREST_EVEN
    scale_low: float = 0.0  # lower clamp before rounding; the upper one is always Q
    zero_scale_before: float | None = None  # replaces a scale that is 0 before clamp and rounding
    zero_scale_after: float | None = None  # replaces a scale that is 0 after rounding
    element_rounding: Rounding = Rounding.NEAREST_EVEN
    guard: Guard = Guard.NONE
    negative_zero: NegativeZero = NegativeZero.KEPT
    non_finite: NonFinite = NonFinite.SUPPRESSED
    infinite_scale_defined: bool = True  # whether the rule yields something where 1/A overflows


@dataclass(frozen=True)
class Dialect:
    """A producer: its name, where its rules were read, and one rule per format that it writes."""

    name: str
    source: str
    bit_exact: bool  # False: the device uses approximate reciprocals; rounded ones model them here
    rules: tuple[BlockRule, ...] = field(repr=False)

    def rule_for(self, fmt: BlockFormat) -> BlockRule:
        """Return the rule for a format; where none is recorded for this producer, refuse."""
        for rule in self.rules:
            if rule.format == fmt:
                return rule
        raise DialectMismatch(
            f"format for dialect {self.name}",
            fmt.name,
            f"one of {', '.join(rule.format.name for rule in self.rules)}",
            "Take the dialect of the producer that wrote the tensor.",
        )


def _fp8_rule(fmt: BlockFormat, rounding: Rounding) -> BlockRule:
    """DeepSeek-V4 inference/kernel.py, act_quant: floor 1e-4, times 1/448, then x / s clamped."""
    return BlockRule(
        format=fmt,
        tensor_scale=TensorScaleRule.ABSENT,
        stored_direction=None,
        block_scale=BlockScaleRule.AMAX_SHARE,
        value=ValueRule.OVER_BLOCK,
        amax_floor=1e-4,
        scale_rounding=rounding,
    )


def _one_scale_rule(fmt: BlockFormat, non_finite: NonFinite) -> BlockRule:
    """Divide by amax / q, or by range / (codes - 1) with zero points; 1 for a block of zeros."""
    return BlockRule(
        format=fmt,
        tensor_scale=TensorScaleRule.ABSENT,
        stored_direction=None,
        block_scale=BlockScaleRule.AMAX_OVER_LARGEST,
        value=ValueRule.OVER_BLOCK,
        zero_scale_before=1.0,
        non_finite=non_finite,
    )


CANONICAL = Dialect(
    name="canonical",
    source=(
        "NVFP4: Transformer Engine core_nvfp4.cuh, exact path; MXFP4 and FP8: DeepSeek-V4"
        " inference/kernel.py; MXFP8: cvt.rp.satfinite.ue8m0 as Transformer Engine uses it"
    ),
    bit_exact=True,
    rules=(
        BlockRule(
            format=NVFP4,
            tensor_scale=TensorScaleRule.ENCODE_CAPPED,
            stored_direction=ScaleDirection.DECODE,
            block_scale=BlockScaleRule.AMAX_TIMES_ENCODE_SHARE,
            value=ValueRule.TIMES_CAPPED_RECIPROCAL,
        ),
        BlockRule(
            format=MXFP4,
            tensor_scale=TensorScaleRule.ABSENT,
            stored_direction=None,
            block_scale=BlockScaleRule.AMAX_SHARE,
            value=ValueRule.OVER_BLOCK,
            amax_floor=6 * 2.0**-126,  # DeepSeek-V4 inference/kernel.py, fp4_act_quant
            scale_rounding=Rounding.UP,
        ),
        BlockRule(
            format=MXFP8,
            tensor_scale=TensorScaleRule.ABSENT,
            stored_direction=None,
            block_scale=BlockScaleRule.AMAX_SHARE,
            value=ValueRule.OVER_BLOCK,
            scale_rounding=Rounding.UP,
        ),
        _fp8_rule(FP8_128X128_F32, Rounding.NEAREST_EVEN),
        _fp8_rule(FP8_128X128_UE8M0, Rounding.UP),
        _fp8_rule(FP8_1X128_F32, Rounding.NEAREST_EVEN),
        _fp8_rule(FP8_1X128_UE8M0, Rounding.UP),
        _one_scale_rule(FP8_ROW, NonFinite.SUPPRESSED),
        _one_scale_rule(FP8_TENSOR, NonFinite.SUPPRESSED),
        *(
            _one_scale_rule(fmt, NonFinite.REFUSED)
            for fmt in BLOCK_FORMATS.values()
            if isinstance(fmt.element, TableFormat)
        ),
    ),
)

_FLASHINFER_RULE = BlockRule(
    format=NVFP4,
    tensor_scale=TensorScaleRule.ENCODE_PLAIN,  # callers compute it; kernels take G
    stored_direction=ScaleDirection.ENCODE,
    block_scale=BlockScaleRule.ENCODE_TIMES_AMAX_SHARE,
    value=ValueRule.TIMES_RECIPROCAL,
    guard=Guard.ZERO_AMAX,
    infinite_scale_defined=False,  # A = 0, or so small that G overflows: the caller's business
)

FLASHINFER_EXACT = Dialect(
    name="flashinfer_exact",
    source="flashinfer csrc/nv_internal quantization_utils.cuh, TE_EXACT_NVFP4",
    bit_exact=True,
    rules=(
        replace(
            _FLASHINFER_RULE,
            block_scale=BlockScaleRule.AMAX_TIMES_ENCODE_SHARE,
            guard=Guard.ZERO_AMAX_AND_SCALE,
        ),
    ),
)

FLASHINFER_FAST = Dialect(
    name="flashinfer_fast",
    source="flashinfer csrc/nv_internal quantization_utils.cuh, default build (rcp.approx)",
    bit_exact=False,
    rules=(_FLASHINFER_RULE,),
)

VLLM_FAST = Dialect(
    name="vllm_fast",
    source="vllm csrc/quantization/fp4/nvfp4_utils.cuh (rcp.approx)",
    bit_exact=False,
    rules=(replace(_FLASHINFER_RULE, guard=Guard.ZERO_SCALE),),
)

MODELOPT = Dialect(
    name="modelopt",
    source="nvidia-modelopt 0.47.0, torch/quantization/qtensor/nvfp4_tensor.py",
    bit_exact=True,
    rules=(
        BlockRule(
            format=NVFP4,
            tensor_scale=TensorScaleRule.DECODE,
            stored_direction=ScaleDirection.DECODE,
            block_scale=BlockScaleRule.AMAX_OVER_DECODE_SHARE,
            value=ValueRule.OVER_PRODUCT,
            scale_low=2.0**-9,
            zero_scale_before=1.0,
            negative_zero=NegativeZero.DROPPED,
            non_finite=NonFinite.PROPAGATED,
        ),
    ),
)

COMPRESSED_TENSORS = Dialect(
    name="compressed_tensors",
    source="compressed-tensors 0.20.0, quantization/utils/helpers.py and lifecycle (eager path)",
    bit_exact=True,
    rules=(
        BlockRule(
            format=NVFP4,
            tensor_scale=TensorScaleRule.ENCODE_IN_INPUT_DTYPE,
            stored_direction=ScaleDirection.ENCODE,
            block_scale=BlockScaleRule.QUOTIENT_TIMES_ENCODE,
            value=ValueRule.OVER_QUOTIENT,
            zero_scale_after=0.125,
            negative_zero=NegativeZero.DROPPED,
            non_finite=NonFinite.REFUSED,
        ),
    ),
)

_TORCHAO_RULE = BlockRule(
    format=NVFP4,
    tensor_scale=TensorScaleRule.DECODE,
    stored_direction=ScaleDirection.DECODE,
    block_scale=BlockScaleRule.QUOTIENT_OVER_DECODE,
    value=ValueRule.TIMES_QUOTIENT,
    scale_low=2.0**-6,  # torch.finfo(float8_e4m3fn).tiny, the smallest normal number
    non_finite=NonFinite.REFUSED,
    infinite_scale_defined=False,  # 0/0, or 0 * inf: the codes follow the machine's NaN
)

TORCHAO = Dialect(
    name="torchao",
    source="torchao 0.18.0, prototype/mx_formats/nvfp4_tensor.py, two-level scaling",
    bit_exact=True,
    rules=(_TORCHAO_RULE,),
)

TORCHAO_ONE_LEVEL = Dialect(
    name="torchao_one_level",
    source="torchao 0.18.0, prototype/mx_formats/nvfp4_tensor.py, no per-tensor scale",
    bit_exact=True,
    rules=(replace(_TORCHAO_RULE, tensor_scale=TensorScaleRule.UNIT, infinite_scale_defined=True),),
)

DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        dialect.name: dialect
        for dialect in (
            CANONICAL,
            FLASHINFER_EXACT,
            FLASHINFER_FAST,
            VLLM_FAST,
            MODELOPT,
            COMPRESSED_TENSORS,
            TORCHAO,
            TORCHAO_ONE_LEVEL,
        )
    }
)


def dialect_named(name: str) -> Dialect:
    """Return the dialect called `name`; raise with the nearest known names otherwise."""
    if name not in DIALECTS:
        raise UnknownName.among("dialect", name, DIALECTS)
    return DIALECTS[name]
