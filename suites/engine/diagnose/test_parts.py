"""A known fault that acts in one phase, call or sequence is named, and `where` says which."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.engine.localise.localise import localise
from degarble.harness.museum.cases import equal
from degarble.suites.campaigns.hidden_faults import in_calls, on_sequence
from degarble.suites.museum.museum_stages import small_stage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.diagnose.diagnose import Named
    from degarble.harness.engine.faults.model_faults import FaultVariant

    Where = Mapping[str, str | int | float]

SCALING, GAIN, LOGITS = (
    ("M27.left_out", "ffn.experts.combine"),
    ("M43.whole", "attn.wq_b"),
    ("M29.scale", "attn.attend"),
)
SLOW = pytest.mark.slow


def answer(fault: str, place: str, part: str) -> tuple[Where, tuple[Named, ...]]:
    """Plant the first way of a fault in a part of a run; where it is found, and its causes."""
    stage, name = small_stage(), f"layers.1.{place}"
    (way, *_) = MODEL_FAULTS[fault].ways(stage.scene(name, stage.candidate()))
    first, second = (stage.healthy.inputs(call) for call in stage.calls[name][:2])

    def in_prefill(inputs: Mapping[str, Tensor]) -> bool:
        return equal(inputs, first)

    hidden: FaultVariant = {
        "prefill": lambda: in_calls(way, in_prefill),
        "decode": lambda: in_calls(way, lambda inputs: not in_prefill(inputs)),
        "step": lambda: in_calls(way, lambda inputs: equal(inputs, second)),
        "sequence": lambda: on_sequence(way, 1, stage.case.lengths),
    }[part]()
    candidate = stage.taped()
    candidate.calls[name] = hidden.apply(stage.candidate().calls[name])
    (origin,) = localise(
        stage.twin, stage.model.recipe, stage.rest(stage.run(candidate))
    ).origins  # fmt: skip
    assert origin.component == name
    assert origin.sight is not None
    return origin.where, diagnose(origin.scene, (origin.sight, *origin.more)).named


@pytest.mark.parametrize(
    ("planted", "part"),
    [
        (SCALING, "prefill"),
        (LOGITS, "decode"),
        pytest.param(GAIN, "prefill", marks=SLOW),
        pytest.param(GAIN, "decode", marks=SLOW),
    ],
)
def test_a_fault_of_one_phase_is_named(planted: tuple[str, str], part: str) -> None:
    where, named = answer(*planted, part)
    assert where["phase"] == part
    assert named[0].id == planted[0]


@pytest.mark.parametrize("planted", [GAIN, pytest.param(LOGITS, marks=SLOW)])
def test_a_fault_of_one_sequence_is_named(planted: tuple[str, str]) -> None:
    where, named = answer(*planted, "sequence")
    assert where["sequence"] == "1"
    assert named[0].id == planted[0]
    assert named[0].evidence.endswith("sequences of these calls, the others are healthy")


@pytest.mark.parametrize("planted", [SCALING, pytest.param(LOGITS, marks=SLOW)])
def test_a_fault_of_one_step_is_named(planted: tuple[str, str]) -> None:
    where, named = answer(*planted, "step")
    assert where["step"] == 1
    assert named[0].id == planted[0]
