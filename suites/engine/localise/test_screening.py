"""Screening: what is drawn, what it would miss, and that what it finds is judged whole."""

from __future__ import annotations

import random
from functools import cache, partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.localise.localise import During, localise
from degarble.harness.engine.localise.recorded_run import InMemoryRun
from degarble.harness.engine.localise.screening import SampledRows, _drawn
from degarble.harness.model.config.config import small_v4
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.verdict import Verdict
from degarble.suites.engine.localise_cases import bound

if TYPE_CHECKING:
    from degarble.harness.engine.localise.localise import Localised

V4 = small_v4(num_hidden_layers=1, compress_ratios=(4, 0), num_hash_layers=0)
RECIPE = recipe_named("nvfp4-full", V4)
NAME = "layers.0.attn.q_norm"


def test_the_stated_risk_is_that_of_drawing() -> None:
    sampled = SampledRows(3, 10, at_random=True)
    drawn = [set(rows) for rows in combinations(range(10), 3)]
    for share, wrong in ((0.1, {0}), (0.25, {0, 1, 2})):
        missed = sum(not rows & wrong for rows in drawn) / len(drawn)
        assert sampled.missed(share) == pytest.approx(missed)
    assert sampled.missed(1.0) == 0
    assert sampled.size == pytest.approx((10 / 3) ** 0.5)
    assert SampledRows(3, 10, at_random=False).missed(0.1) is None


def test_every_step_and_expert_is_drawn_and_few_rows() -> None:
    steps = torch.cat([torch.zeros(600, dtype=torch.int64), torch.arange(1, 9)])
    experts = torch.arange(608)[:, None] % 32
    batch: Any = type("Rows", (), {"step_of": steps, "inputs": {"experts": experts}})
    for seed in range(20):
        rows = _drawn(batch, 608, random.Random(seed))
        assert {int(steps[row]) for row in rows} == set(range(9))
        assert set(experts[rows].flatten().tolist()) == set(range(32))
        assert len(rows) < 80


@cache
def run(fault: float = 1.0, inside: torch.dtype = torch.float64) -> InMemoryRun:
    candidate = bound(V4, "nvfp4-full", inside)
    healthy = candidate.calls[NAME]

    def scaled(call: Any, inputs: Any, weights: Any) -> Any:
        made = dict(call(inputs, weights))
        return made | {"out": (made["out"].float() * fault).to(made["out"].dtype)}

    chance = random.Random(5)
    prompts = [[chance.randrange(1, 500) for _ in range(n)] for n in (150, 60)]
    if fault != 1.0:
        candidate.calls[NAME] = partial(scaled, healthy)
    try:
        return InMemoryRun.from_prompts(candidate, prompts, 3)
    finally:
        candidate.calls[NAME] = healthy


def judged(seen: InMemoryRun, *, screen: bool) -> Localised:
    return localise(bound(V4, "nvfp4-full"), RECIPE, seen, None, During(screen=screen))


def test_a_healthy_run_agrees_by_few_rows() -> None:
    found = judged(run(inside=torch.float32), screen=True)
    assert found.verdict is Verdict.AGREES
    assert found.sampled is not None
    independent = [each for each in found.sampled.values() if each.at_random]
    assert len(independent) > 20
    assert all(each.looked < each.rows / 3 for each in independent)
    assert all(each.experts == each.visited for each in independent)


def test_what_is_found_is_judged_whole() -> None:
    whole, found = (judged(run(1.03), screen=screen) for screen in (False, True))
    assert whole.sampled is None
    assert found.sampled is not None
    assert NAME not in found.sampled
    assert (found.verdict, len(found.origins)) == (Verdict.DIFFERS, 1)
    for left, right in zip(whole.origins, found.origins, strict=True):
        assert (left.component, left.sentence) == (right.component, right.sentence)
    row, same = ({r.component.name: r for r in each.rows}[NAME] for each in (whole, found))
    assert (row.ratio, row.elements) == (same.ratio, same.elements)
