"""Grouped products on Blackwell: machine code as derived, refusals; asked of a B200.

No B200 is here. What is marked b200 was never run; what is not marked says nothing about a chip.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, MissingDevice, UnknownName
from degarble.kernels.gemm import grouped_problem as facts
from degarble.kernels.gemm import problem as gemm
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.gemm.grouped_problem import GroupedProblem
from degarble.kernels.runtime.compiling import cubin_facts, unstated_roundings
from degarble.kernels.runtime.targets import SM90A, SM100A
from degarble.suites.kernels import gemm_code, sm100_code, tcgen05_code, tcgen05_words
from degarble.suites.kernels.gemm import grouped_checks as checks
from degarble.suites.kernels.tcgen05_code import Product

if TYPE_CHECKING:
    from types import ModuleType

    from degarble.kernels.gemm.grouped_problem import GroupedForm
    from degarble.kernels.runtime.compiling import CompiledKernel

pytestmark = pytest.mark.needs("cutlass")

FUZZED, AT_ONCE = 200, 50
SHAPES = (*(shape for shape in (checks.PRO, checks.FLASH, checks.TINY)), (4, 64, 128, 0))
PROBLEMS = [
    GroupedProblem(tokens, *shape, 9 if shape[3] else 0)
    for shape in SHAPES
    for tokens in (1, 300, 8192)
]
CHUNKS = 4  # 16 bytes of a row that a thread turns


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.sm100_gemm_grouped")


def form_of(problem: GroupedProblem) -> GroupedForm:
    return facts.choose_grouped_form(problem, SM100A.name)


def products_of(form: GroupedForm) -> list[Product]:
    """Return the instructions of a head's stages: only the first of all may begin the sums."""
    tactic = form.gemm.tactic
    word = tcgen05_words.dense_word(tactic.rows, tactic.columns)
    along = 2 * tensor_memory.INSTRUCTION_K["bf16"] // tcgen05_words.ATOM
    return [
        Product("kind::f16", word, k * along, k * along, None if step + k == 0 else True)
        for step in range(form.steps_of_head or 1)
        for k in range(tensor_memory.instructions(form.gemm))
    ]


def within_stages(found: list[Product], form: GroupedForm) -> list[Product]:
    """Return instructions without the stage, which the text knows where a head fills the ring."""
    a, b = (
        rows * 2 * facts.GROUPED_STEP // tcgen05_words.ATOM
        for rows in (form.gemm.tactic.rows, form.gemm.tactic.columns)
    )
    return [each._replace(a=each.a % a, b=each.b % b) for each in found]


def complaints(kernel: CompiledKernel, form: GroupedForm, threads: int) -> list[str]:
    """Say what differs from the derived facts."""
    (code,), ptx = cubin_facts(kernel.cubin), kernel.ptx
    held, turned = tensor_memory.footprint(form.gemm), bool(form.turned)
    figures = {
        "spills": (code.spills, False),
        "registers fit": (code.registers * threads <= 65_536, True),
        "roundings unstated": (unstated_roundings(ptx), ()),
        "expected bytes": (
            gemm_code.expected_bytes(ptx),
            {gemm.transaction_bytes(form.gemm)},
        ),
        "products": (within_stages(tcgen05_code.products(ptx), form), products_of(form)),
        "numbers used before they are there": (tcgen05_code.early_uses(ptx), []),
        "columns": (
            sm100_code.columns_allocated(ptx),
            tensor_memory.columns_allocated(form.gemm),
        ),
        "barriers": (
            ptx.count("mbarrier.init."),
            held.barriers + turned * held.stages,
        ),
        "chunks turned": (ptx.count("ld.shared.v4"), CHUNKS * turned),
        "threads": (f".reqntid {threads}, 1, 1" in ptx, True),
    }
    return [
        f"{name}: got {got}, want {want}" for name, (got, want) in figures.items() if got != want
    ]


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_machine_code_is_as_derived(kernels: ModuleType, problem: GroupedProblem) -> None:
    form = form_of(problem)
    kernel = kernels.compile_form(form, checks.SETTINGS)
    assert not complaints(kernel, form, kernels.threads(form))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_tiles_lie_within_groups_and_all_fits(kernels: ModuleType, problem: GroupedProblem) -> None:
    form = form_of(problem)
    tactic, held = form.gemm.tactic, tensor_memory.footprint(form.gemm)
    assert problem.columns % tactic.columns == 0
    assert tactic.rows == tensor_memory.LANES
    # One warpgroup turns 64 rows; each stage may wait for its turn.
    assert tactic.rows == kernels.TURNING_GROUPS * 64
    behind = held.total + held.stages * gemm.BARRIER_BYTES
    assert behind <= SM100A.shared_memory_bytes
    assert problem.inner // facts.GROUPED_STEP % (form.steps_of_head or 1) == 0


def test_refuses_by_name(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = GroupedProblem(3, 2, 64, 128, 128, 5)
    a, b = (torch.zeros(n, k, dtype=torch.bfloat16) for n, k in ((3, 256), (128, 128)))
    turns = (torch.zeros(5, 64), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(DtypeMismatch, match="A"):
        kernels.gemm_grouped(a.float(), b, problem, checks.SETTINGS, turns=turns)
    with pytest.raises(InvalidArgument, match="turns"):
        kernels.gemm_grouped(a, b, problem, checks.SETTINGS)
    wide = GroupedProblem(3, 1, 64, 128, out="fp32")
    with pytest.raises(InvalidArgument, match="sm_90a alone"):
        kernels.gemm_grouped(a, b, wide, checks.SETTINGS)
    with pytest.raises(UnknownName, match="target of grouped products"):
        facts.choose_grouped_form(problem, "sm_80")
    monkeypatch.setattr(kernels.contract, "require_device", lambda _tensors: 0)
    monkeypatch.setattr(kernels.contract, "target_of_device", lambda _device: SM90A)
    with pytest.raises(MissingDevice, match="sm_100a"):
        kernels.gemm_grouped(a, b, problem, checks.SETTINGS, turns=turns)


def in_bf16(cases: list[checks.Case]) -> list[checks.Case]:
    """Leave out what has no form here."""
    return [case for case in cases if case.out == "bf16"]


@pytest.mark.b200
@pytest.mark.parametrize("case", in_bf16(checks.cases()), ids=lambda case: case.name)
def test_every_bit_is_that_of_the_composition(case: checks.Case) -> None:
    assert not checks.mismatch(case)


@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_cases(seed: int) -> None:
    assert not [w for case in in_bf16(checks.fuzzed(seed, AT_ONCE)) if (w := checks.mismatch(case))]
