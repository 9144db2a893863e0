"""The output of `degarble check`: HTML page with tables, JSON, JUnit and terminal text."""

from __future__ import annotations

import json
import math
import re
import shlex
import textwrap
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

from rich.console import Console
from rich.text import Text

from degarble.harness.backends.registry import TORCH
from degarble.harness.capture.recorded_tensors import SPAN
from degarble.harness.commands.audit.audit import identity_of
from degarble.harness.commands.check.check import texts_of
from degarble.harness.commands.check.error_picture import error_blocks
from degarble.harness.commands.report_folder import with_earlier_panels, write_page
from degarble.harness.engine.adopted.statement import statement_of
from degarble.harness.engine.localise.judged_run import PAIRS
from degarble.harness.engine.localise.recorded_run import is_in_part
from degarble.harness.engine.localise.screening import NEAR
from degarble.harness.report.files import usable_folder, write_text
from degarble.harness.report.kernel_table import table_lines
from degarble.harness.report.number_text import number, share, visible
from degarble.harness.report.page import Page, PageFinding, Subject, provenance, to_plain
from degarble.harness.report.replay_record import JudgedOutput, ReplayRecord
from degarble.harness.report.verdict import NO_ERRORS, SCHEMA, Origin, Verdict
from degarble.reports.page_html import SIZE_LIMIT, page_html
from degarble.reports.page_text import badge
from degarble.reports.replay_panel import CARDS, replay_panel, text_panel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from degarble.harness.commands.check.check import CheckResult, CheckRun, DiagnosedOrigin
    from degarble.harness.commands.check.output_statistics import StatisticsCollector
    from degarble.harness.engine.localise.discrepancy import Discrepancy
    from degarble.harness.engine.localise.judged_run import OutputRow
    from degarble.harness.engine.localise.localise import Localised
    from degarble.harness.engine.localise.screening import SampledRows
    from degarble.harness.model.recipes import Recipe
    from degarble.harness.report.page import Provenance
    from degarble.harness.report.replay_record import TextRecord


# --------------------------------------------------------------------------------------------------
# The panels of a check on its checkpoint's HTML page, and the tables written with it.
#
# The results of localising and diagnosing become the records of harness.report.replay_record. If
# the page is too large to be mailed, statistics of outputs are left out. The page is that of the
# checkpoint, under its manifest hash; panels of earlier runs stay.

_FEWER = (250, 150, 50, 10, 0)  # close looks, until the page is small enough
_NEAREST = 3  # excluded faults that are shown


def write_check_report(
    folder: Path,
    opened: CheckRun,
    checked: CheckResult,
    collector: StatisticsCollector,
    command: str,
) -> Path:
    """Write the page of a check, its tables and JUnit into a folder; return the page."""
    subject = Subject(checked.name, "Checkpoint", identity_of(opened.model.checkpoint))
    sentence = check_sentence(checked)
    localised = checked.localised
    told = () if localised.sampled is None else tuple(screen_lines(localised.sampled))
    screened = tuple(f"Screened: {line}." for line in told)
    localised = replace(localised, notes=(*screened, *checked.notes, *localised.notes))
    facts = (*checked.facts.items(), *captured_facts(checked.capture.facts, checked.recipe))
    record = replay_record(localised, checked.origins, collector, sentence, facts)
    texts = texts_of(opened.capture, opened.model)
    page = check_page(subject, provenance(command), record, checked.origins, texts)
    page = replace(page, word=check_word(checked))
    path = write_check_page(folder, page, record)
    write_text(folder / f"{subject.key}-junit.xml", junit(checked, sentence))
    described = descriptions(checked.origins)
    if described:
        text = json.dumps(to_plain(described), indent=1, allow_nan=False) + "\n"
        write_text(folder / f"{subject.key}-descriptions.json", text)
    return path


