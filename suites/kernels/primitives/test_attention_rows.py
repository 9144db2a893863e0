"""Rows of 512 as arithmetic: lanes and values meet once, the order is near the references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.kernels.primitives import kv_problem as rows
from degarble.references import attention, elementary
from degarble.references.numerics import HeadNorm, Numerics
from degarble.suites.kernels import latent_checks as plain

FINITE = [spread for spread in plain.SPREADS if spread not in {"special", "tiny"}]


def values_of(lane: int, slot: int) -> range:
    """Return the values that a lane holds, as the kernels compute it."""
    first = rows.HALF * (slot * rows.LANES + lane)
    return range(first, first + rows.HALF)


@pytest.mark.parametrize("width", [128, 512])
def test_every_value_has_one_lane_and_turned_ones_are_the_last(width: int) -> None:
    row = rows.geometry(width)
    places = [(lane, slot) for lane in range(row.lanes) for slot in range(row.slots)]
    held = [(value, *place) for place in places for value in values_of(*place)]
    assert sorted(value for value, _, _ in held) == list(range(width))
    last, first = row.slots - 1, row.first_turned_lane
    turned = {value for value, lane, slot in held if slot == last and lane >= first}
    assert turned == set(range(row.plain, width))


def test_a_width_without_a_kernel_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match="width of a row"):
        rows.geometry(256)


@pytest.mark.parametrize("spread", FINITE)
@pytest.mark.parametrize("width", [128, 512])
def test_latent_rows_are_those_of_the_references(width: int, spread: str) -> None:
    x = plain.drawn(spread, (200, width), 3)
    weight = plain.drawn("ordinary", (width,), 4)
    positions = torch.arange(200) * 37
    numerics = Numerics.bf16()
    table = elementary.rotation_table(plain.ROPE, positions, numerics)
    want = attention.latent(x, weight, table, 1e-6, numerics)
    made = plain.normed_rows(x, weight, 1e-6).bfloat16()
    got = plain.turned_tail(made.float(), torch.cat((table.cos, table.sin), -1))
    assert plain.steps_apart(got[:, :-64], want[:, :-64]) <= 1
    exact = plain.turned_tail(
        want_before_the_turn(x, weight).float(), torch.cat((table.cos, table.sin), -1)
    )
    assert near(exact[:, -64:], want[:, -64:])


def want_before_the_turn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return elementary.rms_norm(x, weight, 1e-6, Numerics.bf16())


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    """At most one BF16 step, or, where a difference cancels, 2**-23 of the row's largest."""
    apart = (got.double() - want.double()).abs()
    step = torch.exp2(torch.floor(torch.log2(want.double().abs().clamp(min=2.0**-126))) - 7)
    largest = want.double().abs().amax(-1, keepdim=True)
    return bool((apart <= step.maximum(largest * 2.0**-23)).all())


@pytest.mark.parametrize("spread", FINITE)
@pytest.mark.parametrize("back", [False, True])
def test_heads_are_those_of_the_references(spread: str, back: bool) -> None:
    x = plain.drawn(spread, (120, rows.WIDTH), 5)
    numerics = Numerics.bf16(head_norm=HeadNorm.ONCE)
    table = elementary.rotation_table(plain.ROPE, torch.arange(120) * 91, numerics)
    turns = torch.cat((table.cos, table.sin), -1)
    if back:
        want = attention.unrotate(x[:, None], table, numerics)[:, 0]
        got = plain.turned_tail(x.float(), turns, back=True)
    else:
        want = attention.query_heads(x[:, None], table, 1e-6, numerics)[:, 0]
        got = plain.turned_tail(plain.normed_rows(x, None, 1e-6), turns)
    assert plain.steps_apart(got[:, :-64], want[:, :-64]) <= (0 if back else 1)
    assert near(got[:, -64:], want[:, -64:])


def test_the_turn_is_the_same_in_python_and_on_tensors() -> None:
    generator = np.random.default_rng(1)
    numbers, cos, sin = (generator.standard_normal(n).astype(np.float32) for n in (8, 4, 4))
    for back in (False, True):
        got = rows.turned(list(numbers), list(cos), list(sin), back=back)
        tensors = (list(torch.from_numpy(each)) for each in (numbers, cos, sin))
        assert [float(n) for n in got] == [float(n) for n in rows.turned(*tensors, back=back)]
    assert rows.turned([1.0, 0.0], [0.0], [1.0], back=False) == [0.0, 1.0]
    assert rows.turned([1.0, 0.0], [0.0], [1.0], back=True) == [0.0, -1.0]


def test_refuses_what_no_kernel_holds() -> None:
    for extent in (-1, 1 << 31):
        with pytest.raises(ShapeMismatch, match="tokens"):
            rows.require_extent("tokens", extent)
    for epsilon in (-1e-6, 1.0, float("nan")):
        with pytest.raises(InvalidArgument, match="epsilon"):
            rows.require_epsilon(epsilon)
