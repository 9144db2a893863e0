"""Where a candidate differs, beyond roundings, and the tiles around it."""

from __future__ import annotations

import math

import torch

from degarble.harness.engine.faults.activation_regions import (
    Region,
    apart,
    box,
    cancelled,
    differing,
    grown,
    length_of_difference,
    replaced,
)
from degarble.harness.engine.faults.model_faults import Sight


def values(seed: int) -> torch.Tensor:
    return torch.randn(40, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_roundings_do_not_count_and_more_does(seed: int) -> None:
    x = values(seed)
    up = (x.view(torch.int16) + 1).view(torch.bfloat16)
    assert not bool(apart(up, x).any())
    spoilt = x.clone()
    spoilt[7, 9] += 0.5 + abs(float(x[7, 9]))
    spoilt[8, 11] = math.nan
    assert apart(spoilt, x).nonzero().tolist() == [[7, 9], [8, 11]]
    assert not bool(apart(spoilt, spoilt).any())


def test_what_is_left_where_terms_cancel_is_nothing_beside_its_row(seed: int) -> None:
    x = values(seed)
    x[3, :2], x[4] = torch.tensor([4e-8, -2.0]), x[4] * 1e-9
    other = x.clone()
    other[3, 0], other[4, 0], other[5, 0] = -3e-16, 0.0, 1 + x[5, 0]
    found = cancelled(other, x)
    assert bool(found[3, 0]), "a rounding, however far it is in units of itself"
    assert not bool(found[4, 0]), "all of this row is as small"
    assert not bool(found[5, 0])
    other[3, 1] = math.inf
    assert bool(cancelled(other, x)[3, 0])
    assert not bool(cancelled(other, x)[3, 1])


def test_codes_differ_one_by_one() -> None:
    codes = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    other = codes.clone()
    other[2, 1] += 1
    assert apart(other, codes).nonzero().tolist() == [[2, 1]]


def test_a_box_grows_to_tiles(seed: int) -> None:
    x = values(seed)
    spoilt = x.clone()
    spoilt[5:7, 33:40] += 9
    mask = differing(Sight({}, {"out": spoilt}, {"out": x}))
    assert mask is not None
    found = box(mask)
    assert found == Region((5, 7), (33, 40))
    assert grown(found, (32, 16), (40, 64)) == Region((0, 32), (32, 48))
    assert grown(found, (128, 128), (40, 64)) == Region((0, 40), (0, 64))
    assert differing(Sight({}, {"out": x}, {"out": x})) is None
    assert differing(Sight({}, {"out": x[:3]}, {"out": x})) is None


def test_a_region_is_replaced_in_a_copy(seed: int) -> None:
    x = values(seed).reshape(10, 4, 64)
    made = replaced({"out": x}, "out", Region((0, 2), (0, 3)), 0.0)["out"]
    assert int((made != x).sum()) == 6
    assert made.shape == x.shape


def test_the_length_of_a_difference_is_relative(seed: int) -> None:
    x = values(seed)
    assert length_of_difference(Sight({}, {"out": x * 2}, {"out": x})) == 1.0
    assert length_of_difference(Sight({}, {"out": x}, {"out": x})) == 0.0
    for other in (x[:3], x * math.nan):
        assert math.isinf(length_of_difference(Sight({}, {"out": other}, {"out": x})))
    assert math.isinf(length_of_difference(Sight({}, {}, {"out": x})))
