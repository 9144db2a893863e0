"""The quantiser against definitions written out for one block, in NumPy float32 and the codec."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, Refused, ShapeMismatch
from degarble.harness.formats import codec
from degarble.harness.formats.codec import decode_array, encode_array, unpack_nibbles
from degarble.harness.formats.dialects import CANONICAL, DIALECTS, MODELOPT
from degarble.harness.formats.fast import nvfp4 as fast_nvfp4
from degarble.harness.formats.layouts import SWIZZLE_128X4
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    E2M1,
    E4M3,
    FP8_1X128_F32,
    FP8_1X128_UE8M0,
    FP8_128X128_F32,
    FP8_128X128_UE8M0,
    MXFP4,
    MXFP8,
    NVFP4,
    UE8M0,
    NanRule,
    NibbleOrder,
    Rounding,
    ScaleDirection,
    TableFormat,
)
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.suites.formats.block_cases import (
    IMPLEMENTATIONS,
    edge_cases,
    encode_nvfp4,
    implementation,
    merged_nan,
    ordinary_cases,
)

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.formats.dialects import Dialect
    from degarble.harness.formats.number_formats import BlockFormat


# --------------------------------------------------------------------------------------------------
# The quantiser against definitions written out for one block, in NumPy float32 and the codec.
#
# Canonical NVFP4 goes through one suite in three implementations: the definition, the compiled twin
# and the scalar text that runs inside kernels.

F = np.float32
ONE = F(1)
LARGEST = F(np.finfo(np.float32).max)


# Canonical NVFP4


def block_by_hand(block: list[float], encode: np.float32) -> tuple[int, list[int]]:
    """Scale byte and codes of 16 numbers, as Transformer Engine's exact path has them."""
    amax = F(max([0.0, *(abs(x) for x in block if x == x)]))  # noqa: PLR0124  NaN is unequal
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scale_code = codec.encode(float(amax * (encode * (ONE / F(6)))), E4M3)
        scale = F(codec.decode(scale_code, E4M3))
        factor = min(ONE / (scale * (ONE / encode)), LARGEST)
        scaled = [float(F(x) * factor) for x in block]
    return scale_code, [codec.encode(x, E2M1, nan=NanRule.LARGEST) for x in scaled]


def tensor_by_hand(values_MK: Tensor, encode: np.float32) -> tuple[list[int], list[int]]:
    scale_codes, codes = [], []
    for block in values_MK.float().reshape(-1, 16).tolist():
        scale_code, block_codes = block_by_hand(block, encode)
        scale_codes.append(scale_code)
        codes += block_codes
    return scale_codes, codes


def encode_scale_by_hand(values_MK: Tensor) -> np.float32:
    amax = F(max(abs(x) for x in values_MK.float().flatten().tolist() if x == x))  # noqa: PLR0124
    with np.errstate(divide="ignore", over="ignore"):
        encode = min(F(2688) / amax, LARGEST)
    return ONE if amax == 0 or encode == 0 else encode


def assert_canonical(name: str, values_MK: Tensor, encode: np.float32 | None = None) -> None:
    given = None if encode is None else torch.tensor(encode)
    codes, block_scale, decode_scale = encode_nvfp4(name, values_MK, given)
    expected_encode = encode_scale_by_hand(values_MK) if encode is None else encode
    scale_codes, element_codes = tensor_by_hand(values_MK, expected_encode)
    assert block_scale.flatten().tolist() == scale_codes
    assert unpack_nibbles(codes).flatten().tolist() == element_codes
    assert decode_scale.item() == ONE / expected_encode


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_canonical_equals_the_hand_on_ordinary_tensors(name: str, seed: int) -> None:
    for values in ordinary_cases(seed).values():
        assert_canonical(name, values[:8, :64])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", edge_cases())
def test_canonical_equals_the_hand_on_edge_tensors(name: str, case: str) -> None:
    assert_canonical(name, edge_cases()[case])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("encode", [1.0, 26.88, 2688.0, 1e-30, 1e30, 1e-4, float(LARGEST)])
