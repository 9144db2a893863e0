"""M43: an output, or one head, expert or tile of it, has a small systematic gain.

One backend shifts the distribution silently (flashinfer issue 3589), or leaves out a constant of
the model (sglang issue 26791). The gain is fitted by least squares, place by place. It is reported
as a number; its origin is left to the reader.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults.activation_regions import differing, flat
from degarble.harness.engine.faults.gain_fit import (
    FAINT,
    Side,
    both_gains,
    faint,
    fitted,
    is_named,
    of_sight,
    planted_gain,
    sharpened,
    told,
)
from degarble.harness.engine.faults.model_faults import ModelFault

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.gain_fit import Region
    from degarble.harness.engine.faults.model_faults import Scene, Sight, Way

PLANTED = (0.97, 1.03, 0.9)
TILE = 64  # columns of a tile
_WHOLE = {
    "attn.attend", "attn.compressor.pool", "attn.hc_post", "attn.hc_pre",
    "attn.indexer.weights_proj", "attn.inverse_rope", "attn.kv_norm", "attn.kv_norm_rope",
    "attn.kv_write", "attn.norm", "attn.q_head_norm_rope", "attn.q_norm", "attn.wkv", "attn.wkv_a",
    "attn.wo", "attn.wo_a", "attn.wo_b", "attn.wq_a", "attn.wq_b", "embed", "ffn.act",
    "ffn.experts.combine", "ffn.experts.w13", "ffn.experts.w2", "ffn.gate", "ffn.hc_post",
    "ffn.hc_pre", "ffn.moe_sum", "ffn.norm", "ffn.shared.act", "ffn.shared.w13", "ffn.shared.w2",
    "ffn.w13", "ffn.w2", "hc_head", "head", "norm",
}  # fmt: skip
_TILED = {
    "attn.wq_a", "attn.wq_b", "attn.wo_b", "attn.wo", "ffn.shared.w13", "ffn.shared.w2", "ffn.w13",
    "ffn.w2", "head",
}  # fmt: skip


def _whole_ways(scene: Scene) -> Iterator[Way]:
    for gain in PLANTED:
        yield planted_gain(scene, f"{told(gain)} on all of it", gain, places={"gain": gain})


def _whole(scene: Scene, sight: Sight) -> Iterator[Way]:
    gain = of_sight(sight)
    c, e = sight.outputs.get("out"), sight.expected.get("out")
    if gain is None and c is not None and e is not None and c.shape == e.shape:
        gain = faint(c, e)
    if gain is not None:
        for value, side in _sharp(scene, sight, gain):
            words = f"{told(value)} on all of it"
            yield from both_gains(scene, words, value, places={"gain": value}, sides=(side,))


def _sharp(
    scene: Scene, sight: Sight, gain: float, mask: Tensor | None = None
) -> Iterator[tuple[float, Side]]:
    """Yield the gains that a fitted one may be, each with its side of the rounding.

    A healthy kernel's own roundings may blur what `sharpened` counts; then the fit itself is right.
    """
    for side in Side:
        sharp = sharpened(scene, sight, gain, mask, side)
        for value in dict.fromkeys((*_rounded(sharp), *_rounded(gain))):
            yield value, side


def _rounded(gain: float) -> Iterator[float]:
    """Yield the gain with few digits if a fit cannot tell them apart, then the gain itself."""
    if not math.isfinite(gain):
        return  # a twin that is not finite has no gain
    exact = math.copysign(2.0 ** round(math.log2(abs(gain))), gain) if gain else 0.0
    if is_named(gain, exact) and exact != 1:
        yield exact  # a fit's last digits are noise beside an exact number
        return
    if abs(gain - 1) <= FAINT:
        beside = dict.fromkeys(float(f"{gain - 1:.{digits}g}") for digits in (1, 2))
        yield from (1 + value for value in beside if value)
        yield gain
        return
    short = {float(f"{gain:.{digits}g}"): None for digits in (2, 3)}
    yield from (value for value in short if value != 1 and is_named(gain, value))
    yield gain


def _heads(scene: Scene) -> int:
    return int(scene.bound.config.num_attention_heads)


def _head_region(head: int, heads: int) -> Region:
    def region(_inputs: Mapping[str, Tensor], out: Tensor) -> Tensor:
        if out.ndim == 3:
            return (torch.arange(out.shape[1]) == head)[:, None].expand(out.shape)
        return (torch.arange(out.shape[-1]) // (out.shape[-1] // heads) == head).expand(out.shape)

    return region


def _planted_heads(scene: Scene) -> Iterator[Way]:
    for head in (0, _heads(scene) - 1):
        yield next(head_ways(scene, head, 0.97))


def head_ways(
    scene: Scene, head: int, gain: float, sides: Collection[Side] = tuple(Side)
) -> Iterator[Way]:
    """Yield a gain on one head, before the rounding and after it."""
    region, places = _head_region(head, _heads(scene)), {"head": head, "gain": gain}
    yield from both_gains(scene, f"{told(gain)} on head {head}", gain, region, places, sides)


def _of_places(
    scene: Scene, sight: Sight, masks: Iterator[tuple[int, Tensor]]
) -> Iterator[tuple[int, float, Side]]:
    """Yield places that differ by a gain; none if the whole output has one."""
    c, e = sight.outputs["out"], sight.expected["out"]
    if of_sight(sight) is not None or c.shape != e.shape:
        return
    for number, mask in masks:
        gain = fitted(c[mask], e[mask]) or faint(c[mask], e[mask])
        if gain is not None:
            for value, side in _sharp(scene, sight, gain, mask):
                yield number, value, side


def _head(scene: Scene, sight: Sight) -> Iterator[Way]:
    heads, out = _heads(scene), sight.expected["out"]
    masks = ((h, _head_region(h, heads)(sight.inputs, out)) for h in range(heads))
    found = ((h, mask) for h, mask in masks if mask is not None)
    for head, gain, side in _of_places(scene, sight, found):
        yield from head_ways(scene, head, gain, (side,))


def _expert_region(expert: int) -> Region:
    def region(inputs: Mapping[str, Tensor], out: Tensor) -> Tensor:
        return (inputs["experts"] == expert)[..., None].expand(out.shape)

    return region


def expert_ways(
    scene: Scene, expert: int, gain: float, sides: Collection[Side] = tuple(Side)
) -> Iterator[Way]:
    """Yield a gain on one expert, before the rounding and after it."""
    region, places = _expert_region(expert), {"expert": expert, "gain": gain}
    yield from both_gains(scene, f"{told(gain)} on expert {expert}", gain, region, places, sides)


def _planted_experts(scene: Scene) -> Iterator[Way]:
    for expert in (0, scene.bound.config.n_routed_experts - 1):
        yield next(expert_ways(scene, expert, 0.97))


def _expert(scene: Scene, sight: Sight) -> Iterator[Way]:
    experts, out = sight.inputs["experts"], sight.expected["out"]
    masks = (
        (number, (experts == number)[..., None].expand(out.shape))
        for number in experts.unique().tolist()
        if number >= 0
    )
    for expert, gain, side in _of_places(scene, sight, masks):
        yield from expert_ways(scene, expert, gain, (side,))


def _tile_region(tile: int) -> Region:
    def region(_inputs: Mapping[str, Tensor], out: Tensor) -> Tensor:
        return (torch.arange(out.shape[-1]) // TILE == tile).expand(out.shape)

    return region


def tile_ways(
    scene: Scene, tile: int, gain: float, sides: Collection[Side] = tuple(Side)
) -> Iterator[Way]:
    """Yield a gain on one tile of columns, before the rounding and after it."""
    begin = tile * TILE
    words = f"{told(gain)} on columns {begin} to {begin + TILE - 1}"
    places = {"column": begin, "gain": gain}
    yield from both_gains(scene, words, gain, _tile_region(tile), places, sides)


def _planted_tiles(scene: Scene) -> Iterator[Way]:
    for gain in (0.97, 0.5):
        yield next(tile_ways(scene, 0, gain))
    yield next(tile_ways(scene, 1, 0.97))


def _tile(scene: Scene, sight: Sight) -> Iterator[Way]:
    mask = differing(sight)
    out = sight.expected["out"]
    if out.shape[-1] <= TILE:
        return
    columns = range(out.shape[-1]) if mask is None else mask.any(0).nonzero().flatten().tolist()
    found = sorted({c // TILE for c in columns})
    if mask is not None and len(found) * TILE >= flat(out).shape[1]:
        return
    masks = ((tile, _tile_region(tile)(sight.inputs, out)) for tile in found)
    for tile, gain, side in _of_places(scene, sight, ((t, m) for t, m in masks if m is not None)):
        yield from tile_ways(scene, tile, gain, (side,))


def _sits_whole(scene: Scene) -> bool:
    return scene.role in _WHOLE


def _sits_head(scene: Scene) -> bool:
    return scene.role in {"attn.attend", "attn.wq_b", "attn.q_head_norm_rope", "attn.inverse_rope"}


def _sits_expert(scene: Scene) -> bool:
    return scene.role in {"ffn.experts.w13", "ffn.experts.w2"}


def _sits_tile(scene: Scene) -> bool:
    return scene.role in _TILED


_REMEDY = "Look for a constant that this backend leaves out, or a scale that it rounds."

MODEL_FAULTS = (
    ModelFault(
        id="M43.whole",
        title="A systematic gain on all of an output",
        effect="proportions stay, so a cosine sees nothing; distributions shift",
        remedy=_REMEDY,
        sits=_sits_whole,
        ways=_whole_ways,
        signature=_whole,
    ),
    ModelFault(
        id="M43.one_head",
        title="A systematic gain on one head",
        effect="one head pulls more or less than it should",
        remedy=_REMEDY,
        sits=_sits_head,
        ways=_planted_heads,
        signature=_head,
    ),
    ModelFault(
        id="M43.one_expert",
        title="A systematic gain on one expert",
        effect="tokens that visit this expert are off by its factor, or have its sign turned",
        remedy=_REMEDY,
        sits=_sits_expert,
        ways=_planted_experts,
        signature=_expert,
    ),
    ModelFault(
        id="M43.one_tile",
        title="A systematic gain on one tile of columns",
        effect="64 columns of a product are off",
        remedy=_REMEDY,
        sits=_sits_tile,
        ways=_planted_tiles,
        signature=_tile,
    ),
)
