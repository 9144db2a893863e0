"""Build the audit panel of a checkpoint's HTML page: map of layers, findings, weights, loading.

Every part is bounded; what is omitted for its number is counted in a sentence.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from degarble.harness.checkpoint.audit import value_rules as rules_numbers
from degarble.harness.checkpoint.audit.findings import RULES
from degarble.harness.checkpoint.audit.loader.proof import SHARE_HEADER, rank_shares, share_rows
from degarble.harness.checkpoint.audit.numbers.orders import KINSHIPS, STRONG
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.audit.table import CONVENTIONS, FORMATS
from degarble.harness.commands.audit.audit import KINDS, by_rule, kind_of, kind_of_name, places
from degarble.harness.commands.audit.document import (
    NOT_PACKED,
    comparison_by_role,
    comparison_facts,
    error_of,
    farthest,
    order_text,
    origin_of,
    roles_of,
)
from degarble.harness.report.blocks import (
    Catalogue,
    CatalogueEntry,
    Column,
    ColumnKind,
    Details,
    Fact,
    Facts,
    Mark,
    Sentence,
    Table,
    Tone,
    ToneMap,
)
from degarble.harness.report.number_text import number, share
from degarble.harness.report.page import Page, PageFinding, Panel, PanelKind
from degarble.harness.report.page import Subject as PageSubject
from degarble.harness.report.progress import size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.checkpoint.audit.table import AgainstTable, NumberTable
    from degarble.harness.commands.audit.audit import Audit, BrokenRule
    from degarble.harness.commands.audit.document import RoleSummary
    from degarble.harness.report.blocks import Block
    from degarble.harness.report.page import Provenance


# --------------------------------------------------------------------------------------------------
# Weights and loading: a line for each role, details of selected weights. Shown one by one are
# weights with a finding and the first of each role, up to a number that the page states.

SHOWN_WEIGHTS = 150  # weights that are shown one by one
MOST_ROLES = 200
_TONES = {Level.ERROR: Tone.BAD, Level.WARNING: Tone.WARNING, Level.NOTE: Tone.NOTE}


def weight_blocks(audit: Audit) -> list[Block]:
    """Return the blocks about weights: by role, then selected ones one by one."""
    table = audit.table
    if table is None or not len(table):
        return []
    roles = roles_of(table)
    beside = [] if audit.comparison is None else [comparison_by_role(audit.comparison)]
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


def _roles(roles: list[RoleSummary]) -> Details:
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


def _of(role: RoleSummary, column: str, which: int) -> float | None:
    span = role.spans[column]
    return None if span is None else span[which]


def _chosen(audit: Audit, table: NumberTable, roles: list[RoleSummary]) -> list[Block]:
    tones = _with_findings(audit, table)
    far = _farthest(audit, table)
    rows = list(dict.fromkeys([*tones, *far, *(role.first for role in roles)]))
    beside = _comparison(audit)
    entries = tuple(
        _entry(_Row(table, row, beside), tones.get(row, Tone.GOOD)) for row in rows[:SHOWN_WEIGHTS]
    )
    columns = (
        Column("finding", ColumnKind.TONE),
        Column("kind"),
        Column("format"),
        Column("layer", ColumnKind.NUMBER),
        Column("rms", ColumnKind.NUMBER, 3),
        Column("amax", ColumnKind.NUMBER, 3),
        *([] if audit.comparison is None else [Column("error", ColumnKind.NUMBER, 3)]),
        Column("weight; unfold for its numbers", ColumnKind.CODE),
    )
    text = (
        f"{len(entries):,} of {len(table):,} weights: those that a finding names,"
        f"{' the farthest from the reference,' if far else ''} and the first of each role."
    )
    hidden = len(rows) - len(entries)
    more = f" {hidden:,} more of these have no room here." if hidden > 0 else ""
    shown = (
        Catalogue("Weights one by one", columns, entries, choices=3),
        Sentence(f"{text}{more}", Tone.NOTE),
    )
    if tones:
        return list(shown)
    return [Details(f"Weights one by one: no finding names one, {len(entries):,} shown", shown)]


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
    if audit.comparison is None:
        return []
    rows = {unit.name: index for index, unit in enumerate(table.units)}
    there = audit.comparison.table
    names = (there.pairs[row].unit.name for row in farthest(there))
    return [rows[name] for name in names if name in rows]


def _comparison(audit: Audit) -> tuple[AgainstTable, dict[str, int]] | None:
    """Return the comparison's table with its rows by name."""
    if audit.comparison is None:
        return None
    table = audit.comparison.table
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
        self._data, self._comparison = table.data[row], beside

    def errors(self) -> Iterator[float | None]:
        """Return its error against the reference, if there is one, as a cell."""
        if self._comparison is not None:
            table, rows = self._comparison
            row = rows.get(self.unit.name)
            yield None if row is None else error_of(table, row)

    def facts_beside(self) -> Iterator[Fact]:
        """Describe it compared with the reference's weight."""
        if self._comparison is not None and self.unit.name in self._comparison[1]:
            table, rows = self._comparison
            yield from comparison_facts(table, rows[self.unit.name])

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
        yield Fact("Magnitude", f"rms {self._cell('rms')}, amax {self._cell('amax')}")
        zeros, rows = self.count("zeros"), self.count("zero_rows")
        yield Fact(
            "Zeros",
            share(zeros / max(elements, 1)) + (f", {rows:,} rows of zeros" if rows else ""),
        )
        if self.count("not_finite"):
            yield Fact("Not finite", f"{self.count('not_finite'):,}")
        bits = f"{self._cell('code_entropy')} bits a code, {self._cell('byte_entropy')} a byte"
        yield Fact("Entropy", bits)

    def facts_of_scales(self) -> Iterator[Fact]:
        """Describe its tensor scale and its input scale."""
        if self.count("scale_bits") >= 0:
            stored, decodes = self._cell("tensor_scale"), self._cell("decode_scale")
            yield Fact("Tensor scale", f"{stored} is stored, decodes by {decodes}")
        if self.count("input_bits") >= 0:
            yield Fact("Input scale", f"decodes by {self._cell('input_scale')}")

    def facts_of_blocks(self) -> Iterator[Fact]:
        """Describe its block scales, and the order of scales and codes."""
        if not self.count("blocks"):
            return
        odd = "".join(
            f", {self.count(f'scale_{name}'):,} {name.replace('_', ' ')}"
            for name in ("subnormal", "zero", "not_finite", "negative")
            if self.count(f"scale_{name}")
        )
        between = f"{self._cell('scale_smallest')} to {self._cell('scale_largest')}"
        different = f"{self.count('scale_distinct'):,} different"
        yield Fact("Block scales", f"{self.count('blocks'):,} from {between}, {different}{odd}")
        full, after, low = (share(self.value(f"top_{name}")) for name in ("full", "next", "low"))
        text = f"the largest code {full}, the next one {after}, neither {low}"
        yield Fact("Blocks that reach", text)
        yield Fact("Layout of scales", _layout_text(self.value("pairing")))
        order, kin = self.count("order"), self.count("order_kin")
        if order != NOT_PACKED:
            by = f", going by {KINSHIPS[kin]}" if kin >= 0 else ""
            yield Fact("Packing order", f"{order_text(order)}{by}")

    def _cell(self, column: str) -> str:
        return number(self.value(column))


