"""Plant faults in the grouped experts by replacing a function while kernels are traced.

The kernels contain none of it. A whole call and a faulty one go through the same launches, and
suites/kernels/moe/moe_checks.py has to distinguish them.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

from degarble.kernels.gemm.problem import ANY, GemmTactic
from degarble.kernels.moe.problem import (
    AFTER_W2,
    BEFORE_W2,
    DECODED_TACTICS,
    TILES,
    WIDTHS,
    MoeProblem,
)
from degarble.suites.kernels.moe import decoded_checks
from degarble.suites.kernels.moe import moe_checks as checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# Tiles of 64 rows, for any number of slots: what most of the faults are planted in.
OF_64_ROWS = GemmTactic(ANY, rows=64, columns=128, inner=64, blocks=2)


@dataclass(frozen=True)
class Fault:
    """A function of a module, and what stands in its place; it is given the true one first."""

    name: str
    module: str
    function: str
    instead: Callable[..., Any]
    weighting: str = AFTER_W2
    rows: int = 128  # of the tiles that the case is cut in
    decoded: bool = False  # whether rows are decoded once, in front

    @property
    def case(self) -> checks.Case:
        """The call by which it is judged."""
        if self.decoded:
            problem = MoeProblem(400, 384, 256, 5, 2, 5, 10.0, self.weighting)
            tactic = next(each for each in DECODED_TACTICS if each.rows == self.rows)
            return checks.Case(problem, "even", 1, tactic)
        problem = MoeProblem(130, 320, 288, 5, 2, 5, 2.0, self.weighting)
        return checks.Case(problem, "even", 1, TILES[checks.TARGET][self.rows])

    @property
    def checks(self) -> Any:
        """The module that judges it."""
        return decoded_checks if self.decoded else checks


def halves_changed(true: Any, pair: Any, *more: Any) -> Any:
    """Exchange gate and up."""
    return true(pair[::-1], *more)


def expert_before(true: Any, walk: Any, number: Any) -> Any:
    """Take the tile of the expert before."""
    cutlass = import_module("cutlass")
    *place, expert = true(walk, number)
    return (*place, cutlass.max(expert - 1, 0))


def first_tile(true: Any, number: Any, tiles: Any, group: int, least: Any) -> Any:
    """Leave the last tile unwritten: its number stands for the first one."""
    last = tiles[0] * tiles[1] - 1
    row, column = true(number, tiles, group, least)
    differs = least(last - number, 1)
    return row * differs, column * differs


def _ones(true: Any, leaving: Any, row: Any) -> Any:
    return [weight * 0.0 + 1.0 for weight in true(leaving, row)]


def as_they_are(_true: Any, numbers: Any, _weight: Any) -> Any:
    """Leave a weight out."""
    return numbers


def not_clamped(true: Any, gate: Any, up: Any, _limit: Any) -> Any:
    """Leave the limit out."""
    return true(gate, up, None)


def _first_rows(_true: Any, _row: Any, first: Any, _form: Any) -> Any:
    return first


def scale_of_gate(true: Any, groups: Any, expert: Any, parts: int) -> Any:
    """Scale up as gate is."""
    return (true(groups, expert, parts)[0],) * parts


def _scales_before(true: Any, place: Any, form: Any) -> Any:
    cutlass = import_module("cutlass")
    *boxes, (at, expert) = true(place, form)
    return (*boxes, (at, cutlass.max(expert - 1, 0)))


def _other_buffer(true: Any, outlet: Any, row: Any, block: Any, buffer: Any) -> Any:
    return true(outlet, row, block, buffer * 0)


def _changed(true: Any, *given: Any) -> Any:
    return true(*given)[::-1]


def _of_one(true: Any, leaving: Any, row: Any) -> Any:
    return true(leaving, row) * 0.0 + 1.0


def _first_matrix(true: Any, groups: Any, _matrix: Any, expert: Any) -> Any:
    return true(groups, expert * 2, expert)


def _first_span(true: Any, row: Any, _span: int, spans: int) -> Any:
    return true(row, 0, spans)


def _first_span_written(true: Any, row: Any, chunk: Any, _span: int, rows: int) -> Any:
    return true(row, chunk, 0, rows)


def _not_swizzled(_true: Any, row: Any, chunk: Any, spans: int) -> Any:
    return row * 2 * spans + chunk


def _other_half(true: Any, codes: Any, scales: Any, a: Any, half: int) -> Any:
    return true(codes, scales, a, 1 - half)


def _all_of_span(true: Any, _left: Any, span: int) -> Any:
    return true(4 * span + 1, span)


def _pairs_changed(true: Any, *given: Any) -> Any:
    first, second, *more = true(*given)
    return [second, first, *more]


def _gate_for_up(true: Any, sums: Any, *more: Any) -> Any:
    return true(sums[2:] + sums[:2], *more)


def _other_registers(true: Any, fragments: Any, index: Any, half: int, *, begins: bool) -> Any:
    return true(fragments, index, 1 - half, begins=begins)


def _narrowest(true: Any, slots: Any, row: Any, tile: int) -> Any:
    return true(slots, row, tile) * 0 + WIDTHS[tile][0]


def _always_first(true: Any, slots: Any, row: Any, tile: int) -> Any:
    return true(slots, row - row % tile, tile)


def _next_block(true: Any, tile: Any, place: Any, mine: Any) -> Any:
    token, block = place
    return true(tile, (token, 1 - block), mine)


_EPILOGUE, _SCHEDULE = "degarble.kernels.moe.sm90_moe_nvfp4", "degarble.kernels.gemm.mainloop"
_FEW, _SPANS = "degarble.kernels.moe.few_rows", "degarble.kernels.moe.few_rows"
_TALL, _PROBLEM = "degarble.kernels.moe.sm90_moe_nvfp4", "degarble.kernels.moe.problem"
_PLAIN = "degarble.kernels.gemm.sm90_gemm_nvfp4"
_DECODED, _DECODED_FEW, _DECODED_ROWS = (
    f"degarble.kernels.moe.{name}" for name in ("sm90_moe_decoded", "decoded_few", "decoded_rows")
)
_GROUPED, _ROWS = "degarble.kernels.moe.sm90_moe_nvfp4", "degarble.kernels.moe.simt_moe_rows"

FAULTS = (
    Fault("gate and up changed", _EPILOGUE, "gated", halves_changed),
    Fault("scales of the expert before", _PLAIN, "tiles_of_boxes", _scales_before),
    Fault("expert before", _SCHEDULE, "tile_at", expert_before),
    Fault("unwritten tile", _SCHEDULE, "tile_of", first_tile, rows=128),
    Fault("routing weight left out before", _EPILOGUE, "weights_of_rows", _ones, BEFORE_W2),
    Fault("routing weight left out after", _ROWS, "weighed", as_they_are),
    Fault(
        "limit left out",
        "degarble.kernels.primitives.device_words",
        "swiglu_numbers",
        not_clamped,
        rows=128,
    ),
    Fault("scale of gate for up", _GROUPED, "scales_of", scale_of_gate),
    Fault("other piece quantised", _EPILOGUE, "block_at", _other_buffer, rows=128),
    Fault("many rows: other half of a stage", _TALL, "decode_half", _other_half, rows=256),
    Fault("many rows: gate and up changed", _EPILOGUE, "gated", halves_changed, rows=256),
    Fault("scale rows of up", _PROBLEM, "first_scale_row", _first_rows, rows=256),
    Fault("many rows: expert before", _SCHEDULE, "tile_at", expert_before, rows=256),
    Fault("few rows: gate and up changed", _FEW, "both_of", _changed, rows=16),
    Fault("few rows: weight left out", _FEW, "weight_of", _of_one, BEFORE_W2, rows=16),
    Fault("few rows: scale of gate for up", _FEW, "scales_of", _first_matrix, rows=32),
    Fault("few rows: padding's scales", _FEW, "kept_of_span", _all_of_span, rows=16),
    Fault("few rows: scales of another span", _SPANS, "word_of_scales", _first_span, rows=16),
    Fault("few rows: unwritten span", _SPANS, "chunk_of_numbers", _first_span_written, rows=32),
    Fault("few rows: codes as if not swizzled", _SPANS, "chunk_of_codes", _not_swizzled, rows=32),
    Fault("few rows: tokens' pairs changed", _SPANS, "half_pairs", _pairs_changed, rows=64),
    Fault("few rows: expert before", _SCHEDULE, "tile_at", expert_before, rows=64),
    *(
        Fault(f"decoded rows: {name}", module, function, instead, weighting, rows, decoded=True)
        for name, module, function, instead, weighting, rows in (
            ("gate and up changed", _DECODED, "gated", _gate_for_up, AFTER_W2, 256),
            ("another order of K", _DECODED_ROWS, "decoded_chunks", _changed, AFTER_W2, 256),
            ("another order of pairs", _DECODED_ROWS, "decoded_block", _changed, AFTER_W2, 16),
            ("other registers", _DECODED, "add_stage", _other_registers, AFTER_W2, 256),
            ("narrow tiles", _DECODED_ROWS, "width_of", _narrowest, AFTER_W2, 256),
            ("narrow few rows", _DECODED_ROWS, "width_of", _narrowest, BEFORE_W2, 32),
            ("rows behind a width", _DECODED_ROWS, "is_read", _always_first, AFTER_W2, 256),
            ("another block", _DECODED_FEW, "read_block", _next_block, AFTER_W2, 16),
            ("scale of gate for up", _DECODED_FEW, "scales_of", _first_matrix, AFTER_W2, 64),
        )
    ),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


@contextmanager
def planted(fault: Any) -> Iterator[None]:
    """Replace the function while kernels are traced, past every cache."""
    module = import_module(fault.module)
    true = getattr(module, fault.function)

    def instead(*given: Any, **named: Any) -> Any:
        return fault.instead(true, *given, **named)

    forget(fault)
    try:
        with mock.patch.object(module, fault.function, instead):
            yield
    finally:
        forget(fault)


def forget(fault: Any) -> None:
    """Forget what was compiled of the kernels of a fault's call."""
    case = fault.case
    for kernel, _ in fault.checks.steps(case, checks.given_of(case, "cpu")):
        kernel.compile_form.cache_clear()


@cache
def verdict_of_whole(case: checks.Case, *, decoded: bool = False) -> str:
    """Say what is wrong with a case in which nothing is planted."""
    found: str = (decoded_checks if decoded else checks).mismatch(case)
    return found


def texts(fault: Fault) -> list[str]:
    """Return the PTX of all that a fault's call launches, as it is traced now."""
    case = fault.case
    made = [
        kernel.compile_form(kernel.choose_form(own, case.target), checks.SETTINGS)
        for kernel, own in fault.checks.steps(case, checks.given_of(case, "cpu"))
    ]
    return [kernel.ptx for kernel in made]
