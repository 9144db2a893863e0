"""What must hold for every block format on any input; where it cannot, the exception is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from degarble.harness.formats import quantise as quantise_module
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.dialects import DIALECTS
from degarble.harness.formats.layouts import SCALE_LAYOUTS
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    E4M3,
    ELEMENT_FORMATS,
    FP8_1X128_F32,
    FP8_1X128_UE8M0,
    MXFP4,
    MXFP8,
    NVFP4,
    WHOLE,
    ElementFormat,
    NibbleOrder,
    Rounding,
)
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.suites.formats.block_cases import (
    blocks_for,
    implementation,
    roundtrip_nvfp4,
    rows_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.formats.number_formats import BlockFormat

# Floats in blocks of a row; integers have a suite of their own.
ROW_FORMATS = [
    fmt
    for fmt in BLOCK_FORMATS.values()
    if fmt.block[0] == 1 and fmt.block[1] != WHOLE and fmt.element.name in ELEMENT_FORMATS
]
EXAMPLES = settings(max_examples=40)


def formats(*chosen: BlockFormat) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fmt", chosen or ROW_FORMATS, ids=lambda fmt: fmt.name)


# The properties as plain checks; planted faults have to fail them, see the end


def check_second_quantisation(values: Tensor, fmt: BlockFormat) -> None:
    once = dequantise(quantise(values, fmt))
    assert torch.equal(dequantise(quantise(once, fmt)), once)


def check_order(values: Tensor, fmt: BlockFormat) -> None:
    assert bool((dequantise(quantise(values.sort().values, fmt)).diff() >= 0).all())


def check_odd_symmetry(values: Tensor, fmt: BlockFormat) -> None:
    one, other = quantise(values, fmt), quantise(-values, fmt)
    assert torch.equal(one.block_scale, other.block_scale)
    assert isinstance(fmt.element, ElementFormat)
    assert torch.equal(one.element_codes() ^ fmt.element.sign_mask, other.element_codes())
    assert torch.equal(-dequantise(one), dequantise(other))


def check_sign_of_zero(values: Tensor, fmt: BlockFormat) -> None:
    assert isinstance(fmt.element, ElementFormat)
    negative = (quantise(values, fmt).element_codes() & fmt.element.sign_mask) != 0
    assert torch.equal(negative, values.signbit())


def check_scaling(values: Tensor, fmt: BlockFormat, power: int) -> None:
    one, other = quantise(values, fmt), quantise(values * 2.0**power, fmt)
    if bool((values == 0).all()):
        return
    assert torch.equal(dequantise(one) * 2.0**power, dequantise(other))
    if fmt.tensor_scale:
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.block_scale, other.block_scale)
        assert torch.equal(one.decode_scale * 2.0**power, other.decode_scale)


def check_independence(values: Tensor, others: Tensor, fmt: BlockFormat, changed: int) -> None:
    width = fmt.block[1]
    mixed = values.clone()
    inside = slice(changed * width, (changed + 1) * width)
    mixed[:, inside] = others[:, inside]
    encode_scale = torch.tensor(3.7) if fmt.tensor_scale else None
    before, alone, after = (
        quantise(v, fmt, encode_scale=encode_scale) for v in (values, others, mixed)
    )
    codes, scales = before.element_codes().clone(), before.block_scale.clone()
    codes[:, inside] = alone.element_codes()[:, inside]
    scales[:, changed] = alone.block_scale[:, changed]
    assert torch.equal(after.element_codes(), codes)
    assert torch.equal(after.block_scale, scales)


def half_steps(scaled: Tensor, fmt: BlockFormat) -> Tensor:
    """Half the distance of the two codes around each scaled value, from the format's own codes."""
    codes = torch.arange(fmt.element.largest_code + 1, dtype=torch.uint8)
    grid = decode_array(codes, fmt.element).double()
    above = torch.searchsorted(grid, scaled.abs().clamp(max=fmt.element.largest).contiguous())
    above = above.clamp(1, len(grid) - 1)
    return (grid[above] - grid[above - 1]) / 2


