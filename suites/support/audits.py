"""Measure and judge a whole checkpoint in one call; a command does both over many processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.checkpoint.audit.against.against import judge_against, measure_against
from degarble.harness.checkpoint.audit.numbers.numbers import judge_numbers, measure_numbers

if TYPE_CHECKING:
    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.checkpoint.audit.table import AgainstTable, NumberTable
    from degarble.harness.checkpoint.view.view import Checkpoint


class NumbersAudit(NamedTuple):
    """Findings, the worst first, and their table."""

    findings: list[Finding]
    table: NumberTable


class AgainstAudit(NamedTuple):
    """Findings, the worst first, and their table."""

    findings: list[Finding]
    table: AgainstTable


def audit_numbers(checkpoint: Checkpoint) -> NumbersAudit:
    """Measure a checkpoint and judge its numbers."""
    table = measure_numbers(checkpoint)
    return NumbersAudit(judge_numbers(checkpoint, table), table)


def audit_against(checkpoint: Checkpoint, reference: Checkpoint) -> AgainstAudit:
    """Compare a checkpoint with the reference and judge the differences."""
    table = measure_against(checkpoint, reference)
    return AgainstAudit(judge_against(checkpoint, reference, table), table)
