"""Damage that is another one in every call is named call by call; one call unexplained is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from degarble.harness.engine.diagnose.calls import call_by_call, with_earlier
from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.faults.model_faults import CallRecord
from degarble.harness.engine.faults.registry import MODEL_FAULTS, model_fault_named
from degarble.suites.engine.planting import has_effect, run, sights

NAME = "layers.1.attn.wo_b"


def spoilt(fault_id: str, way: int, name: str = NAME) -> list[CallRecord]:
    """The calls of a run with one way of a fault in which it has an effect."""
    made, fault = run("v4"), model_fault_named(fault_id)
    scene = made.scene(name, twin=False)
    with torch.inference_mode():
        found = sights(fault, made, name, list(fault.ways(scene))[way])
        return [each for each in found if has_effect(made.scene(name, twin=True), each)]


@pytest.mark.parametrize(
    ("fault_id", "way"), [("M37.tile", 1), ("M37.tile", 4), ("M36.workspace", 0)]
)
def test_a_race_is_named_though_every_call_has_another_tile(fault_id: str, way: int) -> None:
    found = spoilt(fault_id, way)
    assert len(found) > 1
    scene = run("v4").scene(NAME, twin=True)
    named = diagnose(scene, found).named
    assert named[0].id == fault_id
    assert "each by itself" in named[0].evidence


def test_one_call_that_is_not_explained_leaves_none() -> None:
    found = spoilt("M37.tile", 1)
    last = found[-1].outputs["out"]
    odd = last + torch.randn(last.shape, generator=torch.Generator().manual_seed(1)) * last.std()
    other = replace(found[-1], outputs={"out": odd.to(last.dtype)})
    scene = run("v4").scene(NAME, twin=True)
    with torch.inference_mode():
        assert list(call_by_call(scene, found, MODEL_FAULTS.values()))
        assert not list(call_by_call(scene, [*found[:-1], other], MODEL_FAULTS.values()))


def test_healthy_calls_and_other_faults_are_not_asked_about() -> None:
    made = run("v4")
    fault, scene = model_fault_named("M37.tile"), made.scene(NAME, twin=True)
    with torch.inference_mode():
        healthy = sights(fault, made, NAME, None)
        assert not list(call_by_call(scene, healthy, MODEL_FAULTS.values()))
        plain = [each for each in MODEL_FAULTS.values() if not each.per_call]
        assert not list(call_by_call(scene, spoilt("M37.tile", 1), plain))


def test_calls_know_those_before_them() -> None:
    known = [CallRecord({}, {"out": torch.zeros(1)}, {}, step=step) for step in (3, 1, 2)]
    ordered = with_earlier(known)
    assert [each.step for each in ordered] == [1, 2, 3]
    assert [[other.step for other in each.earlier] for each in ordered] == [[], [1], [1, 2]]
