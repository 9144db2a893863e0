"""Render a page record as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from degarble.harness.report.blocks import Details
from degarble.reports import words
from degarble.reports.blocks_html import badge, block_element, code_element, icon
from degarble.reports.markup import escape, h

if TYPE_CHECKING:
    from collections.abc import Iterable

    from degarble.harness.report.page import Page, PageFinding, Panel, Subject
    from degarble.reports.markup import HtmlElement


# --------------------------------------------------------------------------------------------------
# SVG symbols of a page, drawn once, referred to by name, told apart by shape and not by colour.

# Strokes in a box of 16; each name is a verdict, a tone or the brand.
_PATHS = {
    "agrees": "M2.5 8.5 6.2 12.2 13.5 4",
    "differs": "M3 6h10M3 10h10M10.5 3 5.5 13",
    "unstable": "M1.5 8c1.5-5 3.2-5 4.5 0s3 5 4.5 0 2.7-4 4-2",
    "undecided": "M5.5 6a2.5 2.5 0 1 1 3.7 2.2C8.3 8.700 8 9.200 8 10.200M8 12.900v.1",
    "refused": "M8 2.200a5.800 5.800 0 1 0 0 11.600A5.800 5.800 0 1 0 8 2.200M4 12 12 4",
    "absent": "M4 8h8",
    "note": "M8 2.200a5.800 5.800 0 1 0 0 11.600A5.800 5.800 0 1 0 8 2.200M8 7.500v3.300M8 5v.1",
    "good": "M2.5 8.5 6.2 12.2 13.5 4",
    "warning": "M8 2.500 14.200 13.300H1.800zM8 6.700v3M8 11.500v.1",
    "bad": "M4 4l8 8M12 4l-8 8",
    "brand": "M2.500 5.500h11M2.500 10.500h11M10.400 2.300 5.600 13.700",
}


def sprite() -> HtmlElement:
    """Return every symbol in one hidden element."""
    symbols = [
        h(
            "symbol",
            {"id": f"icon-{name}", "viewBox": "0 0 16 16"},
            h("path", {"d": path, "fill": "none", "stroke": "currentColor", "stroke-width": "1.9"}),
        )
        for name, path in _PATHS.items()
    ]
    return h(
        "svg", {"class": "sprite", "aria-hidden": "true", "width": "0", "height": "0"}, symbols
    )


# --------------------------------------------------------------------------------------------------
# Render a page record as one self-contained HTML file.
#
# The order is verdict, findings, panels, provenance. The file loads nothing: style and script are
# inside, and its content security policy names their hashes and forbids the rest, so injected
# markup could neither run nor fetch.

SIZE_LIMIT = 2_000_000  # bytes; a page is mailed and attached


@cache
def _asset(name: str) -> str:
    return Path(__file__).with_name("assets").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def page_html(page: Page) -> str:
    """Render `page`; the same record gives the same text."""
    body = (
        h("a", {"class": "skip", "href": "#verdict"}, "Skip to the verdict"),
        sprite(),
        _header(page),
        h("main", None, _verdict(page), _findings(page), _panels(page), _provenance(page)),
        _footer(page),
    )
    return document_html(f"{page.word or page.verdict} · {page.subject.name} · degarble", body)


def document_html(title: str, body: Iterable[HtmlElement]) -> str:
    """Return a whole document with style and script inside, which loads nothing."""
    style = _asset("page.css") + _asset("replay.css")
    script = _asset("page.js") + _asset("replay.js")
    icon_data = base64.b64encode(_asset("icon.svg").encode()).decode("ascii")
    policy = (
        f"default-src 'none'; style-src 'sha256-{_hash(style)}'; "
        f"script-src 'sha256-{_hash(script)}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    return Template(_asset("page.html")).substitute(
        policy=policy,
        title=escape(title),
        icon=f"data:image/svg+xml;base64,{icon_data}",
        style=style,
        script=script,
        body="\n".join(str(element) for element in body),
    )


def _header(page: Page) -> HtmlElement:
    links = [("findings", "Findings")] if page.findings else []
    links += [(panel.kind, words.PANEL_TITLES[panel.kind]) for panel in page.ordered_panels]
    links += [("provenance", "Provenance")]
    items = [h("li", None, h("a", {"href": f"#{anchor}"}, text)) for anchor, text in links]
    return h(
        "header",
        {"class": "top"},
        h("a", {"class": "brand", "href": "#verdict"}, icon("brand"), "degarble"),
        h("nav", {"aria-label": "Sections"}, h("ul", None, items)),
        h("button", {"type": "button", "class": "theme", "id": "theme", "hidden": True}, "Theme"),
    )


def _verdict(page: Page) -> HtmlElement:
    subject, provenance = page.subject, page.provenance
    facts = (
        (subject.kind, subject.name, False),
        (_hash_name(subject), _short(subject.manifest_hash), True),
        ("Obtained on", provenance.machine, False),
        ("At", provenance.created, False),
    )
    rows = [
        h("div", None, h("dt", None, name), h("dd", None, h("code", None, text) if code else text))
        for name, text, code in facts
    ]
    word = h(
        "p", {"class": "word"}, badge(page.verdict, page.word), h("span", None, words.meaning(page))
    )
    return h(
        "section",
        {
            "id": "verdict",
            "class": f"verdict {page.verdict.lower()}",
            "aria-labelledby": "title",
            "tabindex": "-1",
        },
        word,
        h("h1", {"id": "title"}, page.sentence),
        h("dl", {"class": "subject"}, rows),
    )


_CHECKPOINTS = ("Checkpoint", "Demonstration")  # kinds of subjects that have headers


def _hash_name(subject: Subject) -> str:
    """Return what the hash is of: only a checkpoint has headers, other pages are keyed by it."""
    return "Header hash" if subject.kind in _CHECKPOINTS else "Page id"


def _short(digest: str) -> str:
    return digest if len(digest) <= 20 else f"{digest[:19]}…"


def _findings(page: Page) -> HtmlElement | None:
    if not page.findings:
        return None
    cards = [_finding(number, page, finding) for number, finding in enumerate(page.findings, 1)]
    return h(
        "section",
        {"id": "findings", "aria-labelledby": "findings-title"},
        h("h2", {"id": "findings-title"}, "Findings"),
        h("ol", {"class": "findings"}, cards),
    )


def _finding(number: int, page: Page, finding: PageFinding) -> HtmlElement:
    origin = finding.origin
    site, *narrower = words.place(origin)
    where = [h("span", {"class": "narrower"}, text) for text in narrower]
    fault = h("code", {"class": "fault"}, origin.fault) if origin.fault else None
    figures = [
        h("span", {"class": "figure"}, h("span", None, name), " ", h("strong", None, value))
        for name, value in words.measures(origin)
    ]
    evidence = h("div", None, h("p", None, origin.evidence), h("p", {"class": "figures"}, figures))
    parts: list[tuple[str, object]] = [("Evidence", evidence)]
    if finding.remedy:
        parts.append(("Remedy", h("p", None, finding.remedy)))
    if finding.reproduction:
        label = f"Command that reproduces finding {number}"
        parts.append(("Reproduce", code_element(finding.reproduction, label)))
    rows = [h("div", None, h("dt", None, n), h("dd", None, e)) for n, e in parts]  # type: ignore[arg-type]
    note = h("p", {"class": "note"}, finding.note) if finding.note else None
    # The sentence stands once: that of the first finding is usually the title of the page.
    said = finding.cause in page.sentence
    cause = None if said else h("p", {"class": "cause"}, finding.cause)
    title = h("h3", None, h("code", None, site), " ", fault, where)
    shown = finding.blocks if number == 1 else finding.blocks[:1]
    blocks = [block_element(block) for block in shown]
    if finding.blocks[len(shown) :]:
        closer = Details("Closer, and in ulps", finding.blocks[len(shown) :])
        blocks.append(h("div", {"class": "block"}, block_element(closer)))
    card = h("article", {"class": "finding"}, title, cause, blocks, h("dl", None, rows), note)
    return h("li", None, card)


def _panels(page: Page) -> list[HtmlElement]:
    panels = [_panel(panel, page) for panel in page.ordered_panels if panel.verdict is not None]
    absent = [_panel(panel, page) for panel in page.ordered_panels if panel.verdict is None]
    return [*panels, h("div", {"class": "absences"}, absent)] if absent else panels


def _panel(panel: Panel, page: Page) -> HtmlElement:
    title = f"{panel.kind}-title"
    attributes = {"id": panel.kind, "aria-labelledby": title}
    heading = h("h2", {"id": title}, words.PANEL_TITLES[panel.kind])
    summary = h("p", {"class": "summary"}, panel.sentence)
    if panel.verdict is None:
        return h("section", {**attributes, "class": "absent"}, heading, summary, badge(None))
    question = h("p", {"class": "question"}, words.PANEL_QUESTIONS[panel.kind])
    head = h("div", {"class": "panel-head"}, heading, question, badge(panel.verdict, panel.word))
    blocks = [block_element(block) for block in panel.blocks]
    told = None if panel.sentence == page.sentence else summary
    return h("section", {**attributes, "class": "panel"}, head, told, blocks)


def _provenance(page: Page) -> HtmlElement:
    provenance = page.provenance
    facts = (*provenance.versions, (_hash_name(page.subject), page.subject.manifest_hash))
    versions = [
        h("div", None, h("dt", None, name), h("dd", None, h("code", None, version)))
        for name, version in facts
    ]
    return h(
        "section",
        {"id": "provenance", "class": "panel", "aria-labelledby": "provenance-title"},
        h(
            "div",
            {"class": "panel-head"},
            h("h2", {"id": "provenance-title"}, "Provenance"),
            h("p", {"class": "question"}, "Where was this obtained?"),
        ),
        code_element(provenance.command, "Command that made this page"),
        h("dl", {"class": "facts"}, versions),
    )


def _footer(page: Page) -> HtmlElement:
    text = f"{page.subject.key} · one file, nothing is loaded from elsewhere"
    return h("footer", None, h("small", None, text))
