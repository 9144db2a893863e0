"""Produce the bytes of a quantised checkpoint, tensor by tensor, streamed from the source.

For each parameter: copy codes that have the wanted format already, convert MXFP4 to NVFP4 exactly
where that is possible, and quantise everything else from decoded float32 (or stored bfloat16)
values. NVFP4 follows ModelOpt's dialect; other formats are canonical. Partners that an engine fuses
share one tensor scale, so all of them are read to find the amax.

Memory is a row block of four million elements and the block scales of one matrix. One thread, so
that sums, and with them the report, do not depend on the machine.

NaN and infinities in weights, NVFP4 with divisor scales (convert it first), and quantised
activations without a calibration raise an error.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Protocol

import torch

from degarble.harness.base.errors import InvalidArgument, ScaleDirectionMismatch
from degarble.harness.checkpoint.transform import lossless
from degarble.harness.checkpoint.transform.quantise.calibration import InputScales, partners_of
from degarble.harness.checkpoint.transform.quantise.conversion_report import GroupScale, ShardFacts
from degarble.harness.checkpoint.transform.scale_search import (
    Errors,
    Quantised,
    quantise_rows,
    tensor_scale,
)
from degarble.harness.checkpoint.transform.source_values import row_values
from degarble.harness.checkpoint.view.stored import TORCH_DTYPES
from degarble.harness.formats.block_formats import MXFP4, NVFP4, block_format
from degarble.harness.formats.fast.modelopt import largest_finite
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.types import ScaleDirection
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.parameters import parameter_named
from degarble.harness.model.recipes import BF16
from degarble.harness.model.storage import Part
from degarble.harness.model.tensors import slots

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from degarble.harness.checkpoint.transform.quantise.calibration import Calibration
    from degarble.harness.checkpoint.transform.scale_search import ScaleRule
    from degarble.harness.checkpoint.view.stored import StoredWeight
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.checkpoint.write.plan import PlannedTensor
    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Layout
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.tensors import Slot

# Elements of a row block: 16 MiB in float32.
_BLOCK_ELEMENTS = 1 << 22
_PANEL = 128  # rows of the tallest block: every cut is a multiple, in source and target


class Choices(Protocol):
    """The settings that the producer takes from a job."""

    @property
    def layout(self) -> Layout:
        """The target's layout."""

    @property
    def scale_rule(self) -> ScaleRule:
        """The rule that chooses block scales."""

    @property
    def lossless(self) -> bool:
        """Whether MXFP4 is converted exactly where it can be."""

    @property
    def calibration(self) -> Calibration | None:
        """The source of input scales."""


