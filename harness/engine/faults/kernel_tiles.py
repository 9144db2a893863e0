"""Faults of kernel tiles: M41 unwritten or dropped by one tactic, M37 stale or lost by a race."""

from __future__ import annotations

import math
import random
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    ModelFault,
    function_at,
    with_function,
    with_outputs,
    with_x,
)
from degarble.harness.engine.faults.regions import Region, box, differing, flat, grown, replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext, Function

    Tensors = Mapping[str, Tensor]
    Damage = Callable[[Tensors, Tensors, random.Random], Tensors]


# --------------------------------------------------------------------------------------------------
# M41: one tactic, shape or architecture leaves outputs unwritten or drops a tile of K.
#
# A fallback reads memory that nobody wrote beyond some number of rows, a guard compiles a body
# away, a tactic ends one tile of K too soon (flashinfer issues 4588 and 3197, sglang issue 9807).
# Other shapes are exact.


PRODUCTS = (
    "attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wkv_a", "attn.wkv_b", "attn.wo", "attn.wo_a",
    "attn.wo_b", "attn.indexer.wq_b", "attn.indexer.wk", "ffn.shared.w13", "ffn.shared.w2",
    "ffn.w13", "ffn.w2", "ffn.experts.w13", "ffn.experts.w2", "traced.linear", "ffn.gate", "head",
)  # fmt: skip
_MORE = ("attn.attend", "ffn.experts.combine", "attn.inverse_rope")
_VALUES = {"zeros": 0.0, "NaN": math.nan, "what lay there": 3.0e4}
_TILE_OF_K = 64
_EXPERT_TILE = 32  # columns of an expert's last tile, in each of gate and up
_LANES, _OF_LANE = 32, 8  # of a warp; BF16 numbers that a lane reads at once
_WARPGROUPS = ((128, 64), (64, 32), (256, 64))  # rows of a tile, and of one group of threads


def _rows(words: str, value: float, first: int, last: int | None = None) -> FaultVariant:
    def change(_inputs: Tensors, outputs: Tensors) -> Tensors:
        made = outputs["out"].clone()
        flat(made)[first:last] = value
        return {**outputs, "out": made}

    return FaultVariant(words, with_outputs(change), {"row": first})


def _columns(words: str, value: float, first: int, last: int | None = None) -> FaultVariant:
    def change(_inputs: Tensors, outputs: Tensors) -> Tensors:
        made = outputs["out"].clone()
        made[..., first:last] = value
        return {**outputs, "out": made}

    return FaultVariant(words, with_outputs(change), {"column": first})


def _row_variants(_context: ComponentContext) -> Iterator[FaultVariant]:
    for text, value in _VALUES.items():
        yield _rows(f"{text} in every row", value, 0)
        for first in (1, 16, 128):
            yield _rows(f"{text} from row {first} on", value, first)


def _written(record: CallRecord) -> tuple[Tensor, float, str] | None:
    """Return mask, value and name if all elements that differ have the same value."""
    mask = differing(record)
    if mask is None:
        return None
    found = flat(record.outputs["out"])[mask]
    if bool(found.isnan().all()):
        return mask, math.nan, "NaN"
    value = float(found[0])
    if not bool((found == found[0]).all()):
        return None
    text = {number: words for words, number in _VALUES.items()}.get(value, f"{value:g}")
    return mask, value, text