def test_canonical_equals_the_hand_under_a_given_scale(name: str, encode: float, seed: int) -> None:
    values = ordinary_cases(seed)["spread_fp32"][:4, :64].contiguous()
    assert_canonical(name, values, F(encode))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_ties_go_to_the_even_code(name: str) -> None:
    # a = 6 under G = 1 gives a scale of exactly 1, so values are what is rounded to E2M1.
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    values = torch.tensor([6.0, *ties, -6.0, *(-x for x in ties)])[None, :]
    codes, block_scale, _ = encode_nvfp4(name, values, torch.tensor(1.0))
    assert decode_array(block_scale, E4M3).tolist() == [[1.0]]
    positive = [7, 0, 2, 2, 4, 4, 6, 6]  # facts/hardware: 0.25 to 0, 0.75 and 1.25 to 1, and so on
    assert unpack_nibbles(codes)[0].tolist() == [*positive, *(code + 8 for code in positive)]
    nudged = torch.nextafter(values, torch.tensor(torch.inf)).clamp(max=6.0)
    codes, _, _ = encode_nvfp4(name, nudged, torch.tensor(1.0))
    assert unpack_nibbles(codes)[0, :8].tolist() == [7, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_scale_byte_rounds_to_even(name: str) -> None:
    # Blocks whose amax lies at, just under and just over each midpoint of neighbouring scales.
    scales = decode_array(torch.arange(0x7F, dtype=torch.uint8), E4M3).double()
    middle = 6 * (scales[1:] + scales[:-1]) / 2
    middle = middle.float()  # exact: at most 5 significant bits times 6
    infinity = torch.tensor(torch.inf)
    below, above = torch.nextafter(middle, -infinity), torch.nextafter(middle, infinity)
    for amax, offset in ((below, 0), (above, 1)):
        values = torch.zeros(len(amax), 16)
        values[:, 7] = -amax
        _, block_scale, _ = encode_nvfp4(name, values, torch.tensor(1.0))
        # a * float32(1/6) is 1.5e-8 too large: beside a midpoint it may land on it or beyond.
        raw = amax * torch.tensor(ONE / F(6))
        expected = encode_array(raw, E4M3)
        assert torch.equal(block_scale[:, 0], expected)
        ideal = torch.arange(0x7E, dtype=torch.uint8) + offset
        wrong = (block_scale[:, 0] != ideal).sum().item()
        assert wrong == 0 if offset else wrong <= len(amax) // 2


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_scale_that_is_too_large_saturates(name: str, seed: int) -> None:
    values = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)) + 4.0
    codes, block_scale, _ = encode_nvfp4(name, values, torch.tensor(1e30))
    assert (block_scale == 0x7E).all()
    assert (unpack_nibbles(codes) == 7).all()
    codes, block_scale, _ = encode_nvfp4(name, -values, torch.tensor(1e30))
    assert (block_scale == 0x7E).all()
    assert (unpack_nibbles(codes) == 15).all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_no_rows_and_no_columns(name: str) -> None:
    for shape in ((0, 32), (3, 0)):
        codes, block_scale, decode_scale = encode_nvfp4(name, torch.zeros(shape), torch.ones(()))
        assert codes.shape == (shape[0], shape[1] // 2)
        assert block_scale.shape == (shape[0], shape[1] // 16)
        assert decode_scale.item() == 1.0
    assert dequantise(quantise(torch.zeros(0, 32), NVFP4)).shape == (0, 32)


@pytest.mark.parametrize("name", ["definition", "fast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_rounds_as_stated(name: str, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = quantise(torch.randn(16, 256, generator=generator), NVFP4)
    every_byte = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    q = replace(q, block_scale=every_byte, tensor_scale=torch.tensor(0.037202377))
    with implementation(name):
        got = dequantise(q, dtype)
    scale = decode_array(every_byte, E4M3).repeat_interleave(16, dim=-1).numpy()
    element = decode_array(q.element_codes(), E2M1).numpy()
    expected = torch.from_numpy((element * scale) * F(0.037202377)).to(dtype)
    assert torch.equal(got.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
    assert torch.equal(got.isnan(), expected.isnan())
    exact = element.astype(np.float64) * scale * np.float64(F(0.037202377))
    wide = dequantise(q, torch.float64).numpy()
    assert np.array_equal(wide, exact, equal_nan=True)


def test_large_tensors_take_the_compiled_twin_and_agree(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("largest_magnitude", "quantise_nvfp4", "dequantise_nvfp4"):
        original = getattr(fast_nvfp4, name)

        def spy(*args: Any, _name: str = name, _original: Any = original) -> Any:
            calls.append(_name)
            return _original(*args)

        monkeypatch.setattr(fast_nvfp4, name, spy)
    values = torch.randn(130, 1024, generator=torch.Generator().manual_seed(seed)).bfloat16()
    fast = quantise(values, NVFP4)
    fast_values = dequantise(fast, torch.bfloat16)
    assert calls == ["largest_magnitude", "quantise_nvfp4", "dequantise_nvfp4"]
    swizzled = dequantise(fast.with_layout(SWIZZLE_128X4), torch.bfloat16)
    assert calls.count("dequantise_nvfp4") == 2
    calls.clear()
    with implementation("definition"):
        slow = quantise(values, NVFP4)
        slow_values = dequantise(slow, torch.bfloat16)
    assert not calls
    for field in ("codes", "block_scale", "tensor_scale"):
        assert torch.equal(getattr(fast, field), getattr(slow, field))
    assert torch.equal(fast_values, slow_values)
    assert torch.equal(swizzled, slow_values)


@pytest.mark.parametrize(
    "unsuited",
    ["dialect", "dtype", "strides", "scale per expert", "direction", "nibbles", "output"],
)
def test_what_the_twin_cannot_do_takes_the_definition(
    unsuited: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(seed))
    encoded = {
        "dialect": lambda: quantise(values, NVFP4, MODELOPT),
        "dtype": lambda: quantise(values.half(), NVFP4),
        "strides": lambda: quantise(values.transpose(0, 1), NVFP4),
        "scale per expert": lambda: quantise(values, NVFP4, amax=values.abs().amax((-2, -1))),
    }
    q = quantise(values, NVFP4)
    decoded = {
        "direction": lambda: dequantise(q.with_direction(ScaleDirection.ENCODE)),
        "nibbles": lambda: dequantise(q.with_nibble_order(NibbleOrder.HIGH_EVEN)),
        "output": lambda: dequantise(q, torch.float64),
    }

    def refuse(*_: object) -> None:
        pytest.fail("the compiled twin was called")

    monkeypatch.setattr(fast_nvfp4, "quantise_nvfp4", refuse)
    monkeypatch.setattr(fast_nvfp4, "dequantise_nvfp4", refuse)
    calls: dict[str, Any] = {**encoded, **decoded}
    with implementation("fast"):
        assert tuple(calls[unsuited]().shape)[-1] == 64


@pytest.mark.parametrize("name", ["definition", "fast"])
def test_a_parameter_is_quantised_like_its_values(name: str, seed: int) -> None:
    values = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))
    with implementation(name):
        q = quantise(torch.nn.Parameter(values), NVFP4)
        assert torch.equal(q.codes, quantise(values, NVFP4).codes)
        assert q.tensor_scale is not None
        assert not q.tensor_scale.requires_grad


# Tensor scales that are given


def test_a_given_scale_is_stored_as_the_dialect_stores_it(seed: int) -> None:
    values = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))
    scale = torch.tensor(0.0123)
    for dialect in DIALECTS.values():
        rule = dialect.rule_for(NVFP4)
        by_decode = quantise(values, NVFP4, dialect, decode_scale=scale)
        by_encode = quantise(values, NVFP4, dialect, encode_scale=scale)
        assert by_decode.direction is by_encode.direction is rule.stored_direction
        assert by_decode.tensor_scale is not None
        assert by_encode.tensor_scale is not None
        decodes = rule.stored_direction is ScaleDirection.DECODE
        assert by_decode.tensor_scale == (scale if decodes else scale.reciprocal())
        assert by_encode.tensor_scale == (scale.reciprocal() if decodes else scale)


def test_a_shared_amax_is_that_of_the_whole(seed: int) -> None:
    values = torch.randn(6, 32, generator=torch.Generator().manual_seed(seed))
    whole = quantise(values, NVFP4)
    part = quantise(values[2:4], NVFP4, amax=values.abs().max())
    assert torch.equal(part.codes, whole.codes[2:4])
    assert torch.equal(part.block_scale, whole.block_scale[2:4])


def test_a_scale_per_expert_equals_experts_alone(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = (
        torch.randn(3, 4, 32, generator=generator) * torch.tensor([1.0, 30.0, 0.01])[:, None, None]
    )
    for dialect in DIALECTS.values():
        stacked = quantise(values, NVFP4, dialect, amax=values.abs().amax((-2, -1)))
        for expert in range(3):
            alone = quantise(values[expert], NVFP4, dialect)
            assert torch.equal(stacked.codes[expert], alone.codes)
            assert torch.equal(stacked.block_scale[expert], alone.block_scale)
            assert torch.equal(dequantise(stacked)[expert], dequantise(alone))


ONES = torch.ones(())


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"decode_scale": ONES, "encode_scale": ONES}, InvalidArgument, "at most one"),
        ({"amax": ONES, "encode_scale": ONES}, InvalidArgument, "at most one"),
        ({"encode_scale": ONES.bfloat16()}, DtypeMismatch, "fp32"),
        ({"decode_scale": torch.ones(1)}, ShapeMismatch, "broadcast"),
        ({"amax": torch.ones(4, 1)}, ShapeMismatch, "broadcast"),
        ({"encode_scale": -ONES}, InvalidArgument, "not negative"),
    ],
)
def test_scales_that_cannot_be_meant_are_refused(
    arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        quantise(torch.ones(4, 32), NVFP4, **arguments)


@pytest.mark.parametrize("name", ["amax", "decode_scale", "encode_scale"])
def test_a_format_without_tensor_scale_refuses_one(name: str) -> None:
    with pytest.raises(InvalidArgument, match="has no tensor scale"):
        quantise(torch.ones(4, 32), MXFP4, **_given(name))


def _given(name: str) -> dict[str, Any]:
    return {name: ONES}


def test_other_dtypes_and_shapes_are_refused() -> None:
    for dtype in (torch.float64, torch.int32, torch.uint8, torch.float8_e4m3fn):
        with pytest.raises(DtypeMismatch, match="values"):
            quantise(torch.ones(1, 16).to(dtype), NVFP4)
    with pytest.raises(ShapeMismatch, match="multiple of 16"):
        quantise(torch.ones(4, 24), NVFP4)
    with pytest.raises(ShapeMismatch, match=r"\[1, K\]"):
        quantise(torch.ones(16), NVFP4)
    q = quantise(torch.ones(1, 16), NVFP4)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        with pytest.raises(DtypeMismatch, match="float64"):
            dequantise(q, dtype)


def test_nan_bytes_are_compared_as_one() -> None:
    assert merged_nan(torch.tensor([0x7E, 0x7F, 0xFF], dtype=torch.uint8)).tolist() == [
        0x7E,
        0x7F,
        0x7F,
    ]


@pytest.mark.parametrize("name", ["amax", "decode_scale", "encode_scale"])
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)
def test_a_given_scale_that_is_no_number_is_refused(dialect: Dialect, name: str) -> None:
    """Canonical would take the smaller of NaN and the largest float32, and write garbage."""
    scales = torch.tensor([1.0, torch.nan])
    with pytest.raises(InvalidArgument, match=f"{name} = nan"):
        quantise(torch.ones(2, 1, 16), NVFP4, dialect, **{name: scales})


