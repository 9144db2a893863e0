"""GEMMs on Blackwell: machine code as derived, refusals, and what a B200 would be asked.

Nothing here ran on a B200.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import (
    InvalidArgument,
    UnknownName,
)
from degarble.kernels.gemm import grouped_problem as facts
from degarble.kernels.gemm import problem as gemm
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.gemm.grouped_problem import GroupedProblem
from degarble.kernels.gemm.problem import GemmForm, GemmProblem, choose_form
from degarble.kernels.runtime.compiling import (
    CompileSettings,
    cubin_facts,
    package_root,
    unstated_roundings,
)
from degarble.kernels.runtime.targets import SM100A
from degarble.suites.kernels import gemm_checks as checks
from degarble.suites.kernels import gemm_code, tcgen05_words
from degarble.suites.kernels import sm100_checks as blackwell
from degarble.suites.kernels import sm100_table as table
from degarble.suites.kernels.contract import kernels_of
from degarble.suites.kernels.gemm import grouped_checks
from degarble.suites.kernels.tcgen05_words import Product

if TYPE_CHECKING:
    from types import ModuleType

    from degarble.kernels.gemm.grouped_problem import GroupedForm
    from degarble.kernels.runtime.compiling import CompiledKernel

pytestmark = pytest.mark.needs("cutlass")


# --------------------------------------------------------------------------------------------------
# The BF16 GEMM on Blackwell: machine code as derived, bits of the host model; asked of a B200.
#
# No B200 is here. What is marked b200 was never run; what is not marked says nothing about a chip.

FORMS = blackwell.forms("bf16")
SETTINGS = CompileSettings()
CLUSTERED = [clustered for form in FORMS for clustered in blackwell.clustered(form)]
each_form = pytest.mark.parametrize("form", FORMS, ids=blackwell.named)


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.sm100_gemm_bf16")


def test_machine_code_is_as_derived(kernels: ModuleType) -> None:
    form = FORMS[-1]
    kernel = kernels.compile_form(form, SETTINGS)
    assert not gemm_code.sm100_complaints(kernel, form)
    word = gemm_code.wanted_words(form)["words of instructions"][0]
    for bit in range(32):
        ptx = kernel.ptx.replace(f", {word};", f", {word ^ 1 << bit};", 1)
        assert gemm_code.sm100_complaints(replace(kernel, ptx=ptx), form), bit


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, id=f"{operands}-{form.scales}-{blackwell.named(form)}")
        for operands in ("bf16", "fp8_block", "nvfp4")
        for plain in [blackwell.forms(operands)]
        for form in (
            *plain,
            *(gemm_form for one in plain for gemm_form in blackwell.clustered(one)),
        )
    ],
)
def test_machine_code_of_every_form(form: GemmForm) -> None:
    kernel = kernels_of(f"sm100_gemm_{form.operands}").compile_form(form, SETTINGS)
    assert not gemm_code.sm100_complaints(kernel, form)


@each_form
def test_every_bit_of_the_host_model(form: GemmForm) -> None:
    """Tails of all extents in two thread blocks; two sums take turns."""
    assert tensor_memory.accumulators(form) == 2
    case = checks.with_form(form, (130, form.tactic.columns + 8, 104), "ordinary", 3)
    drawn = blackwell.drawn(case)
    out, instructions = blackwell.on_model(case, drawn.given)
    assert instructions == 4 * 2 * 4
    assert not blackwell.difference(case, out, drawn.want)


def mismatch(case: checks.Case) -> str:
    """Run a case on the GPU, D and the rows behind it full of NaN before; compare every bit."""
    drawn, rows = blackwell.drawn(case, "cuda"), case.problem.rows
    shape = (rows + checks.ROWS_BEHIND, case.problem.columns)
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    kernels = kernels_of(f"sm100_gemm_{case.problem.operands}")
    checks.multiply(kernels, drawn.given, case.problem, case.form, out[:rows])
    if not out[rows:].isnan().all():
        return f"{case.name}: numbers written behind D"
    return blackwell.difference(case, out[:rows], drawn.want)


@pytest.mark.b200
@pytest.mark.parametrize(
    ("form", "inner"),
    [
        pytest.param(form, inner, id=f"{operands}-{blackwell.named(form)}-{inner}")
        for operands, lengths in (("bf16", (8, 64, 104, 1096)), ("nvfp4", (32, 64, 96, 288, 1056)))
        for form in blackwell.forms(operands)
        for inner in lengths
    ],
)
def test_tails(form: GemmForm, inner: int) -> None:
    wrong = [why for case in checks.tails(form, inner) if (why := mismatch(case))]
    assert not wrong


@pytest.mark.b200
@pytest.mark.parametrize("extents", [(4096, 7168, 4096), (33, 7168, 18432)])
def test_tile_and_cluster_shape_do_not_change_a_bit(extents: tuple[int, int, int]) -> None:
    kernels = import_module("degarble.kernels.gemm.sm100_gemm_bf16")
    found = []
    for form in (*FORMS, *CLUSTERED):
        case = checks.with_form(form, extents, "ordinary", 9)
        given = checks.bf16_sides(case, "cuda").given
        out = checks.multiply(kernels, given, case.problem, form)
        found.append(out.view(torch.int16))
    assert all(torch.equal(out, found[0]) for out in found)


# --------------------------------------------------------------------------------------------------
# The FP8 GEMM with block scales on Blackwell: machine code as derived, refusals; asked of a B200.
#
# No B200 is here. What is marked b200 was never run; what is not marked says nothing about a chip.
# references.tensor_core has no rule for tcgen05 on E4M3, so the host model leaves this form out.

SM100_GEMM_FP8_BLOCK_FORMS = blackwell.forms("fp8_block")
FP8_CLUSTERED = [
    clustered for form in SM100_GEMM_FP8_BLOCK_FORMS for clustered in blackwell.clustered(form)
]


def named(form: GemmForm) -> str:
    return f"{form.scales}-{blackwell.named(form)}"


sm100_gemm_fp8_block_each_form = pytest.mark.parametrize(
    "form", SM100_GEMM_FP8_BLOCK_FORMS, ids=named
)


@pytest.fixture
def sm100_gemm_fp8_block_kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.sm100_gemm_fp8_block")


def test_sm100_gemm_fp8_block_machine_code_is_as_derived(
    sm100_gemm_fp8_block_kernels: ModuleType,
) -> None:
    """A thread that holds 128 sums and reads 64 more spills nothing."""
    form = SM100_GEMM_FP8_BLOCK_FORMS[-1]
    assert not gemm_code.sm100_complaints(
        sm100_gemm_fp8_block_kernels.compile_form(form, SETTINGS), form
    )
    assert tensor_memory.accumulators(form) == tensor_memory.STAGE_ACCUMULATORS


def on_device(case: checks.Case, given: object) -> torch.Tensor:
    """Run a case; D with the rows behind it, all of them NaN before."""
    rows = case.problem.rows
    shape = (rows + checks.ROWS_BEHIND, case.problem.columns)
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    kernels = import_module("degarble.kernels.gemm.sm100_gemm_fp8_block")
    checks.multiply(kernels, given, case.problem, case.form, out[:rows])
    return out


@pytest.mark.b200
@pytest.mark.parametrize("inner", [32, 128, 160, 1184])
@sm100_gemm_fp8_block_each_form
def test_sm100_gemm_fp8_block_tails(form: GemmForm, inner: int) -> None:
    """The budget is that of Hopper's 13 fraction bits: tcgen05 has 25, so it has to hold."""
    found = []
    for case in checks.tails(form, inner):
        sides = checks.fp8_sides(case, "cuda")
        found.append(checks.difference(case, on_device(case, sides.given[0]), sides))
    assert not [why for why in found if why]