def write_check_page(folder: Path, page: Page, record: ReplayRecord) -> Path:
    """Add the panels to the checkpoint's page, write the tables, and return the page."""
    usable_folder("report folder", folder)
    whole = with_earlier_panels(page, folder / f"{page.subject.key}.json")
    for most in _FEWER:
        if len(page_html(whole).encode()) <= SIZE_LIMIT:
            break
        fewer = replay_panel(record, _files(page.subject.key), most)
        panels = (fewer if panel.kind is fewer.kind else panel for panel in page.panels)
        page, whole = replace(page, panels=tuple(panels)), whole.with_panel(fewer)
    for name, text in tables(page.subject.key, record).items():
        write_text(folder / name, text)
    return write_page(folder, page)


def check_page(
    subject: Subject,
    where: Provenance,
    record: ReplayRecord,
    origins: Sequence[DiagnosedOrigin],
    texts: TextRecord | None = None,
) -> Page:
    """Return the page of a check alone; that of the demonstration is one."""
    panels = [replay_panel(record, _files(subject.key))]
    if texts is not None:
        panels.append(text_panel(texts, record.verdict))
    findings = tuple(_finding(origin) for origin in origins[:CARDS])
    return Page(subject, where, record.verdict, record.sentence, findings, tuple(panels))


def replay_record(
    localised: Localised,
    origins: Sequence[DiagnosedOrigin],
    collector: StatisticsCollector,
    sentence: str,
    facts: tuple[tuple[str, str], ...] = (),
    preface: tuple[str, ...] = (),
) -> ReplayRecord:
    """Return all data of the replay panel as plain numbers and text; `preface` comes first."""
    notes = list(localised.notes)
    first = localised.first_non_finite
    if first is not None:
        notes.append(first.sentence)
    notes += [f"{name} is not judged: {why}." for name, why in localised.unjudged]
    return ReplayRecord(
        localised.verdict,
        sentence,
        tuple(_output(row, collector) for row in localised.rows),
        tuple(str(origin.discrepancy.site) for origin in origins),
        tuple(origin.discrepancy.sentence for origin in origins),
        tuple(notes),
        facts,
        preface,
    )


def page_sentence(
    localised: Localised,
    origins: Sequence[DiagnosedOrigin],
    *,
    built_in: bool = False,
    in_part: bool = False,
) -> str:
    """Return the verdict in one sentence.

    `built_in`: only our own references computed the run. `in_part`: not all of it was captured.
    """
    if localised.unstable:
        return f"{localised.unstable[0]} gave two answers to the same question."
    if origins:
        first = f"{placed(origins[0].discrepancy)}: {origins[0].cause}."
        more = len(origins) - 1
        return first if not more else f"{first} {more} more {'place' if more == 1 else 'places'}."
    if localised.verdict is Verdict.AGREES:
        calls = sum(row.calls for row in localised.rows)
        if localised.sampled:
            own = "Built-in reference: no kernel was tested. " if built_in else ""
            return (
                f"{own}Screened: of {len(localised.sampled):,} components only sampled rows were"
                f" looked at; {calls:,} outputs show nothing beyond their budgets there."
            )
        if built_in:
            return (
                f"Built-in reference: no kernel was tested. {calls:,} outputs within their budgets."
            )
        every = "Every component that was captured" if in_part else "Every component"
        if any(row.component.name.endswith(SPAN) for row in localised.rows):
            every = "Every component and stretch that was recorded"
        return f"{every} does what its twin does: {calls:,} outputs within their budgets."
    return "Nothing is claimed: no component could be judged."


def placed(discrepancy: Discrepancy) -> str:
    """Return layer and component of a discrepancy as text."""
    layer, role = _layer_and_role(discrepancy.component)
    return role if layer is None else f"Layer {layer}, {role}"


def share_sentence(value: float) -> str:
    """Return how much of the difference of the final logits one origin alone explains, as text."""
    if value < 0:
        return (
            f"Mending it alone makes the difference of the logits {share(-value)} larger:"
            " another origin hides a part of it."
        )
    return f"Mending it alone removes {share(value)} of the difference of the logits."


