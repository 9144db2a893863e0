"""Experts on Blackwell: machine code as derived, refusals, and the expected load of a B200.

Nothing here ran on a B200.
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    MissingDevice,
    ShapeMismatch,
)
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.moe import problem as moe_problem
from degarble.kernels.moe.problem import BEFORE_W2, GATE_AND_UP, MoeProblem
from degarble.kernels.runtime import kernel as descriptor
from degarble.kernels.runtime.compiling import cubin_facts, package_root, unstated_roundings
from degarble.kernels.runtime.targets import SM90A
from degarble.suites.kernels import gemm_code as plain
from degarble.suites.kernels.gemm_code import expected_bytes
from degarble.suites.kernels.moe import moe_checks as checks
from degarble.suites.kernels.moe import moe_twin as twin
from degarble.suites.kernels.moe import sm100_moe_table as table
from degarble.suites.kernels.moe.contract import MODELS, OF_SECOND, problem_of
from degarble.suites.kernels.moe.moe_checks import Case
from degarble.suites.kernels.moe.test_sm90_moe import (
    SHAPES,
    fp8_weights,
    is_near_the_exact_expert,
    is_one_kernel_after_the_other,
    refuses_as_a_shared_expert,
)

if TYPE_CHECKING:
    from types import ModuleType

    from degarble.kernels.moe.problem import MoeForm
    from degarble.kernels.runtime.compiling import CompiledKernel


# --------------------------------------------------------------------------------------------------
# Compare PTX and cubin of a grouped sm_100a product with its derived facts.
#
# Only the readings that differ from the plain GEMM's (suites/kernels/gemm_code.py): boxes of one
# matrix and of many, what FC1 converts and writes without TMA, what FC2 stores warp by warp. Every
# figure is a number in the text.


def count_of(pattern: str, ptx: str) -> int:
    """Count instructions."""
    return len(re.findall(pattern, ptx))


def figures_of_leaving(ptx: str, form: MoeForm) -> dict[str, tuple[Any, Any]]:
    """Return what the text has of a thread's row on its way out."""
    first, pieces = form.gemm.parts == GATE_AND_UP, tensor_memory.stores(form.gemm)
    blocks = moe_problem.blocks_of_tile(form) * first
    outputs, sums = blocks * facts.NVFP4.block, form.gemm.tactic.columns
    return {
        "stores of pieces": (ptx.count("cp.async.bulk.tensor.2d.global"), 0 if first else pieces),
        "stores of codes": (count_of(r"st\.global\.v4\.b32", ptx), blocks // 2),
        "stores of scales": (count_of(r"st\.global\.b32", ptx), blocks // 4),
        "pairs rounded": (
            count_of(r"cvt\.rn\.bf16x2\.f32", ptx),
            first * (sums + outputs) // 2,
        ),
        "numbers rounded": (count_of(r"cvt\.rn\.bf16\.f32", ptx), 0 if first else sums),
        "pairs of codes": (count_of(r"cvt\.rn\.satfinite\.e2m1x2\.f32", ptx), outputs // 2),
        "codes of scales": (count_of(r"cvt\.rn\.satfinite\.e4m3x2\.f32", ptx), blocks),
        "powers": (count_of(r"ex2\.approx\.ftz\.f32", ptx), outputs),
    }


def complaints(kernel: CompiledKernel, form: MoeForm) -> list[str]:
    """Say what differs from the derived facts."""
    (code,) = cubin_facts(kernel.cubin)
    ptx, of_gemm, held = kernel.ptx, form.gemm, tensor_memory.footprint(form.gemm)
    barriers, loads = plain.barriers_of(ptx), facts.loads(form.gemm)
    kind = f"tcgen05.mma.cta_group::1.{plain.KINDS[of_gemm.operands]}."
    figures = figures_of_leaving(ptx, form)
    figures |= {
        "spills": (code.spills, False),
        "registers fit": (code.registers <= plain.REGISTERS, True),
        "expected bytes": (expected_bytes(ptx), {facts.expected_bytes(of_gemm)}),
        "loads of rows": (
            ptx.count("cp.async.bulk.tensor.2d.shared"),
            sum(load.side == "a" for load in loads),
        ),
        "loads of experts": (
            ptx.count("cp.async.bulk.tensor.3d.shared"),
            sum(load.side == "b" for load in loads),
        ),
        "matrix instructions": (ptx.count(kind), tensor_memory.instructions(of_gemm)),
        "all matrix instructions": (ptx.count("tcgen05.mma"), tensor_memory.instructions(of_gemm)),
        "copies of scales": (
            ptx.count("tcgen05.cp.cta_group::1.32x128b.warpx4"),
            tensor_memory.scale_copies(of_gemm),
        ),
        "reads of sums": (
            ptx.count(f"tcgen05.ld.sync.aligned.32x32b.x{facts.PIECE_COLUMNS}."),
            tensor_memory.stores(of_gemm),
        ),
        "columns": (plain.columns_allocated(ptx), tensor_memory.columns_allocated(of_gemm)),
        "barriers": (len(barriers), held.barriers),
        "end of shared memory": (max(barriers) + facts.BARRIER_BYTES, held.total),
        "threads": (f".reqntid {tensor_memory.threads()}, 1, 1" in ptx, True),
        "roundings unstated": (unstated_roundings(ptx), ()),
    }
    figures |= plain.figures_of_clusters(ptx, of_gemm)
    found = plain.found_words(ptx)
    figures |= {name: (found[name], want) for name, want in plain.wanted_words(of_gemm).items()}
    return [
        f"{name}: got {got}, want {want}" for name, (got, want) in figures.items() if got != want
    ]


# --------------------------------------------------------------------------------------------------
# Grouped experts on Blackwell: machine code as derived, refusals; and what a B200 would be asked.
#
# No B200 is here. What is marked b200 was never run; what is not marked says nothing about a chip.

TARGET = "sm_100a"
SMALL = MoeProblem(5, 64, 96, 3, 2, 3, 10.0, BEFORE_W2)


def forms() -> list[moe_problem.MoeForm]:
    """Every form that any model takes with any number of tokens; extents come with a launch."""
    found = {
        form: None
        for model in MODELS
        for tokens in (1, 8192)
        for weighting in moe_problem.WEIGHTINGS
        for form in moe_problem.forms_of(problem_of(model, tokens, weighting), TARGET)
    }
    return list(found)


def other_forms() -> list[moe_problem.MoeForm]:
    """FC2 in tiles that the table does not take, and both in clusters that share loads."""
    taken = moe_problem.TACTICS[TARGET]
    others = [tactic for tactic in OF_SECOND if tactic not in taken]
    made = [moe_problem.forms_of(SMALL, TARGET, tactic)[1] for tactic in others]
    for shape in table.CLUSTERS[1:]:
        made += moe_problem.forms_of(SMALL, TARGET, table.clustered(shape))
    return made


def named(form: moe_problem.MoeForm) -> str:
    tactic = form.gemm.tactic
    cluster = f"{tactic.cluster_rows}x{tactic.cluster_columns}"
    return f"{form.gemm.parts}-{tactic.columns}-{cluster}-{form.limit}-{form.weighted}"


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.moe.sm100_moe_nvfp4")


@pytest.mark.needs("cutlass")
def test_machine_code_is_as_derived(kernels: ModuleType) -> None:
    """FC1 in the form that has all there is: a limit, and the routing weight before w2."""
    form, _ = moe_problem.forms_of(SMALL, TARGET)
    kernel = kernels.compile_form(form, checks.SETTINGS)
    assert not complaints(kernel, form)
    for old, new, complaint in (
        (", 55296;", ", 55280;", "expected bytes: got {55280}, want {55296}"),
        ("tcgen05.cp.", "tcgen05.cq.", "copies of scales: got 11, want 12"),
        ("tensor.3d.shared", "tensor.2d.shared", "loads of rows: got 3, want 2"),
        ("st.global.v4.b32", "st.global.v2.b32", "stores of codes: got 3, want 4"),
    ):
        wrong = replace(kernel, ptx=kernel.ptx.replace(old, new, 1))
        assert complaint in complaints(wrong, form)


@pytest.mark.needs("cutlass")
@pytest.mark.slow
@pytest.mark.parametrize("form", [*forms(), *other_forms()], ids=named)
def test_machine_code_of_every_form(kernels: ModuleType, form: moe_problem.MoeForm) -> None:
    assert not complaints(kernels.compile_form(form, checks.SETTINGS), form)


@pytest.mark.needs("cutlass")
def test_models_share_few_forms() -> None:
    assert len(forms()) == 5  # FC1 with and without limit, the weight in two places; FC2


@pytest.mark.needs("cutlass")
def test_refuses_by_name(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    given = checks.given_of(Case(SMALL, target=TARGET), "cpu").operands

    def refused(error: type[Exception], text: str, **other: Any) -> None:
        with pytest.raises(error, match=text):
            kernels.KERNEL.run(SMALL, checks.SETTINGS, **given | other)

    refused(ShapeMismatch, "shared expert", shared=given["x"][:4])
    refused(DtypeMismatch, "routing weights", weights=given["x"][:, :2])
    for name in ("w13", "w2"):
        scales = given[f"{name}_scales"]
        unaligned = torch.zeros(scales.numel() + 1, dtype=torch.uint8)[1:].view_as(scales)
        refused(LayoutMismatch, f"address of scales of {name}", **{f"{name}_scales": unaligned})
    refused(InvalidArgument, "devices of the tensors")
    monkeypatch.setattr(descriptor, "require_device", lambda _tensors: 0)
    monkeypatch.setattr(descriptor, "target_of_device", lambda _device: SM90A)
    refused(MissingDevice, "sm_100a")


@pytest.mark.needs("cutlass")
def test_the_note_shows_the_tables_as_they_are() -> None:
    note = (package_root() / "docs/design-notes/sm100_moe.md").read_text()
    for lines in (table.facts_of_forms(), table.clusters(), table.roofline()):
        assert "\n".join(lines) in note
    assert note.startswith("# Routed experts on Blackwell: not run\n")


@pytest.mark.needs("cutlass")
def test_padding_costs_nothing_where_weights_are_read_from_memory() -> None:
    """Groups are padded to 128 rows: up to 8,192 tokens all of that is hidden by memory."""
    for hidden, width, experts, chosen in table.MODELS.values():
        for tokens in table.TOKENS:
            problem = MoeProblem(tokens, hidden, width, experts, chosen, experts, 10.0)
            bounds = [table.bound(problem, form) for form in moe_problem.forms_of(problem, TARGET)]
            assert all(bound.matrix < bound.memory for bound in bounds)
    bounds = [
        table.bound(table.PUBLISHED, f) for f in moe_problem.forms_of(table.PUBLISHED, TARGET)
    ]
    assert all(bound.matrix > bound.memory for bound in bounds)


# ---- on a B200 -----------------------------------------------------------------------------------


@pytest.mark.needs("cutlass")
@pytest.mark.b200
def test_tile_and_cluster_shape_do_not_change_a_bit() -> None:
    """One instruction is one step of arithmetic, so rows depend on the order of K alone."""
    problem = MoeProblem(900, 1312, 1184, 8, 2, 8, 10.0)
    tactics = [*OF_SECOND, *map(table.clustered, table.CLUSTERS[1:])]
    found = []
    for tactic in tactics:
        case = Case(problem, "skewed", 6, tactic, target=TARGET)
        found.append(checks.on_device(case, checks.given_of(case)).out)
    assert all(torch.equal(tensor, found[0]) for tensor in found)
    case = Case(problem, "skewed", 6, tactics[-1], target=TARGET)
    assert not checks.mismatch(case)


@pytest.mark.needs("cutlass")
@pytest.mark.b200
@pytest.mark.parametrize("weighting", moe_problem.WEIGHTINGS)
@pytest.mark.parametrize("model", MODELS)
def test_is_the_twin_within_its_budget(model: str, weighting: str) -> None:
    hidden, width, _, chosen = MODELS[model]
    problem = MoeProblem(96, hidden, width, 8, chosen, 8, 10.0, weighting)
    case = Case(problem, seed=1, target=TARGET)
    given = checks.given_of(case)
    result = checks.on_device(case, given)
    found = [twin.compared(case, given, result, expert) for expert in (0, 5)]
    assert not [counted.wrong for counted in found if counted.wrong]
    assert max(counted.codes for counted in found) <= twin.MOST_CODES
    assert max(counted.scales for counted in found) <= twin.MOST_SCALES


@pytest.mark.needs("cutlass")
@pytest.mark.b200
def test_rows_are_their_own() -> None:
    case = Case(problem_of("v4-flash", 300), seed=4, target=TARGET)
    given = checks.given_of(case)
    whole = checks.on_device(case, given)
    other = torch.full_like(given.x, torch.nan)
    other[::7] = given.x[::7]
    alone = checks.on_device(case, given._replace(x=other))
    assert torch.equal(alone.out[::7], whole.out[::7])


# --------------------------------------------------------------------------------------------------
# The shared expert on Blackwell: refusals; what a B200 would be asked. Nothing here ran on one.


@pytest.fixture
def sm100_shared_expert_kernels() -> ModuleType:
    return import_module("degarble.kernels.moe.sm100_shared_expert")


@pytest.mark.needs("cutlass")
def test_shared_expert_refuses_by_name(
    sm100_shared_expert_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses_as_a_shared_expert(sm100_shared_expert_kernels, TARGET)
    problem = checks.one_expert(4, 256, 128, 10.0)
    given = {"x": torch.zeros(4, 256, dtype=torch.bfloat16)}
    monkeypatch.setattr(descriptor, "require_device", lambda _tensors: 0)
    monkeypatch.setattr(descriptor, "target_of_device", lambda _device: SM90A)
    with pytest.raises(MissingDevice, match="sm_100a"):
        sm100_shared_expert_kernels.FP8.run(
            problem, checks.SETTINGS, **given, **fp8_weights(256, 128, "float32", "cpu")
        )


# ---- on a B200 -----------------------------------------------------------------------------------


@pytest.mark.needs("cutlass")
@pytest.mark.b200
@pytest.mark.parametrize("shape", SHAPES)
def test_nvfp4_is_one_kernel_after_the_other(shape: tuple[int, int, int]) -> None:
    is_one_kernel_after_the_other(Case(checks.one_expert(*shape, 10.0), seed=2, target=TARGET))


@pytest.mark.needs("cutlass")
@pytest.mark.b200
@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_is_near_the_exact_expert(
    sm100_shared_expert_kernels: ModuleType, shape: tuple[int, int, int], scales: str
) -> None:
    is_near_the_exact_expert(sm100_shared_expert_kernels, shape, scales)
