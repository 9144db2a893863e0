"""Random faults: their component is found, and nothing that is said of them is false."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.capture.files.records import Phase
from degarble.harness.engine.diagnose.diagnose import Diagnosed
from degarble.harness.engine.diagnose.trial import VariantFit
from degarble.harness.engine.faults.model_faults import FaultVariant
from degarble.harness.engine.recover.described import Described
from degarble.harness.nightly.table import STEPS
from degarble.suites.campaigns.causes import calibration, random_faults
from degarble.suites.campaigns.causes.calibration import Claim, learned, mapped
from degarble.suites.campaigns.causes.random_faults import WANTED, outcome, shares, table
from degarble.suites.museum.random_faults import answers, edits, nightly
from degarble.suites.museum.random_faults.answers import CauseAnswer, judged
from degarble.suites.museum.random_faults.conditions import Condition
from degarble.suites.museum.random_faults.edits import Edit
from degarble.suites.museum.random_faults.stages import RandomFault, Stage, stage
from degarble.suites.museum.random_faults.values import cut_bits, drawn_change, powers_of_two

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

LINEAR = "layers.1.self_attn.k_proj"
SAMPLE = 8  # faults, of the model that is built soonest


def small() -> Stage:
    return stage("llama bf16")


def gain(factor: float, condition: Condition | None = None) -> RandomFault:
    def apply(call: Any) -> Any:
        def faulty(inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Any:
            return {n: (t * factor).to(t.dtype) for n, t in call(inputs, weights).items()}

        return faulty

    edit = Edit({"operand": "output out", "op": "scaled", "factor": factor}, apply)
    return RandomFault(LINEAR, edit, condition or Condition())


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=pytest.mark.slow if n > 4 or n == 1 else ()) for n in range(SAMPLE)],
)
def test_a_random_fault_is_placed_and_nothing_false_is_said(number: int, seed: int) -> None:
    answer = judged(small(), [small().drawn(random.Random(seed + number))])
    assert outcome(answer) in WANTED, answer


@pytest.mark.slow
def test_a_case_of_the_campaign_keeps_truth_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_faults, "stage", lambda _name: small())
    made = random_faults.case(4, several=2)
    (one, other) = json.loads(made.detail)["faults"]
    assert one["truth"]["component"] != other["truth"]["component"]
    assert made.outcome in WANTED


def test_a_seed_gives_one_fault_in_plain_data() -> None:
    truths = [small().drawn(random.Random("one")).truth for _ in range(2)]
    assert truths[0] == truths[1] == json.loads(json.dumps(truths[0]))


def test_a_healthy_run_has_no_origin() -> None:
    assert judged(small(), ()).elsewhere == ()


def test_a_gain_is_named() -> None:
    (answer,) = judged(small(), [gain(1.3)]).answers
    assert (answer.placed, answer.cause) == (True, CauseAnswer.NAMED)


@pytest.mark.parametrize(("factor", "cause"), [(1.3, "described"), (1.4, "false")])
def test_a_cause_that_does_something_else_is_false(
    factor: float, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = FaultVariant("a gain", gain(factor).edit.apply)
    described = Described("A gain.", "", (), claim, VariantFit(0.1, 1.0, 1.0))

    def told(*_: object) -> Diagnosed:
        return Diagnosed((), (), 0, "A gain.", described=described)

    monkeypatch.setattr(answers, "diagnose", told)
    (answer,) = judged(small(), [gain(1.3)]).answers
    assert answer.cause == cause


@pytest.mark.parametrize(("made", "true"), [(1.0, True), (0.0, False), (3.0, False)])
def test_where_a_sum_is_rounded_makes_no_cause_false(made: float, true: bool) -> None:
    """A step of two spacings, before or after a sum is stored, is the same claim."""
    exact = torch.linspace(1, 2, 400).double()
    right, wrong, claim = (
        x.to(torch.bfloat16) for x in (exact, exact + 0.02, exact.to(torch.bfloat16) + 0.02 * made)
    )
    beyond, _ = answers._left({"out": claim}, {"out": wrong}, {"out": right})
    assert (beyond[0] <= answers.LEFT**2 * beyond[1]) is true


def test_zeros_from_a_position_on_are_no_race() -> None:
    def apply(call: Any) -> Any:
        return lambda inputs, weights: call({**inputs, "x": inputs["x"] * 0}, weights)

    edit = Edit({"operand": "input x", "op": "constant"}, apply)
    fault = RandomFault(LINEAR, edit, Condition("position", 40))
    (answer,) = judged(small(), [fault]).answers
    assert answer.cause is CauseAnswer.NAMED
    assert not answer.cause_id.startswith("M37")
    assert "M37.tile" in answer.sentence


def test_rows_that_are_counted_over_several_calls_are_not_said() -> None:
    """Only one sequence is long enough: its prompt and its new tokens lie side by side."""

    def apply(call: Any) -> Any:
        def faulty(inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Any:
            made = call(inputs, weights)["out"].clone()
            made[:, 9:13] = 0
            return {"out": made}

        return faulty

    edit = Edit({"operand": "output out", "op": "scaled", "factor": 0.0}, apply)
    fault = RandomFault("layers.1.mlp.gated", edit, Condition("position", 50))
    (answer,) = judged(small(), [fault]).answers
    assert answer.cause is CauseAnswer.DESCRIBED
    assert "columns 9 to 12 hold 0, only from position 50 on" in answer.sentence


def test_a_cache_of_sequences_of_other_lengths_is_blamed_alone() -> None:
    """A window's rows are cut from each sequence only where the cache forgets the others."""
    name = "layers.1.self_attn.cache"
    answer = judged(stage("gemma3_text bf16"), [replace(gain(1.5), component=name)])
    assert [each.placed for each in answer.answers] == [True]
    assert answer.elsewhere == ()


