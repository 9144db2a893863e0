"""The history goes into the page of the checkpoint that the latest run measured."""

from dataclasses import replace
from pathlib import Path

from degarble.harness.commands.report_folder import MANIFEST, history_pages, write_page
from degarble.harness.history.panel import history_of
from degarble.harness.history.store import HistoryStore
from degarble.harness.report.page import Page, Panel, PanelKind, Provenance, Subject, page_from_json
from degarble.harness.report.verdict import Verdict
from degarble.suites.history.history_cases import W2, run

HASH = "sha256:" + "ab" * 32


def test_a_page_keeps_its_other_panels(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    panel = Panel(PanelKind.AUDIT, "Nothing found.", Verdict.AGREES)
    subject = Subject("tiny", "Checkpoint", HASH)
    where = Provenance("2026-11-22", "audit", "CPU", ())
    write_page(folder, Page(subject, where, Verdict.AGREES, "Fine.", (), (panel,)))
    with HistoryStore(str(tmp_path / "h.sqlite"), create=True) as store:
        store.add(replace(run(0), facts={MANIFEST: HASH}))
        [page] = history_pages(folder, [history_of(store, store.streams()[0])])
    kept = page_from_json(page.with_suffix(".json").read_text())
    assert [each.kind for each in kept.panels] == [PanelKind.HISTORY, PanelKind.AUDIT]
    assert W2 in page.read_text()
    assert len(list(folder.glob("*.html"))) == 1
