"""Infer the layout of block scales from codes and scales alone, by trying every known order.

A quantiser scales by the largest value of a block, so an outlier raises its block's scale and
shrinks the other codes: the logarithms of scale and code energy correlate negatively, whatever the
model. In any other order scales are paired with foreign codes and the correlation vanishes; the
right order stands out by tens of standard deviations. Means of rows and columns are subtracted
first, because outlier channels make neighbouring rows alike.

Undecided where blocks do not vary (weights of one magnitude), where most weights are zero (more of
them raise scale and energy alike), or where blocks are too few. Derivation and power:
docs/design-notes/audit_statistics.md.

Shape letters: R rows, C columns of blocks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from degarble.harness.base.errors import Refused
from degarble.harness.checkpoint.audit.statistics.inferred import Inferred, best_of, undecided
from degarble.harness.formats.codec import unpack_nibbles
from degarble.harness.formats.fast.buffers import values_of
from degarble.harness.formats.layouts import (
    PACKED_MN,
    ROW_ORDERS,
    SWIZZLE_8X4,
    SWIZZLE_128X4,
    ScaleLayout,
    from_layout,
    reorder_rows,
    restore_rows,
    to_layout,
)
from degarble.harness.formats.number_formats import E2M1, E4M3

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.formats.weight import Weight

ABOUT = "scale layout"
LINEAR = "linear"
UNRELATED = "unrelated"  # decided in numbers/orders.py, by comparison with siblings
_FEWEST_BLOCKS = 512
_MOST_ROWS = 512  # as many rows, from the whole height, tell enough


def infer_layout(weight: Weight) -> Inferred:
    """Infer the order of a quantised matrix's block scales by trying every known one."""
    if weight.storage is None or weight.codes is None or weight.block_scale is None:
        return undecided(ABOUT, "no block scales")
    fmt = weight.storage.format
    stored_RC = weight.block_scale.reshape(-1, weight.block_scale.shape[-1])
    if fmt.block[0] != 1 or stored_RC.numel() < _FEWEST_BLOCKS:
        return undecided(ABOUT, f"{stored_RC.numel()} blocks of {fmt.block[0]} rows are too few")
    rows = torch.arange(0, len(stored_RC), max(1, len(stored_RC) // _MOST_ROWS))
    energy_log = _energy_logs(weight.codes[rows], fmt)
    scale_log = _scale_logs(fmt)
    scores: dict[str, float] = {}
    tried: list[Tensor] = []
    for name, order in orders_for(stored_RC.shape[0], stored_RC.shape[1]).items():
        try:
            logical_RC = order(stored_RC)[rows]
        except Refused:  # this order does not divide these rows
            continue
        if not any(torch.equal(logical_RC, other) for other in tried):  # some undo themselves
            tried.append(logical_RC)
            scores[name] = -_deviations(scale_log[logical_RC.numpy()], energy_log)
    return best_of(ABOUT, scores, "scale and code energy of a block belong together")


def orders_for(rows: int, columns: int) -> Mapping[str, Callable[[Tensor], Tensor]]:
    """Return, by name, functions from stored scales [R, C] to logical ones."""
    found: dict[str, Callable[[Tensor], Tensor]] = {
        LINEAR: lambda stored: stored,
        "transposed": lambda stored: stored.reshape(columns, rows).t().contiguous(),
        "groups of 4 transposed": _groups_of_four,
    }
    for layout in (SWIZZLE_128X4, SWIZZLE_8X4, PACKED_MN):
        if layout.storage_size(rows, columns) == rows * columns:
            found[layout.name] = _read_from(layout, rows, columns)
            found[f"{layout.name}, undone once too often"] = _written_to(layout)
    for name, order in ROW_ORDERS.items():
        if name != "as_stored":
            found[f"rows {name}"] = partial(restore_rows, order=order)
            found[f"rows {name}, undone"] = partial(reorder_rows, order=order)
    return found


def _read_from(layout: ScaleLayout, rows: int, columns: int) -> Callable[[Tensor], Tensor]:
    return lambda stored: from_layout(stored.reshape(-1), layout, rows, columns)


def _written_to(layout: ScaleLayout) -> Callable[[Tensor], Tensor]:
    return lambda stored: to_layout(stored, layout).reshape(stored.shape)


def _groups_of_four(stored: Tensor) -> Tensor:
    """Undo a transpose inside each group of 4 rows and 4 columns."""
    rows, columns = stored.shape
    if rows % 4 or columns % 4:
        return stored.new_zeros(stored.shape)
    groups = stored.reshape(rows // 4, 4, columns // 4, 4)
    return groups.permute(0, 3, 2, 1).reshape(rows, columns)


def _energy_logs(codes: Tensor, fmt: BlockFormat) -> NDArray[np.float64]:
    element = unpack_nibbles(codes) if fmt.packed else codes
    table = values_of(E2M1 if fmt.packed else E4M3).astype(np.float64)
    squares = np.nan_to_num(table * table)[element.numpy()]
    energy: NDArray[np.float64] = squares.reshape(len(codes), -1, fmt.block[1]).sum(2)
    with np.errstate(divide="ignore"):
        return np.log2(energy)


def _scale_logs(fmt: BlockFormat) -> NDArray[np.float64]:
    values = values_of(fmt.scale).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log2(values)


def _deviations(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return the correlation about rows' and columns' means, in standard deviations."""
    known = np.isfinite(a) & np.isfinite(b)
    if known.sum() < _FEWEST_BLOCKS:
        return float("nan")
    a, b = _centred(a, known), _centred(b, known)
    squares = float((a * a).sum() * (b * b).sum())
    if squares < 1e-9:
        return float("nan")
    return float((a * b).sum()) / math.sqrt(squares) * math.sqrt(float(known.sum()))


def _centred(values: NDArray[np.float64], known: NDArray[np.bool_]) -> NDArray[np.float64]:
    centred = np.where(known, values, 0.0)
    for axis in (1, 0):
        counts = np.maximum(known.sum(axis, keepdims=True), 1)
        centred = np.where(known, centred - centred.sum(axis, keepdims=True) / counts, 0.0)
    return centred
