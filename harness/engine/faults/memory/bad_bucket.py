"""M41: one tactic, shape or architecture leaves outputs unwritten or drops a tile of K.

A fallback reads memory that nobody wrote beyond some number of rows, a guard compiles a body away,
a tactic ends one tile of K too soon (flashinfer issues 4588 and 3197, sglang issue 9807). Other
shapes are exact.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.activation_regions import differing, flat
from degarble.harness.engine.faults.model_faults import (
    ModelFault,
    Way,
    from_ways,
    with_outputs,
)
from degarble.harness.engine.faults.rebinding import function_at, with_function, with_x

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene, Sight
    from degarble.harness.engine.faults.rebinding import Function

    Tensors = Mapping[str, Tensor]

PRODUCTS = (
    "attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wkv_a", "attn.wkv_b", "attn.wo", "attn.wo_a",
    "attn.wo_b", "attn.indexer.wq_b", "attn.indexer.wk", "ffn.shared.w13", "ffn.shared.w2",
    "ffn.w13", "ffn.w2", "ffn.experts.w13", "ffn.experts.w2", "ffn.gate", "head",
)  # fmt: skip
_MORE = ("attn.attend", "ffn.experts.combine", "attn.inverse_rope")
_VALUES = {"zeros": 0.0, "NaN": math.nan, "what lay there": 3.0e4}
_TILE_OF_K = 64
_EXPERT_TILE = 32  # columns of an expert's last tile, in each of gate and up
_LANES, _OF_LANE = 32, 8  # of a warp; BF16 numbers that a lane reads at once
_WARPGROUPS = ((128, 64), (64, 32), (256, 64))  # rows of a tile, and of one group of threads


def _rows(words: str, value: float, first: int, last: int | None = None) -> Way:
    def change(_inputs: Tensors, outputs: Tensors) -> Tensors:
        made = outputs["out"].clone()
        flat(made)[first:last] = value
        return {**outputs, "out": made}

    return Way(words, with_outputs(change), {"row": first})


def _columns(words: str, value: float, first: int, last: int | None = None) -> Way:
    def change(_inputs: Tensors, outputs: Tensors) -> Tensors:
        made = outputs["out"].clone()
        made[..., first:last] = value
        return {**outputs, "out": made}

    return Way(words, with_outputs(change), {"column": first})


def _row_ways(_scene: Scene) -> Iterator[Way]:
    for told, value in _VALUES.items():
        yield _rows(f"{told} in every row", value, 0)
        for first in (1, 16, 128):
            yield _rows(f"{told} from row {first} on", value, first)


def _written(sight: Sight) -> tuple[Tensor, float, str] | None:
    """Return mask, value and name if all elements that differ have the same value."""
    mask = differing(sight)
    if mask is None:
        return None
    found = flat(sight.outputs["out"])[mask]
    if bool(found.isnan().all()):
        return mask, math.nan, "NaN"
    value = float(found[0])
    if not bool((found == found[0]).all()):
        return None
    told = {number: words for words, number in _VALUES.items()}.get(value, f"{value:g}")
    return mask, value, told


def _row_signature(_scene: Scene, sight: Sight) -> Iterator[Way]:
    found = _written(sight)
    if found is None:
        return
    mask, value, told = found
    rows = mask.any(1).nonzero().flatten()
    first, last = int(rows[0]), int(rows[-1]) + 1
    if last == len(mask):
        where = f"from row {first} on" if first else "in every row"
        yield _rows(f"{told} {where}", value, first)
    yield _rows(f"{told} in rows {first} to {last - 1}", value, first, last)


def _column_ways(_scene: Scene) -> Iterator[Way]:
    for told, value in _VALUES.items():
        yield _columns(f"{told} from column 64 on", value, 64)
        yield _columns(f"{told} in the last 32 columns", value, -32)


def _column_signature(_scene: Scene, sight: Sight) -> Iterator[Way]:
    found = _written(sight)
    if found is None or bool(found[0].any(0).all()):
        return
    mask, value, told = found
    columns = mask.any(0).nonzero().flatten()
    first, last = int(columns[0]) // 16 * 16, -(-(int(columns[-1]) + 1) // 16) * 16
    yield _columns(f"{told} in columns {first} to {last - 1}", value, first, last)
    yield _columns(f"{told} from column {first} on", value, first)


def _expert_tile(value: float, told: str, expert: int | None, columns: tuple[int, ...]) -> Way:
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
    words = f"{told} in {span}, of {whose}"
    return Way(words, with_outputs(change), where, whole=expert is None)


def _expert_tile_ways(scene: Scene) -> Iterator[Way]:
    halves = 2 if scene.role.endswith("w13") else 1
    width = sum(shape[0] for shape in _shapes_of_first(scene)) // halves
    columns = tuple(
        half * width + column
        for half in range(halves)
        for column in range(max(0, width - _EXPERT_TILE), width)
    )
    for told, value in list(_VALUES.items())[1:]:
        for expert in (0, None):
            yield _expert_tile(value, told, expert, columns)


def _shapes_of_first(scene: Scene) -> list[tuple[int, ...]]:
    """Return the extents of the first expert's matrices."""
    return [each.shape for name, each in scene.weights.items() if ".experts.0." in name]


