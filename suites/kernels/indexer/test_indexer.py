"""The indexer: its scores against the references, on Blackwell as derived; tokens of their own."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import (
    KeyPages,
    ScoresForm,
    ScoresProblem,
    TopkProblem,
    choose_form,
)
from degarble.kernels.runtime.compiling import CompileSettings, cubin_facts, unstated_roundings
from degarble.kernels.runtime.targets import SM90A, SM100A
from degarble.references import sparse_attention
from degarble.references.numerics import Numerics
from degarble.suites.kernels import gemm_code, tcgen05_words
from degarble.suites.kernels import indexer_checks as checks
from degarble.suites.kernels.contract import (
    SETTINGS,
    kernels_of,
    require_waits_before_it_reads,
    same_bits,
)
from degarble.suites.kernels.indexer import indexer_operand_checks, topk_checks
from degarble.suites.kernels.indexer.contract import registers_of
from degarble.suites.kernels.indexer_checks import ScoresCase

if TYPE_CHECKING:
    from types import ModuleType

    from degarble.kernels.runtime.compiling import CompiledKernel

pytestmark = pytest.mark.needs("cutlass")

CASE = ScoresCase("bf16", 4, (70, 9), (3, 1), ratio=1)


# ---- scores on any GPU, and the choice of the largest --------------------------------------------


def test_scales_of_keys_that_lie_in_pages_are_refused() -> None:
    given = checks.sides(CASE, "cpu").given | {"key_scales": torch.ones(4, 4)}
    with pytest.raises(InvalidArgument, match="They lie in the pages"):
        kernels_of("sm90_indexer_scores").KERNEL.run(CASE.problem, SETTINGS, **given)


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
    cases = checks.cases()
    lengths = {length for case in cases for length in case.lengths}
    assert {63, 64, 65, 127, 128, 129} <= lengths


def test_a_wrong_bit_is_detected() -> None:
    for kind in (0, 6):
        case = indexer_operand_checks.OperandCase(
            indexer_operand_checks.problem_of(3, 5, kind), "special", 3
        )
        whole = indexer_operand_checks.by_definition(case)
        assert not indexer_operand_checks.difference(case, *whole)
        whole.values.view(torch.uint8)[2, 4, 7] ^= 1
        assert "1 of 1920" in indexer_operand_checks.difference(case, *whole)


def test_the_definition_is_the_references_choice() -> None:
    for spread in topk_checks.SPREADS:
        case = topk_checks.TopkCase(TopkProblem(20, 90, 16, 4), spread, 3)
        hidden = torch.arange(90) >= case.visible[:, None]
        want = sparse_attention.top_k(case.scores.masked_fill(hidden, -torch.inf), 16)
        got = topk_checks.by_definition(case, "cpu")
        assert torch.equal(got.sort(-1).values, want.int().sort(-1).values), spread


def test_a_wrong_entry_is_detected() -> None:
    case = topk_checks.TopkCase(TopkProblem(3, 40, 8), "ties")
    whole = topk_checks.by_definition(case, "cpu")
    assert not topk_checks.difference(case, whole)
    whole[1, 5] += 1
    assert "1 entries in 1 rows, first at row 1, place 5" in topk_checks.difference(case, whole)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("operands", facts.OPERANDS)
def test_scores_depend_on_the_token_alone(operands: str) -> None:
    """Tiles, chunks of keys, company and the form for one token change no bit."""
    case = ScoresCase(operands, 64, (1300, 90), (40, 9), 4, arithmetic="float32", seed=4)
    assert not checks.alone_differ(case)
    assert not checks.alone_differ(replace(case, heads=4, arithmetic="stored"))


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


# ---- scores on Blackwell -------------------------------------------------------------------------
#
# No B200 is here. What is marked b200 was never run; what is not marked says nothing about a chip.

KINDS = {
    "bf16": ("kind::f16", tcgen05_words.BF16_OF_F16),
    "fp8": ("kind::f8f6f4", tcgen05_words.E4M3_OF_F8F6F4),
}
CORE_STRIDE = 1024  # bytes between groups of eight rows of 128 bytes
UNIT = tcgen05_words.ATOM


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
        "registers fit": (found.registers <= registers_of(form), True),
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


def test_machine_code_is_as_derived(
    kernels: ModuleType,
) -> None:
    kernel, ptx = (
        kernels.compile_form(IN_CI, SETTINGS),
        kernels.compile_form(IN_CI, SETTINGS).ptx,
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
@pytest.mark.parametrize("form", FORMS, ids=_named)
def test_machine_code_of_every_form(kernels: ModuleType, form: ScoresForm) -> None:
    assert not complaints(kernels.compile_form(form, SETTINGS), form)


ONE_TOKEN = ScoresCase("fp8", 64, (1024, 1024), (1, 1))


def test_a_plain_read_before_the_wait_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernels_of("sm90_indexer_scores")
    plain = import_module("degarble.kernels.gemm.w4a16_instructions").global_word
    monkeypatch.setattr(kernels, "early_word", plain)
    form = choose_form(ONE_TOKEN.problem, SM90A.name)
    kernel = kernels.compile_form.__wrapped__(form, CompileSettings())
    with pytest.raises(AssertionError, match=r"ld\.global"):
        require_waits_before_it_reads(kernel.ptx)


@pytest.mark.h200
def test_a_table_that_the_launch_in_front_writes_is_read_behind_it() -> None:
    """The choice of the largest writes tables in turns; each guess is the table before."""
    problem, given = ONE_TOKEN.problem, checks.sides(ONE_TOKEN, "cuda").given
    scores, choice = (
        kernels_of(name).KERNEL for name in ("sm90_indexer_scores", "simt_indexer_topk")
    )
    of_table = TopkProblem(problem.sequences, problem.pages.count, problem.pages_of_sequence)
    ranks = torch.rand(2, of_table.rows, of_table.entries, device="cuda")
    out = torch.empty(2, problem.tokens, problem.entries, device="cuda")
    table, wanted = torch.zeros_like(given["table"]), []
    for rank in ranks:
        choice.run(of_table, SETTINGS, scores=rank, out=table)
        torch.cuda.synchronize()
        scores.run(problem, SETTINGS, **given | {"table": table.clone()}, out=out[0])
        wanted.append(out[0].clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for rank, made in zip(ranks, out, strict=True):
            choice.run(of_table, SETTINGS, scores=rank, out=table)
            scores.run(problem, SETTINGS, **given | {"table": table}, out=made)
    assert not same_bits(*wanted)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert same_bits(list(out), wanted)


def test_a_gpu_has_the_module_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for target in (SM90A, SM100A):
        monkeypatch.setattr(checks, "target_of_device", lambda target=target: target)
        found = checks.kernels_here().__name__.rpartition(".")[2]
        assert found == f"{target.name.replace('_', '').removesuffix('a')}_indexer_scores"
