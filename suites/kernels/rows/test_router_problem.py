"""The router's arithmetic: scores against float64, order and choice against the references'."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.kernels.rows import router_problem as facts
from degarble.kernels.rows.router_problem import RouterProblem, choose_form
from degarble.references import experts as routing
from degarble.suites.kernels.rows import router_checks as checks

U = 2.0**-24
SMALLEST = 2.0**-149
SOFTPLUS_UNITS, SIGMOID_UNITS = 3, 3


def logits() -> torch.Tensor:
    spread = torch.randn(200_000, generator=torch.Generator().manual_seed(0)) * 5
    return torch.cat([torch.linspace(-110, 110, 400_001), spread])


def exact_score(logit: torch.Tensor, scoring: str) -> torch.Tensor:
    x = logit.double()
    if scoring == "sigmoid":
        return torch.where(x < 0, x.exp() / (1 + x.exp()), 1 / (1 + (-x).exp()))
    return torch.where(x > 20, x, torch.log1p(x.exp())).sqrt()


@pytest.mark.parametrize(
    ("scoring", "units"), [("sqrtsoftplus", SOFTPLUS_UNITS), ("sigmoid", SIGMOID_UNITS)]
)
def test_scores_are_within_the_stated_units(scoring: str, units: int) -> None:
    logit = logits()
    got, exact = facts.score_of(logit, scoring, torch.sqrt).double(), exact_score(logit, scoring)
    # Where softplus or the share vanishes, some steps of the subnormals are lost, or their root.
    lost = math.sqrt(3 * SMALLEST) if scoring == "sqrtsoftplus" else SMALLEST
    assert float(((got - exact).abs() - exact * units * U).max()) <= lost
    specials = torch.tensor([math.inf, -math.inf, math.nan])
    top, bottom, nan = facts.score_of(specials, scoring, torch.sqrt).tolist()
    assert (top, bottom) == (math.inf if scoring == "sqrtsoftplus" else 1.0, 0.0)
    assert math.isnan(nan)


def test_the_exponential_alone() -> None:
    distance = torch.linspace(0, 103, 100_001)
    got, exact = facts.exp_of_minus(distance).double(), (-distance.double()).exp()
    assert float(((got - exact).abs() - exact * 1.6 * U).max()) <= SMALLEST
    assert float(facts.exp_of_minus(torch.tensor([math.inf]))) == 0.0


def test_keys_are_in_the_order_of_torchs_sort() -> None:
    bits = torch.arange(-(2**31), 2**31, 65_521, dtype=torch.int64).to(torch.int32)
    numbers = torch.cat([bits.view(torch.float32), torch.tensor([0.0, -0.0, math.nan, -math.nan])])
    by_key = torch.sort(facts.key_of(numbers), descending=True, stable=True).indices
    by_torch = torch.sort(numbers, descending=True, stable=True).indices
    assert torch.equal(by_key, by_torch)
    assert int(facts.key_of(torch.tensor([-math.inf]))) == facts.LOWEST_KEY
    assert int(facts.key_of(numbers).min()) > facts.TAKEN


def by_reference(case: checks.RouterCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights as references/components do it, in float32."""
    p = case.problem
    softplus = p.scoring == "sqrtsoftplus"
    score = routing.sqrt_softplus(case.logits) if softplus else torch.sigmoid(case.logits)
    if p.vocabulary:
        token, table = (part.long() for part in case.table)
        experts = table[token]
    else:
        biased = score + case.bias
        if p.groups > 1:
            biased = routing.grouped_scores(biased, routing.GroupFacts(p.groups, p.groups_kept))
        experts = routing.largest_experts(biased, p.chosen)
    return experts, routing.router_weights(score, experts, p.scale, p.epsilon)