def check_error(values: Tensor, fmt: BlockFormat) -> None:
    q = quantise(values, fmt)
    step = q.scale_values().double().repeat_interleave(fmt.block[1], -1) * q.decode_scale.double()
    alive = step > 0
    exact = values.double()
    error = (dequantise(q, torch.float64) - exact).abs()
    scaled = torch.where(alive, exact / step, 0.0)
    # An E4M3 scale may fall short, by a sixteenth if normal: the largest values then saturate, and
    # what lies beyond the largest code is added to the bound. The next check bounds that.
    beyond = (scaled.abs() - fmt.element.largest).clamp(min=0)
    bound = torch.where(alive, (half_steps(scaled, fmt) + beyond) * step, exact.abs())
    # Three float32 roundings lie between x and what is rounded: 2**-22 relative covers them.
    assert bool((error <= bound + exact.abs() * 2.0**-22).all())


def check_saturation(values: Tensor, fmt: BlockFormat) -> None:
    q = quantise(values, fmt)
    step = q.scale_values().double().repeat_interleave(fmt.block[1], -1) * q.decode_scale.double()
    # Scales round up to a power of two, or to nearest in E4M3 from 2**-6 (byte 8) on, or not.
    excess = 17 / 16 if fmt == NVFP4 else 1.0
    floor = 8 if fmt == NVFP4 else 0
    normal = (q.linear_scale_codes() >= floor).repeat_interleave(fmt.block[1], -1)
    ratio = values.double().abs()[normal] / step[normal]
    assert bool((ratio <= fmt.element.largest * excess * (1 + 2.0**-21)).all())


# Round trip


@formats(MXFP4, MXFP8, FP8_1X128_UE8M0)
@given(data=st.data())
@EXAMPLES
def test_decoded_values_survive_a_second_quantisation(
    fmt: BlockFormat, data: st.DataObject
) -> None:
    # Bytes may change: a block whose largest code fell to half the range takes half the scale.
    check_second_quantisation(data.draw(blocks_for(fmt)), fmt)


@given(values=rows_of(3, 128))
@EXAMPLES
def test_codes_under_float32_scales_survive_and_scales_move_by_one_ulp(values: Tensor) -> None:
    once = quantise(values, FP8_1X128_F32)
    twice = quantise(dequantise(once), FP8_1X128_F32)
    assert torch.equal(twice.codes, once.codes)
    distance = twice.block_scale.view(torch.int32) - once.block_scale.view(torch.int32)
    assert int(distance.abs().max()) <= 1


@pytest.mark.parametrize("name", ["definition", "fast"])
@given(values=rows_of(4, 16))
@EXAMPLES
def test_canonical_nvfp4_is_idempotent_from_the_third_scale_on(name: str, values: Tensor) -> None:
    # From scale byte 3 up, rounding the scale moves a block's largest value by less than a sixth,
    # so it keeps code 6 and calls for the same scale again. Bytes 1 and 2 may fall: see below.
    with implementation(name):
        once = quantise(values, NVFP4)
        twice = quantise(dequantise(once), NVFP4, decode_scale=once.decode_scale)
    stable = (once.block_scale >= 3) | (once.block_scale == 0)
    assert torch.equal(twice.block_scale[stable], once.block_scale[stable])
    codes, again = (q.element_codes().reshape(-1, 16) for q in (once, twice))
    alive = (once.block_scale >= 3).flatten()
    assert torch.equal(again[alive], codes[alive])
    assert (dequantise(twice).reshape(-1, 16)[(once.block_scale == 0).flatten()] == 0).all()


