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
from degarble.kernels.moe.problem import AFTER_W2, BEFORE_W2, GATE_AND_UP, MoeProblem
from degarble.kernels.runtime.compiling import cubin_facts, package_root, unstated_roundings
from degarble.kernels.runtime.targets import SM90A
from degarble.suites.kernels import gemm_code as plain
from degarble.suites.kernels.gemm_code import expected_bytes
from degarble.suites.kernels.moe import moe_checks as checks
from degarble.suites.kernels.moe import moe_twin as twin
from degarble.suites.kernels.moe import sm100_moe_table as table
from degarble.suites.kernels.moe.moe_checks import Case
from degarble.suites.kernels.moe.test_sm90_moe import NORM_ALLOWED, SHAPES, exact, fp8_weights

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
V4_PRO, V4_FLASH, V3_2 = (7168, 3072, 384, 6), (4096, 2048, 256, 6), (7168, 2048, 256, 8)
MODELS = {"v4-pro": V4_PRO, "v4-flash": V4_FLASH, "v3.2": V3_2}
SMALL = MoeProblem(5, 64, 96, 3, 2, 3, 10.0, BEFORE_W2)
OF_SECOND = [replace(moe_problem.TACTICS[TARGET][0], columns=columns) for columns in (64, 192, 256)]
FUZZED, AT_ONCE = 120, 40


def problem_of(
    model: tuple[int, ...], tokens: int, weighting: str = AFTER_W2, experts: int = 0
) -> MoeProblem:
    hidden, width, routed, chosen = model
    limit = None if model is V3_2 else 10.0
    return MoeProblem(tokens, hidden, width, experts or routed, chosen, routed, limit, weighting)


