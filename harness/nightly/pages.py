"""The files of a nightly run: the checkpoint's page, a JSON document, a Markdown summary.

The page combines the panels that the audit and check steps wrote with the text gates, kernels and
history. The summary is for the page of a CI job. Text from outside is escaped.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from degarble.harness.base.files import read_small_text
from degarble.harness.commands.report_folder import LARGEST_RECORD, write_page
from degarble.harness.history.panel import history_panel
from degarble.harness.history.store import HistoryStore
from degarble.harness.nightly.night import to_plain
from degarble.harness.nightly.steps import RAN, history_in, run_of, where_of
from degarble.harness.report.blocks import Column, ColumnKind, Sentence, Table
from degarble.harness.report.files import write_text
from degarble.harness.report.number_text import visible
from degarble.harness.report.page import (
    MANIFEST,
    Page,
    Panel,
    PanelKind,
    Subject,
    machine,
    page_from_json,
    provenance,
)
from degarble.harness.report.verdict import SCHEMA, SEVERITY, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from degarble.harness.nightly.night import Night, StepResult

COMMAND = "make nightly"
KERNEL_STEPS = ("codecs", "compile", "kernels", "figures")
_SIGNS = {
    Verdict.AGREES: "✓", Verdict.DIFFERS: "✗", Verdict.UNSTABLE: "✗",
    Verdict.UNDECIDED: "–", Verdict.REFUSED: "!",
}  # fmt: skip
_LINES = 8  # of what is wrong with one step
_MARKS = re.compile(r"([\\`*_{}\[\]<>|#])")


@dataclass(frozen=True)
class NightFiles:
    """The files of a night."""

    page: Path
    document: Path
    summary: Path


def write_night(night: Night) -> NightFiles:
    """Write page, document and summary of the steps run so far."""
    page = page_of(night)
    html = write_page(night.asked.folder, page)
    stem = f"{page.subject.key}-night"
    document, summary = (night.asked.folder / f"{stem}.{end}" for end in ("json", "md"))
    write_text(document, json.dumps(document_of(night), ensure_ascii=True, indent=1) + "\n")
    write_text(summary, markdown(night))
    return NightFiles(html, document, summary)


def page_of(night: Night) -> Page:
    """Return the checkpoint's page with all panels of the night."""
    subject = Subject(night.asked.checkpoint.resolve().name, "Checkpoint", _identity(night))
    record = night.asked.folder / f"{subject.key}.json"
    if record.exists():
        page = page_from_json(read_small_text(record, LARGEST_RECORD), str(record))
    else:
        page = Page(subject, provenance(COMMAND), Verdict.AGREES, "")
    for panel in (_kernels(night), _history(night), _texts(night, page)):
        if panel is not None:
            page = page.with_panel(panel)
    made = replace(provenance(COMMAND), machine=_where(night))
    # Trap: the word is of the check, which may have found nothing in a night that failed.
    word = page.word if night.verdict is Verdict.AGREES else ""
    return replace(page, provenance=made, verdict=night.verdict, word=word, sentence=night.sentence)


def _where(night: Night) -> str:
    result = night.results.get("environment")
    text = where_of(result.facts, gpu=night.asked.gpu) if result is not None else ""
    return text or machine()


def _identity(night: Night) -> str:
    for result in night.results.values():
        if MANIFEST in result.facts:
            return result.facts[MANIFEST]
    return f"sha256:{hashlib.sha256(night.asked.name.encode()).hexdigest()}"


def _table(caption: str, rows: Iterable[tuple[str, str, str]], columns: tuple[str, ...]) -> Table:
    return Table(caption, tuple(Column(column) for column in columns), tuple(rows))


def _kernels(night: Night) -> Panel | None:
    found = {name: night.results[name] for name in KERNEL_STEPS if name in night.results}
    if not found:
        return None
    # Formats that are met say nothing of kernels that did not run.
    judged = [
        result.verdict
        for name, result in found.items()
        if name == "kernels" or result.verdict is not Verdict.UNDECIDED
    ] + [Verdict.UNDECIDED] * ("kernels" not in found)
    worst = max(judged, key=SEVERITY.index, default=Verdict.UNDECIDED)
    columns = (Column("step"), Column("verdict", ColumnKind.VERDICT), Column("what it says"))
    rows = tuple((name, result.verdict, result.sentence) for name, result in found.items())
    sentence = " ".join(result.sentence for result in found.values())
    blocks = [Table("Known answers", columns, rows)]
    forms = found["compile"].rows if "compile" in found else ()
    if forms:
        told_forms = tuple((name, said) for name, _, said in forms)
        of_forms = (Column("kernel"), Column("forms"))
        blocks.append(Table("Kernels that were made ready first", of_forms, told_forms))
    suites = found["kernels"].rows if "kernels" in found else ()
    if suites:
        columns = (Column("suite"), Column("verdict", ColumnKind.VERDICT), Column("cases"))
        told = tuple((name, Verdict(verdict), said) for name, verdict, said in suites)
        blocks.append(Table("Suites of kernels on this device", columns, told))
    rates = found["figures"].rows if "figures" in found else ()
    if rates:
        blocks.append(
            Table(
                "Rates, with ceilings of the same run",
                (Column("kernel"), Column("rate")),
                tuple((name, said) for name, _, said in rates),
            )
        )
    ran = _kernels_that_ran(night)
    if ran:
        names = tuple(Column(each) for each in ("role", "kernels, tactics, launches"))
        blocks.append(Table("Which kernel and tactic ran", names, ran))
    return Panel(PanelKind.KERNELS, sentence, worst, tuple(blocks))