def test_names_and_lists_in_place_of_records_and_tensors_are_refused() -> None:
    values: Any = torch.ones(1, 16)
    with pytest.raises(InvalidArgument, match="block_format"):
        quantise(values, cast("Any", "NVFP4"))
    with pytest.raises(InvalidArgument, match="dialect_named"):
        quantise(values, NVFP4, cast("Any", "modelopt"))
    with pytest.raises(DtypeMismatch, match="values = 'list'"):
        quantise(values.tolist(), NVFP4)
    with pytest.raises(DtypeMismatch, match="amax = 'float'"):
        quantise(values, NVFP4, amax=cast("Any", 3.0))


# The reciprocal of such a scale is infinite and a sixth of it is 0: their products are NaN.
@pytest.mark.parametrize("encode", [1e-45, 1e-41, 2.0**-127, 2.0**-126])
def test_both_implementations_agree_on_scales_at_the_end_of_float32(encode: float) -> None:
    values = torch.linspace(-1, 1, 64).repeat(4, 1)
    values[1] = torch.inf
    values[2] = 3e38
    scale = torch.tensor(encode)
    with implementation("definition"):
        slow = quantise(values, NVFP4, encode_scale=scale)
    with implementation("fast"):
        fast = quantise(values, NVFP4, encode_scale=scale)
    assert torch.equal(fast.codes, slow.codes)
    assert torch.equal(fast.block_scale, slow.block_scale)