def test_canonical_nvfp4_is_not_idempotent_at_the_second_scale() -> None:
    # 9.5 units of 2**-9 call for scale 1.58, rounded to 2, and code 6 (value 4): 8 units. These
    # call for scale 1.33, rounded to 1, where code 7 (value 6) saturates: 6 units.
    values = torch.zeros(1, 16)
    values[0, 0] = 9.5 * 2.0**-9
    encode_scale = torch.tensor(1.0)
    once = quantise(values, NVFP4, encode_scale=encode_scale)
    assert (once.block_scale.item(), once.element_codes()[0, 0].item()) == (2, 6)
    twice = quantise(dequantise(once), NVFP4, encode_scale=encode_scale)
    assert (twice.block_scale.item(), twice.element_codes()[0, 0].item()) == (1, 7)
    assert dequantise(twice)[0, 0].item() == 0.75 * dequantise(once)[0, 0].item()


# Order and symmetry


@formats()
@given(data=st.data())
@EXAMPLES
def test_order_is_kept_inside_a_block(fmt: BlockFormat, data: st.DataObject) -> None:
    check_order(data.draw(blocks_for(fmt, 1)), fmt)


@formats()
@given(data=st.data())
@EXAMPLES
def test_a_changed_sign_changes_sign_bits_only(fmt: BlockFormat, data: st.DataObject) -> None:
    check_odd_symmetry(data.draw(blocks_for(fmt)), fmt)


@formats()
@given(data=st.data())
@EXAMPLES
def test_the_sign_of_zero_and_of_what_rounds_to_zero_is_kept(
    fmt: BlockFormat, data: st.DataObject
) -> None:
    check_sign_of_zero(data.draw(blocks_for(fmt)), fmt)


# Scaling


@formats(NVFP4, MXFP4, MXFP8)
@given(data=st.data(), power=st.integers(-20, 20))
@EXAMPLES
def test_a_power_of_two_moves_scales_only(
    fmt: BlockFormat, data: st.DataObject, power: int
) -> None:
    check_scaling(data.draw(blocks_for(fmt)), fmt, power)


@pytest.mark.parametrize("name", sorted(set(DIALECTS) - {"torchao_one_level"}))
@given(values=rows_of(3, 16, top=0), power=st.integers(-8, 8))
@settings(max_examples=15)
def test_every_two_level_dialect_moves_by_powers_of_two(
    name: str, values: Tensor, power: int
) -> None:
    if bool((values == 0).all()):
        return
    one, other = (quantise(v, NVFP4, DIALECTS[name]) for v in (values, values * 2.0**power))
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.block_scale, other.block_scale)


def test_the_floor_of_fp8_breaks_scaling_where_it_should() -> None:
    values = torch.full((1, 128), 1e-5)
    one, other = (quantise(v, FP8_1X128_F32) for v in (values, values * 0.5))
    assert torch.equal(one.block_scale, other.block_scale)
    assert not torch.equal(one.codes, other.codes)


# Blocks


@formats()
@given(data=st.data(), changed=st.integers(0, 2))
@EXAMPLES
def test_a_block_never_changes_another(fmt: BlockFormat, data: st.DataObject, changed: int) -> None:
    values, others = data.draw(blocks_for(fmt)), data.draw(blocks_for(fmt))
    check_independence(values, others, fmt, changed)


def test_without_a_fixed_tensor_scale_blocks_do_depend_on_each_other() -> None:
    # The counterexample: the outlier's tensor scale takes the other block with it.
    values = torch.linspace(0.01, 0.02, 32)[None, :]
    shouted = values.clone()
    shouted[0, 31] = 1e3
    one, other = (quantise(v, NVFP4) for v in (values, shouted))
    assert one.block_scale[0, 0] != other.block_scale[0, 0]


# Error


@formats()
@given(data=st.data())
@EXAMPLES
def test_every_error_is_below_half_a_step(fmt: BlockFormat, data: st.DataObject) -> None:
    check_error(data.draw(blocks_for(fmt)), fmt)


@formats()
@given(data=st.data())
@EXAMPLES
def test_values_saturate_by_a_sixteenth_at_most(fmt: BlockFormat, data: st.DataObject) -> None:
    check_saturation(data.draw(blocks_for(fmt)), fmt)


# Bytes


