"""Where float32 ends, a correct kernel is not blamed for what came before it; elsewhere it is."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.localise.judgeable_rows import OVERFLOW, rows_out_of_range
from degarble.harness.engine.localise.recorded_run import by_component
from degarble.harness.engine.localise.replay import TwinComponents, batches, replayed
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.verdict import Verdict
from degarble.suites.engine.localise_cases import (
    ATTN,
    FFN,
    V4,
    V32,
    bound,
    localised,
    run_of,
    scaled,
)

if TYPE_CHECKING:
    from degarble.harness.engine.localise.recorded_run import InMemoryRun
    from degarble.harness.model.config.config import Config

FIRST = "layers.0.attn."


@pytest.mark.parametrize(
    ("config", "name", "factor"),
    [
        (V4, f"{ATTN}wkv", 1e20),
        (V4, f"{ATTN}wo_b", 1e37),
        (V4, f"{ATTN}kv_write", 1e37),
        pytest.param(V4, f"{ATTN}indexer.wq_b", 1e37, marks=pytest.mark.slow),
        pytest.param(V32, f"{FIRST}wkv_a", 1e20, marks=pytest.mark.slow),
        (V32, f"{FIRST}indexer.wk", 1e20),
    ],
)
def test_what_follows_numbers_near_the_end_of_float32_is_not_blamed(
    config: Config, name: str, factor: float
) -> None:
    """The candidate sums in float32 inside, the twin in float64."""
    run = run_of(name, scaled("out", factor), config=config, inside=torch.float32, recipe="bf16")
    found = localised(run, config, "bf16")
    (origin,) = found.origins
    assert origin.component == name
    assert any(OVERFLOW in why for _, why in found.unjudged)


def one_row_large(row: int, factor: float, norm: float) -> InMemoryRun:
    """One token's query latent beyond float32's squares, and a gain in the norm behind it."""

    def change(call: Any, inputs: Any, weights: Any) -> Any:
        out = call(inputs, weights)["out"].clone()
        if len(out) > 2:
            out[row] = (out[row].float() * factor).to(out.dtype)
        return {"out": out}

    candidate = bound(V4, "bf16", torch.float32)
    name, healthy = f"{ATTN}q_norm", candidate.calls[f"{ATTN}q_norm"]
    candidate.calls[name] = scaled("out", norm)(healthy)
    try:
        way = lambda call: partial(change, call)  # noqa: E731
        return run_of(f"{ATTN}wq_a", way, inside=torch.float32, recipe="bf16")
    finally:
        candidate.calls[name] = healthy


def test_rows_that_do_not_overflow_are_judged() -> None:
    healthy = localised(one_row_large(3, 1e25, 1.0), recipe="bf16")
    assert [each.component for each in healthy.origins] == [f"{ATTN}wq_a"]
    (row,) = (each for each in healthy.rows if each.component.name == f"{ATTN}q_norm")
    assert (row.verdict, row.left_out, row.why_left_out) == (Verdict.AGREES, 1, OVERFLOW)
    sick = localised(one_row_large(3, 1e25, 1.05), recipe="bf16")
    assert [each.component for each in sick.origins] == [f"{ATTN}wq_a", f"{ATTN}q_norm"]


@pytest.mark.parametrize("name", [f"{ATTN}attend", f"{FFN}hc_pre"])
def test_ordinary_numbers_are_in_range(name: str) -> None:
    run = run_of(recipe="bf16")
    known = TwinComponents.of(bound(V4, "bf16", torch.float64), recipe_named("bf16", V4))
    steps = {step.number: step for step in run.steps}
    calls = by_component(run)[name]
    for batch in batches(run, known.components[name], calls, steps):
        assert rows_out_of_range(known, replayed(known, batch)) is None
