"""Convert linears between number formats: to BF16, FP8 in blocks, NVFP4, and NVFP4 without loss."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import LayoutMismatch
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.transform.nvfp4_scales import (
    WIDEST,
    Exponents,
    block_scales_of,
    exponents_of,
    is_exact,
    join_exponents,
    tensor_scale_of,
)
from degarble.harness.checkpoint.transform.proof.bounds import NO_BOUND
from degarble.harness.checkpoint.transform.proof.compare import (
    EXACT,
    check_recoded,
    compare_rows,
    rows_exactly,
    stacked_rows,
)
from degarble.harness.checkpoint.transform.recode import Recoded, ScalePartners
from degarble.harness.checkpoint.transform.source import (
    chosen_linears,
    linears,
    require_model,
    rows_of,
)
from degarble.harness.checkpoint.transform.units import ConversionUnit
from degarble.harness.checkpoint.write.plan import PlannedTensor
from degarble.harness.formats.number_formats import (
    FP8_128X128_F32,
    FP8_128X128_UE8M0,
    MXFP4,
    NVFP4,
    UE8M0,
)
from degarble.harness.model.family import family_of
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.recipes import BF16, recipe_named
from degarble.harness.model.tensors import PartKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from degarble.harness.checkpoint.transform.source import SourceLinear
    from degarble.harness.checkpoint.transform.units import (
        ConversionOptions,
        TargetNames,
        TensorProof,
    )
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.formats.number_formats import BlockFormat


# --------------------------------------------------------------------------------------------------
# What all of them share: the unit of a Recoded weight, and groups that share a tensor scale.


def recoding_unit(
    names: TargetNames,
    module: str,
    members: Sequence[SourceLinear],
    fmt: BlockFormat | None,
    partners: ScalePartners | None = None,
) -> ConversionUnit:
    """Return the unit that makes `module` of the target from linears stacked along rows."""
    recoded = Recoded([member.weight for member in members], fmt, partners)
    parts = names.parts(module, fmt)
    part_of = {name: part for part, name in parts.items()}

    def make(tensor: PlannedTensor) -> Iterator[Tensor]:
        return recoded.chunks(part_of[tensor.name])

    def check(target: Checkpoint) -> Iterator[TensorProof]:
        return check_recoded(target, module, recoded)

    word = "BF16" if fmt is None else fmt.name
    return ConversionUnit(
        key=module,
        tensors=recoded.planned(parts, module),
        sources=tuple(name for member in members for name in member.tensors),
        make=make,
        check=check,
        left_out=tuple(pair for member in members for pair in member.input_scale),
        formats={member.name: word for member in members},
    )


def partner_groups(
    checkpoint: Checkpoint, found: Iterable[SourceLinear]
) -> list[list[SourceLinear]]:
    """Group linears that one fused tensor of vLLM holds, expert by expert."""
    fused: dict[str, str] = {}
    if checkpoint.model is not None:
        for fusion in layout_named("vllm", checkpoint.model).fusions:
            fused |= dict.fromkeys(fusion.members, fusion.target)
    groups: dict[tuple[object, ...], list[SourceLinear]] = {}
    for linear in found:
        parameter = linear.parameter
        key: tuple[object, ...] = (linear.name,)
        if parameter is not None and parameter.row.name in fused:
            key = (parameter.block, parameter.expert, fused[parameter.row.name])
        groups.setdefault(key, []).append(linear)
    return list(groups.values())


# --------------------------------------------------------------------------------------------------
# To BF16: codes times scales, rounded once to bfloat16.
#
# Decodes every quantised linear, or those that `only` names. The direction of scales is that of
# each module's producer: compressed-tensors' global scales divide, all others multiply. Input
# scales are left out and reported, because they apply to activations only.


def to_bf16(
    checkpoint: Checkpoint, options: ConversionOptions, names: TargetNames
) -> Iterator[ConversionUnit]:
    """List one unit for each quantised linear."""
    for linear in chosen_linears(linears(checkpoint), options.only):
        if linear.weight.format is not None:
            yield recoding_unit(names, names.module(linear.module), [linear], None)


# --------------------------------------------------------------------------------------------------
# To FP8 with one scale for every 128x128 block, fp32 or UE8M0.
#
# Converts what the released model has quantised, or what `only` names; for an unknown model, every
# quantised module. Weights that the released model has in BF16 (compressors) and that the source
# has quantised are decoded, because engines build them unquantised.
#
# Scales are decode scales: the consumer multiplies codes by them, despite the name
# `weight_scale_inv`. FP8 keeps its codes where the other scale format holds its scales exactly.
# MXFP4 keeps its values exactly where a block spans few exponents. V4's experts always get fp32
# scales, because engines read no others with `expert_dtype` fp8.

BY_SCALE = {"fp32": FP8_128X128_F32, "ue8m0": FP8_128X128_UE8M0}


def to_fp8_block(
    checkpoint: Checkpoint, options: ConversionOptions, names: TargetNames
) -> Iterator[ConversionUnit]:
    """List one unit for each linear that is not in this format yet."""
    model = checkpoint.model
    released = recipe_named("official", model) if model else None
    for linear in chosen_linears(linears(checkpoint), options.only):
        fmt = BY_SCALE[options.scale]
        if model is not None and linear.parameter is not None:
            fmt = family_of(model).fp8_scales(linear.parameter, fmt)
        wanted = bool(options.only) or linear.weight.format is not None
        if not options.only and released is not None and linear.parameter is not None:
            wanted = released.format_of(linear.parameter).weight != BF16
            if not wanted and linear.weight.format is not None:
                yield recoding_unit(names, names.module(linear.module), [linear], None)
        if wanted and linear.weight.format != fmt:
            yield recoding_unit(names, names.module(linear.module), [linear], fmt)


# --------------------------------------------------------------------------------------------------
# To weight-only NVFP4 as ModelOpt stores it.
#
# Converts the linears of the recipe `nvfp4-full`, or what `only` names. Partners share one tensor
# scale, from the largest magnitude of all of them. No input scale is written: that needs a
# calibration, which `degarble quantise` reads.

RECIPE = "nvfp4-full"


def to_nvfp4(
    checkpoint: Checkpoint, options: ConversionOptions, names: TargetNames
) -> Iterator[ConversionUnit]:
    """List one unit for each linear that is not NVFP4 yet."""
    model, _ = require_model(checkpoint, "nvfp4")
    recipe = recipe_named(RECIPE, model)
    taken = [
        source_linear
        for source_linear in chosen_linears(linears(checkpoint), options.only)
        if source_linear.parameter is not None
        and source_linear.weight.format != NVFP4
        and (options.only or recipe.format_of(source_linear.parameter).weight == NVFP4.name)
    ]
    for group in partner_groups(checkpoint, taken):
        partners = ScalePartners([source_linear.weight for source_linear in group])
        for linear in group:
            yield recoding_unit(names, names.module(linear.module), [linear], NVFP4, partners)


# --------------------------------------------------------------------------------------------------
# MXFP4 to NVFP4 without loss, where the exponents of one tensor span at most 17.
#
# Codes stay unchanged; harness.checkpoint.transform.nvfp4_scales defines the scales. w1 and w3 of
# one expert share a tensor scale, because engines hold them in one tensor. `back` restores the
# source's bytes, except for the scales of blocks of zeros. Partners whose exponents span more raise
# an error before anything is written.

_BIAS = UE8M0.bias
_NAN = 0xFF


def to_nvfp4_lossless(
    checkpoint: Checkpoint, options: ConversionOptions, names: TargetNames
) -> Iterator[ConversionUnit]:
    """List one unit for each linear in MXFP4."""
    found = [
        source_linear
        for source_linear in linears(checkpoint)
        if source_linear.weight.format == MXFP4
    ]
    if not found:
        raise LayoutMismatch(
            f"weights of {shown(str(checkpoint.root))}",
            "none in MXFP4",
            "at least one MXFP4 weight: other formats cannot become NVFP4 without loss",
            "Quantise with `--to nvfp4` instead.",
        )
    taken = list(chosen_linears(found, options.only))
    for group in partner_groups(checkpoint, taken):
        shared = SharedExponents(group)
        for linear in group:
            yield _unit(names, linear, shared)


class SharedExponents:
    """The exponents of partners that share a tensor scale, read at first use."""

    def __init__(self, members: Sequence[SourceLinear]) -> None:
        self._members = members

    def require(self) -> None:
        """Raise where partners span too many exponents."""
        lowest, highest = _NAN, 0
        for member in self._members:
            stored = member.weight.weight().block_scale
            assert stored is not None
            lowest, highest = min(lowest, int(stored.min())), max(highest, int(stored.max()))
            for entry in member.weight.form.parts.values():
                member.weight.release(entry)
        # Scales alone bound the span from above. Codes are read only where that bound is too wide,
        # because blocks of zeros do not count.
        if highest == _NAN or not is_exact(Exponents(lowest - _BIAS, highest - _BIAS)):
            assert self.exponents is None or is_exact(self.exponents)

    @cached_property
    def exponents(self) -> Exponents | None:
        """The smallest and largest exponent of blocks that hold a nonzero value."""
        found = join_exponents(
            [
                exponents_of(record.codes, record.block_scale)
                for member in self._members
                for _, record in rows_of(member.weight)
                if record.codes is not None and record.block_scale is not None
            ]
        )
        if not is_exact(found):
            assert found is not None
            raise LayoutMismatch(
                f"exponents of {', '.join(shown(member.name) for member in self._members)}",
                f"{found.low} to {found.high}",
                f"at most {WIDEST} apart, or E4M3 cannot hold the smallest scale",
                "Quantise with `--to nvfp4` instead, within half a step, or keep it in MXFP4.",
            )
        return found


def _unit(
    target_names: TargetNames, linear: SourceLinear, shared: SharedExponents
) -> ConversionUnit:
    key = target_names.module(linear.module)
    names = target_names.parts(key, NVFP4)
    part_of = {name: part for part, name in names.items()}
    rows, columns = linear.weight.shape

    def make(tensor: PlannedTensor) -> Iterator[Tensor]:
        part, found = part_of[tensor.name], shared.exponents
        if part is PartKind.TENSOR_SCALE:
            yield torch.tensor(tensor_scale_of(found), dtype=torch.float32)
            return
        for _, record in rows_of(linear.weight):
            assert record.codes is not None
            assert record.block_scale is not None
            codes, scale = record.codes, record.block_scale
            yield codes if part is PartKind.CODES else block_scales_of(scale, found)

    def check(target: Checkpoint) -> Iterator[TensorProof]:
        output = target.stored(key)
        rows_out = ((values, step) for _, values, step in rows_exactly(output))
        comparison, faults = compare_rows(stacked_rows([linear.weight]), rows_out, NO_BOUND)
        if output.format != NVFP4:
            faults.append("not stored as NVFP4")
        yield comparison.proof(key, linear.tensors, EXACT, faults)

    return ConversionUnit(
        key=key,
        tensors=(
            PlannedTensor(names[PartKind.CODES], "U8", (rows, columns // 2), key),
            PlannedTensor(names[PartKind.BLOCK_SCALE], "F8_E4M3", (rows, columns // 16), key),
            PlannedTensor(names[PartKind.TENSOR_SCALE], "F32", (), key),
        ),
        sources=linear.tensors,
        make=make,
        check=check,
        left_out=linear.input_scale,
        formats={linear.name: "NVFP4"},
        require=shared.require,
    )
