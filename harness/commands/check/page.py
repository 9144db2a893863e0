"""The panels of a check on its checkpoint's HTML page, and the tables written with it.

The results of localising and diagnosing become the records of harness.report.replay_record. If the
page is too large to be mailed, statistics of outputs are left out. The page is that of the
checkpoint, under its manifest hash; panels of earlier runs stay.
"""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.commands.report_folder import with_earlier_panels, write_page
from degarble.harness.engine.localise.judged_run import PAIRS
from degarble.harness.report.files import usable_folder, write_text
from degarble.harness.report.number_text import share
from degarble.harness.report.page import Page, PageFinding, Subject, to_plain
from degarble.harness.report.replay_record import JudgedOutput, ReplayRecord
from degarble.harness.report.verdict import SCHEMA, Origin, Verdict
from degarble.reports.page_html import SIZE_LIMIT, page_html
from degarble.reports.replay_panel import LOOKS, replay_panel, text_panel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from degarble.harness.commands.check.output_statistics import Looker
    from degarble.harness.engine.diagnose.diagnose import Diagnosed
    from degarble.harness.engine.localise.discrepancy import Discrepancy
    from degarble.harness.engine.localise.judged_run import OutputRow
    from degarble.harness.engine.localise.localise import Localised
    from degarble.harness.model.recipes import Recipe
    from degarble.harness.report.page import Provenance
    from degarble.harness.report.replay_record import TextRecord

UNNAMED = "No known fault explains this"
_FIRST = 5  # findings on the first screen
_FEWER = (150, 50, 10, 0)  # close looks, until the page is small enough
_NEAREST = 3  # excluded faults that are shown


@dataclass(frozen=True, eq=False)
class Found:
    """One discrepancy, its diagnosis, and the command that reproduces it alone.

    `share` is how much of the difference of the final logits it explains.
    """

    trouble: Discrepancy
    diagnosed: Diagnosed | None = None
    reproduction: str = ""
    share: float | None = None

    @property
    def cause(self) -> str:
        """Return the fault as text."""
        if self.diagnosed is None or not self.diagnosed.named:
            return UNNAMED
        return " and ".join(fault.title for fault in self.diagnosed.named[0].faults)

    @property
    def remedy(self) -> str:
        """Return what to do about it."""
        if self.diagnosed is None or not self.diagnosed.named:
            return "Look at this component first: what it was given is right."
        return " ".join(fault.remedy for fault in self.diagnosed.named[0].faults)


@dataclass(frozen=True, eq=False)
class Checked:
    """All data of a check's page: checkpoint, findings and texts.

    `sentence` replaces the sentence derived from the findings; `preface` precedes it. `built_in`
    states that the captured run used degarble's own references throughout.
    """

    subject: Subject
    provenance: Provenance
    localised: Localised
    found: tuple[Found, ...]
    looker: Looker
    texts: TextRecord | None = None
    facts: tuple[tuple[str, str], ...] = ()
    sentence: str = ""
    preface: tuple[str, ...] = ()
    built_in: bool = False


def write_check_page(folder: Path, telling: Checked) -> Path:
    """Add the panels to the checkpoint's page, write the tables, and return the page."""
    usable_folder("report folder", folder)
    record = replay_record(telling)
    page = page_of(telling, record)
    whole = with_earlier_panels(page, folder / f"{page.subject.key}.json")
    for most in _FEWER:
        for panel in page.panels:
            whole = whole.with_panel(panel)
        if len(page_html(whole).encode()) <= SIZE_LIMIT:
            break
        page = page_of(telling, record, most)
    for name, text in tables(page.subject.key, record).items():
        write_text(folder / name, text)
    return write_page(folder, page)


def page_of(telling: Checked, record: ReplayRecord, most: int = LOOKS) -> Page:
    """Return the page of a check alone."""
    files = tuple((name, _TABLES[name.rpartition("-")[2]]) for name in _names(telling.subject.key))
    panels = [replay_panel(record, files, most)]
    if telling.texts is not None:
        panels.append(text_panel(telling.texts, record.verdict))
    return Page(
        telling.subject,
        telling.provenance,
        record.verdict,
        record.sentence,
        tuple(_finding(each) for each in telling.found[:_FIRST]),
        tuple(panels),
    )


