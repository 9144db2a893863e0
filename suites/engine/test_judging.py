"""Every output of every component of both families, under all recipes: one entry judges all."""

from __future__ import annotations

import torch

from degarble.harness.anatomy.presets import small_v4
from degarble.harness.engine.budget_call import Call
from degarble.harness.engine.judging import judge_outputs
from degarble.harness.record.verdict import Verdict
from degarble.references.binding import Bound
from degarble.references.numerics import Numerics
from degarble.references.weights import random_weights


def test_an_output_that_is_missing_or_has_another_shape_differs() -> None:
    config = small_v4(num_hidden_layers=3, compress_ratios=(0, 4, 128, 0))
    twin = Bound(config, Numerics.twin(), random_weights(config, 1))
    call = Call.of(twin, "embed", {"tokens": torch.tensor([3, 1])})
    for outputs in ({}, {"out": call.outputs["out"][:1]}):
        assert judge_outputs(call, outputs)["out"].verdict is Verdict.DIFFERS
    assert judge_outputs(call, call.outputs)["out"].ratio == 0
