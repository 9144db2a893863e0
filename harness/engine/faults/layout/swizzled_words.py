"""M12: both operands of a GEMM are read from shared memory one word or chunk off.

A kernel keeps scales in words of four, 128 rows to a tile, and codes in chunks of 16 bytes that
change places every four rows; an address that is one off reads the neighbour's, of A and of B
(flashinfer issue 4044 is one of rows). The last row of a tile reads the next stage, which may not
have arrived: outputs that depend on it are left unknown.

Shape letters: N rows, C block scales of a row, B bytes of codes, S steps of K, P pieces of a row in
a step, R rows of a tile, w width of a piece.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from degarble.harness.engine.faults.decoding import scale_numbers, with_scales
from degarble.harness.engine.faults.model_faults import ChangedWeights, ModelFault, Way, from_ways
from degarble.harness.engine.faults.operand_faults import activation_format, is_packed
from degarble.harness.engine.faults.weight_faults import kept
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.engine.faults.model_faults import Scene

    Parts = Mapping[str, Tensor]

_TILE, _PART = 128, 32  # rows of a tile of scales, and rows whose words lie four apart
_WORD = 4  # scales
_CHUNK, _TURNS = 16, 4  # bytes; rows until the two chunks of a step change places


def words_behind(scales_NC: Tensor) -> Tensor:
    """Give every row the scales that lie one word after its own."""
    parts_NSP = pad(scales_NC, (0, -scales_NC.shape[1] % _WORD)).unflatten(-1, (-1, 1, _WORD))
    row = torch.arange(_TILE)[:, None]
    # The 128x4 layout: the words of rows r, r + 32, r + 64, r + 96 are adjacent.
    made = _behind(parts_NSP, row % _PART * 4 + row // _PART)
    return made.flatten(1)[:, : scales_NC.shape[1]].contiguous()


def chunks_behind(tile: int, codes_NB: Tensor) -> Tensor:
    """Replace every 16-byte chunk by the next one in a tile of steps of two swizzled chunks."""
    width = codes_NB.shape[1]
    parts_NSP = pad(codes_NB, (0, -width % (2 * _CHUNK))).unflatten(-1, (-1, 2, _CHUNK))
    row, number = torch.arange(tile)[:, None], torch.arange(2)
    # The swizzle: the two chunks of a step change places every four rows.
    made = _behind(parts_NSP, row * 2 + (row // _TURNS % 2 ^ number))
    return made.flatten(1)[:, :width].contiguous()


def _behind(parts_NSP: Tensor, place_RP: Tensor) -> Tensor:
    """Place pieces [N, S, P, w] in stages of R rows, and read each one place further on.

    Stages follow each other in the order of steps; zeros follow the last one.
    """
    count, steps, pieces, width = parts_NSP.shape
    tile = len(place_RP)
    tiles = pad(parts_NSP.transpose(0, -1), (0, -count % tile)).transpose(0, -1)
    tiles = tiles.unflatten(0, (-1, tile)).transpose(1, 2)  # [tiles, S, R, P, w]
    stage = tile * pieces
    at = torch.arange(steps)[:, None, None] * stage + place_RP
    # One more piece than the stages have: the last read goes past the end.
    memory = tiles.new_zeros(len(tiles), steps * stage + 1, width)
    memory[:, at.flatten()] = tiles.flatten(1, 3)
    found = memory[:, at.flatten() + 1].reshape(tiles.shape).transpose(1, 2)
    made: Tensor = found.flatten(0, 1)[:count]
    return made


def _of_both(part: str, change: Callable[[Tensor], Tensor], call: ComponentCall) -> ComponentCall:
    def changed(_name: str, weight: Weight) -> Weight:
        if not weight.is_quantised or len(weight.shape) > 2:
            return weight
        tensor = weight.quantised()
        if part == "codes":
            made = replace(tensor, codes=change(tensor.codes))
            return Weight.of(made, weight.input_scale)
        value = with_scales(tensor, change(scale_numbers(tensor)))
        return Weight(value=value, input_scale=weight.input_scale)

    def faulty(inputs: Parts, weights: Mapping[str, Any]) -> Parts:
        if part not in inputs:  # with some switches a linear gets plain numbers
            return call(inputs, weights)
        given = {**inputs, part: change(inputs[part])}
        return call(given, ChangedWeights(weights, changed))

    return faulty


def _last_of_tiles(tile: int, out_MN: Tensor) -> Tensor:
    """Mark outputs that depend on the last row of a tile of A or B."""
    last_M, last_N = (torch.arange(size) % tile == tile - 1 for size in out_MN.shape[-2:])
    mask: Tensor = (last_M[:, None] | last_N).to(out_MN.device)
    return mask


def _word_ways(scene: Scene) -> Iterator[Way]:
    words = f"scales of both operands a word behind on {scene.name}"
    change = partial(_of_both, "block_scale", words_behind)
    yield Way(words, change, whole=True, unknown=partial(_last_of_tiles, _TILE))


def _chunk_ways(scene: Scene) -> Iterator[Way]:
    for tile in (64, _TILE):
        words = f"codes of both operands 16 bytes behind, in tiles of {tile} rows, on {scene.name}"
        change = partial(_of_both, "codes", partial(chunks_behind, tile))
        unknown = partial(_last_of_tiles, tile)
        yield Way(words, change, {"tile": tile}, whole=True, unknown=unknown)


def _sits(scene: Scene) -> bool:
    """Return whether this is an NVFP4 by NVFP4 linear with all rows in one product."""
    names = {each.name for each in scene.component.inputs}
    form = activation_format(scene) if "codes" in names and "experts" not in names else None
    return form is not None and is_packed(form) and all(each.form for each in kept(scene))


_REMEDY = "Fill tiles with a ramp, and read each address back by the layout's own function."
MODEL_FAULTS = (
    ModelFault(
        id="M12.word_behind",
        title="Block scales of both operands are read a word behind their own",
        effect="rows are scaled by those 32 rows on; calls of few rows by zeros",
        remedy=_REMEDY,
        sits=_sits,
        ways=_word_ways,
        signature=from_ways(_word_ways),
    ),
    ModelFault(
        id="M12.chunk_behind",
        title="Codes of both operands are read 16 bytes behind their own",
        effect="half of the codes are another row's: outputs are noise of the right size",
        remedy=_REMEDY,
        sits=_sits,
        ways=_chunk_ways,
        signature=from_ways(_chunk_ways),
    ),
)
