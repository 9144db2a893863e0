"""Generate the rules in docs/audit.md from the tables that the audit uses.

`python -m degarble.suites.house.pages.audit_rules` writes the last part of that page, as does
`make docs`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from degarble.harness.checkpoint.audit.findings import RULES
from degarble.suites.house.repository import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.checkpoint.audit.rules import AuditRule

PAGE = ROOT / "docs" / "audit.md"
HEAD = "## The rules\n"
_TEXT = """
Written by `make docs` from the rules themselves. Each says what must hold, and who says so or what
happened where it did not: `fault B...` and `fault family M...` are entries of the collection of
public reports about garbled low-precision output that this project began with, `field report A` the
deployment that started it.
"""
_AREAS = {
    "files": "files, index and configs, before any tensor is looked at",
    "structure": "which tensors are there, in which shapes",
    "scales": "scales that belong to codes",
    "partners": "what engines fuse",
    "config": "what the quantisation config promises",
    "names": "what the parameters are called",
    "numbers": "stored numbers, by themselves and compared with their siblings",
    "against": "stored numbers compared with a reference, with `--against`",
    "loader": "where bytes go, with `--loader`",
}


def section(rules: Mapping[str, AuditRule] = RULES) -> str:
    """Write the whole part of the page."""
    areas: dict[str, list[AuditRule]] = defaultdict(list)
    for rule in rules.values():
        areas[rule.id.partition(".")[0]].append(rule)
    parts = [HEAD, _TEXT]
    for area, members in areas.items():
        parts.append(f"\n### {area}: {_AREAS[area]}\n\n")
        parts.append("| rule | level | what must hold | source |\n|---|---|---|---|\n")
        parts += [
            f"| `{rule.id}` | {rule.level} | {_cell(rule.statement)} | {_cell(rule.source)} |\n"
            for rule in members
        ]
    return "".join(parts)


def with_rules(page: str) -> str:
    """Put the rules into a page, in the place of those that it has."""
    return page.partition(HEAD)[0] + section()


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(with_rules(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