@pytest.mark.b200
@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
def test_sm100_gemm_fp8_block_tile_and_cluster_shape_do_not_change_a_bit(scales: str) -> None:
    forms = [
        form for form in (*SM100_GEMM_FP8_BLOCK_FORMS, *FP8_CLUSTERED) if form.scales == scales
    ]
    problem = GemmProblem(1030, 2056, 1184, "fp8_block", scales)
    given = checks.fp8_sides(checks.Case(problem, forms[0], seed=4), "cuda").given[0]
    outs = [on_device(checks.Case(problem, form), given) for form in forms]
    tensors = [out[: problem.rows].view(torch.int16) for out in outs]
    assert all(torch.equal(out, tensors[0]) for out in tensors)


# --------------------------------------------------------------------------------------------------
# The NVFP4 GEMM on Blackwell: machine code as derived, refusals; and what a B200 would be asked.
#
# No B200 is here. What is marked b200 was never run; what is not marked says nothing about a chip.

SM100_GEMM_NVFP4_FORMS = blackwell.forms()
NVFP4_CLUSTERED = [
    clustered for form in SM100_GEMM_NVFP4_FORMS for clustered in blackwell.clustered(form)
]
FUZZED, AT_ONCE = 120, 40


@pytest.fixture
def sm100_gemm_nvfp4_kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.sm100_gemm_nvfp4")