def origin_of(origin: DiagnosedOrigin) -> Origin:
    """Return the origin as data."""
    discrepancy, named = origin.discrepancy, None
    if origin.diagnosed is not None and origin.diagnosed.named:
        named = origin.diagnosed.named[0]
    described = None if origin.diagnosed is None else origin.diagnosed.described
    layer, role = _layer_and_role(discrepancy.component)
    cosine, difference, budget = _measured(discrepancy)
    where = dict(discrepancy.where)
    if origin.diagnosed is not None:
        where = {**origin.diagnosed.where, **where}
    if named is not None:
        where |= {key: each for key, each in named.variant.where.items() if key not in where}
    evidence = discrepancy.sentence
    if named is not None:
        evidence = named.evidence
    elif described is not None:
        evidence = described.evidence
    return Origin(
        layer,
        role,
        str(discrepancy.site),
        where,
        None if named is None else named.id,
        cosine,
        difference,
        budget,
        0.0 if origin.diagnosed is None else origin.diagnosed.confidence,
        evidence,
        origin.reproducer,
        origin.level,
        () if described is None else described.table,
    )


def _finding(diagnosed_origin: DiagnosedOrigin) -> PageFinding:
    told = diagnosed_origin.diagnosed
    notes = []
    if told is not None and told.named and told.named[0].alternatives:
        notes.append(f"Equally well explained by {', '.join(told.named[0].alternatives)}.")
    if told is not None and told.described is not None and len(told.described.table) > 1:
        notes.append(f"{'; '.join(told.described.table)}.")
    if told is not None and not told.named:
        near = ", ".join(excluded.fault for excluded in told.excluded[:_NEAREST])
        notes.append(f"{told.tried:,} variants were tried{f'; nearest: {near}' if near else ''}.")
    if diagnosed_origin.share is not None:
        notes.append(share_sentence(diagnosed_origin.share))
    origin = origin_of(diagnosed_origin)
    command = diagnosed_origin.reproducer
    if command.endswith(".py"):
        command = f"python {shlex.quote(command)}"
    return PageFinding(
        diagnosed_origin.cause,
        diagnosed_origin.remedy,
        origin,
        command,
        " ".join(notes),
        error_blocks(diagnosed_origin),
    )


def captured_facts(facts: Mapping[str, Any], recipe: Recipe) -> tuple[tuple[str, str], ...]:
    """Return what a capture states about its run, for display: recipe, sums, versions."""
    rules = [f"{r.match}: {r.weight} x {r.activation}" for r in recipe.rules]
    told = [("recipe", "; ".join(rules) or recipe.name)]
    told += [(name, str(facts[name])) for name in ("family", "sums", "form") if facts.get(name)]
    versions = facts.get("versions")
    if isinstance(versions, dict):
        told.append(("captured with", ", ".join(f"{k} {v}" for k, v in versions.items())))
    return tuple(told)


def _measured(discrepancy: Discrepancy) -> tuple[float | None, float | None, float | None]:
    """Return cosine, relative difference and budget of the worst call."""
    judged = discrepancy.judged
    if judged is None or judged.comparison is None:
        return None, None, None
    total, budget = judged.comparison.total, _number_or_none(judged.relative_budget)
    if judged.comparison.census.mismatched:
        return None, None, budget  # the sums know finite values only
    return _number_or_none(float(total.cosine)), _number_or_none(float(total.relative_l2)), budget


def _number_or_none(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def _layer_and_role(component: str) -> tuple[int | None, str]:
    kind, _, rest = component.partition(".")
    number, _, role = rest.partition(".")
    if kind in ("layers", "mtp") and number.isdecimal():
        return int(number), role if kind == "layers" else f"{kind} {role}"
    return None, component


def _output(row: OutputRow, collector: StatisticsCollector) -> JudgedOutput:
    component = row.component
    layer, _ = _layer_and_role(component.name)
    measured = collector.measured_output(component.name, row.output)
    sums = [row.cosines.get(pair) for pair in PAIRS]
    cosines = [None if total is None else _number_or_none(total.cosine) for total in sums]
    return JudgedOutput(
        component=component.name,
        role=component.role,
        layer=layer,
        output=row.output,
        verdict=row.verdict,
        ratio=_number_or_none(row.ratio),
        cosines=(cosines[0], cosines[1], cosines[2]),
        difference=measured.difference,
        budget=measured.budget,
        identical=row.identical / row.elements if row.elements else None,
        elements=row.elements,
        calls=row.calls,
        flips=row.flips,
        choices=row.choices,
        undecided=row.undecided,
        look=measured.look,
    )


_TABLES = {
    "outputs.csv": "one row an output: verdict, cosines, difference, budget",
    "budgets.csv": "layer by component: difference in units of budget",
    "replay.json": "all of it, with places, histograms and derivations",
}


def _files(key: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"{key}-{name}", words) for name, words in _TABLES.items())


