"""Quantised tensors and weights refuse what does not fit, and every mixture of two."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import (
    DialectMismatch,
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ScaleDirectionMismatch,
    ShapeMismatch,
)
from degarble.harness.formats import weight as weights
from degarble.harness.formats.dialects import CANONICAL, MODELOPT
from degarble.harness.formats.layouts import (
    LINEAR,
    SCALE_LAYOUTS,
    SWIZZLE_8X4,
    SWIZZLE_128X4,
    nonzero_padding,
)
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    FP8_128X128_F32,
    FP8_128X128_UE8M0,
    MXFP4,
    NVFP4,
    NibbleOrder,
    ScaleDirection,
)
from degarble.harness.formats.quantise import (
    QuantisedTensor,
    concatenate_rows,
    dequantise,
    quantise,
    require,
    require_same,
)
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.formats.layouts import ScaleLayout
    from degarble.harness.formats.number_formats import BlockFormat


# --------------------------------------------------------------------------------------------------
# A quantised tensor refuses what does not fit, and every mixture of two.


def quantised(seed: int, rows: int = 5, columns: int = 96, **facts: Any) -> QuantisedTensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return quantise(values, facts.pop("fmt", NVFP4), **facts)


# What the constructor refuses


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"codes": torch.zeros(5, 48)}, DtypeMismatch, "view"),
        ({"codes": torch.zeros(5, 48, dtype=torch.int8)}, DtypeMismatch, "codes"),
        ({"codes": torch.zeros(5, 96, dtype=torch.uint8)}, ShapeMismatch, r"\(5, 48\)"),
        ({"codes": [1, 2]}, DtypeMismatch, "list"),
        (
            {"block_scale": torch.zeros(5, 6, dtype=torch.float8_e4m3fn)},
            DtypeMismatch,
            "never cast",
        ),
        ({"block_scale": torch.zeros(5, 6)}, DtypeMismatch, "block_scale"),
        ({"block_scale": torch.zeros(5, 5, dtype=torch.uint8)}, ShapeMismatch, r"\(5, 6\)"),
        ({"block_scale": torch.zeros(30, dtype=torch.uint8)}, ShapeMismatch, r"\(5, 6\)"),
        ({"layout": SWIZZLE_128X4}, LayoutMismatch, "128x4"),
        ({"tensor_scale": torch.ones((), dtype=torch.bfloat16)}, DtypeMismatch, "tensor_scale"),
        ({"tensor_scale": torch.ones(1)}, ShapeMismatch, "broadcast"),
        ({"tensor_scale": torch.ones(5)}, ShapeMismatch, "broadcast"),
        ({"tensor_scale": None}, ScaleDirectionMismatch, "direction"),
        ({"direction": None}, ScaleDirectionMismatch, "decodes"),
        ({"nibble_order": None}, InvalidArgument, "NibbleOrder"),
        ({"shape": (5, 97)}, ShapeMismatch, "multiple of 16"),
        ({"shape": (6, 96)}, ShapeMismatch, "codes"),
        ({"format": MXFP4}, ShapeMismatch, "block_scale"),
        ({"format": MXFP4, "dialect": MODELOPT}, DialectMismatch, "MXFP4"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    seed: int, change: dict[str, Any], error: type[Exception], says: str
) -> None:
    q = quantised(seed)
    with pytest.raises(error, match=says):
        replace(q, **change)


def test_a_format_without_tensor_scale_takes_none(seed: int) -> None:
    q = quantised(seed, fmt=MXFP4)
    assert q.tensor_scale is None
    assert q.direction is None
    with pytest.raises(ScaleDirectionMismatch, match="has no tensor scale"):
        replace(q, tensor_scale=torch.ones(()), direction=ScaleDirection.DECODE)
    with pytest.raises(ScaleDirectionMismatch, match="no tensor scale"):
        q.with_direction(ScaleDirection.ENCODE)


def test_an_unpacked_format_has_no_nibbles(seed: int) -> None:
    q = quantised(seed, fmt=BLOCK_FORMATS["MXFP8"])
    with pytest.raises(InvalidArgument, match="does not pack"):
        replace(q, nibble_order=NibbleOrder.LOW_EVEN)


def test_float32_scales_stay_row_major(seed: int) -> None:
    q = quantised(seed, fmt=FP8_128X128_F32)
    with pytest.raises(LayoutMismatch, match="float32 scales"):
        replace(q, layout=SWIZZLE_128X4)


def test_broken_contents_are_representable(seed: int) -> None:
    q = quantised(seed)
    nan_bytes = torch.full_like(q.block_scale, 0x7F)
    broken = replace(q, block_scale=nan_bytes, tensor_scale=torch.tensor(torch.inf))
    assert dequantise(broken).isnan().all()


def test_it_is_frozen_and_compares_by_identity(seed: int) -> None:
    q = quantised(seed)
    with pytest.raises(FrozenInstanceError):
        q.layout = SWIZZLE_128X4  # type: ignore[misc]
    assert q == q  # noqa: PLR0124  identity is the point
    assert q != replace(q)


def test_it_prints_its_facts_and_no_bytes(seed: int) -> None:
    q = quantised(seed)
    assert repr(q) == "QuantisedTensor(NVFP4 (5, 96), canonical, linear, decode, low_even)"
    assert repr(quantised(seed, fmt=BLOCK_FORMATS["MXFP8"])) == (
        "QuantisedTensor(MXFP8 (5, 96), canonical, linear)"
    )


# Conversions


@pytest.mark.parametrize("rows", [1, 7, 128, 130])
@pytest.mark.parametrize("columns", [16, 48, 64, 208])
def test_every_layout_is_a_bijection_and_decodes_alike(seed: int, rows: int, columns: int) -> None:
    q = quantised(seed, rows, columns)
    values = dequantise(q)
    for layout in SCALE_LAYOUTS.values():
        moved = q.with_layout(layout)
        assert moved.layout == layout
        assert torch.equal(moved.linear_scale_codes(), q.block_scale)
        assert torch.equal(dequantise(moved), values)
        back = moved.with_layout(LINEAR)
        assert torch.equal(back.block_scale, q.block_scale)
        if layout != LINEAR:
            assert nonzero_padding(moved.block_scale, layout, rows, columns // 16) == 0


def test_layouts_of_stacked_experts_are_padded_each(seed: int) -> None:
    values = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(seed))
    q = quantise(values, NVFP4, amax=values.abs().amax((-2, -1)))
    moved = q.with_layout(SWIZZLE_128X4)
    assert moved.block_scale.shape == (3, 512)
    assert torch.equal(dequantise(moved), dequantise(q))
    for expert in range(3):
        alone = quantise(values[expert], NVFP4).with_layout(SWIZZLE_128X4)
        assert torch.equal(alone.block_scale, moved.block_scale[expert])
        assert torch.equal(dequantise(alone), dequantise(q)[expert])


def test_from_one_swizzle_to_another(seed: int) -> None:
    q = quantised(seed)
    twice = q.with_layout(SWIZZLE_128X4).with_layout(SWIZZLE_8X4)
    assert torch.equal(twice.block_scale, q.with_layout(SWIZZLE_8X4).block_scale)


def test_directions_are_reciprocals(seed: int) -> None:
    q = quantised(seed)
    encoding = q.with_direction(ScaleDirection.ENCODE)
    assert encoding.tensor_scale is not None
    assert q.tensor_scale is not None
    assert torch.equal(encoding.tensor_scale, q.tensor_scale.reciprocal())
    assert torch.equal(encoding.encode_scale, encoding.tensor_scale)
    assert torch.equal(encoding.decode_scale, encoding.tensor_scale.reciprocal())
    # Dividing by the rounded reciprocal differs from multiplying by two roundings at most.
    error = (dequantise(encoding) - dequantise(q)).abs()
    assert bool((error <= 2.0**-22 * dequantise(q).abs()).all())
    assert q.with_direction(ScaleDirection.DECODE) is q


def test_a_format_without_tensor_scale_decodes_by_one(seed: int) -> None:
    q = quantised(seed, fmt=MXFP4)
    assert q.decode_scale.item() == 1.0
    assert q.encode_scale.item() == 1.0


def test_nibble_order_swaps_halves_and_nothing_else(seed: int) -> None:
    q = quantised(seed)
    swapped = q.with_nibble_order(NibbleOrder.HIGH_EVEN)
    assert torch.equal(swapped.codes, (q.codes >> 4) | (q.codes << 4))
    assert torch.equal(swapped.element_codes(), q.element_codes())
    assert torch.equal(dequantise(swapped), dequantise(q))
    assert torch.equal(swapped.with_nibble_order(NibbleOrder.LOW_EVEN).codes, q.codes)


def test_a_false_label_is_detected_in_the_values(seed: int) -> None:
    # The planted fault: right bytes under a wrong name decode to something else.
    q = quantised(seed, 128, 64)
    values = dequantise(q)
    assert q.tensor_scale is not None
    lies = {
        "nibble order": replace(q, nibble_order=NibbleOrder.HIGH_EVEN),
        "layout": replace(q, block_scale=q.block_scale.flatten(), layout=SWIZZLE_128X4),
        "direction": replace(q, direction=ScaleDirection.ENCODE),
    }
    for name, lie in lies.items():
        assert not torch.equal(dequantise(lie), values), name


# Mixing


def variants(seed: int) -> dict[str, QuantisedTensor]:
    """One tensor five times, each differing from the first in one aspect."""
    q = quantised(seed)
    return {
        "same": q,
        "format": quantised(seed, fmt=MXFP4),
        "dialect": quantised(seed, dialect=MODELOPT),
        "layout": q.with_layout(SWIZZLE_128X4),
        "direction": q.with_direction(ScaleDirection.ENCODE),
        "nibble_order": q.with_nibble_order(NibbleOrder.HIGH_EVEN),
    }


MIXTURES = [
    ("format", DtypeMismatch),
    ("dialect", DialectMismatch),
    ("layout", LayoutMismatch),
    ("direction", ScaleDirectionMismatch),
    ("nibble_order", LayoutMismatch),
]


@pytest.mark.parametrize(("aspect", "error"), MIXTURES)
def test_two_tensors_that_differ_in_one_aspect_are_refused(
    seed: int, aspect: str, error: type[Exception]
) -> None:
    first, other = variants(seed)["same"], variants(seed)[aspect]
    for pair in ((first, other), (other, first)):
        with pytest.raises(error, match=aspect):
            require_same(*pair)
        with pytest.raises(error, match=aspect):
            concatenate_rows(*pair)


@pytest.mark.parametrize(("aspect", "error"), MIXTURES)
def test_an_aspect_can_be_waived_by_name_only(
    seed: int, aspect: str, error: type[Exception]
) -> None:
    first, other = variants(seed)["same"], variants(seed)[aspect]
    waived = ("format", "direction", "nibble_order") if aspect == "format" else (aspect,)
    require_same(first, other, but=waived)
    with pytest.raises(error):
        require_same(first, other, but=tuple(name for name, _ in MIXTURES if name != aspect))
    with pytest.raises(InvalidArgument, match="Name an aspect"):
        require_same(first, other, but=("colour",))


@pytest.mark.parametrize(("aspect", "error"), MIXTURES)
def test_a_consumer_gets_what_it_reads_or_nothing(
    seed: int, aspect: str, error: type[Exception]
) -> None:
    first, other = variants(seed)["same"], variants(seed)[aspect]
    require(first, **{aspect: getattr(first, aspect)})
    with pytest.raises(error, match=aspect):
        require(other, **{aspect: getattr(first, aspect)})


def test_bare_tensors_are_refused_everywhere(seed: int) -> None:
    q = quantised(seed)
    pair: Any = (q.codes, q.block_scale)
    bare: list[Any] = [pair, q.codes, None]
    for wrong in bare:
        with pytest.raises(InvalidArgument, match="QuantisedTensor"):
            dequantise(wrong)
        with pytest.raises(InvalidArgument, match="QuantisedTensor"):
            require(wrong, format=NVFP4)
        with pytest.raises(InvalidArgument, match="QuantisedTensor"):
            concatenate_rows(q, wrong)
    with pytest.raises(InvalidArgument, match="argument 0"):
        require_same(*pair)


def test_torch_functions_refuse_it(seed: int) -> None:
    q: Any = quantised(seed)
    attempts: dict[str, Callable[[], object]] = {
        "add": lambda: torch.add(q, q),
        "cat": lambda: torch.cat([q, q]),
        "matmul": lambda: torch.matmul(torch.ones(1, 5), q),
        "operator": lambda: torch.ones(5, 48) * q,
    }
    for name, attempt in attempts.items():
        with pytest.raises(InvalidArgument, match="dequantise") as caught:
            attempt()
        assert caught.value.name == "argument of a torch function", name
    with pytest.raises(TypeError):
        q + q
    with pytest.raises(TypeError):
        _codes, _scale = q


# Stacking


@pytest.mark.parametrize("layout", SCALE_LAYOUTS.values(), ids=lambda layout: layout.name)
def test_rows_stack_as_values_do(seed: int, layout: Any) -> None:
    values = torch.randn(13, 96, generator=torch.Generator().manual_seed(seed))
    amax = values.abs().max()
    parts = [quantise(part, NVFP4, amax=amax) for part in (values[:5], values[5:])]
    whole = concatenate_rows(*(part.with_layout(layout) for part in parts))
    assert whole.layout == layout
    expected = quantise(values, NVFP4, amax=amax)
    assert torch.equal(whole.codes, expected.codes)
    assert torch.equal(whole.block_scale, expected.with_layout(layout).block_scale)
    assert torch.equal(dequantise(whole), dequantise(expected))


def test_parts_with_two_tensor_scales_are_refused(seed: int) -> None:
    first, second = quantised(seed), quantised(seed + 1)
    with pytest.raises(InvalidArgument, match="one common scale"):
        concatenate_rows(first, second)


def test_parts_of_other_widths_are_refused(seed: int) -> None:
    with pytest.raises(ShapeMismatch, match="Only rows"):
        concatenate_rows(quantised(seed, columns=96), quantised(seed, columns=112))
    with pytest.raises(InvalidArgument, match="at least one"):
        concatenate_rows()


@pytest.mark.parametrize("fmt", [FP8_128X128_F32, FP8_128X128_UE8M0], ids=lambda fmt: fmt.name)
def test_blocks_of_rows_stack_only_when_whole(seed: int, fmt: BlockFormat) -> None:
    whole, cut = quantised(seed, 128, 128, fmt=fmt), quantised(seed, 100, 128, fmt=fmt)
    stacked = concatenate_rows(whole, cut)
    assert stacked.shape == (228, 128)
    assert torch.equal(dequantise(stacked)[128:], dequantise(cut))
    with pytest.raises(ShapeMismatch, match="a multiple of 128"):
        concatenate_rows(cut, whole)


def test_the_dialect_of_a_canonical_tensor_is_the_default(seed: int) -> None:
    q = quantised(seed)
    require(
        q,
        format=NVFP4,
        dialect=CANONICAL,
        layout=LINEAR,
        direction=ScaleDirection.DECODE,
        nibble_order=NibbleOrder.LOW_EVEN,
    )


# --------------------------------------------------------------------------------------------------
# The record of one parameter: plain or quantised, replaceable by field, decoded once.


def weight_quantised(seed: int) -> Weight:
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    return Weight.of(quantise(values, NVFP4), torch.tensor(0.25))


def test_plain_weights_are_their_values() -> None:
    value = torch.arange(6.0).reshape(2, 3).bfloat16()
    weight = Weight(value=value)
    assert weight.values(torch.bfloat16) is value
    assert not weight.is_quantised
    assert weight.shape == (2, 3)
    wide = weight.values(torch.float64)
    assert torch.equal(wide, value.double())
    assert weight.values(torch.float64) is wide


def test_codes_stand_for_their_values(seed: int) -> None:
    weight = weight_quantised(seed)
    assert weight.is_quantised
    assert weight.shape == (8, 64)
    assert torch.equal(weight.values(torch.float64), dequantise(weight.quantised(), torch.float64))
    assert weight.values(torch.float32) is weight.values(torch.float32)
    assert float(weight.input_scale or 0) == 0.25


def test_a_replaced_field_is_read(seed: int) -> None:
    weight = weight_quantised(seed)
    before = weight.values(torch.float32).clone()
    assert weight.tensor_scale is not None
    weight.tensor_scale = weight.tensor_scale * 2
    assert torch.equal(weight.values(torch.float32), before * 2)
    weight.tensor_scale = weight.tensor_scale / 2
    assert torch.equal(weight.values(torch.float32), before)


def test_a_field_written_to_in_place_is_read(seed: int) -> None:
    weight = weight_quantised(seed)
    before = weight.values(torch.float32).clone()
    assert weight.codes is not None
    weight.codes ^= 0x88  # both signs of every byte
    assert torch.equal(weight.values(torch.float32), -before)
    plain = Weight(value=torch.ones(2, 2))
    assert float(plain.values(torch.float64).sum()) == 4
    assert plain.value is not None
    plain.value.zero_()
    assert float(plain.values(torch.float64).sum()) == 0


def test_under_inference_nothing_is_kept(seed: int) -> None:
    with torch.inference_mode():
        weight = weight_quantised(seed)
        before = weight.values(torch.float32).clone()
        assert weight.codes is not None
        weight.codes ^= 0x88
        assert torch.equal(weight.values(torch.float32), -before)


def test_the_reading_belongs_to_the_storage(seed: int) -> None:
    weight = weight_quantised(seed)
    assert weight.storage is not None
    encoded = replace(weight.storage, direction=ScaleDirection.ENCODE)
    inverted = replace(weight, storage=encoded, _decoded={})
    assert weight.tensor_scale is not None
    ratio = inverted.values(torch.float64) / weight.values(torch.float64)
    expected = weight.tensor_scale.double() ** -2
    assert torch.allclose(ratio[torch.isfinite(ratio)], expected)  # 1/s for s: off by its square


def test_what_does_not_fit_is_refused_when_it_is_read(seed: int) -> None:
    weight = weight_quantised(seed)
    assert weight.block_scale is not None
    weight.block_scale = weight.block_scale[:4]
    with pytest.raises(ShapeMismatch, match="block_scale"):
        weight.values(torch.float32)
    weight.block_scale = None
    with pytest.raises(InvalidArgument, match="without codes"):
        weight.values(torch.float32)
    with pytest.raises(InvalidArgument, match="empty"):
        Weight().values(torch.float32)
    with pytest.raises(InvalidArgument, match="without codes"):
        Weight(value=torch.zeros(2, 16)).quantised()


def test_codes_that_are_to_be_read_otherwise_are(seed: int) -> None:
    weight = weight_quantised(seed)
    before = weight.values(torch.float32).clone()
    assert weight.storage is not None
    weight.storage = replace(weight.storage, nibble_order=NibbleOrder.HIGH_EVEN)
    swapped = before.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    assert torch.equal(weight.values(torch.float32), swapped)


def test_writing_into_the_values_changes_no_weight(seed: int) -> None:
    weight = weight_quantised(seed)
    values = weight.values(torch.float32)
    before = values.clone()
    values.zero_()
    assert torch.equal(weight.values(torch.float32), before)


@pytest.mark.parametrize("layout", SCALE_LAYOUTS.values(), ids=SCALE_LAYOUTS)
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4, FP8_128X128_F32], ids=lambda fmt: fmt.name)
def test_rows_decode_to_the_same_values_as_the_whole(
    seed: int, fmt: BlockFormat, layout: ScaleLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantised(seed, 300, 256, fmt=fmt)
    kept = Weight.of(whole)
    first = kept.rows(slice(0, 9), torch.float64)
    assert first.data_ptr() == kept.values(torch.float64).data_ptr()
    monkeypatch.setattr(weights, "_SMALL", 0)  # a large weight is not decoded whole
    if fmt.scale.bits < 32:
        whole = whole.with_layout(layout)
    weight, values = Weight.of(whole), dequantise(whole, torch.float64)
    for part in (slice(0, 128), slice(128, 300), slice(128, 1000), slice(3, 131), slice(5, 5)):
        assert torch.equal(weight.rows(part, torch.float64), values[part])
    assert whole.rows(slice(128, 256)) is not None
    assert (whole.rows(slice(3, 131)) is None) == (fmt.block[0] > 1)


def test_rows_of_a_stack_keep_their_own_scales(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_SMALL", 0)
    values = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(seed))
    whole = quantise(values, NVFP4, amax=values.abs().amax((1, 2))).with_layout(SWIZZLE_128X4)
    part = Weight.of(whole).rows(slice(1, 2), torch.float64)
    assert torch.equal(part, dequantise(whole, torch.float64)[1:2])
