"""Grouped experts on Blackwell as a host model: bytes as defined, within the twin's budget; faults.

No compiled kernel runs here: this proves facts, places and protocol, and says nothing about a chip.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from degarble.kernels.gemm import problem as gemm
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.moe import problem as facts
from degarble.kernels.moe.problem import AFTER_W2, BEFORE_W2, MoeProblem
from degarble.suites.kernels import sm100_model as plain
from degarble.suites.kernels import tcgen05_words
from degarble.suites.kernels.moe import moe_checks as checks
from degarble.suites.kernels.moe import moe_twin as twin
from degarble.suites.kernels.moe import sm100_moe_model as model
from degarble.suites.kernels.sm100_model import Undefined

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.needs("cutlass")  # the walk is the kernels' own

TARGET = "sm_100a"
(WIDE,) = facts.TACTICS[TARGET]
NARROW = replace(WIDE, columns=64)
SMALL = MoeProblem(9, 64, 96, 3, 2, 3, 10.0, BEFORE_W2)
EDGES = MoeProblem(580, 64, 160, 8, 1, 8, 10.0)
WRAPPED = MoeProblem(3, 1312, 1312, 2, 1, 2, 2.0)  # six steps of K: more than a ring has stages


def case_of(problem: MoeProblem, **more: Any) -> checks.Case:
    return checks.Case(problem, **{"seed": 1, "target": TARGET, **more})


def wrong(case: checks.Case, first: str = "loads", processors: int = 2) -> str:
    """Say what is wrong with the model's answer, as a B200's would be judged."""
    given = checks.given_of(case, "cpu")
    try:
        result = model.on_model(case, given, (first, processors))
    except (Undefined, tcgen05_words.WrongWord) as error:
        return str(error)
    with mock.patch.object(checks, "wanted", model.wanted):
        return checks.difference(case, given, result)


@pytest.mark.parametrize("first", ["loads", pytest.param("tensor", marks=pytest.mark.slow)])
def test_a_few_tokens(first: str) -> None:
    assert not wrong(case_of(SMALL), first)


def test_groups_of_1_127_128_129_and_none() -> None:
    """Columns end within a tile, a warp's rows belong to nobody; the shared expert is added."""
    assert not wrong(case_of(EDGES, choice="edges", tactic=WIDE, shared=True))


def test_no_chosen_expert_is_on_this_rank() -> None:
    assert not wrong(case_of(SMALL, choice="nobody"))


@pytest.mark.slow
@pytest.mark.parametrize("tactic", [NARROW, WIDE], ids=lambda tactic: str(tactic.columns))
@pytest.mark.parametrize("weighting", facts.WEIGHTINGS)
@pytest.mark.parametrize("choice", checks.CHOICES)
def test_choices_of_every_kind(choice: str, weighting: str, tactic: gemm.GemmTactic) -> None:
    problem = replace(EDGES, hidden=288, width=224, weighting=weighting)
    assert not wrong(case_of(problem, choice=choice, tactic=tactic))


@pytest.mark.slow
@pytest.mark.parametrize("first", plain.FIRST)
def test_rings_that_begin_anew(first: str) -> None:
    assert not wrong(case_of(WRAPPED), first, processors=1)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2)])
def test_clusters_whose_rows_have_one_expert(shape: tuple[int, int]) -> None:
    """A cluster's second tile of rows may belong to nobody, its second of columns lie beyond D."""
    tactic = replace(WIDE, cluster_rows=shape[0], cluster_columns=shape[1])
    assert not wrong(case_of(replace(SMALL, tokens=70, width=160), tactic=tactic), processors=1)


@pytest.mark.slow
def test_experts_that_are_elsewhere() -> None:
    """384 experts of which six are here, top 6; a slot of another rank adds nothing."""
    problem = MoeProblem(200, 64, 96, 6, 6, 384, 10.0)
    assert not wrong(case_of(problem))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_fuzzed(seed: int) -> None:
    cases = checks.fuzzed(seed, 12, TARGET)
    small = [
        replace(
            case,
            problem=replace(
                case.problem,
                routed=8,
                experts=min(8, case.problem.experts),
                tokens=case.problem.tokens % 90,
            ),
        )
        for case in cases
    ]
    assert not [why for case in small if (why := wrong(case))]


