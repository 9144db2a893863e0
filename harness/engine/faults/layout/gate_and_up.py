"""M14: gate and up rows of w13 are stored in another order than the kernel expects.

Halves swapped, rows interleaved but split in halves, or the reverse; with their scales, or the
scales alone (sglang issues 26884 and 32430). SwiGLU is not symmetric, so silu(up) * gate comes out.

Shape letters: F rows of one half, K columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults.decoding import numbers_of
from degarble.harness.engine.faults.model_faults import ModelFault, from_ways
from degarble.harness.engine.faults.reduction.activation_constant import gated, sits
from degarble.harness.engine.faults.weight_faults import (
    Words,
    has_codes,
    is_gate_or_up,
    weight_fault,
)
from degarble.harness.formats.weight import Weight
from degarble.references import elementary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene, Way
    from degarble.harness.engine.faults.weight_faults import Change, Kept

_OTHER = {"w1": "w3", "w3": "w1"}


def _halves(scene: Scene, name: str) -> tuple[Tensor, Tensor]:
    """Return gate and up, as numbers, of the expert that a weight belongs to."""
    stem = name.rpartition(".")[0]
    gate, up = (numbers_of(scene.weights[f"{stem}.{part}"]) for part in ("w1", "w3"))
    return gate, up


def _is_gate(name: str) -> bool:
    return name.endswith(".w1")


def _partner(scene: Scene, name: str) -> Weight | None:
    stem, _, part = name.rpartition(".")
    return scene.weights[f"{stem}.{_OTHER[part]}"] if part in _OTHER else None


def _swapped(scene: Scene, name: str, weight: Weight) -> Weight | None:
    partner = _partner(scene, name)
    if partner is None:
        return None
    return replace(partner, input_scale=weight.input_scale, _decoded={})


def _interleaved(scene: Scene, name: str, weight: Weight) -> Weight | None:
    """Store rows g0 u0 g1 u1 ...; the reader takes the first half for the gate."""
    if _partner(scene, name) is None:
        return None
    gate, up = _halves(scene, name)
    rows = torch.stack((gate, up), dim=1).flatten(0, 1)
    half = rows[: len(gate)] if _is_gate(name) else rows[len(gate) :]
    return Weight(value=half.contiguous(), input_scale=weight.input_scale)


def _pulled_apart(scene: Scene, name: str, weight: Weight) -> Weight | None:
    """Store gate rows above up rows; the reader takes every second row for the gate."""
    if _partner(scene, name) is None:
        return None
    rows = torch.cat(_halves(scene, name))
    half = rows[0::2] if _is_gate(name) else rows[1::2]
    return Weight(value=half.contiguous(), input_scale=weight.input_scale)


def _scales_swapped(scene: Scene, name: str, weight: Weight) -> Weight | None:
    partner = _partner(scene, name)
    if partner is None or weight.block_scale is None or partner.block_scale is None:
        return None
    return replace(weight, block_scale=partner.block_scale, _decoded={})


def _has_scales(kept: Kept) -> bool:
    return is_gate_or_up(kept) and has_codes(kept)


def _taken_ways(scene: Scene) -> Iterator[Way]:
    def changed(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
        return elementary.swiglu(up, gate, limit)

    yield gated(scene, "gate and up taken for each other", changed)


def _fault(variant: str, title: str, doing: str, change: Change, *, scales: bool) -> ModelFault:
    words = Words(
        f"M14.{variant}",
        title,
        "SwiGLU multiplies what does not belong together: text is garbled, nothing is NaN",
        "Tell the kernel which order w13 has, or shuffle the rows (and their scales) at load.",
        doing,
    )
    return weight_fault(words, change, _has_scales if scales else is_gate_or_up, whole=True)


MODEL_FAULTS = (
    _fault("swapped", "Gate and up are swapped", "gate and up swapped on", _swapped, scales=False),
    _fault(
        "interleaved",
        "Rows of gate and up are interleaved, and split in halves",
        "interleaved rows of gate and up on",
        _interleaved,
        scales=False,
    ),
    _fault(
        "pulled_apart",
        "Gate stands above up, and every second row is taken for the gate",
        "rows of gate and up pulled apart on",
        _pulled_apart,
        scales=False,
    ),
    _fault(
        "scales_swapped",
        "The block scales of gate and up are swapped, their codes are not",
        "swapped block scales of gate and up on",
        _scales_swapped,
        scales=True,
    ),
    ModelFault(
        id="M14.taken",
        title="SwiGLU takes up for the gate, and the gate for up",
        effect="up is gated by what it should have multiplied: text is garbled, nothing is NaN",
        remedy="Tell the kernel which half of its input is the gate.",
        sits=sits,
        ways=_taken_ways,
        signature=from_ways(_taken_ways),
    ),
)
