"""M27: the routed scaling factor is applied twice, not at all, or to the wrong term.

Three places may multiply by it: the router's weights, the experts' sum, the total (vllm issues
24119 and 45037, sglang issues 8333 and 28237). What remains is an exact gain of one term: the
factor, or its reciprocal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.engine.faults.gain_fit import (
    both_gains,
    fitted,
    gain_way,
    is_named,
    planted_gain,
)
from degarble.harness.engine.faults.model_faults import ModelFault
from degarble.harness.report.number_text import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from degarble.harness.engine.faults.model_faults import Scene, Sight, Way

_OUTPUT = {"ffn.topk": "weights", "ffn.experts.combine": "out", "ffn.shared.w2": "out"}


def _factor(scene: Scene) -> float:
    return float(scene.bound.config.routed_scaling_factor)


def _sits(*roles: str) -> Callable[[Scene], bool]:
    return lambda scene: scene.role in roles and _factor(scene) != 1.0


def _ways(words: str, power: int) -> Callable[[Scene], Iterator[Way]]:
    def ways(scene: Scene) -> Iterator[Way]:
        gain, output = _factor(scene) ** power, _OUTPUT[scene.role]
        told = words.format(number(_factor(scene)))
        if output == "out":
            yield planted_gain(scene, told, gain)
        else:
            yield gain_way(told, gain, output=output)

    return ways


def _named(words: str, power: int) -> Callable[[Scene, Sight], Iterator[Way]]:
    def signature(scene: Scene, sight: Sight) -> Iterator[Way]:
        output = _OUTPUT[scene.role]
        c, e = sight.outputs[output], sight.expected[output]
        gain = fitted(c, e) if c.shape == e.shape else None
        if gain is not None and is_named(gain, _factor(scene) ** power):
            if output == "out":
                told = words.format(number(_factor(scene)))
                yield from both_gains(scene, told, _factor(scene) ** power)
            else:
                yield from _ways(words, power)(scene)

    return signature


_TWICE = ("the routed scaling factor {} applied twice", 1)
_MISSING = ("the routed scaling factor {} left out", -1)
_SHARED = ("the routed scaling factor {} applied to the shared expert", 1)
_SHARED_DIVIDED = ("the shared expert divided by the routed scaling factor {}", -1)
_ROUTED = ("ffn.topk", "ffn.experts.combine")

MODEL_FAULTS = (
    ModelFault(
        id="M27.applied_twice",
        title="The routed scaling factor is applied twice",
        effect="the routed term is larger by the factor",
        remedy="Multiply by it in one place: in the router's weights, or behind the experts.",
        sits=_sits(*_ROUTED),
        ways=_ways(*_TWICE),
        signature=_named(*_TWICE),
    ),
    ModelFault(
        id="M27.left_out",
        title="The routed scaling factor is left out",
        effect="the routed term is smaller by the factor",
        remedy="Multiply the routed term by it; look which backend was expected to.",
        sits=_sits(*_ROUTED),
        ways=_ways(*_MISSING),
        signature=_named(*_MISSING),
    ),
    ModelFault(
        id="M27.shared_multiplied",
        title="The routed scaling factor is applied to the shared expert",
        effect="the shared term is larger by the factor",
        remedy="Multiply the routed term alone.",
        sits=_sits("ffn.shared.w2"),
        ways=_ways(*_SHARED),
        signature=_named(*_SHARED),
    ),
    ModelFault(
        id="M27.shared_divided",
        title="The shared expert is divided by the routed scaling factor",
        effect="the shared term is smaller by the factor",
        remedy="A fused shared expert has the weight 1 / factor only if the total is multiplied.",
        sits=_sits("ffn.shared.w2"),
        ways=_ways(*_SHARED_DIVIDED),
        signature=_named(*_SHARED_DIVIDED),
    ),
)
