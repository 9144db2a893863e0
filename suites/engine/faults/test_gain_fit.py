"""Gains: fitted, named, planted in front of a rounding and behind it."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.engine.faults.gain_fit import (
    both_gains,
    faint,
    fitted,
    gain_way,
    is_named,
    planted_gain,
    shared,
    sharpened,
    slope,
    times,
    told,
)
from degarble.suites.engine.diagnosing import double
from degarble.suites.engine.planting import run


def values(seed: int, count: int = 4096) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator).bfloat16()


@pytest.mark.parametrize("gain", [0.97, 2.0, 0.4, 8.0, -1.0])
def test_a_gain_is_fitted_through_roundings(gain: float, seed: int) -> None:
    x = values(seed)
    found = fitted(times(x, gain), x)
    assert found is not None
    assert is_named(found, gain)
    assert not is_named(found, gain * 1.02)


def test_noise_equality_and_little_data_are_no_gain(seed: int) -> None:
    x = values(seed)
    assert fitted(x, x) is None
    assert fitted((x.float() + 0.1 * values(seed + 1)).bfloat16(), x) is None
    assert slope(x[:3], x[:3] * 2) is None
    assert slope(x * float("nan"), x) is None
    assert slope(x, torch.zeros_like(x)) is None


@pytest.mark.parametrize("gain", [0.74713, 1.123456e7, -3.3e-5])
def test_a_gain_is_as_sharp_as_the_roundings_it_makes(gain: float) -> None:
    model, place = double("v4", "nvfp4-full"), "layers.1.attn.wq_a"
    sight = model.sights(place, planted_gain(model.planting(place), "", gain), calls=1)[0]
    rough = fitted(sight.outputs["out"], sight.expected["out"])
    assert rough is not None
    sharp = sharpened(model.naming(place), sight, rough)
    assert abs(sharp / gain - 1) < 2e-6
    assert abs(sharp / gain - 1) < abs(rough / gain - 1)
    assert sharpened(model.naming(place), sight, 2 * rough) == 2 * rough, "it is another one"


def test_intervals_share_what_most_of_them_hold() -> None:
    low, high = torch.tensor([[0.0, 1.0], [0.5, 1.5], [0.75, 2.0], [5.0, 6.0]]).double().unbind(1)
    assert shared(low, high) == (0.75, 1.0)
    assert shared(low[-1:], high[-1:]) == (5.0, 6.0)


def test_a_faint_gain_shows_in_many_numbers_and_noise_does_not(seed: int) -> None:
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(seed)).double()
    gained = (1.001 * x).bfloat16()
    assert fitted(gained, x.bfloat16()) is None, "roundings are larger than it"
    found = faint(gained, x.bfloat16())
    assert found is not None
    assert abs(found - 1.001) < 1e-4
    assert faint(x.bfloat16(), x) is None
    noisy = (x + 0.01 * values(seed + 1, 1 << 16).double()).bfloat16()
    assert faint(noisy, x) is None
    assert faint(1.5 * x, x) is None, "nothing faint"


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (0.97, "a gain of 0.9700"),
        (1.00017, "a gain of 1 + 0.000170"),
        (1.0, "a gain of 1.000"),
        (-1.0, "a turned sign, a gain of -1.000"),
    ],
)
def test_gains_near_one_and_below_zero_are_told_by_what_they_are(gain: float, words: str) -> None:
    assert told(gain) == words


def test_a_gain_sits_where_it_is_put() -> None:
    way = gain_way("x", 2.0, lambda _inputs, out: (torch.arange(4) == 1).expand(out.shape))
    out = way.apply(lambda inputs, _weights: {"out": inputs["x"]})({"x": torch.ones(2, 4)}, {})
    assert torch.equal(out["out"], torch.tensor([[1.0, 2.0, 1.0, 1.0]] * 2))


def test_in_front_of_the_rounding_it_rounds_once() -> None:
    """A power of two is the same on both sides; 0.97 is not."""
    scene = run("v4").scene("layers.1.attn.wo_b", twin=True)
    seen = run("v4").calls["layers.1.attn.wo_b"][0]
    assert len(list(both_gains(scene, "x", 2.0))) == 1
    early, late = (
        way.apply(scene.call)(seen.inputs, scene.weights)["out"]
        for way in both_gains(scene, "x", 0.97)
    )
    exact = 0.97 * scene.call(seen.inputs, scene.weights)["out"].double()
    share = float((early != late).double().mean())
    assert 0.05 < share < 0.6
    assert float((late.double() - exact).abs().max()) <= float((0.004 * exact.abs()).max())
