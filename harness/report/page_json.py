"""Convert a report page to JSON text and back, with a schema number.

The document is `{"schema": 1, "kind": "degarble.page", "page": {...}}`. Old pages stay readable.
"""

from __future__ import annotations

import json

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.report.page import Page
from degarble.harness.report.plain import from_plain, to_plain
from degarble.harness.report.verdict import SCHEMA

KIND = "degarble.page"


def page_to_json(page: Page) -> str:
    """Write the page as text; the same page gives the same bytes."""
    document = {"schema": SCHEMA, "kind": KIND, "page": to_plain(page)}
    return json.dumps(document, allow_nan=False, ensure_ascii=True, indent=1) + "\n"


def page_from_json(text: str, name: str = "page") -> Page:
    """Read what page_to_json wrote; `name` is what a refusal calls the document."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(
            name, str(error), "a JSON document", "Write the page again with degarble."
        ) from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        found = document.get("kind") if isinstance(document, dict) else type(document).__name__
        raise UnreadableFile(
            name, found, f"a document of kind {KIND}", "Give the .json beside a report page."
        )
    if document.get("schema") != SCHEMA:
        raise UnreadableFile(
            name,
            document.get("schema"),
            f"schema {SCHEMA}",
            "Render it with the version of degarble that wrote it.",
        )
    page: Page = from_plain(Page, document.get("page"), "page")
    return page