def tables(key: str, record: ReplayRecord) -> dict[str, str]:
    """Return the files that accompany the page, by name."""
    # Half a second, and only where a report is written.
    import pandas as pd  # noqa: PLC0415

    plain = [_plain_row(output) for output in record.outputs]
    columns = list(_plain_row(_NOTHING))
    frame = pd.DataFrame(plain, columns=columns)
    wide = frame.pivot_table(
        index="role", columns="column", values="difference_in_budgets", aggfunc="max", sort=False,
        dropna=False,
    )  # fmt: skip
    document = {"schema": SCHEMA, "kind": "degarble.replay", "record": to_plain(record)}
    long_csv, wide_csv, whole = (name for name, _ in _files(key))
    return {
        long_csv: frame.drop(columns="column").to_csv(index=False, lineterminator="\n"),
        wide_csv: wide.to_csv(lineterminator="\n"),
        whole: json.dumps(document, allow_nan=False, ensure_ascii=True) + "\n",
    }


_NOTHING = JudgedOutput("", "", None, "out", Verdict.UNDECIDED)


def _plain_row(output: JudgedOutput) -> Mapping[str, object]:
    return {
        "site": output.site,
        "layer": "" if output.layer is None else output.layer,
        "role": output.role,
        "column": output.column,
        "output": output.output,
        "verdict": str(output.verdict),
        "difference_in_budgets": output.ratio,
        "cosine_candidate_twin": output.cosines[0],
        "cosine_candidate_bf16": output.cosines[1],
        "cosine_twin_bf16": output.cosines[2],
        "relative_difference": output.difference,
        "relative_budget": output.budget,
        "equal_codes": output.identical,
        "elements": output.elements,
        "calls": output.calls,
        "near_ties_decided_otherwise": output.flips,
        "choices": output.choices,
        "undecided": output.undecided,
    }


# --------------------------------------------------------------------------------------------------
# The JSON and JUnit of `degarble check`: a check as plain data (docs/checking.md).
#
# Besides the keys of every command (verdict, origins, cosines) the document has one line of cosines
# an output, what was not judged and why, and shares of the final difference. JUnit has one case a
# component, so that a CI shows which one failed.


def built_in(facts: Mapping[str, Any]) -> bool:
    """Return whether degarble's own references computed the whole captured run."""
    return facts.get("backend") == TORCH and "patch" not in facts


def check_sentence(checked: CheckResult) -> str:
    """Return the verdict in one sentence."""
    facts = checked.capture.facts
    return page_sentence(
        checked.localised, checked.origins, built_in=built_in(facts), in_part=is_in_part(facts)
    )


def check_word(checked: CheckResult) -> str:
    """Return what stands in the place of AGREES where references agree with themselves."""
    alone = checked.verdict is Verdict.AGREES and built_in(checked.capture.facts)
    return NO_ERRORS if alone else ""


def check_document(checked: CheckResult, sentence: str) -> dict[str, Any]:
    """Return a check as plain data."""
    found = checked.localised
    first = found.first_non_finite
    return {
        "verdict": checked.verdict,
        "origins": [origin_of(origin) for origin in checked.origins],
        "cosines": [_line(row) for row in found.rows],
        "sentence": sentence,
        "checkpoint": checked.name,
        "capture": checked.capture.hash,
        "complete": checked.capture.complete,
        "headline": check_word(checked) or checked.verdict,
        "kernel_tested": not built_in(checked.capture.facts),
        "steps": len(checked.capture.steps),
        "facts": checked.facts,
        "kernels": checked.capture.facts.get("kernels"),
        "first_non_finite": None
        if first is None
        else {
            "component": first.component,
            "output": first.output,
            "step": first.step,
            "row": first.row,
            "count": first.count,
            "inputs_as_well": first.inputs_as_well,
        },
        "flips": [
            {"component": row.component.name, "output": row.output, "count": row.flips,
             "of": row.choices}
            for row in found.flips
        ],
        "conventions": [convention.document() for convention in found.conventions],
        "unstable": list(found.unstable),
        "not_judged": [{"component": name, "reason": why} for name, why in found.unjudged],
        "shares": _shares(checked),
        "notes": [*checked.notes, *found.notes],
    } | _screen(found) | _coverage(checked) | descriptions(checked.origins)  # fmt: skip


