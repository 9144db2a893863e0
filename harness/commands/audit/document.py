"""The JSON of `degarble audit --json`: an audit as plain data. docs/audit.md documents every field.

Every finding is included in full; weights are summarised by role.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from degarble.harness.checkpoint.audit.loader.proof import rank_shares
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.commands.audit.comparison import beside_document, cosines
from degarble.harness.commands.audit.kinds import kind_of
from degarble.harness.commands.audit.roles import roles_of
from degarble.harness.report.verdict import Origin

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.checkpoint.audit.loader.proof import LoaderProof
    from degarble.harness.checkpoint.audit.numbers.table import NumberTable
    from degarble.harness.commands.audit.audit import Audit

MOST_ORIGINS = 100


def audit_document(audit: Audit, command: str) -> dict[str, Any]:
    """Return an audit as plain data; `command` is the command that reproduces it."""
    about = audit.subject
    return {
        "verdict": audit.verdict,
        "origins": list(islice(_origins(audit, command), MOST_ORIGINS)),
        "cosines": [] if audit.beside is None else cosines(audit.beside),
        "sentence": audit.sentence,
        "checkpoint": about.name,
        "identity": about.identity,
        "family": about.family,
        "layout": about.layout,
        "layers": about.layers,
        "drafters": about.drafters,
        "files": about.shards,
        "tensors": about.tensors,
        "bytes": about.nbytes,
        "judged": {part.name: part.told for part in audit.judged},
        "not_judged": {part.name: part.told for part in audit.not_judged},
        "counts": {str(level): count for level, count in audit.counts.items()},
        "findings": [finding.to_json() for finding in audit.findings],
        "numbers": None if audit.table is None else _numbers(audit.table),
        "against": None if audit.beside is None else beside_document(audit.beside),
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
        "ranks": {"tp": chosen.tp, "ep": chosen.ep, "pp": chosen.pp, "proven": list(proof.ranks)},
        "counts": proof.summary(),
        "shares": [share.to_json() for share in rank_shares(proof)],
    }
