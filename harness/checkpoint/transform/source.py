"""Read a conversion's source: choose linears, walk their rows by panels, decode them quickly."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.view.modules import BLOCKS, SCALES
from degarble.harness.formats.codec import decode_array
from degarble.harness.formats.fast.buffers import values_of
from degarble.harness.formats.fast.nvfp4 import largest_finite
from degarble.harness.formats.number_formats import E2M1, E4M3, MXFP4, UE8M0, NibbleOrder
from degarble.harness.model.tensors import PartKind
from degarble.harness.model.types import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from degarble.harness.checkpoint.view.stored import StoredWeight
    from degarble.harness.checkpoint.view.view import Checkpoint, LogicalNames
    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.parameters import Parameter


# --------------------------------------------------------------------------------------------------
# `row_values` returns the same numbers as Weight.values(float32), bit for bit: by table for MXFP4
# and NVFP4, by whole rows of blocks for FP8, and by the definition for any other format.


def row_values(weight: Weight) -> Tensor:
    """Return rows [M, K] as float32; bfloat16 stays bfloat16, which is exact as well."""
    storage = weight.storage
    if storage is None:
        assert weight.value is not None, "a weight without codes has values"
        plain = weight.value
        return plain if plain.dtype in (torch.bfloat16, torch.float32) else plain.float()
    assert weight.codes is not None, "a weight with a storage has codes"
    assert weight.block_scale is not None, "codes have scales"
    if weight.channel_scale is not None:
        return weight.values(torch.float32)
    if storage.format == MXFP4 and storage.nibble_order is NibbleOrder.LOW_EVEN:
        return _mxfp4(weight.codes, weight.block_scale)
    if storage.format.element == E4M3 and storage.format.block[0] > 1 and len(storage.shape) == 2:
        return _panels(weight.codes, weight.block_scale, storage.format.block)
    return weight.values(torch.float32)


def _mxfp4(codes: Tensor, block_scale: Tensor) -> Tensor:
    from degarble.harness.formats.fast import loops as fast_loops  # noqa: PLC0415  imports numba

    with np.errstate(all="ignore"):
        # Every product of a scale and a code, [256 * 16] float32 as bits.
        table = (values_of(UE8M0)[:, None] * values_of(E2M1)).view(np.uint32).reshape(-1)
    packed = codes.contiguous().numpy().reshape(-1)
    scales = np.repeat(block_scale.contiguous().numpy().reshape(-1), 2)
    out = np.empty(packed.size * 2, np.uint32)
    fast_loops.decode_blocks(packed, scales, table, out, False)
    return torch.from_numpy(out.view(np.float32)).view(*codes.shape[:-1], -1)


def _panels(codes: Tensor, block_scale: Tensor, block: tuple[int, int]) -> Tensor:
    values = codes.view(torch.float8_e4m3fn).float()
    scales = block_scale if block_scale.dtype is torch.float32 else decode_array(block_scale, UE8M0)
    for panel, row in enumerate(range(0, values.shape[0], block[0])):
        spread = scales[panel].repeat_interleave(block[1])[: values.shape[1]]
        values[row : row + block[0]] *= spread
    return values


# --------------------------------------------------------------------------------------------------
# Panels end where 128-row blocks end, so memory is bounded whatever the size of a weight. The walk
# releases the pages it has read. A pattern that matches no linear raises an error, and so does a
# fused or stacked source: undo it by the conversion `back` first.

PANEL_ELEMENTS = 1 << 22  # 16 MiB in float32
BLOCK_ROWS = 128


class SourceLinear(NamedTuple):
    """One linear of the source. `parameter` is None where no config names it."""

    name: str
    module: str
    weight: StoredWeight
    parameter: Parameter | None

    @property
    def format(self) -> str:
        """The name of its format; BF16 stands for unquantised values."""
        return self.weight.format.name if self.weight.format else "BF16"

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of its stored tensors."""
        return tuple(entry.name for entry in self.weight.form.parts.values())

    @property
    def input_scale(self) -> tuple[tuple[str, str], ...]:
        """Its input scale as a tensor to leave out: it belongs to activations, never to weights."""
        entry = self.weight.form.parts.get(PartKind.INPUT_SCALE)
        return ((entry.name, "scales activations, which are not quantised here"),) if entry else ()


