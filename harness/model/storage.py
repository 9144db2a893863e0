"""Stored parts of one matrix in a format: codes, block scales, tensor scales, and their names.

A part states its tensor's dtype and how many logical elements one of its elements stands for.
Checkpoints name parts by suffixes. Extents come from the block formats. A matrix whose K is no
multiple of the block cannot be stored, nor a part that the suffix table has no name for.

Sources of the suffixes: DeepSeek-V4-Pro shard headers; ModelOpt's exports; compressed-tensors 0.20;
vLLM 0.33 models/deepseek_v4.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.base.errors import LayoutMismatch, ShapeMismatch, UnknownName
from degarble.harness.formats.number_formats import block_format, codes_shape, scale_shape
from degarble.harness.model.recipes import BF16, Formats
from degarble.harness.model.types import Box, Dtype, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.model.parameters import Parameter


class Part(StrEnum):
    """Kinds of stored tensor that a parameter may have."""

    VALUE = "value"  # unquantised
    CODES = "codes"
    BLOCK_SCALE = "block_scale"
    TENSOR_SCALE = "tensor_scale"
    INPUT_SCALE = "input_scale"


_DTYPES = {"E2M1": Dtype.U8, "E4M3": Dtype.F8_E4M3, "UE8M0": Dtype.F8_E8M0, "FP32": Dtype.F32}


@dataclass(frozen=True)
class StoredPart:
    """One part of a stored parameter. `unit`: logical rows and columns of one of its elements."""

    part: Part
    shape: tuple[int, ...]
    dtype: Dtype
    unit: tuple[int, int]

    def box_of(self, logical: Box, name: str) -> Box:
        """Translate a box of the logical matrix; raise if it cuts through an element."""
        if not self.shape:
            return Box(())
        if self.part is Part.VALUE:
            return logical
        ranges = []
        for (start, stop), unit, extent in zip(logical.ranges, self.unit, self.shape, strict=True):
            last = -(-stop // unit)
            if start % unit or (stop % unit and last != extent):
                raise ShapeMismatch(
                    f"rows or columns {start}:{stop} of {name}",
                    f"{self.part} of {unit}",
                    f"a cut at a multiple of {unit}",
                    "Choose fewer ranks, or a format with smaller blocks.",
                )
            ranges.append((start // unit, last))
        return Box(tuple(ranges))


def parts_of(parameter: Parameter, formats: Formats) -> tuple[StoredPart, ...]:
    """Return the tensors that hold `parameter` in these formats."""
    if formats.weight == BF16 or parameter.kind is not Kind.LINEAR:
        return _plain(parameter.shape, parameter.row.dtype)
    return _quantised(parameter.shape, formats)


# Experts are alike: of the 145,116 tensors of V4-Pro, a few dozen differ in shape and format.
@lru_cache(maxsize=1024)
def _plain(shape: tuple[int, ...], dtype: Dtype) -> tuple[StoredPart, ...]:
    return (StoredPart(Part.VALUE, shape, dtype, (1, 1)),)


@lru_cache(maxsize=1024)
def _quantised(shape: tuple[int, ...], formats: Formats) -> tuple[StoredPart, ...]:
    name = formats.weight
    fmt = block_format(name)
    codes = StoredPart(
        Part.CODES, codes_shape(shape, fmt), _DTYPES[fmt.element.name], (1, 2 if fmt.packed else 1)
    )
    scales = StoredPart(
        Part.BLOCK_SCALE, scale_shape(shape, fmt), _DTYPES[fmt.scale.name], fmt.block
    )
    parts = [codes, scales]
    if fmt.tensor_scale:
        parts.append(StoredPart(Part.TENSOR_SCALE, (), Dtype.F32, (0, 0)))
        if formats.activation == name:  # weight-only checkpoints have no calibrated input
            parts.append(StoredPart(Part.INPUT_SCALE, (), Dtype.F32, (0, 0)))
    return tuple(parts)


@dataclass(frozen=True)
class Suffixes:
    """How one family of checkpoints names parts: by part, and by (part, format) where it differs.

    `dtypes` says where the same bytes are typed otherwise, by (part, format).
    """

    name: str
    by_part: Mapping[Part, str]
    by_format: Mapping[tuple[Part, str], str]
    dtypes: Mapping[tuple[Part, str], Dtype]

    def suffix(self, part: Part, weight_format: str) -> str:
        """Return the suffix, or refuse a part that these checkpoints never hold."""
        key = (part, weight_format)
        if key not in self.by_format and part not in self.by_part:
            raise LayoutMismatch(
                f"{part} of {weight_format}",
                self.name,
                "a format that these checkpoints can hold",
                "Convert the weight first, or choose another layout.",
            )
        return self.by_format.get(key) or self.by_part[part]

    def dtype(self, stored: StoredPart, weight_format: str) -> Dtype:
        """Return the dtype by which these checkpoints type the part's bytes."""
        return self.dtypes.get((stored.part, weight_format), stored.dtype)


_MODELOPT = {
    Part.VALUE: ".weight",
    Part.CODES: ".weight",
    Part.TENSOR_SCALE: ".weight_scale_2",
    Part.INPUT_SCALE: ".input_scale",
}
_FP8 = ("FP8_128X128_UE8M0", "FP8_128X128_F32")
_NVFP4_SCALE = {(Part.BLOCK_SCALE, "NVFP4"): ".weight_scale"}
_OFFICIAL_SCALES = {(Part.BLOCK_SCALE, name): ".scale" for name in (*_FP8, "MXFP4")}
_HF_SCALES = {(Part.BLOCK_SCALE, name): ".weight_scale_inv" for name in _FP8}
_BYTES = {(Part.CODES, "MXFP4"): Dtype.U8, (Part.BLOCK_SCALE, "MXFP4"): Dtype.U8}

SUFFIXES: Mapping[str, Suffixes] = MappingProxyType(
    {
        table.name: table
        for table in (
            Suffixes(
                "deepseek",
                _MODELOPT,
                _NVFP4_SCALE | _OFFICIAL_SCALES,
                {(Part.CODES, "MXFP4"): Dtype.I8},
            ),
            Suffixes("huggingface", _MODELOPT, _NVFP4_SCALE | _HF_SCALES, {}),
            Suffixes(
                "vllm",
                _MODELOPT,
                _NVFP4_SCALE | _HF_SCALES | {(Part.BLOCK_SCALE, "MXFP4"): ".weight_scale"},
                _BYTES,
            ),
            # Both global scales are divisors here: ScaleDirection.ENCODE.
            Suffixes(
                "compressed-tensors",
                {Part.VALUE: ".weight"},
                {
                    (Part.CODES, "NVFP4"): ".weight_packed",
                    (Part.BLOCK_SCALE, "NVFP4"): ".weight_scale",
                    (Part.TENSOR_SCALE, "NVFP4"): ".weight_global_scale",
                    (Part.INPUT_SCALE, "NVFP4"): ".input_global_scale",
                },
                {},
            ),
        )
    }
)


def suffixes_named(name: str) -> Suffixes:
    """Look a suffix table up."""
    if name not in SUFFIXES:
        raise UnknownName.among("suffixes", name, SUFFIXES)
    return SUFFIXES[name]
