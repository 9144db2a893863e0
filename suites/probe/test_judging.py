"""Distances of distributions, and when a check differs: faults are found, near ties are not."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from degarble.harness.base.errors import UnusableServer
from degarble.harness.probe.answers import (
    Answer,
    AnswerReader,
    Position,
    distance,
    divergence,
    slope,
)
from degarble.harness.probe.client import Client, Reply, RequestLimits
from degarble.harness.probe.judging import (
    Cause,
    ProbedCheck,
    ProbedComparison,
    ProbeLevel,
    Status,
    affected,
    compare,
    judge,
    limit_of,
    rounding_distance,
)
from degarble.harness.probe.probe import Check, ProbeResult, _run
from degarble.harness.probe.report import _counted, sentence_of
from degarble.harness.probe.rules import sampling
from degarble.harness.probe.server import Ask, ProbedServer
from degarble.harness.probe.session import ProbeOptions, Session


def position(token: str, **shares: float) -> Position:
    top = {name: math.log(share) for name, share in shares.items()}
    return Position(token, top.get(token), top)


def sized(prompt: int, *distances: float) -> ProbedComparison:
    return ProbedComparison(prompt, distances, tuple(d * d / 2 for d in distances))


def test_distance_and_divergence() -> None:
    one, other = position("a", a=0.6, b=0.3), position("a", a=0.3, b=0.6)
    assert distance(one, one) == 0.0
    assert divergence(one, one) == pytest.approx(0.0, abs=1e-12)
    assert distance(one, other) == pytest.approx(math.log(2))
    assert divergence(one, other) == pytest.approx(0.3 * math.log(2))


def test_a_token_that_one_list_lacks_counts_by_its_bound() -> None:
    one, other = position("a", a=0.6, b=0.3), position("c", c=0.9, d=0.05)
    assert distance(one, other) > 1.5
    short = position("a", a=0.6)
    assert distance(one, short) == pytest.approx(0.0)  # b may have up to a's share there


def test_slope_shows_a_temperature() -> None:
    one = position("a", a=0.6, b=0.3, c=0.1)
    hot = Position("a", None, {token: value / 2 for token, value in one.top.items()})
    assert slope([one], [hot]) == pytest.approx(0.5)
    assert slope([], []) is None


def test_tokens_that_part_end_a_comparison() -> None:
    same, ours, theirs = position("a", a=0.9), position("b", b=0.5), position("c", c=0.5, b=0.4)
    made = compare([same, ours, same], [same, theirs, same], 3)
    assert (made.parted, len(made.distances)) == (1, 2)


@pytest.mark.parametrize(
    ("comparisons", "found"),
    [
        ([sized(n, *[0.03] * 8) for n in range(8)], 0),
        ([sized(n, *[0.2] * 8) for n in range(8)], 8),
        ([*(sized(n, *[0.02] * 8) for n in range(7)), sized(7, *[0.02] * 7, 2.2)], 0),
        ([*(sized(n, *[0.02] * 8) for n in range(7)), sized(7, *[2.0] * 8)], 1),
        ([*(sized(n, *[0.02] * 8) for n in range(6)), sized(6, 3.0), sized(7, 3.0)], 2),
        ([*(sized(n, *[0.02] * 8) for n in range(6)), *(sized(n, 0.4, 0.4) for n in (6, 7, 8))], 3),
    ],
    ids=["rounding", "all", "one-near-tie", "one-prompt-throughout", "two-grossly", "some-far"],
)  # fmt: skip
def test_what_rounding_does_not_explain(comparisons: list[ProbedComparison], found: int) -> None:
    assert len(affected(comparisons, 3 * rounding_distance("bf16"))) == found


def results(**sizes: float) -> list[ProbedCheck]:
    return [
        ProbedCheck(name, [sized(n, *[size] * 8) for n in range(8)]) for name, size in sizes.items()
    ]


def test_a_check_does_not_widen_its_own_limit() -> None:
    floor = 3 * rounding_distance("bf16")
    found = results(repeats=0.0, batch=1.0, prefill=0.02, chunks=0.02, cache=0.02)
    assert limit_of("batch", found, None) == pytest.approx(floor)
    assert limit_of("prefill", results(prefill=3.0, batch=0.01), "bf16") == pytest.approx(floor)


def test_a_noisy_server_is_allowed_its_noise_up_to_a_bound() -> None:
    found = results(repeats=0.1, batch=0.12, prefill=0.12, chunks=0.2, cache=0.12)
    assert limit_of("chunks", found, None) == pytest.approx(0.36)
    found = results(repeats=9.0, batch=9.0, prefill=9.0, chunks=9.0, cache=9.0)
    assert limit_of("batch", found, None) == pytest.approx(3 * rounding_distance("fp4"))


@pytest.mark.parametrize(
    ("shown", "floor"),
    [
        ({"chunks": 0.03, "prefill": 0.1}, 0.1),
        ({"cache": 0.0, "chunks": 0.03, "prefill": 3.0}, rounding_distance("fp8")),
        ({"cache": 0.0}, rounding_distance("fp8")),
        ({"chunks": 0.0, "prefill": 0.001}, rounding_distance("bf16")),
    ],
)
def test_a_batch_may_move_as_far_as_fp8_that_other_routes_do_not_rule_out(
    shown: dict[str, float], floor: float
) -> None:
    assert limit_of("batch", results(repeats=0.0, **shown), None) == pytest.approx(3 * floor)
    assert limit_of("batch", results(repeats=0.0, **shown), "bf16") <= 3 * floor


def test_fp8_is_allowed_for_as_a_note_unless_the_user_says() -> None:
    cause = Cause("apart", "look")
    for tight, level in ((0.07, ProbeLevel.NOTE), (None, None)):
        (result,) = results(prefill=0.2)
        judge(result, 0.47, cause, tight)
        assert [f.level for f in result.findings] == ([level] if level else [])
    (result,) = results(prefill=0.2)
    judge(result, 0.07, cause)
    assert [f.level for f in result.findings] == [ProbeLevel.DIFFERS]
    assert "8 of 8" in result.findings[0].evidence


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"choices": []},
        {"choices": "x"},
        {"choices": [{"text": 3}]},
        {"choices": [{"text": "a", "logprobs": []}]},
        {"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": []}}]},
        {"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": ["x"]}}]},
        {"choices": [{"message": {"content": "a"}, "logprobs": {"content": [1]}}]},
        {"choices": [{"message": {"content": "a"}, "logprobs": {"content": 1}}]},
        {"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [10**400]}}]},
    ],
)
def test_answers_of_another_form_are_refused(document: dict[str, object]) -> None:
    with pytest.raises(UnusableServer, match="as in OpenAI's interface"):
        AnswerReader("/v1/completions").answers(Reply(200, document))


def test_a_stream_of_another_form_is_refused() -> None:
    with pytest.raises(UnusableServer, match="as in OpenAI's interface"):
        AnswerReader("/v1/completions").answers(Reply(200, {}, ({"choices": 7},)))


class SeedServer:
    """Continues every prompt with two likely tokens; the second of two equal requests may move."""

    def __init__(self, moved: float) -> None:
        self.moved, self.asked = moved, 0
        self.lacks: dict[str, str] = {}

    def offers(self, *features: str) -> bool:
        return features == ("seed",)

    def complete(self, _ask: Ask) -> Answer:
        self.asked += 1
        second = self.asked % 2 == 0
        likely = 0.5 + (self.moved / 2 if second else 0)
        return Answer("", (position("b" if second else "a", a=likely, b=1 - likely),))


@pytest.mark.parametrize(("moved", "found"), [(0.0, 1), (0.2, 0)])
def test_a_seed_is_judged_where_equal_contexts_get_equal_numbers(moved: float, found: int) -> None:
    asks = [Ask("a text", 1)] * 12
    session: Any = SimpleNamespace(server=SeedServer(moved), asks=lambda: asks)
    result = ProbedCheck("sampling")
    sampling(session, result)
    assert [f.cause for f in result.findings] == ["the same seed gives other texts"] * found
    assert len(result.notes) == 1 - found


@pytest.mark.parametrize(("ids", "count"), [(False, 2), (True, 3)])
def test_an_answer_becomes_a_prompt_up_to_its_end_token(ids: bool, count: int) -> None:
    """Answers that end early were left out whole, and with them the check of most short answers."""
    client = Client("http://h", None, RequestLimits())
    server = ProbedServer(client, ids=ids, joint=" ")
    answer = Answer("a b", tuple(Position(token, -1.0, {}) for token in ("a", " b", "</s>")))
    assert server.writable(answer) == count
    if not ids:
        assert server.continued("x", answer, server.writable(answer)) == "x a b"
        assert server.continued("x", answer, 3) is None


def test_a_check_that_compared_nothing_is_named_as_not_judged() -> None:
    server = ProbedServer(Client("http://h", None, RequestLimits()))
    result = ProbeResult(server, ProbeOptions(("a",)))

    def left_out(_session: Session, empty: ProbedCheck) -> None:
        empty.notes.append("left out")

    check = Check("prefill", left_out, (), Cause("c", "r"))
    _run(check, Session(server, result.options), result)
    assert (result.checks[0].status, result.checks[0].reason) == (
        Status.SKIPPED, "nothing could be compared; left out",
    )  # fmt: skip
    assert "Not judged: prefill" in sentence_of(result)


def test_equal_notes_are_counted() -> None:
    assert _counted(["a", "b", "a"]) == ["a (2 times)", "b"]