def _layout_text(pairing: float) -> str:
    if math.isnan(pairing):
        return "statistics do not show it"
    text = f"scales and codes correlate by {pairing:+.2f}"
    if pairing <= STRONG:
        return f"row-major: {text}"
    return f"not certain: {text}, where {STRONG:+.2f} or less would"


SHOWN_FINDINGS = 250  # findings on the page; all of them are in the JSON
MOST_COLUMNS = 200  # layers of the map
_FIRST = 5  # rules on the first screen
_TEXT = 400  # characters of one piece of evidence
TONES = {Level.ERROR: Tone.BAD, Level.WARNING: Tone.WARNING, Level.NOTE: Tone.NOTE}
_LEGEND = (
    (Tone.BAD, "error"),
    (Tone.WARNING, "warning"),
    (Tone.NOTE, "note"),
    (Tone.GOOD, "nothing found"),
)


def audit_page(audit: Audit, provenance: Provenance) -> Page:
    """Return the page of an audit."""
    errors = [finding for finding in audit.findings if finding.level is Level.ERROR]
    return Page(
        subject=PageSubject(audit.subject.name, "Checkpoint", audit.subject.identity),
        provenance=provenance,
        verdict=audit.verdict,
        sentence=audit.sentence,
        findings=tuple(
            _first_screen(rule, provenance.command) for rule in by_rule(errors)[:_FIRST]
        ),
        panels=(audit_panel(audit),),
        word=audit.headline,
    )


def audit_panel(audit: Audit) -> Panel:
    """Return the panel alone, for a page that other runs have begun."""
    blocks: list[Block] = [
        _facts(audit),
        _parts(audit),
        *_map(audit),
        *_findings(audit),
        *loader_blocks(audit),
        *weight_blocks(audit),
    ]
    return Panel(PanelKind.AUDIT, audit.sentence, audit.verdict, tuple(blocks), audit.headline)


def _first_screen(broken: BrokenRule, command: str) -> PageFinding:
    finding = broken.first
    return PageFinding(
        f"Not so: {RULES[finding.rule].statement}",
        finding.remedy,
        origin_of(finding, command),
        command,
        f"Broken {broken.extent}." if broken.extent else "",
    )


