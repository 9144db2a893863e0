"""Rotations by another convention, base, direction or position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.harness.engine.faults.m28_rope_convention import MODEL_FAULTS
from degarble.suites.engine.faults.planting import alarms, cases, prove

if TYPE_CHECKING:
    from degarble.harness.engine.faults.model_faults import ModelFault


@pytest.mark.parametrize(("fault", "family"), cases(MODEL_FAULTS))
def test_what_is_planted_is_reproduced(fault: ModelFault, family: str) -> None:
    prove(fault, family, few=2)


@pytest.mark.parametrize(("fault", "family"), cases(MODEL_FAULTS))
def test_a_healthy_call_is_explained_by_nothing(fault: ModelFault, family: str) -> None:
    assert not alarms(fault, family, few=1)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "family"), cases(MODEL_FAULTS))
def test_every_way_is_reproduced_at_every_role(fault: ModelFault, family: str) -> None:
    prove(fault, family, most=2)