def _kernels_that_ran(night: Night) -> tuple[tuple[str, str], ...]:
    result = night.results.get("captures")
    facts = result.facts if result is not None else {}
    return tuple((k.removeprefix(RAN), v) for k, v in facts.items() if k.startswith(RAN))


def _history(night: Night) -> Panel | None:
    config, result = night.asked, night.results.get("history")
    if config.store is None or result is None or result.verdict not in _RAN:
        return None
    run = run_of(config, {k: v for k, v in night.results.items() if k not in ("history", "ledger")})
    assert run is not None, "the step has added it"
    with HistoryStore(config.store) as store:
        panel = history_panel(history_in(store, run))
    settled = night.results.get("ledger")
    lines = settled.lines if settled is not None else ()
    panel = replace(panel, verdict=result.verdict, sentence=result.sentence)
    return replace(panel, blocks=(*panel.blocks, *(Sentence(f"Ledger: {line}") for line in lines)))


_RAN = (Verdict.AGREES, Verdict.DIFFERS)


def _texts(night: Night, page: Page) -> Panel | None:
    """Return the text panel with the gates after the answers."""
    result = night.results.get("text")
    if result is None:
        return None
    old = next((panel for panel in page.panels if panel.kind is PanelKind.TEXT), None)
    kept = () if old is None else tuple(b for b in old.blocks if not _is_gates(b))
    columns = ("statistic", "verdict", "drift")
    blocks = (*kept, _table(_GATES, result.rows, columns)) if result.rows else kept
    verdict = result.verdict
    if old is not None and old.verdict is not None:
        verdict = max(verdict, old.verdict, key=SEVERITY.index)
    return Panel(PanelKind.TEXT, result.sentence, verdict, blocks)


_GATES = "Statistics over the prompts, each drift with its interval"


def _is_gates(block: object) -> bool:
    return isinstance(block, Table) and block.caption == _GATES


def document_of(night: Night) -> dict[str, object]:
    """Return the night as plain data."""
    config = night.asked
    return {
        "schema": SCHEMA,
        "verdict": night.verdict,
        "sentence": night.sentence,
        "checkpoint": config.name,
        "night": config.night,
        "started": config.started,
        "commit": config.commit or None,
        "complete": night.complete,
        "continued": night.continued,
        "missing": night.missing,
        "crashed": night.crashed,
        "red": [name for name in night.results if night.red(name)],
        "steps": {name: to_plain(result) for name, result in night.results.items()},
    }


def markdown(night: Night) -> str:
    """Return the summary for the page of a CI job."""
    config = night.asked
    about = [config.night, _where(night), f"commit {config.commit[:12]}" if config.commit else ""]
    lines = [
        f"## {_SIGNS[night.verdict]} {night.verdict}: {_plain(config.name)}",
        "",
        _plain(", ".join(filter(None, about))),
        "",
        _plain(night.sentence),
        "",
        "| step | verdict | what it says |",
        "|---|---|---|",
    ]
    lines += [_row(night, name, step_result) for name, step_result in night.results.items()]
    for name, result in night.results.items():
        lines += _wrong(night, name, result)
    return "\n".join(lines) + "\n"


def _row(night: Night, name: str, result: StepResult) -> str:
    verdict = str(result.verdict)
    if result.red and not night.red(name):
        verdict += ", known"
    elif result.verdict is Verdict.UNDECIDED and not result.asked:
        verdict = "not run"
    return f"| {name} | {_SIGNS[result.verdict]} {verdict} | {_plain(result.sentence)} |"


def _wrong(night: Night, name: str, result: StepResult) -> list[str]:
    """Return what is wrong with a step, or its other remarks."""
    texts = list(result.lines)
    if result.red and not texts:
        texts = [f"{failure.component}: {failure.sentence}" for failure in result.failures]
    if not texts:
        return []
    more = len(texts) - _LINES
    head = "What is wrong" if night.red(name) else "Also reported"
    lines = ["", f"### {head}: {name}", "", *(f"- {_plain(each)}" for each in texts[:_LINES])]
    return [*lines, f"- and {more} more"] if more > 0 else lines


def _plain(text: str) -> str:
    """Escape one line for Markdown."""
    return _MARKS.sub(r"\\\1", " ".join(visible(text).split()))
