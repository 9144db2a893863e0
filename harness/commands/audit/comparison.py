"""Report a comparison with a reference checkpoint: by role, and the farthest weights one by one.

Listed one by one are the weights whose error exceeds what their format explains by most, and those
with the largest error.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.harness.checkpoint.audit.numbers.table import FORMATS
from degarble.harness.commands.audit.kinds import kind_of_name
from degarble.harness.commands.audit.roles import span
from degarble.harness.report.blocks import Column, ColumnKind, Details, Fact, Table
from degarble.harness.report.number_text import number, share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from degarble.harness.checkpoint.audit.against.comparison import AgainstTable
    from degarble.harness.commands.audit.audit import Beside

FARTHEST = 50  # by each of the two measures
_SPANS = ("cosine", "gain", "error", "floor", "over_floor")


def farthest(table: AgainstTable) -> list[int]:
    """Return the rows that are farthest off, by error over floor and then by error."""
    rows: dict[int, None] = {}
    for column in ("over_floor", "error"):
        values = np.nan_to_num(table[column], nan=-1.0)
        order = np.argsort(-values, kind="stable")[:FARTHEST]
        rows |= dict.fromkeys(int(row) for row in order if values[row] > 0)
    return list(rows)


def beside_document(beside: Beside) -> dict[str, Any]:
    """Return a comparison as plain data: by role, and the farthest weights in full."""
    table = beside.table
    return {
        "reference": beside.name,
        "identity": beside.identity,
        "weights": len(table),
        "unlike": dict(table.unlike),
        "only_here": dict(table.only_here),
        "only_there": dict(table.only_there),
        "roles": [
            {
                "role": name,
                "kind": kind_of_name(table.pairs[rows[0]].unit.name),
                "weights": len(rows),
                **_spans(table, rows),
            }
            for name, rows in _by_role(table)
        ],
        "farthest": [table.row(row) for row in farthest(table)],
    }


def cosines(beside: Beside) -> list[dict[str, Any]]:
    """Return the cosines of the farthest weights, in the form of every `--json`."""
    rows = (beside.table.row(row) for row in farthest(beside.table))
    return [{"site": row["name"], "layer": row["layer"], "cosine": row["cosine"]} for row in rows]


def beside_roles(beside: Beside) -> Details:
    """Report a comparison by role."""
    table = beside.table
    columns = (
        Column("role", ColumnKind.CODE),
        Column("weights", ColumnKind.NUMBER, 12),
        Column("lowest cosine", ColumnKind.NUMBER, 6),
        Column("gain from", ColumnKind.NUMBER, 4),
        Column("to", ColumnKind.NUMBER, 4),
        Column("error", ColumnKind.NUMBER, 3, "relative, the largest of all"),
        Column("over floor", ColumnKind.NUMBER, 3, "error over an ideal conversion's, largest"),
    )
    rows = []
    for name, members in _by_role(table):
        found = _spans(table, members)
        low, high = found.get("gain", [None])[0], found.get("gain", [None])[-1]
        rows.append(
            (
                name,
                len(members),
                found.get("cosine", [None])[0],
                low,
                high,
                found.get("error", [None])[-1],
                found.get("over_floor", [None])[-1],
            )
        )
    inner = Table("A star stands for any number", columns, tuple(rows))
    return Details(f"Beside {beside.name}, by role", (inner,), "beside-roles")


def error_of(table: AgainstTable, row: int) -> float | None:
    """Return the relative error of a weight; None if it has no finite one."""
    error = float(table["error"][row])
    return error if math.isfinite(error) and not table["odd_here"][row] else None


def _by_role(table: AgainstTable) -> Iterator[tuple[str, NDArray[np.int64]]]:
    members: dict[str, list[int]] = defaultdict(list)
    for index, pair in enumerate(table.pairs):
        members[pair.unit.role].append(index)
    for name in sorted(members):
        yield name, np.array(members[name])


def _spans(table: AgainstTable, rows: NDArray[np.int64]) -> dict[str, list[Any]]:
    found = {column: span(table[column][rows]) for column in _SPANS}
    return {column: list(values) for column, values in found.items() if values is not None}


def beside_facts(table: AgainstTable, row: int) -> Iterator[Fact]:
    """Report one weight compared with the reference's."""
    one = table.data[row]
    stored = FORMATS[int(one["reference_format"])]
    yield Fact("In the reference", f"{stored}, {table.pairs[row].there}")
    yield Fact("Cosine", f"{number(float(one['cosine']), 6)}, gain {number(float(one['gain']))}")
    if one["odd_here"]:
        yield Fact("Not finite here alone", f"{int(one['odd_here']):,}")
    floor, over = float(one["floor"]), float(one["over_floor"])
    explained = f"; its format explains {number(floor)}" if floor > 0 else ""
    times = f", {number(over)} times that" if explained and math.isfinite(over) else ""
    yield Fact("Relative error", f"{number(float(one['error']))}{explained}{times}")
    yield Fact("Equal values", share(float(one["equal"])))
    if one["worst_row"] >= 0:
        worst = number(float(one["worst_row_error"]))
        yield Fact("Worst row", f"{int(one['worst_row']):,}, relative error {worst}")
