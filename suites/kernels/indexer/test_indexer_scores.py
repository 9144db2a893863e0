"""The indexer's scores: machine code, refusals, on an H200 exact products within budgets."""

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
from degarble.kernels.runtime import kernel as descriptor
from degarble.kernels.runtime.compiling import CompileSettings, cubin_facts, unstated_roundings
from degarble.kernels.runtime.targets import SM90A, SM100A
from degarble.references import sparse_attention
from degarble.references.numerics import Numerics
from degarble.suites.kernels import gemm_code, tcgen05_words
from degarble.suites.kernels import indexer_checks as checks
from degarble.suites.kernels.indexer_checks import ScoresCase

if TYPE_CHECKING:
    from types import ModuleType

    from degarble.kernels.runtime.compiling import CompiledKernel

pytestmark = pytest.mark.needs("cutlass")


# --------------------------------------------------------------------------------------------------
# The indexer's scores on Hopper: machine code, refusals, on an H200 exact products in budgets.

FUZZED, AT_ONCE = 120, 40
FORMS = [
    ScoresForm("sm_90a", operands, arithmetic, padded, at_once, 64)
    for operands in ("bf16", "fp8")
    for arithmetic in facts.ARITHMETICS
    for padded, at_once in ((64, 4), (64, 1), (8, 4))
]
REGISTERS = 65_536 // (facts.WARPGROUP * (1 + facts.CONSUMERS)) // 8 * 8


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.indexer.sm90_indexer_scores")


def require_sound(kernels: ModuleType, form: ScoresForm) -> None:
    kernel = kernels.compile_form(form, CompileSettings())
    (found,) = cubin_facts(kernel.cubin)
    assert not found.spills, found
    assert found.registers <= REGISTERS, found
    assert unstated_roundings(kernel.ptx) == ()
    expected = {facts.stage_bytes(form), facts.query_bytes(form)}
    assert gemm_code.expected_bytes(kernel.ptx) == expected
    loads = len(re.findall(r"cp\.async\.bulk\.tensor\.3d\.shared::c", kernel.ptx))
    queries = form.at_once * facts.OPERANDS[form.operands].halves
    assert loads == facts.boxes_of_stage(form) + queries
    shape, steps = ("k32.f32.e4m3.e4m3", 4) if form.operands == "fp8" else ("k16.f32.bf16.bf16", 8)
    wgmma = f"wgmma.mma_async.sync.aligned.m64n{form.columns}{shape}"
    assert gemm_code.wgmmas(kernel.ptx) == steps * [wgmma]
    kept = sorted(map(int, re.findall(r"setmaxnreg\S+ \s*(\d+);", kernel.ptx)))
    assert kept == [facts.PRODUCER_REGISTERS, facts.CONSUMER_REGISTERS]


def test_machine_code_is_as_derived(kernels: ModuleType) -> None:
    require_sound(kernels, FORMS[0])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_machine_code_of_every_form(kernels: ModuleType, form: ScoresForm) -> None:
    require_sound(kernels, form)


CASE = ScoresCase("bf16", 4, (70, 9), (3, 1), ratio=1)


def test_refuses_by_name(kernels: ModuleType) -> None:
    given, problem = checks.sides(CASE, "cpu").given, CASE.problem
    for error, name, changed in (
        (DtypeMismatch, "queries", {"queries": given["queries"].float()}),
        (ShapeMismatch, "weights of heads", {"weights": given["weights"][:2]}),
        (DtypeMismatch, "positions", {"positions": given["positions"].int()}),
        (DtypeMismatch, "sequences of tokens", {"sequences": given["sequences"].long()}),
        (ShapeMismatch, "table of pages", {"table": given["table"][:, :1].contiguous()}),
        (ShapeMismatch, "pages of keys", {"pages": given["pages"][1:]}),
        (InvalidArgument, "scales of queries", {"scales": torch.ones(4, 4)}),
        (InvalidArgument, "They lie in the pages", {"key_scales": torch.ones(4, 4)}),
        (InvalidArgument, "one CUDA device", {}),
    ):
        with pytest.raises(error, match=name):
            kernels.KERNEL.run(problem, CompileSettings(), **given | changed)


@pytest.mark.parametrize("arithmetic", facts.ARITHMETICS)
def test_the_exact_scores_are_the_references(arithmetic: str) -> None:
    case = replace(CASE, arithmetic=arithmetic, lengths=(70,), fresh=(9,))
    of = checks.sides(case, "cpu")
    numerics = Numerics.bf16(indexer_in_storage_dtype=arithmetic == "stored")
    queries, keys, weights = of.queries.float(), of.keys[0].float(), of.given["weights"]
    got = sparse_attention.indexer_scores(queries, keys, weights, of.visible, numerics)
    assert not checks.difference(case, got, of)


