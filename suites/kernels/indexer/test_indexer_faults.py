"""Faults planted in the indexer's kernels: each is another kernel, on an H200 each is caught."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.indexer import problem as indexer_problem
from degarble.kernels.indexer.problem import TopkProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.suites.kernels import indexer_checks
from degarble.suites.kernels.indexer import indexer_operand_checks, topk_checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from degarble.kernels.runtime.compiling import CompiledKernel


# --------------------------------------------------------------------------------------------------
# Plant faults in the indexer's kernels by replacing a function while a kernel is traced.
#
# The kernels contain none of it. A whole form and a faulty one are compiled and launched alike,
# without any cache, and the checks of the kernel have to distinguish them.

PROCESSORS = 132  # of an H200
_SCORES, _TOPK = (
    "degarble.kernels.indexer.sm90_indexer_scores",
    "degarble.kernels.indexer.simt_indexer_topk",
)
_OPERAND = "degarble.kernels.indexer.simt_indexer_operand"
_WEIGHING = "degarble.kernels.indexer.sm90_indexer_scores"
SCORES = indexer_checks.ScoresCase("bf16", 64, (700, 90), (30, 9), 4)
SCORES_STORED = indexer_checks.ScoresCase("fp8", 64, (700, 90), (30, 9), 4, arithmetic="stored")
TOPK = topk_checks.TopkCase(TopkProblem(40, 8200, 300, 4), "ties", 3)
TOPK_HIGH = topk_checks.TopkCase(TopkProblem(140, 20_000, 2048), "high sample", 3)
TOPK_LOW = topk_checks.TopkCase(TopkProblem(140, 20_000, 2048), "low sample", 3)
TOPK_CLUSTERS = topk_checks.TopkCase(TopkProblem(9, 20_000, 300), seed=3)
TOPK_BINS = topk_checks.TopkCase(TopkProblem(12, 8192, 100), "bin", 3)
TOPK_ZEROS = topk_checks.TopkCase(TopkProblem(40, 600, 400), "ties", 3)  # zeros are the last
OPERAND = indexer_operand_checks.OperandCase(indexer_operand_checks.problem_of(30, 8, 0))


@dataclass(frozen=True)
class Fault:
    """A function of a module, and what stands in its place; it is given the true one first."""

    name: str
    module: str
    function: str
    instead: Callable[..., Any]
    case: Any


def _itself(_true: Any, number: Any) -> Any:
    return number


def _one_more(true: Any, *arguments: Any) -> Any:
    return true(*arguments) + 1


def _whole_tiles(true: Any, *arguments: Any) -> Any:
    sequence, limit, limits = true(*arguments)
    return sequence, (limit - 1) // indexer_problem.KEYS * indexer_problem.KEYS, limits


def _not_rectified(_true: Any, low: Any, high: Any) -> Any:
    words = import_module("degarble.kernels.primitives.device_words")
    return words.rounded_words([low, high])[0]


def _no_scale(_true: Any, *_arguments: Any) -> Any:
    return import_module("cutlass").Float32(1.0)


def _other_first(true: Any, totals: Any, distance: int) -> Any:
    return true(totals, 3 - distance)


def _highest(_true: Any, marks: Any) -> Any:
    words, cutlass = (
        import_module("degarble.kernels.primitives.device_words"),
        import_module("cutlass"),
    )
    text = "{ .reg .b32 a; bfind.u32 a, {$r0}; shl.b32 {$w0}, 1, a; }"
    return words.emit(text, cutlass.Uint32, marks)


def _zeros_apart(_true: Any, score: Any) -> Any:
    words, cutlass = (
        import_module("degarble.kernels.primitives.device_words"),
        import_module("cutlass"),
    )
    text = "{ .reg .b32 b, m; mov.b32 b, {$r0}; shr.s32 m, b, 31; or.b32 m, m, 0x80000000;"
    return words.emit(text + " xor.b32 {$w0}, b, m; }", cutlass.Uint32, score)


def _one_level_less(true: Any, key: Any, level: int) -> Any:
    return true(ops.shift_left(key, 1) if level == len(indexer_problem.LEVELS) - 1 else key, level)


def _believed(_true: Any, _limit: Any, filled: Any, _count: Any) -> Any:
    return filled < 0


def _nothing(_true: Any, *_arguments: Any) -> Any:
    return import_module("cutlass").Int32(0)


FAULTS = (
    Fault("relu left out", _WEIGHING, "rectified", _itself, SCORES),
    Fault("relu left out where stored", _WEIGHING, "rectified_pair", _not_rectified, SCORES_STORED),
    Fault("weight of the neighbouring head", _WEIGHING, "head_of_column", _one_more, SCORES),
    Fault("last tile of keys dropped", _SCORES, "run_of", _whole_tiles, SCORES),
    Fault("sees one entry more", _SCORES, "visible_of", _one_more, SCORES),
    Fault("scales of keys left out", _WEIGHING, "key_scale", _no_scale, SCORES_STORED),
    Fault("quad folded in another order", _WEIGHING, "exchanged", _other_first, SCORES),
    Fault("ties to the higher entry", _TOPK, "first_of", _highest, TOPK),
    Fault("zeros apart by their sign", _TOPK, "key_of", _zeros_apart, TOPK_ZEROS),
    Fault("chooses among one entry more", _TOPK, "visible_of", _one_more, TOPK),
    Fault("last bits of keys ignored", _TOPK, "bin_of", _one_level_less, TOPK),
    Fault("a sample's limit is believed", _TOPK, "misled", _believed, TOPK_HIGH),
    Fault("limit of a full list too high", _TOPK, "limit_after", _one_more, TOPK_LOW),
    Fault("lists of a cluster lie over others", _TOPK, "if_before", _nothing, TOPK_CLUSTERS),
    Fault("last bits ignored in a full bin", _TOPK, "bin_of", _one_level_less, TOPK_BINS),
    Fault("scale of a block twice as large", _OPERAND, "scale_code_of", _one_more, OPERAND),
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


def kernels_of(fault: Fault) -> Any:
    """Return the module of the kernel that a fault is judged by."""
    return import_module(_SCORES if fault.module == _WEIGHING else fault.module)


def form_of(fault: Fault) -> Any:
    """Return the form that the case of a fault has."""
    problem = fault.case.problem
    if kernels_of(fault).__name__ == _SCORES:
        return indexer_problem.choose_form(problem, "sm_90a")
    if fault.module == _TOPK:
        return indexer_problem.choose_topk_form(problem, "sm_90a", PROCESSORS)
    return indexer_problem.choose_operand_form(problem, "sm_90a")


def compiled(fault: Fault, *, whole: bool = False) -> CompiledKernel:
    """Compile the form of a fault, with the fault or without, past every cache."""
    kernels = kernels_of(fault)
    with nullcontext() if whole else planted(fault):
        kernel: CompiledKernel = kernels.compile_form.__wrapped__(form_of(fault), CompileSettings())
    return kernel


def verdict(fault: Fault, kernel: CompiledKernel) -> str:
    """Say what the checks find wrong with a kernel; empty where they find nothing."""
    module = kernels_of(fault)
    holder = getattr(module, "KERNEL", module)
    with mock.patch.dict(vars(holder), {"compile_form": lambda *_given: kernel}):
        found: str = _checks_of(fault).mismatch(fault.case)
    return found


def _checks_of(fault: Fault) -> Any:
    if kernels_of(fault).__name__ == _SCORES:
        return indexer_checks
    return topk_checks if fault.module == _TOPK else indexer_operand_checks


# --------------------------------------------------------------------------------------------------
# Faults planted in the indexer's kernels: each another kernel, on an H200 each is caught.


def named(fault: Fault) -> str:
    return fault.name.replace(" ", "-")


@pytest.mark.needs("cutlass")
def test_names_are_their_own() -> None:
    assert len(BY_NAME) == len(FAULTS) == 16


@pytest.mark.needs("cutlass")
def test_a_planted_fault_is_removed() -> None:
    fault = BY_NAME["scale of a block twice as large"]
    whole = compiled(fault, whole=True).ptx
    assert compiled(fault).ptx != whole
    assert compiled(fault, whole=True).ptx == whole


@pytest.mark.needs("cutlass")
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=named)
def test_a_planted_fault_changes_the_machine_code(fault: Fault) -> None:
    assert compiled(fault).ptx != compiled(fault, whole=True).ptx


@pytest.mark.needs("cutlass")
@pytest.mark.h200
@pytest.mark.parametrize("fault", FAULTS, ids=named)
def test_a_fault_is_caught_and_a_whole_form_is_not(fault: Fault) -> None:
    assert not verdict(fault, compiled(fault, whole=True))
    assert verdict(fault, compiled(fault))
