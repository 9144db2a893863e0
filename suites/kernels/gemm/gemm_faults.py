"""Plant faults in the GEMM kernels by replacing a function while a kernel is traced.

The kernels contain none of it. A whole form and a faulty one are compiled alike and launched alike,
and suites/kernels/gemm_checks.py has to distinguish them. Faults that may stop a GPU (parity of a
stage, bytes that a barrier expects) run in a process of their own, with a bound on its time:

    python -m degarble.suites.kernels.gemm.gemm_faults NAME

prints what the checks report.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

from degarble.kernels.gemm import problem as facts
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import module_of
from degarble.suites.kernels import gemm_checks as checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from degarble.kernels.runtime.compiling import CompiledKernel

EXTENTS = (300, 520, 1184)  # tails everywhere, and more stages than a ring of pieces has
MANY = (1100, 520, 1184)  # FP8 tiles of 256 rows, and stages of two slots of factors
FEW = (5, 5000, 4128)  # swapped operands, and more stages than any ring has


@dataclass(frozen=True)
class Fault:
    """A function of a module, and what stands in its place; it is given the true one first."""

    name: str
    operands: str
    module: str
    function: str
    instead: Callable[..., Any]
    violent: bool = False
    extents: tuple[int, int, int] = EXTENTS

    @property
    def case(self) -> checks.Case:
        """The launch by which it is judged."""
        scales = facts.OPERANDS[self.operands].scales[0]
        return checks.table_case(self.operands, self.extents, scales, seed=len(self.name))


def _shifted(true: Any, *arguments: Any) -> Any:
    return true(*arguments) + 1


def _first_tile(true: Any, number: Any, tiles: Any, group: int, least: Any) -> Any:
    """Leave the last tile unwritten: its number stands for the first one."""
    last = tiles[0] * tiles[1] - 1
    row, column = true(number, tiles, group, least)
    differs = least(last - number, 1)
    return row * differs, column * differs


def _twice(true: Any, number: Any, scales: Any) -> Any:
    return true(number, (*scales, scales[-1]) if scales else (2.0,))


def _everything(true: Any, blocks: Any, step: Any) -> Any:
    return true(blocks + 4, step)


def _swapped(true: Any, word: Any, constant: Any) -> Any:
    pairs = true(word, constant)
    return [pairs[1], pairs[0], pairs[3], pairs[2]]


def _of_first_rows(true: Any, shared: Any, mine: Any) -> Any:
    return true(shared, mine * 0)


def _step_before(true: Any, scales: Any, row: Any, step: Any) -> Any:
    cutlass = import_module("cutlass")
    return true(scales, row, cutlass.max(step - 1, 0))


def _rows_changed(true: Any, sums: Any, stage_sums: Any, upper: Any, lower: Any) -> None:
    true(sums, stage_sums, lower, upper)


def _first_block(true: Any, row: Any, rows: Any) -> Any:
    return true(row * 0, rows)


def _of_neighbour(true: Any, number: int, tactic: Any) -> int:
    """Take the scale of the other one of two rows of A."""
    other: int = true(number ^ 1, tactic)
    return other


def _unexchanged(true: Any, number: int, row: Any, lane: Any, swapped: bool) -> Any:
    """Write a pair where it would belong without the exchange of words."""
    return tuple(reversed(true(number, row, lane, swapped and False))) if swapped else None


def _exchanged_pieces(true: Any, piece: int, pieces: int, places: Any) -> Any:
    return true(piece ^ 1, pieces, places)


def _never_begins(true: Any, *arguments: Any, begins: bool) -> Any:
    return true(*arguments, begins=begins and False)


def _other_parity(_true: Any, stages: int) -> Any:
    return import_module("degarble.kernels.gemm.mainloop").producer_state(stages)


def _fewer_bytes(true: Any, memory: Any, form: Any) -> Any:
    held, half = facts.footprint(form), facts.transaction_bytes(form) // 2
    with mock.patch.multiple(
        facts, footprint=lambda _form: held, transaction_bytes=lambda _form: half
    ):
        return true(memory, form)


def _no_decode_scale(true: Any, number: Any, scales: Any) -> Any:
    return true(number, scales[:1])


LAUNCHED, NOTHING = "launched now", "nothing"
_STAGES, _WGMMA = "degarble.kernels.gemm.nvfp4_stages", "degarble.kernels.gemm.mainloop"
_EPILOGUE, _SCHEDULE = "degarble.kernels.gemm.mainloop", "degarble.kernels.gemm.mainloop"
_FP8 = "degarble.kernels.gemm.sm90_gemm_fp8_block"

FAULTS = (
    Fault("unwritten tile", "bf16", _SCHEDULE, "tile_of", _first_tile),
    Fault("rows of the other warpgroup", "bf16", _WGMMA, "rows_of", _of_first_rows),
    Fault("scaled without a scale", "bf16", _EPILOGUE, "scaled", _twice),
    Fault("scale column", "nvfp4", _STAGES, "word_of_scales", _shifted),
    Fault("scales beyond K", "nvfp4", _STAGES, "kept", _everything),
    Fault("tensor scale twice", "nvfp4", _EPILOGUE, "scaled", _twice),
    Fault("tensor scale left out", "nvfp4", _EPILOGUE, "scaled", _no_decode_scale),
    Fault("swizzle of codes", "nvfp4", _STAGES, "chunk_of_codes", _shifted),
    Fault("scale group of the step before", "fp8_block", _FP8, "scale_at", _step_before),
    Fault("scales of rows changed", "fp8_block", _FP8, "promote", _rows_changed, extents=MANY),
    Fault("scales of the first block", "fp8_block", _FP8, "block_of", _first_block, extents=MANY),
    Fault(
        "pieces exchanged",
        "fp8_block",
        _EPILOGUE,
        "place_of_piece",
        _exchanged_pieces,
        extents=MANY,
    ),
    Fault("scale of the row beside", "fp8_block", _FP8, "factor_of", _of_neighbour, extents=FEW),
    Fault("pairs of rows of B", "bf16", _EPILOGUE, "place_of_word", _unexchanged, extents=FEW),
    Fault("parity of a stage", "bf16", _WGMMA, "consumer_state", _other_parity, violent=True),
    Fault("bytes expected", "bf16", _WGMMA, "ring_of_stages", _fewer_bytes, violent=True),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Replace the function while a kernel is traced."""
    module = import_module(fault.module)
    true = getattr(module, fault.function)
    setattr(module, fault.function, lambda *given, **named: fault.instead(true, *given, **named))
    try:
        yield
    finally:
        setattr(module, fault.function, true)