def test_damage_is_detected() -> None:
    of = checks.sides(CASE, "cpu")
    whole = checks.exact_scores(CASE, of)[0].float()
    assert not checks.difference(CASE, whole, of)
    seen = int(of.visible[0])
    for place, value in (((0, 3), torch.nan), ((0, seen), 0.0), ((0, seen - 1), -torch.inf)):
        damaged = whole.clone()
        damaged[place] = value
        assert "1 of 280 beyond" in checks.difference(CASE, damaged, of)
    assert checks.difference(CASE, whole * 1.0001, of)


def test_cases_reach_every_edge() -> None:
    found = checks.cases()
    assert len(set(found)) == len(found)
    lengths = {length for case in found for length in case.lengths}
    assert {63, 64, 65, 127, 128, 129} <= lengths
    assert checks.fuzzed(1, 9) == checks.fuzzed(1, 9) != checks.fuzzed(2, 9)


@pytest.mark.h200
def test_scores_are_within_their_budgets() -> None:
    assert not [why for case in checks.cases() if (why := checks.mismatch(case))]


@pytest.mark.h200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_calls(seed: int) -> None:
    assert not [why for case in checks.fuzzed(seed, AT_ONCE) if (why := checks.mismatch(case))]


@pytest.mark.h200
@pytest.mark.parametrize("operands", ["bf16", "fp8"])
def test_scores_depend_on_the_token_alone(operands: str) -> None:
    """Tiles, chunks of keys, company and the form for one token change no bit."""
    case = ScoresCase(operands, 64, (1300, 90), (40, 9), 4, arithmetic="float32", seed=4)
    assert not checks.alone_differ(case)
    assert not checks.alone_differ(replace(case, heads=4, arithmetic="stored"))


@pytest.mark.h200
def test_two_runs_are_equal_bit_for_bit() -> None:
    for case in checks.fuzzed(77, 15):
        given = checks.sides(case, "cuda").given
        first, second = (checks.on_device(case, given).view(torch.int32) for _ in range(2))
        assert torch.equal(first, second), case


