"""Experts of one layer are judged together where each alone is too weak, and only beside their own.

The relation is that of a trained network: a channel that an expert makes strong is read strongly.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from degarble.harness.checkpoint.audit.statistics.inference import BlockProfiles, Kinship
from degarble.harness.checkpoint.view.weight_units import WeightUnit
from degarble.harness.model.types import Kind
from degarble.suites.checkpoint.audit.statistics.test_inference_order import packed_as

if TYPE_CHECKING:
    from numpy.typing import NDArray

EXPERTS, WIDTH = 32, 1024
ACT, MADE = "layers.0.ffn.experts.act", "layers.0.ffn.experts.w13"
FEEDS = {ACT: f"{MADE}.out"}


def unit(expert: int, name: str, feed: str, component: str) -> WeightUnit:
    return WeightUnit(
        name=f"layers.0.ffn.experts.{expert}.{name}",
        module="",
        role=name,
        place="layers.0",
        layer=0,
        expert=expert,
        kind=Kind.LINEAR,
        feed=feed,
        component=component,
        member=None,
        is_bare=False,
        nbytes=0,
        position=(Path(), 0),
    )


def found(columns: NDArray[np.float64], rows: NDArray[np.float64], *, packed: bool) -> Any:
    return SimpleNamespace(
        columns=(2.0**columns).astype(np.float32),
        rows=(2.0**rows).astype(np.float32),
        blocks=object() if packed else None,
        counts=range(16),
    )


def judged(seed: int, related: float, order: str, experts: int = EXPERTS) -> list[Any]:
    """Judge the w2 of a layer whose columns follow the rows of w1 by so much."""
    random = np.random.default_rng(seed)
    block = BlockProfiles(FEEDS)
    for expert in range(experts):
        width = 6.0 if expert == 3 else 0.5  # a dead expert: wide on both sides, unrelated
        made = random.standard_t(6, WIDTH)
        own = random.standard_t(6, WIDTH)
        share = 0.0 if expert == 3 else related
        read = share * made + np.sqrt(1 - share * share) * own
        name = unit(expert, "w1", "layers.0.ffn.norm.out", MADE)
        block.add(2 * expert, name, found(random.normal(size=64), made * width, packed=False))
        facts = found(read * width, random.normal(size=64), packed=True)
        facts.columns = packed_as(order, facts.columns)
        block.add(2 * expert + 1, unit(expert, "w2", f"{ACT}.out", "w2"), facts)
    return [each for each in block.judge() if each.row % 2]


@pytest.mark.parametrize("order", ["low_even", "high_even", "halves"])
@pytest.mark.parametrize("related", [0.25, -0.25])
def test_weak_evidence_of_all_experts_is_enough(seed: int, order: str, related: float) -> None:
    made = judged(seed, related, order)
    assert {each.inferred.value for each in made} == {order}
    assert Kinship.EXPERTS in {each.kinship for each in made}


def test_one_expert_alone_would_not_be(seed: int) -> None:
    assert {each.inferred.value for each in judged(seed, 0.2, "high_even", experts=2)} == {None}


@pytest.mark.parametrize("order", ["low_even", "high_even"])
def test_experts_without_a_relation_stay_undecided(seed: int, order: str) -> None:
    assert {each.inferred.value for each in judged(seed, 0.0, order)} == {None}
