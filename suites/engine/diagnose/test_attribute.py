"""Shares of the final difference: one origin, several, and those that cannot be injected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from degarble.harness.engine.diagnose.attribute import recorded_throughout, shares_of
from degarble.harness.engine.localise.discrepancy import DiscrepancyKind
from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.recorded_run import InMemoryRun
from degarble.harness.model.recipes import recipe_named
from degarble.suites.engine.localise_cases import (
    ATTN,
    FFN,
    PROMPTS,
    V4,
    bound,
    localised,
    replaced,
    run_of,
    scaled,
)

import torch  # isort: skip

TWIN = bound(V4, "bf16", torch.float64)
RECIPE = recipe_named("bf16", V4)


def faulty_run(*names: str) -> InMemoryRun:
    plain = dict(TWIN.calls)
    for name in names:
        TWIN.calls[name] = scaled("out", 1.25)(TWIN.calls[name])
    try:
        return InMemoryRun.from_prompts(TWIN, PROMPTS, 3)
    finally:
        TWIN.calls.update(plain)


def test_one_origin_explains_all() -> None:
    run = run_of(f"{FFN}experts.w2", scaled("out", 1.25))
    found = localised(run)
    shares = shares_of(bound(V4, "nvfp4-full", torch.float64), run, found.origins)
    assert shares is not None
    assert shares.share_of(0) == pytest.approx(1, abs=0.02)
    assert shares.order == (0,)
    assert "1 explain" in shares.sentence


def test_several_origins_explain_it_together() -> None:
    run = faulty_run("layers.0.attn.wo_b", f"{FFN}moe_sum", "head")
    found = localise(TWIN, RECIPE, run)
    names = [origin.component for origin in found.origins]
    assert names == ["layers.0.attn.wo_b", f"{FFN}moe_sum", "head"]
    shares = shares_of(TWIN, run, found.origins)
    assert shares is not None
    assert sorted(shares.order) == [0, 1, 2]
    assert shares.together[-1] == pytest.approx(1, abs=0.01)
    assert shares.together[-1] > max(each for each in shares.alone if each is not None)
    assert TWIN.calls["head"] is not None


def test_an_edge_is_injected_and_a_missing_call_is_not() -> None:
    run = run_of(f"{ATTN}attend", edge=replaced("state_window", torch.zeros_like), recipe="bf16")
    found = localised(run, recipe="bf16")
    shares = shares_of(TWIN, run, found.origins)
    assert shares is not None
    assert shares.share_of(0) == pytest.approx(1, abs=0.02)
    missing = replace(found.origins[0], kind=DiscrepancyKind.MISSING)
    none = shares_of(TWIN, run, [missing])
    assert none is not None
    assert none.alone == (None,)
    assert "No origin could be injected" in none.sentence


def test_a_run_that_begins_in_the_middle_has_no_shares() -> None:
    run = faulty_run("head")
    found = localise(TWIN, RECIPE, run)
    run.steps[0] = replace(run.steps[0], positions=tuple(p + 5 for p in run.steps[0].positions))
    assert shares_of(TWIN, run, found.origins) is None


def test_an_origin_that_was_recorded_in_part_has_no_share() -> None:
    """Its error in the other rows and steps is not known: what is injected explains too little."""
    name = "layers.0.attn.wo_b"
    run = faulty_run(name)
    (origin,) = localise(TWIN, RECIPE, run).origins
    assert recorded_throughout(run, name)
    number, call = next((n, each) for n, each in enumerate(run.calls) if each.component == name)
    output = call.outputs["out"]._replace(rows=tuple(range(call.outputs["out"].shape[0])))
    run.calls[number] = replace(call, outputs={"out": output})
    partly = shares_of(TWIN, run, [origin])
    assert partly is not None
    assert partly.alone == (None,)
    del run.calls[number]
    assert not recorded_throughout(run, name)
    assert shares_of(TWIN, run, [origin]) == partly
