"""Faults planted in the grouped experts of Blackwell: each is in the text, a B200 catches it."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from degarble.kernels.moe import problem as moe
from degarble.kernels.moe.problem import AFTER_W2, BEFORE_W2, MoeProblem
from degarble.suites.kernels.moe import moe_checks as checks
from degarble.suites.kernels.moe import moe_faults as hopper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from degarble.suites.kernels.moe.moe_checks import Case


# --------------------------------------------------------------------------------------------------
# Plant faults in the grouped experts of Blackwell by replacing a function while kernels are traced.
#
# The kernels contain none of it. Each fault changes machine code here; on a B200
# suites/kernels/moe/moe_checks.py has to distinguish a faulty call from a whole one.

TARGET = "sm_100a"


@dataclass(frozen=True)
class Fault:
    """A function of a module, and what stands in its place; it is given the true one first."""

    name: str
    module: str
    function: str
    instead: Callable[..., Any]
    product: int = 0  # whose text changes: FC1's, FC2's, or that of the sum
    weighting: str = AFTER_W2

    @property
    def checks(self) -> Any:
        """The module that judges it."""
        return checks

    @property
    def case(self) -> Case:
        """The call by which it is judged: two tiles of rows an expert, K ends within a word."""
        problem = MoeProblem(330, 352, 288, 5, 2, 5, 2.0, self.weighting)
        return checks.Case(problem, "even", 1, target=TARGET)


def _scales_before(true: Any, tile: Any, form: Any) -> Any:
    cutlass = import_module("cutlass")
    *boxes, (at, expert) = true(tile, form)
    return (*boxes, (at, cutlass.max(expert - 1, 0)))


def _one(true: Any, leaving: Any, row: Any) -> Any:
    return true(leaving, row) * 0.0 + 1.0


def _nothing_ends(_true: Any, *_given: Any) -> tuple[int, int]:
    return 0, 0


def _nothing_skipped(_true: Any, *_given: Any) -> int:
    return 0


def _pair_before(true: Any, row: Any, block: Any, blocks: Any) -> Any:
    return true(row, block, blocks) ^ 1


def _in_row_order(_true: Any, row: Any, block: Any, blocks: Any) -> Any:
    return row * ((blocks + 3) // 4) + block // 4


def _first_blocks(true: Any, kept: Any, _first: Any, form: Any) -> Any:
    return true(kept, 0, form)


_LEAVING, _FACTS = (
    "degarble.kernels.moe.sm100_moe_nvfp4",
    "degarble.kernels.moe.problem",
)
_MEMORY, _SCHEDULE = "degarble.kernels.gemm.tensor_memory", "degarble.kernels.gemm.mainloop"
_GROUPED, _ROWS = "degarble.kernels.moe.sm100_moe_nvfp4", "degarble.kernels.moe.simt_moe_rows"

FAULTS = (
    Fault("gate and up changed", _LEAVING, "gated", hopper.halves_changed),
    Fault("expert before", _SCHEDULE, "tile_at", hopper.expert_before),
    Fault("scales of the expert before", _MEMORY, "tiles_of_boxes", _scales_before, 1),
    Fault("unwritten tile", _SCHEDULE, "tile_of", hopper.first_tile, 1),
    Fault("routing weight left out before", _LEAVING, "weight_of_row", _one, 0, BEFORE_W2),
    Fault("routing weight left out after", _ROWS, "weighed", hopper.as_they_are, 2),
    Fault(
        "limit left out",
        "degarble.kernels.primitives.device_words",
        "swiglu_numbers",
        hopper.not_clamped,
    ),
    Fault("scale of gate for up", _LEAVING, "scales_of", hopper.scale_of_gate),
    Fault("scales beyond K not cleared", _MEMORY, "end_of_scales", _nothing_ends),
    Fault("rows of scales not skipped", _MEMORY, "columns_skipped", _nothing_skipped, 1),
    Fault("codes of the pair beside", _FACTS, "codes_at", _pair_before),
    Fault("scales in row order", _FACTS, "scales_at", _in_row_order),
    Fault("first blocks again", _LEAVING, "halves_of", _first_blocks),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Replace the function while kernels are traced, past every cache."""
    with hopper.planted(fault):
        yield


def text(fault: Fault) -> str:
    """Return the PTX of the kernel that a fault is in, as it is traced now."""
    problem, made = fault.case.problem, None
    if fault.product > 1:
        weighted = problem.weighting == AFTER_W2
        form = moe.CombineForm(problem.chosen, weighted, shared=False, target=TARGET)
        made = import_module(_ROWS).compile_combine(form, checks.SETTINGS)
    else:
        of_product = moe.forms_of(problem, TARGET)[fault.product]
        made = import_module(_GROUPED).compile_form(of_product, checks.SETTINGS)
    ptx: str = made.ptx
    return ptx


# --------------------------------------------------------------------------------------------------
# Faults planted in the grouped experts of Blackwell: each is in the text; a B200 has to catch it.
#
# No B200 is here. What is marked b200 was never run; what is not marked says nothing about a chip.


@cache
def whole(name: str) -> str:
    return text(BY_NAME[name])


@pytest.mark.needs("cutlass")
def test_faults_have_names_of_their_own() -> None:
    assert len(BY_NAME) == len(FAULTS) == 13


@pytest.mark.needs("cutlass")
@pytest.mark.slow
def test_a_planted_fault_is_in_the_text_and_removed() -> None:
    fault = BY_NAME["routing weight left out after"]
    before = text(fault)
    with planted(fault):
        assert text(fault) != before
    assert text(fault) == before


@pytest.mark.needs("cutlass")
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_changes_the_machine_code(fault: Fault) -> None:
    before = whole(fault.name)
    with planted(fault):
        assert text(fault) != before


@pytest.mark.needs("cutlass")
@pytest.mark.b200
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught_and_a_whole_call_is_not(fault: Fault) -> None:
    with planted(fault):
        assert checks.mismatch(fault.case)
    assert not hopper.verdict_of_whole(fault.case)
