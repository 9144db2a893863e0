"""Faults in quantised tensors, and the signatures that recognise them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.sums import PairSums
from degarble.harness.engine.faults import layouts as m11
from degarble.harness.engine.faults import tensor_scales
from degarble.harness.engine.faults import tensor_scales as m02
from degarble.harness.engine.faults.codes import inject_nibble_order, signature_nibble_order
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.engine.faults.tensor_faults import (
    DifferingPart,
    TensorFault,
    TensorPart,
    element_codes,
    gain_match,
    read_scales,
    reproduction,
    same_scales,
    same_values,
    share_equal,
)
from degarble.harness.formats.layouts import LINEAR, SWIZZLE_128X4, to_layout
from degarble.harness.formats.number_formats import (
    FP8_128X128_F32,
    MXFP4,
    MXFP8,
    NVFP4,
    NibbleOrder,
    ScaleDirection,
)
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.suites.engine.diagnosing import double
from degarble.suites.engine.weights import heavy_tailed

if TYPE_CHECKING:
    from degarble.harness.formats.quantise import QuantisedTensor


def test_parts_are_compared_as_they_are_read(seed: int) -> None:
    plain = quantise(heavy_tailed(5, 32, seed, 2), NVFP4)
    other = plain.with_layout(SWIZZLE_128X4).with_nibble_order(NibbleOrder.HIGH_EVEN)
    assert element_codes(plain).shape == (10, 32)
    assert read_scales(plain).shape == (10, 2)
    assert torch.equal(element_codes(plain), element_codes(other))
    assert torch.equal(read_scales(plain), read_scales(other))


def test_a_scale_of_many_rows_stands_in_each_of_them(seed: int) -> None:
    scales = read_scales(quantise(heavy_tailed(130, 256, seed), FP8_128X128_F32))
    assert scales.shape == (130, 2)
    assert torch.equal(scales[0], scales[127])
    assert not torch.equal(scales[127], scales[128])


def test_only_the_rows_in_question_count() -> None:
    left, right = torch.tensor([[1, 1], [2, 3]]), torch.tensor([[1, 9], [2, 3]])
    assert share_equal(left, right, torch.tensor([True, False])) == 0.5
    assert share_equal(left, right, torch.tensor([False, True])) == 1.0
    assert share_equal(left, right, torch.tensor([False, False])) == 1.0


def test_a_fault_that_cannot_be_reproduces_nothing(seed: int) -> None:
    tensor = quantise(heavy_tailed(2, 32, seed), NVFP4)
    case = DifferingPart(tensor, tensor, torch.tensor([True, True]))
    assert reproduction(case, None, TensorPart.CODES) == (0.0, 1.0)


@pytest.mark.parametrize(("bit", "same"), [(0, True), (1, False)])
def test_effect_is_a_matter_of_values(bit: int, same: bool, seed: int) -> None:
    tensor = quantise(heavy_tailed(2, 32, seed), NVFP4)
    assert same_values(tensor, replace(tensor, codes=tensor.codes ^ bit)) is same
    assert same_values(tensor, tensor.with_nibble_order(NibbleOrder.HIGH_EVEN))


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (1.0, 1.0 + 2 * 2.0**-23, True),
        (1.0, 1.0 + 3 * 2.0**-23, False),
        (1.0, 1.0 - 2.0**-24, True),
        (0.0, 0.0, True),
        (1.0, -1.0, False),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        (float("inf"), float("inf"), True),
    ],
)
def test_scales_are_the_same_within_two_roundings(left: float, right: float, same: bool) -> None:
    assert bool(same_scales(torch.tensor(left), torch.tensor(right))) is same


def _experts(seed: int) -> QuantisedTensor:
    weight = heavy_tailed(4, 32, seed, 3)
    return quantise(weight, NVFP4, amax=weight.float().abs().amax((1, 2)))


def test_one_expert_of_three(seed: int) -> None:
    twin = _experts(seed)
    assert twin.tensor_scale is not None
    doubled = replace(twin, tensor_scale=twin.tensor_scale * 2)
    scales = twin.tensor_scale.clone()
    scales[1] *= 2
    suspect = replace(twin, tensor_scale=scales)
    match = gain_match(
        DifferingPart(twin, suspect, torch.ones(12, dtype=torch.bool)), doubled, "2 * s"
    )
    assert match is not None
    assert match.reproduced == 1.0
    assert match.evidence.endswith("values become 2.000 times as large.")


def test_several_experts_are_counted(seed: int) -> None:
    twin = _experts(seed)
    assert twin.tensor_scale is not None
    doubled = replace(twin, tensor_scale=twin.tensor_scale * 2)
    scales = twin.tensor_scale * torch.tensor([2.0, 2.0, 3.0])
    suspect = replace(twin, tensor_scale=scales)
    match = gain_match(
        DifferingPart(twin, suspect, torch.ones(12, dtype=torch.bool)), doubled, "2 * s"
    )
    assert match is not None
    assert match.reproduced == pytest.approx(2 / 3)
    assert "in 66.7 % of 3 scales" in match.evidence


def test_a_format_without_tensor_scale_has_no_such_fault(seed: int) -> None:
    tensor = quantise(heavy_tailed(4, 32, seed), MXFP4)
    case = DifferingPart(tensor, tensor, torch.ones(4, dtype=torch.bool))
    assert gain_match(case, None, "1 / s") is None


@pytest.mark.parametrize("direction", ScaleDirection)
def test_the_gain_is_that_of_the_family(direction: ScaleDirection, seed: int) -> None:
    """M01 gives s^-2, M02 gives 1/s or s, whichever way the scale is stored."""
    tensor = quantise(heavy_tailed(16, 64, seed), NVFP4).with_direction(direction)
    right = dequantise(tensor, torch.float64)
    s = float(tensor.decode_scale)
    for inject, gain in (
        (tensor_scales.inject_direction, s**-2),
        (tensor_scales.inject_missing, 1 / s),
        (tensor_scales.inject_applied_twice, s),
    ):
        damaged = inject(tensor)
        assert damaged is not None
        assert damaged.direction is direction
        pair_sums = PairSums.of(dequantise(damaged, torch.float64), right)
        assert pair_sums.gain == pytest.approx(gain, rel=1e-5)
        assert pair_sums.cosine == pytest.approx(1.0)


def test_a_format_without_tensor_scale_cannot_have_it(seed: int) -> None:
    assert tensor_scales.inject_direction(quantise(heavy_tailed(4, 32, seed), MXFP4)) is None


PAIRS = [
    (m02.inject_missing, m02.signature_missing),
    (m02.inject_applied_twice, m02.signature_applied_twice),
]


@pytest.mark.parametrize("index", [0, 1])
def test_each_variant_recognises_itself_and_not_the_other(index: int, seed: int) -> None:
    twin = quantise(heavy_tailed(16, 64, seed), NVFP4)
    damaged = PAIRS[index][0](twin)
    assert damaged is not None
    case = DifferingPart(twin, damaged, torch.ones(16, dtype=torch.bool))
    own, other = PAIRS[index][1](case), PAIRS[1 - index][1](case)
    assert own is not None
    assert other is not None
    assert (own.reproduced, other.reproduced) == (1.0, 0.0)


def test_scale_count_a_format_without_tensor_scale_cannot_have_it(seed: int) -> None:
    tensor = quantise(heavy_tailed(4, 32, seed), MXFP4)
    assert [inject(tensor) for inject, _ in PAIRS] == [None, None]


def test_another_scale_is_read_from_as_many_blocks_as_quantiles_are_taken_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch refuses more than 2^24, which 16,000 tokens of eight experts have."""
    most, asked_of, true = 512, [], torch.Tensor.quantile

    def quantile(self: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        asked_of.append(len(self))
        return true(self, q)

    monkeypatch.setattr(m02, "_MOST", most)
    monkeypatch.setattr(torch.Tensor, "quantile", quantile)
    model, place = double("v4", "nvfp4-full"), "layers.1.attn.wo_b.act_quant"
    fault = MODEL_FAULTS["M02.another"]
    variant = next(iter(fault.variants(model.planting(place))))
    (record,) = model.sights(place, variant, calls=1)
    variants = list(fault.signature(model.naming(place), record))
    assert variants[0].where["scale"] == variant.where["scale"]
    assert record.outputs["block_scale"].numel() > most
    assert [each <= most for each in asked_of] == [True]


def test_neighbours_change_places(seed: int) -> None:
    tensor = quantise(heavy_tailed(4, 64, seed), NVFP4)
    damaged = inject_nibble_order(tensor)
    assert damaged is not None
    right, wrong = dequantise(tensor), dequantise(damaged)
    assert torch.equal(wrong[:, 0::2], right[:, 1::2])
    assert torch.equal(wrong[:, 1::2], right[:, 0::2])


def test_twice_is_none(seed: int) -> None:
    tensor = quantise(heavy_tailed(4, 64, seed), NVFP4)
    once = inject_nibble_order(tensor)
    assert once is not None
    twice = inject_nibble_order(once)
    assert twice is not None
    assert torch.equal(twice.codes, tensor.codes)


def test_the_evidence_counts_codes(seed: int) -> None:
    tensor = quantise(heavy_tailed(4, 64, seed), NVFP4)
    damaged = inject_nibble_order(tensor)
    assert damaged is not None
    match = signature_nibble_order(
        DifferingPart(tensor, damaged, torch.tensor([True, True, False, False]))
    )
    assert match is not None
    assert match.reproduced == 1.0
    assert "reproduces 100.0 % of 128 codes" in match.evidence


def test_unpacked_formats_have_no_nibbles(seed: int) -> None:
    tensor = quantise(heavy_tailed(4, 64, seed), MXFP8)
    assert inject_nibble_order(tensor) is None
    assert (
        signature_nibble_order(DifferingPart(tensor, tensor, torch.ones(4, dtype=torch.bool)))
        is None
    )


WHOLE = (256, 128)  # two tiles by two, without padding
RAGGED = (130, 96)  # 130 rows of 6 scales


def _numbered(rows: int, columns: int, seed: int) -> QuantisedTensor:
    """A tensor whose scale bytes are their own positions, so that a permutation can be read off."""
    tensor = quantise(heavy_tailed(rows, columns, seed), NVFP4)
    count = tensor.block_scale.numel()
    marks = (torch.arange(count) % 251).to(torch.uint8).reshape(tensor.block_scale.shape)
    return replace(tensor, block_scale=marks)


def test_read_unswizzled_gives_the_bytes_in_storage_order(seed: int) -> None:
    tensor = _numbered(*WHOLE, seed)
    damaged = m11.inject_read_unswizzled(tensor)
    assert damaged is not None
    assert damaged.layout == LINEAR
    stored = to_layout(tensor.block_scale, SWIZZLE_128X4)
    assert torch.equal(damaged.linear_scale_codes().flatten(), stored)


def test_skipped_and_read_unswizzled_undo_each_other(seed: int) -> None:
    tensor = _numbered(*WHOLE, seed)
    damaged = m11.inject_read_unswizzled(tensor)
    assert damaged is not None
    undone = m11.inject_swizzle_skipped(damaged)
    assert undone is not None
    assert undone.layout == SWIZZLE_128X4
    assert torch.equal(undone.linear_scale_codes(), tensor.block_scale)


def test_twice_read_once_is_once_read_not_at_all(seed: int) -> None:
    tensor = _numbered(*WHOLE, seed)
    twice = m11.inject_swizzled_twice(tensor)
    never = m11.inject_read_unswizzled(tensor)
    assert twice is not None
    assert never is not None
    assert twice.layout == SWIZZLE_128X4
    assert torch.equal(twice.linear_scale_codes(), never.linear_scale_codes())


def test_transposed(seed: int) -> None:
    tensor = _numbered(*WHOLE, seed)
    for layout in (LINEAR, SWIZZLE_128X4):
        damaged = m11.inject_transposed(tensor.with_layout(layout))
        assert damaged is not None
        assert damaged.layout == layout
        turned = damaged.linear_scale_codes().reshape(8, 256)
        assert torch.equal(turned.T, tensor.block_scale)


@pytest.mark.parametrize("fault", m11.SCALE_LAYOUT_TENSOR_FAULTS, ids=lambda fault: fault.id)
def test_ragged_tensors_can_be_damaged_too(fault: TensorFault, seed: int) -> None:
    tensor = _numbered(*RAGGED, seed)
    damaged = fault.inject(tensor)
    assert damaged is not None
    assert not torch.equal(damaged.linear_scale_codes(), tensor.block_scale)
    assert damaged.linear_scale_codes().shape == tensor.block_scale.shape


def test_a_fault_of_a_swizzle_is_not_seen_in_a_linear_tensor(seed: int) -> None:
    tensor = _numbered(*WHOLE, seed)
    rows = torch.ones(256, dtype=torch.bool)
    case = DifferingPart(tensor, tensor, rows)
    seen = {
        fault.id for fault in m11.SCALE_LAYOUT_TENSOR_FAULTS if fault.signature(case) is not None
    }
    assert seen == {"M11.read_unswizzled", "M11.transposed"}
    swizzled = tensor.with_layout(SWIZZLE_128X4)
    case = DifferingPart(swizzled, swizzled, rows)
    seen = {
        fault.id for fault in m11.SCALE_LAYOUT_TENSOR_FAULTS if fault.signature(case) is not None
    }
    assert seen == {"M11.swizzled_twice", "M11.swizzle_skipped", "M11.transposed"}
