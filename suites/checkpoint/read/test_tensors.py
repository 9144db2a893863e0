"""Tensors over mapped bytes equal what the safetensors package loads, without needless copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from degarble.harness.base.errors import DtypeMismatch, ShapeMismatch
from degarble.harness.checkpoint.read.types import DTYPE_BITS, TensorEntry
from degarble.harness.checkpoint.view.stored import TORCH_DTYPES, tensor_over
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.suites.checkpoint.reading_cases import entry, write_raw

if TYPE_CHECKING:
    from pathlib import Path


CASES = [
    (dtype, shape)
    for dtype in TORCH_DTYPES
    for shape in ([4, 6], [0, 2], [])
    if shape or dtype != "F4"  # half a byte: the header refuses it
]


@pytest.mark.parametrize(("dtype", "shape"), CASES)
def test_equals_what_the_package_loads(
    tmp_path: Path, dtype: str, shape: list[int], seed: int
) -> None:
    elements = 24 if shape == [4, 6] else len(shape) == 0
    size = elements * DTYPE_BITS[dtype] // 8
    data = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed))
    path = tmp_path / "model.safetensors"
    write_raw(path, {"a": entry(dtype, shape, 0, size)}, bytes(data.tolist()))
    with Checkpoint.open(path) as checkpoint:
        found, oracle = checkpoint.tensor("a"), load_file(path)["a"]
        assert found.dtype is oracle.dtype
        assert found.shape == oracle.shape
        assert bytes(found.flatten().view(torch.uint8).tolist()) == bytes(data.tolist())


def test_shares_memory_where_bytes_lie_well_and_copies_where_not() -> None:
    raw = memoryview(bytearray(range(16)))
    shared = tensor_over(TensorEntry("a", "F32", (2,), None, 0, 8), raw[:8])  # type: ignore[arg-type]
    copied = tensor_over(TensorEntry("a", "F32", (2,), None, 1, 9), raw[1:9])  # type: ignore[arg-type]
    before = shared.clone(), copied.clone()
    raw[:9] = bytes(9)
    assert torch.equal(shared, torch.zeros(2))
    assert not torch.equal(before[0], shared)
    assert torch.equal(before[1], copied)


@pytest.mark.parametrize("dtype", sorted(set(DTYPE_BITS) - set(TORCH_DTYPES)))
def test_refuses_what_torch_cannot_hold(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, {"a": entry(dtype, [4], 0, 3)}, b"abc")
    with Checkpoint.open(path) as checkpoint:
        with pytest.raises(DtypeMismatch, match=dtype):
            checkpoint.tensor("a")
        assert bytes(checkpoint.raw("a")) == b"abc"


def test_refuses_an_odd_number_of_packed_codes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, {"a": entry("F4", [2, 3], 0, 3)}, b"abc")
    with Checkpoint.open(path) as checkpoint, pytest.raises(ShapeMismatch, match="even"):
        checkpoint.tensor("a")
