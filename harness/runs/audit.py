"""The audit of a checkpoint's files as one run: what was looked at, what was found, the verdict.

Owns the order of the steps and the identity of what was audited. This version looks at structure:
files, names, shapes, dtypes, partners, promises of the quantisation config. Values of scales and
codes are not judged yet, and every text of this run says so.
Refuses what cannot be opened at all; everything else becomes a finding.
What keeps it honest: suites/runs/test_audit.py, with healthy and spoilt checkpoints.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.checkpoint.rules import Level
from degarble.harness.checkpoint.structure import audit_structure
from degarble.harness.checkpoint.view import Checkpoint
from degarble.harness.record.verdict import Verdict

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.checkpoint.findings import Finding

NOT_JUDGED = "The values of scales and codes are not judged by this version."


@dataclass(frozen=True)
class Audit:
    """What was found in one checkpoint. `identity` hashes its config and every header entry."""

    name: str
    identity: str
    family: str
    layout: str
    layers: int
    shards: int
    tensors: int
    nbytes: int
    findings: tuple[Finding, ...]

    @property
    def counts(self) -> dict[Level, int]:
        """Places found, by level; a finding may stand for many."""
        found: Counter[Level] = Counter()
        for finding in self.findings:
            found[finding.level] += finding.count
        return {level: found[level] for level in Level}

    @property
    def verdict(self) -> Verdict:
        """Errors alone decide."""
        return Verdict.DIFFERS if self.counts[Level.ERROR] else Verdict.AGREES

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        counts = self.counts
        if not counts[Level.ERROR]:
            rest = f"; {_places(counts[Level.WARNING], 'warning')}" if counts[Level.WARNING] else ""
            return f"The structure of all {self.tensors:,} tensors is as the config implies{rest}."
        errors = [each for each in self.findings if each.level is Level.ERROR]
        broken = len({each.rule for each in errors})
        where = errors[0].tensor or errors[0].module or "the checkpoint"
        rules = "one rule" if broken == 1 else f"{broken} rules"
        told = _places(counts[Level.ERROR], "error")
        return f"{told} against {rules}, the first at {where}."

    def document(self) -> dict[str, Any]:
        """The machine's view of it."""
        return {
            "verdict": self.verdict,
            "origins": [],
            "cosines": [],
            "checkpoint": self.name,
            "identity": self.identity,
            "layout": self.layout,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "judged": ["structure"],
            "counts": {str(level): count for level, count in self.counts.items()},
            "findings": [finding.to_json() for finding in self.findings],
        }


def _places(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def audit(path: Path) -> Audit:
    """Look at the files of the checkpoint in `path`."""
    with Checkpoint.survey(path) as checkpoint:
        findings = tuple(audit_structure(checkpoint))
        model = checkpoint.model
        return Audit(
            name=path.resolve().name,
            identity=_identity(checkpoint),
            family=model.family if model else "unknown",
            layout=str(checkpoint.layout),
            layers=len(model.blocks) if model else 0,
            shards=len(checkpoint.shards),
            tensors=len(checkpoint.entries),
            nbytes=sum(entry.nbytes for entry in checkpoint.entries.values()),
            findings=findings,
        )


def _identity(checkpoint: Checkpoint) -> str:
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
    for name in sorted(checkpoint.entries):
        entry = checkpoint.entries[name]
        digest.update(f"\0{name}\0{entry.dtype}\0{entry.shape}\0{entry.file.name}".encode())
    return f"sha256:{digest.hexdigest()}"
