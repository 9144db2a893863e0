"""What is particular to products of few rows, of groups, and of BF16 times NVFP4."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import (
    LayoutMismatch,
    ScaleDirectionMismatch,
    ShapeMismatch,
    UnknownName,
)
from degarble.harness.formats.layouts import SWIZZLE_8X4
from degarble.harness.formats.number_formats import NibbleOrder, ScaleDirection
from degarble.kernels.gemm import w4a16_wgmma_problem as wgmma
from degarble.kernels.gemm.gemv_problem import GemvProblem
from degarble.kernels.gemm.grouped_problem import GroupedProblem
from degarble.kernels.gemm.w4a16_problem import LAYOUTS, W4A16Problem, W4A16Tactic, choose_form
from degarble.suites.kernels import row_checks
from degarble.suites.kernels.contract import SETTINGS, kernels_of
from degarble.suites.kernels.gemm import grouped_checks, grouped_fp8_checks
from degarble.suites.kernels.gemm import w4a16_checks as checks

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.needs("cutlass")


# ---- products of few rows ------------------------------------------------------------------------


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("rows", [1, 8])
def test_the_head_of_v4_pro(rows: int) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, 7168, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(129_280, 7168, device="cuda", generator=generator).bfloat16()
    problem = GemvProblem(rows, 129_280, 7168)
    first = row_checks.multiply(x, weight, problem)
    assert torch.equal(first, row_checks.multiply(x, weight, problem))
    some = torch.randperm(129_280, device="cuda")[:4000]
    want = row_checks.product_by_definition(x, weight[some], "fp32")
    assert torch.equal(first[:, some], want)
    alone = row_checks.multiply(x[-1:], weight, GemvProblem(1, 129_280, 7168))
    assert torch.equal(alone[0], first[-1])


# ---- grouped products ----------------------------------------------------------------------------


@pytest.mark.h200
@pytest.mark.parametrize("fault", ["forth instead of back", "another group", "the first token"])
def test_planted_faults_are_caught(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    kernels = kernels_of("sm90_gemm_grouped")
    case = grouped_checks.Case(200, (4, 128, 1024, 512))
    assert not grouped_checks.mismatch(case)
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
    assert grouped_checks.mismatch(case)


@pytest.mark.h200
def test_no_tokens_launch_nothing() -> None:
    kernels = kernels_of("sm90_gemm_grouped")
    a, b, _ = grouped_checks.Case(0, (1, 64, 128, 0)).operands()
    made = grouped_checks.multiply(kernels, (a, b), GroupedProblem(0, 1, 64, 128))
    assert made.shape == (0, 64)


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
def test_planted_faults_of_codes_are_caught(
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    tokens: int,
) -> None:
    kernels = kernels_of("sm90_gemm_grouped_fp8")
    case = grouped_fp8_checks.Case(tokens, (4, 128, 2048, 512))
    given = grouped_fp8_checks.operands(case)
    want = grouped_fp8_checks.composed(case, given)
    assert not grouped_checks.difference(
        case.name, grouped_fp8_checks.launched(case, given)[0], want
    )
    place, name = FAULTS[fault]
    module = kernels if place == "." else getattr(kernels, place)
    monkeypatch.setattr(module, name, _other(getattr(module, name), fault))
    kernel = kernels.KERNEL
    monkeypatch.setitem(vars(kernel), "compile_form", kernel.compile_form.__wrapped__)
    assert grouped_checks.difference(case.name, grouped_fp8_checks.launched(case, given)[0], want)


@pytest.mark.h200
def test_no_tokens_launch_nothing_in_fp8() -> None:
    given = grouped_fp8_checks.operands(grouped_fp8_checks.Case(0, grouped_fp8_checks.TINY))
    problem = grouped_fp8_checks.Case(0, grouped_fp8_checks.TINY).problem
    assert grouped_fp8_checks.multiply(given, problem).shape == (0, 512)


# ---- BF16 times NVFP4 ----------------------------------------------------------------------------

OTHER_TACTICS = (
    W4A16Tactic(16, 0, tiles=1, groups=1, ranks=1, stages=3, resident=1),
    W4A16Tactic(16, 0, tiles=3, groups=1, ranks=1, stages=5, resident=1),
    W4A16Tactic(16, 0, tiles=4, groups=1, ranks=1, stages=4, resident=1),
    W4A16Tactic(16, 0, tiles=4, groups=2, ranks=2, stages=4, resident=1),
    W4A16Tactic(16, 0, tiles=4, groups=4, ranks=4, stages=4, resident=1),
    W4A16Tactic(16, 0, tiles=2, groups=1, ranks=1, stages=3, resident=1),
    W4A16Tactic(16, 0, tiles=2, groups=3, ranks=4, stages=6, resident=1),
)


def test_weights_that_no_kernel_reads_are_refused() -> None:
    case = checks.Case(W4A16Problem(4, 16, 64))
    x, weights = case.activations, case.weights
    for error, name, activations, changed in (
        (ShapeMismatch, "rows of activations", x.repeat(17, 1), weights),
        (ShapeMismatch, "activations and weights", x[None], weights),
        (LayoutMismatch, "nibble_order", x, replace(weights, nibble_order=NibbleOrder.HIGH_EVEN)),
        (ScaleDirectionMismatch, "direction", x, replace(weights, direction=ScaleDirection.ENCODE)),
        (UnknownName, "8x4", x, weights.with_layout(SWIZZLE_8X4)),
    ):
        with pytest.raises(error, match=name):
            checks.multiply(activations, changed)


def test_a_wrong_place_a_nan_and_a_lost_term_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    case = checks.Case(W4A16Problem(3, 24, 352, "128x4"), "ordinary", "all", seed=5)
    exact, _ = checks.twin(case, "cpu")
    out = exact.bfloat16()
    monkeypatch.setattr(checks, "on_device", lambda _case: out)
    assert not checks.mismatch(case)
    for damage in (torch.nan, 1.02 * float(out[2, 23]), 0.0):
        kept = out[2, 23].clone()
        out[2, 23] = damage
        assert "1 of 72 are farther than the budget" in checks.mismatch(case)
        out[2, 23] = kept
    swapped = out.clone()
    swapped[:, [0, 1]] = out[:, [1, 0]]
    monkeypatch.setattr(checks, "on_device", lambda _case: swapped)
    assert "are farther" in checks.mismatch(case)
    lost = replace(case.weights, codes=case.weights.codes.clone())
    lost.codes[:, -16:] = 0  # the last two blocks of K
    shortened = case.activations.double() @ checks.decoded(lost).T * lost.decode_scale.double()
    monkeypatch.setattr(checks, "on_device", lambda _case: shortened.bfloat16())
    assert "are farther" in checks.mismatch(case)


@pytest.mark.h200
def test_runs_are_equal_bit_for_bit() -> None:
    large = [checks.Case(W4A16Problem(m, 7168, 4096), seed=m) for m in (1, 8, 16)]
    by_wgmma = checks.fuzzed(98, 20, checks.BY_WGMMA)
    for case in (*large, *checks.fuzzed(99, 20), *by_wgmma):
        first = on_device_bits(case)
        for _ in range(5):
            assert torch.equal(on_device_bits(case), first), case.name


def on_device_bits(case: checks.Case) -> torch.Tensor:
    return checks.on_device(case).view(torch.int16)


by_each = pytest.mark.parametrize("kernel", checks.KERNELS)


@pytest.mark.h200
@by_each
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_depends_neither_on_other_rows_nor_on_how_many_they_are(
    layout: str, kernel: str
) -> None:
    case = checks.Case(W4A16Problem(64, 4232, 4096, layout), seed=3)
    weights, x_MK = checks.on_gpu(case.weights), case.activations.cuda()
    want = checks.multiply(x_MK, weights, kernel=kernel)
    for rows in (1, 2, 4, 7, 8, 9, 16, 17, 32, 33):
        for first in (0, 64 - rows):
            part = x_MK[first : first + rows].contiguous()
            got = checks.multiply(part, weights, kernel=kernel)
            assert torch.equal(got, want[first : first + rows]), (rows, first)
    x_MK[5] = torch.nan
    got = checks.multiply(x_MK, weights, kernel=kernel)
    others = [row for row in range(64) if row != 5]
    assert bool(got[5].isnan().all())
    assert torch.equal(got[others], want[others])


@pytest.mark.h200
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiles_clusters_and_stages_do_not_change_a_bit(layout: str) -> None:
    kernels = kernels_of("sm90_gemm_w4a16")
    for columns in (4096, 6176):
        case = checks.Case(W4A16Problem(13, 1160, columns, layout), seed=columns)
        want = checks.on_device(case)
        _, given = kernels.operands_of(case.activations.cuda(), checks.on_gpu(case.weights))
        for tactic in OTHER_TACTICS:
            form = choose_form(case.problem, tactic, "sm_90a")
            out = torch.full_like(want, torch.nan)
            kernel = kernels.compile_form(form, SETTINGS)
            kernels.KERNEL.launch(kernel, form, case.problem, {**given, "out": out})
            assert torch.equal(out, want), tactic


@pytest.mark.h200
@by_each
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 50])
def test_launches_that_overlap_read_what_the_ones_before_wrote(rows: int, kernel: str) -> None:
    """A chain: each product is the next one's activations, its buffers were others' before."""
    size = 2048
    cases = [checks.Case(W4A16Problem(rows, size, size), seed=seed) for seed in range(6)]
    weights = [
        replace(checks.on_gpu(case.weights), tensor_scale=torch.tensor(2.0**-8, device="cuda"))
        for case in cases
    ]

    def chain(x_MK: torch.Tensor, wait: bool) -> list[torch.Tensor]:
        outs = [torch.full_like(x_MK, torch.nan) for _ in range(2)]
        found = []
        for step in range(24):
            checks.multiply(x_MK, weights[step % 6], outs[step % 2], kernel)
            x_MK = outs[step % 2]
            if wait:
                torch.cuda.synchronize()
            if wait or step % 8 == 7:
                found.append(x_MK.clone())
        return found

    x_MK = cases[0].activations.cuda()
    want = chain(x_MK, wait=True)[7::8]
    assert bool(torch.stack(want).isfinite().all())
    for _ in range(10):
        for mine, theirs in zip(chain(x_MK, wait=False), want, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.h200
def test_no_stage_is_filled_again_before_it_is_read() -> None:
    """Weights that stay in the cache, so that they come soon, and launches without a pause."""
    kernels = kernels_of("sm90_gemm_w4a16")
    case = checks.Case(W4A16Problem(13, 1160, 6176), seed=3)
    want = checks.on_device(case)
    _, given = kernels.operands_of(case.activations.cuda(), checks.on_gpu(case.weights))
    for tactic in OTHER_TACTICS:
        form = choose_form(case.problem, tactic, "sm_90a")
        kernel = kernels.compile_form(form, SETTINGS)
        outs = torch.full((32, *want.shape), torch.nan, dtype=want.dtype, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for out in outs:
                kernels.KERNEL.launch(kernel, form, case.problem, {**given, "out": out})
        for _ in range(40):
            outs.fill_(torch.nan)
            graph.replay()
            assert bool((outs == want).all()), tactic


@pytest.mark.h200
def test_groups_of_warps_do_not_change_a_bit_of_wgmma_and_no_stage_is_filled_too_early() -> None:
    """Launches without a pause, with weights that stay in the cache, so that they come soon."""
    kernels = kernels_of(checks.BY_WGMMA)
    for layout, columns in product(LAYOUTS, (4096, 6176)):
        problem = W4A16Problem(40, 1160, columns, layout)
        case = checks.Case(problem, seed=columns, kernel=checks.BY_WGMMA)
        want = checks.on_device(case)
        weights = checks.on_gpu(case.weights)
        _, given = kernels_of(checks.BY_MMA).operands_of(case.activations.cuda(), weights)
        _, ranks = wgmma.division(problem.outputs, columns)
        for groups in wgmma.GROUPS:
            form = wgmma.form_of(problem, (groups, ranks), "sm_90a")
            kernel = kernels.compile_form(form, SETTINGS)
            outs = torch.full((32, *want.shape), torch.nan, dtype=want.dtype, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for out in outs:
                    kernels.KERNEL.launch(kernel, form, problem, {**given, "out": out})
            for _ in range(40):
                outs.fill_(torch.nan)
                graph.replay()
                assert bool((outs == want).all()), form


@pytest.mark.h200
def test_launches_by_the_hundred_thousand_beside_another_stream() -> None:
    case = checks.Case(W4A16Problem(50, 2048, 2048, "128x4"), seed=2, kernel=checks.BY_WGMMA)
    want, weights = checks.on_device(case), checks.on_gpu(case.weights)
    x_MK = case.activations.cuda()
    outs = torch.full((500, *want.shape), torch.nan, dtype=want.dtype, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            checks.multiply(x_MK, weights, out, checks.BY_WGMMA)
    neighbour, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda").bfloat16()
    for _ in range(200):
        outs.fill_(torch.nan)
        with torch.cuda.stream(neighbour):
            for _ in range(40):
                busy @ busy
        graph.replay()
        assert bool((outs == want).all())
    torch.cuda.synchronize()


facts_run = wgmma.run_of
WGMMA_FAULTS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "the scales of one row": ("facts", "scale_word", lambda row, _form: 16 + 0 * row),
    "scales of rows further on": ("facts", "first_scale_row", lambda tile, _form: 64 + 0 * tile),
    "rows that two quads decode": (
        "facts", "row_of", lambda warp, group: warp * 16 + group // 2 * 2,
    ),
    "activations as they came": (".", "permute_row", lambda _chunks: None),
    "a run too short": (
        "facts", "run_of", lambda *told: (facts_run(*told)[0], facts_run(*told)[1] - 1),
    ),
    "the first run alone": (".", "scaled_total", lambda numbers, scale: numbers[0] * scale),
}  # fmt: skip


@pytest.mark.h200
@pytest.mark.parametrize("fault", WGMMA_FAULTS)
def test_planted_faults_of_wgmma_are_caught(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    kernels = kernels_of(checks.BY_WGMMA)
    problem = W4A16Problem(20, 576, 4096, "128x4")
    case = checks.Case(problem, seed=4, kernel=checks.BY_WGMMA)
    assert not checks.mismatch(case)
    place, name, wrong = WGMMA_FAULTS[fault]
    monkeypatch.setattr(kernels if place == "." else kernels.facts, name, wrong)
    monkeypatch.setitem(
        vars(kernels.KERNEL), "compile_form", kernels.KERNEL.compile_form.__wrapped__
    )
    assert checks.mismatch(case)


@pytest.mark.h200
@by_each
def test_nan_and_infinity_stay_in_their_places(kernel: str) -> None:
    case = checks.Case(W4A16Problem(2, 64, 512), seed=1)
    weights, x_MK = checks.on_gpu(case.weights), case.activations.cuda()
    want = checks.multiply(x_MK, weights, kernel=kernel)
    weights.block_scale[9, 3] = checks.NAN_CODE
    got = checks.multiply(x_MK, weights, kernel=kernel)
    assert bool(got[:, 9].isnan().all())
    others = [output for output in range(64) if output != 9]
    assert torch.equal(got[:, others], want[:, others])
    assert checks.multiply(x_MK[:0], weights, kernel=kernel).shape == (0, 64)
