"""The judging and closing steps of a nightly run."""

from __future__ import annotations

import json
import platform
import random
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from datetime import date
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, UnreadableFile
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.records import MANIFEST
from degarble.harness.chat.tokenizer import FILE as TOKENIZER
from degarble.harness.chat.tokenizer import Tokenizer
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.commands.audit import audit as auditing
from degarble.harness.commands.audit.page import audit_page
from degarble.harness.commands.check import check as checking
from degarble.harness.commands.check.compare_runs import compare_runs
from degarble.harness.commands.check.output_statistics import StatisticsCollector
from degarble.harness.commands.check.report import (
    check_document,
    check_sentence,
    placed,
    write_check_report,
)
from degarble.harness.commands.report_folder import MANIFEST as IDENTITY
from degarble.harness.commands.report_folder import write_page
from degarble.harness.history.ledger import Failure, read_ledger
from degarble.harness.history.panel import History, history_of
from degarble.harness.history.panel import sentence_of as history_sentence
from degarble.harness.history.query import skipped_lines
from degarble.harness.history.records import MUSEUM, HistoryRun, failures_of, values_of
from degarble.harness.history.store import HistoryStore
from degarble.harness.inference.processes import usable_workers, workers_for
from degarble.harness.museum import museum as museum_run
from degarble.harness.museum.museum import percent
from degarble.harness.nightly.codecs import count, wrong_codecs
from degarble.harness.nightly.night import (
    CAPTURES,
    LEDGER,
    NightConfig,
    StepResult,
    excused,
    failures_of_step,
)
from degarble.harness.report.files import usable_folder, write_text
from degarble.harness.report.kernel_table import kernels_by_role
from degarble.harness.report.page import kernel_versions, machine, provenance
from degarble.harness.report.verdict import SCHEMA, SEVERITY, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from degarble.harness.museum.scores import MuseumScore


# --------------------------------------------------------------------------------------------------
# The judging steps of a nightly run: environment, audit, codecs, captures, repeats, check.
#
# Each runs what the command of the same name runs; numbers go into the history, failures into the
# ledger, pages and JUnit into the folder of the night. Each capture is made by its own process,
# because a fault may be random by launch and constant within one process; the user's own captures
# are taken as they are.

if TYPE_CHECKING:
    Results = Mapping[str, StepResult]
    CaptureRun = Callable[[NightConfig, Path, Path], str]  # says why there is none, else nothing

NEW_TOKENS = 4
RAN = "kernels of "  # a role: the fact that says which kernels and tactics computed it
_QUERY = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
# Where the user names no prompts: short texts that differ in length and kind.
PROMPTS = (
    "The capital of France is",
    "Write down the numbers from one to ten: 1, 2, 3,",
    "def add(a, b):\n    return",
    "Water boils at one hundred degrees, and it freezes at",
    "Once upon a time a fox and a crow met at the edge of the forest, and the fox said:",
    "2 + 2 =",
    "Dear Sir or Madam, I am writing to you because",
    "The days of the week are Monday, Tuesday,",
    "In 1969 the first man walked on the",
    "for number in range(10):\n    print(",
    "Roses are red, violets are",
    "A triangle has three sides, and a square has",
    "The opposite of hot is",
    "To make tea, boil the water, then",
    "She opened the door, looked into the dark room, and slowly",
    "Der Himmel ist blau, und das Gras ist",
)
OWN_PROMPTS = 16  # of a small vocabulary that lacks the words above
_FEW = 5


def environment(asked: NightConfig, _: Results) -> StepResult:
    """Report machine, GPU with driver and clocks, versions and backend."""
    facts = {"machine": machine(), "system": platform.release(), "backend": asked.backend}
    facts |= dict(provenance("").versions) | kernel_versions()
    if asked.commit:
        facts["commit"] = asked.commit
    gpus = _gpus()
    for number, told in enumerate(gpus):
        facts |= {f"GPU {number} {name}": value for name, value in told.items()}
    if asked.gpu and not gpus:
        return StepResult(
            Verdict.UNDECIDED, "nvidia-smi does not report driver and clocks.", facts=facts
        )
    what = ", ".join(dict.fromkeys(each["name"] for each in gpus)) or "no GPU"
    return StepResult(Verdict.AGREES, f"{what}; {facts['machine']}.", facts=facts)