@pytest.mark.parametrize("model", [checks.V4_PRO, checks.V4_FLASH, checks.V32])
@pytest.mark.parametrize("kind", ["ordinary", "wide", "ties", "equal"])
def test_chooses_as_the_references_do(model: dict[str, Any], kind: str) -> None:
    case = checks.RouterCase(RouterProblem(2000, **model), kind, 11)
    experts, weights = checks.by_definition(case, "cpu")
    want, of_want = by_reference(case)
    moved = (experts.long() != want).any(-1)
    if kind == "ties":  # logits on a grid: equal ones have equal scores in both
        assert not bool(moved.any())
    budget = 2 * (SOFTPLUS_UNITS + 2) * U
    exact = exact_score(case.logits, case.problem.scoring) + case.bias.double()
    for token in moved.nonzero().flatten().tolist():
        mine, theirs = (exact[token][row[token].long()].sort().values for row in (experts, want))
        assert bool(((mine - theirs).abs() <= budget * theirs.abs().clamp(min=1.0)).all())
    assert int(moved.sum()) <= (len(moved) if kind == "wide" else 4)
    same = ~moved
    relative = (weights[same] - of_want[same]).abs() / of_want[same].abs().clamp(min=1e-30)
    assert float(relative.max()) <= (2 * SOFTPLUS_UNITS + 2 * case.problem.chosen) * U * 2


def test_a_table_chooses_as_the_references_do() -> None:
    case = checks.RouterCase(RouterProblem(500, **checks.V4_PRO, vocabulary=77), "ordinary", 5)
    experts, weights = checks.by_definition(case, "cpu")
    want, of_want = by_reference(case)
    assert torch.equal(experts.long(), want)
    assert torch.allclose(weights, of_want, rtol=3e-6, atol=0)


def test_ids_outside_give_no_expert_and_no_weight() -> None:
    case = checks.RouterCase(RouterProblem(70, **checks.V4_PRO, vocabulary=20), "special", 5)
    finite = torch.nan_to_num(case.logits, nan=0.0, posinf=9.0, neginf=-9.0)
    case.__dict__["logits"] = finite
    experts, weights = checks.by_definition(case, "cpu")
    assert bool((experts[0] == facts.NONE).all())
    assert bool((weights[experts == facts.NONE] == 0).all())
    some = (experts >= 0).any(-1)
    assert torch.allclose(weights[some].sum(-1), torch.tensor(2.5), rtol=1e-6)


def test_ties_go_to_the_lower_id_and_nan_first() -> None:
    case = checks.RouterCase(RouterProblem(3, **checks.V4_PRO), "equal", 0)
    assert checks.by_definition(case, "cpu")[0].tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    biased = torch.zeros(1, 8)
    biased[0, 5], biased[0, 3], biased[0, 1] = math.nan, math.inf, -0.0
    chosen = checks.chosen_by_definition(biased, RouterProblem(1, 8, 4))
    assert chosen.tolist() == [[5, 3, 0, 1]]


def test_forms_do_not_know_the_extents() -> None:
    forms = {choose_form(RouterProblem(t, e, 6), "sm_90a") for t in (1, 999) for e in (300, 384)}
    assert len(forms) == 1
    assert choose_form(RouterProblem(1, 384, 6, vocabulary=9), "sm_90a").by_table


def test_refuses_by_name() -> None:
    for experts, chosen in ((513, 6), (0, 1), (8, 9), (384, 17), (8, 0)):
        with pytest.raises(ShapeMismatch, match="router"):
            RouterProblem(1, experts, chosen)
    with pytest.raises(UnknownName, match="sqrtsoftplus"):
        RouterProblem(1, 8, 2, "softmax")
    with pytest.raises(UnknownName, match="int64"):
        RouterProblem(1, 8, 2, ids="int8")
    for groups, kept in ((3, 1), (2, 3), (64, 2), (8, 1)):
        with pytest.raises(InvalidArgument, match="groups"):
            RouterProblem(1, 64, 9, groups=groups, groups_kept=kept)
    with pytest.raises(InvalidArgument, match="groups"):
        RouterProblem(1, 64, 2, groups=2, groups_kept=1, vocabulary=5)
