"""Errors that are carried through stored values: float32 by other means stays within them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from degarble.harness.engine.budget.bounded_values import (
    BoundedValue,
    bounded_norm,
    cache_grid,
    exactly,
    hadamard,
    indexer_grid,
    layer_normed,
    power_above,
    reach,
    rope_rotation,
    rotated,
    stored,
)
from degarble.harness.model.presets import small_v32
from degarble.references import elementary, rounding
from degarble.references.numerics import IndexerFormat, KeyValueCache, Numerics, Switches

PLAIN = Numerics.twin()
CONFIG = small_v32()
ROPE = CONFIG.rope(CONFIG.blocks[0])


def rows(width: int, seed: int, kind: str = "normal") -> Tensor:
    x = torch.randn(40, width, generator=torch.Generator().manual_seed(seed))
    if kind == "outlier":
        x[:, 3::31] *= 300
    elif kind == "constant":
        x = torch.full_like(x, 1.0 + 2.0**-6)
    return x.bfloat16().float()


def within(made: Tensor, near: BoundedValue, share: float = 1.0) -> bool:
    off = (made.double() - near.value).abs()
    return bool((off <= share * near.error.expand(off.shape)).all())


def one_after_another(x: Tensor) -> Tensor:
    total = torch.zeros(x.shape[0], 1)
    for k in range(x.shape[1]):
        total = total + x[:, k : k + 1]
    return total


def test_storing_takes_an_error_away_or_makes_it_a_step() -> None:
    value = torch.tensor([1.0, 1.0 + 2.0**-8, 1.0 + 2.0**-8 - 1e-6], dtype=torch.float64)
    error = torch.tensor([1e-5, 0.0, 1e-5], dtype=torch.float64)
    kept = stored(BoundedValue(value, error), torch.bfloat16)
    assert kept.value.tolist() == [1.0, 1.0, 1.0]
    assert kept.error.tolist() == [0.0, 0.0, 2.0**-7]
    assert stored(kept, torch.float64) is kept


@pytest.mark.parametrize("kind", ["normal", "outlier", "constant"])
@pytest.mark.parametrize("width", [64, 1024])
def test_norms_in_float32_stay_within(kind: str, width: int) -> None:
    x, weight = rows(width, 1, kind), rows(width, 2)[0]
    mean = one_after_another(x.square()) / width
    for factor in (mean + 1e-6).rsqrt(), 1 / (mean + 1e-6).sqrt() * (1 + 2.0**-22):
        assert within(weight * (x * factor), bounded_norm(exactly(x), weight, 1e-6))
    bias = rows(width, 3)[0]
    centre = x - one_after_another(x) / width
    factor = (one_after_another(centre.square()) / width + 1e-6).rsqrt()
    near = layer_normed(x, weight, bias, 1e-6)
    assert within(centre * factor * weight + bias, near)
    wrong = (centre * factor * weight + bias) * (1 + 1e-3)
    assert kind == "constant" or not within(wrong, near)


@pytest.mark.parametrize("leading", [False, True])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("factor", [None, 1.277])
def test_rotations_in_float32_stay_within(
    leading: bool, halves: bool, factor: float | None
) -> None:
    scaled = ROPE.yarn and replace(ROPE.yarn, attention_factor=factor)
    rope = replace(ROPE, yarn=scaled)
    x, positions = rows(96, 4), torch.arange(40) * 997
    near = rotated(
        exactly(x), rope_rotation(rope, positions, PLAIN), leading=leading, halves=halves
    )
    table = elementary.rotation_table(rope, positions, PLAIN)
    cut = 64 if leading else 32
    parts = [x[:, :cut], x[:, cut:]]
    at = 0 if leading else 1
    turn_of = elementary.rotate_halves if halves else elementary.rotate_interleaved
    parts[at] = turn_of(parts[at], table)
    made = torch.cat(parts, dim=1)
    assert within(made, near)
    copied = near.error[:, 64:] if leading else near.error[:, :32]
    assert not copied.any(), "features that are not rotated are copied"
    other = elementary.rotation_table(rope, positions + 1, PLAIN)
    parts[at] = turn_of(parts[at], other)
    assert not within(torch.cat(parts, dim=1), near, 100)


def test_an_error_of_one_input_reaches_every_output_of_a_hadamard_transform() -> None:
    x, error = rows(128, 5), torch.zeros(40, 128, dtype=torch.float64)
    error[:, 7] = 2.0**-8
    near = hadamard(BoundedValue(x.double(), error))
    moved = x.clone()
    moved[:, 7] += 2.0**-8
    for step in (moved, x):
        made = step
        for k in range(7):  # butterflies in place of a product
            pairs = made.unflatten(1, (-1, 2, 2**k))
            made = torch.stack(
                (pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), 2
            )
            made = made.flatten(1)
        assert within(made * 128**-0.5, near)
    assert float(near.error.max()) < 2 * 2.0**-8 * 128**-0.5


@pytest.mark.parametrize("kind", [IndexerFormat.FP8, IndexerFormat.MXFP4])
def test_a_code_steps_only_at_its_boundary(kind: IndexerFormat) -> None:
    numerics = replace(PLAIN, switches=Switches(indexer_format=kind))
    x = rows(128, 6)
    twin = rounding.through_indexer(x, numerics).bfloat16()
    grid = indexer_grid(numerics, 128)
    assert grid is not None
    sharp = reach(exactly(x), torch.bfloat16, grid)
    assert float((sharp > 0).float().mean()) < 0.02, "only where amax is a power of two"
    error = torch.zeros(40, 128, dtype=torch.float64)
    error[:, 11] = 0.01 * x[:, 11].abs()
    wide = reach(BoundedValue(x.double(), error), torch.bfloat16, grid)
    for sign in (-1, 1):
        moved = x.clone()
        moved[:, 11] *= 1 + sign * 0.01
        off = (rounding.through_indexer(moved, numerics).double() - twin.double()).abs()
        assert bool((off <= wide).all())


@pytest.mark.parametrize("kind", [KeyValueCache.FP8_F32, KeyValueCache.NVFP4, KeyValueCache.FP8])
def test_cache_rows_by_approximate_reciprocals_stay_within(kind: KeyValueCache) -> None:
    numerics = replace(PLAIN, switches=Switches(kv_cache=kind))
    x = torch.cat([rows(128, seed) for seed in range(20)])
    grid = cache_grid(numerics, 128)
    assert grid is not None
    twin = rounding.through_cache(x, 128, numerics).bfloat16()
    limit = reach(exactly(x), torch.bfloat16, grid)
    blocks = x.unflatten(1, (-1, grid.block))
    raw = blocks.abs().amax(-1, keepdim=True).clamp(min=grid.floor) * (1 / grid.largest)
    for off in (1 - 2.0**-22, 1 + 2.0**-22):
        scale = grid.scale(raw.double() * (1 if grid.exact_quotient else off)).float()
        factor = scale.reciprocal() * (1 if grid.exact_quotient else off)
        made = (grid.element(blocks * factor).float() * scale).flatten(1).bfloat16()
        assert bool(((made.double() - twin.double()).abs() <= limit).all())
    assert float((limit > 0).float().mean()) < (1.1 if kind is KeyValueCache.FP8_F32 else 0.1)


def test_a_power_of_two_is_its_own() -> None:
    x = torch.tensor([1.0, 1.0 + 2.0**-40, 0.75, 2.0**-126], dtype=torch.float64)
    assert power_above(x).tolist() == [1.0, 2.0, 1.0, 2.0**-126]
