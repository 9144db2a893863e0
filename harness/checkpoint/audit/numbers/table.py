"""Store the statistics of all weights as a table of numpy columns, and judge its rows.

Columns are arrays because a checkpoint has 150,000 weights, which as Python objects would take half
a gigabyte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.harness.checkpoint.audit.findings import FindingLocation, Findings
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.view.modules import NamingConvention
from degarble.harness.checkpoint.view.weight_units import stored_of
from degarble.harness.formats.number_formats import ScaleDirection

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from degarble.harness.checkpoint.audit.rules import AuditRule
    from degarble.harness.checkpoint.audit.statistics.tensor import (
        ScaleStatistics,
        TensorStatistics,
    )
    from degarble.harness.checkpoint.view.modules import StoredForm
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.checkpoint.view.weight_units import WeightUnit
    from degarble.harness.model.tensors import PartKind


# --------------------------------------------------------------------------------------------------
# The table: one row a weight, one numpy column a number. `rms` and `amax` include the tensor scale,
# in the direction that the weight's names imply. Tables of several workers or machines can be
# joined; `row` returns one weight as plain data.

_NAN = float("nan")
FORMATS = (
    "plain",
    "integers",
    "NVFP4",
    "MXFP4",
    "MXFP8",
    "FP8_128X128_F32",
    "FP8_128X128_UE8M0",
    "FP8_1X128_F32",
    "FP8_1X128_UE8M0",
)
CONVENTIONS = tuple(NamingConvention)

# name, type, what it says
_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("format", "i1", "index into FORMATS"),
    ("convention", "i1", "index into CONVENTIONS"),
    ("elements", "i8", "numbers"),
    ("height", "i8", "rows, of all members of a stack"),
    ("nbytes", "i8", "bytes of all its tensors"),
    ("tensor_scale", "f8", "as stored; NaN where there is none, or it is not a number"),
    ("scale_bits", "i8", "bits of the stored tensor scale, -1 where there is none"),
    ("decode_scale", "f8", "what codes are multiplied by; 1 where there is no tensor scale"),
    ("input_scale", "f8", "decode scale of the activations, NaN where there is none"),
    ("input_bits", "i8", "bits of that number as float32, -1 where there is none"),
    ("rms", "f8", "root of the mean square, finite values only"),
    ("amax", "f8", "largest magnitude, finite values only"),
    ("not_finite", "i8", "NaN and infinities among codes or values"),
    ("zeros", "i8", "zeros among codes or values"),
    ("zero_rows", "i8", "rows of zeros"),
    ("run_begin", "i8", "first row of the longest run of zero rows"),
    ("run_rows", "i8", "length of that run"),
    ("column_begin", "i8", "first of the longest run of columns that are zero in sampled rows"),
    ("run_columns", "i8", "length of that run"),
    ("code_entropy", "f8", "bits a code, or an exponent field"),
    ("byte_entropy", "f8", "bits a byte of codes or values, of up to 8"),
    ("common_byte", "f8", "share of the commonest code"),
    ("far", "f8", "share of plain values whose exponent is 40 or more from the median"),
    ("lowest", "f8", "smallest integer"),
    ("highest", "f8", "largest integer"),
    ("digest", "u8", "of the rows in order"),
    ("row_digest", "u8", "of the rows in any order"),
    ("scale_digest", "u8", "of the block scales in order"),
    ("blocks", "i8", "block scales"),
    ("scale_not_finite", "i8", "block scales that are NaN or infinite"),
    ("scale_negative", "i8", "block scales below zero"),
    ("scale_zero", "i8", "block scales that are zero"),
    ("scale_subnormal", "i8", "block scales below the normal range of their format"),
    ("scale_at_largest", "i8", "block scales that are the largest number of their format"),
    ("scale_below_largest", "i8", "block scales that are the next number below"),
    ("scale_powers", "i8", "positive block scales that are powers of two"),
    ("scale_distinct", "i8", "different positive block scales"),
    ("scale_far", "f8", "share of positive block scales 2^20 or more from their median"),
    ("scale_smallest", "f8", "smallest positive block scale"),
    ("scale_largest", "f8", "largest positive block scale"),
    ("zero_blocks", "i8", "blocks whose codes are all zero"),
    ("zero_scale", "i2", "commonest scale byte of such blocks, -1 without any"),
    ("underflown", "i8", "blocks with codes under a scale of zero"),
    ("ordinary", "i8", "blocks that are not zero, under a scale of the normal range"),
    ("top_full", "f8", "share of them that reach the largest code"),
    ("top_next", "f8", "share of them that reach the code below it, and no more"),
    ("top_low", "f8", "share of them that stay below that"),
    ("freedom", "f8", "degrees of freedom of the pairing"),
    ("pairing", "f8", "correlation of scale and code energy in a block"),
    ("order", "i1", "packing order found: index into ORDER_NAMES, -1 undecided, -2 not asked"),
    ("order_lead", "f8", "by how many standard deviations"),
    ("order_kin", "i1", "index into KINSHIPS of the reference, -1 without one"),
)
NAMES = tuple(name for name, _, _ in _COLUMNS)
DESCRIPTIONS: Mapping[str, str] = {name: text for name, _, text in _COLUMNS}
_DTYPE = np.dtype([(name, kind) for name, kind, _ in _COLUMNS])


@dataclass
class NumberTable:
    """Weights and their numbers, by row. `unread`: tensors that could not be read, and why."""

    units: list[WeightUnit] = field(default_factory=list)
    data: NDArray[Any] = field(default_factory=lambda: np.zeros(0, _DTYPE))
    unread: dict[str, str] = field(default_factory=dict)

    @classmethod
    def empty(cls, units: Iterable[WeightUnit]) -> NumberTable:
        """Return a table with an unset row for each unit."""
        listed = list(units)
        return cls(listed, np.zeros(len(listed), _DTYPE))

    @classmethod
    def joined(cls, tables: Iterable[NumberTable]) -> NumberTable:
        """Join the tables of several workers."""
        listed = list(tables)
        return cls(
            [unit for table in listed for unit in table.units],
            np.concatenate([np.zeros(0, _DTYPE), *(table.data for table in listed)]),
            {name: why for table in listed for name, why in table.unread.items()},
        )

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, column: str) -> NDArray[Any]:
        found: NDArray[Any] = self.data[column]
        return found

    def put(self, index: int, form: StoredForm, found: TensorStatistics) -> None:
        """Set one row."""
        row = np.zeros((), _DTYPE)
        values = {**_scalars(form, found), **_facts(found), **_block_facts(found)}
        for name, value in values.items():
            row[name] = value
        row["order"], row["order_kin"] = -2, -1
        row["nbytes"] = self.units[index].nbytes
        self.data[index] = row

    def row(self, index: int) -> dict[str, Any]:
        """Return one row as plain data, with the unit's name and place; None for NaN."""
        unit = self.units[index]
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
        plain["format"] = FORMATS[plain["format"]]
        plain["convention"] = str(CONVENTIONS[plain["convention"]])
        return plain

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield every row as plain data."""
        return (self.row(index) for index in range(len(self)))

    def of_format(self, *names: str) -> NDArray[np.bool_]:
        """Return a mask of the rows in one of these formats."""
        chosen: NDArray[np.bool_] = np.isin(self["format"], [FORMATS.index(n) for n in names])
        return chosen


def _scalars(form: StoredForm, found: TensorStatistics) -> dict[str, float]:
    scale, bits = _number(found.tensor_scale)
    inputs, input_bits = _number(found.input_scale)
    decode = 1.0
    if bits >= 0:
        with np.errstate(all="ignore"):
            encodes = form.direction is ScaleDirection.ENCODE
            decode = float(1.0 / np.float64(scale)) if encodes else scale
    # Magnitudes only: a negative tensor scale has a finding of its own.
    factor = abs(decode) if math.isfinite(decode) else _NAN
    is_integer = found.extremes is not None
    return {
        "format": FORMATS.index(
            form.format.name if form.format else "integers" if is_integer else "plain"
        ),
        "convention": CONVENTIONS.index(form.convention),
        "tensor_scale": scale,
        "scale_bits": bits,
        "decode_scale": decode,
        "input_scale": inputs,
        "input_bits": input_bits,
        "rms": math.sqrt(found.sum_squares / max(found.elements, 1)) * factor,
        "amax": found.amax * factor,
    }


def _number(value: float | None) -> tuple[float, int]:
    """Return a float32 and its bits; (NaN, -1) where there is none."""
    if value is None:
        return _NAN, -1
    return value, int(np.float32(value).view(np.uint32))


def _facts(found: TensorStatistics) -> dict[str, float]:
    total = max(int(found.counts.sum()), 1)
    low, high = found.extremes or (_NAN, _NAN)
    return {
        "elements": found.elements,
        "height": found.height,
        "not_finite": found.not_finite,
        "zeros": found.zeros,
        "zero_rows": found.zero_rows,
        "run_begin": found.zero_run[0],
        "run_rows": found.zero_run[1],
        "column_begin": found.column_run[0],
        "run_columns": found.column_run[1],
        "code_entropy": found.code_entropy,
        "byte_entropy": found.byte_entropy,
        "common_byte": float(found.counts.max(initial=0)) / total,
        "far": found.far if found.blocks is None else 0.0,
        "lowest": low,
        "highest": high,
        "digest": found.digest,
        "row_digest": found.row_digest,
        "scale_digest": found.scale_digest,
    }


def _block_facts(found: TensorStatistics) -> dict[str, float]:
    blocks = found.blocks
    if blocks is None:
        return dict.fromkeys(("scale_smallest", "scale_largest", "pairing"), _NAN)
    ordinary = int(blocks.tops[1:].sum())
    shares = blocks.tops / max(ordinary, 1)
    full = len(blocks.tops) - 1 if len(blocks.tops) == 8 else 126  # 127 is NaN in E4M3
    zeros = blocks.zero_scales
    return {
        **_scale_facts(blocks.scale),
        "zero_blocks": blocks.zero_blocks,
        "zero_scale": int(zeros.argmax()) if zeros.any() else -1,
        "underflown": blocks.underflown,
        "ordinary": ordinary,
        "top_full": shares[full],
        "top_next": shares[full - 1],
        "top_low": shares[1 : full - 1].sum(),
        "freedom": blocks.pairing.freedom,
        "pairing": blocks.pairing.correlation,
    }


def _scale_facts(scale: ScaleStatistics) -> dict[str, float]:
    return {
        "blocks": scale.count,
        "scale_not_finite": scale.not_finite,
        "scale_negative": scale.negative,
        "scale_zero": scale.zero,
        "scale_subnormal": scale.subnormal,
        "scale_at_largest": scale.at_largest,
        "scale_below_largest": scale.below_largest,
        "scale_powers": scale.powers_of_two,
        "scale_distinct": scale.distinct,
        "scale_far": scale.far,
        "scale_smallest": scale.smallest,
        "scale_largest": scale.largest,
    }


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
