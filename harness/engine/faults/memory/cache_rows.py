"""M13: KV cache rows are written in one layout and read in another.

A page stores all values first and then all scales, but is read as rows of values and scale; rows of
FP8 values, scales and rotated BF16 dims are read as plain FP8 (vllm issues 40991 and 48611). Both
layouts occupy the same bytes, so nothing asserts: from the second token on a scale is four value
bytes, of any size. Blame falls on the component that writes the rows; its healthy rows may be
rounded or exact.

Shape letters: T rows, D dims of a row, C blocks of a row, S bytes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.model_faults import ModelFault, Way, from_ways, with_outputs
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.number_formats import E4M3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene, Sight

_BLOCK = 64  # dims of one scale in V4's rows; V3.2's rows hold two of them each
_WRITERS = frozenset({"attn.kv_write", "attn.compressor.write"})
_REMEDY = "One record of the row for writer and reader; write a ramp and read it back."


def _encoded(rows_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP8 codes [T, D] and float32 scales [T, C] of rows."""
    blocks = rows_TD.float().unflatten(-1, (-1, _BLOCK))
    scales = blocks.abs().amax(-1).clamp(min=1e-4) / 448
    codes = encode_array(blocks / scales[..., None], E4M3)
    return codes.flatten(-2), scales


def _decoded(codes_TD: Tensor, scales_TC: Tensor) -> Tensor:
    values = decode_array(codes_TD, E4M3).unflatten(-1, (-1, _BLOCK))
    rows_TD: Tensor = (values * scales_TC[..., None]).flatten(-2)
    return rows_TD


def _planar_as_rows(rows_TD: Tensor) -> Tensor:
    codes, scales = _encoded(rows_TD)
    octets = scales.contiguous().view(torch.uint8).reshape(len(scales), -1)
    page = torch.cat((codes.flatten(), octets.flatten()))
    rows_TS = page.reshape(len(codes), -1)
    width = codes.shape[1]
    found = rows_TS[:, width:].contiguous().view(torch.float32)
    return _decoded(rows_TS[:, :width].contiguous(), found)


def _without_scales(rows_TD: Tensor) -> Tensor:
    codes, scales = _encoded(rows_TD)
    return _decoded(codes, torch.ones_like(scales))


def _neighbour_scales(rows_TD: Tensor) -> Tensor:
    codes, scales = _encoded(rows_TD)
    return _decoded(codes, scales.roll(1, -1))


def _bytes_of_numbers(rows_TD: Tensor) -> Tensor:
    """Read BF16 rows as plain FP8: the first half of the bytes, one value each."""
    octets = rows_TD.to(torch.bfloat16).contiguous().view(torch.uint8)
    return decode_array(octets[:, : rows_TD.shape[1]].contiguous(), E4M3)


def _fault(variant: str, title: str, doing: str, change: Callable[[Tensor], Tensor]) -> ModelFault:
    def sits(scene: Scene) -> bool:
        return scene.role in _WRITERS

    def way(scene: Scene, every: bool) -> Way:
        def changed(
            _inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
        ) -> Mapping[str, Tensor]:
            rows = outputs["out"].flatten(1)
            width = rows.shape[1] // _BLOCK * _BLOCK
            if not len(rows) or not width:
                return outputs
            made = rows.clone()
            made[:, :width] = change(rows[:, :width]).to(rows.dtype)
            if not every:
                made[:, : width // 2] = rows[:, : width // 2]
            return {**outputs, "out": made.reshape(outputs["out"].shape)}

        of = "" if every else ", the second half of every row"
        return Way(f"{doing} {scene.name}{of}", with_outputs(changed))

    def ways(scene: Scene) -> Iterator[Way]:
        yield way(scene, every=True)
        yield way(scene, every=False)

    effect = "attention reads noise, often huge or NaN, from the cache"
    return ModelFault(f"M13.{variant}", title, effect, _REMEDY, sits, ways, from_ways(ways))


def _beside_ways(scene: Scene) -> Iterator[Way]:
    """Yield ways with the rows of a neighbouring slot; unwritten slots are zeros."""
    for shift, words in ((1, "the row behind its own"), (-1, "the row in front of its own")):
        change = with_outputs(partial(_beside, shift))
        yield Way(f"{words} in every slot at {scene.name}", change, {"shift": shift}, whole=True)


def _beside_signature(scene: Scene, sight: Sight) -> Iterator[Way]:
    """Propose them unless all rows are zeros, which give no evidence of an offset."""
    rows = sight.outputs.get("out")
    if rows is not None and len(rows) > 1 and bool(rows.any()):
        yield from _beside_ways(scene)


def _beside(shift: int, _inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Any:
    rows = outputs["out"]
    at = torch.arange(len(rows)) + shift
    found = rows[at.clamp(0, max(0, len(rows) - 1))]
    inside = ((at >= 0) & (at < len(rows))).reshape(-1, *[1] * (rows.ndim - 1))
    return {**outputs, "out": torch.where(inside, found, torch.zeros_like(found))}


MODEL_FAULTS = (
    ModelFault(
        id="M13.slot_beside",
        title="Rows are written a slot beside their own",
        effect="every token attends to its neighbours' rows in the place of its own",
        remedy="A slot is page times page size plus place; write a ramp and read it back.",
        sits=lambda scene: scene.role in _WRITERS,
        ways=_beside_ways,
        signature=_beside_signature,
    ),
    _fault(
        "planar_as_rows",
        "A page with all scales behind all values is read row by row",
        "reading a page of values and scales as rows at",
        _planar_as_rows,
    ),
    _fault(
        "without_scales",
        "Rows of FP8 with scales are read as plain FP8",
        "FP8 rows read without their scales at",
        _without_scales,
    ),
    _fault(
        "neighbour_scales",
        "Every block of a row is read with the scale of the block before",
        "the scale of the block before at",
        _neighbour_scales,
    ),
    _fault(
        "numbers_as_fp8",
        "Rows of BF16 are read as plain FP8",
        "BF16 bytes read as FP8 at",
        _bytes_of_numbers,
    ),
)
