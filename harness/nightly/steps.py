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
from degarble.harness.report.page import MANIFEST as IDENTITY
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


def environment(config: NightConfig, _: Results) -> StepResult:
    """Report machine, GPU with driver and clocks, versions and backend."""
    facts = {"machine": machine(), "system": platform.release(), "backend": config.backend}
    facts |= dict(provenance("").versions) | kernel_versions()
    if config.commit:
        facts["commit"] = config.commit
    gpus = _gpus()
    for number, fields in enumerate(gpus):
        facts |= {f"GPU {number} {name}": value for name, value in fields.items()}
    if config.gpu and not gpus:
        return StepResult(
            Verdict.UNDECIDED, "nvidia-smi does not report driver and clocks.", facts=facts
        )
    what = ", ".join(dict.fromkeys(gpu["name"] for gpu in gpus)) or "no GPU"
    return StepResult(Verdict.AGREES, f"{what}; {facts['machine']}.", facts=facts)


def where_of(facts: Mapping[str, str], *, gpu: bool) -> str:
    """Return a short description of the machine; a requested GPU comes first."""
    lines = [facts.get("GPU 0 name", ""), facts.get("GPU 0 driver_version", "")] if gpu else []
    of_gpu = ", driver ".join(filter(None, lines))
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


def audit(config: NightConfig, _: Results) -> StepResult:
    """Audit the checkpoint's files, against the reference if that is another."""
    apart = config.checkpoint.resolve() != config.reference.resolve()
    wanted = auditing.AuditRequest(config.checkpoint, against=config.reference if apart else None)
    found = auditing.audit(wanted, usable_workers())
    words = f"degarble audit {config.name}"
    words += f" --against {config.reference.resolve().name}" if apart else ""
    write_page(config.folder, audit_page(found, provenance(words)))
    errors = [finding for finding in found.findings if finding.level is Level.ERROR]
    failures = [
        Failure(
            f"audit.{error.tensor or error.module or 'checkpoint'}",
            Verdict.DIFFERS,
            error.rule,
            error.message,
        )
        for error in errors
    ]
    gathered = auditing.by_rule(errors)
    lines = [
        f"{rule.first.tensor or rule.first.module or 'checkpoint'}: {rule.first.rule}"
        f"{f', {rule.extent}' if rule.extent else ''}: {rule.first.message}"
        for rule in gathered
    ]
    facts = {IDENTITY: found.subject.identity, "layout": found.subject.layout}
    return StepResult(
        found.verdict,
        found.sentence,
        failures=tuple(failures),
        facts=facts,
        lines=tuple(lines),
        rows=tuple((part.name, "judged", part.text) for part in found.judged),
    )


def codecs(_: NightConfig, __: Results) -> StepResult:
    """Compute the known answers of the number formats."""
    wrong = wrong_codecs()
    if not wrong:
        return StepResult(Verdict.AGREES, f"{count()} known answers of the formats are met.")
    sentence = f"{len(wrong)} of {count()} known answers of the formats differ: {wrong[0]}."
    return StepResult(Verdict.DIFFERS, sentence, lines=tuple(wrong))


def captures(config: NightConfig, _: Results, run: CaptureRun | None = None) -> StepResult:
    """Capture the same prompts in separate processes, or take the user's captures."""
    if config.captures is not None:
        paths = _given(config.captures)
        return _captured(paths, f"{len(paths)} captures of the user's are taken as they are.")
    folder = usable_folder("captures", config.work / CAPTURES)
    prompts = prompts_file(config)
    made = []
    for number in range(config.repeats):
        out = folder / f"run-{number + 1}"
        if out.exists():
            shutil.rmtree(out)  # of a process that was interrupted, or of another night
        _capture(config, prompts, out, run or _alone)
        made.append(out)
    processes = f"{len(made)} {'process' if len(made) == 1 else 'processes'}"
    return _captured(made, f"The same prompts were captured in {processes}.")


def _captured(paths: list[Path], sentence: str) -> StepResult:
    rows = tuple((path.name, "captured", str(path)) for path in paths)
    table = Capture.open(paths[0]).facts.get("kernels")
    ran = kernels_by_role(table) if isinstance(table, dict) else {}
    facts = {f"{RAN}{role}": words for role, words in ran.items()}
    return StepResult(Verdict.AGREES, sentence, facts=facts, rows=rows)


