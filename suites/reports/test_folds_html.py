from __future__ import annotations

from degarble.harness.report.blocks import Look, Looks, Sentence, Tab, Tabs
from degarble.reports.blocks_html import block_element


def test_views_are_whole_without_a_script() -> None:
    tabs = Tabs("Views", (Tab("One", (Sentence("1"),)), Tab("<Two>", (Sentence("2"),))), "views")
    markup = str(block_element(tabs))
    assert 'id="views"' in markup
    assert 'data-tabs="Views"' in markup
    assert markup.count("<section") == 2
    assert "<h3>&lt;Two&gt;</h3>" in markup
    assert "away" not in markup


def test_a_detail_view_has_a_name_an_address_and_a_way_back() -> None:
    looks = Looks("C", (Look("look-1", "a.b", (), True), Look("look-2", "c", ())), "views")
    markup = str(block_element(looks))
    assert '<section class="look first" id="look-1" tabindex="-1" aria-label="a.b">' in markup
    assert '<section class="look" id="look-2"' in markup
    assert markup.count('<a href="#views" class="back">') == 2
    assert "back" not in str(block_element(Looks("C", looks.looks)))
