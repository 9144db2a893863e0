"""When a fault acts: rules that the rows force, and nothing where they force none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.capture.files.records import Phase
from degarble.harness.engine.diagnose.conditions import (
    _of_steps,
    _Rows,
    _rules,
    condition_of,
)
from degarble.harness.engine.diagnose.diagnose import Diagnosed, diagnose
from degarble.harness.engine.faults.model_faults import FaultVariant
from degarble.suites.museum.random_faults.conditions import Condition
from degarble.suites.museum.random_faults.edits import Edit
from degarble.suites.museum.random_faults.stages import RandomFault, stage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

LINEAR = "layers.1.self_attn.k_proj"


def found(struck: list[dict[str, int]], spared: list[dict[str, int]]) -> list[tuple[str, str]]:
    """The rules that separate rows, each given by some features."""
    every = [*struck, *spared]
    features = {name: torch.tensor([row[name] for row in every]) for name in every[0]}
    mask = torch.tensor([True] * len(struck) + [False] * len(spared))
    return [(rule.feature, rule.values) for rule in _rules(_Rows(features, mask, ~mask))]


def row(step: int, sequence: int, position: int, tokens: int, decode: int) -> dict[str, int]:
    return {
        "step": step, "sequence": sequence, "position": position, "tokens": tokens,
        "decode": decode,
    }  # fmt: skip


def test_rules_are_those_that_the_rows_force() -> None:
    a, b, c = row(0, 0, 3, 9, 0), row(1, 0, 9, 2, 1), row(2, 1, 9, 2, 1)
    assert found([b, c], [a]) == [
        ("phase", "decode"), ("steps", "from 1"), ("tokens", "<= 2"), ("position", ">= 9")
    ]  # fmt: skip
    assert found([c], [a, b]) == [("sequence", "1"), ("step", "2")]
    assert found([a, c], [b]) == [("steps", "0, 2")]
    assert found([a, b], [{**a, "step": 1}]) == []


def test_positions_are_listed_or_so_many_apart_where_no_other_rule_holds() -> None:
    def at(step: int, position: int) -> dict[str, int]:
        return row(step, step, position, 40, 0)

    spared = [at(step, position) for step in (0, 1) for position in (0, 4, 6, 30)]
    assert found([at(0, 5), at(1, 5)], spared) == [("position", "5")]
    pages = [at(step, position) for step in (0, 1) for position in (7, 15, 23)]
    assert found(pages, spared) == [("position", "7 modulo 8")]
    assert found(pages, [*spared, at(0, 31)]) == [("position", "7, 15, 23")]
    assert found(pages, [*spared, at(1, 15)]) == []


def test_a_position_that_is_not_known_gives_no_rule() -> None:
    a, b = row(0, 0, -1, 9, 0), row(0, 0, -1, 9, 0)
    assert found([a], [b]) == []


def gain(condition: Condition) -> RandomFault:
    def apply(call: Any) -> Any:
        def faulty(inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Any:
            return {n: (t * 1.3).to(t.dtype) for n, t in call(inputs, weights).items()}

        return faulty

    return RandomFault(LINEAR, Edit({"operand": "output out"}, apply), condition)


def told(condition: Condition) -> Diagnosed:
    own = stage("llama bf16")
    (origin,) = own.localised(own.run([gain(condition)])).origins
    assert origin.record is not None
    return diagnose(origin.context, [origin.record, *origin.more])


@pytest.mark.parametrize(
    ("condition", "where", "words"),
    [
        (Condition("phase", Phase.PREFILL), {"phase": "prefill"}, "only in prefill"),
        pytest.param(
            Condition("sequence", 1),
            {"sequence": "1"},
            "only on sequence 1",
            marks=pytest.mark.slow,
        ),
        (Condition("position", 10), {"position": ">= 10"}, "only from position 10 on"),
        pytest.param(
            Condition("from step", 4),
            {"steps": "from 4"},
            "only from step 4 on",
            marks=pytest.mark.slow,
        ),
        (Condition("length", 25), {"length": ">= 26"}, "only on sequences of 26 tokens or more"),
        pytest.param(
            Condition("calls of tokens", 40),
            {"step": "2"},
            "in calls of 70 tokens or more",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_condition_is_found_and_said(
    condition: Condition, where: dict[str, str], words: str
) -> None:
    answer = told(condition)
    assert answer.named[0].id == "M43.whole"
    assert where.items() <= answer.where.items()
    assert words in answer.sentence
    assert "other rows are healthy" in answer.sentence


@pytest.mark.parametrize(
    ("struck", "spared", "words"),
    [
        ((2, 3), (0,), "only from step 2 on (rows of step 1 do not show it)"),
        ((0, 1), (4,), "only up to step 1 (rows of steps 2 to 3 do not show it)"),
        ((2, 3), (1,), "only from step 2 on"),
    ],
)
def test_steps_whose_rows_do_not_show_a_fault_are_said(
    struck: tuple[int, ...], spared: tuple[int, ...], words: str
) -> None:
    steps = torch.tensor([*struck, *spared])
    mask = torch.arange(len(steps)) < len(struck)
    (rule,) = _of_steps(_Rows({"step": steps}, mask, ~mask))
    assert rule.words == words
    assert not {*struck, *spared} & set(rule.unknown)


def test_a_fault_of_one_step_of_decoding_is_not_said_of_all() -> None:
    """A small healthy call is kept: calls of attention are not joined."""
    fault = replace(gain(Condition("one step", 4)), component="layers.1.self_attn.attention")
    own = stage("llama bf16")
    (origin,) = own.localised(own.run([fault])).origins
    assert origin.record is not None
    assert any(len(call.outputs["out"]) < 4 for call in origin.more)
    answer = diagnose(origin.context, [origin.record, *origin.more])
    assert answer.where == {"step": "4"}


def test_a_fault_that_always_acts_has_no_condition() -> None:
    answer = told(Condition())
    assert answer.named
    assert answer.where == {}


def test_rows_that_a_cause_would_not_change_speak_for_no_condition() -> None:
    own = stage("llama bf16")
    (origin,) = own.localised(own.run([gain(Condition("position", 10))])).origins
    assert origin.record is not None
    nothing = FaultVariant("nothing", lambda call: call)
    assert condition_of(origin.context, [origin.record], nothing) is None
    unplaced = replace(origin.record, places=None)
    always = FaultVariant("a gain", gain(Condition()).edit.apply)
    assert condition_of(origin.context, [unplaced], always) is None


def test_a_cause_that_means_other_rows_of_the_whole_call_has_no_condition() -> None:
    own = stage("llama bf16")
    (origin,) = own.localised(own.run([gain(Condition("position", 10))])).origins
    assert origin.record is not None

    def first_rows(call: Any) -> Any:
        def faulty(inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Any:
            made = {name: tensor.clone() for name, tensor in call(inputs, weights).items()}
            made["out"][:4] *= 1.3
            return made

        return faulty

    cause = FaultVariant("a gain on rows 0 to 3", first_rows)
    assert condition_of(origin.context, [origin.record], cause) is None
