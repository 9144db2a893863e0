"""The walk over the numbers of a checkpoint, by threads here or by the machines of a cluster.

Owns how the walk is cut: by places (blocks and ends of the model, which are judged together), into
pieces of about one size. Tables of the pieces are joined in the order of the files, so that what is
judged does not depend on who walked. A machine of a cluster has to see the checkpoint under the
same path.
What keeps it honest: suites/runs/test_audit_spread.py: joined tables are the table of one walk.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.checkpoint.number_table import NumberTable
from degarble.harness.checkpoint.numbers import measure_numbers
from degarble.harness.checkpoint.view import Checkpoint
from degarble.harness.checkpoint.weight_units import units_of
from degarble.harness.checkpoint.worker_pool import run_each

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from degarble.harness.checkpoint.worker_pool import Workers

PIECES = 64  # each opens the checkpoint anew


class Piece(NamedTuple):
    """Places that one task walks."""

    places: tuple[str, ...]
    nbytes: int


def measured(
    checkpoint: Checkpoint, path: Path, workers: Workers, advance: Callable[[int], None]
) -> NumberTable:
    """Walk the checkpoint at `path`, by so many threads or by a cluster."""
    if isinstance(workers, int):
        return measure_numbers(checkpoint, workers=workers, progress=advance)
    found = units_of(checkpoint)
    sizes: Counter[str] = Counter()
    for unit in found.units:
        sizes[unit.place] += unit.nbytes
    tables = []
    for piece, table in run_each(_Walk(path), pieces(sizes), workers, _name):
        tables.append(table)
        advance(piece.nbytes)
    return in_file_order(NumberTable.joined(tables), found.unread)


def pieces(sizes: Mapping[str, int], most: int = PIECES) -> list[Piece]:
    """Cut places into at most so many pieces; a place larger than its share is one by itself."""
    share = sum(sizes.values()) / most
    made: list[Piece] = []
    names: list[str] = []
    nbytes = 0
    for name, size in sizes.items():
        names.append(name)
        nbytes += size
        if nbytes > share:
            made.append(Piece(tuple(names), nbytes))
            names, nbytes = [], 0
    return [*made, Piece(tuple(names), nbytes)] if names else made


def in_file_order(table: NumberTable, unread: Mapping[str, str]) -> NumberTable:
    """Sort rows as one walk would have made them."""
    order = sorted(range(len(table)), key=lambda row: table.units[row].position)
    units = [table.units[row] for row in order]
    return NumberTable(units, table.data[order], {**table.unread, **unread})


@dataclass(frozen=True)
class _Walk:
    """Measures a piece, on whichever machine."""

    path: Path

    def __call__(self, piece: Piece) -> NumberTable:
        with Checkpoint.survey(self.path) as checkpoint:
            return measure_numbers(checkpoint, places=piece.places)


def _name(piece: Piece) -> str:
    first = piece.places[0]
    return f"{first} and {len(piece.places) - 1} more" if len(piece.places) > 1 else first
