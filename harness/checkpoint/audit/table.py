"""Walk the weights of a checkpoint with threads, and keep their measurements as numpy columns.

The audits of numbers and of differences from a reference share walk and table.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.checkpoint.audit.findings import FindingLocation, Findings
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.view.modules import NamingConvention
from degarble.harness.checkpoint.view.stored import PositionedReader
from degarble.harness.checkpoint.view.weight_units import stored_of
from degarble.harness.formats.number_formats import BLOCK_FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from degarble.harness.checkpoint.audit.rules import AuditRule
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.checkpoint.view.weight_units import WeightUnit
    from degarble.harness.model.tensors import PartKind

Member = TypeVar("Member")


# --------------------------------------------------------------------------------------------------
# The walk: one queue of the rows of a table, shared by threads.


def walk(
    sizes: Sequence[int],
    checkpoints: Sequence[Checkpoint],
    measure: Callable[..., None],
    *,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Call `measure(row, *readers)` once for each row, by `workers` threads of this process.

    Each thread opens a reader of each checkpoint. `progress` receives the size of a row when it is
    done, from the thread that did it.
    """
    if workers < 1:
        raise InvalidArgument("workers", workers, "at least 1", "Use one for each free core.")
    waiting = deque(range(len(sizes)))

    def work() -> None:
        with ExitStack() as stack:
            files = ({s.file: s.file_size for s in checkpoint.shards} for checkpoint in checkpoints)
            readers = [stack.enter_context(PositionedReader(file)) for file in files]
            while True:
                try:
                    row = waiting.popleft()  # atomic
                except IndexError:
                    return
                measure(row, *readers)
                if progress:
                    progress(sizes[row])

    if workers == 1:
        work()
        return
    with ThreadPoolExecutor(workers) as pool:
        threads = [pool.submit(work) for _ in range(workers)]
        try:
            for each in as_completed(threads):
                each.result()
        except BaseException:
            waiting.clear()  # Trap: the pool waits for its threads, which would walk on to the end
            raise


# --------------------------------------------------------------------------------------------------
# Columns: what is measured of a weight, and what each number says. `rms` and `amax` include the
# tensor scale, in the direction that the weight's names imply.

FORMATS = ("plain", "integers", *BLOCK_FORMATS)
CONVENTIONS = tuple(NamingConvention)

