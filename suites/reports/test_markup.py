from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from degarble.harness.report.number_text import visible
from degarble.reports.markup import escape, h
from degarble.suites.reports.page_cases import HOSTILE


class Reader(HTMLParser):
    """What a reader of the markup finds: elements, attribute values, text."""

    def __init__(self, markup: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[str] = []
        self.values: list[str] = []
        self.pieces: list[str] = []
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.values += [value or "" for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.pieces.append(data)

    @property
    def text(self) -> str:
        """All text, without the elements."""
        return "".join(self.pieces)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(text: str) -> None:
    reader = Reader(str(h("p", {"title": text}, text, h("code", None, text))))
    assert reader.elements == ["p", "code"]
    assert reader.values == [visible(text)]
    assert reader.text == visible(text) * 2


@given(st.text(st.characters()), st.text(st.characters()))
def test_any_text_stays_text(attribute: str, text: str) -> None:
    reader = Reader(str(h("td", {"title": attribute}, text)))
    assert reader.elements == ["td"]
    assert reader.values == [visible(attribute)]
    assert reader.text == visible(text)


def test_without_escaping_markup_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("degarble.reports.markup.escape", lambda text: text)
    assert Reader(str(h("p", None, "<script>"))).elements == ["p", "script"]


@pytest.mark.parametrize("name", ["script", "style", "iframe", "p onclick=x", "object", "form"])
def test_only_harmless_elements_can_be_made(name: str) -> None:
    with pytest.raises(AssertionError):
        h(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("onclick", "x"),
        ("style", "x"),
        ("srcset", "x"),
        ("href", "https://example.org"),
        ("href", "javascript:x"),
        ("src", "data:text/html,x"),
        ("src", "https://example.org/x.png"),
    ],
)
def test_only_harmless_attributes_can_be_set(name: str, value: str) -> None:
    with pytest.raises(AssertionError):
        h("a", {name: value})


def test_children_are_flattened_and_absent_ones_left_out() -> None:
    element = h("ul", {"class": None, "hidden": True}, None, [h("li"), h("li", None, "a")], "b")
    assert str(element) == '<ul hidden=""><li></li><li>a</li>b</ul>'


def test_quotes_of_every_kind_are_escaped() -> None:
    assert escape("\"'`<>&") == "&quot;&#39;&#96;&lt;&gt;&amp;"
