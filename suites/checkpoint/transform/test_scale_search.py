"""Scale rules: each against the dialect's definition or the errors that it promises."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.checkpoint.transform.nvfp4_scales import (
    Errors,
    ScaleRule,
    quantise_rows,
    tensor_scale,
)
from degarble.harness.formats.dialects import MODELOPT
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import quantise


def weights(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed % 2**63)
    return torch.randn(128, 512, generator=generator).bfloat16() * 0.02


def errors_of(values: torch.Tensor, rule: ScaleRule, step: int = 128) -> Errors:
    scale, errors = tensor_scale(float(values.abs().max()), rule), Errors()
    for begin in range(0, values.shape[0], step):
        rows = values[begin : begin + step]
        errors.add(begin, rows, quantise_rows(rows, scale, rule), scale)
    return errors


def test_amax_is_modelopts_own_rule(seed: int) -> None:
    values = weights(seed)
    scale = tensor_scale(float(values.abs().max()), ScaleRule.AMAX)
    made, theirs = quantise_rows(values, scale, ScaleRule.AMAX), quantise(values, NVFP4, MODELOPT)
    assert theirs.tensor_scale is not None
    assert float(theirs.tensor_scale) == scale
    assert torch.equal(made.codes, theirs.codes)
    assert torch.equal(made.block_scale, theirs.block_scale)


def test_searching_pays_and_nothing_beats_the_floor(seed: int) -> None:
    errors = {rule: errors_of(weights(seed), rule) for rule in ScaleRule}
    relative = {rule: each.relative for rule, each in errors.items()}
    assert relative[ScaleRule.MSE] < relative[ScaleRule.FOUR_OVER_SIX] < relative[ScaleRule.AMAX]
    assert 0.09 < relative[ScaleRule.AMAX] < 0.10
    over = {rule: each.over_floor or 0.0 for rule, each in errors.items()}
    assert over[ScaleRule.MSE] == 1.0
    assert 1.0 < over[ScaleRule.FOUR_OVER_SIX] < over[ScaleRule.AMAX] < 1.25


def test_four_over_six_leaves_room_for_four(seed: int) -> None:
    values = weights(seed)
    scale = tensor_scale(float(values.abs().max()), ScaleRule.FOUR_OVER_SIX)
    made = quantise_rows(values, scale, ScaleRule.FOUR_OVER_SIX)
    six = quantise_rows(values, scale, ScaleRule.AMAX)
    assert int(made.block_scale.max()) <= 0x7C  # 384 = 1.5 * 256
    assert int(six.block_scale.max()) == 0x78  # 256
    changed = made.block_scale != six.block_scale
    assert 0.1 < float(changed.double().mean()) < 0.9
    assert bool((made.block_scale[changed] > six.block_scale[changed]).all())


def test_a_halved_scale_shows_above_the_floor(seed: int) -> None:
    values = weights(seed)
    scale = tensor_scale(float(values.abs().max()), ScaleRule.AMAX)
    made = quantise_rows(values, scale, ScaleRule.AMAX)
    damaged = made._replace(block_scale=made.block_scale - 8)  # the planted fault: an octave less
    errors = Errors()
    errors.add(0, values, damaged, scale)
    assert (errors.over_floor or 0.0) > 2


def test_row_blocks_sample_the_same_rows(seed: int) -> None:
    whole = errors_of(weights(seed), ScaleRule.AMAX)
    parts = errors_of(weights(seed), ScaleRule.AMAX, step=48)
    assert parts.over_floor == pytest.approx(whole.over_floor, rel=1e-12)
    assert parts.relative == pytest.approx(whole.relative, rel=1e-12)


def test_zeros_have_a_scale_and_no_error() -> None:
    values = torch.zeros(32, 64)
    errors = errors_of(values, ScaleRule.AMAX)
    assert (errors.relative, errors.over_floor) == (0.0, None)
    made = quantise_rows(values, tensor_scale(0.0, ScaleRule.MSE), ScaleRule.MSE)
    assert not made.codes.any()
    assert made.block_scale.unique().tolist() == [0x38]


def test_what_no_weight_has_is_refused() -> None:
    for amax in (1e-30, 1e35):
        with pytest.raises(InvalidArgument, match="largest magnitude"):
            tensor_scale(amax, ScaleRule.AMAX)
    values = torch.ones(1, 16)
    values[0, 3] = float("nan")
    for rule in ScaleRule:
        with pytest.raises(InvalidArgument, match="finite"):
            quantise_rows(values, 1.0, rule)
