"""BF16 times NVFP4: compiled for every target, refusals, and on an H200 within the budget."""

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
    ScaleDirectionMismatch,
    ShapeMismatch,
    UnknownName,
)
from degarble.harness.formats.layouts import SWIZZLE_8X4
from degarble.harness.formats.number_formats import NibbleOrder, ScaleDirection
from degarble.kernels.gemm.w4a16_problem import (
    LAYOUTS,
    PARTS,
    TACTICS,
    W4A16Problem,
    W4A16Tactic,
    choose_form,
    choose_tactic,
)
from degarble.kernels.runtime.compiling import CompileSettings, cubin_facts
from degarble.kernels.runtime.targets import TARGETS, Target
from degarble.suites.kernels.gemm import w4a16_checks as checks

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
FUZZED, AT_ONCE = 300, 50
OTHER_TACTICS = (
    W4A16Tactic(16, 0, tiles=1, groups=1, ranks=1, stages=3, resident=1),
    W4A16Tactic(16, 0, tiles=3, groups=1, ranks=1, stages=5, resident=1),
    W4A16Tactic(16, 0, tiles=4, groups=1, ranks=1, stages=4, resident=1),
    W4A16Tactic(16, 0, tiles=4, groups=2, ranks=2, stages=4, resident=1),
    W4A16Tactic(16, 0, tiles=4, groups=4, ranks=4, stages=4, resident=1),
    W4A16Tactic(16, 0, tiles=2, groups=1, ranks=1, stages=3, resident=1),
    W4A16Tactic(16, 0, tiles=2, groups=3, ranks=4, stages=6, resident=1),
)


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.sm90_gemm_w4a16")


def require_sound(
    kernels: ModuleType, problem: W4A16Problem, target: Target, tactic: W4A16Tactic | None = None
) -> None:
    form = choose_form(problem, tactic or choose_tactic(problem), target.name)
    kernel = kernels.compile_form(form, CompileSettings())
    assert f".target {target.name}\n" in kernel.ptx
    (found,) = cubin_facts(kernel.cubin)
    assert not found.spills, found
    assert found.registers * form.threads <= 65_536, found
    # A lane's four words of two rows: two mma each, for every eight columns.
    expected = form.tiles * form.columns // 8 * 8
    assert kernel.ptx.count("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") == expected
    assert ("e2m1x2" in kernel.ptx) is target.converts_e2m1
    assert kernel.ptx.count("mul.rn.bf16x2") == 32 * form.tiles * (not target.converts_e2m1)
    assert kernel.ptx.count("add.rn.f32") == PARTS - 1
    assert "fma.rn.f32" not in kernel.ptx
    # The kernel in front may still write what this one reads.
    wait = kernel.ptx.index("griddepcontrol.wait")
    for read in ("ld.global", "cp.async.bulk.tensor", "st.global"):
        assert kernel.ptx.index(read) > wait, read
    assert "ld.global.nc" not in kernel.ptx  # not constant while this kernel lives
    # A stage that was read is given back behind a vote on what was read; activations as well.
    voted = kernel.ptx.count("vote.sync.ballot.b32 all, some, 0xffffffff; add.u32 all, all, ")
    assert voted == kernel.ptx.count("mbarrier.arrive.shared::cta.b64 _, [all]") == form.tiles + 1
    # The others belong to warps behind the end of K, which have read nothing.
    assert kernel.ptx.count("mbarrier.arrive.shared::cta.b64") == 2 * form.tiles + 1


@each_target
def test_compiles_without_spills_and_with_the_instructions_meant(
    kernels: ModuleType, target: Target
) -> None:
    require_sound(kernels, W4A16Problem(1, 7168, 4096), target)
    require_sound(kernels, W4A16Problem(16, 7168, 4128, "128x4"), target)


