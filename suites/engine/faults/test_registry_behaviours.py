"""Every family of behaviour, from the registry: what is planted is reproduced, and nothing else.

The proof that each of them owes is in planting.py. Families of weights, scales, formats, layouts
and loading owe theirs to suites/engine/diagnose/test_diagnose.py; a family that is in neither fails
here, so that a new one cannot come without a case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.harness.engine.faults.model_faults import Reach
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.suites.engine.diagnosing import FAULTS as OF_WEIGHTS
from degarble.suites.engine.planting import alarms, cases, prove

if TYPE_CHECKING:
    from degarble.harness.engine.faults.model_faults import ModelFault

OF_BEHAVIOUR = tuple(
    each for each in MODEL_FAULTS.values() if each not in OF_WEIGHTS or each.reach is Reach.EDGE
)
CASES = cases(OF_BEHAVIOUR)
FEW = {"M32": 3}  # ways and places of a family; of others two show that it is known


@pytest.mark.parametrize(("fault", "family"), CASES)
def test_what_is_planted_is_reproduced(fault: ModelFault, family: str) -> None:
    prove(fault, family, few=FEW.get(fault.family, 2))


@pytest.mark.parametrize(("fault", "family"), CASES)
def test_a_healthy_call_is_explained_by_nothing(fault: ModelFault, family: str) -> None:
    assert not alarms(fault, family, few=1)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "family"), CASES)
def test_every_way_is_reproduced_at_every_role(fault: ModelFault, family: str) -> None:
    prove(fault, family, most=2)


def test_every_fault_of_every_family_has_a_case() -> None:
    """Weights' families are told by the list of diagnosing.py; all others by a place in a model."""
    planted = {fault.id for fault, _ in (each.values for each in CASES)}
    assert planted == {each.id for each in OF_BEHAVIOUR}
    families = {each.family for each in MODEL_FAULTS.values()}
    assert families == {each.family for each in (*OF_WEIGHTS, *OF_BEHAVIOUR)}
    assert len({each.family for each in OF_BEHAVIOUR}) > 15
