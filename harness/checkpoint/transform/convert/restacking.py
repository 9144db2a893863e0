"""Take vLLM's fused and stacked tensors apart: restore the bytes of each part of each parameter.

The inverse of harness.checkpoint.transform.convert.vllm: cut boxes of rows, undo a backend's row
order and scale layout, drop padding, widen identifiers. Only parts that kept their format can be
restored; harness.checkpoint.transform.convert.back raises for the rest.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from degarble.harness.checkpoint.transform.convert.backends import BACKENDS, BLOCK
from degarble.harness.checkpoint.transform.convert.recipes_after import recipe_of, stored_formats
from degarble.harness.checkpoint.transform.convert.vllm import formats_in_vllm
from degarble.harness.formats.layouts import LINEAR, from_layout
from degarble.harness.formats.row_orders import restore_rows
from degarble.harness.formats.types import ScaleDirection
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.storage import Part
from degarble.harness.model.tensors import slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from degarble.harness.checkpoint.transform.units import Chunk, Return
    from degarble.harness.model.tensors import Slot

_GATED = (".w1", ".w3")


def restacked(back: Return) -> Iterator[tuple[str, Callable[[], Iterator[Chunk]]]]:
    """Yield each source tensor that kept its format, with the function that restores it."""
    names = back.names
    model, before = names.config, stored_formats(names)
    layout = layout_named("vllm", model)
    after = formats_in_vllm(model, layout, before, names.present)
    recipe = recipe_of(after, names)
    present = [each for each in names.present.values() if not layout.omits(each, model)]
    for slot in slots(model, layout.with_recipe(recipe), present):
        name = slot.parameter.name
        if name in after and after[name].weight != before[name].weight:
            continue
        form = names.table.form(names.module_of(slot.parameter))
        if form.direction is ScaleDirection.ENCODE and slot.part is Part.TENSOR_SCALE:
            continue  # a divisor became a factor: rounded
        if slot.part in form.parts:
            own = form.parts[slot.part]
            stacked = slot.parameter.expert is not None and after[name].weight == "NVFP4"
            arranged = stacked and slot.part in (Part.CODES, Part.BLOCK_SCALE)
            make = _expert if arranged else _cut
            yield own.name, partial(make, back, slot, own.dtype)


def _cut(back: Return, slot: Slot, dtype: str) -> Iterator[Chunk]:
    entry = back.checkpoint.entry(slot.tensor)
    # vLLM stores identifiers as int32 where the source has int64.
    if slot.box.shape == entry.shape and (entry.dtype, dtype) != ("I32", "I64"):
        yield from back.checkpoint.chunks(slot.tensor)
        return
    box = back.checkpoint.tensor(slot.tensor)[tuple(slice(*each) for each in slot.box.ranges)]
    yield box.long() if (entry.dtype, dtype) == ("I32", "I64") else box
    back.checkpoint.release(slot.tensor)


def _expert(back: Return, slot: Slot, _dtype: str) -> Iterator[Tensor]:
    """Cut one member of one expert out of a stack in a backend's order."""
    backend = BACKENDS[back.options.backend]
    gated = slot.parameter.name.endswith(_GATED)
    unit = 2 if slot.part is Part.CODES else BLOCK
    rows, columns = slot.shape
    high, wide = backend.padded((rows, columns * unit), gated=gated)
    total = high * (2 if gated else 1)
    stored = back.checkpoint.tensor(slot.tensor)[slot.parameter.expert].view(torch.uint8)
    if slot.part is Part.BLOCK_SCALE and backend.scales != LINEAR:
        stored = from_layout(stored.flatten(), backend.scales, total, wide // unit)
    whole = restore_rows(stored, backend.w13 if gated else backend.w2)
    # w1 lies above w3, each followed by its padding.
    begin = high if slot.parameter.name.endswith(_GATED[1]) else 0
    yield whole[begin : begin + rows, :columns]
    back.checkpoint.release(slot.tensor)
