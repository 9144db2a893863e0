"""Small systematic errors in a trained model: every element is within its budget, the share not."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.budget.budget import HEADROOM
from degarble.harness.engine.budget.judging import OutputResult, judge_outputs
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.faults.layout.fused_operands import epsilon_way
from degarble.harness.engine.faults.rebinding import unrounded, with_facts
from degarble.harness.engine.localise.localise import localise
from degarble.harness.report.verdict import Verdict
from degarble.suites.museum.museum_stages import small_stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

Q_NORM = "layers.1.attn.q_norm"


def judged(component: str, change: Callable[[Tensor], Tensor]) -> OutputResult:
    """The first call of a component whose exact output goes through `change` and is rounded."""
    stage = small_stage()
    scene, inputs = stage.scene(component), stage.healthy.inputs(stage.first(component))
    with torch.inference_mode():
        known = scene.call(inputs, scene.weights)
        exact = with_facts(scene, unrounded)(scene.call)(inputs, scene.weights)
        made = {**known, "out": change(exact["out"].double()).to(known["out"].dtype)}
        return judge_outputs(JudgeableCall.of(stage.twin, component, inputs), made)["out"]


def toward_zero(x: Tensor) -> Tensor:
    return (x.float().view(torch.int32) & -65536).view(torch.float32).double()


def twice(x: Tensor, bits: int) -> Tensor:
    """Rounded to so many bits of mantissa on the way."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0 ** (bits + 1)).round() / 2.0 ** (bits + 1), exponent)


def one_row(x: Tensor, row: int) -> Tensor:
    made = x.clone()
    made[row] *= 1 + 2.0**-8
    return made


CASES: Mapping[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "a gain": ("layers.1.ffn.shared.act", lambda x: x * (1 + 2.0**-10), "tile"),
    "a gain of a sum": ("layers.1.ffn.moe_sum", lambda x: x * (1 + 2.0**-11), "tile"),
    "toward zero": ("layers.1.ffn.shared.act", toward_zero, "tile"),
    "rounded twice": (Q_NORM, partial(twice, bits=10), "tile"),
    "one row": ("layers.1.attn.norm", partial(one_row, row=31), "row"),
}


@pytest.mark.parametrize("name", CASES)
def test_only_the_share_of_steps_sees_it(name: str) -> None:
    component, change, place = CASES[name]
    found = judged(component, change)
    others = [each for each in found.findings if not each.level.startswith("steps")]
    assert max(each.ratio for each in others) <= 1, str(others[0])
    assert found.verdict is Verdict.DIFFERS
    assert found.findings[0].level == f"steps of {place}"


def test_a_healthy_model_takes_little_of_it() -> None:
    stage = small_stage()
    shares: list[float] = []

    def looked(_replay: Any, outputs: Mapping[str, OutputResult]) -> None:
        for each in outputs.values():
            shares.extend(f.ratio for f in each.findings if f.level.startswith("steps"))

    found = localise(stage.twin, stage.model.recipe, stage.healthy, looked=looked)
    assert found.verdict is Verdict.AGREES
    assert shares
    assert max(shares) <= HEADROOM / 3


def test_a_norm_with_another_epsilon_is_localised_and_named() -> None:
    stage = small_stage()
    candidate = stage.taped()
    plain = stage.candidate()
    way = epsilon_way(stage.scene(Q_NORM, plain), 1e-2)
    candidate.calls[Q_NORM] = way.apply(plain.calls[Q_NORM])
    found = localise(stage.twin, stage.model.recipe, stage.rest(stage.run(candidate)))
    assert [each.component for each in found.origins] == [Q_NORM]
    (trouble,) = found.origins
    assert "steps of" in trouble.sentence
    assert trouble.sight is not None
    said = diagnose(trouble.scene, (trouble.sight, *trouble.more))
    assert said.named[0].id == "M24.epsilon", said.sentence
    assert "0.01 under the root" in said.named[0].evidence