def where_of(facts: Mapping[str, str], *, gpu: bool) -> str:
    """Return a short description of the machine; a requested GPU comes first."""
    told = [facts.get("GPU 0 name", ""), facts.get("GPU 0 driver_version", "")] if gpu else []
    of_gpu = ", driver ".join(filter(None, told))
    return "; ".join(filter(None, (of_gpu, facts.get("machine", ""))))


def _gpus() -> list[dict[str, str]]:
    """Return name, driver and clocks of each GPU from nvidia-smi; empty without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    line = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)  # noqa: S603  ours
    rows = [row.split(", ") for row in done.stdout.splitlines()] if not done.returncode else []
    names = _QUERY.split(",")
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def audit(asked: NightConfig, _: Results) -> StepResult:
    """Audit the checkpoint's files, against the reference if that is another."""
    apart = asked.checkpoint.resolve() != asked.reference.resolve()
    wanted = auditing.AuditRequest(asked.checkpoint, against=asked.reference if apart else None)
    found = auditing.audit(wanted, usable_workers())
    words = f"degarble audit {asked.name}"
    words += f" --against {asked.reference.resolve().name}" if apart else ""
    write_page(asked.folder, audit_page(found, provenance(words)))
    errors = [each for each in found.findings if each.level is Level.ERROR]
    failures = [
        Failure(
            f"audit.{each.tensor or each.module or 'checkpoint'}",
            Verdict.DIFFERS,
            each.rule,
            each.message,
        )
        for each in errors
    ]
    gathered = auditing.by_rule(errors)
    lines = [
        f"{each.first.tensor or each.first.module or 'checkpoint'}: {each.first.rule}"
        f"{f', {each.extent}' if each.extent else ''}: {each.first.message}"
        for each in gathered
    ]
    facts = {IDENTITY: found.subject.identity, "layout": found.subject.layout}
    return StepResult(
        found.verdict,
        found.sentence,
        failures=tuple(failures),
        facts=facts,
        lines=tuple(lines),
        rows=tuple((part.name, "judged", part.told) for part in found.judged),
    )


def codecs(_: NightConfig, __: Results) -> StepResult:
    """Compute the known answers of the number formats."""
    wrong = wrong_codecs()
    if not wrong:
        return StepResult(Verdict.AGREES, f"{count()} known answers of the formats are met.")
    sentence = f"{len(wrong)} of {count()} known answers of the formats differ: {wrong[0]}."
    return StepResult(Verdict.DIFFERS, sentence, lines=tuple(wrong))


def captures(asked: NightConfig, _: Results, run: CaptureRun | None = None) -> StepResult:
    """Capture the same prompts in separate processes, or take the user's captures."""
    if asked.captures is not None:
        found = _given(asked.captures)
        return _captured(found, f"{len(found)} captures of the user's are taken as they are.")
    folder = usable_folder("captures", asked.work / CAPTURES)
    prompts = prompts_file(asked)
    made = []
    for number in range(asked.repeats):
        out = folder / f"run-{number + 1}"
        if out.exists():
            shutil.rmtree(out)  # of a process that was interrupted, or of another night
        _capture(asked, prompts, out, run or _alone)
        made.append(out)
    processes = f"{len(made)} {'process' if len(made) == 1 else 'processes'}"
    return _captured(made, f"The same prompts were captured in {processes}.")


def _captured(found: list[Path], sentence: str) -> StepResult:
    rows = tuple((each.name, "captured", str(each)) for each in found)
    table = Capture.open(found[0]).facts.get("kernels")
    ran = kernels_by_role(table) if isinstance(table, dict) else {}
    facts = {f"{RAN}{role}": words for role, words in ran.items()}
    return StepResult(Verdict.AGREES, sentence, facts=facts, rows=rows)


