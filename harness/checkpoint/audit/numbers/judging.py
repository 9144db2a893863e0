"""Provide what all checks of numbers share: the table, the findings and the formatting of numbers.

`Judging.report` names the stored tensor of a finding, so that a user can open it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.harness.checkpoint.audit.findings import FindingLocation, Findings
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.view.weight_units import stored_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from degarble.harness.checkpoint.audit.numbers.table import NumberTable
    from degarble.harness.checkpoint.audit.rules import AuditRule
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.model.storage import Part

# Bits of a float32 in memory that was never written, or that a tool marked.
_SENTINELS = {
    0x7F7F7F7F: "every byte 0x7F",
    0xFFFFFFFF: "every bit set",
    0xCDCDCDCD: "uninitialised, as debug allocators mark it",
    0xABABABAB: "uninitialised, as debug allocators mark it",
    0xDEADBEEF: "a marker",
    0x7FC00000: "the default NaN",
}


@dataclass
class Judging:
    """A table under judgement, with its findings."""

    checkpoint: Checkpoint
    table: NumberTable
    findings: Findings = field(default_factory=Findings)

    @cached_property
    def linear(self) -> NDArray[np.bool_]:
        """Mask of the rows that are linears."""
        return np.array([unit.is_linear for unit in self.table.units], np.bool_)

    def report(
        self,
        rule: AuditRule,
        index: int,
        message: str,
        remedy: str,
        part: Part | None = None,
        **evidence: Any,
    ) -> None:
        """Report one row; `part` selects one of its tensors, `message` follows the name."""
        unit = self.table.units[index]
        tensor = None
        if part is not None and not unit.is_bare:
            entry = stored_of(self.checkpoint, unit).form.parts.get(part)
            tensor = entry.name if entry else None
        name = shown(tensor or unit.name)
        place = FindingLocation(tensor, unit.name, unit.layer)
        self.findings.add(rule, place, f"{name} {message}", remedy, **evidence)


def indices(mask: NDArray[np.bool_]) -> list[int]:
    """Return the indices at which a mask is true."""
    return [int(index) for index in np.flatnonzero(mask)]


def sentinel(bits: int) -> str:
    """Describe a float32 bit pattern that marks unwritten memory; empty for others."""
    told = _SENTINELS.get(bits, "")
    return f" ({told})" if told else ""


def as_hex(bits: int) -> str:
    """Format the bits of a float32."""
    return f"0x{bits:08x}"


def percent(share: float) -> str:
    """Format a share, never rounded to 0 % or 100 %."""
    if 0 < share < 1e-4:
        return f"{share:.1e}"
    return "nearly all" if 0.9995 <= share < 1 else f"{share:.2%}"


def power(log2: float) -> str:
    """Format a factor given by its log2, as too large or too small."""
    if not math.isfinite(log2):
        return "beyond all bounds"
    return f"2^{abs(log2):.1f} too {'large' if log2 > 0 else 'small'}"
