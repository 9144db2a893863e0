"""Kill a command at a random moment, run it again, and hold the result against an undisturbed one.

Wanted: nothing lost, nothing accepted that is half-written, and the same result in the end.

    python -m degarble.suites.campaigns.kills --command quantise --count 200 --jobs 32 --out DIR
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from degarble.harness.cli.main import main as degarble
from degarble.harness.errors import DegarbleError
from degarble.harness.record.capture_reader import Capture
from degarble.suites.campaigns.runner import CaseResult, arguments, run_cases
from degarble.suites.history.history_cases import W2
from degarble.suites.history.hostile_stores import sound_store
from degarble.suites.runs.talking_cases import write_speaker

if TYPE_CHECKING:
    from collections.abc import Callable

_PATIENCE = 300  # seconds after which a process counts as one that waits for ever
_SIGNALS = (signal.SIGKILL,) * 5 + (signal.SIGTERM, signal.SIGINT)
_ENDS = {0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, 130, 143}
_CHECK = {
    "schema": 1, "verdict": "AGREES", "checkpoint": "tiny",
    "cosines": [{"name": W2, "budgets": 0.25, "candidate_reference": 0.99}],
}  # fmt: skip
_NIGHT = """
import sys, time
from pathlib import Path
from degarble.harness.record.verdict import Verdict
from degarble.harness.runs.night import Night, Step
from degarble.harness.runs.night_closing import history
from degarble.harness.runs.night_record import Asked, StepResult

folder = Path(sys.argv[1])
values = {"budgets": {"head": 0.25}}

def work(number, asked, results):
    time.sleep(0.1)
    facts = {"machine": "m", f"step {number}": "done"}
    return StepResult(Verdict.AGREES, "Well.", values=values, facts=facts)

steps = [Step(f"s{n}", lambda a, r, n=n: work(n, a, r)) for n in range(8)]
steps.append(Step("history", history, all_before=True))
asked = Asked(folder / "src", folder / "src", folder / "night", "2026-11-22",
              store=str(folder / "h.sqlite"), commit="c0ffee")