def replay_record(telling: Checked) -> ReplayRecord:
    """Return all data of the replay panel as plain numbers and text."""
    localised = telling.localised
    notes = list(localised.notes)
    first = localised.first_non_finite
    if first is not None:
        notes.append(first.sentence)
    notes += [f"{name} is not judged: {why}." for name, why in localised.unjudged]
    return ReplayRecord(
        localised.verdict,
        telling.sentence or sentence_of(telling),
        tuple(_output(row, telling.looker) for row in localised.rows),
        tuple(str(each.trouble.site) for each in telling.found),
        tuple(each.trouble.sentence for each in telling.found),
        tuple(notes),
        telling.facts,
        telling.preface,
    )


def sentence_of(telling: Checked) -> str:
    """Return the verdict in one sentence."""
    localised, found = telling.localised, telling.found
    if localised.unstable:
        return f"{localised.unstable[0]} gave two answers to the same question."
    if found:
        first = f"{placed(found[0].trouble)}: {found[0].cause}."
        more = len(found) - 1
        return first if not more else f"{first} {more} more {'place' if more == 1 else 'places'}."
    if localised.verdict is Verdict.AGREES:
        calls = sum(row.calls for row in localised.rows)
        if telling.built_in:
            return (
                f"Built-in reference: no kernel was tested. {calls:,} outputs within their budgets."
            )
        return f"Every component does what its twin does: {calls:,} outputs within their budgets."
    return "Nothing is claimed: no component could be judged."


def placed(trouble: Discrepancy) -> str:
    """Return layer and component of a discrepancy as text."""
    layer, role = _layer_and_role(trouble.component)
    return role if layer is None else f"Layer {layer}, {role}"


def share_sentence(value: float) -> str:
    """Return how much of the difference of the final logits one origin alone explains, as text."""
    if value < 0:
        return (
            f"Mending it alone makes the difference of the logits {share(-value)} larger:"
            " another origin hides a part of it."
        )
    return f"Mending it alone removes {share(value)} of the difference of the logits."


def origin_of(found: Found) -> Origin:
    """Return the origin as data."""
    trouble, named = found.trouble, None
    if found.diagnosed is not None and found.diagnosed.named:
        named = found.diagnosed.named[0]
    layer, role = _layer_and_role(trouble.component)
    cosine, difference, budget = _measured(trouble)
    where = dict(trouble.where)
    if named is not None:
        where |= {key: each for key, each in named.way.where.items() if key not in where}
    return Origin(
        layer,
        role,
        str(trouble.site),
        where,
        None if named is None else named.id,
        cosine,
        difference,
        budget,
        0.0 if named is None else named.reproduced,
        trouble.sentence if named is None else named.evidence,
        found.reproduction,
    )


def _finding(found: Found) -> PageFinding:
    told = found.diagnosed
    notes = []
    if told is not None and told.named and told.named[0].alternatives:
        notes.append(f"Equally well explained by {', '.join(told.named[0].alternatives)}.")
    if told is not None and not told.named:
        near = ", ".join(each.fault for each in told.excluded[:_NEAREST])
        notes.append(f"{told.tried:,} ways were tried{f'; nearest: {near}' if near else ''}.")
    if found.share is not None:
        notes.append(share_sentence(found.share))
    origin = origin_of(found)
    command = found.reproduction
    if command.endswith(".py"):
        command = f"python {shlex.quote(command)}"
    return PageFinding(found.cause, found.remedy, origin, command, " ".join(notes))


def captured_facts(facts: Mapping[str, Any], recipe: Recipe) -> tuple[tuple[str, str], ...]:
    """Return what a capture states about its run, for display: recipe, sums, versions."""
    rules = [f"{r.match}: {r.weight} x {r.activation}" for r in recipe.rules]
    told = [("recipe", "; ".join(rules) or recipe.name)]
    told += [(name, str(facts[name])) for name in ("family", "sums", "form") if facts.get(name)]
    versions = facts.get("versions")
    if isinstance(versions, dict):
        told.append(("captured with", ", ".join(f"{k} {v}" for k, v in versions.items())))
    return tuple(told)


