"""Audit a checkpoint's numbers: measure every weight in one pass, then judge the table.

`measure_numbers` reads the bytes once, in the order of the files, with threads of this process.
`judge_numbers` is separate, so that tables of several machines can be joined and judged as one.
Memory is bounded: buffers of a few MiB a worker, profiles of the blocks in progress, and 500 bytes
a weight. A tensor that cannot be read is a finding.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.checkpoint.audit.numbers.checks import (
    check_codes,
    check_copies,
    check_norms,
    check_scales,
    check_values,
)
from degarble.harness.checkpoint.audit.numbers.orders import (
    KINSHIPS,
    check_dialects,
    check_layouts,
    check_orders,
)
from degarble.harness.checkpoint.audit.numbers.siblings import check_inputs, check_magnitudes
from degarble.harness.checkpoint.audit.statistics.inference import ORDER_NAMES, BlockProfiles
from degarble.harness.checkpoint.audit.statistics.tensor import PROFILE_ROWS, statistics_of
from degarble.harness.checkpoint.audit.table import CONVENTIONS, FORMATS, Judging, NumberTable, walk
from degarble.harness.checkpoint.view.weight_units import feeds_of, stored_of, units_of
from degarble.harness.formats.number_formats import ScaleDirection
from degarble.harness.model.types import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.checkpoint.audit.statistics.tensor import (
        ScaleStatistics,
        TensorStatistics,
    )
    from degarble.harness.checkpoint.view.modules import StoredForm
    from degarble.harness.checkpoint.view.stored import PositionedReader
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.checkpoint.view.weight_units import WeightUnit

_AHEAD = 64 << 20  # bytes to prefetch beyond the current unit


def measure_numbers(
    checkpoint: Checkpoint,
    *,
    workers: int = 1,
    places: Collection[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> NumberTable:
    """Measure all weights, or those of some `places` (Unit.place), with `workers` threads.

    `progress` receives the number of bytes that are done, from the thread that did them.
    """
    weight_units = units_of(checkpoint)
    chosen = [unit for unit in weight_units.units if places is None or unit.place in places]
    table = NumberTable.empty(chosen)
    table.unread.update(weight_units.unread if places is None else {})
    measuring = _Measuring(checkpoint, table)
    sizes = [unit.nbytes for unit in chosen]
    walk(sizes, [checkpoint], measuring.measure, workers=workers, progress=progress)
    return table


CHECKS = (
    check_scales,
    check_codes,
    check_values,
    check_norms,
    check_magnitudes,
    check_inputs,
    check_copies,
    check_layouts,
    check_orders,
    check_dialects,
)


def judge_numbers(checkpoint: Checkpoint, table: NumberTable) -> list[Finding]:
    """Judge the table of a whole checkpoint; return findings, the worst first."""
    judging = Judging(checkpoint, table)
    for check in CHECKS:
        check(judging)
    return judging.findings.sorted()


class _Measuring:
    """Measures units. The thread that completes a block judges its packing orders."""

    def __init__(self, checkpoint: Checkpoint, table: NumberTable) -> None:
        self._checkpoint = checkpoint
        self._table = table
        # Units of each block that are not measured yet.
        self._open = Counter(unit.place for unit in table.units)
        self._blocks: dict[str, BlockProfiles] = {}
        self._feeds = feeds_of(checkpoint.names.config) if checkpoint.names else {}
        self._by_name = checkpoint.names is None
        # Offset in each file up to which a prefetch was requested.
        self._asked: dict[Path, int] = {}
        self._lock = threading.Lock()

    def measure(self, index: int, reader: PositionedReader) -> None:
        """Measure one unit, and judge its block once that is complete."""
        unit = self._table.units[index]
        self._fetch_ahead(reader, unit)
        stored = reader.over(stored_of(self._checkpoint, unit))
        wanted = unit.is_linear or unit.kind is Kind.NORM or bool(unit.component)
        rows = NAMED_ROWS if self._by_name else PROFILE_ROWS
        tensor_statistics = statistics_of(stored, profile=wanted, rows=rows)
        self._table.put(index, unit_facts(unit, stored.form, tensor_statistics))
        with self._lock:
            block = self._blocks.setdefault(unit.place, BlockProfiles(self._feeds, self._by_name))
            block.add(index, unit, tensor_statistics)
            self._open[unit.place] -= 1
            is_complete = not self._open[unit.place]
            if is_complete:
                del self._blocks[unit.place]
        if is_complete:
            self._judge(block)

    def _judge(self, block: BlockProfiles) -> None:
        for judged in block.judge():
            row = self._table.data[judged.row]
            value = judged.inferred.value
            row["order"] = -1 if value is None else ORDER_NAMES.index(value)
            row["order_kin"] = -1 if judged.kinship is None else KINSHIPS.index(judged.kinship)
            row["order_lead"] = judged.inferred.lead

    def _fetch_ahead(self, reader: PositionedReader, unit: WeightUnit) -> None:
        """Prefetch the bytes after a unit in its file, in large steps, each once."""
        file, begin = unit.position
        with self._lock:
            asked = max(self._asked.get(file, 0), begin)
            wanted = begin + unit.nbytes + _AHEAD
            if wanted - asked < _AHEAD // 2:
                return
            self._asked[file] = wanted
        reader.ahead(file, asked, wanted)


# --------------------------------------------------------------------------------------------------
# The columns of a unit, from its statistics.

_NAN = float("nan")
NAMED_ROWS = 512  # rows of a profile where names alone tell what goes together


def unit_facts(
    unit: WeightUnit, form: StoredForm, tensor_statistics: TensorStatistics
) -> dict[str, float]:
    """Return the measurements by column; the packing order is judged with the block."""
    return {
        **_scalars(form, tensor_statistics),
        **_facts(tensor_statistics),
        **_block_facts(tensor_statistics),
        "nbytes": unit.nbytes,
        "order": -2,
        "order_kin": -1,
    }


def _scalars(form: StoredForm, tensor_statistics: TensorStatistics) -> dict[str, float]:
    scale, bits = _number(tensor_statistics.tensor_scale)
    inputs, input_bits = _number(tensor_statistics.input_scale)
    decode = 1.0
    if bits >= 0:
        with np.errstate(all="ignore"):
            encodes = form.direction is ScaleDirection.ENCODE
            decode = float(1.0 / np.float64(scale)) if encodes else scale
    # Magnitudes only: a negative tensor scale has a finding of its own.
    factor = abs(decode) if math.isfinite(decode) else _NAN
    is_integer = tensor_statistics.extremes is not None
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
        "rms": math.sqrt(tensor_statistics.sum_squares / max(tensor_statistics.elements, 1))
        * factor,
        "amax": tensor_statistics.amax * factor,
    }


def _number(value: float | None) -> tuple[float, int]:
    """Return a float32 and its bits; (NaN, -1) where there is none."""
    if value is None:
        return _NAN, -1
    return value, int(np.float32(value).view(np.uint32))


def _facts(tensor_statistics: TensorStatistics) -> dict[str, float]:
    total = max(int(tensor_statistics.counts.sum()), 1)
    low, high = tensor_statistics.extremes or (_NAN, _NAN)
    return {
        "elements": tensor_statistics.elements,
        "height": tensor_statistics.height,
        "not_finite": tensor_statistics.not_finite,
        "zeros": tensor_statistics.zeros,
        "zero_rows": tensor_statistics.zero_rows,
        "run_begin": tensor_statistics.zero_run[0],
        "run_rows": tensor_statistics.zero_run[1],
        "column_begin": tensor_statistics.column_run[0],
        "run_columns": tensor_statistics.column_run[1],
        "code_entropy": tensor_statistics.code_entropy,
        "byte_entropy": tensor_statistics.byte_entropy,
        "common_byte": float(tensor_statistics.counts.max(initial=0)) / total,
        "far": tensor_statistics.far if tensor_statistics.blocks is None else 0.0,
        "lowest": low,
        "highest": high,
        "digest": tensor_statistics.digest,
        "row_digest": tensor_statistics.row_digest,
        "scale_digest": tensor_statistics.scale_digest,
    }


def _block_facts(tensor_statistics: TensorStatistics) -> dict[str, float]:
    blocks = tensor_statistics.blocks
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
