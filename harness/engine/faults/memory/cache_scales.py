"""M32: cached rows are written with one FP8 scale and read with another.

A row is written once and read as key and as value; its scale must be applied on both paths and by
every reader (sglang issues 34765 and 20705). On the value path alone the output is off by a gain,
on the key path alone the logits are. A wrong scale at the writer changes only the latent dims, as
rotated ones have no scale.

Shape letters: T tokens, C latent, B blocks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.gain_fit import FAINT, fitted, gain_way, is_named, of_sight
from degarble.harness.engine.faults.model_faults import (
    ModelFault,
    Way,
    from_ways,
    with_inputs,
    with_outputs,
)
from degarble.harness.engine.faults.rebinding import is_v4
from degarble.harness.report.number_text import number
from degarble.references.rounding import E4M3_LARGEST, FP8_FLOOR, power_of_two_above

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene, Sight

    Tensors = Mapping[str, Tensor]

_WRITERS = ("attn.kv_write", "attn.compressor.write")
PLANTED = (0.05, 0.5, 2.0, 20.0)
_READ = {
    "window": ("window", "state_window"),
    "entries": ("compressed", "state_compressed"),
    "rows": ("rows", "state_rows"),
    "older rows": ("state_window", "state_compressed", "state_rows"),
}


def _latent(scene: Scene) -> int:
    """Return the columns of a row that have scales."""
    c = scene.bound.config
    return c.nope_head_dim if is_v4(scene) else c.kv_lora_rank  # type: ignore[union-attr]


def _written(scene: Scene, factor: float) -> Way:
    width = _latent(scene)
    words = f"latents written with a scale that is {number(factor)} times the reader's"

    def change(_inputs: Tensors, outputs: Tensors) -> Tensors:
        out = outputs["out"].clone()
        out[..., :width] = (out[..., :width].double() * factor).to(out.dtype)
        return {**outputs, "out": out}

    return Way(words, with_outputs(change), {"factor": factor})


def _written_ways(scene: Scene) -> Iterator[Way]:
    for factor in PLANTED:
        yield _written(scene, factor)


def _written_signature(scene: Scene, sight: Sight) -> Iterator[Way]:
    width, c, e = _latent(scene), sight.outputs["out"], sight.expected["out"]
    gain = fitted(c[..., :width], e[..., :width]) if c.shape == e.shape else None
    if gain is not None:
        for value in _short(gain):
            yield _written(scene, value)


def _short(gain: float) -> Iterator[float]:
    found = {float(f"{gain:.{digits}g}"): None for digits in (1, 2, 3)}
    yield from (value for value in found if is_named(gain, value))
    yield gain


def _block_ways(scene: Scene) -> Iterator[Way]:
    """Yield ways that read codes with the scales of other blocks or rows."""
    width, block = _latent(scene), 64 if is_v4(scene) else 128
    for words, which in (
        ("every block with the scale of the first", lambda s: s[:, :1].expand(s.shape)),
        ("every row with the scales of the row before", lambda s: s.roll(1, 0)),
        ("every row of a pair with the other's scales", partial(_of_pair, 0)),
        ("every row of a pair from the last on with the other's scales", partial(_of_pair, 1)),
        ("blocks with their scales in the reverse order", lambda s: s.flip(1)),
        ("every block with the largest scale of its row", lambda s: s.amax(1, keepdim=True)),
        ("scales left out", torch.ones_like),
    ):
        yield Way(words, with_outputs(partial(_rescaled, width, block, which)))


def _of_pair(last: int, scale_TB: Tensor) -> Tensor:
    """Exchange scales within pairs of rows, counted from the first row or (`last`) the last.

    A row without a partner gets 2^-127.
    """
    slot = torch.arange(len(scale_TB))
    slot = slot.flip(0) if last else slot
    other = slot ^ 1
    # `other` is a slot; slots count from the last row if `last`.
    row = (len(scale_TB) - 1 - other) if last else other
    found = scale_TB[row.clamp(0, len(scale_TB) - 1)]
    return torch.where((other < len(scale_TB))[:, None], found, 2.0**-127)


def _rescaled(width: int, block: int, which: Any, inputs: Tensors, outputs: Tensors) -> Tensors:
    out = outputs["out"].clone()
    given = inputs["x"][..., :width] if "x" in inputs else inputs["latent"]
    if not len(out):
        return outputs
    amax_TB = given.float().reshape(len(out), -1, block).abs().amax(-1)
    scale_TB = power_of_two_above(amax_TB.clamp(min=FP8_FLOOR) * (1.0 / E4M3_LARGEST))
    factor_TB = which(scale_TB) / scale_TB
    read = out[..., :width].float().reshape(len(out), -1, block) * factor_TB[..., None]
    out[..., :width] = read.flatten(1).to(out.dtype)
    return {**outputs, "out": out}


def _value_ways(scene: Scene) -> Iterator[Way]:
    del scene
    for factor in PLANTED:
        yield gain_way(f"values read without their scale: {number(factor)}", factor)


def _value_signature(_scene: Scene, sight: Sight) -> Iterator[Way]:
    gain = of_sight(sight)
    if gain is None or abs(gain - 1) <= FAINT:
        return  # no cache's scale is as near 1 as that: M43 tells a gain as the number that it is
    for value in _short(gain):
        yield gain_way(f"values read without their scale: {number(value)}", value)


def _reader(scene: Scene, what: str, factor: float) -> Way:
    del scene
    names = _READ[what]

    def change(inputs: Tensors) -> Tensors:
        scaled = {n: inputs[n].double() * factor for n in names if n in inputs}
        return {**inputs, **scaled}

    words = f"the {what} read with a scale of {number(factor)}"
    return Way(words, with_inputs(change), {"factor": factor})


def _reader_ways(scene: Scene) -> Iterator[Way]:
    names = {each.name for each in scene.component.inputs}
    for what, read in _READ.items():
        if names & set(read):
            for factor in (0.5, 2.0, 1 / E4M3_LARGEST):
                yield _reader(scene, what, factor)


def _is_attention(scene: Scene) -> bool:
    return scene.role == "attn.attend"


MODEL_FAULTS = (
    ModelFault(
        id="M32.written",
        title="Latents are written with another scale than they are read with",
        effect="all latent dims of the cache are off by one factor, rotated dims are right",
        remedy="Record the scale that the writer used and let every reader take it.",
        sits=lambda scene: scene.role in _WRITERS,
        ways=_written_ways,
        signature=_written_signature,
    ),
    ModelFault(
        id="M32.blocks",
        title="Cached blocks are read with the scales of other blocks",
        effect="blocks of a row, or rows, are off by powers of two",
        remedy="Keep scales beside their values, in one order for writer and reader.",
        sits=lambda scene: scene.role in _WRITERS,
        ways=_block_ways,
        signature=from_ways(_block_ways),
    ),
    ModelFault(
        id="M32.values",
        title="The value path does not apply the cache's scale",
        effect="attention's output is off by the scale, its weights are right",
        remedy="Apply the scale of a row in both products, or in neither and beforehand.",
        sits=_is_attention,
        ways=_value_ways,
        signature=_value_signature,
    ),
    ModelFault(
        id="M32.reader",
        title="One reader of the cache applies another scale",
        effect="one kind of rows is too loud or too quiet beside the others",
        remedy="Hand the writer's scale to every reader.",
        sits=_is_attention,
        ways=_reader_ways,
        signature=from_ways(_reader_ways),
    ),
)
