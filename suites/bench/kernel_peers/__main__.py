"""`make kernels-beside-peers`: time our kernels against the best public ones, in one process.

    python -m degarble.suites.bench.kernel_peers [--only GROUP ...] [--within SECONDS] [--resume]
    python -m degarble.suites.bench.kernel_peers --join FILE ... [--page]

Compiles the kernels that the rows are known to need (needed_forms.py) in parallel first, unless
DEGARBLE_KERNEL_CACHE is off; after half of --within no more are begun. A row compiles what is
missing.

Writes kernels.json and kernels.md into OUT after every row, so that what was measured stays when
time is up. --resume measures the rows that OUT lacks. A kernel that breaks or stops the device is
noted with its reason; the command then starts itself anew and measures the rest. --join puts the
rows of several runs together; --page writes them into docs/kernels.md.

Exit status 0 when every goal of the rows was met, 1 otherwise, 2 where nothing can be measured.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import (
    EXIT_AGREES,
    EXIT_DIFFERS,
    DegarbleError,
    InvalidArgument,
    UnknownName,
)
from degarble.suites.bench.__main__ import replaced
from degarble.suites.bench.kernel_peers import report
from degarble.suites.bench.kernel_peers.contest import (
    OURS,
    DeviceLostError,
    Gpu,
    TimedRow,
    measure,
    reason_of,
    require_usable,
)
from degarble.suites.bench.machine import machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from degarble.suites.bench.kernel_peers.contest import Clock, LargeRow, Row

HOME = "degarble.suites.bench.kernel_peers"
# Groups by module and generator, in the order of what is most wanted; each fits into one call on a
# machine that is lent for minutes.
GROUPS: Mapping[str, tuple[str, str, str]] = {
    "w4a16": ("linears", "w4a16", "BF16 times NVFP4 (N x K), us"),
    "fp8": ("linears", "fp8", "FP8 with scales of 128x128 blocks, us"),
    "bf16": ("linears", "bf16", "BF16 products, us"),
    "decode": ("attention", "decode", "Sparse attention, decoding from FP8 entries, us"),
    "prefill": ("attention", "prefill", "Sparse attention, prefill from BF16 entries, us"),
    "scores": ("indexer", "scores", "Indexer, FP8 scores, us"),
    "topk": ("indexer", "topk", "Top-2048, us"),
    "experts": ("experts", "experts", "Routed experts in NVFP4, us"),
    "norms": ("rows", "norms", "Norms, us"),
    "nodes": ("rows", "nodes", "Fused rows, mHC and nodes of a token, us"),
    "tokens": ("tokens", "tokens", "A decoding step of all layers as one graph, 8,192 tokens, us"),
    "layers": ("whole_layers", "layers", "A decoding step by layer, 8,192 tokens, us"),
    "bits": ("bits", "bits", "A row alone and among other rows, us"),
}
TITLES = {group: title for group, (_, _, title) in GROUPS.items()}
PACKAGES = (
    "torch", "nvidia-cutlass-dsl", "vllm", "quack-kernels", "humming-kernels",
    "tokenspeed-flashmla",
)  # fmt: skip
OUT = Path("out") / "kernel-peers"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "kernels.md"
FORMS = Path(__file__).with_name("needed_forms.json")
SECTION = "kernel-peers"
KERNEL_SECONDS = 120.0  # until one kernel counts as hanging; DeepGEMM and humming compile first
SPARE_SECONDS = 5.0  # at the end of --within
COMPILE_SHARE = 0.5  # of --within, in which kernels are begun to be compiled before the first row
LEAST_SECONDS = 5.0  # to compile ahead in; processes take some to start


def rows_of(group: str) -> Iterator[Row | LargeRow | TimedRow]:
    module, name, _ = GROUPS[group]
    made: Iterator[Row | LargeRow | TimedRow] = getattr(import_module(f"{HOME}.{module}"), name)()
    return made


@dataclass
class Run:
    """Rows of a run so far, and where they are written."""

    out: Path
    origin: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    lost: dict[str, dict[str, str]] = field(default_factory=dict)  # kernels by row
    left: list[str] = field(default_factory=list)  # rows for which time was up
    at: tuple[str, str] = ("", "")  # row and kernel that run now

    @property
    def known(self) -> set[str]:
        """Return the keys of the rows."""
        return {report.key_of(record) for record in self.rows}

    def write(self) -> None:
        """Replace both files as they are now."""
        self.out.mkdir(parents=True, exist_ok=True)
        document = {
            "target": self.origin, "machine": machine(PACKAGES), "rows": self.rows,
            "lost": self.lost, "left": self.left, "speeds": report.speeds(self.rows),
            "failed": report.failures(self.rows),
        }  # fmt: skip
        for name, text in (
            ("kernels.json", json.dumps(document, indent=1)),
            ("kernels.md", report.markdown(self.rows, TITLES)),
        ):
            draft = self.out / f"{name}.{os.getpid()}"
            draft.write_text(text, encoding="utf-8")
            draft.replace(self.out / name)

    def lose(self, why: str) -> None:
        """Note that the kernel that runs now, or else the row, broke the device."""
        row, kernel = self.at
        if kernel:
            self.lost.setdefault(row, {})[kernel] = why
        else:
            self.rows.append(failed_row(row, why, self.origin))
        self.write()


def failed_row(key: str, why: str, origin: str) -> dict[str, Any]:
    """Return the record of a row that was not measured."""
    group, _, name = key.partition(": ")
    arms = {OURS: {"reason": why}}
    return {"group": group, "row": name, "origin": origin, "seconds": 0.0, "arms": arms,
            "goals": []}  # fmt: skip


class Hang:
    """Start the command anew when a kernel does not end."""

    def __init__(self, run: Run, restart: Callable[[], None], seconds: float) -> None:
        self.run, self.restart, self.seconds = run, restart, seconds
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def at(self, row: str, kernel: str) -> None:
        """Watch a kernel; an empty name ends the watch."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
            self.run.at = (row, kernel)
            if kernel:
                self._timer = threading.Timer(self.seconds, self._expired, self.run.at)
                self._timer.daemon = True
                self._timer.start()

    def _expired(self, row: str, kernel: str) -> None:
        with self._lock:  # the main thread waits here, or the kernel has just ended
            if self.run.at == (row, kernel):
                self.run.lose(f"did not end in {self.seconds:.0f} s")
                self.restart()


