"""Convert wo_a to the operand of DeepGEMM's batched product: FP8 [g, r, d] and its decode scales.

g: groups; r: output rows of each; d: inputs. The product is `bhr,hdr->bhd`. Each 128x128 block has
one scale, stored as `weight_scale_inv` in the form that the GPU's kernel takes:
  sm90   fp32 [g, r/128, d/128], amax / 448
  sm100  int32 [g, ceil(d/512), r]: four UE8M0 bytes a word, repeated for every row, rows (MN)
         innermost; DeepGEMM receives its transpose [g, r, ceil(d/512)]
DeepGEMM multiplies by the scales. `direction=encode` stores reciprocals for a consumer that
divides. `per=tensor` fills every block with the one scale of the whole weight. E4M3 scales and
constant ones are never written.

V3.2 has no wo_a. The rows of a group must be a multiple of 128.
Source: DeepGEMM csrc/apis/{layout,einsum}.hpp; vLLM 0.33.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.base.errors import LayoutMismatch, ShapeMismatch
from degarble.harness.checkpoint.transform.proof.compare import E4M3_LARGEST, FP8_FLOOR
from degarble.harness.checkpoint.transform.proof.layouts import WrittenWoA, check_wo_a
from degarble.harness.checkpoint.transform.recode import keeps_codes, kept_fp8
from degarble.harness.checkpoint.transform.source import (
    BLOCK_ROWS,
    chosen_linears,
    largest_magnitude,
    linears,
    require_model,
    rows_of,
)
from degarble.harness.checkpoint.transform.units import ConversionUnit
from degarble.harness.checkpoint.write.plan import PlannedTensor
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import ceil_div, exact_ue8m0, pack_scales
from degarble.harness.formats.number_formats import (
    E4M3,
    FP8_128X128_F32,
    FP8_128X128_UE8M0,
    UE8M0,
    Rounding,
)
from degarble.harness.formats.quantise import quantise
from degarble.harness.model.family import family_of
from degarble.harness.model.parameters import parameters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.checkpoint.transform.source import SourceLinear
    from degarble.harness.checkpoint.transform.units import (
        ConversionOptions,
        TargetNames,
        TensorProof,
    )
    from degarble.harness.checkpoint.view.view import Checkpoint

WO_A = ".attn.wo_a"
WEIGHT, SCALE = ".weight", ".weight_scale_inv"


class WoAExtents(NamedTuple):
    """The extents of wo_a: groups, rows of each, columns."""

    groups: int
    rows: int
    columns: int


def to_deepgemm_wo_a(
    checkpoint: Checkpoint, options: ConversionOptions, names: TargetNames
) -> Iterator[ConversionUnit]:
    """List one unit for each layer."""
    model, _ = require_model(checkpoint, "deepgemm-wo-a")
    if not any(parameter.name.endswith(WO_A) for parameter in parameters(model)):
        raise LayoutMismatch(
            "source of deepgemm-wo-a",
            model.family,
            "a V4 model: V3.2 has one output projection and no wo_a",
            "Convert with `--to fp8-block` or `--to vllm`.",
        )
    found = [
        source_linear for source_linear in linears(checkpoint) if source_linear.name.endswith(WO_A)
    ]
    if not found:
        raise LayoutMismatch("wo_a", "none", "at least one layer with it", "Look for lost shards.")
    groups, _ = family_of(model).head_groups(model)
    for linear in chosen_linears(found, options.only):
        yield unit_of(linear, names.module(linear.module), groups, options)


def unit_of(
    linear: SourceLinear, module: str, groups: int, options: ConversionOptions
) -> ConversionUnit:
    """Return the unit of one layer; `module` is its name in the target."""
    rows, columns = linear.weight.shape
    if rows % (groups * BLOCK_ROWS):
        raise ShapeMismatch(
            f"rows of {linear.name}",
            rows,
            f"{groups} groups of a multiple of {BLOCK_ROWS} rows, one of DeepGEMM's scales each",
            "Leave wo_a as it is: this kernel cannot read the model. `--to fp8-block` has no such"
            " limit.",
        )
    made = _WoA(linear, module, WoAExtents(groups, rows // groups, columns), options)

    def check(target: Checkpoint) -> Iterator[TensorProof]:
        output = WrittenWoA(target, module, groups)
        return check_wo_a(output, linear, options, kept=made.is_kept)

    return ConversionUnit(
        key=module,
        tensors=made.planned(),
        sources=linear.tensors,
        make=made.chunks,
        check=check,
        left_out=linear.input_scale,
        formats={linear.name: "FP8_128X128_UE8M0" if made.as_power else "FP8_128X128_F32"},
    )


class _WoA:
    """The conversion of one layer's weight."""

    def __init__(
        self, linear: SourceLinear, module: str, extents: WoAExtents, options: ConversionOptions
    ) -> None:
        self._linear = linear
        self._module = module
        self._extents = extents
        self._options = options
        self._scales: Tensor | None = None
        self.as_power = options.gpu == "sm100"  # sm100 takes powers of two alone

    @property
    def is_kept(self) -> bool:
        """Whether source codes and scales stay unchanged."""
        fmt = FP8_128X128_UE8M0 if self.as_power else FP8_128X128_F32
        return self._options.per == "block" and keeps_codes(self._linear.weight, fmt)

    def planned(self) -> tuple[PlannedTensor, ...]:
        groups, rows, columns = self._extents
        blocks = ceil_div(columns, 128)
        # sm100: four UE8M0 bytes a word, for every row.
        scale = ("I32", (groups, ceil_div(blocks, 4), rows))
        if not self.as_power:
            scale = ("F32", (groups, rows // BLOCK_ROWS, blocks))
        key = self._module
        return (
            PlannedTensor(key + WEIGHT, "F8_E4M3", tuple(self._extents), key),
            PlannedTensor(key + SCALE, *scale, key),
        )

    def chunks(self, tensor: PlannedTensor) -> Iterator[Tensor]:
        if tensor.name.endswith(WEIGHT):
            scales = []
            for codes, scale in self._panels():
                scales.append(scale)
                yield codes
            self._scales = torch.cat(scales)
            return
        kept, self._scales = self._scales, None
        if kept is None:  # a resumed run asks for the scales alone
            kept = torch.cat([scale for _, scale in self._panels()])
        yield self._formatted(kept)

    def _panels(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield codes with their fp32 scales [blocks of rows, blocks of columns]."""
        weight, fmt = self._linear.weight, FP8_128X128_UE8M0 if self.as_power else FP8_128X128_F32
        whole = self._whole_scale() if self._options.per == "tensor" else None
        kept = self.is_kept
        for _, record in rows_of(weight):
            if kept:
                codes, scale = kept_fp8(record, fmt)
            elif whole is None:
                made = quantise(record.values(torch.float32), fmt, CANONICAL)
                codes, scale = made.codes, made.block_scale
            else:
                values = record.values(torch.float32)
                codes = encode_array(values / whole, E4M3)
                scale = whole.expand(values.shape[0] // BLOCK_ROWS, ceil_div(values.shape[1], 128))
            yield codes, decode_array(scale, UE8M0) if scale.dtype is torch.uint8 else scale

    def _whole_scale(self) -> Tensor:
        """Return the one decode scale of the weight: amax / 448, a power of two for sm100."""
        # The floor keeps the scale of a zero weight positive.
        amax = largest_magnitude([self._linear.weight]).clamp(min=FP8_FLOOR)
        scale = amax / torch.full_like(amax, E4M3_LARGEST)
        if self.as_power:
            # Rounded up, or the largest magnitude would exceed E4M3's range.
            scale = decode_array(encode_array(scale.reshape(1), UE8M0, Rounding.UP), UE8M0)
        return scale.reshape(())

    def _formatted(self, scales: Tensor) -> Tensor:
        """Convert fp32 decode scales to the form of the GPU's kernel."""
        groups, rows, _ = self._extents
        scales = scales.reshape(groups, -1, scales.shape[-1])
        if self._options.direction == "encode":
            scales = scales.reciprocal()
        if not self.as_power:
            return scales
        packed = pack_scales(exact_ue8m0(scales), rows_per_scale=BLOCK_ROWS, rows=rows)
        # [g, r, words] to [g, words, r]: rows become innermost.
        return packed.transpose(-1, -2)
