"""Tensors of every dtype and of odd shapes are counted or told as unread; nothing crashes."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np
import pytest

from degarble.harness.checkpoint.audit import value_rules as rules_numbers
from degarble.harness.checkpoint.audit.numbers.numbers import audit_numbers
from degarble.harness.checkpoint.read.types import DTYPE_BITS
from degarble.harness.checkpoint.view.stored import TORCH_DTYPES
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.suites.checkpoint.reading_cases import entry, write_raw

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.checkpoint.audit.numbers.numbers import NumbersAudit

SHAPES: tuple[list[int], ...] = ([], [0], [3], [64, 64], [64, 0], [2, 4, 8], [2, 2, 4, 4])


def audit_of(folder: Path, dtype: str, shape: list[int], data: bytes) -> NumbersAudit:
    """Audit one tensor alone."""
    header = {"layers.0.a.weight": entry(dtype, shape, 0, len(data))}
    write_raw(folder / "model.safetensors", header, data)
    with Checkpoint.open(folder) as checkpoint:
        return audit_numbers(checkpoint)


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_in_every_shape(tmp_path: Path, dtype: str, seed: int) -> None:
    unreadable = dtype not in TORCH_DTYPES or dtype in ("C64", "F4")
    for number, shape in enumerate(SHAPES):
        bits = prod(shape) * DTYPE_BITS[dtype]
        if bits % 8:
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        noise = np.random.default_rng(seed).integers(0, 256, bits // 8, np.uint8)
        audit = audit_of(folder, dtype, list(shape), noise.tobytes())
        told = {finding.rule for finding in audit.findings}
        assert (rules_numbers.NOT_READ.id in told) == unreadable, shape
        if not unreadable:
            assert audit.table["elements"].sum() == prod(shape)


def test_a_vector_that_comes_in_pieces(tmp_path: Path) -> None:
    """Longer than a window: counted in full, by every kind of number."""
    count = (1 << 23) + 8
    values = np.zeros(count, np.float32)
    values[-1] = 3.0
    row = audit_of(tmp_path, "F32", [count], values.tobytes()).table.row(0)
    assert (row["height"], row["zeros"], row["zero_rows"], row["amax"]) == (1, count - 1, 0, 3.0)
    whole = np.arange(count, dtype=np.int32)
    row = audit_of(tmp_path, "I32", [count], whole.tobytes()).table.row(0)
    assert (row["lowest"], row["highest"], row["zeros"]) == (0, count - 1, 1)


@pytest.mark.parametrize("shape", [[1 << 40, 0], [1 << 40, 2, 0], [0, 1 << 40]])
def test_many_rows_of_nothing_take_no_time(tmp_path: Path, shape: list[int]) -> None:
    audit = audit_of(tmp_path, "BF16", shape, b"")
    assert len(audit.table) == 1
    assert audit.findings == []


def test_a_stack_of_very_many_counts_as_rows(tmp_path: Path) -> None:
    values = np.ones(40_000 * 4, np.float32)
    audit = audit_of(tmp_path, "F32", [40_000, 2, 2], values.tobytes())
    assert audit.table["height"].tolist() == [80_000]