class QuantisingProducer:
    """The producer of a job's planned tensors; `facts` collects the report."""

    def __init__(self, source: Checkpoint, job: Choices) -> None:
        assert source.model is not None, "plan_job has asked"
        self._source = source
        self._job = job
        self._config: Config = source.model
        self._recipe = job.layout.recipe_for(self._config)
        fusions = layout_named("vllm", self._config).fusions
        self._fusions = {member: each.members for each in fusions for member in each.members}
        self._groups: dict[tuple[str, ...], GroupScale] = {}
        self._slots: tuple[str, dict[str, Slot]] = ("", {})
        self._scales: tuple[str, Tensor] | None = None  # of the codes made last
        self._inputs: InputScales | None = None
        self.facts = ShardFacts()

    def close(self) -> None:
        """Close the source."""
        self._source.close()

    def check(self, chosen: Iterable[Parameter]) -> None:
        """Raise early for what would otherwise fail in the middle of the work."""
        wanted = []
        for parameter in chosen:
            formats = self._recipe.format_of(parameter)
            stored = self._source.stored(parameter.name)
            divides = stored.form.direction is ScaleDirection.ENCODE
            if divides and formats.weight == NVFP4.name:
                raise ScaleDirectionMismatch(
                    f"tensor scale of {parameter.name}",
                    "a divisor (compressed-tensors)",
                    "a source in ModelOpt's layout, or one that is not NVFP4",
                    "Convert it to BF16 first: `degarble convert --to bf16`.",
                )
            if formats.activation == NVFP4.name and not self._keeps_input_scale(stored):
                wanted.append(parameter)
        if wanted and self._job.calibration is None:
            raise InvalidArgument(
                "calibration",
                f"none, and {len(wanted)} linears such as {wanted[0].name} need input scales",
                "amax records of their inputs",
                "Pass --calibration with a capture, or take weights alone with `degarble convert"
                " --to nvfp4`: engines take uninitialised memory for a missing input_scale.",
            )
        if wanted:
            self._input_scales(wanted)

    def __call__(self, tensor: PlannedTensor) -> Iterator[Tensor]:
        """Yield the bytes of one tensor."""
        if self._slots[0] != tensor.key:
            parameter = parameter_named(self._config, tensor.key)
            found = slots(self._config, self._job.layout, [parameter])
            self._slots = tensor.key, {slot.tensor: slot for slot in found}
        slot = self._slots[1][tensor.name]
        stored = self._source.stored(tensor.key)
        if slot.part is Part.VALUE:
            yield from self._plain(slot, stored)
        elif slot.part is Part.CODES:
            yield from self._codes(slot.parameter, stored)
        elif slot.part is Part.BLOCK_SCALE:
            yield self._block_scales(slot.parameter, stored)
        elif slot.part is Part.TENSOR_SCALE:
            yield self._tensor_scale(slot.parameter, stored)
        else:
            yield self._input_scale(slot.parameter, stored)

    def _plain(self, slot: Slot, stored: StoredWeight) -> Iterator[Tensor]:
        """Yield unquantised values; report values that the target's dtype cannot hold."""
        dtype, rounded = TORCH_DTYPES[slot.dtype], 0
        for _, weight in stored.row_blocks(_elements(stored.shape)):
            integers = weight.value is not None and not weight.value.is_floating_point()
            values = weight.value if integers else row_values(weight)
            assert values is not None, "integers are values"
            made = values.to(dtype)
            if made.dtype.itemsize < values.dtype.itemsize:
                rounded += int((made.to(values.dtype) != values).sum())
            yield made
        action = "decoded" if stored.format else "copied"
        value = stored.form.parts.get(Part.VALUE)
        before = _name(stored) if value is None else value.dtype
        self.facts.add_plain(slot.parameter.name, action, before, slot.dtype, rounded)

    def _codes(self, parameter: Parameter, stored: StoredWeight) -> Iterator[Tensor]:
        """Yield codes, and keep the block scales that are computed with them."""
        wanted = self._recipe.format_of(parameter).weight
        scales: list[Tensor] = []
        if _name(stored) == wanted:
            for weight in _walk(stored):
                assert weight.codes is not None, "codes were stored"
                assert weight.block_scale is not None, "codes have scales"
                scales.append(weight.block_scale.clone())
                yield weight.codes
            self.facts.add_plain(parameter.name, "copied", wanted, wanted, 0)
        elif wanted == NVFP4.name:
            yield from self._nvfp4(parameter, stored, scales)
        else:
            for weight in _walk(stored):
                made = quantise(row_values(weight), block_format(wanted))
                scales.append(made.block_scale)
                yield made.codes
            self.facts.add_plain(parameter.name, "requantised", _name(stored), wanted, 0)
        self._scales = parameter.name, torch.cat(scales)

    def _nvfp4(
        self, parameter: Parameter, stored: StoredWeight, scales: list[Tensor]
    ) -> Iterator[Tensor]:
        group = self._group(parameter)
        errors, proven, row = Errors(), group.exact, 0
        for weight in _walk(stored):
            if group.exact:
                codes, source_scale = _mxfp4_of(weight)
                block_scale = lossless.block_scales_of(source_scale, group.exponents)
                made = Quantised(codes.view(torch.uint8), block_scale)
                proven &= lossless.proven(codes, source_scale, block_scale, group.scale)
            else:
                values = row_values(weight)
                made = quantise_rows(values, group.scale, self._job.scale_rule)
                errors.add(row, values, made, group.scale)
            row += made.codes.shape[0]
            scales.append(made.block_scale)
            yield made.codes
        assert proven is group.exact, "an exact group must decode to the same numbers"
        self.facts.add_nvfp4(parameter.name, _name(stored), prod(stored.shape), group, errors)

    def _block_scales(self, parameter: Parameter, stored: StoredWeight) -> Tensor:
        if self._scales is None or self._scales[0] != parameter.name:
            for _ in self._codes(parameter, stored):
                pass
        assert self._scales is not None, "made with the codes"
        return self._scales[1]

    def _tensor_scale(self, parameter: Parameter, stored: StoredWeight) -> Tensor:
        if _name(stored) == NVFP4.name:
            kept = stored.weight().tensor_scale
            assert kept is not None, "NVFP4 has a tensor scale"
            return kept.clone()
        return torch.tensor(self._group(parameter).scale, dtype=torch.float32)

    def _input_scale(self, parameter: Parameter, stored: StoredWeight) -> Tensor:
        if self._keeps_input_scale(stored):
            kept = stored.weight().input_scale
            assert kept is not None, "asked for above"
            return kept.clone()
        found = self._input_scales(()).of(parameter)
        self.facts.add_input(parameter.name, found)
        return torch.tensor(found.scale, dtype=torch.float32)

    def _keeps_input_scale(self, stored: StoredWeight) -> bool:
        """Return whether the source's own input scale is kept: no calibration replaces it."""
        return Part.INPUT_SCALE in stored.form.parts and self._job.calibration is None

    def _input_scales(self, wanted: Iterable[Parameter]) -> InputScales:
        if self._inputs is None:
            assert self._job.calibration is not None, "check() has asked"
            self._inputs = InputScales(self._config, self._job.calibration, wanted)
        return self._inputs

    def _group(self, parameter: Parameter) -> GroupScale:
        """Return the tensor scale that a parameter shares with its partners."""
        # A partner in another format has no tensor scale to share.
        members = tuple(
            name
            for name in partners_of(parameter, self._fusions)
            if self._recipe.format_of(parameter_named(self._config, name)).weight == NVFP4.name
        )
        if members not in self._groups:
            self._groups[members] = self._measured([self._source.stored(each) for each in members])
        return self._groups[members]

    def _measured(self, members: list[StoredWeight]) -> GroupScale:
        why_not = ""
        if all(each.format == MXFP4 for each in members) and self._job.lossless:
            parts = [
                lossless.exponents_of(*_mxfp4_of(weight))
                for each in members
                for weight in _walk(each)
            ]
            exponents = lossless.joined(parts)
            if lossless.fits(exponents):
                scale = lossless.tensor_scale_of(exponents)
                return GroupScale(scale, None, True, exponents, "")
            assert exponents is not None, "no exponents fit"
            why_not = f"exponents from {exponents.low} to {exponents.high}: E4M3 holds 18 of them"
        amax = 0.0
        for each in members:
            for weight in _walk(each):
                amax = max(amax, largest_finite(row_values(weight)))
        return GroupScale(tensor_scale(amax, self._job.scale_rule), amax, False, None, why_not)


def _elements(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a row block, so that blocks end at whole panels."""
    width = prod(shape[1:])
    return max(width, 1) * _PANEL * max(1, _BLOCK_ELEMENTS // (max(width, 1) * _PANEL))


def _walk(stored: StoredWeight) -> Iterator[Weight]:
    for _, weight in stored.row_blocks(_elements(stored.shape)):
        yield weight


def _mxfp4_of(weight: Weight) -> tuple[Tensor, Tensor]:
    assert weight.codes is not None, "MXFP4 has codes"
    assert weight.block_scale is not None, "MXFP4 has scales"
    return weight.codes, weight.block_scale


def _name(stored: StoredWeight) -> str:
    return BF16 if stored.format is None else stored.format.name