def _expert_tiles(_scene: Scene, sight: Sight) -> Iterator[Way]:
    found = _written(sight)
    if found is None:
        return
    mask, value, told = found
    experts = sight.inputs["experts"].flatten()[mask.any(1)].unique()
    columns = mask.any(0)
    if not bool(columns.all()):
        where = tuple(columns.nonzero().flatten().tolist())
        if len(experts) == 1:
            yield _expert_tile(value, told, int(experts[0]), where)
        yield _expert_tile(value, told, None, where)


def _no_tile(scene: Scene, words: str, first: int, last: int | None = None, fewest: int = 0) -> Way:
    """Leave columns of K out of the sum, in calls of at least some rows."""

    def change(x: Tensor) -> Tensor:
        made = x.clone()
        if len(x) >= fewest:
            made[..., first:last] = 0
        return made

    return Way(words, with_x(scene, change), {"k": first})


def _tile_ways(scene: Scene) -> Iterator[Way]:
    last, rows = "the last 64 of K left out", "from 16 rows on"
    yield _no_tile(scene, last, -_TILE_OF_K)
    yield _no_tile(scene, "the first 64 of K left out", 0, _TILE_OF_K)
    yield _no_tile(scene, "the last 16 of K left out", -16)
    yield _no_tile(scene, f"{last} {rows}", -_TILE_OF_K, fewest=16)
    width = scene.bound.config.hidden_size
    for begin in range(_TILE_OF_K, min(width, 8 * _TILE_OF_K) - _TILE_OF_K, _TILE_OF_K):
        words = f"columns {begin} to {begin + _TILE_OF_K - 1} of K left out"
        yield _no_tile(scene, words, begin, begin + _TILE_OF_K)


def _repeated(tile: int, own: int) -> Way:
    """Repeat the first part of a tile's rows in the rest of the tile."""

    def change(_inputs: Tensors, outputs: Tensors) -> Tensors:
        out = outputs["out"]
        row = torch.arange(len(out))
        return {**outputs, "out": out[row - row % tile + row % own]}

    words = f"in every tile of {tile} rows the first {own} again"
    return Way(words, with_outputs(change), {"tile": tile})


def _repeated_ways(_scene: Scene) -> Iterator[Way]:
    for tile, own in _WARPGROUPS:
        yield _repeated(tile, own)


def _repeats(scene: Scene, sight: Sight) -> Iterator[Way]:
    """Propose the tiles whose first rows the candidate repeats."""
    out = sight.outputs["out"][: sight.rows[0] if sight.rows else None]
    for way, (_, own) in zip(_repeated_ways(scene), _WARPGROUPS, strict=True):
        if len(out) > own and torch.equal(out[own : 2 * own], out[: len(out) - own][:own]):
            yield way


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


def _lane_ways(scene: Scene) -> Iterator[Way]:
    for words, lanes in (
        ("the sum of the first lane alone", lambda row, column: 0 * (row + column)),
        ("the sum of the lane that writes", lambda row, column: row % 8 * 4 + column % 4),
    ):
        function = _typed(scene, _one_lane(lanes))
        yield Way(words, with_function(scene, function))