def compile_rows(run: Run, groups: Sequence[str], options: Any) -> None:
    """Compile the listed forms of the rows that will be measured; say what was compiled."""
    from degarble.harness.cli.values import settings_here  # noqa: PLC0415  as in origin_here
    from degarble.harness.nightly import compiling  # noqa: PLC0415  as above
    from degarble.kernels.runtime.targets import target_of_device  # noqa: PLC0415  as above

    settings, known = settings_here(), run.known
    if settings.cache_folder is None:
        return

    def is_of_a_row(form: Mapping[str, Any]) -> bool:
        return any(
            row.partition(":")[0] in groups and row not in known and wanted(row, options.rows)
            for row in form["rows"]
        )

    target, now = target_of_device().name, time.monotonic()
    needed = compiling.needed_forms(FORMS, None, target, is_of_a_row)
    seconds = COMPILE_SHARE * (options.deadline - now)
    if not needed.listed or seconds < LEAST_SECONDS:
        return
    try:
        ahead = compiling.compile_ahead(needed, settings, target, until=now + seconds)
    except DegarbleError as error:  # rows compile what they need
        _say(f"kernels are not compiled ahead: {error}")
        return
    for made in ahead.found.values():
        if made.error:
            _say(f"{made.name}: {made.error}")
    _say(ahead.sentence)


def measured(run: Run, groups: Sequence[str], options: Any, clock: Clock, hang: Hang) -> None:
    """Measure the rows of groups until time is up."""
    known, longest = run.known, 0.0
    for group in groups:
        for row in rows_of(group):
            key = report.key_of({"group": group, "row": row.name})
            if key in known or not wanted(key, options.rows):
                continue
            if time.monotonic() + longest + SPARE_SECONDS > options.deadline:
                run.left.append(key)
                continue
            hang.at(key, "")
            start = time.monotonic()
            record = one_row(run, row, options.rounds, clock, hang)
            record["seconds"] = time.monotonic() - start
            longest = max(longest, record["seconds"])
            run.rows.append(record)
            run.write()
            _say(line_of(record))
            del row
            clock.release()


def one_row(
    run: Run, row: Row | LargeRow | TimedRow, rounds: int, clock: Clock, hang: Hang
) -> dict[str, Any]:
    """Measure a row; a failure outside of a kernel is the row's reason."""
    key, _ = run.at
    try:
        if isinstance(row, TimedRow):
            found = row.record(rounds, clock)
        else:
            lost = run.lost.get(key, {})
            found = measure(row.ready(), rounds, clock, lost, lambda name: hang.at(key, name))
    except DeviceLostError:
        raise
    except Exception as error:  # noqa: BLE001  as in measure
        why = reason_of(error)
        del error
        require_usable(clock, "", why)
        return failed_row(key, why, run.origin)
    return failed_row(key, "", run.origin) | found


def wanted(key: str, words: Sequence[str]) -> bool:
    return not words or any(word in key for word in words)


def line_of(record: Mapping[str, Any]) -> str:
    """Return a row in one line, for who watches."""
    arms = ", ".join(
        f"{name} {report.time_text(arm['microseconds'])}" if "microseconds" in arm
        else f"{name} -"
        for name, arm in record["arms"].items()
    )  # fmt: skip
    return f"{report.key_of(record)}: {arms} [{record['seconds']:.1f} s]"