night = Night(asked, steps)
night.run()
night.close()
sys.exit(0 if night.verdict is Verdict.AGREES else 1)
"""


@dataclass(frozen=True)
class Command:
    """A command that is killed: its words, what shows that its work has begun, and its judge."""

    words: tuple[str, ...]
    begun: str  # what appears in the folder as soon as there is something to lose
    left: Callable[[Path], str]  # what is wrong with what a killed run left, or nothing
    result: Callable[[Path], Any]  # what a whole run gives, to be compared
    uses: tuple[str, ...]  # what it needs of the prepared folder


def _in_process(folder: Path, *words: str) -> tuple[int, str]:
    out, told = io.StringIO(), io.StringIO()
    before = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
            status = degarble(list(words))
    finally:
        os.chdir(before)
    return status, out.getvalue() + told.getvalue()


def _bytes_below(name: str, folder: Path) -> dict[str, str]:
    files = sorted(path for path in (folder / name).rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def _checkpoint(name: str, folder: Path) -> Any:
    status, told = _in_process(folder, "audit", name, "--json=audit.json")
    assert status in (0, 1, 2), told
    return status, _bytes_below(name, folder)


def _left_checkpoint(name: str, folder: Path) -> str:
    """Half a checkpoint may lie there, but no audit may find it whole."""
    if not (folder / name).exists():
        return ""
    status, told = _in_process(folder, "audit", name, "--json=audit.json")
    if status not in (0, 1, 2):
        return f"audit of what was left: status {status}: {told}"
    if status == 0 and _bytes_below(name, folder).keys() < _reference(name).keys():
        return "audit accepts half a checkpoint"
    return ""


def _reference(name: str) -> dict[str, str]:
    found: dict[str, str] = _undisturbed({"q": "quantise", "c": "convert"}[name])[1][1]
    return found


def _capture(folder: Path) -> Any:
    status, told = _in_process(folder, "compare", "cap", str(_prepared() / "cap"))
    return status, told if status else "", Capture.open(folder / "cap").complete


def _left_capture(folder: Path) -> str:
    try:
        complete = Capture.open(folder / "cap").complete
    except DegarbleError:
        complete = False
    for words in (("check", "cap", "--reference", "src"), ("compare", "cap", "cap")):
        status, told = _in_process(folder, *words)
        if status not in ((0,) if complete else (2,)):
            return f"{words[0]} of a capture, complete {complete}: status {status}: {told}"
    return ""


def _checked(folder: Path) -> Any:
    document = json.loads((folder / "check.json").read_text(encoding="utf-8"))
    document.pop("report", None)
    return document, [path.suffix for path in sorted((folder / "report").glob("*.*ml"))]


def _left_check(folder: Path) -> str:
    if (folder / "check.json").exists() and _checked(folder) != _undisturbed("check")[1]:
        return "check.json is there, and is not that of a whole run"
    for page in (folder / "report").glob("*.html"):
        if not page.read_text(encoding="utf-8").rstrip().endswith("</html>"):
            return f"half a page: {page.name}"
    return ""


def _stored(folder: Path) -> Any:
    status, told = _in_process(folder, "--json", "history", "runs", "--store", "h.sqlite")
    assert status == 0, told
    runs = json.loads(told)["runs"]
    for run in runs:
        run["id"] = run["id"] if run["commit"] != "c0ffee" else ""  # of a night: its time is in it
    # A night that was killed behind its very end is whole, and the next one is another.
    return [run for number, run in enumerate(runs) if run not in runs[:number]]


def _left_store(most: int, folder: Path) -> str:
    if not (folder / "h.sqlite").exists():
        return ""
    status, told = _in_process(folder, "--json", "history", "runs", "--store", "h.sqlite")
    if status:
        return "" if status == 2 and "a store of runs" in told else f"status {status}: {told}"
    count = len(json.loads(told)["runs"])
    return "" if most - 1 <= count <= most else f"{count} runs in the store"


COMMANDS = {
    "quantise": Command(
        ("quantise", "src", "q", "--recipe", "nvfp4-experts", "--calibration", "amax"),
        "q", partial(_left_checkpoint, "q"), partial(_checkpoint, "q"), ("src", "amax"),
    ),
    "convert": Command(
        ("convert", "whole", "c", "--to", "bf16", "--prove"),
        "c", partial(_left_checkpoint, "c"), partial(_checkpoint, "c"), ("whole",),
    ),
    "capture": Command(
        ("capture", "src", "--prompt", "w7 w8", "--max-new-tokens", "3", "--out", "cap"),
        "cap", _left_capture, _capture, ("src",),
    ),
    "check": Command(
        ("check", "cap", "--reference", "src", "--json", "check.json", "--report", "report"),
        "report", _left_check, _checked, ("src", "cap"),
    ),
    "history": Command(
        ("history", "add", "given.json", "--store", "h.sqlite", "--machine", "m",
         "--night", "2026-11-22"),
        "h.sqlite-journal", partial(_left_store, 32), _stored, ("h.sqlite", "given.json"),
    ),
    "night": Command((), "night", partial(_left_store, 1), _stored, ("src",)),
}  # fmt: skip


@cache
def _prepared() -> Path:
    """Make what the commands read, once for each process of the campaign."""
    folder = Path(tempfile.mkdtemp(prefix="degarble-kills-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_speaker(folder / "src")
    sound_store(folder / "h.sqlite")
    (folder / "given.json").write_text(json.dumps(_CHECK), encoding="utf-8")
    quantise = COMMANDS["quantise"].words
    for words in (
        ("capture", "src", "--prompt", "w7", "--amax-only", "--out", "amax"),
        (quantise[0], "src", "whole", *quantise[3:]),
        COMMANDS["capture"].words,
    ):
        status, told = _in_process(folder, *words)
        assert status == 0, told
    return folder


def _laid_out(command: Command) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="degarble-kill-"))
    for name in command.uses:
        source = _prepared() / name
        if source.is_dir():  # links: nothing of it is written, and paths stay the prepared ones
            (folder / name).symlink_to(source)
        else:
            shutil.copy(source, folder / name)
    return folder


def _start(command: Command, folder: Path) -> subprocess.Popen[str]:
    words = ["-m", "degarble.harness.cli.main", *command.words]
    if not command.words:
        words = ["-c", _NIGHT, str(folder)]
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, text=True, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def _until_begun(process: subprocess.Popen[str], path: Path) -> None:
    end = time.monotonic() + _PATIENCE
    while process.poll() is None and not path.exists() and time.monotonic() < end:
        time.sleep(0.0005)


def _usual(name: str) -> set[int]:
    return {0, 1} if name == "check" else {0}


@cache
def _undisturbed(name: str) -> tuple[tuple[float, float], Any]:
    """Return the seconds before and after a whole run began its work, and its result."""
    command = COMMANDS[name]
    folder = _laid_out(command)
    began = time.monotonic()
    process = _start(command, folder)
    _until_begun(process, folder / command.begun)
    begun = time.monotonic()
    told = process.communicate(timeout=_PATIENCE)[1]
    assert process.returncode in _usual(name), told
    spans = begun - began, time.monotonic() - begun
    try:
        return spans, command.result(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def case(name: str, seed: int) -> CaseResult:
    """Kill one run of a command, and run it again."""
    rng = random.Random(seed)
    command = COMMANDS[name]
    (before, after), wanted = _undisturbed(name)
    folder = _laid_out(command)
    sent = rng.choice(_SIGNALS)
    # Three of four while there is something to lose, the others at any moment before.
    waits = rng.random() < 0.75
    moment = rng.uniform(0, 1.1 * after if waits else before)
    kind = f"{name} {sent.name}"
    try:
        process = _start(command, folder)
        if waits:
            _until_begun(process, folder / command.begun)
        time.sleep(moment)
        process.send_signal(sent)
        told = process.communicate(timeout=_PATIENCE)[1]
        status = process.returncode
        outcome, detail = "ok", ""
        if status not in _ENDS | _usual(name):
            outcome, detail = f"ended with status {status}", told
        elif detail := command.left(folder):
            outcome = "left"
        else:
            outcome, detail = _again(name, folder, wanted)
        where = f"{'begun + ' if waits else ''}{moment:.3f} s, status {status}: {detail}"
        return CaseResult(seed, kind, outcome, where if outcome != "ok" else "")
    except subprocess.TimeoutExpired:
        return CaseResult(seed, kind, "waits for ever", f"after {moment:.3f} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers, where it could not end them
        shutil.rmtree(folder, ignore_errors=True)


def _again(name: str, folder: Path, wanted: Any) -> tuple[str, str]:
    command = COMMANDS[name]
    process = _start(command, folder)
    told = process.communicate(timeout=_PATIENCE)[1]
    if process.returncode == 2 and "a folder without a capture" in told:
        shutil.rmtree(folder / "cap")  # a run is captured from its beginning: as the remedy says
        process = _start(command, folder)
        told = process.communicate(timeout=_PATIENCE)[1]
    if process.returncode not in _usual(name):
        return "not resumable", f"status {process.returncode}: {told}"
    found = command.result(folder)
    return ("ok", "") if found == wanted else ("another result", f"{found}"[:2000])


def main() -> int:
    """Run the campaign; 1 where a case did not end as it should."""
    parser = arguments(__doc__ or "", count=200)
    parser.add_argument(
        "--command", choices=list(COMMANDS), default="quantise", help="what to kill"
    )
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.count)
    report = run_cases(f"kills_{given.command}", partial(case, given.command), seeds, given.jobs)
    report.write(given.out)
    sys.stdout.write(report.table() + "\n")
    return 1 if report.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
