"""Store a comparison as a table: one row for each weight that both checkpoints have.

Tables of several workers or machines can be joined; `row` returns one weight as plain data for
pages and JSON. `sketches` keep a few values of each side, by which a tensor stored under another
one's name is found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.harness.checkpoint.audit.against.rows import SKETCH
from degarble.harness.checkpoint.audit.numbers.table import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from degarble.harness.checkpoint.audit.against.pairs import Pair
    from degarble.harness.checkpoint.audit.against.rows import Compared

# name, type, what it says
_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("format", "i1", "index into FORMATS"),
    ("reference_format", "i1", "index into FORMATS"),
    ("elements", "i8", "numbers"),
    ("height", "i8", "rows"),
    ("cosine", "f8", "of all values with the reference's"),
    ("gain", "f8", "least-squares factor on the reference's values"),
    ("error", "f8", "relative: root of squared differences over squared reference values"),
    ("residual", "f8", "what of the values no factor explains: sine of the angle between them"),
    ("floor", "f8", "relative error of an ideal conversion of the reference to this format"),
    ("floor_gain", "f8", "gain of that ideal conversion"),
    ("over_floor", "f8", "error over floor, both on the rows that the floor was taken from"),
    ("equal", "f8", "share of values that are the reference's, bit for bit but for signs of zero"),
    ("worst_row", "i8", "row of the largest relative error, -1 without rows"),
    ("worst_row_error", "f8", "its relative error"),
    ("bad_rows", "i8", "rows off by half of themselves that an ideal conversion keeps"),
    ("first_bad_row", "i8", "the first of them, -1 without any"),
    ("odd_here", "i8", "values that are finite in the reference and not here"),
    ("odd_there", "i8", "values that are not finite in the reference"),
    ("energy", "f8", "sum of squares here"),
    ("reference_energy", "f8", "sum of squares in the reference"),
    ("input_scale", "f8", "decode scale of the activations, NaN where there is none"),
    ("decode_scale", "f8", "what codes are multiplied by; NaN where there is no tensor scale"),
    ("judged_elements", "i8", "numbers that were judged one by one"),
    ("misfits", "i8", "of them, not what the reference's value rounds to under the stored scale"),
    ("misfits_beyond", "i8", "of them, not if the value was FP8 before either"),
    ("misfit_rows", "i8", "rows with a misfit"),
    ("first_misfit", "i8", "the first of them, -1 without any"),
)
NAMES = tuple(name for name, _, _ in _COLUMNS)
DESCRIPTIONS: Mapping[str, str] = {name: text for name, _, text in _COLUMNS}
_DTYPE = np.dtype([(name, kind) for name, kind, _ in _COLUMNS])


@dataclass
class AgainstTable:
    """Pairs with their measurements, by row; unmatched weights by name, with the reason."""

    pairs: list[Pair] = field(default_factory=list)
    data: NDArray[Any] = field(default_factory=lambda: np.zeros(0, _DTYPE))
    sketches: NDArray[np.float16] = field(
        default_factory=lambda: np.zeros((0, 2, SKETCH), np.float16)
    )
    unlike: dict[str, str] = field(default_factory=dict)
    only_here: dict[str, str] = field(default_factory=dict)
    only_there: dict[str, str] = field(default_factory=dict)

    @classmethod
    def empty(cls, pairs: Iterable[Pair]) -> AgainstTable:
        """Return a table with an unset row for each pair."""
        listed = list(pairs)
        sketches = np.zeros((len(listed), 2, SKETCH), np.float16)
        return cls(listed, np.zeros(len(listed), _DTYPE), sketches)

    @classmethod
    def joined(cls, tables: Iterable[AgainstTable]) -> AgainstTable:
        """Join the tables of several workers."""
        listed = [cls(), *tables]
        return cls(
            [pair for table in listed for pair in table.pairs],
            np.concatenate([table.data for table in listed]),
            np.concatenate([table.sketches for table in listed]),
            {name: why for table in listed for name, why in table.unlike.items()},
            {name: why for table in listed for name, why in table.only_here.items()},
            {name: why for table in listed for name, why in table.only_there.items()},
        )

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, column: str) -> NDArray[Any]:
        found: NDArray[Any] = self.data[column]
        return found

    def put(self, index: int, found: Compared) -> None:
        """Set one row."""
        row = np.zeros((), _DTYPE)
        for name, value in found.facts().items():
            row[name] = value
        self.data[index] = row
        # Sketches are stored as float16, so each side is scaled to a largest magnitude of 1.
        largest = np.abs(np.nan_to_num(found.sketches, posinf=0, neginf=0)).max(1, keepdims=True)
        self.sketches[index] = found.sketches / np.where(largest > 0, largest, 1.0)

    def row(self, index: int) -> dict[str, Any]:
        """Return one row as plain data, with the weight's name and place; None for NaN."""
        unit = self.pairs[index].unit
        plain: dict[str, Any] = {
            "name": unit.name,
            "module": unit.module,
            "layer": unit.layer,
            "expert": unit.expert,
            "role": unit.role,
        }
        for name in NAMES:
            value = self.data[name][index].item()
            plain[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        for name in ("format", "reference_format"):
            plain[name] = FORMATS[plain[name]]
        return plain

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield every row as plain data."""
        return (self.row(index) for index in range(len(self)))
