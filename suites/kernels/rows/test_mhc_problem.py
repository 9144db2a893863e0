"""mHC as arithmetic: near the references on tensors and scalars, thread blocks, bytes, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.kernels.rows import mhc_problem as facts
from degarble.kernels.rows.mhc_problem import MIX_PARTS, MixProblem
from degarble.suites.kernels import mhc_checks as checks

ON_SCALARS = facts.MixPrimitives(
    lambda x: np.float32(math.exp(x)), lambda x: np.float32(1) / x, lambda x: 1 / np.sqrt(x)
)


@pytest.mark.parametrize("part", MIX_PARTS)
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 5.0])
def test_every_part_is_near_the_references(part: str, sharpness: float) -> None:
    for tokens, width in ((1, 8), (70, 256)):
        case = checks.Case(MixProblem(tokens, width, part), sharpness=sharpness, seed=tokens)
        assert not checks.far_from_references(case, checks.by_stated_order(case))


def test_one_iteration_is_softmax_and_columns() -> None:
    case = checks.Case(MixProblem(9, 64, "coefficients", iterations=1), sharpness=3.0)
    made = checks.by_stated_order(case)
    assert not checks.far_from_references(case, made)
    assert torch.allclose(made["mix"].sum(1), torch.ones(9, 4), atol=1e-5)


def test_a_processors_reciprocal_stays_within_the_budget() -> None:
    """Reciprocals and powers that are a step off: what the approximate instructions may be."""
    off = facts.MixPrimitives(
        lambda x: torch.exp(x) * (1 + 2.0**-22),
        lambda x: torch.reciprocal(x) * (1 - 2.0**-22),
        lambda x: torch.rsqrt(x) * (1 + 2.0**-22),
    )
    case = checks.Case(MixProblem(60, 64, "coefficients"), sharpness=5.0)
    assert not checks.far_from_references(case, checks.by_stated_order(case, off))


def test_scalars_and_tensors_agree() -> None:
    logits = checks.Case(MixProblem(1, 8)).numbers(9, 16)
    on_tensors = facts.sinkhorn(list(logits), 3, 1e-6, checks.ON_CPU)
    on_scalars = facts.sinkhorn(list(logits.numpy()), 3, 1e-6, ON_SCALARS)
    for tensors, scalars in zip(on_tensors, on_scalars, strict=True):
        assert [float(n) for n in tensors] == pytest.approx([float(n) for n in scalars], rel=1e-6)
    assert float(facts.gate(np.float32(0.0), ON_SCALARS)) == 0.5


def test_turned_sums_are_detected() -> None:
    """New stream k takes old stream j with mix[j, k]: the other way round is another result."""
    case = checks.Case(MixProblem(5, 64, "post"))
    mix = case.coefficients[2]
    case.__dict__["coefficients"] = (*case.coefficients[:2], mix)
    right = checks.by_stated_order(case)
    case.__dict__["coefficients"] = (*case.coefficients[:2], mix.mT.contiguous())
    assert checks.far_from_references(case, right)


@pytest.mark.parametrize("part", MIX_PARTS)
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (129, 1032), (7, 7168)])
def test_every_chunk_and_every_token_has_one_thread(part: str, tokens: int, width: int) -> None:
    problem = MixProblem(tokens, width, part)
    form = facts.MixForm(part, "sm_90a")
    leading, groups = facts.leading_blocks(problem), facts.groups_of_chunks(problem)
    made, moved = [], []
    for block in range(facts.mix_grid(problem)):
        for thread in range(facts.MIX_THREADS):
            lane = block * facts.MIX_THREADS + thread
            if block < leading and lane // facts.STREAMS < tokens:
                made.append((lane // facts.STREAMS, lane % facts.STREAMS))
            chunk = (block - leading) % groups * facts.MIX_THREADS + thread
            if form.touches_streams and block >= leading and chunk < width // facts.CHUNK_VALUES:
                moved.append(((block - leading) // groups, chunk))
    each = [(token, stream) for token in range(tokens) for stream in range(facts.STREAMS)]
    assert made == (each if form.makes_coefficients else [])
    chunks = width // facts.CHUNK_VALUES if form.touches_streams else 0
    assert sorted(moved) == [(token, chunk) for token in range(tokens) for chunk in range(chunks)]


def test_bytes_count_everything_once() -> None:
    found = {part: MixProblem(2, 4096, part).bytes_moved for part in MIX_PARTS}
    row = 2 * 4096
    assert found == {
        "all": 2 * (25 * 4 + 5 * row + 16 + 64),
        "coefficients": 2 * (25 * 4 + 32 + 64),
        "collapse": 2 * (16 + 5 * row),
        "head": 2 * (5 * 4 + 5 * row),
        "post": 2 * (16 + 64 + 9 * row),
    }


def test_refuses_by_name() -> None:
    for wrong, error, name in (
        (lambda: MixProblem(-1, 8), ShapeMismatch, "lanes of all tokens"),
        (lambda: MixProblem(1, 12), ShapeMismatch, "width"),
        (lambda: MixProblem(1, 1 << 17), ShapeMismatch, "width"),
        (lambda: MixProblem(1, 8, "pre"), UnknownName, "part of mHC"),
        (lambda: MixProblem(1, 8, iterations=0), InvalidArgument, "iterations"),
        (lambda: MixProblem(1, 8, epsilon=1.0), InvalidArgument, "epsilon"),
        (lambda: facts.mix_grid(MixProblem((1 << 29) - 1, 7168)), ShapeMismatch, "thread blocks"),
    ):
        with pytest.raises(error, match=name):
            wrong()
