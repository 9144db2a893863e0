"""The NVFP4 GEMM on Blackwell: machine code as derived, refusals; and what a B200 would be asked.

No B200 is here. What is marked b200 was never run; what is not marked says nothing about a chip.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, MissingDevice, ShapeMismatch
from degarble.kernels.gemm.problem import GemmForm, GemmProblem, choose_form
from degarble.kernels.runtime.compiling import CompileSettings, package_root
from degarble.kernels.runtime.targets import SM90A, SM100A
from degarble.suites.kernels import gemm_checks as checks
from degarble.suites.kernels import sm100_checks as blackwell
from degarble.suites.kernels import sm100_code as code
from degarble.suites.kernels import sm100_table as table

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

FORMS = blackwell.forms()
CLUSTERED = [clustered for form in FORMS for clustered in blackwell.clustered(form)]
each_form = pytest.mark.parametrize("form", FORMS, ids=blackwell.named)
SETTINGS = CompileSettings()
FUZZED, AT_ONCE = 120, 40


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.sm100_gemm_nvfp4")


def test_machine_code_is_as_derived(kernels: ModuleType) -> None:
    form = FORMS[-1]
    kernel = kernels.compile_form(form, SETTINGS)
    assert not code.complaints(kernel, form)
    wrong = replace(kernel, ptx=kernel.ptx.replace(", 55296;", ", 55280;"))
    assert code.complaints(wrong, form) == ["expected bytes: got {55280}, want {55296}"]
    wrong = replace(kernel, ptx=kernel.ptx.replace("tcgen05.cp.", "tcgen05.cq.", 1))
    assert code.complaints(wrong, form) == ["copies of scales: got 11, want 12"]


def test_every_bit_of_a_descriptor_is_seen_in_the_text(kernels: ModuleType) -> None:
    form = FORMS[-1]
    kernel = kernels.compile_form(form, SETTINGS)
    for name, size in (("words of instructions", 32), ("words of operands", 64)):
        word = code.wanted_words(form)[name][0]
        for bit in range(size):
            ptx = kernel.ptx.replace(f", {word};", f", {word ^ 1 << bit};", 1)
            assert code.found_words(ptx)[name] != code.wanted_words(form)[name], (name, bit)
    ptx = kernel.ptx.replace(", 292;", ", 293;")
    assert (
        code.found_words(ptx)["columns of scales"] != code.wanted_words(form)["columns of scales"]
    )


def test_clusters_share_loads_and_releases(kernels: ModuleType) -> None:
    form = blackwell.clustered(FORMS[2])[0]
    kernel = kernels.compile_form(form, SETTINGS)
    assert not code.complaints(kernel, form)
    wrong = replace(kernel, ptx=kernel.ptx.replace("complete_tx::bytes.multicast", "", 1))
    assert "loads shared: got 2, want 3" in code.complaints(wrong, form)


@pytest.mark.slow
@pytest.mark.parametrize("form", [*FORMS, *CLUSTERED], ids=blackwell.named)
def test_machine_code_of_every_form(kernels: ModuleType, form: GemmForm) -> None:
    assert not code.complaints(kernels.compile_form(form, SETTINGS), form)


def test_refuses_by_name(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = GemmProblem(4, 16, 96, "nvfp4", "e4m3")
    case = checks.table_case("nvfp4", (4, 16, 96), "e4m3")
    a, b = checks.nvfp4_sides(case, "cpu").given
    wrong = (
        (DtypeMismatch, "codes of A", a._replace(codes=a.codes.to(torch.int8))),
        (ShapeMismatch, "scales of A", a._replace(scales=a.scales[:512])),
    )
    for error, name, given in wrong:
        with pytest.raises(error, match=name):
            kernels.gemm_nvfp4(given, b, problem, SETTINGS)
    monkeypatch.setattr(kernels.contract, "require_device", lambda _tensors: 0)
    monkeypatch.setattr(kernels.contract, "target_of_device", lambda _device: SM90A)
    with pytest.raises(MissingDevice, match=r"sm_100a"):
        kernels.gemm_nvfp4(a, b, problem, SETTINGS)


def test_the_note_shows_the_tables_as_they_are() -> None:
    note = (package_root() / "docs/design-notes/sm100_gemm.md").read_text()
    for lines in (table.facts_of_forms(), table.roofline(), table.of_models()):
        assert "\n".join(lines) in note
    assert note.startswith("# The NVFP4 GEMM of Blackwell: not run\n")


# ---- on a B200 -----------------------------------------------------------------------------------


def mismatch(case: checks.Case) -> str:
    """Run a case on the GPU, D full of NaN before, rows behind it as well; compare every bit."""
    drawn = blackwell.drawn(case, "cuda")
    rows = case.problem.rows
    shape = (rows + checks.ROWS_BEHIND, case.problem.columns)
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    entry = import_module("degarble.kernels.gemm.sm100_gemm_nvfp4").gemm_nvfp4
    entry(*drawn.given, case.problem, SETTINGS, form=case.form, out=out[:rows])
    if not out[rows:].isnan().all():
        return f"{case.name}: numbers written behind D"
    return blackwell.difference(case, out[:rows], drawn.want)


@pytest.mark.b200
@pytest.mark.parametrize("inner", [32, 64, 96, 288, 1056])
@each_form
def test_tails(form: GemmForm, inner: int) -> None:
    wrong = [why for case in checks.tails(form, inner) if (why := mismatch(case))]
    assert not wrong


@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_shapes(seed: int) -> None:
    """In every form of one thread block in turn, and in the one that the table chooses."""
    cases = checks.fuzzed("nvfp4", seed, AT_ONCE)
    turns = [*FORMS, None]
    forms = [
        turns[i % len(turns)] or choose_form(case.problem, SM100A.name)
        for i, case in enumerate(cases)
    ]
    cases = [replace(case, form=form) for case, form in zip(cases, forms, strict=True)]
    assert not [why for case in cases if (why := mismatch(case))]


@pytest.mark.b200
@pytest.mark.parametrize("extents", [(4096, 7168, 4096), (33, 7168, 18432), (300, 520, 1184)])
def test_tile_and_cluster_shape_do_not_change_a_bit(extents: tuple[int, int, int]) -> None:
    """One instruction is one step of arithmetic, so a result depends on the order of K alone."""
    kernels = import_module("degarble.kernels.gemm.sm100_gemm_nvfp4")
    tactics = [form.tactic for form in (*FORMS, *CLUSTERED)]
    tactics += [replace(tactic, group=group) for tactic in tactics[-1:] for group in (1, 4)]
    found = []
    for tactic in tactics:
        case = checks.with_form(replace(FORMS[0], tactic=tactic), extents, "ordinary", 9)
        given = checks.nvfp4_sides(case, "cuda").given
        out = kernels.gemm_nvfp4(*given, case.problem, SETTINGS, form=case.form)
        found.append((case.name, out.view(torch.int16)))
    name, first = found[0]
    assert not [f"{other} is not {name}" for other, out in found if not torch.equal(out, first)]


@pytest.mark.b200
def test_two_runs_are_equal_and_a_graph_replays_on_changed_data() -> None:
    kernels = import_module("degarble.kernels.gemm.sm100_gemm_nvfp4")
    cases = [checks.with_form(FORMS[2], (700, 520, 1184), "ordinary", seed) for seed in (1, 2)]
    (a, b), (c, d) = (checks.nvfp4_sides(case, "cuda").given for case in cases)
    first, again, want = (
        kernels.gemm_nvfp4(*given, cases[0].problem, SETTINGS, form=FORMS[2])
        for given in ((a, b), (a, b), (c, d))
    )
    assert torch.equal(first.view(torch.int16), again.view(torch.int16))
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(first)
    with torch.cuda.graph(graph):
        kernels.gemm_nvfp4(a, b, cases[0].problem, SETTINGS, form=FORMS[2], out=out)
    for into, of in zip((*a, *b), (*c, *d), strict=True):
        into.copy_(of)
    graph.replay()
    assert torch.equal(out.view(torch.int16), want.view(torch.int16))
