"""What a probe found, as a sentence, as JSON, as terminal text and as a page."""

from __future__ import annotations

import hashlib
import json
import shlex
import textwrap
from collections import Counter
from io import StringIO
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from degarble.harness.probe.judging import ProbeLevel, Status
from degarble.harness.probe.probe import rounding_alone
from degarble.harness.probe.server import FEATURES
from degarble.harness.probe.session import OWN, OWN_IDS
from degarble.harness.report.blocks import (
    Code,
    Column,
    ColumnKind,
    Details,
    Fact,
    Facts,
    Sentence,
    Table,
    Tone,
)
from degarble.harness.report.files import write_text
from degarble.harness.report.number_text import number, visible
from degarble.harness.report.page import Page, PageFinding, Panel, PanelKind, Subject
from degarble.harness.report.verdict import Origin, Verdict
from degarble.reports.page_text import badge

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from degarble.harness.probe.judging import ProbedCheck, ProbeFinding
    from degarble.harness.probe.probe import ProbeResult
    from degarble.harness.report.page import Provenance

_STYLES = {
    Status.AGREES: "green", Status.DIFFERS: "red", Status.NOTE: "cyan",
    Status.SKIPPED: "dim", Status.CUT: "yellow",
}  # fmt: skip
_TONES = {
    Status.AGREES: Tone.GOOD, Status.DIFFERS: Tone.BAD, Status.NOTE: Tone.NOTE,
    Status.CUT: Tone.WARNING,
}  # fmt: skip
_NOTES = 3  # of a check, on the terminal

_AS_A_NOTE = "A note: it does not change the verdict."


def sentence_of(result: ProbeResult) -> str:
    """Return the verdict in one sentence: what ran, and what was found first."""
    ran = [c for c in result.checks if c.status not in (Status.SKIPPED, Status.CUT)]
    cut = [c.name for c in result.checks if c.status is Status.CUT and c.comparisons]
    left = [c.name for c in result.checks if c.status in (Status.SKIPPED, Status.CUT)]
    left = [name for name in left if name not in cut]
    counted = [f for f in result.findings if f.level is not ProbeLevel.NOTE]
    extent = f"{len(ran)} checks over {result.compared:,} token distributions"
    if counted:
        more = f", and {len(counted) - 1} more" if len(counted) > 1 else ""
        text = f"{_capital(counted[0].cause)}{more} ({extent})."
    elif result.verdict is Verdict.UNDECIDED and result.ended:
        text = f"The probe ended early: {result.ended}. Nothing was found in {extent}."
    elif result.verdict is Verdict.UNDECIDED:
        text = f"Not enough could be compared: {_why_undecided(result)}."
    else:
        text = f"The server gives the same numbers in every way that was tried: {extent}."
    text = f"{text} Not finished: {', '.join(cut)}." if cut else text
    return f"{text} Not judged: {', '.join(left)}." if left else text


def _why_undecided(result: ProbeResult) -> str:
    reason = result.server.lacks.get("log-probabilities")
    if reason is not None:
        return f"the server gives no log-probabilities ({reason})"
    cut = next(check for check in result.checks if check.status is Status.CUT)
    return f"the check {cut.name} could not be finished ({cut.reason})"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# --------------------------------------------------------------------------------------------------
# What to do next: the commands that capture what was found, with files that hold the requests.