@pytest.mark.parametrize("number", [101, 141])  # 1.102 and -1 times the codes
def test_scaled_codes_of_four_bits_stay_codes(number: int) -> None:
    """Codes of eight bits wrap as bytes do; narrower ones wrap as well."""
    (weight,) = stage("v4 nvfp4-full").candidate.weights_of("layers.0.attn.wq_a").values()
    found = edits._coded(random.Random(number), weight)
    assert found is not None
    assert found[0]["op"] == "scaled"
    assert found[1].shape == weight.shape


CONDITIONS = (
    Condition("from step", 3), Condition("to step", 1), Condition("one step", 2),
    Condition("phase", Phase.DECODE), Condition("calls of tokens", 3), Condition("sequence", 1),
    Condition("length", 23), Condition("position", 10),
)  # fmt: skip


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda each: each.kind)
def test_a_fault_acts_where_its_condition_says(condition: Condition) -> None:
    own = small()
    run, steps = own.run([gain(2.0, condition)]), {step.number: step for step in own.healthy.steps}
    acted, spared = 0, 0
    for call in (call for call in run.calls if call.component == LINEAR):
        right = own.candidate.calls[LINEAR](run.inputs(call), own.candidate.weights_of(LINEAR))
        wrong = (run.outputs(call)["out"] != right["out"]).any(-1)
        step = steps[call.step]
        for at, row in enumerate(wrong.tolist()):
            length = 1 + max(p for p, o in zip(step.positions, step.sequences, strict=True)
                             if o == step.sequences[at])  # fmt: skip
            expected = {
                "from step": step.number >= 3, "to step": step.number <= 1,
                "one step": step.number == 2, "phase": step.phase is Phase.DECODE,
                "calls of tokens": len(step.tokens) > 3, "sequence": step.sequences[at] == 1,
                "length": length > 23, "position": step.positions[at] >= 10,
            }[condition.kind]  # fmt: skip
            assert row == expected
            acted, spared = acted + row, spared + (not row)
    assert acted
    assert spared


