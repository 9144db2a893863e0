"""Values that are not finite are found in outputs of any rank, a scalar scale included."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.engine.localise.tensor_forms import ONE_SIDED, poisoned
from degarble.harness.report.verdict import Verdict


@pytest.mark.parametrize(("shape", "row"), [((), 0), ((3,), 2), ((3, 4), 2), ((3, 2, 2), 2)])
def test_what_is_not_finite_where_the_twin_is_is_told_by_its_row(
    shape: tuple[int, ...], row: int
) -> None:
    twin = torch.ones(shape)
    candidate = twin.clone()
    candidate.view(-1)[-1] = torch.nan
    found = poisoned("tensor_scale", candidate, twin)
    assert found.verdict is Verdict.DIFFERS
    assert found.worst is not None
    assert (found.worst.level, found.worst.place) == (ONE_SIDED, (row,))


def test_a_row_close_to_the_end_of_float32_may_overflow() -> None:
    twin = torch.tensor([[torch.inf, 3e38, 2.0], [torch.inf, 4.0, 2.0]])
    found = poisoned("out", torch.full((2, 3), torch.nan), twin)
    assert found.worst is not None
    assert found.worst.place == (1,)
    found = poisoned("out", torch.full((1, 3), torch.nan), twin[:1])
    assert found.verdict is Verdict.UNDECIDED


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (0, 2, 2)])
def test_outputs_without_elements_are_left_undecided(shape: tuple[int, ...]) -> None:
    assert poisoned("out", torch.ones(shape), torch.ones(shape)).verdict is Verdict.UNDECIDED
