"""Write an audit as plain data for `degarble audit --json`, with weights summarised by role.

Every finding is included in full. docs/audit.md documents every field.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.harness.checkpoint.audit.loader.proof import rank_shares
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.audit.statistics.inference import ORDER_NAMES
from degarble.harness.checkpoint.audit.table import FORMATS
from degarble.harness.commands.audit.audit import kind_of, kind_of_name
from degarble.harness.report.blocks import Column, ColumnKind, Details, Fact, Table
from degarble.harness.report.number_text import number, share
from degarble.harness.report.verdict import Origin

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.checkpoint.audit.loader.proof import LoaderProof
    from degarble.harness.checkpoint.audit.table import AgainstTable, NumberTable
    from degarble.harness.commands.audit.audit import Audit, ReferenceComparison


# --------------------------------------------------------------------------------------------------
# Weights by role: 300,000 tensors become about fifty lines. A role's summary has the number of
# weights, their formats, and the range of each measured number.

# The reported columns of a role: smallest, median, largest of its weights' finite numbers.
SPANS = (
    "rms", "amax", "decode_scale", "input_scale", "scale_smallest", "scale_largest",
    "code_entropy", "byte_entropy", "top_full", "pairing",
)  # fmt: skip
NOT_PACKED, _UNDECIDED = -2, -1  # in the column `order`
_WHERE_PRESENT = {"decode_scale": "scale_bits", "input_scale": "input_bits"}

Span = tuple[float, float, float] | None


@dataclass(frozen=True)
class RoleSummary:
    """Weights whose names differ in numbers alone. `first` is the row of one of them."""

    name: str
    kind: str
    weights: int
    formats: tuple[str, ...]
    nbytes: int
    spans: Mapping[str, Span]
    order: str
    first: int


def roles_of(table: NumberTable) -> list[RoleSummary]:
    """Summarise a table by role, in the order of names."""
    rows: dict[str, list[int]] = defaultdict(list)
    for index, unit in enumerate(table.units):
        rows[unit.role].append(index)
    return [_role(table, name, np.array(rows[name])) for name in sorted(rows)]


def _role(table: NumberTable, name: str, rows: NDArray[np.int64]) -> RoleSummary:
    data = table.data[rows]
    first = int(rows[0])
    formats = np.unique(data["format"])
    return RoleSummary(
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
    told = {order_text(int(each)) for each in np.unique(orders) if each != NOT_PACKED}
    return " or ".join(sorted(told))


def order_text(order: int) -> str:
    """Return the name of a packing order of the table."""
    if order == NOT_PACKED:
        return "not packed"
    return "undecided" if order == _UNDECIDED else ORDER_NAMES[order]


# --------------------------------------------------------------------------------------------------
# A comparison with a reference: by role, and the farthest weights one by one. Listed one by one are
# the weights whose error exceeds what their format explains by most, and those with the largest
# error.

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


def comparison_document(beside: ReferenceComparison) -> dict[str, Any]:
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


def cosines(beside: ReferenceComparison) -> list[dict[str, Any]]:
    """Return the cosines of the farthest weights, in the form of every `--json`."""
    rows = (beside.table.row(row) for row in farthest(beside.table))
    return [{"site": row["name"], "layer": row["layer"], "cosine": row["cosine"]} for row in rows]


def comparison_by_role(beside: ReferenceComparison) -> Details:
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
    return Details(f"Compared with {beside.name}, by role", (inner,), "beside-roles")


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


def comparison_facts(table: AgainstTable, row: int) -> Iterator[Fact]:
    """Report one weight compared with the reference's."""
    one = table.data[row]
    stored = FORMATS[int(one["reference_format"])]
    yield Fact("In the reference", f"{stored}, {table.pairs[row].reference_name}")
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


MOST_ORIGINS = 100


def audit_document(audit: Audit, command: str) -> dict[str, Any]:
    """Return an audit as plain data; `command` is the command that reproduces it."""
    about = audit.subject
    return {
        "verdict": audit.verdict,
        "headline": audit.headline,
        "origins": list(islice(_origins(audit, command), MOST_ORIGINS)),
        "cosines": [] if audit.comparison is None else cosines(audit.comparison),
        "sentence": audit.sentence,
        "checkpoint": about.name,
        "identity": about.identity,
        "content": audit.content,
        "family": about.family,
        "layout": about.layout,
        "layers": about.layers,
        "drafters": about.drafters,
        "files": about.shards,
        "tensors": about.tensors,
        "bytes": about.nbytes,
        "judged": {part.name: part.text for part in audit.judged},
        "not_judged": {part.name: part.text for part in audit.not_judged},
        "counts": {str(level): count for level, count in audit.counts.items()},
        "findings": [finding.to_json() for finding in audit.findings],
        "numbers": None if audit.table is None else _numbers(audit.table),
        "against": None if audit.comparison is None else comparison_document(audit.comparison),
        "loader": None if audit.loader is None else _loader(audit.loader),
    }


def origin_of(finding: Finding, command: str) -> Origin:
    """Return a finding in the form of the origin of a difference."""
    return Origin(
        layer=finding.layer,
        component=kind_of(finding),
        site=finding.tensor or finding.module or "checkpoint",
        where={"rule": finding.rule, "places": finding.count},
        evidence=finding.message,
        reproducer=command,
    )


def _origins(audit: Audit, command: str) -> Iterator[Origin]:
    for finding in audit.findings:
        if finding.level is Level.ERROR:
            yield origin_of(finding, command)


def _numbers(table: NumberTable) -> dict[str, Any]:
    return {
        "weights": len(table),
        "unread": dict(table.unread),
        "roles": [
            {
                "role": role.name,
                "kind": role.kind,
                "weights": role.weights,
                "formats": list(role.formats),
                "bytes": role.nbytes,
                **{name: list(span) for name, span in role.spans.items() if span},
                "order": role.order,
            }
            for role in roles_of(table)
        ],
    }


def _loader(proof: LoaderProof) -> dict[str, Any]:
    chosen = proof.map
    return {
        "map": chosen.name,
        "origin": "" if chosen.derived is None else chosen.derived.origin,
        "ranks": {"tp": chosen.tp, "ep": chosen.ep, "pp": chosen.pp, "proven": list(proof.ranks)},
        "counts": proof.summary(),
        "shares": [share.to_json() for share in rank_shares(proof)],
    }
