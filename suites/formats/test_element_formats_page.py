"""docs/formats.md against the records: a number on the page that is not true fails here."""

from __future__ import annotations

import ast
import math
import operator
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats.cache_rows import CACHE_ROWS
from degarble.harness.formats.codec import encode
from degarble.harness.formats.layouts import ROW_ORDERS, SCALE_LAYOUTS
from degarble.harness.formats.number_formats import ELEMENT_FORMATS, Overflow, Rounding

if TYPE_CHECKING:
    from collections.abc import Callable

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
