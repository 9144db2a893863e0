"""Rows and top-k of the indexer: compiled for every target, refusals, on an H200 every bit."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
)
from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import (
    OperandProblem,
    TopkForm,
    TopkProblem,
    choose_operand_form,
)
from degarble.kernels.runtime.compiling import (
    CompileSettings,
    cubin_facts,
    fused_instructions,
    unstated_roundings,
)
from degarble.kernels.runtime.targets import TARGETS, Target
from degarble.references import sparse_attention
from degarble.suites.kernels.indexer import indexer_operand_checks as checks
from degarble.suites.kernels.indexer import topk_checks

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")


# --------------------------------------------------------------------------------------------------
# Rows of the indexer: compiled for every target, refusals, on an H200 every stated bit.

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
each_kind = pytest.mark.parametrize("kind", range(len(checks.KINDS)))
FUZZED, AT_ONCE = 200, 50


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.indexer.simt_indexer_operand")


def require_sound(kernels: ModuleType, kind: int, target: Target) -> None:
    form = choose_operand_form(checks.problem_of(1, 1, kind), target.name)
    kernel = kernels.compile_form(form, CompileSettings())
    assert f".target {target.name}\n" in kernel.ptx
    (code,) = cubin_facts(kernel.cubin)
    assert not code.spills, code
    assert code.registers <= 96, code
    assert unstated_roundings(kernel.ptx) == ()
    # Of each value: Hadamard's three across lanes, two of MXFP4's rounding, and nothing else.
    fused = 3 * form.hadamard + 2 * (form.format == "mxfp4")
    assert len(fused_instructions(kernel.ptx)) == facts.OF_LANE * fused


@each_target
def test_compiles_without_spills_and_with_every_rounding_stated(
    kernels: ModuleType, target: Target
) -> None:
    require_sound(kernels, 0, target)
    require_sound(kernels, 9, target)


@pytest.mark.slow
@each_target
@each_kind
def test_every_kind_compiles(kernels: ModuleType, target: Target, kind: int) -> None:
    require_sound(kernels, kind, target)


def test_refuses_by_name(kernels: ModuleType) -> None:
    problem = OperandProblem(2, 4, "halves", "fp8", normed=True, positions=5)
    coded = OperandProblem(2, 4, "none", "fp8", coded=True)
    rows = torch.zeros(2, 4, 128, dtype=torch.bfloat16)
    whole: dict[str, Any] = {
        "rows": rows, "turns": torch.zeros(5, 64), "positions": torch.zeros(2, dtype=torch.int64),
        "weight": torch.zeros(128), "bias": torch.zeros(128),
    }  # fmt: skip
    for error, name, changes in (
        (DtypeMismatch, "rows", {"rows": rows.float()}),
        (ShapeMismatch, "rows", {"rows": rows[:1]}),
        (InvalidArgument, "turns", {"turns": None, "positions": None}),
        (InvalidArgument, "norm", {"weight": None, "bias": None}),
        (ShapeMismatch, "turns", {"turns": torch.zeros(4, 64)}),
        (DtypeMismatch, "positions", {"positions": torch.zeros(2)}),
        (DtypeMismatch, "bias", {"bias": torch.zeros(128).bfloat16()}),
        (DtypeMismatch, "values", {"values": torch.zeros(2, 4, 128)}),
        (InvalidArgument, "one CUDA device", {}),
    ):
        with pytest.raises(error, match=name):
            kernels.KERNEL.run(problem, CompileSettings(), **whole | changes)
    with pytest.raises(InvalidArgument, match="turns"):
        kernels.KERNEL.run(coded, CompileSettings(), **whole | {"weight": None, "bias": None})


def test_a_wrong_bit_is_detected() -> None:
    for kind in (0, 6):
        case = checks.OperandCase(checks.problem_of(3, 5, kind), "special", 3)
        whole = checks.by_definition(case)
        assert not checks.difference(case, *whole)
        whole.values.view(torch.uint8)[2, 4, 7] ^= 1
        assert "1 of 1920" in checks.difference(case, *whole)


@pytest.mark.h200
@pytest.mark.b200
def test_every_bit_is_that_of_the_definition() -> None:
    assert not [why for case in checks.cases() if (why := checks.mismatch(case))]


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_rows(seed: int) -> None:
    assert not [why for case in checks.fuzzed(seed, AT_ONCE) if (why := checks.mismatch(case))]


@pytest.mark.h200
@pytest.mark.b200
def test_a_graph_replays_on_changed_data_in_place(kernels: ModuleType) -> None:
    cases = [checks.OperandCase(checks.problem_of(30, 8, 0), which, 4) for which in checks.SPREADS]
    problem, given = cases[0].problem, cases[0].operands()

    def run() -> None:
        kernels.KERNEL.run(problem, checks.SETTINGS, **given, values=given["rows"])

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for case in cases:
        for name, other in case.operands().items():
            given[name].copy_(other)
        graph.replay()
        assert not checks.difference(case, given["rows"], None)


# --------------------------------------------------------------------------------------------------
# The largest k: compiled for every target, refusals, on an H200 every entry of a stable sort.

FORMS = {
    "cluster": TopkForm("", 1024, 8, 32768, by_four=True, limited=True),
    "alone": TopkForm("", 256, 1, 8192, by_four=False, limited=False),
    "half": TopkForm("", 512, 1, 16384, by_four=True, limited=True),
}


@pytest.fixture
def simt_indexer_topk_kernels() -> ModuleType:
    return import_module("degarble.kernels.indexer.simt_indexer_topk")


def simt_indexer_topk_require_sound(kernels: ModuleType, form: TopkForm) -> None:
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


def test_compiles_without_spills(simt_indexer_topk_kernels: ModuleType) -> None:
    simt_indexer_topk_require_sound(
        simt_indexer_topk_kernels, replace(FORMS["cluster"], target="sm_90a")
    )


@pytest.mark.slow
@each_target
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_compiles(
    simt_indexer_topk_kernels: ModuleType, target: Target, form: TopkForm
) -> None:
    simt_indexer_topk_require_sound(simt_indexer_topk_kernels, replace(form, target=target.name))


def test_simt_indexer_topk_refuses_by_name(simt_indexer_topk_kernels: ModuleType) -> None:
    problem, limited = TopkProblem(2, 8, 3), TopkProblem(2, 8, 3, 4)
    scores, positions = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)

    for error, name, p, given in (
        (DtypeMismatch, "scores", problem, {"scores": scores.double()}),
        (ShapeMismatch, "scores", problem, {"scores": scores[:, :4]}),
        (LayoutMismatch, "address of scores", problem, {"scores": torch.zeros(17)[1:].view(2, 8)}),
        (InvalidArgument, "positions", limited, {}),
        (InvalidArgument, "positions", problem, {"positions": positions}),
        (DtypeMismatch, "positions", limited, {"positions": positions.int()}),
        (ShapeMismatch, "chosen entries", problem, {"out": torch.zeros(2, 2, dtype=torch.int32)}),
        (InvalidArgument, "one CUDA device", problem, {}),
    ):
        whole: dict[str, Any] = {"scores": scores}
        with pytest.raises(error, match=name):
            simt_indexer_topk_kernels.KERNEL.run(p, CompileSettings(), **whole | given)


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
def test_every_entry_is_that_of_a_stable_sort() -> None:
    assert not [why for case in topk_checks.cases() if (why := topk_checks.mismatch(case))]


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_simt_indexer_topk_fuzzed_rows(seed: int) -> None:
    assert not [
        why for case in topk_checks.fuzzed(seed, AT_ONCE) if (why := topk_checks.mismatch(case))
    ]


@pytest.mark.h200
@pytest.mark.b200
def test_two_runs_are_equal() -> None:
    for case in topk_checks.fuzzed(99, 10):
        assert torch.equal(topk_checks.on_device(case), topk_checks.on_device(case)), case.name


@pytest.mark.h200
@pytest.mark.b200
def test_a_graph_replays_on_changed_data(simt_indexer_topk_kernels: ModuleType) -> None:
    problem = TopkProblem(5, 40_000, 700, 4)
    cases = [topk_checks.TopkCase(problem, spread, 5) for spread in topk_checks.SPREADS]
    scores, positions = torch.zeros(5, 40_000, device="cuda"), torch.zeros(5, device="cuda").long()
    out = torch.empty(5, 700, dtype=torch.int32, device="cuda")

    def run() -> None:
        simt_indexer_topk_kernels.KERNEL.run(
            problem, topk_checks.SETTINGS, scores=scores, positions=positions, out=out
        )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for case in cases:
        assert case.positions is not None
        scores.copy_(case.scores), positions.copy_(case.positions)
        out.fill_(topk_checks.POISON)
        graph.replay()
        assert not topk_checks.difference(case, out)
