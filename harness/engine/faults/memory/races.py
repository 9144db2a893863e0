"""M37: a race makes tiles stale, shifted, exchanged or lost, at random places in some runs.

A consumer starts before its producer's stores are visible, an accumulator is released before it is
read, sub-tiles begin at the wrong stage, contributions are lost where adds are not atomic
(flashinfer issues 2708 and 3361, cutlass issues 3643 and 3636, atlas issue 1099). A planted race
damages a random part of its calls, so that two runs differ; recognition concerns the effect in one
call.
"""

from __future__ import annotations

import random
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.activation_regions import (
    Region,
    box,
    differing,
    flat,
    grown,
    replaced,
)
from degarble.harness.engine.faults.memory.bad_bucket import PRODUCTS
from degarble.harness.engine.faults.model_faults import ModelFault, Way, with_outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene, Sight

    Tensors = Mapping[str, Tensor]
    Damage = Callable[[Tensors, Tensors, random.Random], Tensors]

_STEPS = ((1, 16), (1, 32), (1, 64), (1, 128), (32, 64), (64, 64), (128, 32), (64, 128))
_SCALE_STEPS = ((1, 1), (1, 4), (32, 4), (128, 4))
OFTEN = 0.6  # of the calls that are damaged
TILE = (64, 64)
STRIP = 32
_SHIFTS = (STRIP, -STRIP, 64, -64, 128, -128)
_HELD = ("attn.wq_a", "attn.wo_b", "attn.wo", "ffn.shared.w13", "ffn.w13", "attn.wkv", "attn.wq_b")


def racing(words: str, damage: Damage, **where: Any) -> Way:
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

    return Way(words, apply, where)


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


def _tile_ways(_scene: Scene) -> Iterator[Way]:
    yield racing("a tile holds the next tile's values", _of_next(TILE, 64))
    yield racing("a strip of 32 columns holds the next one's values", _of_next((128, STRIP), STRIP))
    yield racing("two sub-tiles of 64 columns exchanged", _exchanged)
    yield racing("half a tile was not stored", _emptied((32, 64)))
    yield racing("a tile was not stored", _emptied(TILE))


def _boxes(sight: Sight, output: str) -> list[Region]:
    """Yield the differing region rounded out to tiles of several sizes."""
    mask = differing(sight, output)
    if mask is None:
        return []
    shape, found = (mask.shape[0], mask.shape[1]), box(mask)
    steps = _SCALE_STEPS if output == "block_scale" else _STEPS
    return list(dict.fromkeys(grown(found, step, shape) for step in steps))


def _tiles(_scene: Scene, sight: Sight) -> Iterator[Way]:
    if "out" not in sight.outputs:
        return
    candidate, expected = sight.outputs["out"], sight.expected["out"]
    for region in _boxes(sight, "out"):
        told = _told(region)
        own = flat(candidate)[region.index]
        if not bool(own.any()):
            yield _fixed(f"{told} were not stored", region, 0.0)
        for by in _SHIFTS:
            if _alike(own, shifted(expected, region, by)):
                words = f"{told} hold what belongs {by:+d} columns beside"
                yield _moved(words, region, partial(shifted, by=by))
        if (region.columns[1] - region.columns[0]) % 2 == 0 and _alike(
            own, swapped(expected, region)
        ):
            yield _moved(f"{told}: the two halves exchanged", region, swapped)


def _stale_tiles(_scene: Scene, sight: Sight) -> Iterator[Way]:
    """Yield ways that repeat the same place of an earlier call."""
    if "out" not in sight.outputs:
        return
    candidate = sight.outputs["out"]
    for region in _boxes(sight, "out"):
        own = flat(candidate)[region.index]
        for other in sight.earlier[::-1]:
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


def _fixed(words: str, region: Region, part: Tensor | float) -> Way:
    def change(_inputs: Tensors, outputs: Tensors) -> Tensors:
        return replaced(outputs, "out", region, part)

    return Way(words, with_outputs(change), region.where)


def _moved(words: str, region: Region, source: Callable[[Tensor, Region], Tensor]) -> Way:
    def change(_inputs: Tensors, outputs: Tensors) -> Tensors:
        if flat(outputs["out"]).shape[0] < region.rows[1]:
            return outputs
        return replaced(outputs, "out", region, source(outputs["out"], region))

    return Way(words, with_outputs(change), region.where)


def _stale_ways(_scene: Scene) -> Iterator[Way]:
    """Yield ways with tiles of the previous call of the same shape."""
    for words, size in (("a tile", TILE), ("a strip of 32 columns", (128, STRIP))):
        yield Way(f"{words} of the call before", _keeping(words, size))


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


def _lost_ways(_scene: Scene) -> Iterator[Way]:
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


def _lost_signature(_scene: Scene, sight: Sight) -> Iterator[Way]:
    mask = differing(sight)
    if mask is None:
        return
    tokens = mask.any(1).nonzero().flatten().tolist()
    found: dict[int, int] = {}
    for token in tokens if len(tokens) <= 64 else []:
        candidate = sight.outputs["out"][token].double()
        gaps = [
            float((_without({token: slot}, sight.inputs, sight.expected)["out"][token] - candidate)
            .norm())
            for slot in range(sight.inputs["x"].shape[1])
        ]  # fmt: skip
        found[token] = gaps.index(min(gaps))
    if found:
        words = f"one contribution lost for {len(found)} tokens, the first {tokens[0]}"
        yield Way(words, with_outputs(partial(_without, found)), {"token": tokens[0]})


def _scale_ways(_scene: Scene) -> Iterator[Way]:
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


def _scales_signature(_scene: Scene, sight: Sight) -> Iterator[Way]:
    for region, by in product(_boxes(sight, "block_scale"), (1, -1, 0)):
        words = f"scales of rows {region.rows[0]} to {region.rows[1] - 1}: "
        words += {1: "the next row's", -1: "those of the row before", 0: "not stored"}[by]

        def change(
            _inputs: Tensors, outputs: Tensors, by: int = by, region: Region = region
        ) -> Tensors:
            return _scales_at(by, region, outputs)

        yield Way(words, with_outputs(change), region.where)


_EFFECT = "tiles are wrong in some runs; two runs of the same input differ"
_REMEDY = "Repeat the call at fixed input; check barriers, fences and when stages are released."


def _fault(name: str, title: str, where: tuple[str, ...], ways: Any, signature: Any) -> ModelFault:
    return ModelFault(
        id=f"M37.{name}",
        title=title,
        effect=_EFFECT,
        remedy=_REMEDY,
        sits=lambda scene: scene.role in where,
        ways=ways,
        signature=signature,
        per_call=True,
    )


MODEL_FAULTS = (
    _fault("tile", "A race spoils a tile of an output", PRODUCTS[:-2], _tile_ways, _tiles),
    _fault(
        "stale_tile", "A race leaves a tile of the call before", _HELD, _stale_ways, _stale_tiles
    ),
    _fault(
        "contribution",
        "A race loses an expert's contribution to some tokens",
        ("ffn.experts.combine",),
        _lost_ways,
        _lost_signature,
    ),
    ModelFault(
        id="M37.scales",
        title="A race spoils scales of quantised activations",
        effect=_EFFECT,
        remedy=_REMEDY,
        sits=lambda scene: (
            scene.role.endswith("act_quant") and "block_scale" in scene.component.outputs
        ),
        ways=_scale_ways,
        signature=_scales_signature,
        per_call=True,
    ),
)
