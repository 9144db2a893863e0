"""Every fault of the registry: its id, its texts, and that what is planted is reproduced."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import UnknownName
from degarble.harness.engine.faults.model_faults import Reach
from degarble.harness.engine.faults.registry import FAULTS, MODEL_FAULTS, model_fault_named
from degarble.harness.formats.number_formats import BLOCK_FORMATS, FP8_128X128_F32, MXFP8, NVFP4
from degarble.harness.formats.quantise import quantise
from degarble.suites.engine.diagnosing import FAULTS as OF_WEIGHTS
from degarble.suites.engine.planting import alarms, cases, prove
from degarble.suites.engine.weights import heavy_tailed

if TYPE_CHECKING:
    from degarble.harness.engine.faults.model_faults import ModelFault


def test_ids_are_family_and_variant() -> None:
    for name, fault in FAULTS.items():
        assert name == fault.id
        assert re.fullmatch(r"M\d\d\.[a-z_]+", name)
        assert fault.family == name[:3]


ASYMMETRIC = BLOCK_FORMATS["UINT4_G32"]


def test_every_fault_has_words() -> None:
    for fault in FAULTS.values():
        assert fault.title[0].isupper()
        assert fault.remedy.endswith(".")
        assert fault.effect


def test_unknown_faults_are_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"Did you mean M10\.nibble_order"):
        model_fault_named("M10.nible_order")


@pytest.mark.parametrize("name", FAULTS)
def test_inject_leaves_its_argument_alone(name: str, seed: int) -> None:
    fmt = BLOCK_FORMATS["UINT4_G32"] if name.startswith("M15") else NVFP4
    tensor = quantise(heavy_tailed(160, 192, seed), fmt)
    before = (tensor.codes.clone(), tensor.block_scale.clone(), tensor.tensor_scale)
    damaged = FAULTS[name].inject(tensor)
    assert damaged is not None
    assert (tensor.codes == before[0]).all()
    assert (tensor.block_scale == before[1]).all()
    assert tensor.tensor_scale is before[2]
    assert damaged.shape == tensor.shape


def test_a_fault_that_cannot_be_is_not_made(seed: int) -> None:
    weight = heavy_tailed(130, 256, seed)
    possible = {
        fmt.name: {name for name, f in FAULTS.items() if f.inject(quantise(weight, fmt))}
        for fmt in (NVFP4, MXFP8, FP8_128X128_F32, BLOCK_FORMATS["INT8_G64"], ASYMMETRIC)
    }
    layouts = {name for name in FAULTS if name.startswith("M11")}
    groups = {name for name in FAULTS if name.startswith("M15")}
    assert possible == {
        NVFP4.name: set(FAULTS) - groups,
        MXFP8.name: layouts,
        FP8_128X128_F32.name: set(),
        "INT8_G64": {"M15.scale_next_group", "M15.scale_previous_group"},
        ASYMMETRIC.name: groups | {"M10.nibble_order"},
    }


# --------------------------------------------------------------------------------------------------
# Every family of behaviour, from the registry: what is planted is reproduced, and nothing else.
#
# The proof that each of them owes is in planting.py. Families of weights, scales, formats, layouts
# and loading owe theirs to suites/engine/diagnose/test_diagnose.py; a family that is in neither
# fails here, so that a new one cannot come without a case.

OF_BEHAVIOUR = tuple(
    fault for fault in MODEL_FAULTS.values() if fault not in OF_WEIGHTS or fault.reach is Reach.EDGE
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
    assert planted == {fault.id for fault in OF_BEHAVIOUR}
    families = {fault.family for fault in MODEL_FAULTS.values()}
    assert families == {fault.family for fault in (*OF_WEIGHTS, *OF_BEHAVIOUR)}
    assert len({fault.family for fault in OF_BEHAVIOUR}) > 15
