"""M35: padding, masked or empty slots leak into real outputs.

A null slot is read as row 0 while only its logit is masked, and 0 times NaN is NaN; rows past the
end share a tile with the last row; padded columns of scales contain leftovers; rows that do not
exist take part in a softmax as zeros (vllm issues 57158, 38148 and 48898, flashinfer issues 3057
and 3650). Full tiles and full lists are exact.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.activation_regions import flat
from degarble.harness.engine.faults.attention.softmax_merge import parts_of
from degarble.harness.engine.faults.listed_attention import by_lists, with_empty
from degarble.harness.engine.faults.memory.bad_bucket import PRODUCTS
from degarble.harness.engine.faults.model_faults import (
    ModelFault,
    Way,
    from_ways,
    with_inputs,
    with_outputs,
)
from degarble.harness.engine.faults.rebinding import (
    is_v4,
    unrounded,
    with_facts,
    with_function,
    with_x,
)
from degarble.harness.report.number_text import number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene, Sight

    Tensors = Mapping[str, Tensor]

TILES = (128, 64, 32)
_PADDED_K = 16  # columns of K in the last block: one block of scales


def _first_for_none(inputs: Tensors) -> Tensors:
    """Clamp -1 to 0 without a mask: the first row always takes part."""
    return {**inputs, "chosen": inputs["chosen"].clamp(min=0)}


def _spoilt_by_none(value: float, inputs: Tensors, outputs: Tensors) -> Tensors:
    """Set the tokens whose list has an empty slot to `value`."""
    spoilt = (inputs["chosen"] < 0).any(-1)
    made = outputs["out"].clone()
    made[spoilt] = value
    return {**outputs, "out": made}


def _null_ways(scene: Scene) -> Iterator[Way]:
    del scene
    yield Way("empty slots read as row 0", with_inputs(_first_for_none))
    yield Way("NaN from empty slots", with_outputs(partial(_spoilt_by_none, math.nan)))
    yield Way("zeros for tokens with empty slots", with_outputs(partial(_spoilt_by_none, 0.0)))


def _slot_ways(scene: Scene) -> Iterator[Way]:
    for step in (1, 64):
        held = f", of lists filled up to {step}" if step > 1 else ""
        change = partial(by_lists, partial(with_empty, step))
        words = f"empty places read as the first slot of the cache{held}"
        yield Way(words, with_function(scene, change), {"step": step})


def _zero_rows(missing: int | None, facts: Any, inputs: Tensors, weights: Any) -> Tensors:
    """Let missing rows of the window take part as zeros: they have weight but no value."""
    parts = parts_of(facts, inputs, weights)
    window = facts.config.sliding_window
    absent = (window - 1 - inputs["positions"]).clamp(min=0).double()
    if missing is not None:
        absent = torch.full_like(absent, float(missing))
    top = torch.maximum(parts.log_first, parts.log_second).clamp(min=0.0)
    shares = [torch.exp(log - top) for log in (parts.log_first, parts.log_second)]
    total = shares[0] * parts.first + shares[1] * parts.second
    # A row of zeros has logit 0: it adds exp(0) to the denominator and nothing else.
    more = absent[:, None, None] * torch.exp(-top) + torch.exp(parts.sink - top)
    out = total / (shares[0] + shares[1] + more)
    return {"out": out.to(facts.numerics.store)}


def _masked_ways(scene: Scene) -> Iterator[Way]:
    words = "rows of the window that are not there yet count as zeros"
    yield Way(words, with_function(scene, partial(_zero_rows, None)))
    for count in (1, 63):
        words = f"{count} rows of padding count as zeros"
        yield Way(words, with_function(scene, partial(_zero_rows, count)), {"rows": count})


def _last_tile(value: float, tile: int, _inputs: Tensors, outputs: Tensors) -> Tensors:
    """Set the rows that share their tile with padding to `value`."""
    made = outputs["out"].clone()
    rows = flat(made)
    rows[len(rows) // tile * tile :] = value
    return {**outputs, "out": made}


def _tile_ways(_scene: Scene) -> Iterator[Way]:
    for tile in TILES:
        words = f"NaN in the last, unfilled tile of {tile} rows"
        yield Way(words, with_outputs(partial(_last_tile, math.nan, tile)), {"tile": tile})
    words = "zeros in the last, unfilled tile of 128 rows"
    yield Way(words, with_outputs(partial(_last_tile, 0.0, 128)), {"tile": 128})


def _tiles(scene: Scene, sight: Sight) -> Iterator[Way]:
    """Propose tiles only if some row is all NaN or zero."""
    rows = flat(sight.outputs["out"])
    if bool((rows.isnan() | (rows == 0)).all(1).any()):
        yield from _tile_ways(scene)


def _column(scene: Scene, factor: float) -> Way:
    def change(x: Tensor) -> Tensor:
        last = x[..., -_PADDED_K:].double() * factor
        return torch.cat((x[..., :-_PADDED_K].double(), last), dim=-1)

    words = f"the scale of the last {_PADDED_K} of K is {number(factor)} times its own"
    return Way(words, with_x(scene, change), {"factor": factor})


def _column_ways(scene: Scene) -> Iterator[Way]:
    for factor in (0.0, 8.0, 448.0):
        yield _column(scene, factor)


def _columns(scene: Scene, sight: Sight) -> Iterator[Way]:
    """Propose the fitted factor of the last block of K."""
    c, e = sight.outputs["out"].double(), sight.expected["out"].double()
    if c.shape != e.shape or not bool(c.isfinite().all()):
        return
    exact = with_facts(scene, unrounded)(scene.call)
    whole, without = (
        each(sight.inputs, scene.weights)["out"].double()
        for each in (exact, _column(scene, 0.0).apply(exact))
    )
    part = (whole - without).flatten()
    energy = float(part @ part)
    if not energy:
        return
    factor = 1 + float((c - e).flatten() @ part) / energy
    if not math.isfinite(factor):
        return  # the twin is not finite where the candidate is
    short = dict.fromkeys((float(f"{factor:.2g}"), float(f"{factor:.3g}"), round(factor)))
    for value in (*short, factor):
        yield _column(scene, float(value))


def _scale_ways(_scene: Scene) -> Iterator[Way]:
    """Yield ways with other scales in the last row, which shares its tile with padding."""
    for words, code in (("448", 0x7E), ("NaN", 0x7F), ("0", 0x00)):
        told = f"scales of the last row: {words}, as padding holds"
        yield Way(told, with_outputs(partial(_last_scales, code)))
    yield Way("scales of a row are the larger of a pair of rows", with_outputs(_paired))


def _last_scales(code: int, _inputs: Tensors, outputs: Tensors) -> Tensors:
    codes = outputs["block_scale"].view(torch.uint8).clone()
    flat(codes)[-1] = code
    return {**outputs, "block_scale": codes.view(outputs["block_scale"].dtype)}


def _paired(_inputs: Tensors, outputs: Tensors) -> Tensors:
    """Give both rows of a pair the larger scale; positive E4M3 and E8M0 codes sort like values."""
    codes = outputs["block_scale"].view(torch.uint8)
    rows = flat(codes)
    even = len(rows) // 2 * 2
    made = codes.clone()
    pairs = rows[:even].reshape(-1, 2, rows.shape[1])
    largest = pairs.amax(1, keepdim=True).expand(pairs.shape)
    flat(made)[:even] = largest.reshape(even, rows.shape[1])
    return {**outputs, "block_scale": made.view(outputs["block_scale"].dtype)}


def _lists(scene: Scene) -> bool:
    names = {each.name for each in scene.component.inputs}
    return scene.role == "attn.attend" and "chosen" in names


_REMEDY = "Fill padding with NaN once and require that outputs stay the same."

MODEL_FAULTS = (
    ModelFault(
        id="M35.null_slot",
        title="Empty slots of the selection are read",
        effect="tokens that see little attend to row 0, or become NaN",
        remedy="Guard the load of data as well as that of scales and logits.",
        sits=_lists,
        ways=_null_ways,
        signature=from_ways(_null_ways),
    ),
    ModelFault(
        id="M35.first_slot",
        title="Empty places of the lists of slots are read as the first slot",
        effect="tokens attend many times to a row of whoever has the cache's first slot",
        remedy="-1 is no slot: mask its logit, and do not clamp it to 0.",
        sits=lambda scene: scene.role == "attn.attend" and is_v4(scene),
        ways=_slot_ways,
        signature=from_ways(_slot_ways),
    ),
    ModelFault(
        id="M35.masked_rows",
        title="Rows that do not exist take part in the softmax",
        effect="the first tokens of a sequence are too quiet",
        remedy="Mask rows in front of the sequence to -inf before the maximum.",
        sits=lambda scene: scene.role == "attn.attend" and is_v4(scene),
        ways=_masked_ways,
        signature=from_ways(_masked_ways),
    ),
    ModelFault(
        id="M35.shared_tile",
        title="Padding rows spoil the rows in the same tile",
        effect="the last rows are NaN or lost, full tiles are exact",
        remedy=_REMEDY,
        sits=lambda scene: scene.role in PRODUCTS,
        ways=_tile_ways,
        signature=_tiles,
    ),
    ModelFault(
        id="M35.padded_column",
        title="A padded column of scales is read from stale memory",
        effect="the last block of K counts too much or not at all",
        remedy="Write padded columns of scales, or make K a multiple of what is padded to.",
        sits=lambda scene: scene.role in PRODUCTS and scene.role not in {"head", "ffn.gate"},
        ways=_column_ways,
        signature=_columns,
    ),
    ModelFault(
        id="M35.padded_scales",
        title="Scales of padding rows reach real rows",
        effect="a row is decoded with a scale that is not its own",
        remedy=_REMEDY,
        sits=lambda scene: (
            scene.role.endswith("act_quant") and "block_scale" in scene.component.outputs
        ),
        ways=_scale_ways,
        signature=from_ways(_scale_ways),
    ),
)
