from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.engine.budget.budget import (
    HEADROOM,
    Budget,
    LayerStep,
    composed,
    judge,
    nearer_than_the_twin,
    spacing,
)
from degarble.harness.engine.budget.rules import summed
from degarble.harness.engine.compare.compare import NamedPlaces
from degarble.harness.formats.codec import FORMAT_OF_DTYPE
from degarble.harness.formats.number_formats import BF16, E4M3, NVFP4
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.harness.report.verdict import Verdict

SHAPE = (256, 512)


def twin_and_budget(slack: float = 1e-4) -> tuple[torch.Tensor, Budget]:
    twin = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).bfloat16()
    return twin, Budget(BF16, torch.tensor(slack), ("given",))


def test_an_identical_candidate_uses_nothing_of_its_budget() -> None:
    twin, budget = twin_and_budget()
    judged = judge(twin, twin, budget)
    assert judged.verdict is Verdict.AGREES
    assert [each.ratio for each in judged.findings] == [0.0] * len(judged.findings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_spacing_is_the_distance_of_neighbours(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1e-7, 0.7, 1.0, 1.5, 3e4]).to(dtype)
    above = torch.nextafter(values, torch.full_like(values, math.inf))
    expected = (above.double() - values.double()).tolist()
    assert spacing(values.double().numpy(), FORMAT_OF_DTYPE[dtype]).tolist() == expected


def test_spacing_of_fp8() -> None:
    assert spacing(np.array([448.0, 1.0, 0.0]), E4M3).tolist() == [32.0, 0.125, 2.0**-9]


def test_a_step_that_the_slack_allows_is_healthy_and_two_steps_are_not() -> None:
    twin, budget = twin_and_budget()
    step = torch.zeros(SHAPE, dtype=torch.int16)
    step[7, 9] = 1
    one = (twin.view(torch.int16) + step).view(torch.bfloat16)
    judged = judge(one, twin, budget)
    assert 0.5 < judged.worst.ratio <= HEADROOM
    assert judged.worst.level == "element"
    assert judged.worst.place == (7, 9)
    two = (twin.view(torch.int16) + 2 * step).view(torch.bfloat16)
    assert judge(two, twin, budget).verdict is Verdict.DIFFERS


def test_too_many_allowed_steps_are_too_far() -> None:
    """Each element is within its budget; the row, the tile or the whole is not."""
    twin, budget = twin_and_budget(1e-5)
    generator = torch.Generator().manual_seed(2)
    steps = torch.randint(0, 2, SHAPE, generator=generator, dtype=torch.int16)
    steps *= torch.randint(0, 2, SHAPE, generator=generator, dtype=torch.int16) * 2 - 1
    shifted = (twin.view(torch.int16) + steps).view(torch.bfloat16)
    one_row, one_tile = twin.clone(), twin.clone()
    one_row[3] = shifted[3]
    one_tile[128:, 256:384] = shifted[128:, 256:384]
    for candidate, level, place in (
        (one_row, "length of row", (3,)),
        (one_tile, "length of tile", (1 * 4 + 2,)),
    ):
        judged = judge(candidate, twin, budget)
        element = next(each for each in judged.findings if each.level == "element")
        assert element.ratio <= 1
        found = next(each for each in judged.findings if each.level == level)
        assert found.ratio > 1, str(found)
        assert found.place == place


def test_named_places_are_judged() -> None:
    twin, budget = twin_and_budget()
    places = NamedPlaces(rows={"expert": np.arange(256) % 4}, columns={"head": 64})
    candidate = twin.clone()
    candidate[:, 64:128] *= 1.01
    judged = judge(candidate, twin, budget, places)
    found = {each.level: each for each in judged.findings}
    assert found["length of head"].place == found["gain of head"].place == (1,)
    assert found["length of head"].ratio > 1
    assert {"length of expert", "gain of expert"} <= set(found)
    assert str(found["gain of head"]).startswith("gain of head 1: 0.0")


def test_a_value_of_another_kind_is_beyond_every_budget() -> None:
    twin, budget = twin_and_budget(1.0)
    candidate = twin.clone()
    candidate[5, 6] = math.nan
    judged = judge(candidate, twin, budget)
    assert math.isinf(judged.worst.ratio)
    assert (judged.worst.level, judged.worst.place) == ("kind of element", (5, 6))
    assert str(judged.worst) == "NaN or infinite on one side only: 1 elements, first 5, 6"
    both = twin.clone()
    both[0, 0] = -math.inf
    assert judge(both, both, budget).verdict is Verdict.AGREES


def test_a_silent_fallback_to_the_unquantised_operands_is_too_good() -> None:
    generator = torch.Generator().manual_seed(4)
    x, w = (torch.randn(n, 512, generator=generator).bfloat16() for n in (64, 128))
    exactly = [dequantise(quantise(side, NVFP4), torch.float64) for side in (x, w)]
    reference = (x.double() @ w.double().T).bfloat16()
    twin = (exactly[0] @ exactly[1].T).bfloat16()
    budget = summed(exactly[0], exactly[1])
    healthy = (exactly[0].float() @ exactly[1].float().T).bfloat16()
    for candidate, caught in ((healthy, False), ((x.float() @ w.float().T).bfloat16(), True)):
        judged = judge(candidate, twin, budget)
        nearer = nearer_than_the_twin(judged, candidate, twin, reference)
        assert (judged.verdict is Verdict.DIFFERS) is caught
        assert (nearer.ratio > 1) is caught
        assert caught or nearer.ratio <= HEADROOM
    half = [x.double(), exactly[1]]  # weights quantised, activations not
    candidate = (half[0] @ half[1].T).bfloat16()
    judged = judge(candidate, twin, budget)
    assert nearer_than_the_twin(judged, candidate, twin, reference).ratio > 1


def test_errors_of_a_layer_add_in_squares() -> None:
    drift, words = composed([LayerStep("attn.wq_a", 3e-3), LayerStep("attn.wo_b", 8e-3, 0.5)])
    assert drift == pytest.approx(5e-3)
    assert "[attn.wo_b]" in words
    assert composed([])[0] == 0


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_slack_that_bounds_nothing_is_refused(value: float) -> None:
    twin, budget = twin_and_budget(value)
    with pytest.raises(InvalidArgument, match="slack"):
        judge(twin, twin, budget)


def test_empty_tensors_agree() -> None:
    _, budget = twin_and_budget()
    for shape in ((0, 8), (8, 0), (0,)):
        empty = torch.zeros(shape).bfloat16()
        assert judge(empty, empty, budget).verdict is Verdict.AGREES
