"""Recode weights to another format: decode a panel of rows, encode it, and stream the parts.

`Recoded` is one or more source weights, stacked along rows, in one target format (BF16, FP8 in
128x128 blocks, NVFP4). The weights need equal widths, and only the last may end within a block.
FP8 keeps its codes where the target holds its scales exactly, so nothing is rounded twice. Input
scales belong to activations and are not handled here.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.transform.nvfp4_scales import (
    ScaleRule,
    quantise_rows,
    tensor_scale,
)
from degarble.harness.checkpoint.transform.source import (
    BLOCK_ROWS,
    largest_magnitude,
    row_values,
    rows_of,
)
from degarble.harness.checkpoint.write.plan import PlannedTensor
from degarble.harness.formats.codec import decode_array
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import exact_ue8m0
from degarble.harness.formats.number_formats import (
    FP8_128X128_F32,
    FP8_128X128_UE8M0,
    MXFP4,
    NVFP4,
    UE8M0,
    codes_shape,
    scale_shape,
)
from degarble.harness.formats.quantise import quantise
from degarble.harness.model.tensors import PartKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.checkpoint.view.stored import StoredWeight
    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.formats.weight import Weight

_FP8 = (FP8_128X128_F32, FP8_128X128_UE8M0)
# safetensors dtypes; E2M1 codes are packed, two a byte.
_DTYPES = {"E2M1": "U8", "E4M3": "F8_E4M3", "UE8M0": "F8_E8M0", "FP32": "F32"}


class ScalePartners:
    """Weights that share one tensor scale. `exact`: their magnitudes, as a proof measured them."""

    def __init__(self, weights: Sequence[StoredWeight]) -> None:
        self.weights = tuple(weights)
        self.exact: dict[str, float] = {}

    @cached_property
    def amax(self) -> Tensor:
        """The largest magnitude of all of them, read at first use."""
        return largest_magnitude(self.weights)


class Recoded:
    """Source weights stacked along rows, as one weight of another format; None: BF16.

    `partners`: the weights whose largest magnitude NVFP4's tensor scale covers; default: its own.
    """

    def __init__(
        self,
        weights: Sequence[StoredWeight],
        fmt: BlockFormat | None,
        partners: ScalePartners | None = None,
    ) -> None:
        self.weights = tuple(weights)
        self.format = fmt
        self.partners = partners or ScalePartners(weights)
        self._scales: Tensor | None = None
        _require_stack(self.weights, fmt)
        self.shape = (sum(weight.shape[0] for weight in self.weights), self.weights[0].shape[1])

    def planned(self, names: Mapping[PartKind, str], key: str) -> tuple[PlannedTensor, ...]:
        """List the tensors, codes before scales."""
        fmt = self.format
        if fmt is None:
            return (PlannedTensor(names[PartKind.VALUE], "BF16", self.shape, key),)
        codes, scale = _DTYPES[fmt.element.name], _DTYPES[fmt.scale.name]
        tensors = [
            PlannedTensor(names[PartKind.CODES], codes, codes_shape(self.shape, fmt), key),
            PlannedTensor(names[PartKind.BLOCK_SCALE], scale, scale_shape(self.shape, fmt), key),
        ]
        if fmt.tensor_scale:
            tensors.append(PlannedTensor(names[PartKind.TENSOR_SCALE], "F32", (), key))
        return tuple(tensors)

    def chunks(self, part: PartKind) -> Iterator[Tensor]:
        """Yield the bytes of one part, in row order."""
        if part is PartKind.VALUE:
            for weight in self.weights:
                for _, record in rows_of(weight):
                    yield record.values(torch.bfloat16)
        elif part is PartKind.CODES:
            scales = []
            for codes, scale in self._panels():
                scales.append(scale)
                yield codes
            self._scales = torch.cat(scales)
        elif part is PartKind.BLOCK_SCALE:
            # Codes come first and keep their scales. A resumed run may request the scales alone.
            kept, self._scales = self._scales, None
            yield kept if kept is not None else torch.cat([scale for _, scale in self._panels()])
        else:
            yield self.tensor_scale

    @property
    def tensor_scale(self) -> Tensor:
        """NVFP4's decode scale: the largest magnitude over 6 * 448."""
        return torch.tensor(self._scale, dtype=torch.float32)

    @cached_property
    def _scale(self) -> float:
        return tensor_scale(float(self.partners.amax), ScaleRule.AMAX)

    def _panels(self) -> Iterator[tuple[Tensor, Tensor]]:
        for weight in self.weights:
            if self.keeps_codes(weight):
                for _, record in rows_of(weight):
                    yield kept_fp8(record, self.format)
                continue
            for _, record in rows_of(weight):
                yield self._encoded(row_values(record))

    def _encoded(self, values: Tensor) -> tuple[Tensor, Tensor]:
        assert self.format is not None
        if self.format == NVFP4:
            return quantise_rows(values, self._scale, ScaleRule.AMAX)
        if self.by_powers:
            # Quantise with powers of two as scales, then store them as fp32.
            made = quantise(values.float(), FP8_128X128_UE8M0, CANONICAL)
            return made.codes, decode_array(made.block_scale, UE8M0)
        made = quantise(values.float(), self.format, CANONICAL)
        return made.codes, made.block_scale

    @property
    def by_powers(self) -> bool:
        """Whether fp32 scales are powers of two: lossless for MXFP4 of few exponents a block."""
        of_mxfp4 = all(weight.format == MXFP4 for weight in self.weights)
        return self.format == FP8_128X128_F32 and of_mxfp4

    def keeps_codes(self, weight: StoredWeight) -> bool:
        """Return whether a weight is FP8 already, with scales that the target holds exactly."""
        return keeps_codes(weight, self.format)


def keeps_codes(weight: StoredWeight, fmt: BlockFormat | None) -> bool:
    """Return whether a weight is FP8 in 128x128 blocks with scales that `fmt` holds exactly."""
    if weight.format not in _FP8 or fmt not in _FP8:
        return False
    if fmt in (weight.format, FP8_128X128_F32):
        return True
    scales = weight.weight().block_scale
    assert scales is not None
    try:
        exact_ue8m0(scales.clone())
    except InvalidArgument:
        return False
    return True


def kept_fp8(record: Weight, fmt: BlockFormat | None) -> tuple[Tensor, Tensor]:
    """Return the codes as they are, and their scales in the scale format of `fmt`."""
    assert record.codes is not None
    assert record.block_scale is not None
    scale = record.block_scale
    if fmt == FP8_128X128_F32 and scale.dtype is torch.uint8:
        scale = decode_array(scale, UE8M0)
    elif fmt == FP8_128X128_UE8M0 and scale.dtype is torch.float32:
        scale = exact_ue8m0(scale)
    return record.codes, scale


def _require_stack(weights: Sequence[StoredWeight], fmt: BlockFormat | None) -> None:
    unit = BLOCK_ROWS if fmt is not None and fmt.block[0] > 1 else 1
    for weight in weights:
        if len(weight.shape) != 2 or weight.shape[1] != weights[0].shape[1]:
            raise ShapeMismatch(
                f"{shown(weight.name)} in a stack of rows",
                list(weight.shape),
                f"a matrix of {weights[0].shape[-1]} columns, as {shown(weights[0].name)} has",
                "See that each part comes from its own prefix.",
            )
    for weight in weights[:-1]:
        if weight.shape[0] % unit:
            raise ShapeMismatch(
                f"rows of {shown(weight.name)}",
                weight.shape[0],
                f"a multiple of {unit}: a scale would span two weights",
                "Stack them unquantised.",
            )