# name: type, what it says
NUMBER_COLUMNS: Mapping[str, tuple[str, str]] = {
    "format": ("i1", "index into FORMATS"),
    "convention": ("i1", "index into CONVENTIONS"),
    "elements": ("i8", "numbers"),
    "height": ("i8", "rows, of all members of a stack"),
    "nbytes": ("i8", "bytes of all its tensors"),
    "tensor_scale": ("f8", "as stored; NaN where there is none, or it is not a number"),
    "scale_bits": ("i8", "bits of the stored tensor scale, -1 where there is none"),
    "decode_scale": ("f8", "what codes are multiplied by; 1 where there is no tensor scale"),
    "input_scale": ("f8", "decode scale of the activations, NaN where there is none"),
    "input_bits": ("i8", "bits of that number as float32, -1 where there is none"),
    "rms": ("f8", "root of the mean square, finite values only"),
    "amax": ("f8", "largest magnitude, finite values only"),
    "not_finite": ("i8", "NaN and infinities among codes or values"),
    "zeros": ("i8", "zeros among codes or values"),
    "zero_rows": ("i8", "rows of zeros"),
    "run_begin": ("i8", "first row of the longest run of zero rows"),
    "run_rows": ("i8", "length of that run"),
    "column_begin": ("i8", "first of the longest run of columns that are zero in sampled rows"),
    "run_columns": ("i8", "length of that run"),
    "code_entropy": ("f8", "bits a code, or an exponent field"),
    "byte_entropy": ("f8", "bits a byte of codes or values, of up to 8"),
    "common_byte": ("f8", "share of the commonest code"),
    "far": ("f8", "share of plain values whose exponent is 40 or more from the median"),
    "lowest": ("f8", "smallest integer"),
    "highest": ("f8", "largest integer"),
    "digest": ("u8", "of the rows in order"),
    "row_digest": ("u8", "of the rows in any order"),
    "scale_digest": ("u8", "of the block scales in order"),
    "blocks": ("i8", "block scales"),
    "scale_not_finite": ("i8", "block scales that are NaN or infinite"),
    "scale_negative": ("i8", "block scales below zero"),
    "scale_zero": ("i8", "block scales that are zero"),
    "scale_subnormal": ("i8", "block scales below the normal range of their format"),
    "scale_at_largest": ("i8", "block scales that are the largest number of their format"),
    "scale_below_largest": ("i8", "block scales that are the next number below"),
    "scale_powers": ("i8", "positive block scales that are powers of two"),
    "scale_distinct": ("i8", "different positive block scales"),
    "scale_far": ("f8", "share of positive block scales 2^20 or more from their median"),
    "scale_smallest": ("f8", "smallest positive block scale"),
    "scale_largest": ("f8", "largest positive block scale"),
    "zero_blocks": ("i8", "blocks whose codes are all zero"),
    "zero_scale": ("i2", "commonest scale byte of such blocks, -1 without any"),
    "underflown": ("i8", "blocks with codes under a scale of zero"),
    "ordinary": ("i8", "blocks that are not zero, under a scale of the normal range"),
    "top_full": ("f8", "share of them that reach the largest code"),
    "top_next": ("f8", "share of them that reach the code below it, and no more"),
    "top_low": ("f8", "share of them that stay below that"),
    "freedom": ("f8", "degrees of freedom of the pairing"),
    "pairing": ("f8", "correlation of scale and code energy in a block"),
    "order": ("i1", "packing order found: index into ORDER_NAMES, -1 undecided, -2 not examined"),
    "order_lead": ("f8", "by how many standard deviations"),
    "order_kin": ("i1", "index into KINSHIPS of the reference, -1 without one"),
}
AGAINST_COLUMNS: Mapping[str, tuple[str, str]] = {
    "format": ("i1", "index into FORMATS"),
    "reference_format": ("i1", "index into FORMATS"),
    "elements": ("i8", "numbers"),
    "height": ("i8", "rows"),
    "cosine": ("f8", "of all values with the reference's"),
    "gain": ("f8", "least-squares factor on the reference's values"),
    "error": ("f8", "relative: root of squared differences over squared reference values"),
    "residual": ("f8", "what of the values no factor explains: sine of the angle between them"),
    "floor": ("f8", "relative error of an ideal conversion of the reference to this format"),
    "floor_gain": ("f8", "gain of that ideal conversion"),
    "over_floor": ("f8", "error over floor, both on the rows that the floor was taken from"),
    "equal": ("f8", "share of values that are the reference's, bit for bit but for signs of zero"),
    "worst_row": ("i8", "row of the largest relative error, -1 without rows"),
    "worst_row_error": ("f8", "its relative error"),
    "bad_rows": ("i8", "rows off by half of themselves that an ideal conversion keeps"),
    "first_bad_row": ("i8", "the first of them, -1 without any"),
    "odd_here": ("i8", "values that are finite in the reference and not here"),
    "odd_there": ("i8", "values that are not finite in the reference"),
    "energy": ("f8", "sum of squares here"),
    "reference_energy": ("f8", "sum of squares in the reference"),
    "input_scale": ("f8", "decode scale of the activations, NaN where there is none"),
    "decode_scale": ("f8", "what codes are multiplied by; NaN where there is no tensor scale"),
    "judged_elements": ("i8", "numbers that were judged one by one"),
    "misfits": ("i8", "of them, not what the reference's value rounds to under the stored scale"),
    "misfits_beyond": ("i8", "of them, not if the value was FP8 before either"),
    "misfit_rows": ("i8", "rows with a misfit"),
    "first_misfit": ("i8", "the first of them, -1 without any"),
}
SKETCH = 64  # values of each side of a comparison that are kept

# What the numbers of these columns are indices into.
_WORDS: Mapping[str, tuple[str, ...]] = {
    "format": FORMATS,
    "reference_format": FORMATS,
    "convention": tuple(map(str, CONVENTIONS)),
}


# --------------------------------------------------------------------------------------------------
# The tables. Columns are arrays because a checkpoint has 150,000 weights, which as Python objects
# would take half a gigabyte. Tables of several workers or machines can be joined; `row` returns one
# weight as plain data for pages and JSON.


