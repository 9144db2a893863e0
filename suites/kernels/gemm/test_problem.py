"""GEMM problems as arithmetic: what fits, what barriers expect, order of sums, refusals."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    ShapeMismatch,
    UnknownName,
)
from degarble.kernels.gemm import gemv_problem, grouped_problem, w4a16_problem
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import w4a16_wgmma_problem as wgmma
from degarble.kernels.gemm.gemv_problem import GemvProblem, grid, steps
from degarble.kernels.gemm.gemv_problem import choose_form as choose_gemv_form
from degarble.kernels.gemm.grouped_problem import GroupedFp8Problem, GroupedProblem
from degarble.kernels.gemm.problem import TACTICS, GemmForm, GemmProblem, GemmTactic, choose_form
from degarble.kernels.gemm.w4a16_problem import (
    LAYOUTS,
    W4A16Form,
    W4A16Problem,
    W4A16Tactic,
    choose_tactic,
    rounds_kept,
    row_of,
    scale_offset,
    shared_bytes,
    tiles,
)
from degarble.kernels.gemm.w4a16_problem import TACTICS as W4A16_TACTICS
from degarble.kernels.gemm.w4a16_problem import choose_form as choose_w4a16_form
from degarble.kernels.gemm.w4a16_problem import grid as w4a16_grid
from degarble.kernels.primitives.quantise_problem import AMAX_FLOOR, SHARE
from degarble.kernels.runtime.modules import module_of
from degarble.kernels.runtime.targets import TARGETS
from degarble.suites.kernels import row_checks as checks

# --------------------------------------------------------------------------------------------------
# GEMM as arithmetic: what fits, what a barrier expects, who holds how many registers; refusals.

FORMS = [
    GemmForm(operands, scales, target, tactic)
    for (target, operands), tactics in TACTICS.items()
    for scales in facts.OPERANDS[operands].scales
    for tactic in tactics
    if target == "sm_90a"
]
BIG = GemmProblem(4096, 7168, 4096)


def named(form: GemmForm) -> str:
    tactic = form.tactic
    kind = "-swapped" * tactic.swapped
    return f"{form.operands}-{form.scales}-{tactic.rows}x{tactic.columns}{kind}"


@pytest.mark.parametrize("form", FORMS, ids=named)
def test_a_thread_block_fits_its_processor(form: GemmForm) -> None:
    held = facts.footprint(form)
    blocks = form.tactic.blocks
    each = held.total + facts.ALIGNMENT + facts.RESERVED_BYTES
    of_processor = TARGETS[form.target].shared_memory_bytes + facts.RESERVED_BYTES
    assert each * blocks <= of_processor
    assert 2 <= held.stages <= form.tactic.most_stages
    assert form.tactic.asked_early <= held.stages
    assert facts.registers_of_roles(form) * blocks <= facts.REGISTERS_OF_PROCESSOR
    assert facts.registers_of_roles(form) <= facts.registers_at_launch(form) * facts.threads(form)
    assert all(role.registers % 8 == 0 for role in facts.roles(form))
    assert all(24 <= role.registers <= facts.LARGEST_REGISTERS for role in facts.roles(form))


def test_numbers_of_the_large_bf16_form() -> None:
    form = choose_form(BIG, "sm_90a")
    assert facts.transaction_bytes(form) == (128 + 256) * 64 * 2
    held = facts.footprint(form)
    assert (held.stages, held.stage_bytes, held.output_bytes) == (4, 49_152, 32_768)
    assert facts.threads(form) == 384
    assert facts.release_arrivals(form) == 2 * 4 * 2  # two warpgroups of both thread blocks
    assert facts.cluster_tiles(BIG, form.tactic) == (16, 28)
    assert facts.grid(BIG, form.tactic, 132) == (2, 1, 66)
    assert facts.grid(GemmProblem(1, 8, 8), form.tactic, 132) == (2, 1, 1)
    assert BIG.operations == 240_518_168_576


FEW = GemmTactic(8, rows=64, columns=8, inner=64, swapped=True, direct=True, asked_early=3)


def test_swapped_tiles_are_counted_along_n_first() -> None:
    problem = GemmProblem(9, 7168, 4096)
    assert facts.cluster_tiles(problem, FEW) == (112, 2)
    assert facts.grid(problem, FEW, 132) == (1, 1, 132)
    assert facts.sides((9, 7168), FEW) == (7168, 9)
    assert facts.sides((9, 7168), replace(FEW, swapped=False)) == (9, 7168)
    form = GemmForm("bf16", "none", "sm_90a", FEW)
    assert facts.footprint(form).output_bytes == 0
    assert [load.rows for load in facts.loads(form)] == [64, 8]


def test_a_grid_holds_the_clusters_that_run_at_once() -> None:
    shared = GemmTactic(1.0, rows=128, columns=64, inner=64, cluster_columns=2)
    assert facts.grid(BIG, shared, 132) == (1, 2, 66)
    assert facts.grid(BIG, replace(shared, cluster_columns=4), 132) == (1, 4, 28)
    assert facts.grid(BIG, replace(shared, cluster_columns=4), 4) == (1, 4, 1)
    assert facts.grid(BIG, replace(shared, cluster_columns=4, cluster_rows=2), 132) == (2, 4, 14)


def test_the_number_of_columns_chooses_as_well() -> None:
    narrow, wide = (choose_form(GemmProblem(64, n, 64), "sm_90a").tactic for n in (2048, 7168))
    assert (narrow.columns, wide.columns) == (32, 64)


@pytest.mark.parametrize(
    ("operands", "target", "changed"),
    [
        ("bf16", "sm_90a", {"direct": False}),  # swapped operands leave by no TMA store
        ("bf16", "sm_90a", {"swapped": False, "direct": False}),  # nor do tiles of 8 columns
        ("bf16", "sm_90a", {"cluster_columns": 2}),  # who shares B would ask for it twice
        ("bf16", "sm_90a", {"swapped": False, "cluster_rows": 2}),
        ("fp8_block", "sm_90a", {"swapped": False, "columns": 96}),  # of two blocks' scales
        ("nvfp4", "sm_90a", {}),
        ("bf16", "sm_100a", {}),
    ],
)
def test_refuses_tactics_of_few_rows(operands: str, target: str, changed: dict[str, Any]) -> None:
    scales = facts.OPERANDS[operands].scales[0]
    assert GemmForm("bf16", "none", "sm_90a", FEW)
    with pytest.raises(InvalidArgument, match="tactic"):
        GemmForm(operands, scales, target, replace(FEW, **changed))


FOLDED = TACTICS["sm_90a", "fp8_block"][-1]


@pytest.mark.parametrize(
    ("operands", "target", "changed"),
    [
        ("bf16", "sm_90a", {}),
        ("fp8_block", "sm_100a", {}),
        ("fp8_block", "sm_90a", {"direct": True}),
        ("fp8_block", "sm_90a", {"folds": 3}),  # 256 rows are no whole folds of 64 for a warpgroup
    ],
)
def test_refuses_folds(operands: str, target: str, changed: dict[str, Any]) -> None:
    assert GemmForm("fp8_block", "float32", "sm_90a", FOLDED)
    scales = facts.OPERANDS[operands].scales[0]
    with pytest.raises(InvalidArgument, match="several folds only of fp8_block"):
        GemmForm(operands, scales, target, replace(FOLDED, **changed))


def test_a_warp_writes_and_reads_factors_in_banks_of_their_own() -> None:
    stride, rows = facts.factor_stride(FOLDED), facts.WARP // facts.FACTOR_STAGES
    written = {
        (stage * stride + row) % 32 for stage in range(facts.FACTOR_STAGES) for row in range(rows)
    }
    assert len(written) == facts.WARP
    assert FOLDED.rows % (facts.FACTOR_WARPS * rows) == 0  # of a warp; it writes four at a time
    form = GemmForm("fp8_block", "float32", "sm_90a", FOLDED)
    held = facts.footprint(form)
    assert held.factor_bytes == 4 * 2 * 8 * stride
    assert held.total + facts.ALIGNMENT <= TARGETS["sm_90a"].shared_memory_bytes
    assert (facts.consumers(form), held.stages) == (2, 3)


def test_what_a_stage_of_codes_loads() -> None:
    form = GemmForm("nvfp4", "e4m3", "sm_90a", GemmTactic(1.0, rows=64, columns=256, inner=64))
    boxes = {load.name: load.bytes for load in facts.loads(form)}
    assert boxes == {"a": 2048, "b": 8192, "scales of a": 512, "scales of b": 1024}
    assert facts.transaction_bytes(form) == sum(boxes.values())


def test_bytes_that_have_to_move() -> None:
    assert GemmProblem(2, 16, 24).bytes_moved == 2 * (2 * 24 + 16 * 24 + 2 * 16)
    nvfp4 = GemmProblem(129, 8, 96, "nvfp4", "e4m3")
    assert nvfp4.scale_bytes == (256 + 128) * 8
    assert nvfp4.bytes_moved == 137 * 48 + nvfp4.scale_bytes + 2 * 129 * 8
    assert GemmProblem(2, 136, 160, "fp8_block", "float32").scale_bytes == 4 * 2 * (2 + 2)
    assert GemmProblem(2, 136, 160, "fp8_block", "ue8m0").scale_bytes == 2 * (2 + 2)


def test_extents_are_no_part_of_a_form_but_through_the_table() -> None:
    forms = {choose_form(GemmProblem(m, n, 64), "sm_90a") for m in (513, 9999) for n in (8, 7168)}
    assert len(forms) == 1
    assert choose_form(GemmProblem(64, 7168, 8), "sm_90a").tactic.rows == 64
    assert choose_form(GemmProblem(65, 7168, 8), "sm_90a").tactic.rows == 128


def test_refuses_by_name() -> None:
    for extents in ((-1, 8, 8), (1, 4, 8), (1, 0, 8), (1, 8, 0), (1, 8, 12), (1 << 31, 8, 8)):
        with pytest.raises(ShapeMismatch, match="extents M, N, K"):
            GemmProblem(*extents)
    with pytest.raises(ShapeMismatch, match="multiples of 32"):
        GemmProblem(1, 8, 16, "nvfp4", "e4m3")
    with pytest.raises(UnknownName, match="nvfp4"):
        GemmProblem(1, 8, 32, "nvfp5")
    with pytest.raises(InvalidArgument, match="e4m3"):
        GemmProblem(1, 8, 32, "nvfp4", "ue8m0")
    with pytest.raises(UnknownName, match="target of a bf16 GEMM"):
        choose_form(GemmProblem(1, 8, 8), "sm_80")
    with pytest.raises(InvalidArgument, match="bytes of a stage"):
        facts.stages_that_fit(200_000, 0, "sm_90a")


# --------------------------------------------------------------------------------------------------
# What a GEMM's entry point refuses beyond what every kernel does: its D.

X = torch.zeros(4, 32, dtype=torch.bfloat16)


@pytest.mark.needs("cutlass")
def test_refuses_outputs() -> None:
    problem, kernel = GemmProblem(4, 32, 8), import_module(module_of("sm90_gemm_bf16")).KERNEL
    given = {name: torch.zeros(rows, 8).bfloat16() for name, rows in (("a", 4), ("b", 32))}
    kernel.require(problem, given | kernel.allocate(problem, X.device))
    with pytest.raises(DtypeMismatch, match="D = "):
        kernel.require(problem, given | {"out": X.float()})
    with pytest.raises(ShapeMismatch, match="D = "):
        kernel.require(problem, given | {"out": X[:3]})


# --------------------------------------------------------------------------------------------------
# Grouped products as arithmetic: tiles lie within groups, stages within heads, refusals.


@pytest.mark.parametrize("tokens", [1, 64, 65, 512, 513, 8192])
@pytest.mark.parametrize("shape", [(16, 1024, 4096, 512), (8, 1024, 4096, 512), (4, 128, 256, 128)])
def test_a_tile_lies_in_one_group_and_turned_values_in_one_stage(
    tokens: int, shape: tuple[int, int, int, int]
) -> None:
    groups, columns, inner, turned = shape
    problem = GroupedProblem(tokens, groups, columns, inner, turned, 9)
    form = grouped_problem.choose_grouped_form(problem)
    tactic, tiles = form.gemm.tactic, grouped_problem.tiles_of_grouped(problem, form)
    assert columns == tiles * tactic.columns
    assert tactic.cluster_columns == 1  # a group's A would be shared with another's
    assert tactic.inner == grouped_problem.GROUPED_STEP == 64
    turned_from = turned - 64
    last = (form.steps_of_head - 1) * grouped_problem.GROUPED_STEP
    assert turned_from == last
    _, all_tiles = facts.cluster_tiles(problem.gemm, tactic)
    assert all_tiles == groups * tiles


def test_a_single_group_takes_any_columns() -> None:
    problem = GroupedProblem(9000, 1, 520, 64, out="fp32")
    form = grouped_problem.choose_grouped_form(problem)
    assert (form.gemm.tactic.columns, grouped_problem.tiles_of_grouped(problem, form)) == (256, 3)
    assert problem.bytes_moved == 9000 * (2 * 64 + 4 * 520) + 2 * 520 * 64
    assert GroupedProblem(2, 4, 128, 256, 128, 9).bytes_moved == (
        2 * (2 * 1024 + 2 * 512 + 264) + 2 * 512 * 256
    )


def test_grouped_problem_refuses_by_name() -> None:
    for extents, error, name in (
        ((1, 2, 60, 64), ShapeMismatch, "columns and values of a group"),
        ((1, 1, 64, 96), ShapeMismatch, "columns and values of a group"),
        ((1, 2, 64, 64, 128, 5), ShapeMismatch, "columns and values of a group"),
        ((1, 2, 64, 256, 256, 5), ShapeMismatch, "width of a row"),
        ((1, 2, 64, 256, 128, 0), ShapeMismatch, "positions"),
        ((1, 0, 64, 64), ShapeMismatch, "groups"),
        ((-1, 1, 64, 64), ShapeMismatch, "tokens"),
        ((1, 1, 64, 64, 0, 0, "fp16"), UnknownName, "dtype of grouped results"),
    ):
        with pytest.raises(error, match=name):
            GroupedProblem(*extents)


# --------------------------------------------------------------------------------------------------
# Grouped FP8 products as arithmetic: tiles in groups, stages in heads, quotients; refusals.

PRO = GroupedFp8Problem(8, 16, 1024, 4096, turned=512, positions=9)


@pytest.mark.parametrize("tokens", [1, 64, 65, 8192])
@pytest.mark.parametrize("shape", [(16, 1024, 4096, 512), (8, 1024, 4096, 512), (4, 128, 256, 128)])
@pytest.mark.parametrize("turned", [True, False])
def test_a_tile_lies_in_one_group_and_under_one_scale(
    tokens: int, shape: tuple[int, int, int, int], turned: bool
) -> None:
    groups, columns, inner, head = shape
    more = (head, 9) if turned else (0, 0)
    problem = GroupedFp8Problem(tokens, groups, columns, inner, "float32", *more)
    form = grouped_problem.choose_fp8_form(problem)
    tactic, tiles = form.gemm.tactic, grouped_problem.tiles_of_fp8_group(problem, form)
    assert columns == tiles * tactic.columns
    assert tactic.cluster_columns == 1  # a group's A would be shared with another's
    assert tactic.inner == grouped_problem.FP8_STEP
    assert grouped_problem.FP8_STEP % tactic.columns == 0  # of B's rows under one scale
    if turned:
        assert form.steps_of_head * grouped_problem.FP8_STEP == head
        assert (
            head - 64 >= (form.steps_of_head - 1) * grouped_problem.FP8_STEP
        )  # what turns: the last stage
    _, all_tiles = facts.cluster_tiles(problem.gemm, tactic)
    assert all_tiles == groups * tiles


@pytest.mark.parametrize("tokens", [1, 65])
def test_heads_take_twice_the_bytes_of_codes_and_fit(tokens: int) -> None:
    forms = [
        grouped_problem.choose_fp8_form(
            replace(PRO, tokens=tokens, turned=head, positions=known)
        ).gemm
        for head, known in ((512, 9), (0, 0))
    ]
    heads, codes = (facts.bytes_of(form, "a") for form in forms)
    assert heads == 2 * codes
    assert facts.bytes_of(forms[0], "b") == facts.bytes_of(forms[1], "b")
    for form in forms:
        held = facts.footprint(form)
        each = held.total + facts.ALIGNMENT + facts.RESERVED_BYTES
        of_processor = TARGETS["sm_90a"].shared_memory_bytes + facts.RESERVED_BYTES
        assert each * form.tactic.blocks <= of_processor
        kept = facts.registers_of_roles(form) * form.tactic.blocks
        assert kept <= facts.REGISTERS_OF_PROCESSOR


def test_numbers_of_a_layer() -> None:
    assert PRO.rows_of_scales == 128
    assert PRO.blocks == 32
    assert PRO.operations == 2 * 8 * 16 * 1024 * 4096
    weight = 16 * 1024 * 4096 + 4 * 128 * 32
    assert PRO.bytes_moved == weight + 8 * (2 * 16 * 4096 + 2 * 16 * 1024 + 264)
    codes = replace(PRO, turned=0, positions=0, scales="ue8m0")
    weight = 16 * 1024 * 4096 + 128 * 32
    assert codes.bytes_moved == weight + 8 * (16 * 4128 + 2 * 16 * 1024)
    narrow = GroupedFp8Problem(700, 3, 64, 256)
    assert grouped_problem.choose_fp8_form(narrow).gemm.tactic.columns == 64
    assert not grouped_problem.turns_first(grouped_problem.TURNED_UP_TO)
    assert grouped_problem.turns_first(grouped_problem.TURNED_UP_TO + 1)


def quotients(*, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return quotients of all significands as the kernel makes them, and as they should be.

    A scale is the largest magnitude, a BF16 number or the floor, times a constant, so it has as
    many significands as BF16.
    """
    significands = torch.arange(128, 256).float()
    largest = torch.cat([significands / 128, torch.tensor([AMAX_FLOOR])])
    scale = (largest * SHARE)[:, None]
    powers = torch.exp2(torch.arange(-20, 9).float())
    number = torch.outer(significands, powers).reshape(1, -1).expand(len(scale), -1)
    inverse = (1 / scale).expand_as(number)
    got = grouped_problem.quotient(number, (-scale).expand_as(number), inverse, exact=exact)
    return got, number / scale