@pytest.mark.slow
@each_target
@pytest.mark.parametrize("columns", [4096, 4128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_form_compiles(
    kernels: ModuleType, target: Target, layout: str, columns: int
) -> None:
    for tactic in TACTICS:
        for rows in sorted({min(8, tactic.rows), tactic.rows}):
            require_sound(kernels, W4A16Problem(rows, 7168, columns, layout), target, tactic)


def test_refuses_by_name() -> None:
    case = checks.Case(W4A16Problem(4, 16, 64))
    x, weights = case.activations, case.weights

    def run(x: torch.Tensor = x, out: torch.Tensor | None = None, **changed: Any) -> None:
        checks.multiply(x, replace(weights, **changed), out=out)

    with pytest.raises(DtypeMismatch, match="activations"):
        run(x.half())
    with pytest.raises(ShapeMismatch, match="activations"):
        run(x[:, :32])
    with pytest.raises(ShapeMismatch, match="rows of activations"):
        run(x.repeat(17, 1))
    with pytest.raises(ShapeMismatch, match="activations and weights"):
        run(x[None])
    with pytest.raises(LayoutMismatch, match="strides of activations"):
        run(torch.zeros(64, 4, dtype=torch.bfloat16).T)
    with pytest.raises(LayoutMismatch, match="address of activations"):
        run(torch.zeros(257, dtype=torch.bfloat16)[1:].view(4, 64))
    with pytest.raises(LayoutMismatch, match="nibble_order"):
        run(nibble_order=NibbleOrder.HIGH_EVEN)
    with pytest.raises(ScaleDirectionMismatch, match="direction"):
        run(direction=ScaleDirection.ENCODE)
    with pytest.raises(InvalidArgument, match="one CUDA device"):
        run()
    with pytest.raises(ShapeMismatch, match="output"):
        run(out=torch.zeros(4, 8, dtype=torch.bfloat16))
    with pytest.raises(UnknownName, match="8x4"):
        checks.multiply(x, weights.with_layout(SWIZZLE_8X4))


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


def test_cases_have_names_of_their_own_and_fuzzed_ones_differ() -> None:
    names = [case.name for case in checks.cases()]
    assert len(set(names)) == len(names)
    assert checks.fuzzed(1, 20) == checks.fuzzed(1, 20) != checks.fuzzed(2, 20)


@pytest.mark.h200
@pytest.mark.parametrize("case", checks.cases(), ids=lambda case: case.name.replace(" ", "-"))
def test_results_are_within_the_budget(case: checks.Case) -> None:
    assert not checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_shapes(seed: int) -> None:
    wrong = [why for case in checks.fuzzed(seed, AT_ONCE) if (why := checks.mismatch(case))]
    assert not wrong


@pytest.mark.h200
def test_runs_are_equal_bit_for_bit() -> None:
    large = [checks.Case(W4A16Problem(m, 7168, 4096), seed=m) for m in (1, 8, 16)]
    for case in (*large, *checks.fuzzed(99, 20)):
        first = on_device_bits(case)
        for _ in range(5):
            assert torch.equal(on_device_bits(case), first), case.name


def on_device_bits(case: checks.Case) -> torch.Tensor:
    return checks.on_device(case).view(torch.int16)


@pytest.mark.h200
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_depends_neither_on_other_rows_nor_on_how_many_they_are(layout: str) -> None:
    case = checks.Case(W4A16Problem(64, 4232, 4096, layout), seed=3)
    weights, x_MK = checks.on_gpu(case.weights), case.activations.cuda()
    want = checks.multiply(x_MK, weights)
    for rows in (1, 2, 4, 7, 8, 9, 16, 17, 32, 33):
        for first in (0, 64 - rows):
            part = x_MK[first : first + rows].contiguous()
            got = checks.multiply(part, weights)
            assert torch.equal(got, want[first : first + rows]), (rows, first)
    x_MK[5] = torch.nan
    got = checks.multiply(x_MK, weights)
    others = [row for row in range(64) if row != 5]
    assert bool(got[5].isnan().all())
    assert torch.equal(got[others], want[others])


@pytest.mark.h200
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiles_clusters_and_stages_do_not_change_a_bit(kernels: ModuleType, layout: str) -> None:
    for columns in (4096, 6176):
        case = checks.Case(W4A16Problem(13, 1160, columns, layout), seed=columns)
        want = checks.on_device(case)
        _, given = kernels.operands_of(case.activations.cuda(), checks.on_gpu(case.weights))
        for tactic in OTHER_TACTICS:
            form = choose_form(case.problem, tactic, "sm_90a")
            out = torch.full_like(want, torch.nan)
            kernel = kernels.compile_form(form, checks.SETTINGS)
            kernels.KERNEL.launch(kernel, form, case.problem, {**given, "out": out})
            assert torch.equal(out, want), tactic


@pytest.mark.h200
def test_a_graph_replays_on_changed_data() -> None:
    problem = W4A16Problem(7, 1536, 7168, "128x4")
    cases = [checks.Case(problem, seed=7 * seed) for seed in range(4)]
    x, weights = cases[0].activations.cuda(), checks.on_gpu(cases[0].weights)
    out = torch.empty(7, 1536, dtype=torch.bfloat16, device="cuda")
    checks.multiply(x, weights, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        checks.multiply(x, weights, out=out)
    for case in cases:
        x.copy_(case.activations)
        weights.codes.copy_(case.weights.codes)
        weights.block_scale.copy_(case.weights.block_scale)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, checks.on_device(case))


@pytest.mark.h200
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
def test_launches_that_overlap_read_what_the_ones_before_wrote(rows: int) -> None:
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
            checks.multiply(x_MK, weights[step % 6], out=outs[step % 2])
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
def test_no_stage_is_filled_again_before_it_is_read(kernels: ModuleType) -> None:
    """Weights that stay in the cache, so that they come soon, and launches without a pause."""
    case = checks.Case(W4A16Problem(13, 1160, 6176), seed=3)
    want = checks.on_device(case)
    _, given = kernels.operands_of(case.activations.cuda(), checks.on_gpu(case.weights))
    for tactic in OTHER_TACTICS:
        form = choose_form(case.problem, tactic, "sm_90a")
        kernel = kernels.compile_form(form, checks.SETTINGS)
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
def test_nan_and_infinity_stay_in_their_places() -> None:
    case = checks.Case(W4A16Problem(2, 64, 512), seed=1)
    weights, x_MK = checks.on_gpu(case.weights), case.activations.cuda()
    want = checks.multiply(x_MK, weights)
    weights.block_scale[9, 3] = checks.NAN_CODE
    got = checks.multiply(x_MK, weights)
    assert bool(got[:, 9].isnan().all())
    others = [output for output in range(64) if output != 9]
    assert torch.equal(got[:, others], want[:, others])
    assert checks.multiply(x_MK[:0], weights).shape == (0, 64)
