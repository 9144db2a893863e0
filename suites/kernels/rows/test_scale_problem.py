"""Scaling by one factor: what is refused, and the grid."""

from __future__ import annotations

import math

import pytest

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.kernels.rows.problem import ScaleForm, ScaleProblem, choose_scale_form


def test_refuses_by_name() -> None:
    with pytest.raises(UnknownName, match="dtype of source of a scaling"):
        ScaleProblem(1, 1.0, "fp16")
    with pytest.raises(UnknownName, match="dtype of out of a scaling"):
        ScaleProblem(1, 1.0, out="fp16")
    for factor in (math.nan, math.inf, 2.0**128):
        with pytest.raises(InvalidArgument, match="factor"):
            ScaleProblem(1, factor)
    with pytest.raises(ShapeMismatch, match="numbers to scale"):
        ScaleProblem(1 << 31, 1.0)


def test_every_number_has_a_thread() -> None:
    assert [ScaleProblem(n, 2.0).blocks for n in (0, 1, 256, 257)] == [0, 1, 1, 2]
    assert choose_scale_form(ScaleProblem(1, 2.0, "bf16"), "sm_90a") == ScaleForm(
        "bf16", "fp32", "sm_90a"
    )