def _coverage(checked: CheckResult) -> dict[str, Any]:
    """Return what was recorded coarsely, and what a budget left out."""
    stated = checked.capture.facts.get("budget")
    found = {} if stated is None else {"budget": stated}
    return found if checked.coverage is None else found | checked.coverage.document()


_SHARES = (0.01, 0.1)  # of the rows of a component, for which the risk to miss a fault is stated


def _screen(found: Localised) -> dict[str, Any]:
    """Return what a screening looked at, and what it would miss, by component."""
    if found.sampled is None:
        return {}
    names = dict.fromkeys(row.component.name for row in found.rows)
    return {
        "screen": {
            "whole": [name for name in names if name not in found.sampled],
            "near": NEAR,
            "sampled": [
                {
                    "component": name,
                    "rows": each.looked,
                    "of": each.rows,
                    "experts": each.experts,
                    "of_experts": each.visited,
                    "seen_from_budgets": each.size,
                    "at_random": each.at_random,
                    "missed": {f"{q:.0%} of rows": each.missed(q) for q in _SHARES},
                }
                for name, each in found.sampled.items()
            ],
        }
    }


def screen_lines(sampled: Mapping[str, SampledRows]) -> Iterator[str]:
    """Yield what a screening looked at, and what it did not look at, in words."""
    if not sampled:
        yield "nothing was sampled: every component was judged whole"
        return
    known = sampled.values()
    rows, every = sum(each.looked for each in known), sum(each.rows for each in known)
    yield (
        f"{rows:,} of {every:,} rows of {len(sampled):,} components were looked at; inputs, forms"
        " and whether values are finite, in all rows"
    )
    name, widest = max(sampled.items(), key=lambda pair: pair[1].size)
    yield (
        f"a fault of all rows together is seen from {number(widest.size)} budgets on ({name}),"
        " and elsewhere from fewer"
    )
    drawn = {name: each for name, each in sampled.items() if each.at_random}
    if drawn:
        name, worst = max(drawn.items(), key=lambda pair: pair[1].missed(_SHARES[0]) or 0.0)
        risks = [f"{q:.0%} of rows with {worst.missed(q):.1%}" for q in _SHARES]
        yield f"a fault is missed, at most, in {' and in '.join(risks)} ({name})"
    few = [name for name, each in drawn.items() if each.experts < each.visited]
    if few:
        least = min((sampled[name] for name in few), key=lambda each: each.experts / each.visited)
        yield (
            f"not all visited experts were looked at in {len(few)} components:"
            f" {least.experts} of {least.visited} in {few[0]}"
        )
    first = [name for name, each in sampled.items() if not each.at_random]
    if first:
        yield (
            f"of {len(first)} components whose rows depend on each other, such as {first[0]}, only"
            " first positions and a few later calls were looked at"
        )


def descriptions(origins: Sequence[DiagnosedOrigin]) -> dict[str, Any]:
    """Return what was described as data, by the number of its origin; empty without any."""
    stated = [
        {"origin_number": number, **statement_of(told.described, told.condition)}
        for number, origin in enumerate(origins)
        if (told := origin.diagnosed) is not None and told.described is not None
    ]
    return {"descriptions": stated} if stated else {}


def _shares(checked: CheckResult) -> dict[str, Any] | None:
    shares = checked.shares
    if shares is None:
        return None
    return {
        "difference": shares.difference,
        "alone": list(shares.alone),
        "order": list(shares.order),
        "together": list(shares.together),
    }


