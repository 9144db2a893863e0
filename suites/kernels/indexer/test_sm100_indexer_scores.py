"""The indexer's scores on Blackwell: machine code as derived, refusals; asked of a B200.

No B200 is here. What is marked b200 was never run; what is not marked says nothing about a chip.
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    MissingDevice,
    ShapeMismatch,
)
from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import KeyPages, ScoresForm, ScoresProblem, choose_form
from degarble.kernels.runtime.compiling import CompileSettings, cubin_facts, unstated_roundings
from degarble.kernels.runtime.targets import SM90A, SM100A
from degarble.suites.kernels import gemm_code, sm100_code, tcgen05_code, tcgen05_words
from degarble.suites.kernels import indexer_checks as checks
from degarble.suites.kernels.indexer_checks import ScoresCase

if TYPE_CHECKING:
    from types import ModuleType

    from degarble.kernels.runtime.compiling import CompiledKernel

pytestmark = pytest.mark.needs("cutlass")

FUZZED, AT_ONCE = 120, 40
REGISTERS = 65_536 // (facts.WARPGROUP * (1 + facts.CONSUMERS)) // 8 * 8
KINDS = {
    "bf16": ("kind::f16", tcgen05_words.BF16_OF_F16),
    "fp8": ("kind::f8f6f4", tcgen05_words.E4M3_OF_F8F6F4),
}
CORE_STRIDE = 1024  # bytes between groups of eight rows of 128 bytes
UNIT = tcgen05_words.ATOM
SETTINGS = CompileSettings()
CASE = ScoresCase("bf16", 4, (70, 9), (3, 1), ratio=1)


def forms() -> list[ScoresForm]:
    """Return the forms of all models, for prompts and for decoding, and of the most heads."""
    made = []
    for operands in facts.OPERANDS:
        for arithmetic in facts.ARITHMETICS:
            for heads in (*sorted(set(checks.HEADS.values())), facts.MOST_COLUMNS):
                for tokens in (1, 300):
                    pages = KeyPages(operands, 64, 10)
                    problem = ScoresProblem(tokens, heads, 5000, 1, pages, arithmetic=arithmetic)
                    made.append(choose_form(problem, SM100A.name))
    return list(dict.fromkeys(made))


FORMS = forms()
IN_CI = choose_form(CASE.problem, SM100A.name)


def _named(form: ScoresForm) -> str:
    return f"{form.operands}-{form.arithmetic}-{form.padded}x{form.at_once}"


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.indexer.sm100_indexer_scores")


def products_of(form: ScoresForm) -> list[tcgen05_code.Product]:
    """Return the matrix instructions of a stage: row after row of 128 bytes, 32 at a time."""
    kind, code = KINDS[form.operands]
    word = tcgen05_words.dense_word(facts.KEYS, form.columns, code)
    steps = facts.ROW_BYTES // facts.INSTRUCTION_BYTES
    made = []
    for i in range(facts.instructions(form)):
        half, within = divmod(i, steps)
        along = within * facts.INSTRUCTION_BYTES // UNIT
        a, b = (half * rows * facts.ROW_BYTES // UNIT for rows in (facts.KEYS, form.columns))
        made.append(tcgen05_code.Product(kind, word, a + along, b + along, adds=i > 0))
    return made


def complaints(kernel: CompiledKernel, form: ScoresForm) -> list[str]:
    """Say what differs from the derived facts."""
    (found,) = cubin_facts(kernel.cubin)
    ptx, halves = kernel.ptx, facts.OPERANDS[form.operands].halves
    barriers = sm100_code.barriers_of(ptx)
    read = {f"32x32b.x{facts.columns_read(form)}"}
    figures = {
        "spills": (found.spills, False),
        "registers fit": (found.registers <= REGISTERS, True),
        "roundings unstated": (unstated_roundings(ptx), ()),
        "expected bytes": (
            gemm_code.expected_bytes(ptx),
            {facts.stage_bytes(form), facts.query_bytes(form)},
        ),
        "loads": (
            len(re.findall(r"cp\.async\.bulk\.tensor\.3d\.shared::c", ptx)),
            facts.boxes_of_stage(form) + form.at_once * halves,
        ),
        "products": (tcgen05_code.products(ptx), products_of(form)),
        "operands": (
            tcgen05_code.operand_words(ptx),
            {tcgen05_words.operand_word(0, CORE_STRIDE, facts.ROW_BYTES)},
        ),
        "reads": (len(tcgen05_code.reads(ptx)), facts.reads(form)),
        "shapes of reads": ({each.shape for each in tcgen05_code.reads(ptx)}, read),
        "numbers used before they are there": (tcgen05_code.early_uses(ptx), []),
        "columns": (sm100_code.columns_allocated(ptx), facts.columns_allocated(form)),
        "barriers": (len(barriers), facts.barriers(form)),
        "end of shared memory": (
            max(barriers) + facts.BARRIER_BYTES,
            facts.sm100_shared_bytes(form),
        ),
        "threads": (f".reqntid {facts.threads(form)}, 1, 1" in ptx, True),
    }
    return [
        f"{name}: got {got}, want {want}" for name, (got, want) in figures.items() if got != want
    ]


def test_machine_code_is_as_derived(kernels: ModuleType) -> None:
    kernel, ptx = kernels.compile_form(IN_CI, SETTINGS), kernels.compile_form(IN_CI, SETTINGS).ptx
    assert not complaints(kernel, IN_CI)
    word = products_of(IN_CI)[0].word
    stage = facts.stage_bytes(IN_CI)
    for name, old, new in (
        ("products", f", {word};", f", {word ^ 1 << 17};"),
        ("products", ", 1026;", ", 1028;"),
        ("expected bytes", f", {stage};", f", {stage // 2};"),
        ("used before", "tcgen05.wait::ld", "tcgen05.wait::st"),
        ("columns", ", 64;\n\ttcgen05.alloc", ", 32;\n\ttcgen05.alloc"),
    ):
        damaged = ptx.replace(old, new, 1)
        assert damaged != ptx, name
        with_it = replace(kernel, ptx=damaged)
        try:
            assert [why for why in complaints(with_it, IN_CI) if name in why], name
        except tcgen05_words.WrongWord:
            assert name == "used before"  # nobody waits for the last read


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=_named)
def test_machine_code_of_every_form(kernels: ModuleType, form: ScoresForm) -> None:
    assert not complaints(kernels.compile_form(form, SETTINGS), form)


def test_refuses_by_name(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    given, problem = checks.sides(CASE, "cpu").given, CASE.problem
    for error, name, changed in (
        (DtypeMismatch, "queries", given._replace(queries=given.queries.float())),
        (ShapeMismatch, "pages of keys", given._replace(pages=given.pages[1:])),
        (InvalidArgument, "scales of queries", given._replace(scales=torch.ones(4, 4))),
        (InvalidArgument, "one CUDA device", given),
    ):
        with pytest.raises(error, match=name):
            kernels.indexer_scores(changed, problem, SETTINGS)
    monkeypatch.setattr(kernels.contract, "require_device", lambda _tensors: 0)
    monkeypatch.setattr(kernels.contract, "target_of_device", lambda _device: SM90A)
    with pytest.raises(MissingDevice, match="sm_100a"):
        kernels.indexer_scores(given, problem, SETTINGS)


def test_a_gpu_has_the_module_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for target in (SM90A, SM100A):
        monkeypatch.setattr(checks, "target_of_device", lambda target=target: target)
        found = checks.kernels_here().__name__.rpartition(".")[2]
        assert found == f"{target.name.replace('_', '').removesuffix('a')}_indexer_scores"


@pytest.mark.b200
def test_scores_are_within_their_budgets() -> None:
    assert not [why for case in checks.cases() if (why := checks.mismatch(case))]


@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_calls(seed: int) -> None:
    assert not [why for case in checks.fuzzed(seed, AT_ONCE) if (why := checks.mismatch(case))]


@pytest.mark.b200
@pytest.mark.parametrize("operands", facts.OPERANDS)
def test_scores_depend_on_the_token_alone(operands: str) -> None:
    """Tiles, chunks of keys, company and the form for one token change no bit."""
    case = ScoresCase(operands, 64, (1300, 90), (40, 9), 4, arithmetic="float32", seed=4)
    assert not checks.alone_differ(case)
    assert not checks.alone_differ(replace(case, heads=4, arithmetic="stored"))


@pytest.mark.b200
def test_two_runs_are_equal_bit_for_bit() -> None:
    for case in checks.fuzzed(77, 15):
        given = checks.sides(case, "cuda").given
        first, second = (checks.on_device(case, given).view(torch.int32) for _ in range(2))
        assert torch.equal(first, second), case