def _given(folder: Path) -> list[Path]:
    if (folder / MANIFEST).exists():
        return [folder]
    found = sorted(each for each in folder.iterdir() if (each / MANIFEST).exists())
    if not found:
        raise UnreadableFile(
            "--captures", folder.name, "a capture, or a folder of captures",
            "Name what `degarble capture --out` wrote.",
        )  # fmt: skip
    return found


def prompts_file(asked: NightConfig) -> Path:
    """Return this night's prompts as a file."""
    if asked.prompts is not None:
        return asked.prompts
    path = usable_folder("captures", asked.work) / "prompts.jsonl"
    texts: tuple[str, ...] = PROMPTS
    if (asked.checkpoint / TOKENIZER).is_file():
        # The vocabulary's bound is the model's to check, when it is opened.
        tokenizer = Tokenizer.of_checkpoint(asked.checkpoint, {}, sys.maxsize)
        texts = known_prompts(tokenizer)
    write_text(path, "".join(f"{json.dumps(each)}\n" for each in texts))
    return path


def _knows(tokenizer: Tokenizer, text: str) -> bool:
    try:
        return bool(tokenizer.encode(text)) and not tokenizer.unknown(text)
    except InvalidArgument:  # a vocabulary of whole words without one for the unknown
        return False


def known_prompts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the default prompts, or texts of known words if the tokenizer lacks theirs.

    On a prompt of unknown words a model's perplexity means nothing.
    """
    if all(_knows(tokenizer, each) for each in PROMPTS):
        return PROMPTS
    special = {token for token in tokenizer.codec.get_vocab() if not token.isalnum()}
    words = sorted(set(tokenizer.codec.get_vocab()) - special)
    words = [each for each in words if _knows(tokenizer, each)]
    chance = random.Random(0)  # noqa: S311  the same prompts every night
    lengths = [6 + 2 * (number % 8) for number in range(OWN_PROMPTS)]
    return tuple(" ".join(chance.choices(words, k=each)) for each in lengths) if words else PROMPTS


def capture_line(asked: NightConfig, prompts: Path, out: Path) -> list[str]:
    """Return Python's arguments for one capture of a night."""
    line = ["-m", "degarble.harness.cli.main", "--quiet", "capture"]
    line += [str(asked.checkpoint), "--out", str(out), "--prompts", str(prompts)]
    return [*line, "--backend", asked.backend, "--max-new-tokens", str(NEW_TOKENS)]


def _alone(asked: NightConfig, prompts: Path, out: Path) -> str:
    line = [sys.executable, *capture_line(asked, prompts, out)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)  # noqa: S603  ours
    return "" if not done.returncode else done.stderr or f"exit status {done.returncode}"


def _capture(asked: NightConfig, prompts: Path, out: Path, run: CaptureRun) -> None:
    said = run(asked, prompts, out)
    if said:
        raise InvalidArgument(
            f"degarble capture of {asked.name}", " ".join(said.split())[-400:],
            "a run that ends well", "Run that command by itself.",
        )  # fmt: skip


def folders_of(results: Results) -> list[Path]:
    """Return the captures of the step with that name."""
    from pathlib import Path  # noqa: PLC0415  a name for types above

    return [Path(place) for _, _, place in results["captures"].rows]


def _require_captures(results: Results) -> StepResult | None:
    if results["captures"].verdict is Verdict.AGREES:
        return None
    return StepResult(Verdict.UNDECIDED, "There is no capture to judge.")