def _line(row: OutputRow) -> dict[str, Any]:
    names = ("candidate_twin", "candidate_reference", "twin_reference")
    sums = [row.cosines.get(pair) for pair in PAIRS]
    return {
        "layer": row.component.layer,
        "component": row.component.role,
        "name": row.component.name,
        "output": row.output,
        "verdict": row.verdict,
        "budgets": _finite_or_none(row.ratio),
        "identical": row.identical / row.elements if row.elements else None,
        **{name: None if total is None else _finite_or_none(total.cosine)
           for name, total in zip(names, sums, strict=True)},
    }  # fmt: skip


def _finite_or_none(value: float) -> float | None:
    return None if math.isnan(value) or math.isinf(value) else value


def junit(checked: CheckResult, sentence: str) -> str:
    """Return JUnit XML with one test case a component."""
    rows: dict[str, list[OutputRow]] = {}
    for row in checked.localised.rows:
        rows.setdefault(row.component.name, []).append(row)
    wrong = {
        origin.discrepancy.component: origin.discrepancy.sentence for origin in checked.origins
    }
    for name in wrong:
        rows.setdefault(name, [])
    cases, skipped = [], 0
    for name, each in rows.items():
        undecided = [row.undecided for row in each if row.verdict is Verdict.UNDECIDED]
        inner = ""
        if name in wrong:
            inner = f"<failure message={quoteattr(_xml(wrong[name]))}/>"
        elif undecided:
            skipped += 1
            inner = f"<skipped message={quoteattr(_xml(undecided[0]))}/>"
        cases.append(
            f'  <testcase classname="degarble.check" name={quoteattr(name)}>{inner}</testcase>'
        )
    head = (
        f'<testsuite name="degarble check" tests="{len(cases)}" failures="{len(wrong)}" '
        f'skipped="{skipped}" errors="0">'
    )
    body = "\n".join(cases)
    text = f"  <system-out>{escape(_xml(sentence))}</system-out>"
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}\n{body}\n{text}\n</testsuite>\n'


# What is no Char of XML 1.0 (5th edition, production 2), and CR, which a parser reads as LF.
_NO_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _xml(text: str) -> str:
    """Return text without the characters that XML 1.0 cannot represent."""
    return _NO_XML.sub("\N{REPLACEMENT CHARACTER}", text)


# --------------------------------------------------------------------------------------------------
# The terminal output of `degarble check`: verdict, then origins with cause, evidence and remedy.
#
# The first origins are shown in full, the others by name; of what was not judged, the number and an
# example.

SHOWN = 4  # origins that are shown in full
_NAMED = 8  # of the others
_WORDS = 400  # characters of one text