def test_a_given_scale_is_the_callers_to_change() -> None:
    scale = torch.nn.Parameter(torch.tensor(0.5))
    tensor = quantise(torch.ones(1, 16), NVFP4, decode_scale=scale)
    with torch.no_grad():
        scale.mul_(4)
    assert tensor.tensor_scale is not None
    assert float(tensor.tensor_scale) == 0.5
    assert not tensor.tensor_scale.requires_grad


# --------------------------------------------------------------------------------------------------
# MX and FP8 blocks against the rules of DeepSeek-V4's kernels, written out for one block.


def power_of_two_above(number: np.float32) -> np.float32:
    """2 ** ceil(log2(number)) from the bits, as DeepSeek's kernel computes it."""
    bits = int(number.view(np.uint32))
    exponent = (bits >> 23) - 127 + (1 if bits & 0x7FFFFF else 0)
    return F(2.0**exponent)


FLOORS = {"MXFP4": F(6 * 2.0**-126), "MXFP8": F(0), "FP8": F(1e-4)}


def fp_block_by_hand(block: list[float], fmt: BlockFormat) -> tuple[np.float32, list[int]]:
    """Scale and codes of one block, as DeepSeek-V4's act_quant and fp4_act_quant have them."""
    floor = FLOORS.get(fmt.name, FLOORS["FP8"])
    amax = max(F(max(abs(x) for x in block)), floor)
    scale = amax * (ONE / F(fmt.element.largest))
    if fmt.scale == UE8M0:
        scale = max(power_of_two_above(scale), F(2.0**-127)) if scale else F(2.0**-127)
    bound = fmt.element.largest
    ratios = [min(max(float(F(x) / scale), -bound), bound) for x in block]
    return scale, [codec.encode(ratio, fmt.element) for ratio in ratios]


