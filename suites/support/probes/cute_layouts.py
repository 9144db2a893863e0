"""Evaluate CuTe's own layout of NVFP4 scales on the CPU.

`layout_mismatches` is a plain function: inside a traced one every number prints as `?` and no
comparison can fail. CuTe folds a static layout at a static coordinate to a Python int; a result of
any other type is an error, so that nothing is compared that was not computed.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from cutlass import cute
from cutlass._mlir import ir
from cutlass.utils.blockscaled_layout import tile_atom_to_shape_SF

if TYPE_CHECKING:
    from collections.abc import Callable

    Offset = Callable[[int, tuple[int, int], int, int], int]

BLOCK = 16


def layout_mismatches(
    offset: Offset, matrices: int, rows: int, columns: int
) -> tuple[int, list[str]]:
    """Compare `offset(matrix, (row, column), rows, columns)` with CuTe's layout everywhere.

    Return how many coordinates were compared, and a line for each that differs.
    """
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            layout = tile_atom_to_shape_SF((rows, columns * BLOCK, matrices), BLOCK)
            found = []
            compared = 0
            for matrix, row, column in product(range(matrices), range(rows), range(columns)):
                want = _offset_of(layout, row, column, matrix)
                got = offset(matrix, (row, column), rows, columns)
                compared += 1
                if got != want:
                    found.append(f"({matrix}, {row}, {column}): got {got}, CuTe has {want}")
    return compared, found


def storage_bytes(matrices: int, rows: int, columns: int) -> int:
    """Return the bytes that CuTe's layout spans, padding included."""
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            layout = tile_atom_to_shape_SF((rows, columns * BLOCK, matrices), BLOCK)
            size = cute.cosize(layout)
    assert type(size) is int
    return size


def _offset_of(layout: Any, row: int, column: int, matrix: int) -> int:
    """Offset of one scale; all 16 values of its block have to share it."""
    first, last = (layout((row, column * BLOCK + value, matrix)) for value in (0, BLOCK - 1))
    assert type(first) is int, "CuTe did not fold the layout"
    assert first == last
    return first