def _typed(scene: Scene, function: Function) -> Function:
    """Round as the component's own output is rounded."""
    own = function_at(scene)

    def typed(facts: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        kept = own(facts, {**inputs, "x": inputs["x"][:1]}, weights)["out"].dtype
        return {"out": function(facts, inputs, weights)["out"].to(kept)}

    return typed


def _quantiser_ways(_scene: Scene) -> Iterator[Way]:
    for name, words in (("codes", "codes of 0"), ("block_scale", "block scales of 0")):
        yield Way(words, with_outputs(partial(_empty, (name,))))
    yield Way("codes and scales of 0", with_outputs(partial(_empty, ("codes", "block_scale"))))
    yield Way("codes of 0 from row 16 on", with_outputs(partial(_empty, ("codes",), first=16)))
    yield Way("tensor scales of 0", with_outputs(partial(_empty, ("tensor_scale",))))


def _empty(names: tuple[str, ...], _inputs: Tensors, outputs: Tensors, first: int = 0) -> Tensors:
    made = dict(outputs)
    for name in names:
        if name in made and made[name].ndim:
            made[name] = made[name].clone()
            made[name][first:] = 0
        elif name in made:
            made[name] = torch.zeros_like(made[name])
    return made


def _quantises(scene: Scene) -> bool:
    return scene.role.endswith("act_quant") and "codes" in scene.component.outputs


_REMEDY = "Run every tactic and bucket of rows against the reference, with poisoned outputs."

MODEL_FAULTS = (
    ModelFault(
        id="M41.rows_unwritten",
        title="A bucket of rows leaves its output unwritten",
        effect="rows from a number on are zeros, NaN, or what lay there",
        remedy=_REMEDY,
        sits=lambda scene: scene.role in (*PRODUCTS, *_MORE),
        ways=_row_ways,
        signature=_row_signature,
    ),
    ModelFault(
        id="M41.columns_unwritten",
        title="A tactic leaves columns of its output unwritten",
        effect="columns at the end are zeros, NaN, or what lay there",
        remedy=_REMEDY,
        sits=lambda scene: scene.role in PRODUCTS and scene.role != "ffn.gate",
        ways=_column_ways,
        signature=_column_signature,
    ),
    ModelFault(
        id="M41.tile_unwritten",
        title="A tile of an expert's slots and columns is never written",
        effect="some columns of the slots of one expert are NaN, or what lay there",
        remedy=_REMEDY,
        sits=lambda scene: scene.role in ("ffn.experts.w13", "ffn.experts.w2"),
        ways=_expert_tile_ways,
        signature=_expert_tiles,
    ),
    ModelFault(
        id="M41.tile_of_k",
        title="A tactic leaves a tile of K out of the sum",
        effect="outputs are off by what some inputs give; nothing looks broken",
        remedy=_REMEDY,
        sits=lambda scene: scene.role in PRODUCTS,
        ways=_tile_ways,
        signature=from_ways(_tile_ways),
    ),
    ModelFault(
        id="M41.rows_repeated",
        title="A part of a tile's rows is computed twice, in the place of the others",
        effect="rows of a tile are those of other tokens; calls of few rows are exact",
        remedy="Every group of threads takes its own rows of A, as it stores its own.",
        sits=lambda scene: scene.role in PRODUCTS,
        ways=_repeated_ways,
        signature=_repeats,
    ),
    ModelFault(
        id="M41.lanes_apart",
        title="Sums of a warp's lanes are not added up",
        effect="outputs have a fifth of their size, and are what some inputs give",
        remedy="Fold all lanes of a warp before one of them writes.",
        sits=lambda scene: scene.role == "ffn.gate",
        ways=_lane_ways,
        signature=from_ways(_lane_ways),
    ),
    ModelFault(
        id="M41.quantiser_empty",
        title="A quantiser's body was compiled away",
        effect="the product behind it sees zeros",
        remedy="Test each kernel with known answers when the engine starts.",
        sits=_quantises,
        ways=_quantiser_ways,
        signature=from_ways(_quantiser_ways),
    ),
)
