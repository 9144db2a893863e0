"""The weights in the audit panel: a line for each role, details of selected weights, the loading.

Shown one by one are weights with a finding and the first of each role, up to a number that the page
states.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from degarble.harness.checkpoint.audit import value_rules as rules_numbers
from degarble.harness.checkpoint.audit.loader.proof import SHARE_HEADER, rank_shares, share_rows
from degarble.harness.checkpoint.audit.numbers.orders import KINSHIPS, STRONG
from degarble.harness.checkpoint.audit.numbers.table import CONVENTIONS, FORMATS
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.commands.audit.comparison import (
    beside_facts,
    beside_roles,
    error_of,
    farthest,
)
from degarble.harness.commands.audit.kinds import kind_of_name
from degarble.harness.commands.audit.roles import NOT_PACKED, order_told, roles_of
from degarble.harness.report.blocks import (
    Catalogue,
    CatalogueEntry,
    Column,
    ColumnKind,
    Details,
    Fact,
    Facts,
    Sentence,
    Table,
    Tone,
)
from degarble.harness.report.number_text import number, share
from degarble.harness.report.progress import size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.checkpoint.audit.against.comparison import AgainstTable
    from degarble.harness.checkpoint.audit.numbers.table import NumberTable
    from degarble.harness.commands.audit.audit import Audit
    from degarble.harness.commands.audit.roles import Role
    from degarble.harness.report.blocks import Block

SHOWN = 150  # weights that are shown one by one
MOST_ROLES = 200
_TONES = {Level.ERROR: Tone.BAD, Level.WARNING: Tone.WARNING, Level.NOTE: Tone.NOTE}


def weight_blocks(audit: Audit) -> list[Block]:
    """Return the blocks about weights: by role, then selected ones one by one."""
    table = audit.table
    if table is None or not len(table):
        return []
    roles = roles_of(table)
    beside = [] if audit.beside is None else [beside_roles(audit.beside)]
    return [*_dialects(audit), _roles(roles), *beside, *_chosen(audit, table, roles)]


def loader_blocks(audit: Audit) -> list[Block]:
    """Return how the loader map uses the stored tensors, and what each rank holds."""
    proof = audit.loader
    if proof is None:
        return []
    counts = proof.summary()
    facts = tuple(Fact(name.capitalize(), f"{counts[name]:,}") for name in sorted(counts))
    ranks = tuple(Column(name) for name in SHARE_HEADER)
    shares = share_rows(rank_shares(proof))
    return [
        Facts(facts, f"What the map {proof.map.name} does"),
        Table("What each rank holds", ranks, shares),
    ]


def _dialects(audit: Audit) -> Iterator[Block]:
    for finding in audit.findings:
        if finding.rule == rules_numbers.DIALECT.id:
            yield Sentence(finding.message)


def _roles(roles: list[Role]) -> Details:
    columns = (
        Column("role", ColumnKind.CODE),
        Column("weights", ColumnKind.NUMBER, 12),
        Column("formats"),
        Column("rms", ColumnKind.NUMBER, 3, "median of the weights"),
        Column("amax", ColumnKind.NUMBER, 3, "the largest of all"),
        Column("scale", ColumnKind.NUMBER, 3, "decode scale of a whole tensor, median"),
        Column("bits", ColumnKind.NUMBER, 3, "entropy of a code or an exponent, median"),
        Column("packing"),
    )
    rows = tuple(
        (
            role.name,
            role.weights,
            ", ".join(role.formats),
            _of(role, "rms", 1),
            _of(role, "amax", 2),
            _of(role, "decode_scale", 1),
            _of(role, "code_entropy", 1),
            role.order,
        )
        for role in roles
    )
    table = Table("A star stands for any number", columns, rows[:MOST_ROLES])
    more = f", the first {MOST_ROLES} shown" if len(rows) > MOST_ROLES else ""
    return Details(f"Weights by role: {len(roles):,} roles{more}", (table,), "roles")


def _of(role: Role, column: str, which: int) -> float | None:
    span = role.spans[column]
    return None if span is None else span[which]


def _chosen(audit: Audit, table: NumberTable, roles: list[Role]) -> list[Block]:
    tones = _with_findings(audit, table)
    far = _farthest(audit, table)
    rows = list(dict.fromkeys([*tones, *far, *(role.first for role in roles)]))
    beside = _beside(audit)
    entries = tuple(
        _entry(_Row(table, row, beside), tones.get(row, Tone.GOOD)) for row in rows[:SHOWN]
    )
    columns = (
        Column("finding", ColumnKind.TONE),
        Column("kind"),
        Column("format"),
        Column("layer", ColumnKind.NUMBER),
        Column("rms", ColumnKind.NUMBER, 3),
        Column("amax", ColumnKind.NUMBER, 3),
        *([] if audit.beside is None else [Column("error", ColumnKind.NUMBER, 3)]),
        Column("weight; unfold for its numbers", ColumnKind.CODE),
    )
    told = (
        f"{len(entries):,} of {len(table):,} weights: those that a finding names,"
        f"{' the farthest from the reference,' if far else ''} and the first of each role."
    )
    hidden = len(rows) - len(entries)
    more = f" {hidden:,} more of these have no room here." if hidden > 0 else ""
    return [
        Catalogue("Weights one by one", columns, entries, choices=3),
        Sentence(f"{told}{more}", Tone.NOTE),
    ]


def _with_findings(audit: Audit, table: NumberTable) -> dict[int, Tone]:
    """Return the rows that findings name, with the worst severity of each, the worst first."""
    rows: dict[str, int] = {}
    for index, unit in enumerate(table.units):
        rows.setdefault(unit.module, index)
        rows[unit.name] = index
    tones: dict[int, Tone] = {}
    for finding in audit.findings:
        for name in (finding.module, finding.tensor, (finding.tensor or "").rpartition(".")[0]):
            if name in rows:
                tones.setdefault(rows[name], _TONES[finding.level])
                break
    return tones


def _farthest(audit: Audit, table: NumberTable) -> list[int]:
    if audit.beside is None:
        return []
    rows = {unit.name: index for index, unit in enumerate(table.units)}
    there = audit.beside.table
    names = (there.pairs[row].unit.name for row in farthest(there))
    return [rows[name] for name in names if name in rows]


def _beside(audit: Audit) -> tuple[AgainstTable, dict[str, int]] | None:
    """Return the comparison's table with its rows by name."""
    if audit.beside is None:
        return None
    table = audit.beside.table
    return table, {pair.unit.name: index for index, pair in enumerate(table.pairs)}


