"""Probes: scalars return what tensors return, and one differing sample is detected."""

from __future__ import annotations

import operator
from functools import reduce
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.cache_rows import CACHE_ROWS
from degarble.harness.formats.layouts import ROW_ORDERS, SCALE_LAYOUTS, SWIZZLE_128X4
from degarble.suites.support.probes import probes
from degarble.suites.support.probes.probes import (
    CACHE_ENTRIES,
    GROUPS,
    LAYOUT_SHAPES,
    ORDER_ROWS,
    SAMPLES,
    Probe,
    Sample,
    expected,
    sample_bytes,
)
from degarble.suites.support.thinned import thinned

if TYPE_CHECKING:
    from collections.abc import Iterable

EACH = [(group, probe) for group, members in GROUPS.items() for probe in members]
STRIDE = 17  # coprime to every power of two; layouts and orders are walked in full below


def scalar_mismatches(probe: Probe, want: torch.Tensor, indices: Iterable[int]) -> list[int]:
    """Return the samples where the world of scalars differs from `want`."""
    found = []
    for index in indices:
        got = ops.unsigned(probe.value(Sample(index, index % 256, index // 256)))
        assert type(got) is int
        if got != int(want[index]):
            found.append(index)
    return found


@pytest.mark.parametrize("group", thinned(GROUPS))
def test_scalars_return_what_tensors_return(group: str) -> None:
    want = expected(group)
    assert want.shape == (len(GROUPS[group]), SAMPLES)
    for place, probe in enumerate(GROUPS[group]):
        indices = range(place % STRIDE, SAMPLES, STRIDE)
        assert scalar_mismatches(probe, want[place], indices) == [], probe.name


def test_one_differing_sample_is_detected() -> None:
    probe = GROUPS["codecs"][0]
    want = expected("codecs")[0]
    want[STRIDE * 100] += 1
    assert scalar_mismatches(probe, want, range(0, SAMPLES, STRIDE)) == [STRIDE * 100]


def test_a_world_that_differs_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def summed(conditions: tuple[Any, ...]) -> Any:
        return reduce(operator.add, conditions)  # the trap: of tensors, a logical or

    monkeypatch.setattr(ops._Tensors, "count", staticmethod(summed))
    (place,) = (i for i, p in enumerate(GROUPS["arithmetic"]) if p.name == "count")
    found = scalar_mismatches(
        GROUPS["arithmetic"][place], expected("arithmetic")[place], range(0, SAMPLES, 97)
    )
    assert len(found) > 100


def test_names_are_unique_and_every_record_is_probed() -> None:
    names = [f"{group}: {probe.name}" for group, probe in EACH]
    assert len(set(names)) == len(names)
    for registry, group in (
        (SCALE_LAYOUTS, "layouts"),
        (CACHE_ROWS, "cache_rows"),
        (ROW_ORDERS, "row_orders"),
    ):
        for name in registry:
            assert any(probe.name.startswith(f"{name} ") for probe in GROUPS[group]), name


def test_samples_reach_every_coordinate() -> None:
    for rows, columns in LAYOUT_SHAPES:
        for layout in SCALE_LAYOUTS.values():
            assert layout.storage_size(rows, columns) <= SAMPLES
    for row in CACHE_ROWS.values():
        assert CACHE_ENTRIES * row.dims <= SAMPLES
    for order in ROW_ORDERS.values():
        assert ORDER_ROWS % order.multiple == 0
    sample = Sample(*(torch.arange(SAMPLES) for _ in range(3)))
    offsets = probes._layout_offset(sample, SWIZZLE_128X4, 300, 21)
    assert offsets.unique().numel() == SWIZZLE_128X4.storage_size(300, 21)


def test_the_bytes_in_memory_are_those_of_the_sample() -> None:
    low, high = sample_bytes().to(torch.int64).unbind(-1)
    assert torch.equal(low + 256 * high, torch.arange(SAMPLES))
    assert sample_bytes().dtype is torch.uint8
