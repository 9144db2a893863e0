"""Render tabs and close looks as HTML: one at a time on a screen, complete without a script.

The script turns marked views into tabs. A browser shows the close look that the address names
(`:target`), so a click needs no script at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.reports.markup import h

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.report.blocks import Block, Look, Looks, Tabs
    from degarble.reports.markup import Element

    Inner = Callable[[Block], Element]


def tabs_element(block: Tabs, inner: Inner) -> Element:
    """Render views in order, each under its title."""
    views = [
        h(
            "section",
            {"class": "tab", "aria-label": tab.title},
            h("h3", None, tab.title),
            [inner(each) for each in tab.blocks],
        )
        for tab in block.tabs
    ]
    attributes = {"class": "block tabs", "id": block.anchor or None, "data-tabs": block.caption}
    return h("div", attributes, views)


def looks_element(block: Looks, inner: Inner) -> Element:
    """Render every close look; the style shows the one that the address names."""
    caption = h("p", {"class": "caption"}, block.caption)
    return h(
        "div", {"class": "block looks"}, caption, [_look(e, block, inner) for e in block.looks]
    )


def _look(look: Look, block: Looks, inner: Inner) -> Element:
    name = "look first" if look.first else "look"
    back = None
    if block.back:
        back = h("a", {"href": f"#{block.back}", "class": "back"}, "Back to the map")
    return h(
        "section",
        {"class": name, "id": look.anchor, "tabindex": "-1", "aria-label": look.title},
        h("div", {"class": "look-head"}, h("h3", None, look.title), back),
        [inner(each) for each in look.blocks],
    )