def compiled(fault: Fault, *, whole: bool = False) -> CompiledKernel:
    """Compile the form of a fault, with the fault or without, past every cache."""
    kernels = import_module(module_of(f"sm90_gemm_{fault.operands}"))
    form = fault.case.form
    with nullcontext() if whole else planted(fault):
        kernel: CompiledKernel = kernels.compile_form.__wrapped__(form, CompileSettings())
    return kernel


def verdict(
    fault: Fault, kernel: CompiledKernel, launching: Callable[[], None] | None = None
) -> str:
    """Say what the checks find wrong with a kernel; empty where they find nothing."""
    import torch  # noqa: PLC0415  the command refuses names without it

    case = fault.case
    problem = case.problem
    kernels = import_module(module_of(f"sm90_gemm_{fault.operands}"))
    sides = checks.SIDES[fault.operands](case, "cuda")
    out = torch.full(
        (problem.rows + checks.ROWS_BEHIND, problem.columns),
        torch.nan,
        dtype=torch.bfloat16,
        device="cuda",
    )
    tensors = checks.named(fault.operands, sides.given) | {"out": out[: problem.rows]}
    if launching is not None:
        launching()
    for _ in range(3):  # shared memory that holds what a launch before left is no excuse
        kernels.KERNEL.launch(kernel, case.form, problem, tensors)
    torch.cuda.synchronize()
    return checks.difference(case, out, sides)


def main() -> int:
    """Plant one fault and print that it is launched, then what is said of it."""
    fault = BY_NAME[sys.argv[1]]
    tell = partial(print, LAUNCHED, flush=True)
    print(verdict(fault, compiled(fault), tell) or NOTHING)  # noqa: T201  a script
    return 0


if __name__ == "__main__":
    sys.exit(main())