def repeats(asked: NightConfig, results: Results) -> StepResult:
    """Compare the captures bit by bit; name the component that gave two results."""
    missing = _require_captures(results)
    if missing is not None:
        return missing
    folders = folders_of(results)
    if len(folders) == 1:
        return StepResult(
            Verdict.UNDECIDED, "One run alone shows nothing: give two captures, or more.",
            asked=asked.captures is None,
        )  # fmt: skip
    failures: dict[tuple[str, Verdict], Failure] = {}
    apart, rows = [], []
    for first, second in pairwise(folders):
        found = compare_runs(first, second)
        pair = f"{first.name}, {second.name}"
        rows.append((pair, str(found.verdict), found.sentence))
        if found.verdict is Verdict.AGREES:
            continue
        apart.append(found)
        for name in [line.component for line in found.origins] or ["night.repeats"]:
            failure = Failure(name, found.verdict, None, f"{pair}: {found.sentence}")
            failures.setdefault((name, found.verdict), failure)
    if not apart:
        words = f"{len(folders)} runs in processes of their own are equal to the bit."
        return StepResult(Verdict.AGREES, words, rows=tuple(rows))
    worst = max(apart, key=lambda each: SEVERITY.index(each.verdict))
    origins = dict.fromkeys(name for name, _ in failures if name != "night.repeats")
    names = tuple(f"{name} gave two answers on equal inputs" for name in origins)
    told = tuple(failures.values())
    return StepResult(worst.verdict, worst.sentence, failures=told, rows=tuple(rows), lines=names)


def check(asked: NightConfig, results: Results) -> StepResult:
    """Judge each capture over all of its layers; skip one that equals a judged one."""
    missing = _require_captures(results)
    if missing is not None:
        return missing
    folders = folders_of(results)
    if results["repeats"].verdict is Verdict.AGREES:
        folders = folders[:1]
    said = [_checked(asked, folder) for folder in folders]
    worst = max(said, key=lambda each: SEVERITY.index(each.verdict))
    values: dict[str, dict[str, float]] = {}
    for each in said:
        for measure, places in each.values.items():
            kept = values.setdefault(measure, {})
            for place, value in places.items():
                kept[place] = max(kept.get(place, value), value)
    failures = {(f.component, f.verdict, f.fault): f for each in said for f in each.failures}
    return replace(
        worst,
        values=values,
        failures=tuple(failures.values()),
        judged=tuple(dict.fromkeys(name for each in said for name in each.judged)),
        rows=tuple((folder.name, str(each.verdict), each.sentence)
                   for folder, each in zip(folders, said, strict=True)),
    )  # fmt: skip


def _checked(asked: NightConfig, capture: Path) -> StepResult:
    device = "cuda" if asked.gpu else "cpu"
    wanted = checking.CheckSettings(capture, asked.reference, asked.checkpoint, device=device)
    with checking.CheckRun(wanted) as opened:
        looker = StatisticsCollector(opened.model.config)
        cases = asked.folder / "reproducers" / f"{asked.name}-{capture.name}"
        found = opened.judge(looker, cases=cases)
        sentence = check_sentence(found)
        document = check_document(found, sentence)
        identity = auditing.identity_of(opened.model.checkpoint)
        words = f"degarble check {capture.name} --reference {asked.reference.resolve().name}"
        write_check_report(asked.folder, opened, found, looker, words)
    plain = _plain(document)
    failures = failures_of(plain)
    if found.verdict is not Verdict.AGREES and not failures:  # no other origin stands for this
        failures = (Failure("night.check", found.verdict, None, f"{capture.name}: {sentence}"),)
    return StepResult(
        found.verdict,
        sentence,
        values=values_of(plain),
        failures=failures,
        judged=tuple(dict.fromkeys(str(line["name"]) for line in plain["cosines"])),
        facts=_facts(found.facts) | {IDENTITY: identity},
        lines=tuple(f"{placed(each.trouble)}: {each.cause}. {each.remedy}"
                    for each in found.origins),
    )  # fmt: skip


def _facts(facts: Mapping[str, str]) -> dict[str, str]:
    """Return what may explain a change; the capture's hash differs every night."""
    return {name: value for name, value in facts.items() if name != "capture"}


