"""Faint gains of attention are named, on either side of the output's rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.faults import rebinding
from degarble.harness.engine.faults.gain_fit import Side, both_gains, sharpened, times
from degarble.harness.engine.faults.model_faults import Way, with_outputs
from degarble.harness.engine.faults.reduction.small_gain import head_ways
from degarble.suites.campaigns.attention_gains import case
from degarble.suites.engine.diagnosing import double

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

NAME = "layers.1.attn.attend"
GAINS = (0.990, 0.993, 0.995, 0.997, 1.003, 1.005, 1.007, 1.010)
FAMILIES = ("v4", "v32")


def named(family: str, gain: float, head: int | None, side: Side) -> list[str]:
    model = double(family, "nvfp4-full")
    scene = model.planting(NAME)
    if head is None:
        way = next(both_gains(scene, "a gain", gain, sides=(side,)))
    else:
        way = next(head_ways(scene, head, gain, (side,)))
    found = diagnose(model.naming(NAME), model.sights(NAME, way))
    return [each.id for each in found.named[:1]]


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("family", ["v32", pytest.param("v4", marks=pytest.mark.slow)])
def test_a_gain_of_three_thousandths_is_named(family: str, side: Side) -> None:
    assert named(family, 1.003, None, side) == ["M43.whole"]


@pytest.mark.slow
@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gains_of_all_heads_and_of_one_are_named(family: str, gain: float, side: Side) -> None:
    assert named(family, gain, None, side) == ["M43.whole"]
    assert named(family, gain, 2, side) == ["M43.one_head"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gain_behind_the_rounding_is_sharp_there_only(family: str) -> None:
    model = double(family, "nvfp4-full")
    (way,) = both_gains(model.planting(NAME), "a gain", 1.003, sides=(Side.BEHIND,))
    sight = model.sights(NAME, way, calls=1)[0]
    front, behind = (
        sharpened(model.naming(NAME), sight, 1.003, side=side) - 1.003 for side in Side
    )
    assert abs(behind) < 2e-5
    assert abs(front) > 5e-4


KERNEL = 9  # a seed: V3.2, a legal kernel in every layer, all heads 0.3 % too large
AWAY_FROM_ZERO = 25  # a seed
_KNOWN = "rounding away from zero, a mean gain of 1.0028, explains a gain of 1.003 as well"


def _marks(seed: int) -> tuple[pytest.MarkDecorator, ...]:
    if seed == KERNEL:
        return ()
    if seed == AWAY_FROM_ZERO:
        return pytest.mark.slow, pytest.mark.xfail(reason=_KNOWN, strict=True)
    return (pytest.mark.slow,)


@pytest.mark.parametrize(
    "seed",
    [pytest.param(each, marks=_marks(each)) for each in (*range(48), 235)],
)
def test_a_gain_is_named_where_a_legal_kernels_roundings_are_larger(seed: int) -> None:
    found = case(seed)
    assert found.outcome in ("ok", "not found"), found.detail
    if seed == KERNEL:
        assert found.outcome == "ok", "it is found"


@pytest.mark.parametrize("family", ["v4", pytest.param("v32", marks=pytest.mark.slow)])
def test_a_gain_of_every_second_token_is_no_gain_of_all(family: str) -> None:
    """Half the gain on all of it passes every budget of attention, and is not what happened."""

    def change(_inputs: object, outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        out = outputs["out"].clone()
        out[::2] = times(out[::2], 1.01)
        return {**outputs, "out": out}

    model = double(family, "nvfp4-full")
    found = diagnose(model.naming(NAME), model.sights(NAME, Way("", with_outputs(change)), 1))
    assert not found.named


def test_without_its_outputs_rounding_attention_still_stores_on_its_way() -> None:
    """A gain in front of the last rounding changes none of the earlier ones."""
    model = double("v32", "nvfp4-full")
    scene, seen = model.naming(NAME), model.calls[NAME][0]
    stored = scene.call(seen, scene.weights)["out"]
    fine, bare = (
        rebinding.with_facts(scene, change)(scene.call)(seen, scene.weights)["out"]
        for change in (rebinding.unrounded_output, rebinding.unrounded)
    )
    assert fine.dtype is torch.float64
    assert torch.equal(fine.to(stored.dtype), stored)
    assert not torch.equal(bare.to(stored.dtype), stored)
