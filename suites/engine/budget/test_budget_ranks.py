"""Sums over ranks, stored on the way: healthy ones are within, a wrong term of a rank is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.budget.budget import HEADROOM
from degarble.harness.engine.budget.judging import judge_outputs
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Callable

    Terms = list[torch.Tensor]
    Made = Callable[[int, int], tuple[JudgeableCall, Terms]]
    Add = Callable[[Terms], torch.Tensor]

T, K, N = 32, 512, 96
EXPERT = "ffn.experts.0.w2"


def terms_of(ranks: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Input, matrix, and what each rank stores of its part of K."""
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=drawn).bfloat16()
    w = (torch.randn(N, K, generator=drawn) / K**0.5).bfloat16()
    parts = zip(x.tensor_split(ranks, 1), w.tensor_split(ranks, 1), strict=True)
    return x, w, [(a.float() @ b.float().T).bfloat16() for a, b in parts]


def linear(ranks: int, seed: int) -> tuple[JudgeableCall, list[torch.Tensor]]:
    x, w, terms = terms_of(ranks, seed)
    out = (x.double() @ w.double().T).bfloat16()
    weights = {"attn.wo_b": Weight(value=w)}
    return JudgeableCall("attn.wo_b", {"x": x}, {"out": out}, weights, ranks=ranks), terms


def routed(ranks: int, seed: int) -> tuple[JudgeableCall, list[torch.Tensor]]:
    x, w, terms = terms_of(ranks, seed)
    inputs = {"x": x[:, None], "experts": torch.zeros(T, 1, dtype=torch.int64)}
    out = (x.double() @ w.double().T).bfloat16()[:, None]
    call = JudgeableCall(
        "ffn.experts.w2", inputs, {"out": out}, {EXPERT: Weight(value=w)}, ranks=ranks
    )
    return call, terms


def ring(terms: list[torch.Tensor]) -> torch.Tensor:
    total = terms[0]
    for each in terms[1:]:
        total = (total.float() + each.float()).bfloat16()
    return total


def joined(terms: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([each.double() for each in terms]).sum(0).float()[:, None]


CASES: list[tuple[Made, Add]] = [(linear, ring), (routed, joined)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("made", "add"), CASES, ids=["stored on the way", "joined here"])
def test_terms_of_healthy_ranks_are_within(made: Made, add: Add, ranks: int, seed: int) -> None:
    call, terms = made(ranks, seed)
    [found] = judge_outputs(call, {"out": add(terms)}).values()
    assert found.ratio <= HEADROOM


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("made", "add"), CASES, ids=["stored on the way", "joined here"])
@pytest.mark.parametrize("fault", ["missing", "doubled", "of rank 0"])
def test_a_wrong_term_is_outside(made: Made, add: Add, fault: str, ranks: int, seed: int) -> None:
    call, terms = made(ranks, seed)
    wrong = {"missing": terms[1] * 0, "doubled": terms[1] * 2, "of rank 0": terms[0]}[fault]
    [found] = judge_outputs(call, {"out": add([terms[0], wrong, *terms[2:]])}).values()
    assert found.ratio > 1.5


def test_without_ranks_their_terms_alarm(seed: int) -> None:
    """The allowance is needed: one rank's budget is narrower than the terms of eight."""
    for made, add in CASES:
        call, terms = made(8, seed)
        alone = JudgeableCall(call.role, call.inputs, call.outputs, call.weights)
        [found] = judge_outputs(alone, {"out": add(terms)}).values()
        assert found.ratio > 1
