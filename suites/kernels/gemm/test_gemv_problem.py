"""The product of few rows, as arithmetic: who sums what, in which order, what fits; refusals."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import ShapeMismatch, UnknownName
from degarble.kernels.gemm import gemv_problem as facts
from degarble.kernels.gemm.gemv_problem import GemvProblem, choose_form, grid, steps
from degarble.kernels.runtime.targets import TARGETS
from degarble.suites.kernels import row_checks as checks


def test_every_row_of_the_weight_has_one_warp() -> None:
    for columns in (1, 5, 2048, 129_280):
        problem = GemvProblem(1, columns, 64)
        walkers, groups = grid(problem, 132), -(-columns // facts.GROUP)
        visited = [
            group
            for block in range(walkers)
            for warp in range(facts.WARPS)
            for group in range(block + walkers * warp, groups, walkers * facts.WARPS)
        ]
        assert sorted(visited) == list(range(groups))


def test_what_is_held_fits_and_covers_every_step() -> None:
    for rows in facts.ROWS:
        held = facts.inner_held(rows)
        room = min(target.shared_memory_bytes for target in TARGETS.values())
        assert held % (facts.AHEAD * facts.STEP) == 0
        assert 2 * rows * held <= room
        widest = GemvProblem(rows, 1, held)
        assert steps(widest) * facts.STEP <= held
        assert held >= 14_336
    assert steps(GemvProblem(1, 1, 8)) == facts.AHEAD
    assert steps(GemvProblem(1, 1, 7168)) == 28


@pytest.mark.parametrize("inner", [8, 264, 7168])
def test_the_stated_order_is_as_near_to_float64_as_derived(inner: int) -> None:
    x, weight = checks.spread((3, inner), "rows", 1), checks.spread((5, inner), "ordinary", 2)
    got = checks.product_by_definition(x, weight, "fp32").double()
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    # A lane rounds once a value of its share, the warp five times more: gamma_n of that many.
    roundings = -(-inner // facts.STEP) * facts.VECTOR + 5
    assert bool(((got - exact).abs() <= size * roundings * 2.0**-24 * 1.01).all())
    rounded = checks.product_by_definition(x, weight, "bf16")
    assert torch.equal(rounded, checks.product_by_definition(x, weight, "fp32").bfloat16())


def test_company_does_not_matter() -> None:
    x, weight = checks.spread((4, 520), "rows", 3), checks.spread((6, 520), "ordinary", 4)
    whole = checks.product_by_definition(x, weight, "fp32")
    alone = checks.product_by_definition(x[2:3], weight[4:], "fp32")
    assert torch.equal(alone, whole[2:3, 4:])


def test_bytes_and_forms() -> None:
    problem = GemvProblem(8, 129_280, 7168)
    assert problem.bytes_moved == 1_853_358_080 + 8 * 7168 * 2 + 8 * 129_280 * 4
    forms = {choose_form(GemvProblem(m, n, 64), "sm_90a") for m in (5, 6, 7, 8) for n in (1, 999)}
    assert len(forms) == 1
    assert [choose_form(GemvProblem(m, 1, 8), "sm_90a").rows for m in (0, 1, 2, 3, 4)] == [
        1,
        1,
        2,
        4,
        4,
    ]


def test_refuses_by_name() -> None:
    for rows, columns in ((9, 1), (-1, 1), (1, 0), (1, 1 << 31)):
        with pytest.raises(ShapeMismatch, match="product of few rows"):
            GemvProblem(rows, columns, 64)
    for rows, inner in ((1, 12), (1, 0), (8, 14_848), (1, 16_392)):
        with pytest.raises(ShapeMismatch, match="inner extent"):
            GemvProblem(rows, 1, inner)
    with pytest.raises(UnknownName, match="bf16"):
        GemvProblem(1, 1, 8, "fp16")