@pytest.mark.slow
@pytest.mark.parametrize("weighting", facts.WEIGHTINGS)
def test_is_the_twin_within_its_budget(weighting: str) -> None:
    case = case_of(MoeProblem(40, 128, 160, 2, 1, 2, 10.0, weighting))
    given = checks.given_of(case, "cpu")
    result = model.on_model(case, given)
    found = [twin.compared(case, given, result, expert) for expert in range(2)]
    assert not [counted.wrong for counted in found if counted.wrong]
    assert max(counted.codes for counted in found) <= twin.MOST_CODES
    assert max(counted.scales for counted in found) <= twin.MOST_SCALES
    rolled = type(given.weights.w13)(*(each.roll(1, 0) for each in given.weights.w13))
    other = given._replace(weights=given.weights._replace(w13=rolled))
    assert twin.compared(case, other, result, 0).wrong


# ---- planted faults ------------------------------------------------------------------------------


def expert_before(true: Any, tile: Any, form: Any) -> Any:
    *place, expert = tile
    return true((*place, max(expert - 1, 0)), form)


def scales_before(true: Any, tile: Any, form: Any) -> Any:
    *boxes, (at, expert) = true(tile, form)
    return (*boxes, (at, max(expert - 1, 0)))


def rows_before(true: Any, tile: Any, form: Any) -> Any:
    row, *rest = true(tile, form)
    return (max(row - 1, 0), *rest)


def zero(_true: Any, *_given: Any) -> int:
    return 0


def nothing_ends(_true: Any, *_given: Any) -> tuple[int, int]:
    return 0, 0


def more(by: int) -> Callable[..., Any]:
    return lambda true, *given: true(*given) + by


def halves_changed(true: Any, block: Any, numbers: Any, *rest: Any) -> Any:
    return true(block, numbers.roll(numbers.shape[1] // 2, 1), *rest)


def every_weight_one(true: Any, block: Any, numbers: Any, slots: Any, leaving: Any) -> Any:
    ones = leaving._replace(weights=leaving.weights * 0 + 1)
    return true(block, numbers, slots, ones)


def next_row(true: Any, row: Any, *rest: Any) -> Any:
    return true(row + 1, *rest)


def unswizzled(_true: Any, row: Any, block: Any, blocks: Any) -> Any:
    return (row * (blocks + -blocks % 4) + block) // 4


def same_parity(_true: Any, turn: Any) -> None:
    turn.at = (turn.at + 1) % turn.stages


# Where, what, instead, and the case that sees it.
FAULTS: dict[str, tuple[Any, str, Callable[..., Any], checks.Case]] = {
    "expert before": (tensor_memory, "tiles_of_boxes", expert_before, case_of(SMALL)),
    "scales of the expert before": (tensor_memory, "tiles_of_boxes", scales_before, case_of(SMALL)),
    "rows of the group before": (tensor_memory, "tiles_of_boxes", rows_before, case_of(SMALL)),
    "rows of scales not skipped": (
        tensor_memory,
        "columns_skipped",
        zero,
        case_of(replace(SMALL, hidden=224)),
    ),
    "scales beyond K not cleared": (tensor_memory, "end_of_scales", nothing_ends, case_of(SMALL)),
    "bytes expected": (gemm, "transaction_bytes", more(16), case_of(SMALL)),
    "gate and up changed": (model.Block, "gated", halves_changed, case_of(SMALL)),
    "routing weight left out": (model.Block, "gated", every_weight_one, case_of(SMALL)),
    "codes of the next row": (facts, "codes_at", next_row, case_of(SMALL)),
    "scales in row order": (facts, "scales_at", unswizzled, case_of(SMALL)),
    "parity of a stage": (plain.Turn, "advance", same_parity, case_of(WRAPPED)),
}


QUICK = {"expert before", "rows of scales not skipped", "gate and up changed"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FAULTS],
)
def test_a_planted_fault_is_detected(name: str) -> None:
    place, function, instead, case = FAULTS[name]
    true = getattr(place, function)
    with mock.patch.object(place, function, lambda *given, **named: instead(true, *given, **named)):
        assert wrong(case, processors=1)


@pytest.mark.slow
def test_weights_are_left_out_after_w2_as_well() -> None:
    case = case_of(replace(SMALL, weighting=AFTER_W2))
    given = checks.given_of(case, "cpu")
    result = model.on_model(case, given)
    plan, out = result.workspace.plan, result.workspace.out
    ones = given._replace(routing=given.routing._replace(weights=given.routing.weights * 0 + 1))
    result.out.copy_(model.combined(case, ones, plan, out))
    with mock.patch.object(checks, "wanted", model.wanted):
        assert "sum" in checks.difference(case, given, result)
