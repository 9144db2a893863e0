"""What a tensor core cuts of FP8 sums: in its bound, beyond that of float32, believed so far."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from degarble.harness.engine.budget.rules import (
    HOPPER_FP8_BITS,
    PRODUCTS_PER_STEP,
    PROMOTION_EXTENT,
    cut_in_steps,
    lost_in_steps,
    summed,
)
from degarble.harness.engine.localise.localise import fraction_bits_of


def codes(seed: int, rows: int, inner: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inner, generator=generator) * 20
    x[:, ::37] *= 8
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).double()


def by_steps(x: torch.Tensor, w: torch.Tensor, bits: int) -> torch.Tensor:
    """Steps of 32 products and C, each cut below the largest nominal exponent, then float32."""
    total = torch.zeros(len(x), len(w), dtype=torch.float32)
    for stage in range(0, x.shape[1], PROMOTION_EXTENT):
        c = torch.zeros(len(x), len(w), dtype=torch.float64)
        for begin in range(stage, min(stage + PROMOTION_EXTENT, x.shape[1]), PRODUCTS_PER_STEP):
            a, b = (
                x[:, None, begin : begin + PRODUCTS_PER_STEP],
                w[None, :, begin : begin + PRODUCTS_PER_STEP],
            )
            exponents = torch.frexp(a).exponent + torch.frexp(b).exponent - 2
            exponents = torch.where(a * b == 0, -100, exponents)
            of_c = torch.where(c == 0, -100, torch.frexp(c).exponent - 1)
            unit = torch.exp2(torch.maximum(exponents.amax(-1), of_c).double() - bits)
            terms = torch.cat((a * b, c[..., None]), dim=-1) / unit[..., None]
            c = (terms.trunc().sum(-1) * unit).float().double()
        total += c.float()
    return total


@pytest.mark.parametrize("inner", [128, 512, 1184])
def test_steps_stay_within_the_bound_and_leave_that_of_float32(inner: int) -> None:
    x, w = codes(1, 24, inner), codes(2, 40, inner)
    exact = x @ w.T
    made = by_steps(x, w, HOPPER_FP8_BITS).double()
    plain = summed(x.float(), w.float())
    allowed = cut_in_steps(plain, x.float(), w.float(), HOPPER_FP8_BITS)
    off = (made - exact).abs()
    assert bool((off <= allowed.slack).all())
    assert bool((off > plain.slack).any()), "float32 alone does not explain it"
    assert any("cut 2^-13" in each for each in allowed.derivation)
    worse = (by_steps(x, w, HOPPER_FP8_BITS - 6).double() - exact).abs()
    assert bool((worse > allowed.slack).any()), "fewer bits are found"


def test_a_stage_begins_anew() -> None:
    x, w = codes(3, 4, 256), codes(4, 4, 256)
    halves = [slice(0, 128), slice(128, 256)]
    parts = [lost_in_steps(x[:, k], w[:, k], HOPPER_FP8_BITS) for k in halves]
    assert torch.allclose(lost_in_steps(x, w, HOPPER_FP8_BITS), parts[0] + parts[1])


def test_a_manifest_is_believed_as_far_as_a_chip_goes() -> None:
    def told(stated: Any) -> dict[str, int]:
        return fraction_bits_of(cast("Any", SimpleNamespace(facts={"fraction_bits": stated})))

    assert told({"head": 13, "a": 14, "b": 3, "c": True, "d": "13"}) == {"head": 13, "a": 14}
    assert told(None) == told([13]) == {}
