"""Rules for the cache slots that a decoding token reads and writes.

Token t has position p and an owner, a row of a table of slots. Three kinds of list:

* window: the last W positions, p - W + 1 to p; position n has column n % columns. The slot of the
  token's own row is returned as well;
* entries: every entry that the token sees: (p + 1) // ratio of them;
* chosen: the entries that a row of numbers names, -1 being none.

A slot is -1 before position 0, beyond the visible entries and beyond the table. All slots of a
token with an owner below 0 are -1, so a row of a batch can be idle. `column_of` is also traced in
the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.primitives import attention_rows as rows

WINDOW, ENTRIES, CHOSEN = KINDS = ("window", "entries", "chosen")
THREADS = 128
NONE = -1


@dataclass(frozen=True)
class SlotsProblem:
    """T tokens get W slots each from a table [B, C]; `ratio` tokens make an entry."""

    tokens: int
    width: int
    kind: str
    sequences: int
    columns: int
    ratio: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownName.among("kind of slots", self.kind, KINDS)
        rows.require_extent("tokens", self.tokens)
        for name in ("width", "sequences", "columns", "ratio"):
            rows.require_extent(f"{name} of slots", getattr(self, name), 1)
        rows.require_extent("numbers of a table of slots", self.sequences * self.columns)
        if self.kind == WINDOW and self.width > self.columns:
            raise InvalidArgument(
                "width of a window", self.width, f"at most the table's {self.columns} columns",
                "Two positions of a window would share a slot.",
            )  # fmt: skip

    @property
    def blocks(self) -> tuple[int, int]:
        """Return the thread blocks: a token, and parts of its list."""
        return self.tokens, ceil_div(self.width, THREADS)


@dataclass(frozen=True)
class SlotsForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    kind: str
    target: str


# ---- ints, tensors and kernels -------------------------------------------------------------------


def number_of(kind: str, place: Any, position: Any, width: Any) -> Any:
    """Return the position (window) or entry at a place of a list; chosen ones are read instead."""
    return position - (width - 1) + place if kind == WINDOW else place


def column_of(kind: str, number: Any, columns: Any) -> Any:
    """Return the column of a non-negative number."""
    return number % columns if kind == WINDOW else number


def end_of(kind: str, position: Any, columns: Any, ratio: Any) -> Any:
    """Return the first number that has no slot; windows end with the token itself."""
    if kind == WINDOW:
        return position + 1
    if kind == ENTRIES:
        return ops.minimum((position + 1) // ratio, columns)
    return columns
