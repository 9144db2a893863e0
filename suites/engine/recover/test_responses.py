"""Solve for inputs in parts that have nothing in common, or by fewer equations: the same result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.recover import responses
from degarble.harness.engine.recover.responses import (
    Seen,
    _NormalEquations,
    _parts_apart,
    recovered_input,
)
from degarble.suites.engine.recover.test_differences import drawn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def mixing(rows: int, streams: int, wide: int) -> Tensor:
    """Return answers [T, N, K] of outputs that mix the streams of every column alone."""
    mix = drawn(4, rows * streams, streams).reshape(rows, streams, streams)
    every = torch.einsum("tij,cd->ticjd", mix, torch.eye(wide, dtype=torch.float64))
    found: Tensor = every.reshape(rows, streams * wide, streams * wide)
    return found


def test_columns_that_share_no_output_are_solved_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, left = mixing(3, 4, 8), drawn(5, 3, 32)
    parts = _parts_apart(answers)
    assert parts is not None
    assert parts[0].shape == parts[1].shape == (8, 4)
    apart = _NormalEquations(answers, None)
    monkeypatch.setattr(responses, "_parts_apart", lambda _answers: None)
    whole = _NormalEquations(answers, None)
    assert torch.allclose(apart.solve(left), whole.solve(left), rtol=1e-6)
    assert torch.allclose(apart.errors(), whole.errors(), rtol=1e-4)


def test_columns_that_share_outputs_are_not() -> None:
    answers = mixing(3, 4, 8)
    answers[0, 0, 1] = 1.0  # one output of the first column answers to the second one
    assert _parts_apart(answers) is None
    assert _parts_apart(drawn(6, 24, 8).reshape(2, 12, 8)) is None


def test_as_many_equations_as_outputs_give_the_same_change() -> None:
    """The change of least size that gives what is left; regular terms hold in both forms."""
    answers, left = drawn(7, 12, 20).reshape(2, 6, 20), drawn(8, 2, 6)
    few = _NormalEquations(answers, None)
    assert few._is_dual
    step = few.solve(left)
    assert torch.allclose((answers @ step[..., None])[..., 0], left, atol=1e-6)
    size = answers.square().sum(1).rsqrt()
    scaled = answers * size[:, None]
    gram = scaled.transpose(1, 2) @ scaled + responses.REGULAR * torch.eye(20, dtype=left.dtype)
    errors = torch.linalg.inv(gram).diagonal(dim1=1, dim2=2).sqrt() * size
    assert torch.allclose(few.errors(), errors, rtol=1e-3)


@pytest.mark.parametrize(("outputs", "count"), [(24, 1), (12, 0)])
def test_of_an_input_with_more_numbers_than_outputs_nothing_is_said(
    outputs: int, count: int
) -> None:
    x, matrix = drawn(0, 6, 16), drawn(1, outputs, 16)

    def call(inputs: Mapping[str, Tensor]) -> Tensor:
        return inputs["x"] @ matrix.T

    seen = Seen({"x": x}, call({"x": x * 1.5 + 1}), torch.full((6, outputs), 1e-3).double(), call)
    assert len(list(recovered_input(seen, "x"))) == count
