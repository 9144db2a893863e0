r"""Build a tree of HTML elements that escapes everything by construction. Imports no sibling.

All markup is written by `h("p", {"class": "x"}, "text")`. Text and attribute values are always
escaped; element and attribute names come from closed lists, so there is no `style`, no `on...`, no
`script`, and links lead only to places on the same page or to tables in the page's folder.
Control characters, bidirectional overrides and lone surrogates are shown as `\u202e`, never sent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from degarble.harness.report.number_text import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_ELEMENTS = frozenset(
    [
        "a",
        "article",
        "aside",
        "button",
        "caption",
        "circle",
        "code",
        "dd",
        "details",
        "div",
        "dl",
        "dt",
        "em",
        "figcaption",
        "figure",
        "footer",
        "g",
        "h1",
        "h2",
        "h3",
        "h4",
        "header",
        "img",
        "kbd",
        "li",
        "line",
        "main",
        "nav",
        "ol",
        "p",
        "path",
        "pre",
        "rect",
        "section",
        "small",
        "span",
        "strong",
        "summary",
        "svg",
        "symbol",
        "table",
        "tbody",
        "td",
        "text",
        "th",
        "thead",
        "title",
        "tr",
        "ul",
        "use",
        "wbr",
    ]
)
_VOID = frozenset({"img", "wbr"})
_ATTRIBUTES = frozenset(
    [
        "alt",
        "class",
        "cx",
        "cy",
        "d",
        "data-copy",
        "data-copied",
        "data-choose",
        "data-filter",
        "data-label",
        "data-sort",
        "data-tabs",
        "data-value",
        "data-zoom",
        "fill",
        "height",
        "hidden",
        "href",
        "id",
        "lang",
        "open",
        "preserveAspectRatio",
        "r",
        "role",
        "scope",
        "src",
        "stroke",
        "stroke-width",
        "tabindex",
        "text-anchor",
        "title",
        "type",
        "viewBox",
        "width",
        "x",
        "x1",
        "x2",
        "y",
        "y1",
        "y2",
    ]
)
# A file in the page's folder: one plain name, so that a link never leaves its folder.
_TABLE_FILE = re.compile(r"[a-z0-9][a-z0-9-]*\.(csv|json)")
_SAFE_SOURCES = ("data:image/svg+xml;base64,",)


@dataclass(frozen=True)
class HtmlElement:
    """One element; create it with `h`."""

    name: str
    attributes: tuple[tuple[str, str], ...]
    children: tuple[HtmlElement | str, ...]

    def __str__(self) -> str:
        return "".join(_written(self))


def h(
    name: str,
    attributes: Mapping[str, str | bool | None] | None = None,
    *children: HtmlElement | str | Iterable[HtmlElement | str] | None,
) -> HtmlElement:
    """Make an element; attributes that are None or False are left out, None children as well."""
    assert name in _ELEMENTS, name
    kept: list[tuple[str, str]] = []
    for key, value in (attributes or {}).items():
        assert key in _ATTRIBUTES or key.startswith("aria-"), key
        if value is None or value is False:
            continue
        # True is an attribute without a value; links and sources are limited to safe forms.
        text = "" if value is True else value
        assert key != "href" or text.startswith("#") or _TABLE_FILE.fullmatch(text), text
        assert key != "src" or text.startswith(_SAFE_SOURCES), text
        kept.append((key, text))
    return HtmlElement(name, tuple(kept), tuple(_flat(children)))


def _flat(
    children: Iterable[HtmlElement | str | Iterable[HtmlElement | str] | None],
) -> Iterator[HtmlElement | str]:
    for child in children:
        if isinstance(child, (HtmlElement, str)):
            yield child
        elif child is not None:
            yield from child


_ESCAPES = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;", "`": "&#96;"}
)


def escape(text: str) -> str:
    """Return `text` as it may stand between tags and inside quoted attributes."""
    return visible(text).translate(_ESCAPES)


def _written(element: HtmlElement) -> Iterator[str]:
    yield f"<{element.name}"
    for key, value in element.attributes:
        yield f' {key}="{escape(value)}"'
    yield ">"
    if element.name in _VOID:
        return
    for child in element.children:
        if isinstance(child, HtmlElement):
            yield from _written(child)
        else:
            yield escape(child)
    yield f"</{element.name}>"
