"""Render a card for a notebook: a frame of its own, so that no style leaks in or out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.reports.blocks_html import badge, block_element
from degarble.reports.markup import escape, h
from degarble.reports.page_html import document_html, sprite

if TYPE_CHECKING:
    from degarble.harness.report.cards import Card

_LOW, _HIGH = 96, 560  # pixels: a verdict alone, and one with blocks


def card_html(card: Card) -> str:
    """Render `card`; the frame may run the script of a page, and reaches nothing outside."""
    verdict = h("p", {"class": "verdict-line"}, badge(card.verdict), " ", card.sentence)
    body = (sprite(), h("main", None, verdict, [block_element(block) for block in card.blocks]))
    text = escape(document_html(f"{card.verdict} · degarble", body))
    height = _HIGH if card.blocks else _LOW
    frame = f'width="100%" height="{height}" frameborder="0" sandbox="allow-scripts"'
    return f'<iframe title="{escape(card.sentence)}" {frame} srcdoc="{text}"></iframe>'