def test_sm100_gemm_nvfp4_machine_code_is_as_derived(sm100_gemm_nvfp4_kernels: ModuleType) -> None:
    form = SM100_GEMM_NVFP4_FORMS[-1]
    kernel = sm100_gemm_nvfp4_kernels.compile_form(form, SETTINGS)
    assert not gemm_code.sm100_complaints(kernel, form)
    wrong = replace(kernel, ptx=kernel.ptx.replace(", 55296;", ", 55280;"))
    assert gemm_code.sm100_complaints(wrong, form) == ["expected bytes: got {55280}, want {55296}"]
    wrong = replace(kernel, ptx=kernel.ptx.replace("tcgen05.cp.", "tcgen05.cq.", 1))
    assert gemm_code.sm100_complaints(wrong, form) == ["copies of scales: got 11, want 12"]


def test_every_bit_of_a_descriptor_is_detected_in_the_text(
    sm100_gemm_nvfp4_kernels: ModuleType,
) -> None:
    form = SM100_GEMM_NVFP4_FORMS[-1]
    kernel = sm100_gemm_nvfp4_kernels.compile_form(form, SETTINGS)
    for name, size in (("words of instructions", 32), ("words of operands", 64)):
        word = gemm_code.wanted_words(form)[name][0]
        for bit in range(size):
            ptx = kernel.ptx.replace(f", {word};", f", {word ^ 1 << bit};", 1)
            assert gemm_code.found_words(ptx)[name] != gemm_code.wanted_words(form)[name], (
                name,
                bit,
            )
    ptx = kernel.ptx.replace(", 292;", ", 293;")
    assert (
        gemm_code.found_words(ptx)["columns of scales"]
        != gemm_code.wanted_words(form)["columns of scales"]
    )


def test_clusters_share_loads_and_releases(sm100_gemm_nvfp4_kernels: ModuleType) -> None:
    form = blackwell.clustered(SM100_GEMM_NVFP4_FORMS[2])[0]
    kernel = sm100_gemm_nvfp4_kernels.compile_form(form, SETTINGS)
    assert not gemm_code.sm100_complaints(kernel, form)
    wrong = replace(kernel, ptx=kernel.ptx.replace("complete_tx::bytes.multicast", "", 1))
    assert "loads shared: got 2, want 3" in gemm_code.sm100_complaints(wrong, form)


def test_the_note_shows_the_tables_as_they_are() -> None:
    note = (package_root() / "docs/design-notes/sm100_gemm.md").read_text()
    for lines in (table.facts_of_forms(), table.roofline(), table.of_models()):
        assert "\n".join(lines) in note
    assert note.startswith("# The NVFP4 GEMM of Blackwell: not run\n")


# ---- on a B200 -----------------------------------------------------------------------------------


@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_shapes(seed: int) -> None:
    """In every form of one thread block in turn, and in the one that the table chooses."""
    cases = checks.fuzzed("nvfp4", seed, AT_ONCE)
    turns = [*SM100_GEMM_NVFP4_FORMS, None]
    forms = [
        turns[i % len(turns)] or choose_form(case.problem, SM100A.name)
        for i, case in enumerate(cases)
    ]
    cases = [replace(case, form=form) for case, form in zip(cases, forms, strict=True)]
    assert not [why for case in cases if (why := mismatch(case))]


@pytest.mark.b200
@pytest.mark.parametrize("extents", [(4096, 7168, 4096), (33, 7168, 18432), (300, 520, 1184)])
def test_sm100_gemm_nvfp4_tile_and_cluster_shape_do_not_change_a_bit(
    extents: tuple[int, int, int],
) -> None:
    """One instruction is one step of arithmetic, so a result depends on the order of K alone."""
    kernels = import_module("degarble.kernels.gemm.sm100_gemm_nvfp4")
    tactics = [form.tactic for form in (*SM100_GEMM_NVFP4_FORMS, *NVFP4_CLUSTERED)]
    tactics += [replace(tactic, group=group) for tactic in tactics[-1:] for group in (1, 4)]
    found = []
    for tactic in tactics:
        case = checks.with_form(
            replace(SM100_GEMM_NVFP4_FORMS[0], tactic=tactic), extents, "ordinary", 9
        )
        given = checks.nvfp4_sides(case, "cuda").given
        out = checks.multiply(kernels, given, case.problem, case.form)
        found.append((case.name, out.view(torch.int16)))
    name, first = found[0]
    assert not [f"{other} is not {name}" for other, out in found if not torch.equal(out, first)]


