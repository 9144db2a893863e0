"""What the checks of numbers share: the table, where findings go, and how a place is told.

Owns `Judging`: it names the tensor that a finding is about, so that a user can open it, and shows
numbers the same way everywhere. Kept honest by suites/checkpoint/audit/numbers/test_numbers.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.harness.checkpoint.audit.rules.findings import Findings, Place
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.view.weight_units import stored_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from degarble.harness.checkpoint.audit.numbers.table import NumberTable
    from degarble.harness.checkpoint.audit.rules.rule import Rule
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.model.storage import Part

# What memory looks like that nobody wrote, or that a tool marked: bits of one float32.
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
    """A table that is judged, and what was found."""

    checkpoint: Checkpoint
    table: NumberTable
    findings: Findings = field(default_factory=Findings)

    @cached_property
    def linear(self) -> NDArray[np.bool_]:
        """Which rows are matrices that multiply activations."""
        return np.array([unit.is_linear for unit in self.table.units], np.bool_)

    def report(
        self,
        rule: Rule,
        index: int,
        message: str,
        remedy: str,
        part: Part | None = None,
        **evidence: Any,
    ) -> None:
        """Report one row; `part` says which of its tensors, `message` follows the name."""
        unit = self.table.units[index]
        tensor = None
        if part is not None and not unit.is_bare:
            entry = stored_of(self.checkpoint, unit).form.parts.get(part)
            tensor = entry.name if entry else None
        name = shown(tensor or unit.name)
        place = Place(tensor, unit.name, unit.layer)
        self.findings.add(rule, place, f"{name} {message}", remedy, **evidence)


def indices(mask: NDArray[np.bool_]) -> list[int]:
    """Return where a mask is true."""
    return [int(index) for index in np.flatnonzero(mask)]


def sentinel(bits: int) -> str:
    """Name the pattern of a float32 that nobody computed, or return nothing."""
    told = _SENTINELS.get(bits, "")
    return f" ({told})" if told else ""


def as_hex(bits: int) -> str:
    """Show the bits of a float32."""
    return f"0x{bits:08x}"


def percent(share: float) -> str:
    """Show a share, never rounded to nothing or to everything."""
    if 0 < share < 1e-4:
        return f"{share:.1e}"
    return "nearly all" if 0.9995 <= share < 1 else f"{share:.2%}"


def power(log2: float) -> str:
    """Show a factor by its binary logarithm, in words that say up or down."""
    if not math.isfinite(log2):
        return "beyond all bounds"
    return f"2^{abs(log2):.1f} too {'large' if log2 > 0 else 'small'}"