def test_changes_of_numbers_change_their_region_alone() -> None:
    drawn, moved = random.Random("regions"), 0
    for _ in range(200):
        x = torch.randn(24, 40, dtype=torch.float64)
        change = drawn_change(drawn, x, rows_too=True)
        inside = torch.zeros(24, 40, dtype=torch.bool)
        rows, columns = (slice(*change.truth.get(n, (None,))) for n in ("rows", "columns"))
        inside[rows, columns] = True
        made = change.apply(x)
        assert torch.equal(made[~inside], x[~inside])
        moved += not torch.equal(made, x)
    assert moved > 150


def test_numbers_are_cut_to_bits_and_to_powers_of_two() -> None:
    x = torch.tensor([0.0, 1.0, -1.3, 5.2])
    assert cut_bits(x, 1).tolist() == [0.0, 1.0, -1.0, 4.0]
    assert powers_of_two(x).tolist() == [0.0, 1.0, -1.0, 4.0]


@pytest.mark.parametrize("cause", [CauseAnswer.NAMED, CauseAnswer.FALSE])
def test_a_night_keeps_the_score_of_random_faults(
    cause: CauseAnswer, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = {"operand": "output out", "condition": {}}
    answer = answers.RunAnswer((answers.FaultAnswer(truth, 9.0, True, cause),))
    monkeypatch.setattr(nightly, "answered", lambda _seed: ("llama bf16", answer))
    result = nightly.random_faults(None, {})  # type: ignore[arg-type]
    good = float(cause is CauseAnswer.NAMED)
    assert result.red is not bool(good)
    assert result.values == {
        "random faults": {"placed": 1.0, "named or described": good, "no false sentences": good}
    }
    names = [step.name for step in nightly.with_random_faults(STEPS)]
    assert names[names.index("museum") + 1] == "random faults"


def test_faults_below_three_budgets_are_not_counted() -> None:
    truth = {"operand": "output out", "condition": {}}
    found = [{"truth": truth, "stage": "llama bf16", "placed": False, "cause": "silent"}] * 2
    counted = [{**found[0], "effect": 3.5, "placed": True, "cause": "false"}]
    lines = counted + [{**each, "effect": 2.0} for each in found]
    assert shares(lines) == {
        "placed": (1, 1), "named or described": (0, 1), "false sentences": (1, 1)
    }  # fmt: skip
    assert "| all | 1 | 1 | 0 | 1 |" in table(lines)


def test_a_map_of_confidence_rises_and_few_claims_are_not_certain() -> None:
    claims = [Claim(0, 0.5, true) for true in (True, False, False, True)]
    claims += [Claim(0, 0.8, false) for false in (True, False, False)]  # fewer than at 0.5: pooled
    claims += [Claim(0, 1.0, True)] * 98
    steps = learned(claims)
    assert steps == [(0.5, 4 / 9), (1.0, 0.99)]
    assert [mapped(steps, stated) for stated in (0.2, 0.7, 1.0)] == [0.0, 4 / 9, 0.99]


def test_a_calibration_is_learned_on_one_half_and_tried_on_the_other(tmp_path: Path) -> None:
    lines = []
    for seed in range(400):
        sure = seed % 8 > 1
        proof = {"confidence": 1.0 if sure else 0.95}
        fault = {"proof": proof, "cause": "named" if sure else "false"}
        case = {"seed": seed, "detail": json.dumps({"faults": [fault, {"proof": {}}]})}
        lines.append(json.dumps(case) + "\n")
    (tmp_path / "random_faults.jsonl").write_text("".join(lines))
    assert calibration.main(["--out", str(tmp_path)]) == 0
    made = json.loads((tmp_path / "calibration.json").read_text())
    assert (made["claims"], made["stated sure"], made["true of those"]) == (400, 400, 300)
    assert (made["learned sure"], made["true of these"]) == (150, 150)
    assert (
        "| as stated, from 0.9 | 0.9500 | 100 | 0 (0.0%)"
        in (tmp_path / "calibration.md").read_text()
    )
    assert (tmp_path / "calibration.svg").read_text().count("<circle") == 4
