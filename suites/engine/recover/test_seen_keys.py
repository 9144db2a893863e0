"""The keys that attention saw are told by a rule, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.diagnose.trial import together
from degarble.harness.engine.faults.model_faults import CallRecord
from degarble.harness.engine.recover import seen_keys
from degarble.harness.engine.recover.described import describe
from degarble.harness.engine.recover.seen_keys import rules_of_keys
from degarble.suites.museum.random_faults.answers import CauseAnswer, judged
from degarble.suites.museum.random_faults.conditions import Condition
from degarble.suites.museum.random_faults.edits import Edit
from degarble.suites.museum.random_faults.masks import attended
from degarble.suites.museum.random_faults.stages import RandomFault, Stage, stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.engine.recover.described import Described

    Seen = Callable[[Tensor, Tensor], Tensor]

ATTENTION = "layers.1.self_attn.attention"
FEW = 4  # calls


def small() -> Stage:
    return stage("llama bf16")


def records(seen: Seen) -> list[CallRecord]:
    """Return calls in which tokens saw other keys, by attention computed by hand."""
    found = []
    for call in small().calls[ATTENTION][:FEW]:
        inputs = small().healthy.inputs(call)
        right = dict(small().twin.calls[ATTENTION](inputs, small().twin.weights_of(ATTENTION)))
        made = attended(inputs, seen)
        assert made is not None
        wrong = {"out": made.reshape(right["out"].shape).to(right["out"].dtype)}
        found.append(CallRecord(inputs, wrong, right, step=call.step))
    return found


def told(seen: Seen) -> Described | None:
    context = small().context(ATTENTION)
    with torch.no_grad():
        return describe(context, together(context, records(seen)))


RULES: dict[str, tuple[Seen, str]] = {
    "window": (lambda t, k: (k <= t) & (k > t - 5), "the 5 latest keys only"),
    "one key": (lambda t, k: (k <= t) & ((k != 3) | (k == t)), "the key at position 3 is seen by"),
    "page": (lambda t, k: (k <= t) & ((k < 4) | (k > 7) | (k == t)), "at positions 4 to 7"),
    "first": (lambda t, k: (k <= t) & ((k >= 6) | (k == t)), "only the keys at positions 6 on"),
    "itself": (lambda t, k: (k < t) | (t == 0) & (k <= t), "does not see its own key"),
    "every": (lambda t, k: (k <= t) & ((t - k) % 3 == 0), "every 3. key"),
    "ahead": (lambda t, k: k <= t + 2, "keys up to 2 ahead of it"),
    "gap": (lambda t, k: (k <= t) & (t - k != 2), "does not see the key 2 back"),
    "late": (lambda t, k: (k <= t) & ((t < 12) | (k > t - 4)), "among them, from position 12"),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_keys_that_were_seen_are_told_by_a_rule(name: str) -> None:
    seen, words = RULES[name]
    found = told(seen)
    assert found is not None
    assert words in found.sentence


@pytest.mark.parametrize("name", ["first", "gap"])
def test_a_part_of_large_equations_tells_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved: list[torch.Size] = []
    equations = seen_keys._equations

    def counted(*given: Any) -> Any:
        for each in equations(*given):
            solved.append(each.pulls.shape)
            yield each

    monkeypatch.setattr(seen_keys, "_equations", counted)
    seen, words = RULES[name]
    counts = []
    for equations_at_most, room in ((4096, 1 << 30), (16, 1 << 16)):
        monkeypatch.setattr(seen_keys, "_MOST_EQUATIONS", equations_at_most)
        monkeypatch.setattr(seen_keys, "_MOST_BYTES", room)
        solved.clear()
        found = told(seen)
        assert found is not None
        assert words in found.sentence
        counts.append((len(solved), max(shape[1] for shape in solved)))
    (queries, numbers), (fewer_queries, fewer_numbers) = counts
    assert 0 < 2 * fewer_queries < queries
    assert fewer_numbers == 16 < numbers


def test_keys_by_no_rule_are_not_told() -> None:
    odd = torch.Generator().manual_seed(5)
    chosen = torch.rand(200, 200, generator=odd) < 0.7
    calls = records(lambda t, k: (k <= t) & (chosen[t, k] | (k == t)))
    with torch.no_grad():
        assert not any(rules_of_keys(small().context(ATTENTION), calls))


def test_healthy_calls_have_no_rule() -> None:
    with torch.no_grad():
        calls = records(lambda t, k: k <= t)
        assert rules_of_keys(small().context(ATTENTION), calls) == []


@pytest.mark.slow
def test_a_sequence_that_alone_sees_fewer_keys_is_told_by_its_condition() -> None:
    """Keys of decoding sequences stand in one tensor, so that a sequence cannot be cut out."""
    edit = Edit({"operand": "mask", "op": "window"}, with_window)
    (answer,) = judged(small(), [RandomFault(ATTENTION, edit, Condition("sequence", 1))]).answers
    assert answer.cause is CauseAnswer.DESCRIBED
    assert "the 6 latest keys only" in answer.sentence
    assert answer.where["sequence"] == "1"


def with_window(call: Any) -> Any:
    def faulty(inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Mapping[str, Tensor]:
        right = call(inputs, weights)["out"]
        made = attended(inputs, lambda t, k: (k <= t) & (k > t - 6))
        assert made is not None
        return {"out": made.reshape(right.shape).to(right.dtype)}

    return faulty