@pytest.mark.b200
def test_two_runs_are_equal_and_a_graph_replays_on_changed_data() -> None:
    kernels = import_module("degarble.kernels.gemm.sm100_gemm_nvfp4")
    cases = [
        checks.with_form(SM100_GEMM_NVFP4_FORMS[2], (700, 520, 1184), "ordinary", seed)
        for seed in (1, 2)
    ]
    (a, b), (c, d) = (checks.nvfp4_sides(case, "cuda").given for case in cases)
    first, again, want = (
        checks.multiply(kernels, given, cases[0].problem, SM100_GEMM_NVFP4_FORMS[2])
        for given in ((a, b), (a, b), (c, d))
    )
    assert torch.equal(first.view(torch.int16), again.view(torch.int16))
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(first)
    with torch.cuda.graph(graph):
        checks.multiply(kernels, (a, b), cases[0].problem, SM100_GEMM_NVFP4_FORMS[2], out)
    for into, of in zip((*a, *b), (*c, *d), strict=True):
        into.copy_(of)
    graph.replay()
    assert torch.equal(out.view(torch.int16), want.view(torch.int16))


# --------------------------------------------------------------------------------------------------
# Grouped products on Blackwell: machine code as derived, refusals; asked of a B200.
#
# No B200 is here. What is marked b200 was never run; what is not marked says nothing about a chip.

SHAPES = (
    *(shape for shape in (grouped_checks.PRO, grouped_checks.FLASH, grouped_checks.TINY)),
    (4, 64, 128, 0),
)
PROBLEMS = [
    GroupedProblem(tokens, *shape, 9 if shape[3] else 0)
    for shape in SHAPES
    for tokens in (1, 300, 8192)
]
CHUNKS = 4  # 16 bytes of a row that a thread turns


@pytest.fixture
def sm100_gemm_grouped_kernels() -> ModuleType:
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
    return [product._replace(a=product.a % a, b=product.b % b) for product in found]


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
        "products": (within_stages(tcgen05_words.products(ptx), form), products_of(form)),
        "numbers used before they are there": (tcgen05_words.early_uses(ptx), []),
        "columns": (
            gemm_code.columns_allocated(ptx),
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
def test_sm100_gemm_grouped_machine_code_is_as_derived(
    sm100_gemm_grouped_kernels: ModuleType, problem: GroupedProblem
) -> None:
    form = form_of(problem)
    kernel = sm100_gemm_grouped_kernels.compile_form(form, grouped_checks.SETTINGS)
    assert not complaints(kernel, form, sm100_gemm_grouped_kernels.threads(form))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_tiles_lie_within_groups_and_all_fits(
    sm100_gemm_grouped_kernels: ModuleType, problem: GroupedProblem
) -> None:
    form = form_of(problem)
    tactic, held = form.gemm.tactic, tensor_memory.footprint(form.gemm)
    assert problem.columns % tactic.columns == 0
    assert tactic.rows == tensor_memory.LANES
    # One warpgroup turns 64 rows; each stage may wait for its turn.
    assert tactic.rows == sm100_gemm_grouped_kernels.TURNING_GROUPS * 64
    behind = held.total + held.stages * gemm.BARRIER_BYTES
    assert behind <= SM100A.shared_memory_bytes
    assert problem.inner // facts.GROUPED_STEP % (form.steps_of_head or 1) == 0


def test_targets_and_outputs_without_a_form_are_refused(
    sm100_gemm_grouped_kernels: ModuleType,
) -> None:
    a, b = (torch.zeros(n, 128, dtype=torch.bfloat16) for n in (3, 64))
    wide = GroupedProblem(3, 1, 64, 128, out="fp32")
    with pytest.raises(InvalidArgument, match="sm_90a alone"):
        grouped_checks.multiply(sm100_gemm_grouped_kernels, (a, b), wide)
    with pytest.raises(UnknownName, match="target of grouped products"):
        facts.choose_grouped_form(GroupedProblem(3, 2, 64, 128, 128, 5), "sm_80")