@pytest.mark.h200
def test_a_graph_replays_on_changed_data(kernels: ModuleType) -> None:
    case = ScoresCase("fp8", 64, (700, 300), (30, 12), arithmetic="stored")
    of = checks.sides(case, "cuda")
    out = checks.on_device(case, of.given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.KERNEL.run(case.problem, checks.SETTINGS, **of.given, out=out)
    for seed in range(1, 4):
        other = checks.sides(replace(case, seed=seed), "cuda")
        for name, new in other.given.items():
            of.given[name].copy_(new)
        out.fill_(torch.nan)
        graph.replay()
        assert not checks.difference(case, out, other)


@pytest.mark.h200
def test_nan_and_infinite_queries_are_detected_and_stay_in_their_rows() -> None:
    case = ScoresCase("bf16", 64, (300,), (9,), 1)
    of = checks.sides(case, "cuda")
    before = checks.on_device(case, of.given)
    queries = of.given["queries"]
    queries[3, 5, 7], queries[6, 1, 2] = torch.nan, torch.inf
    got = checks.on_device(case, of.given)
    seen = ~before.isneginf()
    assert bool(got[3][seen[3]].isnan().all())
    assert not bool(got[6][seen[6]].isfinite().all())
    others = [0, 1, 2, 4, 5, 7, 8]
    assert torch.equal(got[others], before[others])
    assert torch.equal(got.isneginf() & ~seen, before.isneginf())


# --------------------------------------------------------------------------------------------------
# The indexer's scores on Blackwell: machine code as derived, refusals; asked of a B200.
#
# No B200 is here. What is marked b200 was never run; what is not marked says nothing about a chip.

KINDS = {
    "bf16": ("kind::f16", tcgen05_words.BF16_OF_F16),
    "fp8": ("kind::f8f6f4", tcgen05_words.E4M3_OF_F8F6F4),
}
CORE_STRIDE = 1024  # bytes between groups of eight rows of 128 bytes
UNIT = tcgen05_words.ATOM
SETTINGS = CompileSettings()


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


SM100_INDEXER_SCORES_FORMS = forms()
IN_CI = choose_form(CASE.problem, SM100A.name)


def _named(form: ScoresForm) -> str:
    return f"{form.operands}-{form.arithmetic}-{form.padded}x{form.at_once}"


@pytest.fixture
def sm100_indexer_scores_kernels() -> ModuleType:
    return import_module("degarble.kernels.indexer.sm100_indexer_scores")


def products_of(form: ScoresForm) -> list[tcgen05_words.Product]:
    """Return the matrix instructions of a stage: row after row of 128 bytes, 32 at a time."""
    kind, code = KINDS[form.operands]
    word = tcgen05_words.dense_word(facts.KEYS, form.columns, code)
    steps = facts.ROW_BYTES // facts.INSTRUCTION_BYTES
    made = []
    for i in range(facts.instructions(form)):
        half, within = divmod(i, steps)
        along = within * facts.INSTRUCTION_BYTES // UNIT
        a, b = (half * rows * facts.ROW_BYTES // UNIT for rows in (facts.KEYS, form.columns))
        made.append(tcgen05_words.Product(kind, word, a + along, b + along, adds=i > 0))
    return made


def complaints(kernel: CompiledKernel, form: ScoresForm) -> list[str]:
    """Say what differs from the derived facts."""
    (found,) = cubin_facts(kernel.cubin)
    ptx, halves = kernel.ptx, facts.OPERANDS[form.operands].halves
    barriers = gemm_code.barriers_of(ptx)
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
        "products": (tcgen05_words.products(ptx), products_of(form)),
        "operands": (
            tcgen05_words.operand_words(ptx),
            {tcgen05_words.operand_word(0, CORE_STRIDE, facts.ROW_BYTES)},
        ),
        "reads": (len(tcgen05_words.reads(ptx)), facts.reads(form)),
        "shapes of reads": ({each.shape for each in tcgen05_words.reads(ptx)}, read),
        "numbers used before they are there": (tcgen05_words.early_uses(ptx), []),
        "columns": (gemm_code.columns_allocated(ptx), facts.columns_allocated(form)),
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


def test_sm100_indexer_scores_machine_code_is_as_derived(
    sm100_indexer_scores_kernels: ModuleType,
) -> None:
    kernel, ptx = (
        sm100_indexer_scores_kernels.compile_form(IN_CI, SETTINGS),
        sm100_indexer_scores_kernels.compile_form(IN_CI, SETTINGS).ptx,
    )
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
@pytest.mark.parametrize("form", SM100_INDEXER_SCORES_FORMS, ids=_named)
def test_sm100_indexer_scores_machine_code_of_every_form(
    sm100_indexer_scores_kernels: ModuleType, form: ScoresForm
) -> None:
    assert not complaints(sm100_indexer_scores_kernels.compile_form(form, SETTINGS), form)


def test_sm100_indexer_scores_refuses_by_name(
    sm100_indexer_scores_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, problem = checks.sides(CASE, "cpu").given, CASE.problem
    for error, name, changed in (
        (DtypeMismatch, "queries", {"queries": given["queries"].float()}),
        (ShapeMismatch, "pages of keys", {"pages": given["pages"][1:]}),
        (InvalidArgument, "scales of queries", {"scales": torch.ones(4, 4)}),
        (InvalidArgument, "one CUDA device", {}),
    ):
        with pytest.raises(error, match=name):
            sm100_indexer_scores_kernels.KERNEL.run(problem, SETTINGS, **given | changed)
    monkeypatch.setattr(descriptor, "require_device", lambda _tensors: 0)
    monkeypatch.setattr(descriptor, "target_of_device", lambda _device: SM90A)
    with pytest.raises(MissingDevice, match="sm_100a"):
        sm100_indexer_scores_kernels.KERNEL.run(problem, SETTINGS, **given)


def test_a_gpu_has_the_module_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for target in (SM90A, SM100A):
        monkeypatch.setattr(checks, "target_of_device", lambda target=target: target)
        found = checks.kernels_here().__name__.rpartition(".")[2]
        assert found == f"{target.name.replace('_', '').removesuffix('a')}_indexer_scores"


@pytest.mark.b200
def test_sm100_indexer_scores_scores_are_within_their_budgets() -> None:
    assert not [why for case in checks.cases() if (why := checks.mismatch(case))]


@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_sm100_indexer_scores_fuzzed_calls(seed: int) -> None:
    assert not [why for case in checks.fuzzed(seed, AT_ONCE) if (why := checks.mismatch(case))]


@pytest.mark.b200
@pytest.mark.parametrize("operands", facts.OPERANDS)
def test_sm100_indexer_scores_scores_depend_on_the_token_alone(operands: str) -> None:
    """Tiles, chunks of keys, company and the form for one token change no bit."""
    case = ScoresCase(operands, 64, (1300, 90), (40, 9), 4, arithmetic="float32", seed=4)
    assert not checks.alone_differ(case)
    assert not checks.alone_differ(replace(case, heads=4, arithmetic="stored"))


@pytest.mark.b200
def test_sm100_indexer_scores_two_runs_are_equal_bit_for_bit() -> None:
    for case in checks.fuzzed(77, 15):
        given = checks.sides(case, "cuda").given
        first, second = (checks.on_device(case, given).view(torch.int32) for _ in range(2))
        assert torch.equal(first, second), case