def _given(folder: Path) -> list[Path]:
    if (folder / MANIFEST).exists():
        return [folder]
    paths = sorted(path for path in folder.iterdir() if (path / MANIFEST).exists())
    if not paths:
        raise UnreadableFile(
            "--captures", folder.name, "a capture, or a folder of captures",
            "Name what `degarble capture --out` wrote.",
        )  # fmt: skip
    return paths


def prompts_file(config: NightConfig) -> Path:
    """Return this night's prompts as a file."""
    if config.prompts is not None:
        return config.prompts
    path = usable_folder("captures", config.work) / "prompts.jsonl"
    texts: tuple[str, ...] = PROMPTS
    if (config.checkpoint / TOKENIZER).is_file():
        # The vocabulary's bound is the model's to check, when it is opened.
        tokenizer = Tokenizer.of_checkpoint(config.checkpoint, {}, sys.maxsize)
        texts = known_prompts(tokenizer)
    write_text(path, "".join(f"{json.dumps(text)}\n" for text in texts))
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
    words = [word for word in words if _knows(tokenizer, word)]
    chance = random.Random(0)  # noqa: S311  the same prompts every night
    lengths = [6 + 2 * (number % 8) for number in range(OWN_PROMPTS)]
    return (
        tuple(" ".join(chance.choices(words, k=length)) for length in lengths) if words else PROMPTS
    )


def capture_line(config: NightConfig, prompts: Path, out: Path) -> list[str]:
    """Return Python's arguments for one capture of a night."""
    line = ["-m", "degarble.harness.cli.main", "--quiet", "capture"]
    line += [str(config.checkpoint), "--out", str(out), "--prompts", str(prompts)]
    return [*line, "--backend", config.backend, "--max-new-tokens", str(NEW_TOKENS)]


def _alone(config: NightConfig, prompts: Path, out: Path) -> str:
    line = [sys.executable, *capture_line(config, prompts, out)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)  # noqa: S603  ours
    return "" if not done.returncode else done.stderr or f"exit status {done.returncode}"


