from __future__ import annotations

import json
from pathlib import Path

import pytest

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.report.page import page_from_json, page_to_json
from degarble.harness.report.verdict import Verdict
from degarble.suites.reports.page_cases import HOSTILE, page_of

# Written by version 0.1.0 and never changed: an old page must still open.
OLD = Path(__file__).with_name("page_schema_1.json")


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_round_trips(text: str) -> None:
    written = page_to_json(page_of(text))
    written.encode("ascii")
    assert page_to_json(page_from_json(written)) == written


def test_an_old_page_is_still_read() -> None:
    page = page_from_json(OLD.read_text(encoding="utf-8"), OLD.name)
    assert page.verdict is Verdict.DIFFERS
    assert page.findings[0].origin.fault == "an old page"
    assert [panel.kind for panel in page.panels] == ["replay", "audit", "history"]


@pytest.mark.parametrize(
    ("text", "expectation"),
    [
        ("", "a JSON document"),
        ("{", "a JSON document"),
        ("[" * 100_000, "a JSON document"),
        ("[]", "a document of kind degarble.page"),
        ('{"kind": "degarble.capture", "schema": 1}', "a document of kind degarble.page"),
        ('{"kind": "degarble.page", "schema": 2, "page": {}}', "schema 1"),
        ('{"kind": "degarble.page", "schema": 1}', "an object"),
    ],
)
def test_what_is_no_page_is_refused(text: str, expectation: str) -> None:
    with pytest.raises(UnreadableFile) as caught:
        page_from_json(text, "report.json")
    assert caught.value.expectation == expectation


def test_a_page_is_one_document_with_a_schema() -> None:
    document = json.loads(page_to_json(page_of("x")))
    assert document["schema"] == 1
    assert document["kind"] == "degarble.page"