@dataclass
class WeightTable(ABC, Generic[Member]):
    """Weights and their measurements: one row a weight, one numpy column a number."""

    COLUMNS: ClassVar[Mapping[str, tuple[str, str]]]
    DTYPE: ClassVar[np.dtype[np.void]]

    members: list[Member]
    data: NDArray[Any]

    @classmethod
    def empty(cls, members: Iterable[Member]) -> Self:
        """Return a table with an unset row for each member."""
        listed = list(members)
        return cls(listed, np.zeros(len(listed), cls.DTYPE))

    @classmethod
    def joined(cls, tables: Iterable[Self]) -> Self:
        """Join the tables of several workers."""
        weight_table = cls.empty(())
        listed = [weight_table, *tables]
        weight_table.data = np.concatenate([table.data for table in listed])
        for table in listed[1:]:
            weight_table.members += table.members
            for each in fields(cls)[2:]:
                getattr(weight_table, each.name).update(getattr(table, each.name))
        return weight_table

    def chosen(self, rows: Sequence[int]) -> Self:
        """Return a table of these rows, in this order, without what belongs to no row."""
        return type(self)([self.members[row] for row in rows], self.data[rows])

    @abstractmethod
    def unit(self, row: int) -> WeightUnit:
        """Return the weight of a row."""

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, column: str) -> NDArray[Any]:
        found: NDArray[Any] = self.data[column]
        return found

    def put(self, row: int, values: Mapping[str, Any]) -> None:
        """Set one row; columns that are not named become 0."""
        record = np.zeros((), self.DTYPE)
        for name, value in values.items():
            record[name] = value
        self.data[row] = record

    def row(self, row: int) -> dict[str, Any]:
        """Return one row as plain data, with the weight's name and place; None for NaN."""
        unit = self.unit(row)
        plain: dict[str, Any] = {
            "name": unit.name,
            "module": unit.module,
            "layer": unit.layer,
            "expert": unit.expert,
            "role": unit.role,
        }
        for name in self.COLUMNS:
            value = self.data[name][row].item()
            plain[name] = None if isinstance(value, float) and not math.isfinite(value) else value
            if name in _WORDS:
                plain[name] = _WORDS[name][value]
        return plain

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield every row as plain data."""
        return (self.row(row) for row in range(len(self)))

    def of_format(self, *names: str) -> NDArray[np.bool_]:
        """Return a mask of the rows in one of these formats."""
        chosen: NDArray[np.bool_] = np.isin(self["format"], [FORMATS.index(n) for n in names])
        return chosen


@dataclass
class NumberTable(WeightTable["WeightUnit"]):
    """Weights and their numbers. `unread`: tensors that could not be read, and why."""

    COLUMNS = NUMBER_COLUMNS
    DTYPE = np.dtype([(name, kind) for name, (kind, _) in NUMBER_COLUMNS.items()])

    unread: dict[str, str] = field(default_factory=dict)

    @property
    def units(self) -> list[WeightUnit]:
        """The weights, by row."""
        return self.members

    def unit(self, row: int) -> WeightUnit:
        """Return the weight of a row."""
        return self.members[row]


class Pair(NamedTuple):
    """A weight on both sides; `reference_name` is its name in the reference.

    `member`: its index in a stack there; `rows`: half-open row range, where it is part of a weight
    there.
    """

    unit: WeightUnit
    reference_name: str
    member: int | None
    rows: tuple[int, int] | None
    nbytes: int  # of both sides


@dataclass
class AgainstTable(WeightTable[Pair]):
    """Pairs with their measurements; unmatched weights by name, with the reason.

    The sketches keep a few values of each side, by which a tensor stored under another one's name
    is found.
    """

    COLUMNS = AGAINST_COLUMNS
    DTYPE = np.dtype(
        [
            *((name, kind) for name, (kind, _) in AGAINST_COLUMNS.items()),
            ("sketches", "f2", (2, SKETCH)),
        ]
    )

    unlike: dict[str, str] = field(default_factory=dict)
    only_here: dict[str, str] = field(default_factory=dict)
    only_there: dict[str, str] = field(default_factory=dict)

    @property
    def pairs(self) -> list[Pair]:
        """The pairs, by row."""
        return self.members

    def unit(self, row: int) -> WeightUnit:
        """Return the weight of a row, as it is here."""
        return self.members[row].unit


# --------------------------------------------------------------------------------------------------
# What all checks share: table, findings, formatting. `Judging.report` names the stored tensor of a
# finding, so that a user can open it.

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
        part: PartKind | None = None,
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
    text = _SENTINELS.get(bits, "")
    return f" ({text})" if text else ""


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
