"""The largest k: compiled for every target, refusals, on an H200 every entry of a stable sort."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
)
from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import TopkForm, TopkProblem
from degarble.kernels.runtime.compiling import CompileSettings, cubin_facts, unstated_roundings
from degarble.kernels.runtime.targets import TARGETS, Target
from degarble.references import indexer
from degarble.suites.kernels.indexer import topk_checks as checks

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
FUZZED, AT_ONCE = 200, 50
FORMS = {
    "cluster": TopkForm("", 1024, 8, 32768, by_four=True, limited=True),
    "alone": TopkForm("", 256, 1, 8192, by_four=False, limited=False),
    "half": TopkForm("", 512, 1, 16384, by_four=True, limited=True),
}


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.indexer.simt_indexer_topk")


def require_sound(kernels: ModuleType, form: TopkForm) -> None:
    kernel = kernels.compile_form(form, CompileSettings())
    assert f".target {form.target}\n" in kernel.ptx
    (code,) = cubin_facts(kernel.cubin)
    assert not code.spills, code
    assert code.registers * form.threads <= 65_536, code
    assert unstated_roundings(kernel.ptx) == ()
    assert ("barrier.cluster" in kernel.ptx) is (form.cluster > 1)
    counting = 4 if form.by_four else 1
    # Two vectors of a level at once, and one where their number is odd.
    found = kernel.ptx.count("atom.shared.add.u32")
    assert found == counting * kernels.AT_ONCE + 3 * 4 * (len(facts.LEVELS) - 1)


def test_compiles_without_spills(kernels: ModuleType) -> None:
    require_sound(kernels, replace(FORMS["cluster"], target="sm_90a"))


@pytest.mark.slow
@each_target
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_compiles(kernels: ModuleType, target: Target, form: TopkForm) -> None:
    require_sound(kernels, replace(form, target=target.name))


def test_refuses_by_name(kernels: ModuleType) -> None:
    problem, limited = TopkProblem(2, 8, 3), TopkProblem(2, 8, 3, 4)
    scores, positions = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)

    def run(scores: torch.Tensor = scores, p: TopkProblem = problem, **more: object) -> None:
        kernels.indexer_topk(scores, p, CompileSettings(), **more)

    with pytest.raises(DtypeMismatch, match="scores"):
        run(scores.double())
    with pytest.raises(ShapeMismatch, match="scores"):
        run(scores[:, :4])
    with pytest.raises(LayoutMismatch, match="address of scores"):
        run(torch.zeros(17)[1:].view(2, 8))
    with pytest.raises(InvalidArgument, match="positions"):
        run(p=limited)
    with pytest.raises(InvalidArgument, match="positions"):
        run(positions_T=positions)
    with pytest.raises(DtypeMismatch, match="positions"):
        run(p=limited, positions_T=positions.int())
    with pytest.raises(ShapeMismatch, match="chosen entries"):
        run(out=torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(InvalidArgument, match="one CUDA device"):
        run()


def test_the_definition_is_the_references_choice() -> None:
    for spread in checks.SPREADS:
        case = checks.TopkCase(TopkProblem(20, 90, 16, 4), spread, 3)
        hidden = torch.arange(90) >= case.visible[:, None]
        want = indexer.top_k(case.scores.masked_fill(hidden, -torch.inf), 16)
        got = checks.by_definition(case, "cpu")
        assert torch.equal(got.sort(-1).values, want.int().sort(-1).values), spread


def test_a_wrong_entry_is_seen() -> None:
    case = checks.TopkCase(TopkProblem(3, 40, 8), "ties")
    whole = checks.by_definition(case, "cpu")
    assert not checks.difference(case, whole)
    whole[1, 5] += 1
    assert "1 entries in 1 rows, first at row 1, place 5" in checks.difference(case, whole)


@pytest.mark.h200
@pytest.mark.b200
def test_every_entry_is_that_of_a_stable_sort() -> None:
    assert not [why for case in checks.cases() if (why := checks.mismatch(case))]


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_rows(seed: int) -> None:
    assert not [why for case in checks.fuzzed(seed, AT_ONCE) if (why := checks.mismatch(case))]


@pytest.mark.h200
@pytest.mark.b200
def test_two_runs_are_equal() -> None:
    for case in checks.fuzzed(99, 10):
        assert torch.equal(checks.on_device(case), checks.on_device(case)), case.name


@pytest.mark.h200
@pytest.mark.b200
def test_a_graph_replays_on_changed_data(kernels: ModuleType) -> None:
    problem = TopkProblem(5, 40_000, 700, 4)
    cases = [checks.TopkCase(problem, spread, 5) for spread in checks.SPREADS]
    scores, positions = torch.zeros(5, 40_000, device="cuda"), torch.zeros(5, device="cuda").long()
    out = torch.empty(5, 700, dtype=torch.int32, device="cuda")

    def run() -> None:
        kernels.indexer_topk(scores, problem, checks.SETTINGS, positions_T=positions, out=out)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for case in cases:
        assert case.positions is not None
        scores.copy_(case.scores), positions.copy_(case.positions)
        out.fill_(checks.POISON)
        graph.replay()
        assert not checks.difference(case, out)
