"""Convert MXFP4 to NVFP4 without loss, where the exponents of one tensor span at most 17.

Codes stay unchanged; harness.checkpoint.transform.lossless defines the scales. w1 and w3 of one
expert share a tensor scale, because engines hold them in one tensor. `back` restores the source's
bytes, except for the scales of blocks of zeros. Partners whose exponents span more raise an error
before anything is written.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import LayoutMismatch
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.transform.convert.groups import partner_groups
from degarble.harness.checkpoint.transform.lossless import (
    WIDEST,
    Exponents,
    block_scales_of,
    exponents_of,
    fits,
    joined,
    tensor_scale_of,
)
from degarble.harness.checkpoint.transform.proof.bounds import NO_BOUND
from degarble.harness.checkpoint.transform.proof.compare import (
    EXACT,
    compare_rows,
    rows_exactly,
    stacked_rows,
)
from degarble.harness.checkpoint.transform.source import chosen, linears, rows_of
from degarble.harness.checkpoint.transform.units import Unit
from degarble.harness.checkpoint.write.plan import PlannedTensor
from degarble.harness.formats.block_formats import MXFP4, NVFP4
from degarble.harness.formats.element_formats import UE8M0
from degarble.harness.model.storage import Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from degarble.harness.checkpoint.transform.names import TargetNames
    from degarble.harness.checkpoint.transform.source import Linear
    from degarble.harness.checkpoint.transform.units import Options, TensorProof
    from degarble.harness.checkpoint.view.view import Checkpoint

_BIAS = UE8M0.bias
_NAN = 0xFF


def to_nvfp4_lossless(
    checkpoint: Checkpoint, options: Options, names: TargetNames
) -> Iterator[Unit]:
    """List one unit for each linear in MXFP4."""
    found = [each for each in linears(checkpoint) if each.weight.format == MXFP4]
    if not found:
        raise LayoutMismatch(
            f"weights of {shown(str(checkpoint.root))}",
            "none in MXFP4",
            "at least one MXFP4 weight: other formats cannot become NVFP4 without loss",
            "Quantise with `--to nvfp4` instead.",
        )
    taken = list(chosen(found, options.only))
    for group in partner_groups(checkpoint, taken):
        shared = Shared(group)
        for linear in group:
            yield _unit(names, linear, shared)


class Shared:
    """The exponents of partners that share a tensor scale, read at first use."""

    def __init__(self, members: Sequence[Linear]) -> None:
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
        if highest == _NAN or not fits(Exponents(lowest - _BIAS, highest - _BIAS)):
            assert self.exponents is None or fits(self.exponents)

    @cached_property
    def exponents(self) -> Exponents | None:
        """The smallest and largest exponent of blocks that hold a nonzero value."""
        found = joined(
            [
                exponents_of(record.codes, record.block_scale)
                for member in self._members
                for _, record in rows_of(member.weight)
                if record.codes is not None and record.block_scale is not None
            ]
        )
        if not fits(found):
            assert found is not None
            raise LayoutMismatch(
                f"exponents of {', '.join(shown(each.name) for each in self._members)}",
                f"{found.low} to {found.high}",
                f"at most {WIDEST} apart, or E4M3 cannot hold the smallest scale",
                "Quantise with `--to nvfp4` instead, within half a step, or keep it in MXFP4.",
            )
        return found


def _unit(target_names: TargetNames, linear: Linear, shared: Shared) -> Unit:
    key = target_names.module(linear.module)
    names = target_names.parts(key, NVFP4)
    part_of = {name: part for part, name in names.items()}
    rows, columns = linear.weight.shape

    def make(tensor: PlannedTensor) -> Iterator[Tensor]:
        part, found = part_of[tensor.name], shared.exponents
        if part is Part.TENSOR_SCALE:
            yield torch.tensor(tensor_scale_of(found), dtype=torch.float32)
            return
        for _, record in rows_of(linear.weight):
            assert record.codes is not None
            assert record.block_scale is not None
            codes, scale = record.codes, record.block_scale
            yield codes if part is Part.CODES else block_scales_of(scale, found)

    def check(target: Checkpoint) -> Iterator[TensorProof]:
        output = target.stored(key)
        rows_out = ((values, step) for _, values, step in rows_exactly(output))
        comparison, faults = compare_rows(stacked_rows([linear.weight]), rows_out, NO_BOUND)
        if output.format != NVFP4:
            faults.append("not stored as NVFP4")
        yield comparison.proof(key, linear.tensors, EXACT, faults)

    return Unit(
        key=key,
        tensors=(
            PlannedTensor(names[Part.CODES], "U8", (rows, columns // 2), key),
            PlannedTensor(names[Part.BLOCK_SCALE], "F8_E4M3", (rows, columns // 16), key),
            PlannedTensor(names[Part.TENSOR_SCALE], "F32", (), key),
        ),
        sources=linear.tensors,
        make=make,
        check=check,
        left_out=linear.input_scale,
        formats={linear.name: "NVFP4"},
        require=shared.require,
    )
