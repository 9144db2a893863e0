"""Row permutations of weights before a kernel reads them: shuffle, gate/up interleave, half swap.

TRT-LLM shuffles rows in blocks of 32 or 16; gate and up interleave in groups of 1, 8 or 64; the
halves are [w1; w3] or [w3; w1]; DeepGEMM transposes 4x32. Orders can be chained.
An order is a gather: row r of the result is row `source(r, rows)` of the input, and `destination`
is its inverse. Both use // % * + on non-negative integers only, so that one source runs on ints,
int64 tensors and CuTe DSL values; neither checks anything. `reorder_rows` and `restore_rows` move
tensors [..., M, K] and check that the order divides M.

Sources: FlashInfer utils.py and fused_moe/core.py (shuffle, interleave by one, chain), vLLM
flashinfer_fp4_moe.py (w3 before w1), DeepGEMM mega/__init__.py (groups of 8, 4x32 transpose).
Shape letters: M rows, K columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import ShapeMismatch, UnknownName

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor


def shuffled_row(row: Any, ways: int, block: int) -> Any:
    """Return where a row goes when each `block` rows are dealt like cards to `ways` stacks.

    Inside a block j goes to (j mod ways) * (block / ways) + j div ways.
    """
    inside = row % block
    return row // block * block + inside % ways * (block // ways) + inside // ways


def interleaved_row(row: Any, rows: Any, group: int) -> Any:
    """Return where a row of [first half; second half] goes when groups of both halves alternate."""
    inside = row % (rows // 2)
    return inside // group * (2 * group) + row // (rows // 2) * group + inside % group


def deinterleaved_row(row: Any, rows: Any, group: int) -> Any:
    """Return where a row of alternating groups goes when the halves are joined again."""
    pair = row // (2 * group)
    return row // group % 2 * (rows // 2) + pair * group + row % group


def swapped_half_row(row: Any, rows: Any) -> Any:
    """Return where a row goes when [a; b] becomes [b; a]; its own inverse."""
    return (row + rows // 2) % rows


@dataclass(frozen=True)
class RowOrder:
    """A permutation of rows: `source(new_row, rows)` and its inverse `destination(row, rows)`."""

    name: str
    multiple: int  # the row count is a multiple of this
    source: Callable[[Any, Any], Any]
    destination: Callable[[Any, Any], Any]


def chain(name: str, first: RowOrder, *later: RowOrder) -> RowOrder:
    """Apply orders one after the other, as one gather."""
    orders = (first, *later)

    def source(row: Any, rows: Any) -> Any:
        for order in reversed(orders):
            row = order.source(row, rows)
        return row

    def destination(row: Any, rows: Any) -> Any:
        for order in orders:
            row = order.destination(row, rows)
        return row

    return RowOrder(name, math.lcm(*(order.multiple for order in orders)), source, destination)


def _shuffle(name: str, ways: int, block: int) -> RowOrder:
    return RowOrder(
        name,
        block,
        source=lambda row, _rows: shuffled_row(row, block // ways, block),
        destination=lambda row, _rows: shuffled_row(row, ways, block),
    )


def _interleave(group: int) -> RowOrder:
    return RowOrder(
        f"interleave_{group}",
        2 * group,
        source=partial(deinterleaved_row, group=group),
        destination=partial(interleaved_row, group=group),
    )


AS_STORED = RowOrder("as_stored", 1, lambda row, _rows: row, lambda row, _rows: row)
# Block 32 for an epilogue tile of 128 rows, block 16 otherwise (FlashInfer utils.py).
SHUFFLE_32 = _shuffle("shuffle_32", ways=4, block=32)
SHUFFLE_16 = _shuffle("shuffle_16", ways=2, block=16)
INTERLEAVE_1 = _interleave(1)  # TRT-LLM
INTERLEAVE_8 = _interleave(8)  # DeepGEMM MegaMoE
INTERLEAVE_64 = _interleave(64)  # FlashInfer CuTe DSL
SWAP_HALVES = RowOrder("swap_halves", 2, swapped_half_row, swapped_half_row)  # [w1;w3] to [w3;w1]
# Rows 32 a + b of 128 go to 4 b + a: what UTCCP copies into tensor memory (DeepGEMM MegaMoE).
TRANSPOSE_4X32 = _shuffle("transpose_4x32", ways=32, block=128)
# Interleave first, then shuffle: the combined gather is interleave[shuffle] (FlashInfer core.py).
TRTLLM_GATED = chain("trtllm_gated", SWAP_HALVES, INTERLEAVE_1, SHUFFLE_32)

ROW_ORDERS: Mapping[str, RowOrder] = MappingProxyType(
    {
        order.name: order
        for order in (
            AS_STORED,
            SHUFFLE_32,
            SHUFFLE_16,
            INTERLEAVE_1,
            INTERLEAVE_8,
            INTERLEAVE_64,
            SWAP_HALVES,
            TRANSPOSE_4X32,
            TRTLLM_GATED,
        )
    }
)


def row_order(name: str) -> RowOrder:
    """Return the order called `name`; raise with the nearest known names otherwise."""
    if name not in ROW_ORDERS:
        raise UnknownName.among("row order", name, ROW_ORDERS)
    return ROW_ORDERS[name]


def gather_index(order: RowOrder, rows: int) -> Tensor:
    """Return, for every new row, the row that it comes from."""
    if rows % order.multiple:
        raise ShapeMismatch(
            f"rows for order {order.name}",
            rows,
            f"a multiple of {order.multiple}",
            "Pad the rows (each gated half on its own) with zeros first.",
        )
    index_M: Tensor = order.source(torch.arange(rows, dtype=torch.int64), rows)
    return index_M


def reorder_rows(tensor_MK: Tensor, order: RowOrder) -> Tensor:
    """Gather the rows of [..., M, K] into `order`."""
    index_M = gather_index(order, _rows_of(tensor_MK)).to(tensor_MK.device)
    return tensor_MK.index_select(-2, index_M)


def restore_rows(tensor_MK: Tensor, order: RowOrder) -> Tensor:
    """Undo reorder_rows."""
    index_M = gather_index(order, _rows_of(tensor_MK)).to(tensor_MK.device)
    return tensor_MK.index_select(-2, index_M.argsort())


def _rows_of(tensor_MK: Tensor) -> int:
    if tensor_MK.ndim < 2:
        raise ShapeMismatch(
            "tensor to reorder",
            tuple(tensor_MK.shape),
            "at least two dimensions, rows and columns",
            "Add a column dimension of extent 1.",
        )
    return tensor_MK.shape[-2]
