"""Grouped products on Hopper: compiled facts, refusals, on an H200 every bit of the composition."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    MissingDevice,
    ShapeMismatch,
)
from degarble.kernels.gemm import problem as gemm
from degarble.kernels.gemm.grouped_problem import (
    GroupedFp8Problem,
    GroupedProblem,
    choose_fp8_form,
    choose_grouped_form,
)
from degarble.kernels.runtime.compiling import (
    CompileSettings,
    cubin_facts,
    fused_instructions,
    unstated_roundings,
)
from degarble.suites.kernels import gemm_code
from degarble.suites.kernels.gemm import grouped_checks as checks
from degarble.suites.kernels.gemm import grouped_fp8_checks
from degarble.suites.kernels.gemm.grouped_checks import difference

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")


# --------------------------------------------------------------------------------------------------
# Grouped products: compiled facts, refusals, on an H200 every bit of the composition.

FUZZED, AT_ONCE = 500, 50


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.sm90_gemm_grouped")


def require_sound(kernels: ModuleType, problem: GroupedProblem) -> None:
    form = choose_grouped_form(problem)
    kernel = kernels.compile_form(form, CompileSettings())
    (facts,) = cubin_facts(kernel.cubin)
    assert not facts.spills, facts
    assert facts.registers <= gemm.registers_at_launch(form.gemm)
    assert unstated_roundings(kernel.ptx) == fused_instructions(kernel.ptx) == ()
    assert gemm_code.expected_bytes(kernel.ptx) == {gemm.transaction_bytes(form.gemm)}
    # The turned stages are written out once for the first head and once for the others.
    assert kernel.ptx.count("ld.shared.v4") == 8 * bool(form.turned)
    assert kernel.ptx.count("st.global.v2") == (form.out == "fp32") * form.gemm.tactic.columns // 4


def test_compiles_as_derived(kernels: ModuleType) -> None:
    require_sound(kernels, GroupedProblem(8192, 16, 1024, 4096, 512, 99))


@pytest.mark.slow
def test_every_form_compiles(kernels: ModuleType) -> None:
    require_sound(kernels, GroupedProblem(1, 1, 2048, 7168, out="fp32"))
    for tokens in (1, 300, 8192):
        for turned, out in ((0, "bf16"), (512, "bf16"), (128, "bf16"), (0, "fp32")):
            require_sound(kernels, GroupedProblem(tokens, 2, 256, 1024, turned, turned, out))


def test_refuses_by_name(kernels: ModuleType) -> None:
    problem = GroupedProblem(3, 2, 64, 128, 128, 5)
    a, b = (torch.zeros(n, k, dtype=torch.bfloat16) for n, k in ((3, 256), (128, 128)))
    turns = (torch.zeros(5, 64), torch.zeros(3, dtype=torch.int64))
    for error, name, given, told in (
        (DtypeMismatch, "A", (a.float(), b), turns),
        (ShapeMismatch, "A", (a[:, :128], b), turns),
        (ShapeMismatch, "B", (a, b[:64]), turns),
        (InvalidArgument, "turns", (a, b), None),
        (ShapeMismatch, "positions", (a, b), (turns[0], turns[1][:2])),
        ((InvalidArgument, MissingDevice), "CUDA device", (a, b), turns),
    ):
        with pytest.raises(error, match=name):
            checks.multiply(kernels, given, problem, told)


@pytest.mark.h200
@pytest.mark.parametrize("case", checks.cases(), ids=lambda case: case.name.replace(" ", "-"))
def test_every_bit_is_that_of_the_composition(case: checks.Case) -> None:
    assert not checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_products(seed: int) -> None:
    wrong = [why for case in checks.fuzzed(seed, AT_ONCE) if (why := checks.mismatch(case))]
    assert not wrong


@pytest.mark.h200
@pytest.mark.parametrize("fault", ["forth instead of back", "another group", "the first token"])
def test_planted_faults_are_caught(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    case = checks.Case(200, (4, 128, 1024, 512))
    assert not checks.mismatch(case)
    if fault == "forth instead of back":
        true = kernels.turned_words
        monkeypatch.setattr(
            kernels,
            "turned_words",
            lambda numbers, turns, *, back: true(numbers, turns, back=not back),
        )
    elif fault == "another group":
        true = kernels.grouped.tiles_of_grouped
        monkeypatch.setattr(kernels.grouped, "tiles_of_grouped", lambda *told: 2 * true(*told))
    else:
        true = kernels.heads_of
        monkeypatch.setattr(
            kernels, "heads_of", lambda *told: true(*told)._replace(row=true(*told).row * 0)
        )
    anew = kernels.compile_form.__wrapped__
    monkeypatch.setitem(vars(kernels.KERNEL), "compile_form", anew)
    assert checks.mismatch(case)


@pytest.mark.h200
def test_two_runs_are_equal_and_a_graph_replays_on_changed_data(kernels: ModuleType) -> None:
    case = checks.Case(130, checks.TINY)
    parts: Any = case.operands()
    first, _ = checks.launched(case, parts)
    again, _ = checks.launched(case, parts)
    assert torch.equal(first.view(torch.int16), again.view(torch.int16))
    a, b, turns = parts
    out = torch.empty_like(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        checks.multiply(kernels, (a, b), case.problem, turns, out)
    other: Any = checks.Case(130, checks.TINY, seed=9).operands()
    a.copy_(other[0])
    turns[1].copy_(other[2][1])
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    want = checks.composed(case, (a, b, turns))
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.nan_to_num(), want.nan_to_num())


@pytest.mark.h200
def test_no_tokens_launch_nothing(kernels: ModuleType) -> None:
    a, b, _ = checks.Case(0, (1, 64, 128, 0)).operands()
    made = checks.multiply(kernels, (a, b), GroupedProblem(0, 1, 64, 128))
    assert made.shape == (0, 64)


# --------------------------------------------------------------------------------------------------
# Grouped FP8 products: compiled facts, refusals, on an H200 every bit of the composition.

SM90_GEMM_GROUPED_FP8_FUZZED, SM90_GEMM_GROUPED_FP8_AT_ONCE = 300, 50


@pytest.fixture
def sm90_gemm_grouped_fp8_kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.sm90_gemm_grouped_fp8")


def sm90_gemm_grouped_fp8_require_sound(kernels: ModuleType, problem: GroupedFp8Problem) -> None:
    form = choose_fp8_form(problem)
    kernel = kernels.compile_form(form, grouped_fp8_checks.SETTINGS)
    (facts,) = cubin_facts(kernel.cubin)
    assert not facts.spills, facts
    assert facts.registers <= gemm.registers_at_launch(form.gemm)
    assert unstated_roundings(kernel.ptx) == ()
    assert gemm_code.expected_bytes(kernel.ptx) == {gemm.transaction_bytes(form.gemm)}
    # The stages of a head are written out; each has four steps of 32, A's codes in registers.
    stages = form.steps_of_head or 1
    assert len(gemm_code.wgmmas(kernel.ptx)) == 4 * stages
    assert kernel.ptx.count("cvt.rn.satfinite.e4m3x2") == 64 * stages // 2 * bool(form.turned)
    assert kernel.ptx.count("ld.shared.v2") == 16 * stages * bool(form.turned)


def test_sm90_gemm_grouped_fp8_compiles_as_derived(
    sm90_gemm_grouped_fp8_kernels: ModuleType,
) -> None:
    sm90_gemm_grouped_fp8_require_sound(
        sm90_gemm_grouped_fp8_kernels, GroupedFp8Problem(8, 16, 1024, 4096, "ue8m0", 512, 99)
    )
    sm90_gemm_grouped_fp8_require_sound(
        sm90_gemm_grouped_fp8_kernels, GroupedFp8Problem(8192, 16, 1024, 4096)
    )


@pytest.mark.slow
@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
@pytest.mark.parametrize("turned", [0, 128, 512])
@pytest.mark.parametrize("tokens", [1, 8192])
def test_sm90_gemm_grouped_fp8_every_form_compiles(
    sm90_gemm_grouped_fp8_kernels: ModuleType, tokens: int, turned: int, scales: str
) -> None:
    sm90_gemm_grouped_fp8_require_sound(
        sm90_gemm_grouped_fp8_kernels,
        GroupedFp8Problem(tokens, 2, 256, 1024, scales, turned, turned),
    )


def test_sm90_gemm_grouped_fp8_refuses_by_name() -> None:
    heads, codes = GroupedFp8Problem(3, 2, 64, 128, "float32", 128, 5), (torch.float8_e4m3fn,)
    a, b = torch.zeros(3, 256, dtype=torch.bfloat16), torch.zeros(128, 128).to(*codes)
    turns = {"turns": torch.zeros(5, 64), "positions": torch.zeros(3, dtype=torch.int64)}
    given = grouped_fp8_checks.GroupedFp8Operands(a, b, torch.zeros(1, 1), **turns)
    coded = grouped_fp8_checks.GroupedFp8Operands(
        a.to(*codes), b, torch.zeros(1, 1), torch.zeros(3, 2)
    )
    plain = GroupedFp8Problem(3, 2, 64, 128)
    for error, name, wrong, problem in (
        (DtypeMismatch, "A", given._replace(a=a.float()), heads),
        (ShapeMismatch, "A", given._replace(a=a[:, :128]), heads),
        (DtypeMismatch, "B", given._replace(b=b.view(torch.uint8)), heads),
        (ShapeMismatch, "scales of B", given._replace(b_scales=torch.zeros(2, 1)), heads),
        (InvalidArgument, "turns", given._replace(turns=None), heads),
        (ShapeMismatch, "positions", given._replace(positions=turns["positions"][:2]), heads),
        (InvalidArgument, "scales of A", given._replace(a_scales=coded.a_scales), heads),
        (InvalidArgument, "scales of A", coded._replace(a_scales=None), plain),
        (InvalidArgument, "turns", coded._replace(turns=turns["turns"]), plain),
        (DtypeMismatch, "scales of A", coded._replace(a_scales=torch.zeros(3, 2).byte()), plain),
        ((InvalidArgument, MissingDevice), "CUDA device", given, heads),
        ((InvalidArgument, MissingDevice), "CUDA device", coded, plain),
    ):
        with pytest.raises(error, match=name):
            grouped_fp8_checks.multiply(wrong, problem)


# ---- on an H200 ----------------------------------------------------------------------------------


@pytest.mark.h200
@pytest.mark.parametrize(
    "case", grouped_fp8_checks.cases(), ids=lambda case: case.name.replace(" ", "-")
)
def test_sm90_gemm_grouped_fp8_every_bit_is_that_of_the_composition(
    case: grouped_fp8_checks.Case,
) -> None:
    assert not grouped_fp8_checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.parametrize(
    "seed", range(SM90_GEMM_GROUPED_FP8_FUZZED // SM90_GEMM_GROUPED_FP8_AT_ONCE)
)
def test_sm90_gemm_grouped_fp8_fuzzed_products(seed: int) -> None:
    wrong = [
        why
        for case in grouped_fp8_checks.fuzzed(seed, SM90_GEMM_GROUPED_FP8_AT_ONCE)
        if (why := grouped_fp8_checks.mismatch(case))
    ]
    assert not wrong


def _other(true: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return what stands in a function's place."""
    made: dict[str, Callable[..., Any]] = {
        "forth instead of back": lambda numbers, turns, *, back: true(
            numbers, turns, back=not back
        ),
        "another group": lambda *told: 2 * true(*told),
        "largest of half a block": lambda words: true(words[:8]),
        "scales of the first step": lambda scales, row, step: true(scales, row, step * 0),
        "another stage turned": lambda *told: true(*told[:-1], not told[-1]),
        "the first row": lambda *told: true(*told)._replace(row=true(*told).row * 0),
    }
    return made[name]


