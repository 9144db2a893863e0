"""Store pages of checkpoints, one HTML file and one record each, and add the history's panel."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.base.files import read_small_text
from degarble.harness.history.panel import history_panel
from degarble.harness.report.files import usable_folder, write_text
from degarble.harness.report.page import (
    MANIFEST,
    Page,
    Subject,
    page_from_json,
    page_to_json,
    provenance,
)
from degarble.harness.report.verdict import SEVERITY, Verdict
from degarble.reports.page_html import page_html
from degarble.reports.page_text import page_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from degarble.harness.history.panel import History
    from degarble.harness.report.page import Panel


# --------------------------------------------------------------------------------------------------
# Store pages: one HTML file and one record per checkpoint, keyed by its manifest hash.
#
# A run that adds one panel keeps the panels of earlier runs of the same checkpoint, and their
# verdict if it is worse. A folder that cannot be written, an unreadable record and another
# subject's page are refused before anything is written.

LARGEST_RECORD = 256 << 20  # of a page as JSON


def write_page(folder: Path, page: Page) -> Path:
    """Write the page together with the existing panels; return the HTML file."""
    usable_folder("report folder", folder)
    record = folder / f"{page.subject.key}.json"
    merged = with_earlier_panels(page, record)
    html = folder / f"{page.subject.key}.html"
    write_text(record, page_to_json(merged))
    write_text(html, page_html(merged))
    return html


def with_earlier_panels(page: Page, record: Path) -> Page:
    """Add the panels of `record` that `page` lacks; the worst verdict stays on top."""
    if not record.exists():
        return page
    earlier = page_from_json(read_small_text(record, LARGEST_RECORD), str(record))
    if earlier.subject.manifest_hash != page.subject.manifest_hash:
        raise UnreadableFile(
            str(record),
            earlier.subject.manifest_hash,
            f"the page of {page.subject.manifest_hash}",
            "Another subject's page has this name: choose another report folder.",
        )
    ours = {panel.kind for panel in page.panels}
    kept = [panel for panel in earlier.panels if panel.kind not in ours]
    for panel in kept:
        page = page.with_panel(panel)
    worst = max(kept, key=_severity, default=None)
    if worst is None or worst.verdict is None or _severity(worst) <= _severity(page):
        return page
    # Trap: an agreeing run must not cover what an earlier run found elsewhere.
    sentence = f"{page.sentence} But {worst.kind}, run earlier: {worst.sentence}"
    replaced = len(kept) < len(earlier.panels)
    findings = page.findings if replaced else (*page.findings, *earlier.findings)
    return replace(page, verdict=worst.verdict, word="", sentence=sentence, findings=findings)


def _severity(judged: Page | Panel) -> int:
    return -1 if judged.verdict is None else SEVERITY.index(judged.verdict)


# --------------------------------------------------------------------------------------------------
# The history of a checkpoint as terminal text, and as a panel of the checkpoint's page.
#
# The panel is added to the page of the checkpoint that the latest run measured.


def history_page(history: History) -> Page:
    """Return a page with the history alone."""
    panel = history_panel(history)
    last, stream = history.runs[-1], history.stream
    named = f"{stream.subject}\n{stream.machine}".encode()
    stated = last.facts.get(MANIFEST)  # without it the hash is of a name, not of headers
    identity = stated or f"sha256:{hashlib.sha256(named).hexdigest()}"
    return Page(
        subject=Subject(stream.subject, "Checkpoint" if stated else "Subject", identity),
        provenance=provenance("degarble history trends"),
        verdict=panel.verdict or Verdict.AGREES,
        sentence=panel.sentence,
        findings=(),
        panels=(panel,),
    )


def history_pages(folder: Path, found: Sequence[History]) -> list[Path]:
    """Write the page of each history; return the files."""
    return [write_page(folder, history_page(history)) for history in found]


def history_text(history: History, *, width: int, colour: bool) -> str:
    """Render a history for a terminal."""
    return page_text(history_page(history), width=width, colour=colour)
