"""The JSON and JUnit of `degarble check`: a check as plain data (docs/checking.md).

Besides the keys of every command (verdict, origins, cosines) the document has one line of cosines
an output, what was not judged and why, and shares of the final difference. JUnit has one case a
component, so that a CI shows which one failed.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

from degarble.harness.backends.registry import TORCH
from degarble.harness.commands.check.output_statistics import Looker
from degarble.harness.commands.check.page import Checked as PageChecked
from degarble.harness.commands.check.page import Found, captured_facts, origin_of
from degarble.harness.commands.check.page import sentence_of as page_sentence
from degarble.harness.engine.localise.judged_run import PAIRS
from degarble.harness.report.page import Provenance, Subject
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.commands.check.check import Checked
    from degarble.harness.engine.localise.judged_run import OutputRow


def found_of(checked: Checked) -> tuple[Found, ...]:
    """Return every origin in the form that the page uses."""
    return tuple(
        Found(each.trouble, each.diagnosed, each.reproducer, each.share) for each in checked.origins
    )


def as_page(checked: Checked, subject: Subject, where: Provenance, looker: Looker) -> PageChecked:
    """Return the data of the page."""
    localised = checked.localised
    localised = replace(localised, notes=(*checked.notes, *localised.notes))
    facts = (*checked.facts.items(), *captured_facts(checked.capture.facts, checked.recipe))
    return PageChecked(
        subject, where, localised, found_of(checked), looker, facts=facts,
        built_in=built_in(checked.capture.facts),
    )  # fmt: skip


def built_in(facts: Mapping[str, Any]) -> bool:
    """Return whether degarble's own references computed the whole captured run."""
    return facts.get("backend") == TORCH and "patch" not in facts


def sentence_of(checked: Checked) -> str:
    """Return the verdict in one sentence."""
    nobody = Subject(checked.name, "Checkpoint", "")
    where = Provenance("", "", "", ())
    return page_sentence(as_page(checked, nobody, where, Looker(checked.config)))


def check_document(checked: Checked, sentence: str) -> dict[str, Any]:
    """Return a check as plain data."""
    found = checked.localised
    first = found.first_non_finite
    return {
        "verdict": checked.verdict,
        "origins": [origin_of(each) for each in found_of(checked)],
        "cosines": [_line(row) for row in found.rows],
        "sentence": sentence,
        "checkpoint": checked.name,
        "capture": checked.capture.hash,
        "complete": checked.capture.complete,
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
        "conventions": [each.document() for each in found.conventions],
        "unstable": list(found.unstable),
        "not_judged": [{"component": name, "reason": why} for name, why in found.unjudged],
        "shares": _shares(checked),
        "notes": [*checked.notes, *found.notes],
    }  # fmt: skip


def _shares(checked: Checked) -> dict[str, Any] | None:
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
        "budgets": _known(row.ratio),
        "identical": row.identical / row.elements if row.elements else None,
        **{name: None if each is None else _known(each.cosine)
           for name, each in zip(names, sums, strict=True)},
    }  # fmt: skip


def _known(value: float) -> float | None:
    return None if math.isnan(value) or math.isinf(value) else value


def junit(checked: Checked, sentence: str) -> str:
    """Return JUnit XML with one test case a component."""
    rows: dict[str, list[OutputRow]] = {}
    for row in checked.localised.rows:
        rows.setdefault(row.component.name, []).append(row)
    wrong = {each.trouble.component: each.trouble.sentence for each in checked.origins}
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
    told = f"  <system-out>{escape(_xml(sentence))}</system-out>"
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}\n{body}\n{told}\n</testsuite>\n'


# What is no Char of XML 1.0 (5th edition, production 2), and CR, which a parser reads as LF.
_NO_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _xml(text: str) -> str:
    """Return text without the characters that XML 1.0 cannot represent."""
    return _NO_XML.sub("\N{REPLACEMENT CHARACTER}", text)