FAULTS = {
    "forth instead of back": (".", "turned_words"),
    "another group": ("problems", "tiles_of_fp8_group"),
    "largest of half a block": (".", "block_amax"),
    "scales of the first step": ("plain", "scale_at"),
    "another stage turned": (".", "encode_stage"),
    "the first row": (".", "rows_of"),
}


@pytest.mark.h200
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("tokens", [60, 200])
def test_sm90_gemm_grouped_fp8_planted_faults_are_caught(
    sm90_gemm_grouped_fp8_kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    tokens: int,
) -> None:
    case = grouped_fp8_checks.Case(tokens, (4, 128, 2048, 512))
    given = grouped_fp8_checks.operands(case)
    want = grouped_fp8_checks.composed(case, given)
    assert not difference(case.name, grouped_fp8_checks.launched(case, given)[0], want)
    place, name = FAULTS[fault]
    module = (
        sm90_gemm_grouped_fp8_kernels
        if place == "."
        else getattr(sm90_gemm_grouped_fp8_kernels, place)
    )
    monkeypatch.setattr(module, name, _other(getattr(module, name), fault))
    kernel = sm90_gemm_grouped_fp8_kernels.KERNEL
    monkeypatch.setitem(vars(kernel), "compile_form", kernel.compile_form.__wrapped__)
    assert difference(case.name, grouped_fp8_checks.launched(case, given)[0], want)