@pytest.mark.parametrize(
    "fmt", [MXFP4, MXFP8, FP8_1X128_F32, FP8_1X128_UE8M0], ids=lambda fmt: fmt.name
)
def test_rows_of_blocks_equal_the_hand(fmt: BlockFormat, seed: int) -> None:
    width = fmt.block[1]
    for case, values in ordinary_cases(seed).items():
        if values.shape[-1] % width:
            continue
        values = values[:4]  # noqa: PLW2901
        q = quantise(values, fmt)
        scales, codes = [], []
        for block in values.float().reshape(-1, width).tolist():
            scale, block_codes = fp_block_by_hand(block, fmt)
            scales.append(float(scale))
            codes += block_codes
        assert q.scale_values().flatten().tolist() == scales, case
        assert q.element_codes().flatten().tolist() == codes, case


@pytest.mark.parametrize("fmt", [FP8_128X128_F32, FP8_128X128_UE8M0], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (129, 140)])
def test_square_blocks_equal_the_hand_even_when_cut_off(
    fmt: BlockFormat, shape: tuple[int, int], seed: int
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    q = quantise(values, fmt)
    scales, codes = q.scale_values(), q.element_codes()
    for row in range(0, shape[0], 128):
        for column in range(0, shape[1], 128):
            block = values[row : row + 128, column : column + 128]
            scale, expected = fp_block_by_hand(block.flatten().tolist(), fmt)
            assert scales[row // 128, column // 128].item() == scale
            got = codes[row : row + 128, column : column + 128].flatten().tolist()
            assert got == expected
    assert q.codes.shape == shape
    assert dequantise(q).shape == shape


@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=lambda fmt: fmt.name)
def test_zeros_of_every_format(fmt: BlockFormat) -> None:
    q = quantise(torch.zeros(128, 128), fmt)
    assert (q.element_codes() == 0).all()
    assert (dequantise(q) == 0).all()
    expected = {
        "NVFP4": 0.0,
        "MXFP4": 2.0**-126,  # the floor 6 * 2**-126, over 6
        "MXFP8": 2.0**-127,  # byte 0: there is no smaller scale
        "FP8_128X128_F32": float(F(1e-4) * (ONE / F(448))),
        "FP8_1X128_F32": float(F(1e-4) * (ONE / F(448))),
        "FP8_128X128_UE8M0": 2.0**-22,
        "FP8_1X128_UE8M0": 2.0**-22,
    }
    # Formats whose scale is the only one of a row, a group or the matrix: 1 where all is zero.
    assert set(q.scale_values().flatten().tolist()) == {expected.get(fmt.name, 1.0)}


@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=lambda fmt: fmt.name)
def test_nan_does_not_move_a_scale(fmt: BlockFormat, seed: int) -> None:
    values = torch.randn(128, 128, generator=torch.Generator().manual_seed(seed))
    poisoned = values.clone()
    poisoned[5, 7] = torch.nan
    values[5, 7] = 0.0
    if isinstance(fmt.element, TableFormat):
        with pytest.raises(InvalidArgument, match=r"values\[5, 7\]"):
            quantise(poisoned, fmt)
        return
    before, after = quantise(values, fmt), quantise(poisoned, fmt)
    assert torch.equal(before.block_scale, after.block_scale)
    assert after.element_codes()[5, 7].item() == (7 if fmt.packed else 0x7F)
    assert (before.element_codes() != after.element_codes()).sum().item() == 1


