"""Diagnosis of quantised tensors: every fault in every dialect is named, healthy ones are not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.engine.diagnose.packing_diagnosis import (
    MIDPOINT_ULPS,
    Diagnosis,
    compare_parts,
    diagnose,
)
from degarble.harness.engine.faults.integers import INTEGER_GROUP_TENSOR_FAULTS
from degarble.harness.engine.faults.registry import FAULTS
from degarble.harness.engine.faults.tensor_faults import TensorPart, same_values
from degarble.harness.formats.dialects import CANONICAL, DIALECTS, MODELOPT, TORCHAO
from degarble.harness.formats.layouts import LINEAR, SWIZZLE_128X4
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    FP8_128X128_F32,
    MXFP8,
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


# One block whose largest value 6 and tensor amax 6 * 448 * 2^-8 make both scales powers of two, so
# that a value of the row is its own scaled value times SCALE.
OF_NVFP4 = {
    name: fault for name, fault in FAULTS.items() if fault not in INTEGER_GROUP_TENSOR_FAULTS
}
SCALE = 2.0**-3


def _row(*scaled: float) -> torch.Tensor:
    """A row of two blocks: the first pins the scales, the second holds the values in question."""
    pin = torch.zeros(16)
    pin[0] = 6.0 * 448 * SCALE
    values = torch.zeros(16)
    values[0] = 6.0 * SCALE
    values[1 : 1 + len(scaled)] = torch.tensor(scaled) * SCALE
    return torch.cat([pin, values])[None]


@pytest.mark.parametrize(
    ("ulps", "agrees"), [(0, True), (1, True), (4, True), (5, False), (64, False)]
)
def test_the_other_neighbour_is_excused_on_the_midpoint_only(ulps: int, agrees: bool) -> None:
    """1.25 lies between codes 2 (1.0) and 3 (1.5)."""
    scaled = 1.25 * (1 + ulps * 2.0**-23)
    reference = _row(scaled)
    twin = quantise(reference, NVFP4, MODELOPT)
    own = int(twin.element_codes()[0, 17])
    assert own in (2, 3)
    codes = twin.element_codes().clone()
    codes[0, 17] = 5 - own
    suspect = replace(twin, codes=codes[:, 0::2] | codes[:, 1::2] << 4)
    differences = compare_parts(suspect, twin, reference)
    assert (differences == ()) is agrees
    assert MIDPOINT_ULPS == 4


def test_a_step_further_is_never_excused() -> None:
    reference = _row(1.25)
    twin = quantise(reference, NVFP4, MODELOPT)
    codes = twin.codes.clone()
    codes[0, 8] = (codes[0, 8] & 0x0F) | 0x40  # 2.0 where 1.0 or 1.5 would be right
    (difference,) = compare_parts(replace(twin, codes=codes), twin, reference)
    assert difference.part is TensorPart.CODES
    assert (difference.differing, difference.total, difference.where) == (1, 32, "0 to 0 (all)")
    assert difference.sentence.startswith(
        "1 of 32 codes differ, in rows 0 to 0 (all); first at [0, 17]"
    )
    assert "0x4 (2), expected 0x2 (1)" in difference.sentence


def test_the_sign_of_zero_is_no_difference() -> None:
    reference = _row(0.0)
    twin = quantise(reference, NVFP4, MODELOPT)
    codes = twin.codes.clone()
    codes[0, 8] |= 0x80
    assert compare_parts(replace(twin, codes=codes), twin, reference) == ()


@pytest.mark.parametrize(("bits", "agrees"), [(0, True), (2, True), (-2, True), (3, False)])
def test_tensor_scales_may_be_two_roundings_apart(bits: int, agrees: bool, seed: int) -> None:
    reference = heavy_tailed(4, 32, seed)
    twin = quantise(reference, NVFP4)
    assert twin.tensor_scale is not None
    moved = (twin.tensor_scale.view(torch.int32) + bits).view(torch.float32)
    differences = compare_parts(replace(twin, tensor_scale=moved), twin, reference)
    assert (differences == ()) is agrees


def test_a_difference_says_where_and_how_much(seed: int) -> None:
    reference = heavy_tailed(8, 64, seed)
    twin = quantise(reference, NVFP4)
    scales = twin.block_scale.clone()
    scales[3, 1] ^= 0x08
    scales[5, 2] ^= 0x7F
    (difference,) = compare_parts(replace(twin, block_scale=scales), twin, reference)
    assert difference.part is TensorPart.BLOCK_SCALE
    assert difference.rows.nonzero().flatten().tolist() == [3, 5]
    assert difference.sentence.startswith(
        "2 of 32 block scales differ, in rows 2 between 3 and 5; first at [3, 1]: 0x"
    )


def test_float_scales_and_unpacked_codes_are_compared_as_well(seed: int) -> None:
    reference = heavy_tailed(130, 256, seed)
    for fmt in (FP8_128X128_F32, MXFP8):
        twin = quantise(reference, fmt)
        assert compare_parts(twin, twin, reference) == ()
        codes = twin.codes.clone()
        codes[129, 7] ^= 0x80 if int(codes[129, 7]) & 0x7F else 0x30
        scales = twin.block_scale.clone()
        scales[1, 1] = 100
        differences = compare_parts(replace(twin, codes=codes, block_scale=scales), twin, reference)
        assert [difference.part for difference in differences] == [
            TensorPart.CODES,
            TensorPart.BLOCK_SCALE,
        ]
        rows = differences[1].rows.nonzero().flatten().tolist()
        assert rows == ([128, 129] if fmt is FP8_128X128_F32 else [1])


# --------------------------------------------------------------------------------------------------
# Every fault in every dialect is named, healthy ones raise nothing, unknown damage is unknown.

if TYPE_CHECKING:
    Damage = Callable[[QuantisedTensor, int], QuantisedTensor]

NVFP4_DIALECTS = [
    dialect for dialect in DIALECTS.values() if any(rule.format is NVFP4 for rule in dialect.rules)
]


def _names(diagnosis: Diagnosis) -> list[str]:
    assert diagnosis.unexplained == ()
    return [cause.fault.id for cause in diagnosis.causes]


@pytest.mark.parametrize("dialect", NVFP4_DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("fault", OF_NVFP4.values(), ids=lambda fault: fault.id)
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
        for fault in OF_NVFP4.values():
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
        assert diagnosis.closeness == diagnosis.floor


@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=lambda fmt: fmt.name)
def test_other_formats_are_judged_as_well(fmt: BlockFormat, seed: int) -> None:
    weight = heavy_tailed(130, 256, seed)
    tensor = quantise(weight, fmt)
    assert diagnose(weight, tensor).verdict is Verdict.AGREES
    damaged = replace(tensor, codes=tensor.codes.flip(0))
    assert diagnose(weight, damaged).verdict is Verdict.DIFFERS


@pytest.mark.parametrize("name", [name for name in FAULTS if name[:3] in {"M10", "M15"}])
@pytest.mark.parametrize("form", ["UINT4_G32", "UINT4_G128", "UINT8_G64", "INT4_G64", "INT8_G32"])
def test_faults_of_integers_by_group_are_named(name: str, form: str, seed: int) -> None:
    weight = heavy_tailed(96, 512, seed)
    damaged = FAULTS[name].inject(quantise(weight, BLOCK_FORMATS[form]))
    if damaged is None:
        return
    diagnosis = diagnose(weight, damaged)
    assert diagnosis.verdict is Verdict.DIFFERS
    assert [cause.fault.id for cause in diagnosis.causes] == [name]


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


def test_one_expert_of_many_is_distinguished_from_the_others(seed: int) -> None:
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
def test_unknown_damage_is_reported_as_unknown(damage: Damage, seed: int) -> None:
    weight = heavy_tailed(160, 192, seed)
    diagnosis = diagnose(weight, damage(quantise(weight, NVFP4), seed))
    assert diagnosis.verdict is Verdict.DIFFERS
    assert diagnosis.causes == ()
    (unexplained,) = diagnosis.unexplained
    assert all(share < 0.99 for _, share in unexplained.excluded)
    assert "no known fault explains the" in diagnosis.sentence
    assert "differ" in unexplained.difference.sentence


@pytest.mark.parametrize("name", OF_NVFP4)
def test_an_unknown_fault_is_found_but_not_named(name: str, seed: int) -> None:
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


def test_two_faults_that_look_alike_are_both_reported() -> None:
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


def test_a_healthy_tensor_is_compared_with_the_error_of_the_format(seed: int) -> None:
    weight = heavy_tailed(64, 256, seed)
    diagnosis = diagnose(weight, quantise(weight, NVFP4))
    assert diagnosis.sentence == (
        "Every code and scale is what canonical writes for this weight in NVFP4."
    )
    assert 0.05 < diagnosis.floor.relative_l2 < 0.15
    assert diagnosis.closeness.cosine > 0.98


def test_a_source_of_another_shape_is_refused(seed: int) -> None:
    tensor = quantise(heavy_tailed(4, 32, seed), NVFP4, CANONICAL)
    with pytest.raises(ShapeMismatch, match="reference"):
        diagnose(heavy_tailed(32, 4, seed), tensor)