def forms() -> list[moe_problem.MoeForm]:
    """Every form that any model takes with any number of tokens; extents come with a launch."""
    found = {
        form: None
        for model in MODELS.values()
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
@pytest.mark.slow
def test_what_is_around_the_products_compiles_without_spills() -> None:
    rows = import_module("degarble.kernels.moe.simt_moe_rows")
    tile = moe_problem.FIRST_TACTICS[TARGET].rows
    of_rows = moe_problem.RowsForm(tile, TARGET)
    made = [f(of_rows, checks.SETTINGS) for f in (rows.compile_plan, rows.compile_gather)]
    made += [
        rows.compile_combine(moe_problem.CombineForm(6, weighted, shared, TARGET), checks.SETTINGS)
        for weighted, shared in ((True, False), (False, True))
    ]
    for kernel in made:
        assert not [
            kernel_facts for kernel_facts in cubin_facts(kernel.cubin) if kernel_facts.spills
        ]
        assert not unstated_roundings(kernel.ptx)


@pytest.mark.needs("cutlass")
def test_refuses_by_name(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    given = checks.given_of(Case(SMALL, target=TARGET), "cpu")
    routing, weights = given.routing, given.weights
    w13, w2 = weights

    def refused(error: type[Exception], name: str, **other: Any) -> None:
        x, routed, held, shared = given._replace(**other)
        with pytest.raises(error, match=name):
            kernels.moe_nvfp4(x, routed, held, SMALL, checks.SETTINGS, shared_TD=shared)

    refused(DtypeMismatch, "x", x=given.x.float())
    refused(LayoutMismatch, "strides of x", x=given.x.T.contiguous().T)
    refused(ShapeMismatch, "shared expert", shared=given.x[:4])
    refused(DtypeMismatch, "routing weights", routing=routing._replace(weights=given.x[:, :2]))
    for name, held in (("w13", w13), ("w2", w2)):
        unaligned = torch.zeros(held.scales.numel() + 1, dtype=torch.uint8)[1:]
        for what, field, wrong, error in (
            ("codes", "codes", held.codes[:2], ShapeMismatch),
            ("scales", "scales", held.scales[..., :-1], ShapeMismatch),
            ("address of scales", "scales", unaligned.view_as(held.scales), LayoutMismatch),
            ("decode scales", "decode_scale", held.decode_scale.double(), DtypeMismatch),
        ):
            other = weights._replace(**{name: held._replace(**{field: wrong})})
            refused(error, f"{what} of {name}", weights=other)
    refused(InvalidArgument, "devices of the tensors")
    monkeypatch.setattr(kernels.contract, "require_device", lambda _tensors: 0)
    monkeypatch.setattr(kernels.contract, "target_of_device", lambda _device: SM90A)
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


def mismatch(problem: MoeProblem, choice: str = "even", seed: int = 0, **more: Any) -> str:
    """Say how a call differs from kernels that were compared with their definitions one by one."""
    return checks.mismatch(Case(problem, choice, seed, target=TARGET, **more))


@pytest.mark.needs("cutlass")
@pytest.mark.b200
@pytest.mark.parametrize("tactic", OF_SECOND, ids=lambda t: f"{t.columns}")
@pytest.mark.parametrize("weighting", moe_problem.WEIGHTINGS)
@pytest.mark.parametrize("choice", checks.CHOICES)
def test_choices_of_every_kind(choice: str, weighting: str, tactic: Any) -> None:
    problem = MoeProblem(700, 352, 416, 8, 1, 8, 10.0, weighting)
    assert not mismatch(problem, choice, 3, tactic=tactic)


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
@pytest.mark.parametrize("tokens", [1, 17, 2048])
@pytest.mark.parametrize("model", MODELS)
def test_shapes_of_models(model: str, tokens: int) -> None:
    weighting = BEFORE_W2 if tokens == 17 else AFTER_W2
    assert not mismatch(problem_of(MODELS[model], tokens, weighting), "skewed")
    torch.cuda.empty_cache()


@pytest.mark.needs("cutlass")
@pytest.mark.b200
def test_experts_that_are_elsewhere() -> None:
    for seed, experts in enumerate((1, 7, 16)):
        assert not mismatch(MoeProblem(333, 320, 288, experts, 4, 32, 10.0), "even", seed)


@pytest.mark.needs("cutlass")
@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed(seed: int) -> None:
    cases = checks.fuzzed(seed, AT_ONCE, TARGET)
    assert not [why for case in cases if (why := checks.mismatch(case))]


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
def test_rows_are_their_own_and_runs_are_equal() -> None:
    case = Case(problem_of(V4_FLASH, 300), seed=4, target=TARGET)
    given = checks.given_of(case)
    whole = checks.on_device(case, given)
    assert torch.equal(checks.on_device(case, given).out, whole.out)
    other = torch.full_like(given.x, torch.nan)
    other[::7] = given.x[::7]
    alone = checks.on_device(case, given._replace(x=other))
    assert torch.equal(alone.out[::7], whole.out[::7])


@pytest.mark.needs("cutlass")
@pytest.mark.b200
def test_a_graph_replays_on_other_tokens_and_other_choices(kernels: ModuleType) -> None:
    case = Case(MoeProblem(200, 512, 384, 16, 4, 16, 10.0), "one", 1, shared=True, target=TARGET)
    other = replace(case, choice="skewed", seed=2)
    given, later = checks.given_of(case), checks.given_of(other)
    result = checks.poisoned(case, given)
    kernels.launch(case.job, given, *result)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.launch(case.job, given, *result)
    tensors_of = import_module("degarble.kernels.moe.sm90_moe_nvfp4").tensors_of
    for old, new in zip(tensors_of(given), tensors_of(later), strict=True):
        old.copy_(new)
    graph.replay()
    fresh = checks.on_device(other, later)
    assert torch.equal(result.out, fresh.out)
    assert not checks.difference(other, later, fresh)


# --------------------------------------------------------------------------------------------------
# The shared expert on Blackwell: refusals; what a B200 would be asked. Nothing here ran on one.


@pytest.fixture
def sm100_shared_expert_kernels() -> ModuleType:
    return import_module("degarble.kernels.moe.sm100_shared_expert")


@pytest.fixture
def hopper() -> ModuleType:
    return import_module("degarble.kernels.moe.sm90_shared_expert")


@pytest.mark.needs("cutlass")
def test_fp8_refuses_by_name(
    sm100_shared_expert_kernels: ModuleType, hopper: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = hopper.problem_of(4, 256, 128, 10.0)
    x, weights = (
        torch.zeros(4, 256, dtype=torch.bfloat16),
        fp8_weights(hopper, 256, 128, "float32", "cpu"),
    )
    run, settings = sm100_shared_expert_kernels.shared_expert_fp8, checks.SETTINGS
    for error, name, values in (
        (DtypeMismatch, "x", x.float()),
        (ShapeMismatch, "x", x[:3]),
        (LayoutMismatch, "strides of x", x.T.contiguous().T),
    ):
        with pytest.raises(error, match=name):
            run(values, weights, problem, settings)
    with pytest.raises(ShapeMismatch, match="hidden and width of an FP8 expert"):
        run(x, weights, replace(problem, width=96), settings)
    for error, name, other in (
        (ShapeMismatch, "codes of w13", weights._replace(w13=weights.w13[:128])),
        (DtypeMismatch, "codes of w2", weights._replace(w2=weights.w2.view(torch.uint8))),
    ):
        with pytest.raises(error, match=name):
            run(x, other, problem, settings)
    monkeypatch.setattr(sm100_shared_expert_kernels.contract, "require_device", lambda _tensors: 0)
    monkeypatch.setattr(
        sm100_shared_expert_kernels.contract, "target_of_device", lambda _device: SM90A
    )
    with pytest.raises(MissingDevice, match="sm_100a"):
        run(x, weights, problem, settings)


@pytest.mark.needs("cutlass")
def test_nvfp4_refuses_by_name(sm100_shared_expert_kernels: ModuleType, hopper: ModuleType) -> None:
    case = checks.Case(hopper.problem_of(4, 64, 128, 10.0), target=TARGET)
    given = checks.given_of(case, "cpu")
    two = replace(case.problem, experts=2, routed=2, chosen=2)
    run, settings = sm100_shared_expert_kernels.shared_expert_nvfp4, checks.SETTINGS
    with pytest.raises(ShapeMismatch, match="experts of a shared expert"):
        run(given.x, given.weights, two, settings)
    w13 = given.weights.w13._replace(codes=given.weights.w13.codes[:, :1])
    broken = given.weights._replace(w13=w13)
    with pytest.raises(ShapeMismatch, match="codes of w13"):
        run(given.x, broken, case.problem, settings)


# ---- on a B200 -----------------------------------------------------------------------------------


@pytest.mark.needs("cutlass")
@pytest.mark.b200
@pytest.mark.parametrize("shape", SHAPES)
def test_nvfp4_is_one_kernel_after_the_other(
    sm100_shared_expert_kernels: ModuleType, hopper: ModuleType, shape: tuple[int, int, int]
) -> None:
    case = checks.Case(hopper.problem_of(*shape, 10.0), seed=2, target=TARGET)
    given = checks.given_of(case)
    got = sm100_shared_expert_kernels.shared_expert_nvfp4(
        given.x, given.weights, case.problem, checks.SETTINGS
    )
    slots = torch.arange(shape[0], device="cuda")
    want = checks.wanted(case, given, 0, slots)[2]
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.needs("cutlass")
@pytest.mark.b200
@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_is_near_the_exact_expert(
    sm100_shared_expert_kernels: ModuleType,
    hopper: ModuleType,
    shape: tuple[int, int, int],
    scales: str,
) -> None:
    tokens, hidden, width = shape
    weights = fp8_weights(hopper, hidden, width, scales, "cuda")
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    problem = hopper.problem_of(*shape, 10.0)
    got = sm100_shared_expert_kernels.shared_expert_fp8(x, weights, problem, checks.SETTINGS)
    want = exact(x, weights, 10.0)
    assert float((got.double() - want).norm() / want.norm()) < NORM_ALLOWED
    halves = weights.w13.view(2, width, hidden).flip(0).reshape(2 * width, hidden)
    changed = sm100_shared_expert_kernels.shared_expert_fp8(
        x, weights._replace(w13=halves.contiguous()), problem, checks.SETTINGS
    )
    assert float((changed.double() - want).norm() / want.norm()) > NORM_ALLOWED