def next_commands(result: ProbeResult, folder: Path | None) -> list[str]:
    """Return the commands that record the first finding inside the server, and judge it."""
    found = next((f for f in result.findings if f.body and f.level is not ProbeLevel.NOTE), None)
    if found is None:
        return []
    server = result.server
    path = "/v1/chat/completions" if "messages" in (found.body or {}) else "/v1/completions"
    body = "request-1.json" if folder is None else str(folder / "request-1.json")
    root = server.card.get("root")
    model = shlex.quote(root if isinstance(root, str) else "CKPT")
    kind = "-H 'content-type: application/json'"
    one = '-d \'{"requests": ["probe-1"]}\''
    ours = server.card.get("owned_by") == "degarble"
    switch = "/capture" if ours else "/degarble/capture"
    start = f"degarble serve {model} --captures captures" if ours else (
        f"DEGARBLE_CAPTURES=captures vllm serve {model} --enforce-eager"
        " --worker-extension-cls degarble.harness.vllm.capture.CaptureWorker"
        " --middleware degarble.harness.vllm.capture.CaptureSwitch"
    )  # fmt: skip
    url = shlex.quote(server.name)
    return [
        start,
        f"curl -X POST {url}{switch} {kind} {one}",
        f"curl {url}{path} -H 'x-request-id: probe-1' {kind} -d @{shlex.quote(body)}",
        f"curl -X DELETE {url}{switch}",
        f"degarble check captures/capture-0001 --reference {model}",
    ]


def write_requests(result: ProbeResult, folder: Path) -> list[Path]:
    """Write the request of each finding into a folder; return the files."""
    bodies = [f.body for f in result.findings if f.body and f.level is not ProbeLevel.NOTE]
    made = []
    for place, body in enumerate(bodies, 1):
        file = folder / f"request-{place}.json"
        write_text(file, json.dumps(body, indent=1) + "\n")
        made.append(file)
    return made


# --------------------------------------------------------------------------------------------------
# JSON


def probe_document(result: ProbeResult, folder: Path | None = None) -> dict[str, Any]:
    """Return everything for `--json`."""
    server, traffic = result.server, result.server.client.traffic
    moved, divergence = rounding_alone(result.options)
    return {
        "verdict": result.verdict,
        "sentence": sentence_of(result),
        "origins": [],
        "cosines": [],
        "server": {"url": server.name, "model": server.model, "card": _plain(server.card)},
        "features": {name: server.lacks.get(name, True) for name in FEATURES},
        "traffic": {
            "requests": traffic.requests, "retried": traffic.retried, "dropped": traffic.dropped,
            "statuses": {str(k): v for k, v in sorted(traffic.statuses.items())},
            "seconds": round(server.client.seconds, 3),
        },
        "rounding": {
            "assumed": result.options.rounding or "bf16, fp8 between kernels",
            "distance": moved, "divergence": divergence, "measured": result.noise,
        },
        "prompts": result.options.prompts,
        "ended": result.ended,
        "checks": [_check_document(check) for check in result.checks],
        "findings": [_finding_document(finding) for finding in result.findings],
        "against": _against_document(result),
        "next": next_commands(result, folder),
    }  # fmt: skip


def _plain(card: dict[str, Any]) -> dict[str, Any]:
    kept = ("id", "root", "owned_by", "max_model_len")
    return {k: v for k, v in card.items() if k in kept and isinstance(v, str | int)}


def _check_document(check: ProbedCheck) -> dict[str, Any]:
    return {
        "name": check.name, "question": check.question, "status": check.status,
        "reason": check.reason, "requests": check.requests, "compared": len(check.comparisons),
        "positions": check.positions, "typical": check.typical, "largest": check.largest,
        "divergence": check.divergence, "limit": check.limit, "looked_at": check.looked_at,
        "notes": check.notes,
        "comparisons": [
            {
                "prompt": c.prompt, "condition": c.condition, "distance": c.size,
                "divergences": list(c.divergences), "parted": c.parted,
            }
            for c in check.comparisons
        ],
    }  # fmt: skip


def _finding_document(finding: ProbeFinding) -> dict[str, Any]:
    return {
        "check": finding.check, "level": finding.level, "cause": finding.cause,
        "evidence": finding.evidence, "remedy": finding.remedy, "measured": finding.measured,
        "limit": finding.limit, "request": None if finding.body is None else dict(finding.body),
    }  # fmt: skip


