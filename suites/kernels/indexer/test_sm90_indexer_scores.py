"""The indexer's scores on Hopper: machine code, refusals, on an H200 exact products in budgets."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import ScoresForm
from degarble.kernels.runtime.compiling import CompileSettings, cubin_facts, unstated_roundings
from degarble.references import indexer
from degarble.references.numerics import Numerics
from degarble.suites.kernels import gemm_code as code
from degarble.suites.kernels import indexer_checks as checks
from degarble.suites.kernels.indexer_checks import ScoresCase

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

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
    assert code.expected_bytes(kernel.ptx) == expected
    loads = len(re.findall(r"cp\.async\.bulk\.tensor\.3d\.shared::c", kernel.ptx))
    queries = form.at_once * facts.OPERANDS[form.operands].halves
    assert loads == facts.boxes_of_stage(form) + queries
    shape, steps = ("k32.f32.e4m3.e4m3", 4) if form.operands == "fp8" else ("k16.f32.bf16.bf16", 8)
    wgmma = f"wgmma.mma_async.sync.aligned.m64n{form.columns}{shape}"
    assert code.wgmmas(kernel.ptx) == steps * [wgmma]
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
    out = torch.zeros(4, 70)

    def run(**changes: Any) -> None:
        kernels.indexer_scores(given._replace(**changes), problem, CompileSettings(), out=out)

    with pytest.raises(DtypeMismatch, match="queries"):
        run(queries=given.queries.float())
    with pytest.raises(ShapeMismatch, match="weights of heads"):
        run(weights=given.weights[:2])
    with pytest.raises(DtypeMismatch, match="positions"):
        run(positions=given.positions.int())
    with pytest.raises(DtypeMismatch, match="sequences of tokens"):
        run(sequences=given.sequences.long())
    with pytest.raises(ShapeMismatch, match="table of pages"):
        run(table=given.table[:, :1].contiguous())
    with pytest.raises(ShapeMismatch, match="pages of keys"):
        run(pages=given.pages[1:])
    with pytest.raises(InvalidArgument, match="scales of queries"):
        run(scales=torch.ones(4, 4))
    with pytest.raises(InvalidArgument, match="one CUDA device"):
        run()


@pytest.mark.parametrize("arithmetic", facts.ARITHMETICS)
def test_the_exact_scores_are_the_references(arithmetic: str) -> None:
    case = replace(CASE, arithmetic=arithmetic, lengths=(70,), fresh=(9,))
    of = checks.sides(case, "cpu")
    numerics = Numerics.bf16(indexer_in_storage_dtype=arithmetic == "stored")
    queries, keys, weights = of.queries.float(), of.keys[0].float(), of.given.weights
    got = indexer.scores(queries, keys, weights, of.visible, numerics)
    assert not checks.difference(case, got, of)


def test_damage_is_seen() -> None:
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
        kernels.indexer_scores(of.given, case.problem, checks.SETTINGS, out=out)
    for seed in range(1, 4):
        other = checks.sides(replace(case, seed=seed), "cuda")
        for into, new in zip(of.given, other.given, strict=True):
            into.copy_(new)
        out.fill_(torch.nan)
        graph.replay()
        assert not checks.difference(case, out, other)


@pytest.mark.h200
def test_nan_and_infinite_queries_are_seen_and_stay_in_their_rows() -> None:
    case = ScoresCase("bf16", 64, (300,), (9,), 1)
    of = checks.sides(case, "cuda")
    before = checks.on_device(case, of.given)
    of.given.queries[3, 5, 7], of.given.queries[6, 1, 2] = torch.nan, torch.inf
    got = checks.on_device(case, of.given)
    seen = ~before.isneginf()
    assert bool(got[3][seen[3]].isnan().all())
    assert not bool(got[6][seen[6]].isfinite().all())
    others = [0, 1, 2, 4, 5, 7, 8]
    assert torch.equal(got[others], before[others])
    assert torch.equal(got.isneginf() & ~seen, before.isneginf())