@formats()
@given(data=st.data(), rows=st.integers(1, 9), blocks=st.integers(1, 9))
@settings(max_examples=15)
def test_layouts_and_nibble_orders_are_bijections(
    fmt: BlockFormat, data: st.DataObject, rows: int, blocks: int
) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    shape = (rows, blocks * fmt.block[1])
    q = quantise(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), fmt)
    values = dequantise(q)
    if fmt.scale.bits == 8:
        for layout in SCALE_LAYOUTS.values():
            moved = q.with_layout(layout)
            assert torch.equal(moved.linear_scale_codes(), q.block_scale)
            assert torch.equal(dequantise(moved), values)
    if fmt.packed:
        swapped = q.with_nibble_order(NibbleOrder.HIGH_EVEN)
        assert torch.equal(swapped.with_nibble_order(NibbleOrder.LOW_EVEN).codes, q.codes)
        assert torch.equal(dequantise(swapped), values)


@given(seed=st.integers(0, 2**32 - 1), width=st.integers(1, 9), rows=st.integers(1, 5))
@settings(max_examples=25)
def test_both_implementations_are_one_function(seed: int, width: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, 16 * width, generator=generator) * 2.0 ** (seed % 40 - 20)
    encode_scale = torch.rand((), generator=generator) * 100 + 1e-3
    slow, fast = (roundtrip_nvfp4(n, values, encode_scale) for n in ("definition", "fast"))
    assert torch.equal(slow, fast)


# Planted faults

CHECKS: dict[str, Callable[[Tensor, BlockFormat], None]] = {
    "second quantisation": check_second_quantisation,
    "order": check_order,
    "odd symmetry": check_odd_symmetry,
    "sign of zero": check_sign_of_zero,
    "scaling": lambda values, fmt: check_scaling(values, fmt, -9),
    "independence": lambda values, fmt: check_independence(values, values.flip(1) * 9, fmt, 1),
    "error": check_error,
    "saturation": check_saturation,
}


def _faulty_encode(fault: str) -> Callable[..., Tensor]:
    def encode(values: Tensor, fmt: ElementFormat, *args: Any, **kwargs: Any) -> Tensor:
        if fmt != E4M3:  # in MXFP8 this is the element; its UE8M0 scale stays right
            if fault == "scale rounded down":
                return encode_array(values, fmt, Rounding.DOWN)
            return encode_array(values, fmt, *args, **kwargs)
        if fault == "rounded up":
            return encode_array(values, fmt, Rounding.UP)
        codes = encode_array(values, fmt, *args, **kwargs)
        if fault == "codes swapped":
            return torch.where((codes & 0x77) == 0x70, codes ^ 8, codes)  # 128 and 256
        if fault == "zero without sign":
            return torch.where(codes == 0x80, 0, codes)
        return codes

    return encode


FAULTS = {
    "codes swapped": {"second quantisation", "order", "error"},
    "rounded up": {"odd symmetry", "error"},
    "zero without sign": {"sign of zero", "odd symmetry"},
    "scale rounded down": {"saturation"},
    "one scale for all": {"independence"},
    "floor under the amax": {"scaling"},
}


def _faulty_amax(fault: str) -> Callable[..., Tensor]:
    original = quantise_module._amax

    def amax(x: Tensor, dim: Any, policy: Any) -> Tensor:
        found = original(x, dim, policy)
        if fault == "floor under the amax":
            return found.clamp(min=64.0)
        return found.amax(-1, keepdim=True).expand_as(found) if "all" in fault else found

    return amax


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_its_checks_and_no_others(
    fault: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(1, 96, generator=torch.Generator().manual_seed(seed))
    values[0, 5:60:9] *= 1e-7
    for check in CHECKS.values():
        check(values, MXFP8)
    monkeypatch.setattr(quantise_module, "encode_array", _faulty_encode(fault))
    monkeypatch.setattr(quantise_module, "_amax", _faulty_amax(fault))
    failed = set()
    for name, check in CHECKS.items():
        try:
            check(values, MXFP8)
        except AssertionError:
            failed.add(name)
    assert failed == FAULTS[fault]
