"""Faults with an adjustable strength, such as a gain or an epsilon.

Strength 0 changes nothing; 0.01 is one percent of a gain or of a factor of the logits, or the
amount added under a root. The museum adjusts it until the effect has the wanted size in units of
budget. Faults without a number have no entry in DIALS.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.engine.faults.attention import softmax_scale as m29
from degarble.harness.engine.faults.gain_fit import gain_way, planted_gain, told
from degarble.harness.engine.faults.layout import fused_operands as m24
from degarble.harness.engine.faults.reduction import small_gain as m43
from degarble.harness.report.number_text import number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from degarble.harness.engine.faults.model_faults import Scene, Way

    Dial = Callable[[Scene, float], Way | None]


def _epsilon(scene: Scene, strength: float) -> Way:
    return m24.epsilon_way(scene, m24.own_epsilon(scene) + strength)


def _whole(scene: Scene, strength: float) -> Way:
    gain = 1 + strength
    return planted_gain(scene, f"{told(gain)} on all of it", gain, places={"gain": gain})


def _head(scene: Scene, strength: float) -> Way:
    return next(m43.head_ways(scene, 0, 1 + strength))


def _expert(scene: Scene, strength: float) -> Way:
    return next(m43.expert_ways(scene, 0, 1 + strength))


def _tile(scene: Scene, strength: float) -> Way:
    return next(m43.tile_ways(scene, 0, 1 + strength))


def _logits(scene: Scene, strength: float) -> Way:
    factor = 1 + strength
    return m29.scaled(scene, f"logits times {number(factor)}", factor)


def _values(_scene: Scene, strength: float) -> Way:
    factor = 1 + strength
    return gain_way(f"values read without their scale: {number(factor)}", factor)


DIALS: Mapping[str, Dial] = MappingProxyType(
    {
        "M24.epsilon": _epsilon,
        "M29.other_scale": _logits,
        "M32.values": _values,
        "M43.whole": _whole,
        "M43.one_head": _head,
        "M43.one_expert": _expert,
        "M43.one_tile": _tile,
    }
)
