from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache

import pytest
import torch

from degarble.harness.engine.faults.family import Part
from degarble.harness.engine.faults.registry import FAULTS
from degarble.harness.errors import UnknownName
from degarble.harness.record.verdict import Verdict
from degarble.harness.runs.demo import (
    PLANTED,
    SHAPE,
    Story,
    demo_faults,
    demo_weight,
    tell_story,
)


@cache
def whole_story() -> Story:
    """The story with every fault that is known; told once for all suites."""
    return tell_story(tuple(FAULTS.values()))


def test_every_fault_is_named_and_the_healthy_copy_is_clean() -> None:
    story = whole_story()
    assert story.holds
    assert story.healthy.diagnosis.verdict is Verdict.AGREES
    for copy in story.damaged:
        assert copy.has_effect
        assert copy.fault is not None
        assert [cause.fault.id for cause in copy.diagnosis.causes] == [copy.fault.id]


def test_the_default_is_one_fault_of_each_part() -> None:
    faults = demo_faults(None)
    assert [fault.id for fault in faults] == list(PLANTED)
    assert {fault.part for fault in faults} == set(Part)


def test_one_fault_can_be_chosen_and_a_typo_is_refused() -> None:
    assert [fault.id for fault in demo_faults("M02.missing")] == ["M02.missing"]
    with pytest.raises(UnknownName, match=r"Did you mean M02\.missing"):
        demo_faults("M02.mising")


def test_the_weight_is_the_same_each_time_and_like_a_real_one() -> None:
    weight = demo_weight()
    assert torch.equal(weight, demo_weight())
    assert not torch.equal(weight, demo_weight(seed=1))
    assert weight.dtype is torch.bfloat16
    assert tuple(weight.shape) == SHAPE
    values = weight.double()
    kurtosis = float((values**4).mean() / (values**2).mean() ** 2)
    assert kurtosis > 20  # a Gaussian has 3


def test_a_blind_diagnosis_makes_the_story_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("degarble.harness.engine.packing_diagnosis.compare_parts", lambda *_: ())
    story = tell_story(demo_faults("M10.nibble_order"))
    assert story.healthy.as_told
    assert not story.damaged[0].as_told
    assert not story.holds


def test_a_wrong_name_makes_the_story_fail() -> None:
    story = whole_story()
    other = replace(story.damaged[0], fault=story.damaged[1].fault)
    assert not replace(story, damaged=(other,)).holds


def test_a_false_alarm_makes_the_story_fail() -> None:
    story = whole_story()
    alarmed = replace(story.healthy, diagnosis=story.damaged[0].diagnosis)
    assert not replace(story, healthy=alarmed).holds


def test_a_fault_without_effect_is_not_counted() -> None:
    story = whole_story()
    idle = replace(story.healthy, fault=story.damaged[0].fault, has_effect=False)
    assert idle.as_told
    assert replace(story, damaged=(idle,)).holds


def test_steps_are_told() -> None:
    steps: list[str] = []
    tell_story(demo_faults("M01.inverse"), steps.append)
    assert steps == ["healthy copy", "M01.inverse"]


def test_the_weight_is_the_same_on_every_machine() -> None:
    digest = hashlib.sha256(demo_weight().view(torch.uint8).numpy().tobytes()).hexdigest()
    assert digest.startswith("81c15c8484122449")