def linears(checkpoint: Checkpoint) -> Iterator[SourceLinear]:
    """Yield every linear of a known model, or every quantised module of an unknown one."""
    names = checkpoint.names
    if names is None:
        _require_no_stacks(checkpoint)
        for module in checkpoint.modules():
            weight = checkpoint.stored(module)
            if weight.format is not None and len(weight.shape) == 2:
                yield SourceLinear(module, module, weight, None)
        return
    for name, parameter in names.present.items():
        if parameter.kind is Kind.LINEAR:
            if names.is_fused(parameter):
                raise LayoutMismatch(
                    f"layout of {shown(str(checkpoint.root))}",
                    f"{name} lies in {shown(names.module_of(parameter))}, with others",
                    "a checkpoint with one module a linear",
                    "Take it apart first: convert it back to the layout that it was made from.",
                )
            yield SourceLinear(name, names.module_of(parameter), checkpoint.stored(name), parameter)


def _require_no_stacks(checkpoint: Checkpoint) -> None:
    """Raise where the experts of a layer are quantised in one tensor, which no conversion reads."""
    entries, table = checkpoint.entries, checkpoint.table
    for name in entries:
        packed = name.endswith(BLOCKS) and f"{name.removesuffix(BLOCKS)}{SCALES}" in entries
        if packed or table.is_nvfp4_stack(name):
            raise LayoutMismatch(
                f"layout of {shown(str(checkpoint.root))}",
                f"{shown(name)}, quantised experts in one stack",
                "a checkpoint with one module a linear",
                "Take the checkpoint in BF16 that it was made from: quantised stacks are read by"
                " `degarble generate`, `capture` and `check`, and not converted.",
            )


def chosen_linears(found: Iterable[SourceLinear], only: tuple[str, ...]) -> Iterator[SourceLinear]:
    """Yield the linears that a pattern matches; raise for a pattern that matches none."""
    reached: set[str] = set()
    for linear in found:
        hits = [p for p in only if fnmatchcase(linear.name, p) or fnmatchcase(linear.module, p)]
        reached.update(hits)
        if hits or not only:
            yield linear
    missed = [pattern for pattern in only if pattern not in reached]
    if missed:
        raise InvalidArgument(
            "only", missed, "patterns that reach a linear", "Name linears as `degarble audit` does."
        )


def require_model(checkpoint: Checkpoint, to: str) -> tuple[Config, LogicalNames]:
    """Raise for a checkpoint whose parameters have no logical names."""
    if checkpoint.model is None or checkpoint.names is None:
        found, remedy = "", "Put the model's config.json into the folder of its shards."
        if checkpoint.model is not None:
            found = f", with names of no known {checkpoint.model.family} checkpoint"
            remedy = "Run `degarble audit` on it: it lists the names that nobody knows."
        elif checkpoint.config:
            found = f", a model of type {shown(str(checkpoint.config.get('model_type')))}"
            remedy = (
                "For this model there are `degarble convert --to bf16` and `degarble quantise"
                " --recipe nvfp4-full`."
            )
        raise LayoutMismatch(
            f"source of {to}",
            f"{shown(str(checkpoint.root))}{found}",
            "a V4 or V3.2 checkpoint with its config.json",
            remedy,
        )
    return checkpoint.model, checkpoint.names


def rows_of(weight: StoredWeight) -> Iterator[tuple[int, Weight]]:
    """Yield (first row, record) by panels that end where 128-row blocks end."""
    rows, width = weight.shape
    step = max(1, PANEL_ELEMENTS // max(width, 1) // BLOCK_ROWS) * BLOCK_ROWS
    for begin in range(0, rows, step):
        yield begin, weight.rows(begin, min(begin + step, rows))
        for entry in weight.form.parts.values():
            weight.release(entry)


def largest_magnitude(weights: Iterable[StoredWeight]) -> Tensor:
    """Return the largest magnitude of several weights together."""
    walks = (rows_of(weight) for weight in weights)
    found = (largest_finite(row_values(record)) for walk in walks for _, record in walk)
    return torch.tensor(max(found, default=0.0), dtype=torch.float32)
