"""The records of number formats against torch, ml_dtypes and docs/formats.md."""

from __future__ import annotations

import ast
import math
import operator
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.checkpoint.view.schemes import SCHEMES
from degarble.harness.formats.cache_rows import CACHE_ROWS
from degarble.harness.formats.codec import decode, encode, is_nan
from degarble.harness.formats.layouts import ROW_ORDERS, SCALE_LAYOUTS
from degarble.harness.formats.number_formats import (
    BF16,
    BLOCK_FORMATS,
    E2M1,
    E4M3,
    E5M2,
    ELEMENT_FORMATS,
    FP8_1X128_F32,
    FP8_128X128_F32,
    FP8_128X128_UE8M0,
    FP16,
    FP32,
    MXFP4,
    MXFP8,
    NVFP4,
    TABLE_FORMATS,
    UE8M0,
    ElementFormat,
    Overflow,
    Rounding,
    block_format,
    codes_shape,
    scale_shape,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.formats.number_formats import BlockFormat


# --------------------------------------------------------------------------------------------------
# The records' derived numbers against torch and ml_dtypes, and the registry.

FORMATS = list(ELEMENT_FORMATS.values())
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)

TORCH = {
    BF16.name: torch.bfloat16,
    FP16.name: torch.float16,
    FP32.name: torch.float32,
    E4M3.name: torch.float8_e4m3fn,
    E5M2.name: torch.float8_e5m2,
}
ML_DTYPES: dict[str, Any] = {
    E2M1.name: ml_dtypes.float4_e2m1fn,
    E4M3.name: ml_dtypes.float8_e4m3fn,
    E5M2.name: ml_dtypes.float8_e5m2,
    UE8M0.name: ml_dtypes.float8_e8m0fnu,
    BF16.name: ml_dtypes.bfloat16,
}


@pytest.mark.parametrize("name", TORCH)
def test_extremes_equal_torch(name: str) -> None:
    info, fmt = torch.finfo(TORCH[name]), ELEMENT_FORMATS[name]
    assert (fmt.largest, fmt.smallest_normal) == (info.max, info.tiny)
    assert fmt.bits == info.bits
    assert 2.0**-fmt.mantissa_bits == info.eps


@pytest.mark.parametrize("name", ML_DTYPES)
def test_extremes_equal_ml_dtypes(name: str) -> None:
    finfo: Any = ml_dtypes.finfo  # untyped upstream
    info, fmt = finfo(ML_DTYPES[name]), ELEMENT_FORMATS[name]
    assert fmt.largest == float(info.max)
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.smallest == float(info.smallest_subnormal)
    assert fmt.mantissa_bits == info.nmant


@by_format
def test_derived_numbers_equal_what_the_codes_decode_to(fmt: ElementFormat) -> None:
    assert decode(fmt.largest_code, fmt) == fmt.largest
    assert decode(1 if fmt.subnormals else 0, fmt) == fmt.smallest
    normal = 1 << fmt.mantissa_bits if fmt.subnormals else 0
    assert decode(normal, fmt) == fmt.smallest_normal
    sign_bits = 1 if fmt.signed else 0
    assert fmt.bits == sign_bits + fmt.exponent_bits + fmt.mantissa_bits
    assert fmt.magnitude_mask | fmt.sign_mask == fmt.code_count - 1


@by_format
def test_what_follows_the_largest_code_is_no_finite_number(fmt: ElementFormat) -> None:
    after = fmt.largest_code + 1
    if fmt.infinity_code is not None:
        assert after == fmt.infinity_code
    elif fmt.nan_code is not None:
        assert after == fmt.nan_code
    else:
        assert after == fmt.sign_mask
    assert fmt.nan_code is None or is_nan(fmt.nan_code, fmt)


def test_formats_are_found_by_name_and_typos_get_a_suggestion() -> None:
    assert list(ELEMENT_FORMATS) == ["E2M1", "E4M3", "E5M2", "UE8M0", "BF16", "FP16", "FP32"]


def test_a_planted_bias_is_detected() -> None:
    facts = {field: getattr(E4M3, field) for field in ElementFormat.__dataclass_fields__}
    planted = ElementFormat(**{**facts, "bias": 8})
    assert planted.largest != torch.finfo(torch.float8_e4m3fn).max


