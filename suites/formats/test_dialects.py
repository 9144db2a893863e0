"""The edge table of the dialects, as in docs/dialects.md, and each scale rule against NumPy."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import DialectMismatch, InvalidArgument, UnknownName
from degarble.harness.formats.dialects import (
    CANONICAL,
    COMPRESSED_TENSORS,
    DIALECTS,
    FLASHINFER_EXACT,
    FLASHINFER_FAST,
    MODELOPT,
    TORCHAO,
    TORCHAO_ONE_LEVEL,
    VLLM_FAST,
    BlockRule,
    BlockScaleRule,
    Dialect,
    Guard,
    TensorScaleRule,
    ValueRule,
    dialect_named,
)
from degarble.harness.formats.number_formats import BLOCK_FORMATS, MXFP4, NVFP4, ScaleDirection
from degarble.harness.formats.quantise import QuantisedTensor, dequantise, quantise
from degarble.harness.formats.scale_rules import BLOCK_SCALE, TENSOR_SCALE, VALUE, TensorScales

if TYPE_CHECKING:
    from numpy.typing import NDArray


# --------------------------------------------------------------------------------------------------
# The edge table of the dialects, written out; docs/dialects.md repeats it and is compared.

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "dialects.md"

# One tensor with A = 100. Block 0 holds 100; block 1 zeros; block 2 is tiny: 1e-4, 0, -1e-4 and so
# on. 1e-4 * 2688 / 100 / 6 = 0.00045 lies under half of the smallest E4M3 value, 2**-9 / 2.
TINY = 1e-4

# dialect: scale byte of the zero block; of the tiny block; codes of +tiny, 0, -tiny, -0 in it;
# value that +tiny decodes to
EDGES: dict[str, tuple[int, int, tuple[int, int, int, int], float]] = {
    "canonical": (0x00, 0x00, (7, 0, 15, 8), 0.0),
    "flashinfer_exact": (0x00, 0x00, (7, 7, 15, 7), 0.0),  # 0 * infinity is NaN, NaN becomes +6
    "flashinfer_fast": (0x00, 0x00, (7, 7, 15, 7), 0.0),
    "vllm_fast": (0x00, 0x00, (0, 0, 8, 8), 0.0),
    "modelopt": (0x38, 0x01, (3, 0, 11, 0), 1.09e-4),
    "compressed_tensors": (0x20, 0x20, (0, 0, 8, 0), 0.0),
    "torchao": (0x08, 0x08, (0, 0, 8, 8), 0.0),
    "torchao_one_level": (0x08, 0x08, (0, 0, 8, 8), 0.0),
}


def edge_tensor() -> torch.Tensor:
    values = torch.zeros(3, 16)
    values[0, 0] = 100.0
    values[2] = torch.tensor([TINY, 0.0, -TINY, -0.0]).repeat(4)
    return values


@pytest.mark.parametrize("name", DIALECTS)
def test_the_edge_table(name: str) -> None:
    zero_byte, tiny_byte, codes, decoded = EDGES[name]
    q = quantise(edge_tensor(), NVFP4, DIALECTS[name])
    assert q.block_scale[1].tolist() == [zero_byte]
    assert q.block_scale[2].tolist() == [tiny_byte]
    assert tuple(q.element_codes()[2, :4].tolist()) == codes
    assert dequantise(q)[2, 0].item() == pytest.approx(decoded, rel=5e-3)
    assert (dequantise(q)[1] == 0).all()


def test_a_changed_fact_changes_the_table() -> None:
    # The planted fault: each fact that the table rests on, changed alone, must show in it.
    changes: dict[str, dict[str, Any]] = {
        "canonical": {"guard": Guard.ZERO_SCALE},
        "modelopt": {"scale_low": 2.0**-6},
        "compressed_tensors": {"zero_scale_after": None},
        "vllm_fast": {"guard": Guard.NONE},
        "torchao": {"scale_low": 0.0},
    }
    for name, change in changes.items():
        dialect = DIALECTS[name]
        altered = replace(dialect, rules=(replace(dialect.rule_for(NVFP4), **change),))
        before, after = (quantise(edge_tensor(), NVFP4, d) for d in (dialect, altered))
        same = torch.equal(before.codes, after.codes)
        assert not (same and torch.equal(before.block_scale, after.block_scale)), name


# dialect: scale bytes, codes and decode scale of a tensor of zeros; None where it is refused
ZEROS: dict[str, tuple[int, int, float] | None] = {
    "canonical": (0x00, 0, 1.0),
    "flashinfer_exact": None,
    "flashinfer_fast": None,
    "vllm_fast": None,
    "modelopt": (0x7F, 7, 0.0),  # 0 / 0: the installed version writes NaN scales
    "compressed_tensors": (0x20, 0, 1.0),
    "torchao": None,
    "torchao_one_level": (0x08, 0, 1.0),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_a_tensor_of_zeros(name: str) -> None:
    expected, zeros = ZEROS[name], torch.zeros(2, 32)
    if expected is None:
        with pytest.raises(InvalidArgument, match="no scale for zeros"):
            quantise(zeros, NVFP4, DIALECTS[name])
        q = quantise(zeros, NVFP4, DIALECTS[name], encode_scale=torch.tensor(26.88))
        assert (q.element_codes() == 0).all()
        return
    byte, code, scale = expected
    q = quantise(zeros, NVFP4, DIALECTS[name])
    assert set(q.block_scale.flatten().tolist()) == {byte}
    assert set(q.element_codes().flatten().tolist()) == {code}
    assert q.decode_scale.item() == scale


@pytest.mark.parametrize(
    ("dialect", "byte"),
    [(FLASHINFER_EXACT, 0x00), (FLASHINFER_FAST, 0x7F), (VLLM_FAST, 0x7F), (CANONICAL, 0x7F)],
    ids=lambda item: getattr(item, "name", None),
)
def test_an_infinite_encode_scale_given_by_a_caller(dialect: Dialect, byte: int) -> None:
    # A zero input_scale slot makes G infinite (vllm#45212): G * 0 is NaN except where guarded.
    q = quantise(torch.zeros(1, 16), NVFP4, dialect, encode_scale=torch.tensor(torch.inf))
    assert q.block_scale.tolist() == [[byte]]


# dialect: what NaN and infinities do
NON_FINITE = {
    "canonical": "defined",
    "flashinfer_exact": "defined",
    "flashinfer_fast": "defined",
    "vllm_fast": "defined",
    "modelopt": "defined",
    "compressed_tensors": "refused",
    "torchao": "refused",
    "torchao_one_level": "refused",
}


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_are_defined_or_refused_with_their_place(
    name: str, poison: float
) -> None:
    values = torch.ones(2, 32)
    values[1, 17] = poison
    if NON_FINITE[name] == "refused":
        with pytest.raises(InvalidArgument, match=r"values\[1, 17\]"):
            quantise(values, NVFP4, DIALECTS[name])
    else:
        assert quantise(values, NVFP4, DIALECTS[name]).shape == (2, 32)


@pytest.mark.parametrize("dialect", [CANONICAL, FLASHINFER_EXACT, FLASHINFER_FAST, VLLM_FAST])
def test_where_nan_is_suppressed_neighbours_do_not_notice(dialect: Dialect) -> None:
    values = torch.linspace(-1, 1, 32).reshape(2, 16)
    poisoned = values.clone()
    poisoned[1, 3] = torch.nan
    before, after = (quantise(v, NVFP4, dialect) for v in (values, poisoned))
    assert torch.equal(before.block_scale, after.block_scale)
    differ = (before.element_codes() != after.element_codes()).nonzero().tolist()
    assert differ == [[1, 3]]
    assert after.element_codes()[1, 3].item() == 7  # cvt.rn.satfinite.e2m1x2: NaN becomes +6


def test_where_nan_is_propagated_it_takes_the_tensor() -> None:
    values = torch.ones(2, 32)
    values[1, 17] = torch.nan
    q = quantise(values, NVFP4, MODELOPT)
    assert set(q.block_scale.flatten().tolist()) == {0x7F}
    assert q.decode_scale.isnan()


def test_canonical_infinity_makes_the_scale_one_and_saturates() -> None:
    values = torch.ones(1, 32)
    values[0, 3] = -torch.inf
    q = quantise(values, NVFP4)
    assert q.decode_scale.item() == 1.0  # Transformer Engine: G = 1 for an infinite amax
    assert q.block_scale.tolist() == [[0x7E, 0x23]]  # 448, and 1/6 rounded to E4M3
    assert dequantise(q)[0, 3].item() == -2688.0
    assert (dequantise(q)[0, :3] == 0).all()


def test_flashinfer_exact_is_canonical_but_for_zeros_of_dead_blocks(seed: int) -> None:
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
    values[:8] *= 1e-7
    values[:4, ::3] = 0.0
    one, other = (quantise(values, NVFP4, d) for d in (CANONICAL, FLASHINFER_EXACT))
    assert torch.equal(one.block_scale, other.block_scale)
    differ = one.element_codes() != other.element_codes()
    dead = (one.block_scale == 0).repeat_interleave(16, dim=-1)
    expected = dead & (values == 0)
    assert expected.any()
    assert torch.equal(differ, expected)
    assert torch.equal(dequantise(one), dequantise(other.with_direction(ScaleDirection.DECODE)))


def test_flashinfer_stores_what_its_kernels_take() -> None:
    values = edge_tensor()
    for dialect in (FLASHINFER_EXACT, FLASHINFER_FAST, VLLM_FAST, COMPRESSED_TENSORS):
        q = quantise(values, NVFP4, dialect)
        assert q.direction is ScaleDirection.ENCODE
        assert q.tensor_scale is not None
        assert q.tensor_scale.item() == pytest.approx(26.88, rel=1e-6)
    for dialect in (CANONICAL, MODELOPT, TORCHAO):
        q = quantise(values, NVFP4, dialect)
        assert q.direction is ScaleDirection.DECODE
        assert q.tensor_scale is not None
        assert q.tensor_scale.item() == pytest.approx(100 / 2688, rel=1e-6)
    assert quantise(values, NVFP4, TORCHAO_ONE_LEVEL).decode_scale.item() == 1.0


# The registry


def test_names_and_rules_are_unique() -> None:
    assert set(EDGES) == set(ZEROS) == set(NON_FINITE) == set(DIALECTS)
    for name, dialect in DIALECTS.items():
        assert dialect_named(name) is dialect
        assert dialect.name == name
        formats = [rule.format.name for rule in dialect.rules]
        assert len(set(formats)) == len(formats)
        for rule in dialect.rules:
            assert (rule.stored_direction is not None) == rule.format.tensor_scale
            assert (rule.tensor_scale.name == "ABSENT") != rule.format.tensor_scale


def test_no_two_dialects_are_the_same_rule() -> None:
    rules = [dialect.rule_for(NVFP4) for dialect in DIALECTS.values()]
    assert len(set(rules)) == len(rules)


def test_the_canonical_dialect_writes_every_format() -> None:
    assert {rule.format.name for rule in CANONICAL.rules} == set(BLOCK_FORMATS)


@pytest.mark.parametrize("name", sorted(set(DIALECTS) - {"canonical"}))
def test_a_format_that_the_producer_does_not_write_is_refused(name: str) -> None:
    with pytest.raises(DialectMismatch, match="NVFP4") as caught:
        quantise(torch.ones(1, 32), MXFP4, DIALECTS[name])
    assert caught.value.value == "MXFP4"


def test_an_unknown_dialect_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UnknownName, match="modelopt"):
        dialect_named("model-opt")


def test_every_fact_distinguishes_two_rules() -> None:
    # A field that is the same everywhere would be no fact of a dialect.
    rules = [rule for dialect in DIALECTS.values() for rule in dialect.rules]
    constant = {
        field.name
        for field in fields(BlockRule)
        if len({getattr(rule, field.name) for rule in rules}) == 1
    }
    assert constant == {"element_rounding"}, "nearest even, in every known producer"


# The document


def document_rows(heading: str) -> dict[str, list[str]]:
    """Rows of the table under a heading, by their first cell."""
    section = DOCUMENT.read_text(encoding="utf-8").split(heading, 1)[1].split("\n## ", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    return {row[0].strip("`"): row[1:] for row in rows[2:]}


def test_the_document_repeats_the_edge_table() -> None:
    rows = document_rows("## Edge blocks")
    assert set(rows) == set(EDGES)
    for name, cells in rows.items():
        zero_byte, tiny_byte, codes, decoded = EDGES[name]
        shown = (int(cells[0], 16), int(cells[1], 16), tuple(int(c) for c in cells[2].split()))
        assert shown == (zero_byte, tiny_byte, codes), name
        assert float(cells[3]) == decoded, name


def test_the_document_repeats_the_tensor_of_zeros() -> None:
    rows = document_rows("## A tensor of zeros")
    assert set(rows) == set(ZEROS)
    for name, cells in rows.items():
        expected = ZEROS[name]
        if expected is None:
            assert cells == ["refused", "", ""], name
        else:
            assert (int(cells[0], 16), int(cells[1]), float(cells[2])) == expected, name


def test_the_document_names_rules_as_the_records_do() -> None:
    rows = document_rows("## The rules")
    assert set(rows) == set(DIALECTS)
    for name, (tensor_scale, direction, block_scale, value) in rows.items():
        rule = DIALECTS[name].rule_for(NVFP4)
        assert tensor_scale == rule.tensor_scale.value, name
        assert direction == str(rule.stored_direction), name
        assert block_scale == rule.block_scale.value, name
        assert value == rule.value.value, name


def test_a_quantised_tensor_keeps_its_dialect() -> None:
    for dialect in DIALECTS.values():
        q = quantise(edge_tensor(), NVFP4, dialect)
        assert isinstance(q, QuantisedTensor)
        assert q.dialect is dialect


# --------------------------------------------------------------------------------------------------
# Each scale rule against NumPy float32, one operation at a time, and the trap that it avoids.

F = np.float32
ONE, SIX, FULL = F(1), F(6), F(2688)
LARGEST = F(np.finfo(np.float32).max)


def magnitudes(seed: int, count: int = 2000) -> NDArray[np.float32]:
    """Positive float32 numbers of all sizes that occur, and the ends of the range."""
    rng = np.random.default_rng(seed)
    ends = [1.0, 6.0, 10.5, 448.0, 2688.0, 1e-30, 1e30, float(LARGEST)]
    return np.concatenate([np.exp2(rng.uniform(-40, 40, count)), ends]).astype(F)


def test_every_rule_has_a_function() -> None:
    assert set(TENSOR_SCALE) == set(TensorScaleRule)
    assert set(BLOCK_SCALE) == set(BlockScaleRule)
    assert set(VALUE) == set(ValueRule)


@pytest.mark.parametrize(
    ("rule", "direction"),
    [
        (TensorScaleRule.ENCODE_CAPPED, "encode"),
        (TensorScaleRule.ENCODE_PLAIN, "encode"),
        (TensorScaleRule.DECODE, "decode"),
    ],
)
def test_tensor_scales_round_once(seed: int, rule: TensorScaleRule, direction: str) -> None:
    amax = magnitudes(seed)
    scales = TENSOR_SCALE[rule](torch.from_numpy(amax), NVFP4, torch.float32)
    expected = FULL / amax if direction == "encode" else amax / FULL
    assert np.array_equal(getattr(scales, direction).numpy(), expected)
    other = "decode" if direction == "encode" else "encode"
    assert np.array_equal(getattr(scales, other).numpy(), ONE / expected)


def test_a_number_over_a_tensor_would_round_twice(seed: int) -> None:
    # The planted trap: torch turns 2688 / tensor into reciprocal times 2688.
    amax = magnitudes(seed)
    trapped = (2688 / torch.from_numpy(amax)).numpy()
    assert np.count_nonzero(trapped != FULL / amax) > 0
    rule = TENSOR_SCALE[TensorScaleRule.ENCODE_IN_INPUT_DTYPE]
    scales = rule(torch.from_numpy(amax), NVFP4, torch.float32)
    assert np.array_equal(scales.encode.numpy(), trapped), "compressed-tensors falls into it"


@pytest.mark.parametrize(
    ("amax", "expected"),
    [(0.0, 1.0), (np.inf, 1.0), (1e-38, float(LARGEST)), (np.nan, float(LARGEST)), (2688.0, 1.0)],
)
def test_the_capped_encode_scale_is_always_usable(amax: float, expected: float) -> None:
    largest = torch.tensor(amax, dtype=torch.float32)
    scales = TENSOR_SCALE[TensorScaleRule.ENCODE_CAPPED](largest, NVFP4, torch.float32)
    assert scales.encode.item() == expected


@pytest.mark.parametrize("amax", [0.0, 1e-38, 1e-36])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_tensors_falls_back_to_one(amax: float, dtype: torch.dtype) -> None:
    largest = torch.tensor(amax, dtype=torch.float32)
    scales = TENSOR_SCALE[TensorScaleRule.ENCODE_IN_INPUT_DTYPE](largest, NVFP4, dtype)
    assert scales.encode.item() == 1.0


def test_block_scales_round_after_every_operation(seed: int) -> None:
    a = magnitudes(seed)
    g = magnitudes(seed + 1)
    with np.errstate(over="ignore", under="ignore"):
        s = ONE / g
        bf16 = torch.from_numpy(a).bfloat16()
        quotient = (bf16.float() / 6).bfloat16().float().numpy()
        expected: dict[BlockScaleRule, NDArray[np.float32]] = {
            BlockScaleRule.AMAX_TIMES_ENCODE_SHARE: a * (g * (ONE / SIX)),
            BlockScaleRule.ENCODE_TIMES_AMAX_SHARE: g * (a * (ONE / SIX)),
            BlockScaleRule.AMAX_OVER_DECODE_SHARE: a / (SIX * s),
            BlockScaleRule.QUOTIENT_TIMES_ENCODE: g * quotient,
            BlockScaleRule.QUOTIENT_OVER_DECODE: (a / SIX) / s,
            BlockScaleRule.AMAX_SHARE: a * (ONE / SIX),
            BlockScaleRule.AMAX_OVER_LARGEST: a / SIX,
        }
    scales = TensorScales(torch.from_numpy(g), torch.from_numpy(s))
    rule = CANONICAL.rule_for(NVFP4)
    assert set(expected) == set(BLOCK_SCALE)
    for name, function in BLOCK_SCALE.items():
        got = function(torch.from_numpy(a), scales, rule, torch.bfloat16).numpy()
        assert np.array_equal(got, expected[name]), name


def test_the_order_of_operations_matters(seed: int) -> None:
    a, g = (torch.from_numpy(magnitudes(seed + i)) for i in range(2))
    scales = TensorScales(g, g.reciprocal())
    rule = MODELOPT.rule_for(NVFP4)
    results = [function(a, scales, rule, torch.float32) for function in BLOCK_SCALE.values()]
    for i, one in enumerate(results):
        for other in results[i + 1 :]:
            assert not torch.equal(one, other)


def test_values_round_after_every_operation(seed: int) -> None:
    x, b, g = (magnitudes(seed + i) for i in range(3))
    b = np.clip(b, F(2.0**-9), F(448)).astype(F)
    with np.errstate(over="ignore", under="ignore"):
        s = ONE / g
        factor = ONE / (b * (ONE / g))
        expected: dict[ValueRule, NDArray[Any]] = {
            ValueRule.TIMES_CAPPED_RECIPROCAL: x * np.fmin(factor, LARGEST),
            ValueRule.TIMES_RECIPROCAL: x * factor,
            ValueRule.TIMES_QUOTIENT: x * ((ONE / s) / b),
            ValueRule.OVER_PRODUCT: x / (b * s),
            ValueRule.OVER_QUOTIENT: x / (b / g),
            ValueRule.OVER_BLOCK: x / b,
        }
    scales = TensorScales(torch.from_numpy(g), torch.from_numpy(s))
    assert set(expected) == set(VALUE)
    for name, function in VALUE.items():
        got = function(torch.from_numpy(x), torch.from_numpy(b), scales).numpy()
        assert np.array_equal(got, expected[name]), name


def test_a_scale_of_zero_is_capped_or_infinite() -> None:
    one, zero = torch.ones(1), torch.zeros(1)
    scales = TensorScales(one, one)
    assert VALUE[ValueRule.TIMES_CAPPED_RECIPROCAL](one, zero, scales).item() == float(LARGEST)
    assert VALUE[ValueRule.TIMES_CAPPED_RECIPROCAL](zero, zero, scales).item() == 0.0
    assert VALUE[ValueRule.TIMES_RECIPROCAL](one, zero, scales).item() == np.inf
    assert VALUE[ValueRule.TIMES_RECIPROCAL](zero, zero, scales).isnan().item()