# ---- the command ---------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"python -m {HOME}", description="Time kernels.")
    made.add_argument("--only", nargs="+", default=[], metavar="GROUP", help=", ".join(GROUPS))
    made.add_argument("--rows", nargs="+", default=[], metavar="WORD", help="rows with a WORD")
    made.add_argument("--within", type=float, default=0.0, metavar="SECONDS",
                      help="start no row that would end later, compile for half")  # fmt: skip
    made.add_argument("--rounds", type=int, default=20)
    made.add_argument("--out", type=Path, default=OUT)
    made.add_argument("--resume", action="store_true", help="keep the rows of OUT, measure others")
    made.add_argument("--join", nargs="+", type=Path, default=[], metavar="FILE")
    made.add_argument("--page", nargs="?", type=Path, const=PAGE, help="write docs/kernels.md")
    made.add_argument("--list", action="store_true", help="say what every group has")
    return made


def groups_of(names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in GROUPS:
            raise UnknownName.among("group of kernels", name, GROUPS)
    return [group for group in GROUPS if not names or group in names]


def origin_here() -> str:
    """Return date, GPU and versions; raise where there is no GPU."""
    import torch  # noqa: PLC0415  --join and --list need none

    from degarble.kernels.runtime.targets import target_of_device  # noqa: PLC0415  imports torch

    target = target_of_device()
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    versions = machine(PACKAGES).partition("; ")[2]
    return f"{today}, {torch.cuda.get_device_name()} ({target.name}); {versions}"


def join(options: Any) -> int:
    """Put the rows of several runs together; write them, or into the page and its records."""
    kept = options.page.with_suffix(".json") if options.page else None
    earlier = [kept] if kept is not None and kept.exists() else []
    rows = report.joined(report.read(path) for path in (*earlier, *options.join))
    text = report.markdown(rows, TITLES)
    if kept is not None:
        page = options.page.read_text(encoding="utf-8")
        if f"<!-- figures: {SECTION} -->" not in page:
            raise InvalidArgument(
                str(options.page), "no section of figures",
                f"the line <!-- figures: {SECTION} -->", "Restore the marker.",
            )  # fmt: skip
        texts = {kept: report.records_text(rows), options.page: replaced(page, SECTION, text)}
        drafts = {path.with_name(f"{path.name}.draft"): path for path in texts}
        for draft, path in drafts.items():
            draft.write_text(texts[path], encoding="utf-8")
        for draft, path in drafts.items():
            draft.replace(path)
    else:
        _say(text)
    _say(report.wins(rows))
    return EXIT_AGREES


def restarted(arguments: Sequence[str], deadline: float) -> None:
    """Replace this process by one that goes on."""
    rest, skip = [], False
    for argument in arguments:
        if skip or argument in ("--resume", "--within"):
            skip = argument == "--within" and not skip
            continue
        rest.append(argument)
    left = deadline - time.monotonic()
    within = [] if left == float("inf") else ["--within", f"{max(1.0, left):.0f}"]  # 0: no limit
    command = [sys.executable, "-m", HOME, *rest, "--resume", *within]
    sys.stdout.flush()
    os.execv(sys.executable, command)


def run_groups(options: Any, arguments: Sequence[str], clock: Clock) -> int:
    """Measure on this machine."""
    import torch  # noqa: PLC0415  as above

    groups = groups_of(options.only)
    run = Run(options.out, origin_here())
    kept = options.out / "kernels.json"
    if options.resume and kept.exists():
        before = report.read(kept)
        run.rows, run.lost = before["rows"], before.get("lost", {})
    within = options.within or float("inf")
    options.deadline = time.monotonic() + within

    def again() -> None:
        restarted(arguments, options.deadline)

    compile_rows(run, groups, options)
    hang = Hang(run, again, KERNEL_SECONDS)
    try:
        with torch.inference_mode():
            measured(run, groups, options, clock, hang)
    except DeviceLostError as error:
        run.lose(str(error.args[1]))
        again()
    finally:
        hang.at("", "")  # a watch that is left would replace whatever this process does next
    run.write()
    for key in run.left:
        _say(f"not measured, time was up: {key}")
    _say(report.markdown(run.rows, {group: TITLES[group] for group in groups}))
    _say(report.wins(run.rows))
    goals = [goal for record in run.rows for goal in record["goals"]]
    done = not run.left and not report.failures(run.rows)
    return EXIT_AGREES if done and all(goal["met"] for goal in goals) else EXIT_DIFFERS


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  a script


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or join what was measured."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    try:
        if options.list:
            for group, title in TITLES.items():
                _say(f"{group:8} {title}")
            return EXIT_AGREES
        if options.join:
            return join(options)
        return run_groups(options, arguments, Gpu())
    except DegarbleError as error:
        sys.stderr.write(f"REFUSED: {error}\n")
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