def test_every_quotient_is_the_one_that_is_rounded_once() -> None:
    got, want = quotients()
    assert got.numel() == 129 * 128 * 29
    assert torch.equal(got, want)


def test_a_product_with_the_inverse_alone_is_detected() -> None:
    got, want = quotients(exact=True)
    assert not torch.equal(got, want)


def test_the_inverse_of_a_power_of_two_is_exact() -> None:
    for exponent in (-23, 0, 5, 119):
        scale = np.float32(2.0) ** np.float32(exponent)
        made = grouped_problem.quotient(np.float32(1.5), -scale, np.float32(1) / scale, exact=True)
        assert float(made) == 1.5 / float(scale)


def test_grouped_fp8_problem_refuses_by_name() -> None:
    for wrong in ({"inner": 4160}, {"columns": 96}, {"inner": 640}):
        with pytest.raises(ShapeMismatch, match="columns and values of a group"):
            replace(PRO, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ShapeMismatch, match="width of a row"):
        replace(PRO, turned=100)
    with pytest.raises(ShapeMismatch, match="positions of the table"):
        replace(PRO, positions=0)
    with pytest.raises(ShapeMismatch, match="tokens"):
        replace(PRO, tokens=-1)
    with pytest.raises(InvalidArgument, match="format of block scales"):
        replace(PRO, scales="e4m3")
    with pytest.raises(UnknownName, match="target of grouped products in FP8"):
        grouped_problem.choose_fp8_form(PRO, "sm_100a")


