"""Comparisons: the compiled loops against the definition, and metrics of closeness."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.base.sums import PairSums
from degarble.harness.engine.compare import compare as module
from degarble.harness.engine.compare.compare import (
    Comparison,
    NamedPlaces,
    compare,
)
from degarble.harness.formats.codec import value_ulp_distance
from degarble.harness.formats.number_formats import E2M1, E4M3, UE8M0

if TYPE_CHECKING:
    from torch import Tensor


FLOATS = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
SHAPE = (261, 300)  # neither whole tiles nor whole cells


def pair(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A reference, and a candidate some of whose values are a few steps away, signs and zeros."""
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(SHAPE, generator=generator)
    noise = torch.randn(SHAPE, generator=generator) * 0.1
    moved = torch.rand(SHAPE, generator=generator) < 0.3
    candidate = torch.where(moved, reference + noise, reference)
    candidate[0, :4] = torch.tensor([0.0, -0.0, 1e-30, -1e30])
    reference[0, :4] = torch.tensor([-0.0, 0.0, -1e-30, 1e30])
    return candidate.clamp(-400, 400).to(dtype), reference.clamp(-400, 400).to(dtype)


def spoilt(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `pair`, with values that are not finite in some rows of either side."""
    candidate, reference = (side.float() for side in pair(dtype, 1))
    candidate[3, 7], reference[5, 1] = math.nan, math.nan
    candidate[9, 2] = reference[9, 2] = math.nan
    if dtype is not torch.float8_e4m3fn:  # which has no infinities
        candidate[200, 0], reference[200, 0] = math.inf, -math.inf
        candidate[200, 1] = reference[200, 1] = math.inf
    return candidate.to(dtype), reference.to(dtype)


def defined(
    monkeypatch: pytest.MonkeyPatch, candidate: Tensor, reference: Tensor, **options: Any
) -> Comparison:
    """Compare by the definition alone."""
    with monkeypatch.context() as patch:
        patch.setattr(module.RunningComparison, "_fast_format", lambda _self: None)
        return compare(candidate, reference, **options)


def require_equal(found: Comparison, expected: Comparison) -> None:
    for name in ("identical", "outward", "inward", "ulps"):
        np.testing.assert_array_equal(
            getattr(found.counts, name), getattr(expected.counts, name), name
        )
    assert found.census == expected.census
    for sums in ("rows", "cells"):
        left, right = getattr(found, sums).stack, getattr(expected, sums).stack
        np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-12 * float(right.max()))


@pytest.mark.parametrize("make", [pair, spoilt])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fast_form_is_the_definition(
    dtype: torch.dtype, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate, reference = make(dtype)
    places = NamedPlaces(columns={"third": 100}, tile=(64, 60))
    comparison = compare(candidate, reference, places)
    assert comparison.cell == 20
    require_equal(comparison, defined(monkeypatch, candidate, reference, places=places))
    assert comparison.counts.ulps.max() > 0
    assert comparison.census.clean is (make is pair)


def test_codes_of_four_bits_are_compared_as_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    candidate, reference = (codes % 16).reshape(16, 16), (codes // 16).reshape(16, 16)
    comparison = compare(candidate, reference, fmt=E2M1)
    require_equal(comparison, defined(monkeypatch, candidate, reference, fmt=E2M1))
    assert comparison.formats == ("E2M1", "E2M1")
    assert comparison.ulps == 14  # from -6 to 6
    assert comparison.identical == pytest.approx(1 / 16)


def test_every_pair_of_fp8_codes_is_as_far_as_ulps_say() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    candidate, reference = (
        side.contiguous() for side in torch.meshgrid(codes, codes, indexing="ij")
    )
    by_code = compare(candidate, reference, fmt=E4M3)
    values = [side.view(torch.float8_e4m3fn) for side in (candidate, reference)]
    by_value = compare(values[0], values[1])
    steps = value_ulp_distance(values[0], values[1])
    nan = values[0].float().isnan() | values[1].float().isnan()
    expected = steps.masked_fill(nan, 0).amax(1)
    for comparison in (by_code, by_value):
        assert comparison.counts.ulps.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("candidate", "reference"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float64),
        (torch.float16, torch.float64),
        (torch.int32, torch.int32),
        (torch.int64, torch.uint8),
        (torch.bool, torch.bool),
        (torch.float8_e8m0fnu, torch.float8_e8m0fnu),
    ],
    ids=str,
)
def test_every_stored_dtype_is_compared(candidate: torch.dtype, reference: torch.dtype) -> None:
    values = torch.tensor([[1.0, 0.0, 1.0, 4.0], [1.0, 1.0, 1.0, 1.0]])
    comparison = compare(values.to(candidate), values.clamp(max=2).to(reference))
    assert comparison.census.clean
    if candidate is torch.bool:
        assert (comparison.identical, float(comparison.total.relative_l2)) == (1.0, 0.0)
    else:
        assert comparison.identical == pytest.approx(7 / 8)
        assert float(comparison.total.dd) == 4.0
    if not candidate.is_floating_point and candidate is not torch.bool:
        assert comparison.ulps == 2


def test_a_reference_of_another_dtype_is_rounded_once_for_ulps_and_not_for_sums() -> None:
    reference = torch.tensor([[1.0 + 2.0**-9, 1.0 + 3 * 2.0**-9]], dtype=torch.float64)
    candidate = torch.tensor([[1.0, 1.0]]).bfloat16()  # spacing 2^-7: 1, and 1 + 2^-7
    comparison = compare(candidate, reference)
    assert (comparison.identical, comparison.ulps) == (0.5, 1)
    assert float(comparison.total.dd) == 10 * 2.0**-18


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gain_keeps_its_digits(dtype: torch.dtype) -> None:
    reference = torch.full((4, 1000), 1.0, dtype=dtype)
    comparison = compare(reference * 2, reference)
    assert comparison.total.gain == 2.0
    one = reference.clone()
    one[0, 0] += torch.finfo(dtype).eps
    expected = 1 + torch.finfo(dtype).eps / 4000
    assert float(compare(one, reference).total.gain) == expected


def test_zeros_have_no_angle_and_nothing_is_divided_by_them() -> None:
    zero, one = torch.zeros(2, 8), torch.ones(2, 8)
    assert math.isnan(compare(one, zero).total.cosine)
    assert math.isinf(compare(one, zero).total.relative_l2)
    assert math.isnan(compare(zero, zero).total.relative_l2)
    assert compare(zero, one).total.gain == 0
    assert compare(-one, one).total.cosine == -1


def test_where_the_error_sits_is_found_by_row_tile_head_and_expert() -> None:
    reference = torch.randn(6, 40, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    candidate = reference.clone()
    candidate[4, 7, 64:96] *= 1.5
    experts = torch.arange(240).numpy() % 5
    places = NamedPlaces.along(reference.shape, ("position", "slot"), {"head": 32, "half": 128})
    places = replace(places, rows={**places.rows, "expert": experts}, tile=(16, 64))
    comparison = compare(candidate, reference, places)
    errors = {name: np.flatnonzero(comparison.by(name).dd).tolist() for name in comparison.names}
    row = 4 * 40 + 7
    assert errors == {"position": [4], "slot": [7], "expert": [row % 5], "head": [2], "half": [0]}
    assert np.argwhere(comparison.tiles.dd).tolist() == [[row // 16, 1]]
    assert np.flatnonzero(comparison.rows.dd).tolist() == [row]
    assert comparison.by("head").gain[2] == pytest.approx(1 + 0.5 / 240, rel=0.05)
    assert float(comparison.by("position").rr.sum()) == pytest.approx(
        float(comparison.total.rr), rel=1e-12
    )


def test_a_negative_label_belongs_to_nothing() -> None:
    reference = torch.ones(4, 8)
    labels = np.array([0, -1, 1, -1])
    comparison = compare(reference, reference, NamedPlaces(rows={"expert": labels}))
    assert comparison.by("expert").rr.tolist() == [8.0, 8.0]


def test_the_census_counts_kinds_and_gives_the_first_mismatch() -> None:
    comparison = compare(*spoilt(torch.bfloat16))
    census = comparison.census
    assert (census.candidate_nan, census.reference_nan) == (2, 2)
    assert (census.candidate_infinite, census.reference_infinite) == (2, 2)
    assert (census.mismatched, census.first) == (3, (3, 7))
    assert np.isfinite(comparison.total.stack).all()


def test_rounding_bias_distinguishes_truncation_from_nearest() -> None:
    values = torch.randn(64, 1024, generator=torch.Generator().manual_seed(5))
    nearest = values.bfloat16()
    truncated = (values.view(torch.int32) & -65536).view(torch.float32).bfloat16()
    assert abs(compare(nearest, nearest).rounding_bias_sigmas) == 0
    assert compare(truncated, nearest).rounding_bias == -1
    assert compare(truncated, nearest).rounding_bias_sigmas < -100


@pytest.mark.parametrize("shape", [(), (7,), (0, 4), (4, 0), (0,), (2, 3, 4, 5)], ids=str)
def test_every_shape_is_compared(shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=torch.bfloat16)
    comparison = compare(tensor, tensor)
    assert comparison.elements == tensor.numel()
    assert comparison.identical == 1.0 or (math.isnan(comparison.identical) and not tensor.numel())
    assert comparison.ulps == 0
    assert comparison.tiles.rr.sum() == tensor.numel()


def test_strided_tensors_and_many_panels_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate, reference = pair(torch.bfloat16)
    whole = compare(candidate, reference)
    monkeypatch.setattr(module, "_PANEL_BYTES", 5000)
    require_equal(compare(candidate, reference), whole)
    require_equal(compare(candidate.T.contiguous().T, reference), whole)


def test_two_runs_give_the_same_bits() -> None:
    candidate, reference = pair(torch.bfloat16, 9)
    first, second = compare(candidate, reference), compare(candidate, reference)
    assert first.cells.stack.tobytes() == second.cells.stack.tobytes()
    assert first.rows.stack.tobytes() == second.rows.stack.tobytes()


def test_what_cannot_be_compared_is_refused_by_name() -> None:
    one = torch.ones(2, 4)
    with pytest.raises(ShapeMismatch, match="candidate"):
        compare(one, torch.ones(4, 2))
    with pytest.raises(DtypeMismatch, match="codes of E2M1"):
        compare(one, one, fmt=E2M1)
    with pytest.raises(InvalidArgument, match="E2M1 code"):
        compare(torch.full((1, 2), 99, dtype=torch.uint8), torch.zeros(1, 2).byte(), fmt=E2M1)
    with pytest.raises(DtypeMismatch, match="real numbers"):
        compare(one.to(torch.complex64), one.to(torch.complex64))
    with pytest.raises(InvalidArgument, match="columns of one head"):
        compare(one, one, NamedPlaces(columns={"head": 3}))
    with pytest.raises(InvalidArgument, match="tile"):
        compare(one, one, NamedPlaces(tile=(0, 4)))
    with pytest.raises(ShapeMismatch, match="labels of expert"):
        compare(one, one, NamedPlaces(rows={"expert": np.zeros(3, np.int64)}))
    with pytest.raises(ShapeMismatch, match="axes"):
        NamedPlaces.along((2, 3, 4), ("position",))
    with pytest.raises(UnknownName, match="hand"):
        compare(one, one, NamedPlaces(columns={"head": 2})).by("hand")


def test_scales_without_sign_are_codes_too() -> None:
    codes = torch.tensor([[0, 1, 127, 254, 255]], dtype=torch.uint8)
    comparison = compare(codes, codes.flip(1), fmt=UE8M0)
    assert comparison.census.candidate_nan == 1
    assert comparison.ulps == 253


@pytest.mark.parametrize("factor", [1.0, -1.0, 0.5, 1e-20, 3e20])
def test_a_factor_is_a_gain_and_leaves_the_cosine(factor: float) -> None:
    reference = torch.tensor([3.0, -4.0])
    pair_sums = PairSums.of(reference * factor, reference)
    assert pair_sums.gain == pytest.approx(factor, rel=1e-6)
    assert pair_sums.cosine == pytest.approx(math.copysign(1.0, factor))
    assert pair_sums.relative_l2 == pytest.approx(abs(factor - 1), rel=1e-6, abs=1e-6)


def test_what_stands_at_a_right_angle() -> None:
    pair_sums = PairSums.of(torch.tensor([0.0, 5.0]), torch.tensor([5.0, 0.0]))
    assert (pair_sums.cosine, pair_sums.gain) == (0.0, 0.0)
    assert pair_sums.relative_l2 == pytest.approx(math.sqrt(2))


def test_a_zero_reference_has_no_closeness() -> None:
    pair_sums = PairSums.of(torch.ones(2), torch.zeros(2))
    assert all(math.isnan(v) for v in (pair_sums.cosine, pair_sums.relative_l2, pair_sums.gain))


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_what_is_not_finite_has_no_closeness(odd: float) -> None:
    pair_sums = PairSums.of(torch.tensor([1.0, odd]), torch.ones(2))
    assert math.isnan(pair_sums.cosine)
    assert not math.isfinite(pair_sums.relative_l2)


def test_small_differences_of_large_tensors_are_not_lost() -> None:
    """In float32 the sum of a million squares would round this away."""
    reference = torch.ones(1_000_000)
    candidate = reference.clone()
    candidate[0] += 1e-3
    assert PairSums.of(candidate, reference).relative_l2 == pytest.approx(1e-6, rel=1e-3)


def test_shapes_must_agree() -> None:
    with pytest.raises(ShapeMismatch, match="candidate"):
        PairSums.of(torch.ones(2), torch.ones(1, 2))