def _row_signature(_context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    found = _written(record)
    if found is None:
        return
    mask, value, text = found
    rows = mask.any(1).nonzero().flatten()
    first, last = int(rows[0]), int(rows[-1]) + 1
    if last == len(mask):
        where = f"from row {first} on" if first else "in every row"
        yield _rows(f"{text} {where}", value, first)
    yield _rows(f"{text} in rows {first} to {last - 1}", value, first, last)


def _column_variants(_context: ComponentContext) -> Iterator[FaultVariant]:
    for text, value in _VALUES.items():
        yield _columns(f"{text} from column 64 on", value, 64)
        yield _columns(f"{text} in the last 32 columns", value, -32)


def _column_signature(_context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    found = _written(record)
    if found is None or bool(found[0].any(0).all()):
        return
    mask, value, text = found
    columns = mask.any(0).nonzero().flatten()
    first, last = int(columns[0]) // 16 * 16, -(-(int(columns[-1]) + 1) // 16) * 16
    yield _columns(f"{text} in columns {first} to {last - 1}", value, first, last)
    yield _columns(f"{text} from column {first} on", value, first)


def _expert_tile(
    value: float, text: str, expert: int | None, columns: tuple[int, ...]
) -> FaultVariant:
    """Overwrite columns of one expert's slots, or of those of the last expert that a call visits.

    A tile of gate contains columns of up as well.
    """

    def change(inputs: Tensors, outputs: Tensors) -> Tensors:
        made, experts = outputs["out"].clone(), inputs["experts"]
        own = experts == (experts.max() if expert is None else expert)
        slots = made[own]
        slots[:, list(columns)] = value
        made[own] = slots
        return {**outputs, "out": made}

    span = f"columns {columns[0]} to {columns[-1]}, {len(columns)} in all"
    whose = "the last expert that is visited" if expert is None else f"expert {expert}"
    where: dict[str, int | str] = {"columns": span}
    if expert is not None:
        where["expert"] = expert
    words = f"{text} in {span}, of {whose}"
    return FaultVariant(words, with_outputs(change), where, needs_whole_call=expert is None)


def _expert_tile_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    halves = 2 if context.role.endswith("w13") else 1
    width = sum(shape[0] for shape in _shapes_of_first(context)) // halves
    columns = tuple(
        half * width + column
        for half in range(halves)
        for column in range(max(0, width - _EXPERT_TILE), width)
    )
    for text, value in list(_VALUES.items())[1:]:
        for expert in (0, None):
            yield _expert_tile(value, text, expert, columns)


def _shapes_of_first(context: ComponentContext) -> list[tuple[int, ...]]:
    """Return the extents of the first expert's matrices."""
    return [weight.shape for name, weight in context.weights.items() if ".experts.0." in name]


def _expert_tiles(_context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    found = _written(record)
    if found is None:
        return
    mask, value, text = found
    experts = record.inputs["experts"].flatten()[mask.any(1)].unique()
    columns = mask.any(0)
    if not bool(columns.all()):
        where = tuple(columns.nonzero().flatten().tolist())
        if len(experts) == 1:
            yield _expert_tile(value, text, int(experts[0]), where)
        yield _expert_tile(value, text, None, where)


def _no_tile(
    context: ComponentContext, words: str, first: int, last: int | None = None, fewest: int = 0
) -> FaultVariant:
    """Leave columns of K out of the sum, in calls of at least some rows."""

    def change(x: Tensor) -> Tensor:
        made = x.clone()
        if len(x) >= fewest:
            made[..., first:last] = 0
        return made

    return FaultVariant(words, with_x(context, change), {"k": first})


def _bucket_tile_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    last, rows = "the last 64 of K left out", "from 16 rows on"
    yield _no_tile(context, last, -_TILE_OF_K)
    yield _no_tile(context, "the first 64 of K left out", 0, _TILE_OF_K)
    yield _no_tile(context, "the last 16 of K left out", -16)
    yield _no_tile(context, f"{last} {rows}", -_TILE_OF_K, fewest=16)
    width = context.bound.config.hidden_size
    for begin in range(_TILE_OF_K, min(width, 8 * _TILE_OF_K) - _TILE_OF_K, _TILE_OF_K):
        words = f"columns {begin} to {begin + _TILE_OF_K - 1} of K left out"
        yield _no_tile(context, words, begin, begin + _TILE_OF_K)


def _repeated(tile: int, own: int) -> FaultVariant:
    """Repeat the first part of a tile's rows in the rest of the tile."""

    def change(_inputs: Tensors, outputs: Tensors) -> Tensors:
        out = outputs["out"]
        row = torch.arange(len(out))
        return {**outputs, "out": out[row - row % tile + row % own]}

    words = f"in every tile of {tile} rows the first {own} again"
    return FaultVariant(words, with_outputs(change), {"tile": tile})


def _repeated_variants(_context: ComponentContext) -> Iterator[FaultVariant]:
    for tile, own in _WARPGROUPS:
        yield _repeated(tile, own)


def _repeats(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Propose the tiles whose first rows the candidate repeats."""
    out = record.outputs["out"][: record.rows[0] if record.rows else None]
    for variant, (_, own) in zip(_repeated_variants(context), _WARPGROUPS, strict=True):
        if len(out) > own and torch.equal(out[own : 2 * own], out[: len(out) - own][:own]):
            yield variant


def _one_lane(lanes: Callable[[Tensor, Tensor], Tensor]) -> Function:
    """Return for each output the partial sum of one lane of 32: eight numbers in every 256 of K."""

    def function(facts: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        x, (weight,) = inputs["x"], weights.values()
        products = facts.numerics.products
        x_TK, weight_NK = x.to(products), weight.values(products)
        lane_K = torch.arange(x.shape[-1]) // _OF_LANE % _LANES
        number = torch.arange(len(x))[:, None], torch.arange(len(weight_NK))
        wanted = lanes(*number).expand(len(x), -1)
        out = torch.zeros(wanted.shape, dtype=products)
        for lane in wanted.unique().tolist():
            inner = lane_K == lane
            part = x_TK[:, inner] @ weight_NK[:, inner].T
            out = torch.where(wanted == lane, part, out)
        return {"out": out}

    return function


def _lane_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for words, lanes in (
        ("the sum of the first lane alone", lambda row, column: 0 * (row + column)),
        ("the sum of the lane that writes", lambda row, column: row % 8 * 4 + column % 4),
    ):
        function = _typed(context, _one_lane(lanes))
        yield FaultVariant(words, with_function(context, function))


def _typed(context: ComponentContext, function: Function) -> Function:
    """Round as the component's own output is rounded."""
    own = function_at(context)

    def typed(facts: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        kept = own(facts, {**inputs, "x": inputs["x"][:1]}, weights)["out"].dtype
        return {"out": function(facts, inputs, weights)["out"].to(kept)}

    return typed


def _quantiser_variants(_context: ComponentContext) -> Iterator[FaultVariant]:
    for name, words in (("codes", "codes of 0"), ("block_scale", "block scales of 0")):
        yield FaultVariant(words, with_outputs(partial(_empty, (name,))))
    yield FaultVariant(
        "codes and scales of 0", with_outputs(partial(_empty, ("codes", "block_scale")))
    )
    yield FaultVariant(
        "codes of 0 from row 16 on", with_outputs(partial(_empty, ("codes",), first=16))
    )
    yield FaultVariant("tensor scales of 0", with_outputs(partial(_empty, ("tensor_scale",))))


def _empty(names: tuple[str, ...], _inputs: Tensors, outputs: Tensors, first: int = 0) -> Tensors:
    made = dict(outputs)
    for name in names:
        if name in made and made[name].ndim:
            made[name] = made[name].clone()
            made[name][first:] = 0
        elif name in made:
            made[name] = torch.zeros_like(made[name])
    return made


def _quantises(context: ComponentContext) -> bool:
    return context.role.endswith("act_quant") and "codes" in context.component.outputs


_BUCKET_REMEDY = "Run every tactic and bucket of rows against the reference, with poisoned outputs."

BAD_BUCKET_FAULTS = (
    ModelFault(
        id="M41.rows_unwritten",
        title="A bucket of rows leaves its output unwritten",
        effect="rows from a number on are zeros, NaN, or what lay there",
        remedy=_BUCKET_REMEDY,
        applies_to=lambda context: context.role in (*PRODUCTS, *_MORE),
        variants=_row_variants,
        signature=_row_signature,
    ),
    ModelFault(
        id="M41.columns_unwritten",
        title="A tactic leaves columns of its output unwritten",
        effect="columns at the end are zeros, NaN, or what lay there",
        remedy=_BUCKET_REMEDY,
        applies_to=lambda context: context.role in PRODUCTS and context.role != "ffn.gate",
        variants=_column_variants,
        signature=_column_signature,
    ),
    ModelFault(
        id="M41.tile_unwritten",
        title="A tile of an expert's slots and columns is never written",
        effect="some columns of the slots of one expert are NaN, or what lay there",
        remedy=_BUCKET_REMEDY,
        applies_to=lambda context: context.role in ("ffn.experts.w13", "ffn.experts.w2"),
        variants=_expert_tile_variants,
        signature=_expert_tiles,
    ),
    ModelFault(
        id="M41.tile_of_k",
        title="A tactic leaves a tile of K out of the sum",
        effect="outputs are off by what some inputs give; nothing looks broken",
        remedy=_BUCKET_REMEDY,
        applies_to=lambda context: context.role in PRODUCTS,
        variants=_bucket_tile_variants,
    ),
    ModelFault(
        id="M41.rows_repeated",
        title="A part of a tile's rows is computed twice, in the place of the others",
        effect="rows of a tile are those of other tokens; calls of few rows are exact",
        remedy="Every group of threads takes its own rows of A, as it stores its own.",
        applies_to=lambda context: context.role in PRODUCTS,
        variants=_repeated_variants,
        signature=_repeats,
    ),
    ModelFault(
        id="M41.lanes_apart",
        title="Sums of a warp's lanes are not added up",
        effect="outputs have a fifth of their size, and are what some inputs give",
        remedy="Fold all lanes of a warp before one of them writes.",
        applies_to=lambda context: context.role == "ffn.gate",
        variants=_lane_variants,
    ),
    ModelFault(
        id="M41.quantiser_empty",
        title="A quantiser's body was compiled away",
        effect="the product after it gets zeros",
        remedy="Test each kernel with known answers when the engine starts.",
        applies_to=_quantises,
        variants=_quantiser_variants,
    ),
)


# --------------------------------------------------------------------------------------------------
# M37: a race makes tiles stale, shifted, exchanged or lost, at random places in some runs.
#
# A consumer starts before its producer's stores are visible, an accumulator is released before it
# is read, sub-tiles begin at the wrong stage, contributions are lost where adds are not atomic
# (flashinfer issues 2708 and 3361, cutlass issues 3643 and 3636, atlas issue 1099). A planted race
# damages a random part of its calls, so that two runs differ; recognition concerns the effect in
# one call.


_STEPS = ((1, 16), (1, 32), (1, 64), (1, 128), (32, 64), (64, 64), (128, 32), (64, 128))
_SCALE_STEPS = ((1, 1), (1, 4), (32, 4), (128, 4))
OFTEN = 0.6  # of the calls that are damaged
TILE = (64, 64)
STRIP = 32
_SHIFTS = (STRIP, -STRIP, 64, -64, 128, -128)
_HELD = ("attn.wq_a", "attn.wo_b", "attn.wo", "ffn.shared.w13", "ffn.w13", "attn.wkv", "attn.wq_b")


def racing(words: str, damage: Damage, **where: Any) -> FaultVariant:
    """Damage some of the calls; every bound call has its own random state."""

    def apply(call: Any) -> Any:
        # Made once for a bound call: its state goes on from run to run, so that runs differ.
        dice = random.Random(words)  # noqa: S311  a repeatable race, no secret

        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Any:
            outputs = call(inputs, weights)
            if dice.random() > OFTEN:
                return outputs
            return damage(inputs, outputs, dice)

        return faulty

    return FaultVariant(words, apply, where)


def _place(out: Tensor, size: tuple[int, int], dice: random.Random) -> Region:
    """Choose a random tile of the grid."""
    rows, columns = flat(out).shape
    r = dice.randrange(-(-rows // size[0])) * size[0]
    c = dice.randrange(max(1, columns // size[1])) * size[1]
    return Region((r, min(r + size[0], rows)), (c, min(c + size[1], columns)))


def shifted(out: Tensor, region: Region, by: int) -> Tensor:
    """Return the values some columns away from a region, wrapping around."""
    (r0, r1), (c0, c1) = region.rows, region.columns
    columns = (torch.arange(c0, c1) + by) % flat(out).shape[1]
    return flat(out)[r0:r1, columns]


def _of_next(size: tuple[int, int], by: int) -> Damage:
    def damage(_inputs: Tensors, outputs: Tensors, dice: random.Random) -> Tensors:
        region = _place(outputs["out"], size, dice)
        return replaced(outputs, "out", region, shifted(outputs["out"], region, by))

    return damage


def _emptied(size: tuple[int, int]) -> Damage:
    def damage(_inputs: Tensors, outputs: Tensors, dice: random.Random) -> Tensors:
        return replaced(outputs, "out", _place(outputs["out"], size, dice), 0.0)

    return damage


def swapped(out: Tensor, region: Region) -> Tensor:
    """Exchange the two halves of a region's columns."""
    part = flat(out)[region.index]
    half = part.shape[1] // 2
    return torch.cat((part[:, half:], part[:, :half]), dim=1)


def _exchanged(_inputs: Tensors, outputs: Tensors, dice: random.Random) -> Tensors:
    region = _place(outputs["out"], (TILE[0], 128), dice)
    return replaced(outputs, "out", region, swapped(outputs["out"], region))


def _race_tile_variants(_context: ComponentContext) -> Iterator[FaultVariant]:
    yield racing("a tile holds the next tile's values", _of_next(TILE, 64))
    yield racing("a strip of 32 columns holds the next one's values", _of_next((128, STRIP), STRIP))
    yield racing("two sub-tiles of 64 columns exchanged", _exchanged)
    yield racing("half a tile was not stored", _emptied((32, 64)))
    yield racing("a tile was not stored", _emptied(TILE))


def _boxes(record: CallRecord, output: str) -> list[Region]:
    """Yield the differing region rounded out to tiles of several sizes."""
    mask = differing(record, output)
    if mask is None:
        return []
    shape, region = (mask.shape[0], mask.shape[1]), box(mask)
    steps = _SCALE_STEPS if output == "block_scale" else _STEPS
    return list(dict.fromkeys(grown(region, step, shape) for step in steps))


def _tiles(_context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    if "out" not in record.outputs:
        return
    candidate, expected = record.outputs["out"], record.expected["out"]
    for region in _boxes(record, "out"):
        text = _told(region)
        own = flat(candidate)[region.index]
        if not bool(own.any()):
            yield _fixed(f"{text} were not stored", region, 0.0)
        for by in _SHIFTS:
            if _alike(own, shifted(expected, region, by)):
                side = "right" if by > 0 else "left"
                words = f"{text} hold what belongs {abs(by)} columns to the {side}"
                yield _moved(words, region, partial(shifted, by=by))
        if (region.columns[1] - region.columns[0]) % 2 == 0 and _alike(
            own, swapped(expected, region)
        ):
            yield _moved(f"{text}: the two halves exchanged", region, swapped)


def _stale_tiles(_context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Yield variants that repeat the same place of an earlier call."""
    if "out" not in record.outputs:
        return
    candidate = record.outputs["out"]
    for region in _boxes(record, "out"):
        own = flat(candidate)[region.index]
        for other in record.earlier[::-1]:
            old = other.outputs["out"]
            if old.shape == candidate.shape and torch.equal(flat(old)[region.index], own):
                words = f"{_told(region)} are those of step {other.step}"
                yield _fixed(words, region, flat(old)[region.index])
                break


def _told(region: Region) -> str:
    (r0, r1), (c0, c1) = region.rows, region.columns
    return f"rows {r0} to {r1 - 1}, columns {c0} to {c1 - 1}"


def _alike(left: Tensor, right: Tensor) -> bool:
    """Return whether values are nearly equal, so that a replay is worthwhile."""
    gap, size = (left.double() - right.double()).norm(), right.double().norm()
    return bool(gap <= 0.02 * size)


def _fixed(words: str, region: Region, part: Tensor | float) -> FaultVariant:
    def change(_inputs: Tensors, outputs: Tensors) -> Tensors:
        return replaced(outputs, "out", region, part)

    return FaultVariant(words, with_outputs(change), region.where)


def _moved(words: str, region: Region, source: Callable[[Tensor, Region], Tensor]) -> FaultVariant:
    def change(_inputs: Tensors, outputs: Tensors) -> Tensors:
        if flat(outputs["out"]).shape[0] < region.rows[1]:
            return outputs
        return replaced(outputs, "out", region, source(outputs["out"], region))

    return FaultVariant(words, with_outputs(change), region.where)


def _stale_variants(_context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield variants with tiles of the previous call of the same shape."""
    for words, size in (("a tile", TILE), ("a strip of 32 columns", (128, STRIP))):
        yield FaultVariant(f"{words} of the call before", _keeping(words, size))


def _keeping(seed: str, size: tuple[int, int]) -> Any:
    def apply(call: Any) -> Any:
        dice = random.Random(seed)  # noqa: S311  a repeatable race, no secret
        kept: dict[tuple[int, ...], Tensor] = {}

        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Any:
            outputs = call(inputs, weights)
            shape = tuple(outputs["out"].shape)
            before, kept[shape] = kept.get(shape), outputs["out"].clone()
            if before is None or dice.random() > OFTEN:
                return outputs
            region = _place(outputs["out"], size, dice)
            return replaced(outputs, "out", region, flat(before)[region.index])

        return faulty

    return apply


def _lost_variants(_context: ComponentContext) -> Iterator[FaultVariant]:
    yield racing("one expert's contribution lost for a token", partial(_lost, 1))
    yield racing("one expert's contribution lost for several tokens", partial(_lost, 5))


def _lost(count: int, inputs: Tensors, outputs: Tensors, dice: random.Random) -> Tensors:
    tokens, slots = inputs["x"].shape[:2]
    found = {dice.randrange(tokens): dice.randrange(slots) for _ in range(count)}
    return _without(found, inputs, outputs)


def _without(lost: Mapping[int, int], inputs: Tensors, outputs: Tensors) -> Tensors:
    """Drop the contribution of one slot for some tokens."""
    made, x = outputs["out"].clone(), inputs["x"]
    weights, dtype = inputs["weights"], outputs["out"].dtype
    for token, slot in lost.items():
        if token >= len(x):
            continue
        terms = x[token].double()
        total = terms.sum(0)
        weighed = weights[token].double()[:, None] * terms
        # Routing weights may multiply before w2 or in this sum; the nearer result decides.
        out = outputs["out"][token].double()
        behind = (weighed.sum(0) - out).norm() < (total - out).norm()
        made[token] = (out - (weighed if behind else terms)[slot]).to(dtype)
    return {**outputs, "out": made}


def _lost_signature(_context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    mask = differing(record)
    if mask is None:
        return
    tokens = mask.any(1).nonzero().flatten().tolist()
    found: dict[int, int] = {}
    for token in tokens if len(tokens) <= 64 else []:
        candidate = record.outputs["out"][token].double()
        gaps = [
            float(
                (
                    _without({token: slot}, record.inputs, record.expected)["out"][token]
                    - candidate
                ).norm()
            )
            for slot in range(record.inputs["x"].shape[1])
        ]
        found[token] = gaps.index(min(gaps))
    if found:
        words = f"one contribution lost for {len(found)} tokens, the first {tokens[0]}"
        yield FaultVariant(words, with_outputs(partial(_without, found)), {"token": tokens[0]})


def _scale_variants(_context: ComponentContext) -> Iterator[FaultVariant]:
    yield racing("a tile of scales holds the next rows' scales", partial(_scales, 1))
    yield racing("a tile of scales holds the scales of the rows before", partial(_scales, -1))
    yield racing("a tile of scales was not stored", partial(_scales, 0))


def _scales(by: int, _inputs: Tensors, outputs: Tensors, dice: random.Random) -> Tensors:
    region = _place(outputs["block_scale"], (32, 4), dice)
    return _scales_at(by, region, outputs)


def _scales_at(by: int, region: Region, outputs: Tensors) -> Tensors:
    codes = outputs["block_scale"].view(torch.uint8)
    part = flat(codes).roll(-by, 0)[region.index] if by else torch.zeros_like(codes.flatten()[:1])
    made = codes.clone()
    flat(made)[region.index] = part
    return {**outputs, "block_scale": made.view(outputs["block_scale"].dtype)}


def _scales_signature(_context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    for region, by in product(_boxes(record, "block_scale"), (1, -1, 0)):
        words = f"scales of rows {region.rows[0]} to {region.rows[1] - 1}: "
        words += {1: "the next row's", -1: "those of the row before", 0: "not stored"}[by]

        def change(
            _inputs: Tensors, outputs: Tensors, by: int = by, region: Region = region
        ) -> Tensors:
            return _scales_at(by, region, outputs)

        yield FaultVariant(words, with_outputs(change), region.where)


_EFFECT = "tiles are wrong in some runs; two runs of the same input differ"
_RACE_REMEDY = (
    "Repeat the call at fixed input; check barriers, fences and when stages are released."
)


def _fault(name: str, title: str, where: tuple[str, ...], ways: Any, signature: Any) -> ModelFault:
    return ModelFault(
        id=f"M37.{name}",
        title=title,
        effect=_EFFECT,
        remedy=_RACE_REMEDY,
        applies_to=lambda context: context.role in where,
        variants=ways,
        signature=signature,
        per_call=True,
    )


RACES_FAULTS = (
    _fault(
        "tile",
        "A tile of an output holds other values, as after a race",
        PRODUCTS[:-2],
        _race_tile_variants,
        _tiles,
    ),
    _fault(
        "stale_tile",
        "A race leaves a tile of the call before",
        _HELD,
        _stale_variants,
        _stale_tiles,
    ),
    _fault(
        "contribution",
        "A race loses an expert's contribution to some tokens",
        ("ffn.experts.combine",),
        _lost_variants,
        _lost_signature,
    ),
    ModelFault(
        id="M37.scales",
        title="A race spoils scales of quantised activations",
        effect=_EFFECT,
        remedy=_RACE_REMEDY,
        applies_to=lambda context: (
            context.role.endswith("act_quant") and "block_scale" in context.component.outputs
        ),
        variants=_scale_variants,
        signature=_scales_signature,
        per_call=True,
    ),
)