def _capture(config: NightConfig, prompts: Path, out: Path, run: CaptureRun) -> None:
    said = run(config, prompts, out)
    if said:
        raise InvalidArgument(
            f"degarble capture of {config.name}", " ".join(said.split())[-400:],
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


def repeats(config: NightConfig, results: Results) -> StepResult:
    """Compare the captures bit by bit; name the component that gave two results."""
    missing = _require_captures(results)
    if missing is not None:
        return missing
    folders = folders_of(results)
    if len(folders) == 1:
        return StepResult(
            Verdict.UNDECIDED, "One run alone shows nothing: give two captures, or more.",
            asked=config.captures is None,
        )  # fmt: skip
    failures: dict[tuple[str, Verdict], Failure] = {}
    apart, rows = [], []
    for first, second in pairwise(folders):
        comparison = compare_runs(first, second)
        pair = f"{first.name}, {second.name}"
        rows.append((pair, str(comparison.verdict), comparison.sentence))
        if comparison.verdict is Verdict.AGREES:
            continue
        apart.append(comparison)
        for name in [line.component for line in comparison.origins] or ["night.repeats"]:
            failure = Failure(name, comparison.verdict, None, f"{pair}: {comparison.sentence}")
            failures.setdefault((name, comparison.verdict), failure)
    if not apart:
        words = f"{len(folders)} runs in processes of their own are equal to the bit."
        return StepResult(Verdict.AGREES, words, rows=tuple(rows))
    worst = max(apart, key=lambda run_comparison: SEVERITY.index(run_comparison.verdict))
    origins = dict.fromkeys(name for name, _ in failures if name != "night.repeats")
    names = tuple(f"{name} gave two answers on equal inputs" for name in origins)
    told = tuple(failures.values())
    return StepResult(worst.verdict, worst.sentence, failures=told, rows=tuple(rows), lines=names)


def check(config: NightConfig, results: Results) -> StepResult:
    """Judge each capture over all of its layers; skip one that equals a judged one."""
    missing = _require_captures(results)
    if missing is not None:
        return missing
    folders = folders_of(results)
    if results["repeats"].verdict is Verdict.AGREES:
        folders = folders[:1]
    said = [_checked(config, folder) for folder in folders]
    worst = max(said, key=lambda step_result: SEVERITY.index(step_result.verdict))
    values: dict[str, dict[str, float]] = {}
    for result in said:
        for measure, places in result.values.items():
            kept = values.setdefault(measure, {})
            for place, value in places.items():
                kept[place] = max(kept.get(place, value), value)
    failures = {
        (f.component, f.verdict, f.fault): f for step_result in said for f in step_result.failures
    }
    return replace(
        worst,
        values=values,
        failures=tuple(failures.values()),
        judged=tuple(dict.fromkeys(name for step_result in said for name in step_result.judged)),
        rows=tuple((folder.name, str(step_result.verdict), step_result.sentence)
                   for folder, step_result in zip(folders, said, strict=True)),
    )  # fmt: skip


def _checked(config: NightConfig, capture: Path) -> StepResult:
    device = "cuda" if config.gpu else "cpu"
    wanted = checking.CheckSettings(
        capture, config.reference, config.checkpoint, device=device, screen=config.screen
    )
    with checking.CheckRun(wanted) as opened:
        collector = StatisticsCollector(opened.model.config, opened.model.store)
        cases = config.folder / "reproducers" / f"{config.name}-{capture.name}"
        result = opened.judge(collector, cases=cases)
        sentence = check_sentence(result)
        document = check_document(result, sentence)
        identity = auditing.identity_of(opened.model.checkpoint)
        words = f"degarble check {capture.name} --reference {config.reference.resolve().name}"
        write_check_report(config.folder, opened, result, collector, words)
    plain = _plain(document)
    failures = failures_of(plain)
    if result.verdict is not Verdict.AGREES and not failures:  # no other origin stands for this
        failures = (Failure("night.check", result.verdict, None, f"{capture.name}: {sentence}"),)
    return StepResult(
        result.verdict,
        sentence,
        values=values_of(plain),
        failures=failures,
        judged=tuple(dict.fromkeys(str(line["name"]) for line in plain["cosines"])),
        facts=_facts(result.facts) | {IDENTITY: identity},
        lines=tuple(f"{placed(origin.discrepancy)}: {origin.cause}. {origin.remedy}"
                    for origin in result.origins),
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


def museum(config: NightConfig, _: Results) -> StepResult:
    """Plant faults in the embedded models: with a blind engine every other step is void."""
    faults = PLANTED if config.museum == "some" else museum_run.chosen(())
    models = _models(config)
    extent = _EXTENTS[config.museum]
    workers = workers_for(museum_run.WORKER_BYTES)
    found = museum_run.run_museum(faults, extent, workers, root=models)
    scores = [score for score in found.scores if score.total]
    rows = tuple((score.claim.strip(), str(score.share), percent(score)) for score in scores)
    wrong = [*found.missed, *(alarm.case for alarm in found.alarms)]
    looked = [outcome.fault for outcome in found.outcomes]
    looked += [repeat.fault for repeat in found.repeats if repeat.fault]
    looked += [run.case for run in found.healthy]
    judged = tuple(f"museum.{each}" for each in dict.fromkeys(looked))
    values = {
        MUSEUM.name: {held(score): well(score) for score in scores if score.wanted is not None}
    }
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


def _models(config: NightConfig) -> Path:
    """Return the folder of tonight's models, shared by all checkpoints; remove older ones."""
    for old in (config.folder / "work").glob("museum-*"):
        with suppress(ValueError):  # of another making
            apart = date.fromisoformat(config.night) - date.fromisoformat(
                old.name[len("museum-") :]
            )
            if apart.days > 1:  # a night that began yesterday may still run
                shutil.rmtree(old, ignore_errors=True)
    return usable_folder("museum", config.folder / "work" / f"museum-{config.night}")


def held(score: MuseumScore) -> str:
    """Phrase a claim so that a larger share is better."""
    return score.claim if score.at_least else f"no {score.claim}"


def well(score: MuseumScore) -> float:
    """Return the share of cases in which the claim so phrased held."""
    return score.share if score.at_least else 1.0 - score.share


def history(config: NightConfig, results: Results) -> StepResult:
    """Add the night to the store, and report what changed."""
    if config.store is None:
        return StepResult(Verdict.UNDECIDED, "No --store was given.", asked=False)
    run = run_of(config, results)
    if run is None:
        return StepResult(Verdict.UNDECIDED, "Nothing was measured, so nothing is kept.")
    with HistoryStore(config.store, create=True) as store:
        with store.trying(run):
            result = _moved(history_in(store, run))
        result = replace(result, lines=(*result.lines, *skipped_lines(store)))
        # The store keeps the verdict of the whole night, with these reds and the ledger's.
        whole = {**results, "history": result}
        closed = run_of(config, {**whole, "ledger": ledger(config, whole)})
        assert closed is not None, "it measured what `run` did"
        store.add(closed)
    return replace(result, facts={"run": closed.id})


def _moved(found: History) -> StepResult:
    """Return red while a red change of a series stands; others are reported once."""
    red = found.lost
    series = {(change.measure, change.place) for change in red}
    failures = tuple(
        Failure(f"{change.measure}.{change.place}", Verdict.DIFFERS, None, change.sentence)
        for change in red
    )
    return StepResult(
        Verdict.DIFFERS if red else Verdict.AGREES,
        f"{red[0].sentence}." if red else history_sentence(found),
        failures=failures,
        judged=tuple(
            f"{change.measure}.{change.place}"
            for change in found.latest
            if (change.measure, change.place) not in series
        ),
        lines=tuple(f"{change.measure}: {change.sentence}" for change in found.fresh),
    )


def history_in(store: HistoryStore, run: HistoryRun) -> History:
    """Return the history that a run belongs to."""
    stream = next(
        each for each in store.streams()
        if (each.subject, each.machine) == (run.subject, run.machine)
    )  # fmt: skip
    return history_of(store, stream)


def run_of(config: NightConfig, results: Results) -> HistoryRun | None:
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
    if config.ledger is not None:
        known = read_ledger(config.ledger, date.fromisoformat(config.night))
    red = [
        step_result.verdict
        for name, step_result in results.items()
        if step_result.red and (name == LEDGER or not excused(config, known, name, step_result))
    ]
    # A night on the CPU of a machine with a GPU is no night of that GPU.
    gpu = facts.get("GPU 0 name") if config.gpu else None
    return HistoryRun(
        subject=config.name,
        night=config.night,
        machine=gpu or facts.get("machine", "unknown"),
        verdict=max(red, key=SEVERITY.index, default=Verdict.AGREES),
        values=values,
        commit=config.commit[:64],
        started=config.started,
        facts=facts,
    )


def ledger(config: NightConfig, results: Results) -> StepResult:
    """Compare the night with the ledger: new, expired and healed entries turn it red."""
    if config.ledger is None:
        return StepResult(Verdict.UNDECIDED, "No --ledger was given.", asked=False)
    today = date.fromisoformat(config.night)
    known = read_ledger(config.ledger, today)
    failures = [f for name, result in results.items() for f in failures_of_step(name, result)]
    judged = [name for result in results.values() for name in result.judged]
    ran = {name for name, result in results.items() if result.verdict not in _UNRUN}
    judged += [f"night.{name}" for name in ran]
    # An audit looks at all tensors: whatever an entry names there was looked at.
    if "audit" in ran:
        judged += [e.component for e in known.entries if e.component.startswith("audit.")]
    settled = known.settle(failures, config.name, today, judged)
    lines = tuple(settled.lines())
    if not settled.red:
        count = len(settled.known)
        sentence = f"All that failed is known: {count}." if count else "Nothing failed."
        return StepResult(Verdict.AGREES, sentence, lines=lines)
    wrong = [*settled.expired, *settled.healed]
    told = tuple(
        Failure(f"ledger.{entry.component}", Verdict.DIFFERS, None, entry.issue) for entry in wrong
    )
    sentence = (
        f"{len(settled.new)} new, {len(settled.expired)} expired, {len(settled.healed)} healed."
    )
    return StepResult(Verdict.DIFFERS, sentence, failures=told, lines=lines)


_UNRUN = (Verdict.UNDECIDED, Verdict.REFUSED)
