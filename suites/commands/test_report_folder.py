"""A page and its record lie side by side, keep earlier panels, and get the history's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import UnreadableFile, UnwritablePath
from degarble.harness.commands.report_folder import history_pages, write_page
from degarble.harness.history.panel import history_of
from degarble.harness.history.store import HistoryStore
from degarble.harness.report.page import (
    MANIFEST,
    Page,
    Panel,
    PanelKind,
    Provenance,
    Subject,
    page_from_json,
)
from degarble.harness.report.verdict import Verdict
from degarble.suites.history.history_cases import W2, run
from degarble.suites.reports.page_cases import HOSTILE, page_of

if TYPE_CHECKING:
    from pathlib import Path


def test_a_page_and_its_record_lie_side_by_side(tmp_path: Path) -> None:
    html = write_page(tmp_path / "new" / "folder", page_of("plain"))
    assert html.name == "plain-0123456789ab.html"
    assert sorted(path.suffix for path in html.parent.iterdir()) == [".html", ".json"]
    record = html.with_suffix(".json").read_text(encoding="utf-8")
    assert page_from_json(record).sentence == "plain"


def test_panels_of_earlier_runs_of_the_checkpoint_stay(tmp_path: Path) -> None:
    page = page_of("plain")
    audit = Panel(PanelKind.AUDIT, "files", Verdict.AGREES)
    write_page(tmp_path, replace(page, panels=(audit, Panel(PanelKind.TEXT, "old"))))
    html = write_page(tmp_path, replace(page, panels=(Panel(PanelKind.TEXT, "new"),)))
    merged = page_from_json(html.with_suffix(".json").read_text(encoding="utf-8"))
    assert {panel.kind: panel.sentence for panel in merged.panels} == {
        PanelKind.AUDIT: "files",
        PanelKind.TEXT: "new",
    }


@pytest.mark.parametrize(
    ("earlier", "now", "told"),
    [
        (Verdict.DIFFERS, Verdict.AGREES, Verdict.DIFFERS),
        (Verdict.UNDECIDED, Verdict.AGREES, Verdict.UNDECIDED),
        (Verdict.UNDECIDED, Verdict.DIFFERS, Verdict.DIFFERS),
        (Verdict.AGREES, Verdict.AGREES, Verdict.AGREES),
        (Verdict.AGREES, Verdict.DIFFERS, Verdict.DIFFERS),
    ],
)
def test_an_agreeing_run_does_not_cover_what_an_earlier_one_found(
    tmp_path: Path, earlier: Verdict, now: Verdict, told: Verdict
) -> None:
    page = page_of("plain")
    first = replace(
        page, verdict=earlier, panels=(Panel(PanelKind.AUDIT, "files are bad", earlier),)
    )
    write_page(tmp_path, first)
    second = replace(page, verdict=now, panels=(Panel(PanelKind.TEXT, "text", now),))
    html = write_page(tmp_path, second)
    merged = page_from_json(html.with_suffix(".json").read_text(encoding="utf-8"))
    assert merged.verdict is told
    assert ("files are bad" in merged.sentence) == (told is not now)


def test_equal_names_of_two_subjects_do_not_merge(tmp_path: Path) -> None:
    page = page_of("plain")
    write_page(tmp_path, page)
    subject = replace(page.subject, manifest_hash=page.subject.manifest_hash + "ff")
    other = replace(page, subject=subject)
    assert other.subject.key == page.subject.key
    with pytest.raises(UnreadableFile, match="Another subject"):
        write_page(tmp_path, other)


def test_another_checkpoint_has_another_page(tmp_path: Path) -> None:
    page = page_of("plain")
    first = write_page(tmp_path, page)
    subject = replace(page.subject, manifest_hash="sha256:ffff")
    assert write_page(tmp_path, replace(page, subject=subject)) != first
    assert len(list(tmp_path.glob("*.html"))) == 2


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_name_stays_in_the_folder(tmp_path: Path, text: str) -> None:
    html = write_page(tmp_path / "in", page_of(f"../{text}"))
    assert html.parent == tmp_path / "in"
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_damaged_record_is_refused_and_left_alone(tmp_path: Path) -> None:
    html = write_page(tmp_path, page_of("plain"))
    before = html.read_bytes()
    for damage in (b"{", b"\xff\xfe", b"[]"):
        html.with_suffix(".json").write_bytes(damage)
        with pytest.raises(UnreadableFile, match="plain-0123456789ab"):
            write_page(tmp_path, page_of("plain"))
        assert html.with_suffix(".json").read_bytes() == damage
        assert html.read_bytes() == before


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(UnwritablePath, match="report folder"):
        write_page(tmp_path / "a", page_of("plain"))


# --------------------------------------------------------------------------------------------------
# The history goes into the page of the checkpoint that the latest run measured.

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
