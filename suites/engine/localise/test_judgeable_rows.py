"""NaN in some rows hides nothing in the others, raises no alarm, and may not spread."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.recorded_run import InMemoryRun
from degarble.harness.formats.weight import Weight
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import Bound
from degarble.references.weights import random_weights
from degarble.suites.engine.localise_cases import ATTN, FFN, V4, V32, bound, scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from degarble.harness.engine.localise.localise import Localised
    from degarble.harness.model.config.config import Config

SPOILT = 13  # a token whose row of the embedding is NaN
FIRST, LAST = [7, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [4, 4, 2, 9, 1, 8, 2, 7]


@cache
def side(config: Config, inside: torch.dtype) -> Bound:
    """A model with a NaN among its weights: whoever reads it has to hand it on."""
    weights = dict(random_weights(config, 1))
    name = next(each for each in weights if "embed" in each)
    table = weights[name].values(torch.bfloat16).clone()
    table[SPOILT] = torch.nan
    weights[name] = Weight(value=table)
    numerics = bound(config, "bf16", inside).numerics
    return Bound(config, numerics, weights, recipe_named("bf16", config))


@contextmanager
def wrapped(candidate: Bound, name: str, way: Callable[..., Any] | None) -> Iterator[None]:
    healthy = candidate.calls.get(name)
    if way is not None and healthy is not None:
        candidate.calls[name] = way(healthy)
    try:
        yield
    finally:
        if healthy is not None:
            candidate.calls[name] = healthy


def found(
    prompts: tuple[list[int], ...],
    name: str = "",
    way: Callable[..., Any] | None = None,
    config: Config = V4,
) -> Localised:
    candidate = side(config, torch.float32)
    with wrapped(candidate, name, way):
        run = InMemoryRun.of(candidate, prompts, 3)
    twin = side(config, torch.float64)
    return localise(twin, recipe_named("bf16", config), run)


BESIDE = (FIRST, [2, SPOILT, 1], LAST)
WITHIN = ([*FIRST, SPOILT, *LAST],)


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
@pytest.mark.parametrize("prompts", [BESIDE, WITHIN], ids=["beside", "within"])
def test_a_nan_that_everybody_has_to_hand_on_is_no_fault(
    config: Config, prompts: tuple[list[int], ...]
) -> None:
    told = found(prompts, config=config)
    assert not told.origins
    assert told.verdict is Verdict.UNDECIDED  # some rows were not judged, which is said
    assert {row.verdict for row in told.rows} <= {Verdict.AGREES, Verdict.UNDECIDED}
    left = [row for row in told.rows if row.left_out]
    assert left
    assert max(row.ratio for row in told.rows if row.ratio == row.ratio) <= 0.7
    assert any("rows were left out: inputs are not finite" in why for _, why in told.unjudged)
    if prompts is BESIDE:
        # 2 of 3 tokens of the prompt, and one of each of two steps, of 22 + 6.
        assert {(row.left_out, row.judged_rows) for row in left if "ffn" in row.component.name} == {
            (4, 24)
        }


PLACES = (
    f"{ATTN}attend", f"{ATTN}compressor.pool", f"{ATTN}indexer.scores", f"{ATTN}wq_b",
    f"{FFN}experts.w2", f"{FFN}topk",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "prompts"),
    [
        *((name, WITHIN) for name in PLACES[:3]),
        *((name, BESIDE) for name in PLACES[2:4]),
        *(
            pytest.param(name, BESIDE, marks=pytest.mark.slow)
            for name in PLACES
            if name not in PLACES[2:4]
        ),
    ],
)
def test_a_fault_beside_a_nan_is_found_in_the_other_rows(
    name: str, prompts: tuple[list[int], ...]
) -> None:
    told = found(prompts, name, scaled("weights" if name.endswith("topk") else "out", 1.1))
    (origin,) = told.origins
    assert origin.component == name
    assert origin.judged is not None
    assert origin.judged.ratio > 1
    assert origin.sight is not None
    for values in (*origin.sight.inputs.values(), *origin.sight.expected.values()):
        assert not bool(values.isnan().any()), "who diagnoses sees no row that was left out"


@pytest.mark.parametrize("name", [f"{ATTN}attend", f"{FFN}experts.w2"])
def test_a_nan_where_none_can_legally_be_is_a_fault(name: str) -> None:
    def spread(call: Any, inputs: Any, weights: Any) -> Any:
        out = call(inputs, weights)["out"].clone()
        if bool(out.isnan().any()):
            out[:2] = torch.nan  # of the first sequence
        return {"out": out}

    (origin,) = found(BESIDE, name, lambda call: partial(spread, call)).origins
    assert origin.component == name
    assert "NaN or infinite on one side only" in origin.sentence
