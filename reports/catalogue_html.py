"""Render a catalogue as a table whose rows unfold to show their explanation.

Marks let the script add a search field and choices. The fold is in the last cell, so it moves with
its row when the table is sorted, and works without a script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from degarble.harness.report.blocks import ColumnKind
from degarble.reports import words
from degarble.reports.markup import h

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.report.blocks import Block, Catalogue, Cell, Column, Entry
    from degarble.reports.markup import Element


class Head(Protocol):
    """A function that returns the head of a column."""

    def __call__(self, column: Column, choose: bool = False) -> Element:
        """Return it; `choose`: the column can be filtered by its words."""


def catalogue_element(
    block: Catalogue,
    head: Head,
    cell: Callable[[Cell, Column, bool], Element],
    inner: Callable[[Block], Element],
) -> Element:
    """Turn a catalogue into a table; heads, cells and inner blocks look as everywhere."""
    heads = [head(column, index < block.choices) for index, column in enumerate(block.columns)]
    rows = [_row(block, entry, cell, inner) for entry in block.entries]
    table = h(
        "table",
        {"class": "data catalogue"},
        h("caption", None, h("span", {"class": "held"}, block.caption)),
        h("thead", None, h("tr", None, heads)),
        h("tbody", None, rows),
    )
    region = {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": block.caption}
    return h("div", {"class": "block", "data-filter": block.caption}, h("div", region, table))


def _row(
    block: Catalogue,
    entry: Entry,
    cell: Callable[[Cell, Column, bool], Element],
    inner: Callable[[Block], Element],
) -> Element:
    *front, last = zip(entry.cells, block.columns, strict=True)
    cells = [cell(value, column, False) for value, column in front]
    return h("tr", None, cells, _last(entry, *last, inner))


def _last(entry: Entry, value: Cell, column: Column, inner: Callable[[Block], Element]) -> Element:
    text = words.cell(value, column)
    name = h("code", None, text) if column.kind is ColumnKind.CODE else text
    if not entry.blocks:
        return h("td", {"id": entry.anchor or None}, name)
    summary = h("summary", None, name)
    fold = h("details", {"id": entry.anchor or None}, summary, [inner(b) for b in entry.blocks])
    return h("td", {"class": "fold"}, fold)
