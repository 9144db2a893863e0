"""Few rows on Blackwell, operands swapped: machine code as derived, host model, a B200's part.

No B200 is here; what is marked b200 was never run.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.gemm.problem import GemmProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.targets import SM100A
from degarble.suites.kernels import gemm_checks as checks
from degarble.suites.kernels import sm100_checks as blackwell
from degarble.suites.kernels import sm100_code as code
from degarble.suites.kernels import sm100_model as model

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

SWAPPED = {form.tactic.columns: form for form in blackwell.swapped()}
SETTINGS = CompileSettings()


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.sm100_gemm_nvfp4")


def test_machine_code_is_as_derived(kernels: ModuleType) -> None:
    form = SWAPPED[16]
    kernel = kernels.compile_form(form, SETTINGS)
    assert not code.complaints(kernel, form)
    for true, wrong, name in (
        (", 22528;", ", 22496;", "expected bytes"),
        (".32x32b.x16.", ".32x32b.x32.", "reads of sums"),
        ("cp.async.bulk.tensor.2d.global", "cp.async.bulk.tensor.1d.global", "stores"),
    ):
        found = code.complaints(replace(kernel, ptx=kernel.ptx.replace(true, wrong)), form)
        assert any(each.startswith(name) for each in found), name


@pytest.mark.slow
@pytest.mark.parametrize("form", SWAPPED.values(), ids=blackwell.named)
def test_machine_code_of_every_form(kernels: ModuleType, form: facts.GemmForm) -> None:
    assert not code.complaints(kernels.compile_form(form, SETTINGS), form)


@pytest.mark.parametrize("first", model.FIRST)
@pytest.mark.parametrize("columns", SWAPPED)
def test_every_bit_with_tails_of_all_extents(columns: int, first: str) -> None:
    """Columns of D end within a tile, rows of A within theirs, K within a word of scales."""
    for rows in (1, columns - 1):
        assert not blackwell.answer(SWAPPED[columns], (rows, 136, 288), first)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [32, 64, 96, 256, 1312])
@pytest.mark.parametrize("columns", SWAPPED)
def test_every_bit_of_more_shapes(columns: int, inner: int) -> None:
    for rows in (1, columns):
        assert not blackwell.answer(SWAPPED[columns], (rows, 392, inner))


@pytest.mark.slow
def test_a_ring_that_begins_anew_and_rows_of_several_tiles() -> None:
    assert tensor_memory.footprint(SWAPPED[8]).stages == 8
    assert not blackwell.answer(SWAPPED[8], (5, 72, 256 * 17))
    assert not blackwell.answer(SWAPPED[32], (150, 136, 96))


def other_order(true: Any, block: Any, numbers: Any, piece: Any, buffer: int) -> None:
    true(block, numbers, piece[::-1], buffer)


def upright(true: Any, block: Any, numbers: Any, piece: Any, buffer: int) -> None:
    true(block, numbers.T, piece, buffer)


def first_buffer(true: Any, block: Any, numbers: Any, piece: Any, buffer: int) -> None:
    true(block, numbers, (piece[0], piece[1] - piece[1] % 2), buffer)


FAULTS: dict[str, Callable[..., None]] = {
    "place of a piece": other_order,
    "a piece not turned": upright,
    "columns of a piece": first_buffer,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str) -> None:
    true, instead = model.Block.put_below, FAULTS[name]
    wrong = lambda *given: instead(true, *given)  # noqa: E731  bound to a class below
    with mock.patch.object(model.Block, "put_below", wrong):
        assert blackwell.answer(SWAPPED[16], (16, 392, 32))


def test_rows_that_a_tile_cannot_address_are_refused(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.contract, "require_place", lambda *_given: None)
    case = checks.with_form(SWAPPED[8], (9, 16, 96), "ordinary", 1)
    given = checks.nvfp4_sides(case, "cpu").given
    with pytest.raises(InvalidArgument, match="Take the tactic that the table chooses"):
        kernels.gemm_nvfp4(*given, case.problem, SETTINGS, form=case.form)
    problem = GemmProblem(9, 16, 96, "nvfp4", "e4m3")
    tensor_memory.require_extents(problem, facts.choose_form(problem, SM100A.name))


# ---- on a B200 -----------------------------------------------------------------------------------


@pytest.mark.b200
@pytest.mark.parametrize("inner", [32, 64, 96, 288, 1056, 7168])
@pytest.mark.parametrize("form", SWAPPED.values(), ids=blackwell.named)
def test_tails(form: facts.GemmForm, inner: int) -> None:
    found = [blackwell.verdict(case) for case in blackwell.tails(form, inner)]
    assert not [each for each in found if any(each)]


@pytest.mark.b200
@pytest.mark.parametrize("extents", [(1, 7168, 16384), (7, 512, 7168), (31, 24576, 1536)])
def test_swapped_operands_do_not_change_a_bit(extents: tuple[int, int, int]) -> None:
    kernels = import_module("degarble.kernels.gemm.sm100_gemm_nvfp4")
    given, found = None, {}
    for form in (blackwell.forms()[0], *SWAPPED.values()):
        if form.tactic.swapped and form.tactic.columns < extents[0]:
            continue
        case = checks.with_form(form, extents, "ordinary", 9)
        given = given or checks.nvfp4_sides(case, "cuda").given
        out = kernels.gemm_nvfp4(*given, case.problem, SETTINGS, form=form)
        found[case.name] = out.view(torch.int16)
    (first, alone), *others = found.items()
    assert not [f"{name} is not {first}" for name, out in others if not torch.equal(out, alone)]
