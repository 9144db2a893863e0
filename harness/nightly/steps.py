"""The judging steps of a nightly run: environment, audit, codecs, captures, repeats, check.

Each runs what the command of the same name runs; numbers go into the history, failures into the
ledger, pages and JUnit into the folder of the night. Each capture is made by its own process,
because a fault may be random by launch and constant within one process; the user's own captures are
taken as they are.
"""

from __future__ import annotations

import json
import platform
import random
import shutil
import subprocess
import sys
from dataclasses import replace
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
from degarble.harness.commands.history_page import MANIFEST as IDENTITY
from degarble.harness.commands.report_folder import write_page
from degarble.harness.history.ledger import Failure
from degarble.harness.history.records import failures_of, values_of
from degarble.harness.inference.processes import usable_workers
from degarble.harness.nightly.codecs import count, wrong_codecs
from degarble.harness.nightly.record import CAPTURES, Asked, StepResult
from degarble.harness.report.files import usable_folder, write_text
from degarble.harness.report.kernel_table import kernels_by_role
from degarble.harness.report.page import kernel_versions, machine, provenance
from degarble.harness.report.verdict import SCHEMA, SEVERITY, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Results = Mapping[str, StepResult]
    CaptureRun = Callable[[Asked, Path, Path], str]  # says why there is none, else nothing

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


def environment(asked: Asked, _: Results) -> StepResult:
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
            Verdict.UNDECIDED, "nvidia-smi does not tell driver and clocks.", facts=facts
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


def audit(asked: Asked, _: Results) -> StepResult:
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


def codecs(_: Asked, __: Results) -> StepResult:
    """Compute the known answers of the number formats."""
    wrong = wrong_codecs()
    if not wrong:
        return StepResult(Verdict.AGREES, f"{count()} known answers of the formats are met.")
    sentence = f"{len(wrong)} of {count()} known answers of the formats differ: {wrong[0]}."
    return StepResult(Verdict.DIFFERS, sentence, lines=tuple(wrong))


def captures(asked: Asked, _: Results, run: CaptureRun | None = None) -> StepResult:
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


def prompts_file(asked: Asked) -> Path:
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


def capture_line(asked: Asked, prompts: Path, out: Path) -> list[str]:
    """Return Python's arguments for one capture of a night."""
    line = ["-m", "degarble.harness.cli.main", "--quiet", "capture"]
    line += [str(asked.checkpoint), "--out", str(out), "--prompts", str(prompts)]
    return [*line, "--backend", asked.backend, "--max-new-tokens", str(NEW_TOKENS)]


def _alone(asked: Asked, prompts: Path, out: Path) -> str:
    line = [sys.executable, *capture_line(asked, prompts, out)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)  # noqa: S603  ours
    return "" if not done.returncode else done.stderr or f"exit status {done.returncode}"


def _capture(asked: Asked, prompts: Path, out: Path, run: CaptureRun) -> None:
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


def repeats(asked: Asked, results: Results) -> StepResult:
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


def check(asked: Asked, results: Results) -> StepResult:
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


def _checked(asked: Asked, capture: Path) -> StepResult:
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