@pytest.mark.h200
def test_sm90_gemm_grouped_fp8_two_runs_are_equal_and_a_graph_replays_on_changed_data() -> None:
    case = grouped_fp8_checks.Case(50, grouped_fp8_checks.TINY)
    given = grouped_fp8_checks.operands(case)
    first, _ = grouped_fp8_checks.launched(case, given)
    again, _ = grouped_fp8_checks.launched(case, given)
    assert torch.equal(first.view(torch.int16), again.view(torch.int16))
    out = torch.empty_like(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_fp8_checks.multiply(given, case.problem, out)
    other = grouped_fp8_checks.operands(
        grouped_fp8_checks.Case(50, grouped_fp8_checks.TINY, seed=9)
    )
    given.a.copy_(other.a)
    given.positions.copy_(other.positions)
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert not difference(case.name, out, grouped_fp8_checks.composed(case, given))


@pytest.mark.h200
def test_sm90_gemm_grouped_fp8_no_tokens_launch_nothing() -> None:
    given = grouped_fp8_checks.operands(grouped_fp8_checks.Case(0, grouped_fp8_checks.TINY))
    problem = grouped_fp8_checks.Case(0, grouped_fp8_checks.TINY).problem
    assert grouped_fp8_checks.multiply(given, problem).shape == (0, 512)