def _plain(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with origins as mappings, as its readers expect."""
    from dataclasses import asdict  # noqa: PLC0415  used here alone

    origins = [asdict(each) for each in document["origins"]]
    return {**document, "schema": SCHEMA, "origins": origins}


# --------------------------------------------------------------------------------------------------
# The last steps of a nightly run: the museum's score, the history, the ledger of known failures.
#
# A short night plants a subset of faults. Of changes in the history only one turns a night red: a
# speed that fell by more than its measure allows. Others are listed, because budgets decide whether
# a change is a fault.

# One of each kind: scales, codes, layouts, experts, router, rotation, a race.
PLANTED = (
    "M01.inverse", "M03.experts_first", "M10.nibble_order", "M11.swizzle_skipped",
    "M12.previous_expert", "M26.weights", "M28.pairing",
)  # fmt: skip
SOME = museum_run.MuseumExtent(plants=1, healthy=4)
_EXTENTS = {"some": SOME, "published": museum_run.PUBLISHED, "whole": museum_run.WHOLE}


def museum(asked: NightConfig, _: Results) -> StepResult:
    """Plant faults in the embedded models: with a blind engine every other step is void."""
    faults = PLANTED if asked.museum == "some" else museum_run.chosen(())
    models = _models(asked)
    extent = _EXTENTS[asked.museum]
    workers = workers_for(museum_run.WORKER_BYTES)
    found = museum_run.run_museum(faults, extent, workers, root=models)
    scores = [each for each in found.scores if each.total]
    rows = tuple((each.claim.strip(), str(each.share), percent(each)) for each in scores)
    wrong = [*found.missed, *(each.case for each in found.alarms)]
    looked = [each.fault for each in found.outcomes]
    looked += [each.fault for each in found.repeats if each.fault]
    looked += [each.case for each in found.healthy]
    judged = tuple(f"museum.{each}" for each in dict.fromkeys(looked))
    values = {MUSEUM.name: {held(each): well(each) for each in scores if each.wanted is not None}}
    counts = f"{len(faults)} faults planted {len(found.outcomes)} times, {len(found.healthy)} "
    counts += "healthy runs"
    if not wrong and found.verdict is Verdict.AGREES:
        return StepResult(
            Verdict.AGREES, f"{counts}: all that was said is true.",
            values=values, judged=judged, rows=rows,
        )  # fmt: skip
    failures = tuple(
        Failure(f"museum.{each}", Verdict.DIFFERS, None, "missed, or a false alarm")
        for each in wrong
    )
    sentence = f"{counts}: the engine missed or mistook {', '.join(wrong) or 'a repeated run'}."
    return StepResult(Verdict.DIFFERS, sentence, values=values, failures=failures, judged=judged,
                      rows=rows)  # fmt: skip


def _models(asked: NightConfig) -> Path:
    """Return the folder of tonight's models, shared by all checkpoints; remove older ones."""
    for old in (asked.folder / "work").glob("museum-*"):
        with suppress(ValueError):  # of another making
            apart = date.fromisoformat(asked.night) - date.fromisoformat(old.name[len("museum-") :])
            if apart.days > 1:  # a night that began yesterday may still run
                shutil.rmtree(old, ignore_errors=True)
    return usable_folder("museum", asked.folder / "work" / f"museum-{asked.night}")


def held(score: MuseumScore) -> str:
    """Phrase a claim so that a larger share is better."""
    return score.claim if score.at_least else f"no {score.claim}"


def well(score: MuseumScore) -> float:
    """Return the share of cases in which the claim so phrased held."""
    return score.share if score.at_least else 1.0 - score.share


def history(asked: NightConfig, results: Results) -> StepResult:
    """Add the night to the store, and report what changed."""
    if asked.store is None:
        return StepResult(Verdict.UNDECIDED, "No --store was given.", asked=False)
    run = run_of(asked, results)
    if run is None:
        return StepResult(Verdict.UNDECIDED, "Nothing was measured, so nothing is kept.")
    with HistoryStore(asked.store, create=True) as store:
        with store.trying(run):
            told = _moved(history_in(store, run))
        told = replace(told, lines=(*told.lines, *skipped_lines(store)))
        # The store keeps the verdict of the whole night, with these reds and the ledger's.
        whole = {**results, "history": told}
        closed = run_of(asked, {**whole, "ledger": ledger(asked, whole)})
        assert closed is not None, "it measured what `run` did"
        store.add(closed)
    return replace(told, facts={"run": closed.id})


def _moved(found: History) -> StepResult:
    """Return red while a red change of a series stands; others are reported once."""
    red = found.lost
    series = {(each.measure, each.place) for each in red}
    failures = tuple(
        Failure(f"{each.measure}.{each.place}", Verdict.DIFFERS, None, each.sentence)
        for each in red
    )
    return StepResult(
        Verdict.DIFFERS if red else Verdict.AGREES,
        f"{red[0].sentence}." if red else history_sentence(found),
        failures=failures,
        judged=tuple(
            f"{each.measure}.{each.place}"
            for each in found.latest
            if (each.measure, each.place) not in series
        ),
        lines=tuple(f"{each.measure}: {each.sentence}" for each in found.fresh),
    )


def history_in(store: HistoryStore, run: HistoryRun) -> History:
    """Return the history that a run belongs to."""
    stream = next(
        each for each in store.streams()
        if (each.subject, each.machine) == (run.subject, run.machine)
    )  # fmt: skip
    return history_of(store, stream)


def run_of(asked: NightConfig, results: Results) -> HistoryRun | None:
    """Return the night as one run; None if no step measured anything."""
    values: dict[str, dict[str, float]] = {}
    facts: dict[str, str] = {}
    for result in results.values():
        facts |= {str(name): str(value)[:500] for name, value in result.facts.items() if value}
        for measure, places in result.values.items():
            values.setdefault(measure, {}).update(places)
    if not any(values.values()):
        return None
    known = None
    if asked.ledger is not None:
        known = read_ledger(asked.ledger, date.fromisoformat(asked.night))
    red = [
        each.verdict
        for name, each in results.items()
        if each.red and (name == LEDGER or not excused(asked, known, name, each))
    ]
    # A night on the CPU of a machine with a GPU is no night of that GPU.
    gpu = facts.get("GPU 0 name") if asked.gpu else None
    return HistoryRun(
        subject=asked.name,
        night=asked.night,
        machine=gpu or facts.get("machine", "unknown"),
        verdict=max(red, key=SEVERITY.index, default=Verdict.AGREES),
        values=values,
        commit=asked.commit[:64],
        started=asked.started,
        facts=facts,
    )


def ledger(asked: NightConfig, results: Results) -> StepResult:
    """Compare the night with the ledger: new, expired and healed entries turn it red."""
    if asked.ledger is None:
        return StepResult(Verdict.UNDECIDED, "No --ledger was given.", asked=False)
    today = date.fromisoformat(asked.night)
    known = read_ledger(asked.ledger, today)
    failures = [f for name, each in results.items() for f in failures_of_step(name, each)]
    judged = [name for each in results.values() for name in each.judged]
    ran = {name for name, each in results.items() if each.verdict not in _UNRUN}
    judged += [f"night.{name}" for name in ran]
    # An audit looks at all tensors: whatever an entry names there was looked at.
    if "audit" in ran:
        judged += [e.component for e in known.entries if e.component.startswith("audit.")]
    settled = known.settle(failures, asked.name, today, judged)
    lines = tuple(settled.lines())
    if not settled.red:
        count = len(settled.known)
        sentence = f"All that failed is known: {count}." if count else "Nothing failed."
        return StepResult(Verdict.AGREES, sentence, lines=lines)
    wrong = [*settled.expired, *settled.healed]
    told = tuple(
        Failure(f"ledger.{each.component}", Verdict.DIFFERS, None, each.issue) for each in wrong
    )
    sentence = (
        f"{len(settled.new)} new, {len(settled.expired)} expired, {len(settled.healed)} healed."
    )
    return StepResult(Verdict.DIFFERS, sentence, failures=told, lines=lines)


_UNRUN = (Verdict.UNDECIDED, Verdict.REFUSED)
