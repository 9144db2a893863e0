"""Paired tests against values that are known, and against plain enumeration."""

from __future__ import annotations

import random
from itertools import product
from math import comb

import pytest

from degarble.harness.probe.paired_tests import (
    binomial_tail,
    mcnemar,
    prompts_for_answers,
    prompts_for_mean,
    sign_flip,
)


@pytest.mark.parametrize(("one", "other"), [(0, 0), (1, 9), (5, 5), (0, 8), (30, 12)])
def test_mcnemar_is_the_binomial_test_of_discordant_pairs(one: int, other: int) -> None:
    total = one + other
    tail = sum(comb(total, k) for k in range(max(one, other), total + 1)) / 2**total
    assert mcnemar(one, other) == pytest.approx(min(1.0, 2 * tail))


def test_binomial_tail_by_counting() -> None:
    counted = sum(sum(bits) >= 3 for bits in product((0, 1), repeat=6)) / 64
    assert binomial_tail(3, 6, 0.5) == pytest.approx(counted)
    assert binomial_tail(0, 6, 0.2) == 1.0
    assert binomial_tail(6, 6, 0.2) == pytest.approx(0.2**6)


def test_sign_flip_is_exact_for_few_and_near_for_many() -> None:
    values = [0.3, -0.1, 0.25, 0.4, 0.05]
    observed = abs(sum(values))
    sums = [abs(sum(s * v for s, v in zip(signs, values, strict=True)))
            for signs in product((1, -1), repeat=5)]  # fmt: skip
    assert sign_flip(values) == sum(t >= observed - 1e-12 for t in sums) / 32
    assert sign_flip([1.0] * 10) == 2 / 2**10
    draw = random.Random(1)
    assert sign_flip([draw.gauss(0, 1) for _ in range(20)]) > 0.01
    assert sign_flip([draw.gauss(1, 1) for _ in range(20)]) < 0.001
    assert sign_flip([0.0, 0.0]) == 1.0


def test_how_many_would_decide() -> None:
    assert prompts_for_answers(5, 5, 100) is None
    small = prompts_for_answers(12, 8, 400)
    large = prompts_for_answers(40, 8, 400)
    assert small is not None
    assert large is not None
    assert small > 10 * large > 400 / 4
    assert prompts_for_mean([0.1, 0.1, 0.1]) == 2
    assert (prompts_for_mean([1.0, -0.9, 1.1, -0.8]) or 0) > 100
    assert prompts_for_mean([0.5]) is None
