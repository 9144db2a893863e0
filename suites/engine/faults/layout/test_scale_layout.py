from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.faults.family import Case, Fault
from degarble.harness.engine.faults.layout import scale_layout as m11
from degarble.harness.formats.layouts import LINEAR, SWIZZLE_128X4, to_layout
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import quantise
from degarble.suites.engine.weights import heavy_tailed

if TYPE_CHECKING:
    from degarble.harness.formats.quantise import QuantisedTensor

WHOLE = (256, 128)  # two tiles by two, without padding
RAGGED = (130, 96)  # 130 rows of 6 scales


def _numbered(rows: int, columns: int, seed: int) -> QuantisedTensor:
    """A tensor whose scale bytes are their own positions, so that a permutation can be read off."""
    tensor = quantise(heavy_tailed(rows, columns, seed), NVFP4)
    count = tensor.block_scale.numel()
    marks = (torch.arange(count) % 251).to(torch.uint8).reshape(tensor.block_scale.shape)
    return replace(tensor, block_scale=marks)


def test_read_unswizzled_gives_the_bytes_in_storage_order(seed: int) -> None:
    tensor = _numbered(*WHOLE, seed)
    damaged = m11.inject_read_unswizzled(tensor)
    assert damaged is not None
    assert damaged.layout == LINEAR
    stored = to_layout(tensor.block_scale, SWIZZLE_128X4)
    assert torch.equal(damaged.linear_scale_codes().flatten(), stored)


def test_skipped_and_read_unswizzled_undo_each_other(seed: int) -> None:
    tensor = _numbered(*WHOLE, seed)
    damaged = m11.inject_read_unswizzled(tensor)
    assert damaged is not None
    undone = m11.inject_swizzle_skipped(damaged)
    assert undone is not None
    assert undone.layout == SWIZZLE_128X4
    assert torch.equal(undone.linear_scale_codes(), tensor.block_scale)


def test_twice_read_once_is_once_read_not_at_all(seed: int) -> None:
    tensor = _numbered(*WHOLE, seed)
    twice = m11.inject_swizzled_twice(tensor)
    never = m11.inject_read_unswizzled(tensor)
    assert twice is not None
    assert never is not None
    assert twice.layout == SWIZZLE_128X4
    assert torch.equal(twice.linear_scale_codes(), never.linear_scale_codes())


def test_transposed(seed: int) -> None:
    tensor = _numbered(*WHOLE, seed)
    for layout in (LINEAR, SWIZZLE_128X4):
        damaged = m11.inject_transposed(tensor.with_layout(layout))
        assert damaged is not None
        assert damaged.layout == layout
        turned = damaged.linear_scale_codes().reshape(8, 256)
        assert torch.equal(turned.T, tensor.block_scale)


@pytest.mark.parametrize("fault", m11.FAULTS, ids=lambda fault: fault.id)
def test_ragged_tensors_can_be_damaged_too(fault: Fault, seed: int) -> None:
    tensor = _numbered(*RAGGED, seed)
    damaged = fault.inject(tensor)
    assert damaged is not None
    assert not torch.equal(damaged.linear_scale_codes(), tensor.block_scale)
    assert damaged.linear_scale_codes().shape == tensor.block_scale.shape


def test_a_fault_of_a_swizzle_is_not_seen_in_a_linear_tensor(seed: int) -> None:
    tensor = _numbered(*WHOLE, seed)
    rows = torch.ones(256, dtype=torch.bool)
    case = Case(tensor, tensor, rows)
    seen = {fault.id for fault in m11.FAULTS if fault.signature(case) is not None}
    assert seen == {"M11.read_unswizzled", "M11.transposed"}
    swizzled = tensor.with_layout(SWIZZLE_128X4)
    case = Case(swizzled, swizzled, rows)
    seen = {fault.id for fault in m11.FAULTS if fault.signature(case) is not None}
    assert seen == {"M11.swizzled_twice", "M11.swizzle_skipped", "M11.transposed"}
