"""Memory of dead outputs is reused when no view of it is left, and never before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.formats.fast import buffers
from degarble.harness.formats.fast.buffers import drop_spare_memory, empty_tensor, spare_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

SHAPE = (buffers.SMALLEST // 4, 2)
DTYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def _without_spares() -> Iterator[None]:
    drop_spare_memory()
    yield
    drop_spare_memory()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (5, 7), SHAPE])
def test_tensors_are_whole_and_aligned(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = empty_tensor(shape, dtype)
    assert tuple(tensor.shape) == shape
    assert tensor.dtype is dtype
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % buffers.ALIGNMENT == 0 or not tensor.numel()
    tensor.fill_(1)
    assert bool((tensor == 1).all())


def test_memory_is_reused_when_the_tensor_dies() -> None:
    place = empty_tensor(SHAPE, DTYPE).data_ptr()
    assert spare_bytes() > 0
    assert empty_tensor(SHAPE, DTYPE).data_ptr() == place


LOOKS: dict[str, Callable[[Tensor], object]] = {
    "view": lambda tensor: tensor.view(torch.int32),
    "numpy": lambda tensor: tensor.numpy(),
    "slice": lambda tensor: tensor[5:7],
    "detach": lambda tensor: tensor.detach(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_memory_with_a_live_view_is_not_reused(look: str) -> None:
    tensor = empty_tensor(SHAPE, torch.float32)
    kept = LOOKS[look](tensor)
    place = tensor.data_ptr()
    del tensor
    assert spare_bytes() == 0
    other = empty_tensor(SHAPE, torch.float32)
    assert other.data_ptr() != place
    del kept
    assert spare_bytes() > 0


def test_another_size_takes_new_memory() -> None:
    empty_tensor(SHAPE, DTYPE)
    idle = spare_bytes()
    tensor = empty_tensor((SHAPE[0] + 1, 2), DTYPE)
    assert spare_bytes() == idle
    del tensor


def test_small_tensors_are_left_to_malloc() -> None:
    empty_tensor((100,), DTYPE)
    assert spare_bytes() == 0


def test_idle_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "LIMIT", 3 * buffers.SMALLEST)
    tensors = [empty_tensor((SHAPE[0] + extra, 2), DTYPE) for extra in range(4)]
    places = [tensor.data_ptr() for tensor in tensors]
    while tensors:
        tensors.pop(0)
    assert 0 < spare_bytes() <= buffers.LIMIT
    assert empty_tensor((SHAPE[0] + 3, 2), DTYPE).data_ptr() == places[3]  # the latest is kept


def test_everything_can_be_freed() -> None:
    empty_tensor(SHAPE, DTYPE)
    drop_spare_memory()
    assert spare_bytes() == 0
