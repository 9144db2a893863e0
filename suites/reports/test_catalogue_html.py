from __future__ import annotations

import pytest

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.report.blocks import Catalogue, CatalogueEntry, Column, ColumnKind, Sentence
from degarble.reports.blocks_html import block_element
from degarble.suites.reports.test_markup import Reader

COLUMNS = (
    Column("level", ColumnKind.TONE),
    Column("layer", ColumnKind.NUMBER),
    Column("where", ColumnKind.CODE),
)
BLOCK = Catalogue(
    "Findings",
    COLUMNS,
    (
        CatalogueEntry(("bad", 3, "w1"), (Sentence("because"),), "finding-0"),
        CatalogueEntry(("note", None, "w2")),
    ),
    choices=1,
)


def test_a_row_unfolds_where_it_is() -> None:
    markup = str(block_element(BLOCK))
    summary = '<details id="finding-0"><summary><code>w1</code></summary>'
    assert f'{summary}<p class="sentence plain">because</p>' in markup
    assert "<td><code>w2</code></td>" in markup


def test_a_level_is_sorted_by_its_weight_and_marked_by_sign_and_word() -> None:
    markup = str(block_element(BLOCK))
    assert '<td data-value="4"><span class="toned bad">' in markup
    assert '<use href="#icon-bad">' in markup
    assert Reader(markup).text == "Findingslevellayerwhereerror3w1becausenote–w2"


def test_the_script_receives_what_it_offers() -> None:
    markup = str(block_element(BLOCK))
    assert 'data-filter="Findings"' in markup
    assert markup.count('data-choose=""') == 1
    assert 'data-label="layer"' in markup


def test_a_ragged_entry_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match="entry 0 of catalogue 'Findings'"):
        Catalogue("Findings", COLUMNS, (CatalogueEntry(("bad", 3)),))
