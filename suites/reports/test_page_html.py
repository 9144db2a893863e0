from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace

import pytest

from degarble.harness.report.blocks import HeatMap, HeatScale
from degarble.harness.report.page import Page, Panel, PanelKind
from degarble.harness.report.verdict import Verdict
from degarble.reports.page_html import SIZE_LIMIT, page_html, sprite
from degarble.suites.reports.page_cases import HOSTILE, page_of
from degarble.suites.reports.report_cases import PAGE
from degarble.suites.reports.test_markup import Reader
from degarble.suites.snapshots import assert_as_kept

PLAIN = Reader(page_html(page_of("plain"))).elements


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_changes_no_element_of_the_page(text: str) -> None:
    markup = page_html(page_of(text))
    assert Reader(markup).elements == PLAIN
    markup.encode("utf-8")


def test_the_page_loads_nothing() -> None:
    markup = page_html(page_of("plain"))
    links = re.findall(r'<a [^>]*href="([^"]*)"', markup)
    beside = [address for address in links if not address.startswith("#")]
    assert beside == ["a-page-cosines.csv"]  # a table beside the page, loaded by nobody
    addresses = re.findall(r'(?:src|href|action)="([^"]*)"', markup)
    loaded = [address for address in addresses if address not in beside]
    assert all(a.startswith(("#", "data:image/svg+xml;base64,")) for a in loaded)
    assert "http://" not in markup.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in markup
    assert "url(" not in markup
    assert "@import" not in markup


def test_the_policy_admits_this_style_and_this_script_only() -> None:
    markup = page_html(page_of("plain"))
    found = re.search(r'Content-Security-Policy" content="([^"]*)"', markup)
    assert found is not None
    policy = found.group(1)
    for element in ("style", "script"):
        (content,) = re.findall(f"<{element}>(.*?)</{element}>", markup, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_page_can_be_walked_without_eyes_or_mouse() -> None:
    markup = page_html(page_of("plain"))
    assert '<a class="skip" href="#verdict">' in markup
    assert '<html lang="en-GB">' in markup
    for landmark in ("<header", "<nav aria-label=", "<main>", "<footer>"):
        assert markup.count(landmark) == 1
    labels = re.findall(r'<section[^>]* aria-labelledby="([^"]*)"', markup)
    assert len(labels) == 8  # verdict, findings, five panels, provenance
    assert all(f'id="{label}"' in markup for label in labels)
    assert markup.count("<h1") == 1
    targets = set(re.findall(r'href="#([^"]*)"', markup))
    assert all(f'id="{target}"' in markup for target in targets)


def test_ids_are_unique() -> None:
    page = page_of("plain")
    single = replace(page, panels=page.panels[:1])
    ids = re.findall(r' id="([^"]*)"', page_html(single))
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("verdict", Verdict)
def test_each_verdict_has_its_icon(verdict: Verdict) -> None:
    assert f'id="icon-{verdict.lower()}"' in str(sprite())
    assert f'class="verdict {verdict.lower()}"' in page_html(page_of("plain", verdict))


def test_the_same_record_gives_the_same_bytes() -> None:
    assert page_html(page_of("plain")) == page_html(page_of("plain"))


def test_a_full_model_fits_the_limit() -> None:
    """61 layers by 40 components, three maps, each cell with a link: the largest table to come."""
    layers = tuple(str(index) for index in range(61))
    parts = tuple(f"attn.part_{index}" for index in range(40))
    values = tuple(tuple(index / 40 for index in range(40)) for _ in layers)
    anchors = tuple(tuple(f"cell-{i}-{j}" for j in range(40)) for i in range(61))
    maps = tuple(
        HeatMap(f"map {n}", "layer", "part", layers, parts, values, HeatScale(0, 1), anchors)
        for n in range(3)
    )
    panel = Panel(PanelKind.REPLAY, "all", Verdict.AGREES, maps)
    page: Page = replace(page_of("x"), panels=(panel,))
    assert len(page_html(page).encode()) < SIZE_LIMIT


def test_words_of_the_page_are_as_kept() -> None:
    body = page_html(PAGE).partition("<body>")[2].partition("<script>")[0]
    lines = [piece.strip() for piece in Reader(body).pieces]
    assert_as_kept("reports/page_words.txt", "".join(f"{line}\n" for line in lines if line))
