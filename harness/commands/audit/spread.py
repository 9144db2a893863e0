"""Distribute the walk over a checkpoint's numbers to threads here or to a cluster.

A walk is cut by places (blocks and ends of the model, which have to be judged together) into pieces
of about one size. Tables of the pieces are joined in the order of the files, so that results do not
depend on which worker walked a piece. A machine of a cluster needs the checkpoint, and the
reference, under the same paths.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from degarble.harness.checkpoint.audit.against.against import measure_against, named_alike
from degarble.harness.checkpoint.audit.against.comparison import pairs_of
from degarble.harness.checkpoint.audit.numbers.numbers import measure_numbers
from degarble.harness.checkpoint.audit.table import AgainstTable, NumberTable
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.view.weight_units import units_of
from degarble.harness.checkpoint.write.workers import run_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from degarble.harness.checkpoint.write.workers import Workers

Table = TypeVar("Table", NumberTable, AgainstTable)

PIECES = 64  # each opens the checkpoint anew


class WalkPiece(NamedTuple):
    """Places that one task walks."""

    places: tuple[str, ...]
    nbytes: int


def measured(
    checkpoint: Checkpoint, path: Path, workers: Workers, advance: Callable[[int], None]
) -> NumberTable:
    """Walk the checkpoint at `path`, with so many threads or a cluster."""
    if isinstance(workers, int):
        return measure_numbers(checkpoint, workers=workers, progress=advance)
    weight_units = units_of(checkpoint)
    sizes = ((unit.place, unit.nbytes) for unit in weight_units.units)
    table = _spread(NumberTable, _Walk(path), sizes, workers, advance)
    table.unread.update(weight_units.unread)
    return table


def compared(
    checkpoint: Checkpoint,
    reference: Checkpoint,
    paths: tuple[Path, Path],
    workers: Workers,
    advance: Callable[[int], None],
) -> AgainstTable:
    """Walk a checkpoint and its reference, with so many threads or a cluster."""
    if isinstance(workers, int):
        return measure_against(checkpoint, reference, workers=workers, progress=advance)
    found = pairs_of(named_alike(checkpoint, reference), reference)
    sizes = ((pair.unit.place, pair.nbytes) for pair in found.pairs)
    table = _spread(AgainstTable, _Comparison(*paths), sizes, workers, advance)
    table.unlike, table.only_here = found.unlike, found.only_here
    table.only_there = found.only_there
    return table


def pieces(sizes: Iterable[tuple[str, int]], most: int = PIECES) -> list[WalkPiece]:
    """Cut places, given for each weight, into at most so many pieces of about one size."""
    counted: Counter[str] = Counter()
    for name, size in sizes:
        counted[name] += size
    share = counted.total() / most
    made: list[WalkPiece] = []
    names: list[str] = []
    nbytes = 0
    for name, size in counted.items():
        names.append(name)
        nbytes += size
        if nbytes > share:
            made.append(WalkPiece(tuple(names), nbytes))
            names, nbytes = [], 0
    return [*made, WalkPiece(tuple(names), nbytes)] if names else made


def _spread(
    kind: type[Table],
    work: Callable[[WalkPiece], Table],
    sizes: Iterable[tuple[str, int]],
    workers: Workers,
    advance: Callable[[int], None],
) -> Table:
    """Join the tables of all pieces, in the order in which a single walk makes the rows."""

    def done() -> Iterator[Table]:
        for piece, table in run_each(work, pieces(sizes), workers, _name):
            advance(piece.nbytes)
            yield table

    table = kind.joined(done())
    return table.chosen(sorted(range(len(table)), key=lambda row: table.unit(row).position))


@dataclass(frozen=True)
class _Walk:
    """A task that measures a piece, on any machine."""

    path: Path

    def __call__(self, piece: WalkPiece) -> NumberTable:
        with Checkpoint.survey(self.path) as checkpoint:
            return measure_numbers(checkpoint, places=piece.places)


@dataclass(frozen=True)
class _Comparison:
    """A task that compares a piece, on any machine."""

    path: Path
    reference: Path

    def __call__(self, piece: WalkPiece) -> AgainstTable:
        with Checkpoint.survey(self.path) as here, Checkpoint.open(self.reference) as there:
            return measure_against(here, there, places=piece.places)


def _name(piece: WalkPiece) -> str:
    first = piece.places[0]
    return f"{first} and {len(piece.places) - 1} more" if len(piece.places) > 1 else first