# --------------------------------------------------------------------------------------------------
# The block formats: facts, extents, and what their shapes refuse.

# name: element, scale, block, fp32 scale per tensor, bits of storage per 128 x 128 elements
FACTS = {
    "NVFP4": ("E2M1", "E4M3", (1, 16), True, 128 * 128 * 4 + 128 * 8 * 8),
    "MXFP4": ("E2M1", "UE8M0", (1, 32), False, 128 * 128 * 4 + 128 * 4 * 8),
    "MXFP8": ("E4M3", "UE8M0", (1, 32), False, 128 * 128 * 8 + 128 * 4 * 8),
    "FP8_128X128_F32": ("E4M3", "FP32", (128, 128), False, 128 * 128 * 8 + 32),
    "FP8_128X128_UE8M0": ("E4M3", "UE8M0", (128, 128), False, 128 * 128 * 8 + 8),
    "FP8_1X128_F32": ("E4M3", "FP32", (1, 128), False, 128 * 128 * 8 + 128 * 32),
    "FP8_1X128_UE8M0": ("E4M3", "UE8M0", (1, 128), False, 128 * 128 * 8 + 128 * 8),
}


FACTS |= {
    "FP8_ROW": ("E4M3", "FP32", (1, 0), False, 128 * 128 * 8 + 128 * 32),
    "FP8_TENSOR": ("E4M3", "FP32", (0, 0), False, 128 * 128 * 8 + 32),
}
for _bits in (4, 8):
    for _name in (f"INT{_bits}", f"UINT{_bits}"):
        for _suffix, _block, _scales in (
            ("G128", (1, 128), 128),
            ("G64", (1, 64), 256),
            ("G32", (1, 32), 512),
            ("ROW", (1, 0), 128),
            ("TENSOR", (0, 0), 1),
        ):
            _storage = 128 * 128 * _bits + _scales * 32
            FACTS[f"{_name}_{_suffix}"] = (_name, "FP32", _block, False, _storage)


def test_the_registry_holds_exactly_the_formats_of_the_table() -> None:
    assert set(BLOCK_FORMATS) == set(FACTS)
    assert all(block_format(name) is fmt for name, fmt in BLOCK_FORMATS.items())


@pytest.mark.parametrize("name", FACTS)
def test_facts_and_storage(name: str) -> None:
    element, scale, block, tensor_scale, storage_bits = FACTS[name]
    fmt = BLOCK_FORMATS[name]
    assert (fmt.element.name, fmt.scale.name) == (element, scale)
    assert (fmt.block, fmt.tensor_scale) == (block, tensor_scale)
    rows, columns = codes_shape((128, 128), fmt)
    scale_rows, scale_columns = scale_shape((128, 128), fmt)
    assert rows * columns * 8 + scale_rows * scale_columns * fmt.scale.bits == storage_bits
    assert fmt.packed == (fmt.element.bits == 4)
    assert fmt.zero_point == (fmt.element.name in {"UINT4", "UINT8"})


def test_an_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UnknownName, match="NVFP4"):
        block_format("NVFP5")


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4, MXFP8, FP8_1X128_F32], ids=lambda fmt: fmt.name)
def test_a_cut_off_block_is_refused_where_the_format_has_none(fmt: BlockFormat) -> None:
    columns = fmt.block[1]
    assert scale_shape((3, 5 * columns), fmt) == (3, 5)
    for wrong in (columns - 1, columns + 1, 5 * columns + columns // 2):
        with pytest.raises(ShapeMismatch, match=f"a multiple of {columns}"):
            scale_shape((3, wrong), fmt)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((128, 128), (1, 1)),
        ((129, 128), (2, 1)),
        ((1, 1), (1, 1)),
        ((576, 7168), (5, 56)),  # kv_a_proj_with_mqa of DeepSeek-V3: 512 + 64 rows
        ((4, 200, 257), (4, 2, 3)),
    ],
)
def test_scales_of_128x128_blocks_count_by_ceiling(
    shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert scale_shape(shape, FP8_128X128_F32) == expected
    assert scale_shape(shape, FP8_128X128_UE8M0) == expected
    assert codes_shape(shape, FP8_128X128_F32) == shape


@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=lambda fmt: fmt.name)
def test_a_vector_is_refused(fmt: BlockFormat) -> None:
    with pytest.raises(ShapeMismatch, match=r"\[1, K\]"):
        codes_shape((128,), fmt)


