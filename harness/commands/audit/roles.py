"""Summarise a checkpoint's weights by role: 300,000 tensors become about fifty lines.

A role's summary has the number of weights, their formats, and the range of each measured number.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.checkpoint.audit.numbers.table import FORMATS
from degarble.harness.checkpoint.audit.statistics.inference import ORDER_NAMES
from degarble.harness.commands.audit.kinds import kind_of_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from degarble.harness.checkpoint.audit.numbers.table import NumberTable

# The reported columns of a role: smallest, median, largest of its weights' finite numbers.
SPANS = (
    "rms", "amax", "decode_scale", "input_scale", "scale_smallest", "scale_largest",
    "code_entropy", "byte_entropy", "top_full", "pairing",
)  # fmt: skip
NOT_PACKED, _UNDECIDED = -2, -1  # in the column `order`
_WHERE_PRESENT = {"decode_scale": "scale_bits", "input_scale": "input_bits"}

Span = tuple[float, float, float] | None


@dataclass(frozen=True)
class Role:
    """Weights whose names differ in numbers alone. `first` is the row of one of them."""

    name: str
    kind: str
    weights: int
    formats: tuple[str, ...]
    nbytes: int
    spans: Mapping[str, Span]
    order: str
    first: int


def roles_of(table: NumberTable) -> list[Role]:
    """Summarise a table by role, in the order of names."""
    rows: dict[str, list[int]] = defaultdict(list)
    for index, unit in enumerate(table.units):
        rows[unit.role].append(index)
    return [_role(table, name, np.array(rows[name])) for name in sorted(rows)]


def _role(table: NumberTable, name: str, rows: NDArray[np.int64]) -> Role:
    data = table.data[rows]
    first = int(rows[0])
    formats = np.unique(data["format"])
    return Role(
        name,
        kind_of_name(table.units[first].name),
        len(rows),
        tuple(FORMATS[int(each)] for each in formats),
        int(data["nbytes"].sum()),
        {column: span(data[column][_known(data, column)]) for column in SPANS},
        _orders(data["order"]),
        first,
    )


def _known(data: NDArray[np.void], column: str) -> NDArray[np.bool_]:
    """Mark rows that have this number at all; a column may contain a code for none."""
    if column in _WHERE_PRESENT:
        present: NDArray[np.bool_] = data[_WHERE_PRESENT[column]] >= 0
        return present
    of_blocks = column.startswith(("scale_", "top_")) or column == "pairing"
    counted = data["blocks"] > 0 if of_blocks else data["elements"] > 0
    return np.asarray(counted)


def span(values: NDArray[np.float64]) -> Span:
    """Return smallest, median and largest of the finite values; None without any."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    return float(finite.min()), float(np.median(finite)), float(finite.max())


def _orders(orders: NDArray[np.int8]) -> str:
    told = {order_told(int(each)) for each in np.unique(orders) if each != NOT_PACKED}
    return " or ".join(sorted(told))


def order_told(order: int) -> str:
    """Return the name of a packing order of the table."""
    if order == NOT_PACKED:
        return "not packed"
    return "undecided" if order == _UNDECIDED else ORDER_NAMES[order]