def check_text(
    checked: CheckResult, sentence: str, *, width: int = 100, colour: bool = False
) -> str:
    """Render a check for a terminal of `width` columns."""
    stream = StringIO()
    console = Console(
        file=stream,
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        highlight=False,
        legacy_windows=False,
    )
    for line in _lines(checked, sentence, max(width, 40)):
        console.print(line, soft_wrap=True)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _lines(checked: CheckResult, sentence: str, width: int) -> Iterator[Text]:
    head = textwrap.wrap(visible(sentence), width - 12) or [""]
    word = check_word(checked)
    yield Text.assemble(badge(checked.verdict, word), "  ", Text(head[0], "bold"))
    for line in head[1:]:
        yield Text(f"  {line}", "bold")
    found, facts = checked.localised, checked.facts
    count = len(checked.capture.steps)
    steps = "1 step" if count == 1 else f"{count} steps"
    text = f"{checked.name} · capture {checked.capture.hash[:12]} · {steps}"
    yield Text(visible(f"{text} · reference {facts.get('reference', '')}")[: width - 1], "dim")
    yield Text("")
    calls = len(checked.capture.calls)
    names = {row.component.name for row in found.rows}
    wide = {} if checked.coverage is None else checked.coverage.wide
    words = f"{len(names - wide.keys()):,} components"
    words += f" and {len(names & wide.keys()):,} stretches of several" if wide else ""
    yield from _columns("judged", f"{words}, {calls:,} calls", width)
    yield from _coarse(checked, width)
    worst = max((row for row in found.rows if row.ratio == row.ratio), default=None,
                key=lambda row: row.ratio)  # fmt: skip
    if worst is not None and not checked.origins:
        where = f"{worst.component.name}.{worst.output}"
        yield from _columns("nearest", f"{where} at {number(worst.ratio)} of its budget", width)
    for convention in found.conventions:
        yield from _columns("convention", convention.sentence, width)
    if found.unjudged:
        name, why = found.unjudged[0]
        more = f"{len(found.unjudged)} components, such as {name}: {why}"
        yield from _columns("not judged", more, width)
    if found.flips:
        count = sum(row.flips for row in found.flips)
        words = f"{count} choices fell the other way at near ties, which is legal"
        yield from _columns("flips", words, width)
    if found.first_non_finite is not None:
        yield from _columns("not finite", found.first_non_finite.sentence, width)
    table = checked.capture.facts.get("kernels")
    for line in table_lines(table) if isinstance(table, dict) else ():
        yield Text(visible(line), "dim")
    for note in (*checked.notes, *found.notes)[:3]:
        yield from _columns("note", note, width)
    apart = [origin for origin in checked.origins if not _like(origin)]
    for place, origin in enumerate(apart[:SHOWN], 1):
        yield from _origin(place, origin, width)
        name = origin.discrepancy.component
        alike = [each for each in checked.origins if _like(each) == name]
        if alike:
            listed = ", ".join(each.discrepancy.component for each in alike)
            words = f"the same in {len(alike) + 1} modules: also in {listed}"
            yield from _columns("   also", words, width)
    others = apart[SHOWN:]
    if others:
        yield Text("")
        listed = ", ".join(
            diagnosed_origin.discrepancy.component for diagnosed_origin in others[:_NAMED]
        )
        yield from _columns("and", f"{len(others)} more: {listed}", width)
    if checked.shares is not None and len(checked.origins) > 1:
        yield from _columns("together", checked.shares.sentence, width)


def _coarse(checked: CheckResult, width: int) -> Iterator[Text]:
    """Yield what was recorded coarsely, and what was looked at in part."""
    for line in () if checked.coverage is None else checked.coverage.lines():
        yield from _columns("coarse", line, width)
    sampled = checked.localised.sampled
    for at, line in enumerate(() if sampled is None else screen_lines(sampled)):
        yield from _columns("" if at else "screened", line, width)


def _like(origin: DiagnosedOrigin) -> str:
    """Return the component whose cause holds here as well; empty where it has one of its own."""
    return origin.diagnosed.like if origin.diagnosed is not None else ""


def _origin(place: int, origin: DiagnosedOrigin, width: int) -> Iterator[Text]:
    discrepancy = origin.discrepancy
    yield Text("")
    yield Text.assemble(f"{place:<3}", (str(discrepancy.site), "bold red"))
    blamed = (
        ""
        if discrepancy.component == discrepancy.site.component
        else f", by {discrepancy.component}"
    )
    yield from _columns("   found", f"{discrepancy.sentence}{blamed}", width)
    named = origin.diagnosed.named if origin.diagnosed is not None else ()
    if named:
        yield from _columns(
            "   cause", f"{named[0].id}: {origin.cause}. {named[0].evidence}", width
        )
    elif origin.diagnosed is not None:
        yield from _columns("   cause", origin.diagnosed.sentence, width)
    if origin.share is not None:
        yield from _columns("   share", share_sentence(origin.share), width)
    yield from _columns("   remedy", origin.remedy, width)
    if origin.reproducer:
        yield from _columns("   run", origin.reproducer, width)


def _columns(front: str, text: str, width: int) -> Iterator[Text]:
    """Wrap text after a prefix, with further lines indented below the first."""
    shown = visible(text).replace("\n", " ")
    shown = shown if len(shown) <= _WORDS else f"{shown[: _WORDS - 1]}…"
    for place, line in enumerate(textwrap.wrap(shown, max(20, width - 14)) or [""]):
        yield Text.assemble((f"{front if place == 0 else '':<12}", "dim"), " ", line)