def test_infinities_of_the_other_formats() -> None:
    values = torch.ones(1, 128)
    values[0, 3] = torch.inf
    saturated = quantise(values, FP8_1X128_UE8M0)
    assert saturated.block_scale.tolist() == [[0xFE]]
    assert saturated.codes[0, 3].item() == 0x7E
    poisoned = quantise(values, FP8_1X128_F32)
    assert poisoned.block_scale.isinf().all()
    assert dequantise(poisoned).isnan().all()


def test_a_power_of_two_is_not_rounded_up() -> None:
    # float32(1/448) lies above 1/448, so 448 * 2**k times it must still give 2**k exactly.
    for fmt, largest in ((FP8_1X128_UE8M0, 448.0), (MXFP8, 448.0), (MXFP4, 6.0)):
        values = torch.zeros(3, 128)
        values[:, 0] = largest * torch.tensor([0.5, 1.0, 2.0])
        scale = quantise(values, fmt).scale_values()[:, 0]
        assert scale.tolist() == [0.5, 1.0, 2.0], fmt.name
        values[:, 0] *= 1 + 2.0**-20
        assert quantise(values, fmt).scale_values()[:, 0].tolist() == [1.0, 2.0, 4.0], fmt.name


def test_the_scale_rounding_is_detected_by_these_checks(seed: int) -> None:
    # The planted fault: floor instead of ceiling must differ from the hand.
    rule = CANONICAL.rule_for(MXFP8)
    floored = replace(
        CANONICAL, rules=(replace(rule, scale_rounding=Rounding.DOWN),), name="floored"
    )
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    wrong = quantise(values, MXFP8, floored)
    assert not torch.equal(wrong.block_scale, quantise(values, MXFP8).block_scale)
    assert (wrong.element_codes() & 0x7F == 0x7E).any(), "too small a scale saturates"


# --------------------------------------------------------------------------------------------------
# The definition on a CUDA device returns the bytes of the CPU: every dialect, every format.
#
# Division, reciprocal and conversion are IEEE operations on both, and no constant is a Python
# number (torch would divide by one through its reciprocal on CUDA), so anything but equality is a
# finding.


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_on_the_device(name: str, seed: int) -> None:
    for case, values in {**ordinary_cases(seed), **edge_cases()}.items():
        try:
            ours = quantise(values, NVFP4, DIALECTS[name])
        except Refused as refusal:
            with pytest.raises(type(refusal)):
                quantise(values.cuda(), NVFP4, DIALECTS[name])
            continue
        theirs = quantise(values.cuda(), NVFP4, DIALECTS[name])
        assert torch.equal(theirs.codes.cpu(), ours.codes), case
        assert torch.equal(theirs.block_scale.cpu(), ours.block_scale), case
        assert ours.tensor_scale is not None
        assert theirs.tensor_scale is not None
        scales = (ours.tensor_scale, theirs.tensor_scale.cpu())
        assert torch.equal(*(scale.nan_to_num(nan=-1.0) for scale in scales)), case


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_format_round_trips(fmt: BlockFormat, dtype: torch.dtype, seed: int) -> None:
    values = torch.randn(256, 1024, generator=torch.Generator().manual_seed(seed))
    with implementation("definition"):
        ours = quantise(values, fmt)
        theirs = quantise(values.cuda(), fmt)
        assert torch.equal(theirs.codes.cpu(), ours.codes)
        assert torch.equal(theirs.block_scale.cpu(), ours.block_scale)
        assert torch.equal(dequantise(theirs, dtype).cpu(), dequantise(ours, dtype))