def _entry(one: _Row, tone: Tone) -> CatalogueEntry:
    unit = one.unit
    cells = (
        str(tone),
        kind_of_name(unit.name),
        FORMATS[one.count("format")],
        unit.layer,
        *map(_or_none, map(one.value, ("rms", "amax"))),
        *one.errors(),
        unit.name,
    )
    facts = (*one.facts(), *one.facts_of_scales(), *one.facts_of_blocks(), *one.facts_beside())
    return CatalogueEntry(cells, (Facts(facts),), f"weight-{one.row}")


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


class _Row:
    """One weight of the table, described by facts."""

    def __init__(
        self, table: NumberTable, row: int, beside: tuple[AgainstTable, dict[str, int]] | None
    ) -> None:
        self.unit, self.row = table.units[row], row
        self._data, self._beside = table.data[row], beside

    def errors(self) -> Iterator[float | None]:
        """Return its error against the reference, if there is one, as a cell."""
        if self._beside is not None:
            table, rows = self._beside
            row = rows.get(self.unit.name)
            yield None if row is None else error_of(table, row)

    def facts_beside(self) -> Iterator[Fact]:
        """Describe it compared with the reference's weight."""
        if self._beside is not None and self.unit.name in self._beside[1]:
            table, rows = self._beside
            yield from beside_facts(table, rows[self.unit.name])

    def count(self, column: str) -> int:
        """Return an integer."""
        return int(self._data[column])

    def value(self, column: str) -> float:
        """Return a number."""
        return float(self._data[column])

    def facts(self) -> Iterator[Fact]:
        """Describe where it is stored, its size and its values."""
        yield Fact("Stored in", self.unit.module, code=True)
        names = CONVENTIONS[self.count("convention")]
        yield Fact("As", f"{FORMATS[self.count('format')]}, {names} names")
        elements, height = self.count("elements"), self.count("height")
        yield Fact("Size", f"{elements:,} numbers in {height:,} rows, {size(self.unit.nbytes)}")
        yield Fact("Magnitude", f"rms {self._told('rms')}, amax {self._told('amax')}")
        zeros, rows = self.count("zeros"), self.count("zero_rows")
        yield Fact(
            "Zeros",
            share(zeros / max(elements, 1)) + (f", {rows:,} rows of zeros" if rows else ""),
        )
        if self.count("not_finite"):
            yield Fact("Not finite", f"{self.count('not_finite'):,}")
        bits = f"{self._told('code_entropy')} bits a code, {self._told('byte_entropy')} a byte"
        yield Fact("Entropy", bits)

    def facts_of_scales(self) -> Iterator[Fact]:
        """Describe its tensor scale and its input scale."""
        if self.count("scale_bits") >= 0:
            stored, decodes = self._told("tensor_scale"), self._told("decode_scale")
            yield Fact("Tensor scale", f"{stored} is stored, decodes by {decodes}")
        if self.count("input_bits") >= 0:
            yield Fact("Input scale", f"decodes by {self._told('input_scale')}")

    def facts_of_blocks(self) -> Iterator[Fact]:
        """Describe its block scales, and the order of scales and codes."""
        if not self.count("blocks"):
            return
        odd = "".join(
            f", {self.count(f'scale_{name}'):,} {name.replace('_', ' ')}"
            for name in ("subnormal", "zero", "not_finite", "negative")
            if self.count(f"scale_{name}")
        )
        between = f"{self._told('scale_smallest')} to {self._told('scale_largest')}"
        different = f"{self.count('scale_distinct'):,} different"
        yield Fact("Block scales", f"{self.count('blocks'):,} from {between}, {different}{odd}")
        full, after, low = (share(self.value(f"top_{name}")) for name in ("full", "next", "low"))
        told = f"the largest code {full}, the next one {after}, neither {low}"
        yield Fact("Blocks that reach", told)
        yield Fact("Layout of scales", _layout_told(self.value("pairing")))
        order, kin = self.count("order"), self.count("order_kin")
        if order != NOT_PACKED:
            by = f", going by {KINSHIPS[kin]}" if kin >= 0 else ""
            yield Fact("Packing order", f"{order_told(order)}{by}")

    def _told(self, column: str) -> str:
        return number(self.value(column))


def _layout_told(pairing: float) -> str:
    if math.isnan(pairing):
        return "statistics do not tell"
    told = f"scales and codes correlate by {pairing:+.2f}"
    if pairing <= STRONG:
        return f"row-major: {told}"
    return f"not told with certainty: {told}, where {STRONG:+.2f} or less would"
