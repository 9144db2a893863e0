"""Kill a command at a random moment, run it again, and hold the result against an undisturbed one.

Wanted: nothing lost, nothing accepted that is half-written, and the same result in the end.

    python -m degarble.suites.campaigns.kills --command quantise --count 200 --jobs 32 --out DIR

A new interpreter spends 2 to 5 s of processor time on imports before the 0.2 s that can lose
something. So seven of eight runs are forks of a process that has imported everything and run the
command once; every eighth is a new interpreter.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from degarble.harness.base.errors import DegarbleError
from degarble.harness.capture.files.reader import Capture
from degarble.harness.cli.main import main as degarble
from degarble.harness.nightly.night import Night, NightConfig, NightStep, StepResult
from degarble.harness.nightly.steps import history
from degarble.harness.report.verdict import Verdict
from degarble.suites.campaigns.runner import CaseResult, arguments, run_campaign
from degarble.suites.hang_guard import HANG_SECONDS
from degarble.suites.history.history_cases import W2
from degarble.suites.history.hostile_stores import sound_store
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from collections.abc import Callable

_SIGNALS = (signal.SIGKILL,) * 5 + (signal.SIGTERM, signal.SIGINT)
_ENDS = {0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, 130, 143}
_NEW_INTERPRETER = 8  # one run of so many
_CHECK = {
    "schema": 1, "verdict": "AGREES", "checkpoint": "tiny",
    "cosines": [{"name": W2, "budgets": 0.25, "candidate_reference": 0.99}],
}  # fmt: skip
_PREPARED = "prepared"  # a link in the folder of each run
_NIGHT = (
    "-c",
    "import sys; from degarble.suites.campaigns import kills; sys.exit(kills.run_night())",
)


@dataclass(frozen=True)
class Command:
    """A command that is killed: its words, what shows that its work has begun, and its judge."""

    words: tuple[str, ...]
    begun: str  # what appears in the folder as soon as there is something to lose
    left: Callable[[Path, Any], str]  # what is wrong with what a killed run left, or nothing
    result: Callable[[Path], Any]  # what a whole run gives, to be compared
    uses: tuple[str, ...]  # what it needs of the prepared folder


def run_night() -> int:
    """Run a night of eight short steps and a history in this folder."""
    folder = Path.cwd()

    def work(number: int, _asked: NightConfig, _results: Any) -> StepResult:
        time.sleep(0.1)
        facts = {"machine": "m", f"step {number}": "done"}
        return StepResult(Verdict.AGREES, "Well.", values={"budgets": {"head": 0.25}}, facts=facts)

    steps = [NightStep(f"s{n}", partial(work, n)) for n in range(8)]
    steps.append(NightStep("history", history, all_before=True))
    config = NightConfig(
        folder / "src", folder / "src", folder / "night", "2026-11-22",
        store=str(folder / "h.sqlite"), commit="c0ffee",
    )  # fmt: skip
    night = Night(config, steps)
    night.run()
    night.close()
    return 0 if night.verdict is Verdict.AGREES else 1


def _in_process(folder: Path, *words: str) -> tuple[int, str]:
    out, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        status = degarble(list(words))
    return status, out.getvalue() + errors.getvalue()


def _bytes_below(name: str, folder: Path) -> dict[str, str]:
    files = sorted(path for path in (folder / name).rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def _checkpoint(name: str, folder: Path) -> Any:
    status, text = _in_process(folder, "audit", name, "--json=audit.json")
    assert status in (0, 1, 2), text
    return status, _bytes_below(name, folder)


def _left_checkpoint(name: str, folder: Path, wanted: Any) -> str:
    """Half a checkpoint may lie there, but no audit may find it whole."""
    if not (folder / name).exists():
        return ""
    status, text = _in_process(folder, "audit", name, "--json=audit.json")
    if status not in (0, 1, 2):
        return f"audit of what was left: status {status}: {text}"
    if status == 0 and _bytes_below(name, folder).keys() < wanted[1].keys():
        return "audit accepts half a checkpoint"
    return ""


def _capture(folder: Path) -> Any:
    status, text = _in_process(folder, "compare", "cap", str(folder / _PREPARED / "cap"))
    return status, text if status else "", Capture.open(folder / "cap").complete


def _left_capture(folder: Path, _wanted: Any) -> str:
    try:
        complete = Capture.open(folder / "cap").complete
    except DegarbleError:
        complete = False
    for words in (("check", "cap", "--reference", "src"), ("compare", "cap", "cap")):
        status, text = _in_process(folder, *words)
        if status not in ((0,) if complete else (2,)):
            return f"{words[0]} of a capture, complete {complete}: status {status}: {text}"
    return ""


def _checked(folder: Path) -> Any:
    document = json.loads((folder / "check.json").read_text(encoding="utf-8"))
    document.pop("report", None)
    return document, [path.suffix for path in sorted((folder / "report").glob("*.*ml"))]


def _left_check(folder: Path, wanted: Any) -> str:
    if (folder / "check.json").exists() and _checked(folder) != wanted:
        return "check.json is there, and is not that of a whole run"
    for page in (folder / "report").glob("*.html"):
        if not page.read_text(encoding="utf-8").rstrip().endswith("</html>"):
            return f"half a page: {page.name}"
    return ""


def _stored(folder: Path) -> Any:
    status, text = _in_process(folder, "--json", "history", "runs", "--store", "h.sqlite")
    assert status == 0, text
    runs = json.loads(text)["runs"]
    for run in runs:
        run["id"] = run["id"] if run["commit"] != "c0ffee" else ""  # of a night: its time is in it
    # A night that was killed behind its very end is whole, and the next one is another.
    return [run for number, run in enumerate(runs) if run not in runs[:number]]


def _left_store(most: int, folder: Path, _wanted: Any) -> str:
    if not (folder / "h.sqlite").exists():
        return ""
    status, text = _in_process(folder, "--json", "history", "runs", "--store", "h.sqlite")
    if status:
        return "" if status == 2 and "a store of runs" in text else f"status {status}: {text}"
    count = len(json.loads(text)["runs"])
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


def prepare(folder: Path) -> Path:
    """Make what the commands read, once; the loops that numba compiles are cached by it."""
    write_speaker(folder / "src")
    sound_store(folder / "h.sqlite")
    (folder / "given.json").write_text(json.dumps(_CHECK), encoding="utf-8")
    quantise = COMMANDS["quantise"].words
    for words in (
        ("capture", "src", "--prompt", "w7", "--amax-only", "--out", "amax"),
        (quantise[0], "src", "whole", *quantise[3:]),
        COMMANDS["capture"].words,
    ):
        status, text = _in_process(folder, *words)
        assert status == 0, text
    return folder


def _laid_out(command: Command, prepared: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="degarble-kill-"))
    (folder / _PREPARED).symlink_to(prepared)
    for name in command.uses:
        source = prepared / name
        if source.is_dir():  # links: nothing of it is written, and paths stay the prepared ones
            (folder / name).symlink_to(source)
        else:
            shutil.copy(source, folder / name)
    return folder


def _run(command: Command) -> int:
    return degarble(list(command.words)) if command.words else run_night()


class Process:
    """A run of a command in a session of its own: a fork of this process, or a new interpreter."""

    def __init__(self, command: Command, folder: Path, *, new: bool) -> None:
        self._errors = folder / "stderr.txt"
        self.status: int | None = None
        # Trap: a signal just after the fork would raise in this copy of the campaign itself.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS[-2:])
        self.pid = os.fork()
        if not self.pid:
            self._become(command, folder, before, new=new)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _become(self, command: Command, folder: Path, mask: set[int], *, new: bool) -> NoReturn:
        status = 1
        try:
            os.setsid()
            os.chdir(folder)
            for number, path in ((1, Path(os.devnull)), (2, self._errors)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            for number in _SIGNALS[-2:]:
                usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, usual)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if new:
                words = ["-m", "degarble.harness.cli.main", *command.words]
                os.execv(sys.executable, [sys.executable, *(words if command.words else _NIGHT)])
            status = _run(command)
        except KeyboardInterrupt:
            status = 130
        except BaseException:  # noqa: BLE001  nothing may come back from here
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def ended(self) -> bool:
        """Tell whether it has ended; its status is known then, negative for a signal."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def wait(self, path: Path | None = None) -> None:
        """Wait until it has ended, or `path` is there."""
        end = time.monotonic() + HANG_SECONDS
        while not self.ended() and not (path and path.exists()):
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.0005)

    def errors(self) -> str:
        """Return what it wrote to stderr."""
        return self._errors.read_text(encoding="utf-8", errors="replace")

    def send(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if not self.ended():
            os.kill(self.pid, number)

    def clear(self) -> None:
        """Kill what is left of it, and of its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.status is None:
            os.waitpid(self.pid, 0)


def _finish(command: Command, folder: Path, *, new: bool) -> Process:
    process = Process(command, folder, new=new)
    try:
        process.wait()
    finally:
        process.clear()
    return process


def _usual(name: str) -> set[int]:
    return {0, 1} if name == "check" else {0}


@cache
def _warmed(name: str, prepared: Path) -> None:
    """Run a command once in this process, so that a fork of it has nothing left to import."""
    folder = _laid_out(COMMANDS[name], prepared)
    quiet = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(quiet),
        contextlib.redirect_stderr(quiet),
    ):
        _run(COMMANDS[name])
    shutil.rmtree(folder, ignore_errors=True)


@cache
def _undisturbed(name: str, prepared: Path, *, new: bool) -> tuple[tuple[float, float], Any]:
    """Return the seconds before and after a whole run began its work, and its result."""
    command = COMMANDS[name]
    folder = _laid_out(command, prepared)
    began = time.monotonic()
    process = Process(command, folder, new=new)
    try:
        process.wait(folder / command.begun)
        begun = time.monotonic()
        process.wait()
        spans = begun - began, time.monotonic() - begun
        assert process.status in _usual(name), process.errors()
        return spans, command.result(folder)
    finally:
        process.clear()
        shutil.rmtree(folder, ignore_errors=True)


def case(name: str, prepared: Path, seed: int) -> CaseResult:
    """Kill one run of a command, and run it again."""
    rng = random.Random(seed)
    command, new = COMMANDS[name], seed % _NEW_INTERPRETER == 0
    _warmed(name, prepared)
    (before, after), wanted = _undisturbed(name, prepared, new=new)
    folder = _laid_out(command, prepared)
    sent = rng.choice(_SIGNALS)
    # Three of four while there is something to lose, the others at any moment before.
    waits = rng.random() < 0.75
    moment = rng.uniform(0, 1.1 * after if waits else before)
    kind = f"{name} {sent.name}{' of a new interpreter' if new else ''}"
    process = Process(command, folder, new=new)
    try:
        if waits:
            process.wait(folder / command.begun)
        time.sleep(moment)
        process.send(sent)
        process.wait()
        outcome, detail = "ok", ""
        if process.status not in _ENDS | _usual(name):
            outcome, detail = f"ended with status {process.status}", process.errors()
        elif detail := command.left(folder, wanted):
            outcome = "left"
        else:
            outcome, detail = _again(name, folder, wanted)
        where = f"{'begun + ' if waits else ''}{moment:.3f} s, status {process.status}: {detail}"
        return CaseResult(seed, kind, outcome, where if outcome != "ok" else "")
    except TimeoutError:
        return CaseResult(seed, kind, "waits for ever", f"after {moment:.3f} s")
    finally:
        process.clear()  # its workers too, where it could not end them
        shutil.rmtree(folder, ignore_errors=True)


def _again(name: str, folder: Path, wanted: Any) -> tuple[str, str]:
    command = COMMANDS[name]
    process = _finish(command, folder, new=False)
    if process.status == 2 and "a folder without a capture" in process.errors():
        shutil.rmtree(folder / "cap")  # a run is captured from its beginning: as the remedy says
        process = _finish(command, folder, new=False)
    if process.status not in _usual(name):
        return "not resumable", f"status {process.status}: {process.errors()}"
    found = command.result(folder)
    return ("ok", "") if found == wanted else ("another result", f"{found}"[:2000])


def main() -> int:
    """Run the campaign; 1 where a case did not end as it should."""
    parser = arguments(__doc__ or "", count=200)
    parser.add_argument(
        "--command", choices=list(COMMANDS), default="quantise", help="what to kill"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="degarble-kills-") as folder:
        prepared = prepare(Path(folder))
        one = partial(case, given.command, prepared)
        return run_campaign(f"kills_{given.command}", one, given)


if __name__ == "__main__":
    sys.exit(main())