def _against_document(result: ProbeResult) -> dict[str, Any] | None:
    found = result.against
    if found is None:
        return None
    return {
        "name": found.name, "texts": found.texts, "tokens": found.tokens,
        "distance": found.result.typical, "divergence": found.result.divergence,
        "limit": found.result.limit,
        "answers": {
            "right_here_alone": found.right[0], "right_there_alone": found.right[1],
            "p": found.answers_p, "would_decide": found.answers_needed,
        },
        "log_probabilities": {
            "means": found.means, "p": found.means_p, "would_decide": found.means_needed,
        },
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------
# The terminal


def probe_text(
    result: ProbeResult, folder: Path | None = None, *, width: int = 100, colour: bool = False
) -> str:
    """Render a probe for a terminal of `width` columns."""
    stream = StringIO()
    console = Console(
        file=stream, width=width, force_terminal=colour,
        color_system="standard" if colour else None, highlight=False, legacy_windows=False,
    )  # fmt: skip
    for line in _lines(result, folder, max(width, 60)):
        console.print(line, soft_wrap=True)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _lines(result: ProbeResult, folder: Path | None, width: int) -> Iterator[Text]:
    head = textwrap.wrap(visible(sentence_of(result)), width - 14) or [""]
    yield Text.assemble(badge(result.verdict), "  ", Text(head[0], "bold"))
    yield from (Text(f"  {line}", "bold") for line in head[1:])
    traffic = result.server.client.traffic
    facts = f"{result.server.model} at {result.server.name} · {traffic.requests} requests"
    yield Text(visible(f"{facts} in {result.server.client.seconds:.0f} s"), "dim")
    if result.options.prompts == OWN:
        yield Text("It knows too few of the default words: the prompts are its own texts.", "dim")
    if result.options.prompts == OWN_IDS:
        yield Text("It takes no texts: the prompts are token ids that it drew itself.", "dim")
    yield Text("")
    moved, divergence = rounding_alone(result.options)
    yield Text(f"{'check':<10} {'':<13}{'compared':>9} {'nats':>9} {'limit':>7} {'KL':>9}", "dim")
    for check in _rows(result):
        yield _row(check)
        told = [check.reason] if check.reason else _counted(check.notes)[:_NOTES]
        for note in told:
            for line in textwrap.wrap(visible(note), width - 12):
                yield Text(f"{'':<11}{line}", "dim")
    yield Text(f"One rounding of BF16 alone: {moved:.2g} nats, KL {divergence:.2g}.", "dim")
    if result.against is not None:
        yield Text("")
        beside = f"Beside {result.against.name}: {result.against.sentence}"
        yield from (Text(line) for line in textwrap.wrap(visible(beside), width - 1))
    for place, finding in enumerate(result.findings, 1):
        yield from _finding_lines(place, finding, width)
    commands = next_commands(result, folder)
    if commands:
        yield Text("")
        yield Text("Next, to see inside:")
        yield from (Text(visible(f"  {command}")) for command in commands)


def _rows(result: ProbeResult) -> list[ProbedCheck]:
    """Return all checks, with that of another side last."""
    return result.checks + ([] if result.against is None else [result.against.result])


def _counted(notes: Sequence[str]) -> list[str]:
    """Return each note once, with how often it was made."""
    counts = Counter(notes)
    return [note if count == 1 else f"{note} ({count} times)" for note, count in counts.items()]


def _row(check: ProbedCheck) -> Text:
    compared = check.positions or check.looked_at
    figures = [check.typical, check.limit if check.comparisons else None, check.divergence]
    cells = [number(value, 2) if value is not None else "–" for value in figures]
    return Text.assemble(
        f"{check.name:<10} ", (f"{check.status:<13}", _STYLES[check.status]),
        f"{compared or '–':>9} {cells[0]:>9} {cells[1]:>7} {cells[2]:>9}",
    )  # fmt: skip


def _finding_lines(place: int, finding: ProbeFinding, width: int) -> Iterator[Text]:
    yield Text("")
    style = "bold red" if finding.level is not ProbeLevel.NOTE else "bold cyan"
    yield Text.assemble(f"{place:<3}", (f"{finding.level:<9}", style), visible(finding.cause))
    for name, text in (("evidence", finding.evidence), ("remedy", finding.remedy)):
        lines = textwrap.wrap(visible(text), width - 14)
        for number_, line in enumerate(lines):
            yield Text.assemble((f"   {name if not number_ else '':<9}", "dim"), " ", line)


# --------------------------------------------------------------------------------------------------
# The page


def probe_page(result: ProbeResult, provenance: Provenance, folder: Path | None) -> Page:
    """Return the page of a server."""
    server = result.server
    digest = hashlib.sha256(f"{server.name}\n{server.model}".encode()).hexdigest()
    reproduce = next_commands(result, folder)
    findings = tuple(
        PageFinding(
            _capital(finding.cause), finding.remedy,
            Origin(None, finding.check, f"probe.{finding.check}", evidence=finding.evidence),
            reproduction="\n".join(reproduce) if finding is result.findings[0] else "",
            note=_AS_A_NOTE if finding.level is ProbeLevel.NOTE else "",
        )
        for finding in result.findings
    )  # fmt: skip
    sentence = sentence_of(result)
    panel = Panel(PanelKind.PROBE, sentence, result.verdict, tuple(_blocks(result)))
    return Page(
        Subject(f"{server.model} at {server.name}", "Server", f"sha256:{digest}"),
        provenance, result.verdict, sentence, findings, (panel,),
    )  # fmt: skip


def _blocks(result: ProbeResult) -> Iterator[Any]:
    moved, divergence = rounding_alone(result.options)
    yield Sentence(
        f"Distances are in nats over the likeliest tokens of each position. One rounding of BF16 "
        f"alone moves a log-probability by {moved:.2g}, which is a KL divergence of "
        f"{divergence:.2g}. A limit is three times that, or three times what the other checks of "
        "this session show."
    )
    yield _table(result)
    if result.against is not None:
        yield Sentence(f"Beside {result.against.name}: {result.against.sentence}")
    for check in result.checks:
        for note in _counted(check.notes):
            yield Sentence(f"{check.name}: {note}", Tone.NOTE)
    traffic, server = result.server.client.traffic, result.server
    yield Facts(
        (
            Fact("Requests", f"{traffic.requests:,} in {server.client.seconds:.0f} s"),
            Fact("Dropped, retried", f"{traffic.dropped}, {traffic.retried}"),
            *(
                Fact(f"Lacks {name}", f"{why}. {FEATURES[name]}")
                for name, why in server.lacks.items()
            ),
        ),
        "The server",
    )
    commands = next_commands(result, None)
    if commands:
        yield Details("What to capture next", (Code("\n".join(commands)),))


def _table(result: ProbeResult) -> Table:
    kinds = (ColumnKind.TEXT, ColumnKind.TONE, ColumnKind.TEXT)
    names = ("check", "level", "question")
    columns = [Column(n, k) for n, k in zip(names, kinds, strict=True)]
    columns += [
        Column(name, ColumnKind.NUMBER, 3, text)
        for name, text in (
            ("compared", "Distributions, or things that were looked at."),
            ("nats", "Median over prompts."), ("largest", "Of one prompt."),
            ("limit", "What rounding explains."), ("KL", "Mean over positions, a lower bound."),
        )
    ]  # fmt: skip
    columns.append(Column("result"))
    rows = tuple(
        (
            check.name, None if check.status is Status.SKIPPED else _TONES[check.status].value,
            check.question,
            check.positions or check.looked_at or None, check.typical, check.largest,
            check.limit if check.comparisons else None, check.divergence,
            check.reason or str(check.status),
        )
        for check in _rows(result)
    )  # fmt: skip
    return Table("Checks", tuple(columns), rows)