def test_no_rows_are_no_mistake() -> None:
    assert codes_shape((0, 64), NVFP4) == (0, 32)
    assert scale_shape((0, 64), NVFP4) == (0, 4)


# --------------------------------------------------------------------------------------------------
# docs/formats.md against the records: a number on the page that is not true fails here.

PAGE = Path(__file__).resolve().parents[2] / "docs" / "formats.md"

INPUTS = {
    "NaN": (math.nan, Overflow.SATURATE),
    "+inf": (math.inf, Overflow.SATURATE),
    "-inf": (-math.inf, Overflow.SATURATE),
    "+inf, IEEE": (math.inf, Overflow.IEEE),
    "1e300, IEEE": (1e300, Overflow.IEEE),
    "+0": (0.0, Overflow.SATURATE),
    "-0": (-0.0, Overflow.SATURATE),
    "-1e-300": (-1e-300, Overflow.SATURATE),
    "-1": (-1.0, Overflow.SATURATE),
}


def tables(text: str) -> dict[str, dict[str, dict[str, str]]]:
    """Read all tables: last header to first cell to header to cell."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for block in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE):
        header, _, *rows = [
            [cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()
        ]
        found[f"{header[0]}, {header[1]}"] = {
            row[0]: dict(zip(header, row, strict=True)) for row in rows
        }
    return found


@pytest.fixture(scope="module")
def page() -> dict[str, dict[str, dict[str, str]]]:
    return tables(PAGE.read_text(encoding="utf-8"))


def number(cell: str) -> float:
    """Read `448` or `255 × 2^120`."""
    match = re.fullmatch(r"(\d+)(?: × 2\^(-?\d+))?", cell)
    assert match, cell
    return math.ldexp(int(match[1]), int(match[2] or 0))


def test_every_table_is_read_and_complete(page: dict[str, dict[str, dict[str, str]]]) -> None:
    assert {title: list(rows) for title, rows in page.items()} == {
        "format, bits": list(ELEMENT_FORMATS),
        "format, NaN": list(ELEMENT_FORMATS),
        "table, bits": list(TABLE_FORMATS),
        "block format, element": list(BLOCK_FORMATS),
        "scheme, exporters": list(SCHEMES),
        "layout, tile": list(SCALE_LAYOUTS),
        "order, rows, a multiple of": list(ROW_ORDERS),
        "entry, bytes": list(CACHE_ROWS),
    }


def format_errors(row: dict[str, str], name: str) -> list[str]:
    """Return the columns that do not tell the truth."""
    fmt = ELEMENT_FORMATS[name]
    truth = {
        "bits": fmt.bits,
        "bias": fmt.bias,
        "largest": fmt.largest,
        "smallest normal": fmt.smallest_normal,
        "smallest positive": fmt.smallest,
        "codes": fmt.code_count,
    }
    wrong = [column for column, value in truth.items() if number(row[column]) != value]
    fields = f"{int(fmt.signed)}, {fmt.exponent_bits}, {fmt.mantissa_bits}"
    return wrong + ["fields"] * (row["sign, exponent, mantissa"] != fields)


@pytest.mark.parametrize("name", ELEMENT_FORMATS)
def test_the_numbers_of_a_format(page: dict[str, dict[str, dict[str, str]]], name: str) -> None:
    assert format_errors(page["format, bits"][name], name) == []


@pytest.mark.parametrize("name", TABLE_FORMATS)
def test_the_numbers_of_a_table(page: dict[str, dict[str, dict[str, str]]], name: str) -> None:
    fmt = TABLE_FORMATS[name]
    assert page["table, bits"][name] == {
        "table": name,
        "bits": str(fmt.bits),
        "values": f"{min(fmt.table):g} to {max(fmt.table):g}",
        "code 0": f"{fmt.table[0]:g}",
        "largest code": f"{fmt.table[-1]:g}",
    }


def extent(number: int, whole: str) -> str:
    return str(number) if number else whole


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_the_facts_of_a_block_format(page: dict[str, dict[str, dict[str, str]]], name: str) -> None:
    fmt = BLOCK_FORMATS[name]
    rows, columns = fmt.block
    assert page["block format, element"][name] == {
        "block format": name,
        "element": fmt.element.name,
        "scale": fmt.scale.name,
        "one scale for": f"{extent(rows, 'M')} × {extent(columns, 'K')}",
        "besides": "fp32 scale" * fmt.tensor_scale + "zero point" * fmt.zero_point or "-",
    }


@pytest.mark.parametrize("name", SCHEMES)
def test_the_tensors_of_a_scheme(page: dict[str, dict[str, dict[str, str]]], name: str) -> None:
    scheme = SCHEMES[name]
    row = page["scheme, exporters"][name]
    assert row["exporters"] == scheme.exporters
    assert row["tensors"] == ", ".join(f"`{suffix}`" for suffix in scheme.suffixes.values())


def test_a_planted_number_is_detected(page: dict[str, dict[str, dict[str, str]]]) -> None:
    planted = page["format, bits"]["E4M3"] | {"largest": "240"}
    assert format_errors(planted, "E4M3") == ["largest"]


@pytest.mark.parametrize("name", ELEMENT_FORMATS)
@pytest.mark.parametrize("column", INPUTS)
def test_the_special_inputs_of_a_format(
    page: dict[str, dict[str, dict[str, str]]], name: str, column: str
) -> None:
    value, overflow = INPUTS[column]
    cell = page["format, NaN"][name][column]
    try:
        code = hex(encode(value, ELEMENT_FORMATS[name], Rounding.NEAREST_EVEN, overflow))
    except InvalidArgument:
        code = "refused"
    assert cell == code


OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluated(formula: ast.expr, names: dict[str, int]) -> int:
    """Evaluate a formula of the four allowed operators; anything else is an error."""
    if isinstance(formula, ast.BinOp):
        left, right = evaluated(formula.left, names), evaluated(formula.right, names)
        return OPERATORS[type(formula.op)](left, right)
    if isinstance(formula, ast.Name):
        return names[formula.id]
    assert isinstance(formula, ast.Constant)
    assert isinstance(formula.value, int)
    return formula.value


def test_a_planted_formula_is_detected() -> None:
    formula = ast.parse("row * columns - column", mode="eval").body
    with pytest.raises(KeyError):
        evaluated(formula, {"row": 1, "column": 1, "columns": 2})


@pytest.mark.parametrize("name", SCALE_LAYOUTS)
def test_the_formula_of_a_layout(page: dict[str, dict[str, dict[str, str]]], name: str) -> None:
    layout, row = SCALE_LAYOUTS[name], page["layout, tile"][name]
    assert row["tile"] == f"{layout.row_tile} × {layout.column_tile}"
    formula = ast.parse(row["offset of (row, column)"].strip("`"), mode="eval").body
    for rows, columns in ((5, 3), (300, 9)):
        for r in range(0, rows, 7):
            for c in range(columns):
                names = {"row": r, "column": c, "rows": rows, "columns": columns}
                offset = layout.offset_of(r, c, rows, columns)
                assert evaluated(formula, names) == offset


@pytest.mark.parametrize("name", ROW_ORDERS)
def test_the_places_of_a_row_order(page: dict[str, dict[str, dict[str, str]]], name: str) -> None:
    order, row = ROW_ORDERS[name], page["order, rows, a multiple of"][name]
    assert int(row["rows, a multiple of"]) == order.multiple
    places = [int(place) for place in row["rows 0 to 7 of 256 go to"].split()]
    assert places == [order.destination(old, 256) for old in range(8)]


@pytest.mark.parametrize("name", CACHE_ROWS)
def test_the_sizes_of_a_cache_row(page: dict[str, dict[str, dict[str, str]]], name: str) -> None:
    record, row = CACHE_ROWS[name], page["entry, bytes"][name]
    scale = record.scale
    assert row == {
        "entry": name,
        "bytes": str(record.entry_bytes),
        "data + footer": f"{record.data_bytes} + {record.footer_bytes}",
        "page alignment": str(record.alignment),
        "page of 64": str(record.page_bytes(64)),
        "values": ", ".join(f"{f.name} {f.dims} {f.element.name}" for f in record.values),
        "scales": f"{scale.count} {scale.element.name}, one for {scale.block} dims",
    }
