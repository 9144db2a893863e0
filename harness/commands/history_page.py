"""The history of a checkpoint as terminal text, and as a panel of the checkpoint's page.

The panel is added to the page of the checkpoint that the latest run measured.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from degarble.harness.commands.report_folder import write_page
from degarble.harness.history.panel import history_panel
from degarble.harness.report.page import Page, Subject, provenance
from degarble.harness.report.verdict import Verdict
from degarble.reports.page_text import page_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from degarble.harness.history.panel import History

MANIFEST = "manifest"  # the fact of a run that names the checkpoint's page


def history_page(history: History) -> Page:
    """Return a page with the history alone."""
    panel = history_panel(history)
    last, stream = history.runs[-1], history.stream
    named = f"{stream.subject}\n{stream.machine}".encode()
    identity = last.facts.get(MANIFEST) or f"sha256:{hashlib.sha256(named).hexdigest()}"
    return Page(
        subject=Subject(stream.subject, "Checkpoint", identity),
        provenance=provenance("degarble history trends"),
        verdict=panel.verdict or Verdict.AGREES,
        sentence=panel.sentence,
        findings=(),
        panels=(panel,),
    )


def history_pages(folder: Path, found: Sequence[History]) -> list[Path]:
    """Write the page of each history; return the files."""
    return [write_page(folder, history_page(each)) for each in found]


def history_text(history: History, *, width: int, colour: bool) -> str:
    """Render a history for a terminal."""
    return page_text(history_page(history), width=width, colour=colour)