def _facts(audit: Audit) -> Facts:
    about, counts = audit.subject, audit.counts
    drafters = f" and {places(about.drafters, 'drafter')}" if about.drafters else ""
    return Facts(
        (
            Fact("Model", f"{about.family}, {places(about.layers, 'layer')}{drafters}"),
            Fact("Layout", about.layout),
            Fact("Tensors", f"{about.tensors:,} in {places(about.shards, 'file')}"),
            Fact("Size", size(about.nbytes)),
            Fact("Findings", ", ".join(places(counts[level], str(level)) for level in Level)),
            *([] if audit.content is None else [Fact("Content hash", audit.content)]),
        ),
        "What was looked at",
    )


def _parts(audit: Audit) -> Table:
    columns = (Column("part"), Column("judged"), Column("what, or why not"))
    rows = tuple((part.name, "yes" if part.judged else "no", part.text) for part in audit.parts)
    return Table("What was judged, and what not", columns, rows)


def _map(audit: Audit) -> list[Block]:
    """Return kinds by layers, coloured by the worst finding."""
    about = audit.subject
    worst: dict[tuple[int | None, str], Mark] = {}
    for index, finding in enumerate(audit.findings):  # the worst come first
        kind = kind_of(finding)
        spread: list[tuple[int | None, int]] = [*finding.by_layer.items()]
        for layer, count in spread or [(finding.layer, finding.count)]:
            mark = worst.get((layer, kind)) or Mark(TONES[finding.level], 0, _anchor(index))
            worst[layer, kind] = Mark(mark.tone, mark.count + count, mark.anchor)
    for key in about.places:
        worst.setdefault(key, Mark(Tone.GOOD))
    numbered = sorted({layer for layer, _ in worst if layer is not None})
    layers: list[int | None] = [*numbered[:MOST_COLUMNS], None]
    kinds = [kind for kind in KINDS if any((layer, kind) in worst for layer in layers)]
    if not kinds:
        return []
    blocks: list[Block] = [
        ToneMap(
            caption="The worst finding of each layer, by kind of tensor",
            row_title="kind",
            column_title="layer",
            row_labels=tuple(kinds),
            column_labels=tuple(_layer_text(layer, about.layers) for layer in layers),
            marks=tuple(tuple(worst.get((layer, kind)) for layer in layers) for kind in kinds),
            legend=_LEGEND,
        )
    ]
    hidden = len(numbered) - MOST_COLUMNS
    if hidden > 0:
        text = f"The map has {MOST_COLUMNS} layers of {len(numbered):,}; findings of all follow."
        blocks.append(Sentence(text, Tone.NOTE))
    return blocks


def _layer_text(layer: int | None, layers: int) -> str:
    if layer is None:
        return "all"
    return f"d{layer - layers}" if layers and layer >= layers else str(layer)


def _anchor(number: int) -> str:
    return f"finding-{number}" if number < SHOWN_FINDINGS else ""


def _findings(audit: Audit) -> list[Block]:
    if not audit.findings:
        return [Sentence("No rule is broken.", Tone.GOOD)]
    entries = tuple(
        CatalogueEntry(
            (
                str(TONES[finding.level]),
                kind_of(finding),
                finding.rule,
                finding.layer,
                finding.count,
                finding.tensor or finding.module or "the checkpoint",
            ),
            _explained(finding),
            _anchor(index),
        )
        for index, finding in enumerate(audit.findings[:SHOWN_FINDINGS])
    )
    columns = (
        Column("level", ColumnKind.TONE),
        Column("kind"),
        Column("rule", ColumnKind.CODE),
        Column("layer", ColumnKind.NUMBER),
        Column("places", ColumnKind.NUMBER, 12),
        Column("where; unfold for evidence and remedy", ColumnKind.CODE),
    )
    blocks: list[Block] = [Catalogue("Findings, the worst first", columns, entries, choices=3)]
    hidden = len(audit.findings) - len(entries)
    if hidden > 0:
        text = f"{hidden:,} of {len(audit.findings):,} findings are in the JSON alone."
        blocks.append(Sentence(text, Tone.NOTE))
    return blocks


def _explained(finding: Finding) -> tuple[Block, ...]:
    rule = RULES[finding.rule]
    facts = [
        Fact("Expected", rule.statement),
        Fact("Remedy", finding.remedy),
        *(Fact(str(key), _shown(value), code=True) for key, value in finding.evidence.items()),
        Fact("Rule", f"{rule.id}, level {rule.level}: {rule.source}"),
    ]
    return (Sentence(finding.message), Facts(tuple(facts)))


def _shown(value: object) -> str:
    if value is None:
        return "not a number"
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ", ".join(value)[:_TEXT]
    return number(value) if isinstance(value, float) else str(value)[:_TEXT]
