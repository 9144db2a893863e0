"""Intervals against tables, and gates over simulated prompts: alarms, and shifts that are seen."""

from __future__ import annotations

import math
import random

import pytest

from degarble.harness.base.errors import Undecided
from degarble.harness.nightly.texts import TextGate, gate, quantile
from degarble.harness.report.verdict import Verdict

DOUBLED = math.log(2)


# Student's distribution, from any table of it.
@pytest.mark.parametrize(
    ("degrees", "probability", "known"),
    [
        (4, 0.975, 2.776),
        (5, 0.8, 0.920),
        (7, 0.9995, 5.408),
        (11, 0.9995, 4.437),
        (31, 0.975, 2.040),
        (100, 0.9995, 3.390),
    ],
)
def test_the_quantile_is_that_of_the_table(degrees: int, probability: float, known: float) -> None:
    assert quantile(degrees, probability) == pytest.approx(known, rel=0.012)


def drawn(seed: int, shift: float, count: int = 12) -> TextGate:
    chance = random.Random(seed)
    reference = [chance.gauss(3.0, 0.5) for _ in range(count)]
    twin = [each + chance.gauss(0.02, 0.01) for each in reference]
    candidate = [each + shift + chance.gauss(0.0, 0.005) for each in twin]
    return gate("perplexity", "nats", candidate, twin, reference, DOUBLED)


def test_healthy_prompts_never_alarm_and_prompts_of_another_difficulty_do_not_matter() -> None:
    assert all(drawn(seed, 0.0).verdict is Verdict.AGREES for seed in range(1000))


def test_a_drift_of_the_stated_size_is_detected_with_the_stated_power() -> None:
    found = [drawn(seed, drawn(seed, 0.0).smallest).verdict for seed in range(400)]
    assert found.count(Verdict.DIFFERS) / len(found) >= 0.75
    assert all(drawn(seed, 0.3).verdict is Verdict.DIFFERS for seed in range(50))
    assert all(drawn(seed, -0.3).verdict is Verdict.DIFFERS for seed in range(50))


@pytest.mark.parametrize("voice", ["twin", "reference"])
@pytest.mark.parametrize("wild", [math.nan, math.inf])
def test_a_twin_that_is_not_finite_is_undecided(voice: str, wild: float) -> None:
    said = {"candidate": [3.0] * 6, "twin": [3.0] * 6, "reference": [3.0] * 6}
    said[voice][2] = wild
    with pytest.raises(Undecided, match=f"perplexity of the {voice}"):
        gate("perplexity", "nats", **said, matters=DOUBLED)


def test_one_wild_prompt_is_no_drift() -> None:
    reference = [3.0] * 8
    found = gate("perplexity", "nats", [3.0] * 7 + [9.0], [3.0] * 8, reference, DOUBLED)
    assert found.verdict is Verdict.UNDECIDED


def test_rounding_alone_is_no_drift_where_the_format_costs_nothing() -> None:
    same = [3.0, 2.9, 3.1, 3.05]
    moved = [each + 1e-4 for each in same]
    assert gate("perplexity", "nats", moved, same, same, DOUBLED).verdict is Verdict.AGREES
    moved = [each + 0.1 for each in same]
    assert gate("perplexity", "nats", moved, same, same, DOUBLED).verdict is Verdict.DIFFERS


def test_what_is_not_finite_differs() -> None:
    found = gate("perplexity", "nats", [float("nan"), 1, 1, 1], [1.0] * 4, [1.0] * 4, DOUBLED)
    assert found.verdict is Verdict.DIFFERS
    assert found.sentence == "perplexity of the candidate is not finite."


def test_the_sentence_states_noise_and_power() -> None:
    assert drawn(1, 0.0).sentence == (
        "perplexity: drift 0.00153 nats [-0.00216, 0.00523], healthy up to 0.0352; "
        "12 prompts show 0.0396 with 80% power."
    )


def test_too_few_prompts_are_undecided() -> None:
    with pytest.raises(Undecided, match="prompts of a text gate = 3"):
        gate("length", "tokens", [1.0] * 3, [1.0] * 3, [1.0] * 3, 12.0)


def test_a_gate_that_would_not_see_a_doubled_perplexity_decides_nothing() -> None:
    """Six prompts on which the format costs between -1 and 1 nats."""
    reference = [3.0, 3.2, 2.8, 3.1, 2.9, 3.0]
    twin = [a + b for a, b in zip(reference, (1.0, -0.9, 0.8, -1.0, 0.9, -0.7), strict=True)]
    found = gate("perplexity", "nats", twin, twin, reference, DOUBLED)
    assert found.verdict is Verdict.UNDECIDED
    assert found.sentence.endswith("A drift of 0.693 has to be seen: give about 99 prompts.")
    more = gate("perplexity", "nats", twin * 16, twin * 16, reference * 16, DOUBLED)
    assert more.verdict is Verdict.AGREES


def test_a_format_that_costs_more_than_what_matters_is_not_helped_by_prompts() -> None:
    reference = [3.0, 3.2, 2.8, 3.1, 2.9, 3.0]
    twin = [each + 1.0 for each in reference]
    found = gate("perplexity", "nats", twin, twin, reference, DOUBLED)
    assert found.verdict is Verdict.UNDECIDED
    assert "the format alone costs more" in found.sentence
    worse = gate("perplexity", "nats", [each + 2 for each in twin], twin, reference, DOUBLED)
    assert worse.verdict is Verdict.DIFFERS