def _measured(trouble: Discrepancy) -> tuple[float | None, float | None, float | None]:
    """Return cosine, relative difference and budget of the worst call."""
    judged = trouble.judged
    if judged is None or judged.comparison is None:
        return None, None, None
    total = judged.comparison.total
    length = math.sqrt(float(total.rr))
    budget = judged.allowed_length / length if length else None
    if judged.comparison.census.mismatched:
        return None, None, _known(budget)  # the sums know finite values only
    return _known(float(total.cosine)), _known(float(total.relative_l2)), _known(budget)


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def _layer_and_role(component: str) -> tuple[int | None, str]:
    kind, _, rest = component.partition(".")
    number, _, role = rest.partition(".")
    if kind in ("layers", "mtp") and number.isdecimal():
        return int(number), role if kind == "layers" else f"{kind} {role}"
    return None, component


def _output(row: OutputRow, looker: Looker) -> JudgedOutput:
    component = row.component
    layer, _ = _layer_and_role(component.name)
    judged = looker.judged(component.name, row.output)
    difference = budget = None
    if judged is not None and judged.comparison is not None:
        total = judged.comparison.total
        difference = _known(float(total.relative_l2))
        length = math.sqrt(float(total.rr))
        budget = _known(judged.allowed_length / length) if length else None
    sums = [row.cosines.get(pair) for pair in PAIRS]
    cosines = [None if each is None else _known(each.cosine) for each in sums]
    return JudgedOutput(
        component=component.name,
        role=component.role,
        layer=layer,
        output=row.output,
        verdict=row.verdict,
        ratio=_known(row.ratio),
        cosines=(cosines[0], cosines[1], cosines[2]),
        difference=difference,
        budget=budget,
        identical=row.identical / row.elements if row.elements else None,
        elements=row.elements,
        calls=row.calls,
        flips=row.flips,
        choices=row.choices,
        undecided=row.undecided,
        look=looker.look(component.name, row.output),
    )


_TABLES = {
    "outputs.csv": "one row an output: verdict, cosines, difference, budget",
    "budgets.csv": "layer by component: difference in units of budget",
    "replay.json": "all of it, with places, histograms and derivations",
}


def _names(key: str) -> tuple[str, ...]:
    return tuple(f"{key}-{name}" for name in _TABLES)


def tables(key: str, record: ReplayRecord) -> dict[str, str]:
    """Return the files that accompany the page, by name."""
    # Half a second, and only where a report is written.
    import pandas as pd  # noqa: PLC0415

    plain = [_plain_row(each) for each in record.outputs]
    columns = list(_plain_row(_NOTHING))
    frame = pd.DataFrame(plain, columns=columns)
    wide = frame.pivot_table(
        index="role", columns="column", values="difference_in_budgets", aggfunc="max", sort=False,
        dropna=False,
    )  # fmt: skip
    document = {"schema": SCHEMA, "kind": "degarble.replay", "record": to_plain(record)}
    long_csv, wide_csv, whole = _names(key)
    return {
        long_csv: frame.drop(columns="column").to_csv(index=False, lineterminator="\n"),
        wide_csv: wide.to_csv(lineterminator="\n"),
        whole: json.dumps(document, allow_nan=False, ensure_ascii=True) + "\n",
    }


_NOTHING = JudgedOutput("", "", None, "out", Verdict.UNDECIDED)


def _plain_row(each: JudgedOutput) -> Mapping[str, object]:
    return {
        "site": each.site,
        "layer": "" if each.layer is None else each.layer,
        "role": each.role,
        "column": each.column,
        "output": each.output,
        "verdict": str(each.verdict),
        "difference_in_budgets": each.ratio,
        "cosine_candidate_twin": each.cosines[0],
        "cosine_candidate_bf16": each.cosines[1],
        "cosine_twin_bf16": each.cosines[2],
        "relative_difference": each.difference,
        "relative_budget": each.budget,
        "equal_codes": each.identical,
        "elements": each.elements,
        "calls": each.calls,
        "near_ties_decided_otherwise": each.flips,
        "choices": each.choices,
        "undecided": each.undecided,
    }