# --------------------------------------------------------------------------------------------------
# The product of few rows, as arithmetic: who sums what, in which order, what fits; refusals.


def test_every_row_of_the_weight_has_one_warp() -> None:
    shapes = ((1, 1), (5, 1), (4099, 1), (129_280, 1), (1024, 8), (512, 128), (3, 500))
    problems = [GemvProblem(1, columns, 64, groups=of) for columns, of in shapes]
    problems += [GemvProblem(1, columns, 4096) for columns in (1, 64, 256, 513, 2047)]
    # V3.2's, of which the query's leaves multiprocessors to other branches.
    problems += [GemvProblem(1, columns, 7168) for columns in (1, 64, 128, 256, 576, 1536, 2047)]
    problems += [GemvProblem(1, columns, 1536, spared=24) for columns in (8192, 24_576)]
    for problem in problems:
        walk = choose_gemv_form(problem, "sm_90a").walk
        (walkers, groups), bundles = grid(problem, walk, 132), -(-problem.columns // walk.together)
        visited = [
            bundle
            for block in range(walkers)
            for warp in range(walk.warps)
            for bundle in range(block + walkers * warp, bundles, walkers * walk.warps)
        ]
        assert sorted(visited) == list(range(bundles))
        assert groups == problem.groups
        places = (132 - problem.spared) * walk.blocks
        assert walkers * groups <= places or walkers == 1 or walk.once


def test_walks_of_whole_turns_serve_plain_products_alone() -> None:
    def walk(columns: int, inner: int, **more: Any) -> gemv_problem.GemvWalk:
        return choose_gemv_form(GemvProblem(1, columns, inner, "bf16", **more), "sm_90a").walk

    assert walk(256, 7168).exact
    assert walk(256, 4096).once
    assert not walk(256, 7168).once
    assert walk(8192, 1536).exact
    assert not walk(256, 7176).exact
    assert not walk(8192, 2048).exact
    for more in ({"turned": 512, "positions": 9}, {"decoded": True}):
        assert not walk(256, 7168, **more).exact
        assert not walk(8192, 1536, **more).exact
    assert not choose_gemv_form(GemvProblem(2, 256, 7168), "sm_90a").walk.exact


@pytest.mark.parametrize(("processors", "left"), [(132, 100), (78, 59), (16, 12), (3, 3), (1, 1)])
def test_a_product_spares_a_quarter_of_the_multiprocessors_at_most(
    processors: int, left: int
) -> None:
    problem = GemvProblem(1, 24_576, 1536, spared=32)
    walk = choose_gemv_form(problem, "sm_90a").walk
    assert grid(problem, walk, processors) == (left * walk.blocks, 1)
    assert grid(replace(problem, spared=0), walk, processors) == (processors * walk.blocks, 1)


def test_fewer_multiprocessors_than_none_are_not_spared() -> None:
    with pytest.raises(InvalidArgument, match="spared"):
        GemvProblem(1, 24_576, 1536, spared=-1)


def test_a_product_that_spares_multiprocessors_lets_the_next_launch_follow_late() -> None:
    for spared in (0, 24):
        form = choose_gemv_form(GemvProblem(1, 24_576, 1536, spared=spared), "sm_90a")
        assert form.late == (spared > 0)


WALKS = gemv_problem.OF_ONE_ROW + gemv_problem.OF_SEVERAL


def test_what_is_held_fits_and_covers_every_step() -> None:
    for rows in gemv_problem.ROWS:
        held = gemv_problem.inner_held(rows)
        room = min(target.shared_memory_bytes for target in TARGETS.values())
        assert 2 * rows * held <= room
        widest = GemvProblem(rows, 1, held)
        for walk in WALKS:
            if not walk.exact:
                assert held % (walk.ahead * gemv_problem.STEP) == 0
                assert steps(widest, walk) * gemv_problem.STEP <= held
        assert held >= 14_336
    for walk in WALKS:
        assert steps(GemvProblem(1, 1, 8), walk) == walk.ahead
        assert steps(GemvProblem(1, 1, 7168), walk) == -(-28 // walk.ahead) * walk.ahead


@pytest.mark.parametrize(("rows", "wanted"), [(1, [1, 2, 2, 2, 2]), (2, [1, 1, 1, 4, 4])])
def test_a_weight_of_few_rows_is_spread_over_all_warps(rows: int, wanted: list[int]) -> None:
    extents = ((64, 1), (1280, 1), (8191, 1), (8192, 1), (1024, 8))
    problems = [GemvProblem(rows, columns, 64, groups=groups) for columns, groups in extents]
    forms = [choose_gemv_form(problem, "sm_90a") for problem in problems]
    assert [form.walk.together for form in forms] == wanted


@pytest.mark.parametrize("inner", [8, 264, 7168])
def test_the_stated_order_is_as_near_to_float64_as_derived(inner: int) -> None:
    x, weight = checks.spread((3, inner), "rows", 1), checks.spread((5, inner), "ordinary", 2)
    got = checks.product_by_definition(x, weight, "fp32").double()
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    # A lane rounds once a value of its share, the warp five times more: gamma_n of that many.
    roundings = -(-inner // gemv_problem.STEP) * gemv_problem.VECTOR + 5
    assert bool(((got - exact).abs() <= size * roundings * 2.0**-24 * 1.01).all())
    rounded = checks.product_by_definition(x, weight, "bf16")
    assert torch.equal(rounded, checks.product_by_definition(x, weight, "fp32").bfloat16())


def test_rows_do_not_depend_on_other_rows() -> None:
    x, weight = checks.spread((4, 520), "rows", 3), checks.spread((6, 520), "ordinary", 4)
    whole = checks.product_by_definition(x, weight, "fp32")
    alone = checks.product_by_definition(x[2:3], weight[4:], "fp32")
    assert torch.equal(alone, whole[2:3, 4:])


def test_bytes_and_forms() -> None:
    problem = GemvProblem(8, 129_280, 7168)
    assert problem.bytes_moved == 1_853_358_080 + 8 * 7168 * 2 + 8 * 129_280 * 4
    forms = {
        choose_gemv_form(GemvProblem(m, n, 64), "sm_90a") for m in (5, 6, 7, 8) for n in (1, 999)
    }
    assert len(forms) == 1
    assert [choose_gemv_form(GemvProblem(m, 1, 8), "sm_90a").rows for m in (0, 1, 2, 3, 4)] == [
        1,
        1,
        2,
        4,
        4,
    ]


def test_gemv_problem_refuses_by_name() -> None:
    for rows, columns in ((9, 1), (-1, 1), (1, 0), (1, 1 << 31)):
        with pytest.raises(ShapeMismatch, match="product of few rows"):
            GemvProblem(rows, columns, 64)
    for rows, inner in ((1, 12), (1, 0), (8, 14_848), (1, 16_392)):
        with pytest.raises(ShapeMismatch, match="inner extent"):
            GemvProblem(rows, 1, inner)
    with pytest.raises(UnknownName, match="bf16"):
        GemvProblem(1, 1, 8, "fp16")


# --------------------------------------------------------------------------------------------------
# BF16 times NVFP4, as arithmetic: every weight has one lane, memory fits, bytes; refusals.

SHAPES = ((8, 32), (24, 96), (576, 7168), (7168, 4096), (8192, 8192), (7168, 18432))


def form_of(problem: W4A16Problem, target: str = "sm_90a") -> W4A16Form:
    return choose_w4a16_form(problem, choose_tactic(problem), target)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("outputs", [8, 24, 200, 1000])
def test_every_output_has_one_place(layout: str, outputs: int) -> None:
    problem = W4A16Problem(1, outputs, 32, layout)
    places = [
        row_of(tile, place, layout)
        for tile in range(tiles(problem))
        for place in range(w4a16_problem.TILE)
    ]
    assert len(set(places)) == len(places)
    assert set(range(outputs)) <= set(places)


@pytest.mark.parametrize("rows", [1, 16, 32, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_step_has_one_warp_and_every_tile_one_thread_block(rows: int, layout: str) -> None:
    problem = W4A16Problem(rows, 1000, 7168 + 96, layout)
    form = form_of(problem)
    assert form.parts * form.ranks == w4a16_problem.PARTS
    steps = [
        round_ * w4a16_problem.PARTS + rank * form.parts + part
        for round_ in range(problem.rounds)
        for rank in range(form.ranks)
        for part in range(form.parts)
    ]
    assert steps == list(range(problem.rounds * w4a16_problem.PARTS))
    assert (
        len(steps) * w4a16_problem.STEP
        >= problem.columns
        > (len(steps) - w4a16_problem.PARTS) * w4a16_problem.STEP
    )
    per_block = form.tiles * form.groups
    assert w4a16_grid(problem, form) % form.ranks == 0
    assert 0 <= w4a16_grid(problem, form) // form.ranks * per_block - tiles(problem) < per_block


def test_the_scales_of_a_swizzled_tile_lie_side_by_side() -> None:
    for tile in range(16):
        offsets = [
            scale_offset(row_of(tile, place, "128x4"), 16 * block, (256, 128), "128x4")
            for place in range(w4a16_problem.TILE)
            for block in range(4)
        ]
        assert sorted(offsets) == list(range(offsets[0], offsets[0] + 64))
        # What the kernel reads of a place: a word, four on for each neighbour, one for a quarter.
        words = [(offset - offsets[0]) // 4 for offset in offsets[::4]]
        assert words == [place % 4 * 4 + place // 4 for place in range(w4a16_problem.TILE)]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
def test_memory_and_threads_fit(rows: int, outputs: int, columns: int) -> None:
    for layout in LAYOUTS:
        problem = W4A16Problem(rows, outputs, columns, layout)
        form = form_of(problem)
        assert form.columns >= rows
        assert 1 <= rounds_kept(problem, form) <= min(16, problem.rounds)
        assert shared_bytes(problem, form) <= min(
            target.shared_memory_bytes for target in TARGETS.values()
        )
        assert form.threads <= 1024
        assert form.stages <= 16
        for size in (form.stage_bytes, form.group_bytes // form.pieces, form.ring_bytes):
            assert size % 128 == 0  # where the copy engine may write
        assert all(extent <= 256 for extent in w4a16_problem.activation_box(form))
        assert all(extent <= 256 for extent in w4a16_problem.code_box(form))
        assert form.copied_bytes < 1 << 20  # what a barrier counts: PTX ISA 9.1, mbarrier


def test_bytes_at_the_shapes_of_the_bench() -> None:
    problem = W4A16Problem(1, 7168, 4096)
    assert problem.weight_bytes == 7168 * 4096 * 9 // 16 == 16_515_072
    assert problem.bytes_moved - problem.weight_bytes == 2 * (4096 + 7168)
    assert W4A16Problem(1, 8192, 8192).weight_bytes == 37_748_736
    assert problem.scale_bytes == 7168 * 256
    assert W4A16Problem(1, 8, 32, "128x4").scale_bytes == 512
    form = form_of(problem)
    assert form.stage_bytes == w4a16_problem.TILE * w4a16_problem.ROUND * 9 // 16
    assert w4a16_grid(problem, form) == 112


def test_extents_choose_few_forms() -> None:
    problems = [
        W4A16Problem(m, n, k)
        for m in range(1, 65)
        for n, k in SHAPES
        for _ in LAYOUTS
        if k % 256 == 0
    ]
    assert len({form_of(problem) for problem in problems}) <= 18
    assert form_of(W4A16Problem(5, 8192, 4096)) == form_of(W4A16Problem(8, 16384, 8192))
    assert form_of(W4A16Problem(1, 512, 96)).ragged
    assert [tactic.rows for tactic in W4A16_TACTICS] == sorted(
        tactic.rows for tactic in W4A16_TACTICS
    )
    assert replace(form_of(W4A16Problem(1, 8, 32)), layout="128x4").pieces == 4


@pytest.mark.parametrize("tactic", W4A16_TACTICS)
def test_no_more_activations_are_copied_than_half_of_them_needlessly(tactic: W4A16Tactic) -> None:
    for rows in range(1, tactic.rows + 1):
        problem = W4A16Problem(rows, 7168, 4096)
        form = choose_w4a16_form(problem, tactic, "sm_90a")
        assert rows <= form.copied_rows < 2 * rows
        assert form.copied_rows <= form.columns
        assert form.kept_bytes * form.ranks == 2 * form.copied_rows * w4a16_problem.ROUND
        assert w4a16_problem.activation_box(form)[1] == form.copied_rows
    one, eight = (
        choose_w4a16_form(W4A16Problem(rows, 7168, 4096), W4A16_TACTICS[0], "sm_90a")
        for rows in (1, 8)
    )
    assert (one.kept_bytes, eight.kept_bytes) == (4096, 32_768)


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 64])
@pytest.mark.parametrize("tiles_of_block", [1, 4])
def test_every_sum_is_added_up_once_and_no_two_threads_meet_in_a_bank(
    rows: int, tiles_of_block: int
) -> None:
    count = -(-rows // 2) * 2 * tiles_of_block * w4a16_problem.TILE
    places = [w4a16_problem.sum_place(number, tiles_of_block) for number in range(count)]
    assert len(set(places)) == count
    assert {place for place in places if place[2] < rows} == {
        (within, tile, row)
        for within in range(w4a16_problem.TILE)
        for tile in range(tiles_of_block)
        for row in range(rows)
    }
    offsets = [w4a16_problem.sum_offset(row // 8, within, row) for within, _, row in places]
    for first in range(0, count, 32):
        assert len({offset // 4 % 32 for offset in offsets[first : first + 32]}) == 32
    # Sums of lane l are of outputs l / 4 and 8 more, rows 2 (l mod 4) and one more: m16n8k16.
    for lane in range(32):
        own = w4a16_problem.lane_offset(3, lane)
        got = [
            w4a16_problem.sum_offset(3, lane // 4 + 8 * half, lane % 4 * 2 + odd)
            for half in range(2)
            for odd in range(2)
        ]
        assert got == [own, own + 4, own + 8, own + 12]
    for first in range(0, 32, 8):  # what is written at once: 16 bytes each
        quarter = [w4a16_problem.lane_offset(0, lane) // 16 % 8 for lane in range(first, first + 8)]
        assert sorted(quarter) == list(range(8))


def test_w4a16_problem_refuses_by_name() -> None:
    with pytest.raises(ShapeMismatch, match="rows of activations = 65"):
        W4A16Problem(65, 8, 32)
    for outputs in (0, 4, 12):
        with pytest.raises(ShapeMismatch, match="N in a multiple of 8"):
            W4A16Problem(1, outputs, 32)
    for columns in (0, 16, 48):
        with pytest.raises(ShapeMismatch, match="K in a multiple of 32"):
            W4A16Problem(1, 8, columns)
    with pytest.raises(ShapeMismatch, match="N K below"):
        W4A16Problem(1, 1 << 17, 1 << 15)
    with pytest.raises(UnknownName, match="scale layout of a kernel"):
        W4A16Problem(1, 8, 32, "8x4")
    with pytest.raises(UnknownName, match="128x4"):
        W4A16Problem(1, 8, 32, "128x5")


# --------------------------------------------------------------------------------------------------
# BF16 times NVFP4 by wgmma: K is divided completely, memory fits, copies bring what is waited for.


@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
def test_runs_of_k_follow_each_other_and_none_is_empty(outputs: int, columns: int) -> None:
    groups, ranks = wgmma.division(outputs, columns)
    runs = [wgmma.run_of(rank, columns, ranks) for rank in range(ranks)]
    steps = [step for first, count in runs for step in range(first, first + count)]
    assert steps == list(range(-(-columns // wgmma.STEP)))
    assert all(count > 0 for _, count in runs)
    assert max(runs, key=lambda run: run[1])[1] - min(runs, key=lambda run: run[1])[1] <= 1
    assert -(-outputs // (wgmma.ROWS * groups)) <= wgmma.CLUSTERS[ranks] or ranks == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", wgmma.GROUPS)
def test_stages_of_wgmma_fit_and_their_copies_are_what_is_waited_for(
    layout: str, groups: int
) -> None:
    for rows in (1, 8, 9, 17, 64):
        form = wgmma.form_of(W4A16Problem(rows, 1000, 4096, layout), (groups, 2), "sm_90a")
        assert form.shared_bytes <= TARGETS["sm_90a"].shared_memory_bytes
        assert 2 <= form.stages <= wgmma.MOST_STAGES
        # A slot of scales is free when its next chunk is copied.
        assert form.stages <= (wgmma.SLOTS - 1) * wgmma.STEPS_OF_CHUNK + 1
        assert wgmma.HALVES * 2 * prod(wgmma.activation_box(form)) == form.activation_bytes
        assert 4 * prod(wgmma.code_box(form)) == form.code_bytes
        assert 4 * form.scale_boxes * prod(wgmma.scale_box(form)) == form.slot_bytes
        for box in (wgmma.activation_box(form), wgmma.code_box(form), wgmma.scale_box(form)):
            assert max(box) <= 256
        for place in (form.codes_at, form.scales_at, form.activation_bytes // wgmma.HALVES):
            assert place % 1024 == 0  # what swizzled boxes need
        assert form.columns >= rows
        assert form.row_groups * 32 >= form.columns
        assert 0 < form.permuting <= wgmma.HALVES * form.row_groups
        # What a thread of 64 columns needs, or ptxas runs wgmma one by one.
        assert 65_536 // form.threads // 8 * 8 >= 96
        # A processor has no two of them.
        assert 2 * (form.shared_bytes + 1024) > TARGETS["sm_90a"].shared_memory_bytes + 1024


@pytest.mark.parametrize("groups", wgmma.GROUPS)
def test_every_row_of_a_thread_block_finds_its_own_scales(groups: int) -> None:
    for layout in LAYOUTS:
        problem = W4A16Problem(16, 1000, 1024, layout)
        form = wgmma.form_of(problem, (groups, 1), "sm_90a")
        for tile in range(wgmma.grid(problem, form)):
            for chunk in range(problem.columns // wgmma.CHUNK):
                slot = _slot_of(problem, form, tile, chunk)
                for row in range(form.outputs):
                    output = tile * form.outputs + row
                    at = wgmma.scale_word(wgmma.first_scale_row(tile, form) + row, form)
                    for half in range(wgmma.CHUNK // wgmma.HALF):
                        first = chunk * wgmma.CHUNK + half * wgmma.HALF
                        want = scale_offset(output, first, (1000, 1024), layout)
                        if output < problem.outputs:
                            assert slot[at + half * wgmma.scale_half(form)] == want


def test_lanes_have_all_rows_of_a_warp_and_read_codes_from_all_banks() -> None:
    for warp in (0, 3):
        first = [wgmma.row_of(warp, group) for group in range(8)]
        assert sorted(first) == list(range(16 * warp, 16 * warp + 8))
        # Half of the lanes read at once, 32 bytes of four rows: all 128 bytes of banks.
        for rows in (first[:4], first[4:]):
            for half in range(wgmma.HALVES):
                chunks = {
                    (row * 4 + ((2 * half + chunk) ^ row // 2 % 4)) % 8
                    for row in rows
                    for chunk in range(2)
                }
                assert len(chunks) == 8, (rows, half)


def _slot_of(problem: W4A16Problem, form: wgmma.W4A16WgmmaForm, tile: int, chunk: int) -> list[int]:
    """Return the offsets of the bytes that TMA puts into a slot, in order."""
    if problem.layout == "linear":
        rows = range(tile * form.outputs, (tile + 1) * form.outputs)
        return [row * problem.blocks + chunk * 16 + byte for row in rows for byte in range(16)]
    first, across = tile * form.outputs // 128, problem.blocks // 4
    return [
        ((first + box) * across + chunk * 4 + step) * 512 + byte
        for box in range(form.scale_boxes)
        for step in range(4)
        for byte in range(512)
    ]


def test_the_division_of_k_does_not_follow_from_the_rows() -> None:
    for outputs, columns in SHAPES:
        forms = {
            (form.ranks, form.groups)
            for rows in (1, 17, 64)
            for form in [wgmma.choose_form(W4A16Problem(rows, outputs, columns), "sm_90a")]
        }
        assert len(forms) == 1
