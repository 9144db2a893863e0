from __future__ import annotations

import re

import pytest

from degarble.harness.base.errors import UnknownName
from degarble.harness.engine.faults.registry import FAULTS, fault_named
from degarble.harness.formats.number_formats import FP8_128X128_F32, MXFP8, NVFP4
from degarble.harness.formats.quantise import quantise
from degarble.suites.engine.weights import heavy_tailed


def test_ids_are_family_and_variant() -> None:
    for name, fault in FAULTS.items():
        assert name == fault.id
        assert re.fullmatch(r"M\d\d\.[a-z_]+", name)
        assert fault.family == name[:3]


def test_every_fault_has_words() -> None:
    for fault in FAULTS.values():
        assert fault.title[0].isupper()
        assert fault.remedy.endswith(".")
        assert fault.effect


def test_unknown_faults_are_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"Did you mean M10\.nibble_order"):
        fault_named("M10.nible_order")


@pytest.mark.parametrize("name", FAULTS)
def test_inject_leaves_its_argument_alone(name: str, seed: int) -> None:
    tensor = quantise(heavy_tailed(160, 192, seed), NVFP4)
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
        for fmt in (NVFP4, MXFP8, FP8_128X128_F32)
    }
    layouts = {name for name in FAULTS if name.startswith("M11")}
    assert possible == {
        NVFP4.name: set(FAULTS),
        MXFP8.name: layouts,
        FP8_128X128_F32.name: set(),
    }
