"""Legal kernels of attention agree on every kind of input; gains and coarse exponentials differ."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.budget import attention as budget_attention
from degarble.harness.engine.budget.budget import HEADROOM, judge
from degarble.harness.engine.budget.roles import budgets_of
from degarble.suites.engine import legal_attention as legal

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.budget.budget import Budget, BudgetResult
    from degarble.harness.engine.budget.rules import JudgeableCall

FAMILIES = ("v4", "v32", "v32 naive")
WHOLE_ROW, IN_TILES = legal.KERNELS[:2]
NAMES = [kernel.name for kernel in legal.KERNELS]


@cache
def case(family: str, inputs: str, tokens: int = 24) -> tuple[JudgeableCall, Budget]:
    if family == "v4":
        call = legal.call_v4(inputs, legal.Extents(tokens=tokens), 1)
    else:
        extents = legal.Extents(tokens=tokens, heads=4, entries=40)
        call = legal.call_v32(inputs, extents, 1, naive=family == "v32 naive")
    return call, budgets_of(call)["out"]


def judged(of: tuple[JudgeableCall, Budget], out: Tensor) -> BudgetResult:
    call, budget = of
    return judge(out.bfloat16(), call.outputs["out"], budget)


def check_healthy(family: str, inputs: str) -> None:
    of = case(family, inputs)
    for kernel in legal.KERNELS:
        found = judged(of, legal.ran(of[0], kernel))
        assert found.worst.ratio <= HEADROOM, f"{kernel.name}: {found.worst}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("inputs", ["one key", "equal logits"])
def test_every_legal_kernel_agrees(family: str, inputs: str) -> None:
    check_healthy(family, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("inputs", legal.INPUTS)
def test_every_legal_kernel_agrees_on_every_input(family: str, inputs: str) -> None:
    check_healthy(family, inputs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gain", [1.003, 0.997])
def test_a_gain_of_all_heads_is_found(family: str, gain: float) -> None:
    of = case(family, "gauss")
    for kernel in (WHOLE_ROW, IN_TILES):
        worst = judged(of, legal.ran(of[0], kernel) * gain).worst
        assert worst.ratio > 1, kernel.name
        assert worst.level == "gain of all heads"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gain_of_one_head_is_found(family: str) -> None:
    of = case(family, "gauss")
    for gain in (1.01, 0.99):
        out = legal.ran(of[0], IN_TILES)
        heads = out.unflatten(-1, (4, -1)) if out.ndim == 2 else out
        heads[:, 1] *= gain
        worst = judged(of, out).worst
        assert worst.ratio > 1
        assert (worst.level, worst.place) == ("gain of head", (1,))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", legal.COARSE)
def test_a_coarse_exponential_is_found(family: str, how: str) -> None:
    of = case(family, "gauss", 64)
    worst = judged(of, legal.ran(of[0], IN_TILES, legal.coarse(how))).worst
    assert worst.ratio > 1, worst
    assert worst.level.startswith(("weight of keys", "energy", "gain"))


def test_where_all_shares_round_alike_the_bound_is_wide() -> None:
    widths = {}
    for inputs in ("gauss", "equal logits"):
        call, budget = case("v4", inputs)
        found = judge(legal.ran(call, WHOLE_ROW).bfloat16(), call.outputs["out"], budget)
        widths[inputs] = next(
            each.allowed for each in found.findings if each.level == "gain of all heads"
        )
    assert widths["gauss"] < 0.0015
    assert widths["equal logits"] > 0.004, "a constant in place of a peak rounds all shares alike"


def test_a_budget_is_the_same_in_few_and_in_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in FAMILIES:
        call, whole = case(family, "gauss")
        monkeypatch.setattr(budget_attention, "_CHUNK", 1)
        in_steps = budgets_of(call)["out"]
        monkeypatch.undo()
        assert torch.allclose(in_steps.slack, whole.slack, rtol=0.02)
        out = legal.ran(call, IN_TILES).bfloat16() * 1.003
        ratios = [judge(out, call.outputs["out"], each).worst.ratio for each in (whole, in_steps)]
        assert ratios[0] == pytest.approx(ratios[1], rel=0.05)


def test_a_tried_fault_may_weigh_keys_that_the_statistics_do_not_know() -> None:
    """Empty slots read as the first row: the same kernel, next to exact sums of the same rows."""
    call, budget = case("v4", "first tokens")
    (sink,) = (each.values(torch.float32) for each in call.weights.values())
    q, rows = call.inputs["q"], call.inputs["window"]
    order = torch.arange(len(rows) + 127) - 127
    repeated = torch.cat((rows[:1].expand(127, -1), rows))
    seen = (order <= call.inputs["positions"][:, None]) & (
        order > call.inputs["positions"][:, None] - 128
    )

    def read(kernel: legal.Kernel) -> Tensor:
        logit = legal.logits(q, repeated, q.shape[-1] ** -0.5, seen, kernel)
        return legal.attended(logit, repeated.float(), sink, kernel, None).reshape(
            call.outputs["out"].shape
        )

    exact = read(replace(WHOLE_ROW, rounded=False)).bfloat16()
    assert judge(exact, call.outputs["out"], budget).worst.ratio > 1, "the rows matter"
    for kernel in (WHOLE_ROW, IN_TILES):
        worst = judge(read(kernel).bfloat16(), exact, budget).worst
        assert worst.ratio <= 1, worst
    other = judge((read(IN_TILES) * 1.02).bfloat16(), exact, budget).worst
    assert other.ratio > 1, other


def test_laws_leave_out_rows_that_are_not_finite() -> None:
    of = case("v4", "gauss")
    out = legal.ran(of[0], IN_TILES) * 1.003
    out[3, 2, 5] = float("nan")
    levels = {each.level: each.ratio for each in judged(of, out).findings}
    assert levels["gain of all heads"] > 1
