"""Every fault in every dialect is named, healthy ones raise nothing, unknown damage is unknown."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.engine.diagnose.packing_diagnosis import Diagnosis, diagnose
from degarble.harness.engine.faults.registry import FAULTS
from degarble.harness.engine.faults.tensor_faults import same_values
from degarble.harness.formats.dialects import CANONICAL, DIALECTS, TORCHAO
from degarble.harness.formats.layouts import LINEAR, SWIZZLE_128X4
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    NVFP4,
    NibbleOrder,
    ScaleDirection,
)
from degarble.harness.formats.quantise import quantise
from degarble.harness.report.verdict import Verdict
from degarble.suites.engine.weights import heavy_tailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.engine.faults.tensor_faults import TensorFault
    from degarble.harness.formats.dialects import Dialect
    from degarble.harness.formats.layouts import ScaleLayout
    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.formats.quantise import QuantisedTensor

    Damage = Callable[[QuantisedTensor, int], QuantisedTensor]

NVFP4_DIALECTS = [
    dialect for dialect in DIALECTS.values() if any(rule.format is NVFP4 for rule in dialect.rules)
]


def _names(diagnosis: Diagnosis) -> list[str]:
    assert diagnosis.unexplained == ()
    return [cause.fault.id for cause in diagnosis.causes]


@pytest.mark.parametrize("dialect", NVFP4_DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.id)
@pytest.mark.parametrize("layout", [LINEAR, SWIZZLE_128X4], ids=lambda layout: layout.name)
def test_each_fault_is_named_in_each_dialect(
    dialect: Dialect, fault: TensorFault, layout: ScaleLayout, seed: int
) -> None:
    weight = heavy_tailed(160, 192, seed)
    healthy = quantise(weight, NVFP4, dialect).with_layout(layout)
    damaged = fault.inject(healthy)
    assert damaged is not None
    diagnosis = diagnose(weight, damaged)
    if same_values(healthy, damaged):  # a scale of 1 used in the wrong direction is still 1
        assert diagnosis.verdict is Verdict.AGREES
        return
    assert diagnosis.verdict is Verdict.DIFFERS
    assert _names(diagnosis) == [fault.id]
    assert diagnosis.causes[0].match.reproduced == 1.0
    assert diagnosis.causes[0].match.untouched < 0.6
    assert diagnosis.causes[0].alternatives == ()


def test_few_combinations_have_no_effect(seed: int) -> None:
    """The way out of the suite above is taken by one dialect, whose tensor scale is always 1."""
    weight = heavy_tailed(160, 192, seed)
    idle = set()
    for dialect in NVFP4_DIALECTS:
        healthy = quantise(weight, NVFP4, dialect)
        for fault in FAULTS.values():
            damaged = fault.inject(healthy)
            assert damaged is not None
            if same_values(healthy, damaged):
                idle.add((dialect.name, fault.id))
    scale_faults = ("M01.inverse", "M02.missing", "M02.applied_twice")
    assert idle == {("torchao_one_level", name) for name in scale_faults}


@pytest.mark.parametrize("number", range(25))
def test_healthy_tensors_raise_no_alarm(number: int, seed: int) -> None:
    """25 seeds by all dialects, in both layouts, directions and nibble orders: 200 tensors."""
    rows, columns = 8 + 16 * (number % 5), 64 + 16 * number
    weight = heavy_tailed(rows, columns, seed)
    for index, dialect in enumerate(NVFP4_DIALECTS):
        tensor = quantise(weight, NVFP4, dialect)
        if (number + index) % 2:
            tensor = tensor.with_layout(SWIZZLE_128X4).with_nibble_order(NibbleOrder.HIGH_EVEN)
        if number % 3 == 0:
            tensor = tensor.with_direction(ScaleDirection.ENCODE)
        diagnosis = diagnose(weight, tensor)
        assert diagnosis.verdict is Verdict.AGREES, (dialect.name, diagnosis.sentence)
        assert diagnosis.found == diagnosis.floor


@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=lambda fmt: fmt.name)
def test_other_formats_are_judged_as_well(fmt: BlockFormat, seed: int) -> None:
    weight = heavy_tailed(130, 256, seed)
    tensor = quantise(weight, fmt)
    assert diagnose(weight, tensor).verdict is Verdict.AGREES
    damaged = replace(tensor, codes=tensor.codes.flip(0))
    assert diagnose(weight, damaged).verdict is Verdict.DIFFERS


@pytest.mark.parametrize("dialect", NVFP4_DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("factor", [1.0009765625, 1.37, 2.0, 11.0])
def test_a_scale_shared_with_a_larger_partner_is_healthy(
    dialect: Dialect, factor: float, seed: int
) -> None:
    weight = heavy_tailed(32, 128, seed)
    amax = weight.float().abs().max() * factor
    tensor = quantise(weight, NVFP4, dialect, amax=amax)
    diagnosis = diagnose(weight, tensor)
    assert diagnosis.verdict is Verdict.AGREES, diagnosis.sentence


def test_faults_on_a_shared_scale_are_named_as_well(seed: int) -> None:
    weight = heavy_tailed(160, 192, seed)
    tensor = quantise(weight, NVFP4, amax=weight.float().abs().max() * 1.37)
    for name in ("M10.nibble_order", "M11.transposed", "M11.read_unswizzled"):
        damaged = FAULTS[name].inject(tensor)
        assert damaged is not None
        assert _names(diagnose(weight, damaged)) == [name]


def test_several_faults_at_once_are_all_named(seed: int) -> None:
    weight = heavy_tailed(160, 192, seed)
    tensor: QuantisedTensor | None = quantise(weight, NVFP4)
    names = ("M01.inverse", "M10.nibble_order", "M11.transposed")
    for name in names:
        assert tensor is not None
        tensor = FAULTS[name].inject(tensor)
    assert tensor is not None
    assert sorted(_names(diagnose(weight, tensor))) == list(names)


def test_a_fault_in_some_rows_is_named_with_its_rows(seed: int) -> None:
    weight = heavy_tailed(160, 192, seed)
    tensor = quantise(weight, NVFP4)
    swapped = FAULTS["M10.nibble_order"].inject(tensor)
    assert swapped is not None
    codes = tensor.codes.clone()
    codes[32:64] = swapped.codes[32:64]
    (cause,) = diagnose(weight, replace(tensor, codes=codes)).causes
    assert cause.fault.id == "M10.nibble_order"
    assert cause.difference.where == "32 to 63"


def test_one_expert_of_many_is_told_from_the_others(seed: int) -> None:
    weight = heavy_tailed(144, 128, seed, 3)
    tensor = quantise(weight, NVFP4)
    damaged = FAULTS["M11.read_unswizzled"].inject(tensor)
    assert damaged is not None
    scales = tensor.block_scale.clone()
    scales[1] = damaged.block_scale[1]
    (cause,) = diagnose(weight, replace(tensor, block_scale=scales)).causes
    assert cause.fault.id == "M11.read_unswizzled"
    rows = cause.difference.rows.nonzero().flatten()
    assert int(rows.min()) >= 144
    assert int(rows.max()) < 288


def _flip_bits(tensor: QuantisedTensor, seed: int) -> QuantisedTensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 256, tensor.codes.shape, generator=generator, dtype=torch.uint8)
    return replace(tensor, codes=tensor.codes ^ noise)


def _drop_signs(tensor: QuantisedTensor, _seed: int) -> QuantisedTensor:
    return replace(tensor, codes=tensor.codes & 0x77)


def _shift_scales(tensor: QuantisedTensor, _seed: int) -> QuantisedTensor:
    return replace(tensor, block_scale=tensor.block_scale.roll(1, dims=1))


def _reverse_rows(tensor: QuantisedTensor, _seed: int) -> QuantisedTensor:
    return replace(tensor, codes=tensor.codes.flip(0))


def _scale_slightly(tensor: QuantisedTensor, _seed: int) -> QuantisedTensor:
    assert tensor.tensor_scale is not None
    return replace(tensor, tensor_scale=tensor.tensor_scale * 0.97)


def _poison(tensor: QuantisedTensor, _seed: int) -> QuantisedTensor:
    assert tensor.tensor_scale is not None
    return replace(tensor, tensor_scale=tensor.tensor_scale * torch.nan)


@pytest.mark.parametrize(
    "damage", [_flip_bits, _drop_signs, _shift_scales, _reverse_rows, _scale_slightly, _poison]
)
def test_unknown_damage_is_said_to_be_unknown(damage: Damage, seed: int) -> None:
    weight = heavy_tailed(160, 192, seed)
    diagnosis = diagnose(weight, damage(quantise(weight, NVFP4), seed))
    assert diagnosis.verdict is Verdict.DIFFERS
    assert diagnosis.causes == ()
    (unexplained,) = diagnosis.unexplained
    assert all(share < 0.99 for _, share in unexplained.excluded)
    assert "no known fault explains the" in diagnosis.sentence
    assert "differ" in unexplained.difference.sentence


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_nobody_knows_is_found_but_not_named(name: str, seed: int) -> None:
    """Leave one out: no other fault may take the blame."""
    weight = heavy_tailed(160, 192, seed)
    damaged = FAULTS[name].inject(quantise(weight, NVFP4))
    assert damaged is not None
    others = [fault for fault in FAULTS.values() if fault.id != name]
    diagnosis = diagnose(weight, damaged, others)
    assert diagnosis.causes == ()
    assert diagnosis.unexplained[0].difference.part is FAULTS[name].part


def test_one_scale_tile_can_hide_a_fault_and_then_there_is_none(seed: int) -> None:
    """One row of four scales: linear and swizzled are the same bytes, so nothing is wrong."""
    weight = heavy_tailed(1, 64, seed)
    tensor = quantise(weight, NVFP4)
    for name in ("M11.read_unswizzled", "M11.swizzled_twice", "M11.transposed"):
        damaged = FAULTS[name].inject(tensor)
        assert damaged is not None
        assert same_values(tensor, damaged)
        assert diagnose(weight, damaged).verdict is Verdict.AGREES


def test_two_faults_that_look_alike_are_both_told() -> None:
    """A constant weight with one odd scale at a place that two permutations move alike."""
    weight = torch.ones(2, 32)
    weight[0, 16:] = 2.0
    tensor = quantise(weight, NVFP4, TORCHAO)
    damaged = FAULTS["M11.transposed"].inject(tensor)
    assert damaged is not None
    (cause,) = diagnose(weight, damaged).causes
    assert {cause.fault.id, *cause.alternatives} >= {"M11.transposed"}
    reverse = replace(tensor, block_scale=tensor.block_scale.flip(0, 1).contiguous())
    assert diagnose(weight, reverse).verdict is Verdict.DIFFERS


def test_a_healthy_tensor_is_put_beside_what_the_format_costs(seed: int) -> None:
    weight = heavy_tailed(64, 256, seed)
    diagnosis = diagnose(weight, quantise(weight, NVFP4))
    assert diagnosis.sentence == (
        "Every code and scale is what canonical writes for this weight in NVFP4."
    )
    assert 0.05 < diagnosis.floor.relative_l2 < 0.15
    assert diagnosis.found.cosine > 0.98


def test_a_source_of_another_shape_is_refused(seed: int) -> None:
    tensor = quantise(heavy_tailed(4, 32, seed), NVFP4, CANONICAL)
    with pytest.raises(ShapeMismatch, match="reference"):
        diagnose(heavy_tailed(32, 4, seed), tensor)
