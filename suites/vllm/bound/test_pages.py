"""Pages of a layer among those of others: what kernels ask of an operand is told as it is."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from degarble.harness.base.errors import LayoutMismatch
from degarble.kernels.runtime.operands import require_tensor

pytestmark = pytest.mark.vllm

PAGES, ENTRIES, NBYTES, OFFSET = 3, 64, 584, 576


@pytest.fixture
def view() -> Any:
    return import_module("degarble.harness.vllm.bound.attention").PagedView


def packed(stride: int = 2 * ENTRIES * NBYTES) -> torch.Tensor:
    """A layer's pages in vLLM's packed layout: others' lie between, the last stride is cut off."""
    backing = torch.zeros(PAGES * stride, dtype=torch.uint8)
    inner = backing.view(PAGES, stride)[:, OFFSET : OFFSET + ENTRIES * NBYTES]
    return inner.view(PAGES, ENTRIES, NBYTES)


def test_kernels_take_pages_that_no_tensor_could_hold(view: Any) -> None:
    cache = packed()
    with pytest.raises(RuntimeError, match="out of bounds"):
        cache.as_strided((PAGES, cache.stride(0)), (cache.stride(0), 1))
    made = view("own", cache)
    shape = (PAGES, 2 * ENTRIES * NBYTES)
    require_tensor("cache", made, torch.uint8, shape, 16 if cache.data_ptr() % 16 == 0 else 1)
    assert (made.entries, made.data_ptr(), made.device) == (64, cache.data_ptr(), cache.device)


def test_entries_with_gaps_are_refused(view: Any) -> None:
    gaps = torch.zeros(PAGES, ENTRIES, 2 * NBYTES, dtype=torch.uint8)[..., :NBYTES]
    for cache in (gaps, torch.zeros(PAGES, ENTRIES, NBYTES)):
        with pytest.raises(LayoutMismatch, match="close together"):
            view("own", cache)
