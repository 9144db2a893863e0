"""Print results on stdout and everything else on stderr: progress, refusals, crashes.

Text from outside is never read as markup, and its control characters are escaped.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
import traceback
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from degarble.harness.base.errors import MASK, Undecided, masked
from degarble.harness.base.version import VERSION
from degarble.harness.report.files import write_text
from degarble.harness.report.number_text import visible
from degarble.harness.report.progress import Progress
from degarble.harness.report.verdict import SCHEMA, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import TextIO

    from rich.console import Console, RenderableType

    from degarble.harness.base.errors import DegarbleError
    from degarble.harness.inference.weights import StreamedWeights
    from degarble.harness.report.progress import ProgressState


# --------------------------------------------------------------------------------------------------
# Print progress: one line that is repainted on a terminal, occasional plain lines elsewhere.
#
# A terminal is repainted at most ten times a second, and the line is erased at the end. A file or a
# pipe gets at most one line a minute and at most one for each twentieth of the work, so a run of
# hours leaves twenty lines in a log and a short one none.

_REPAINT = 0.1  # seconds
_PLAIN = 60.0  # seconds
_STEPS = 20  # plain lines of one run at most
_COLUMNS = 80  # where a screen does not tell its own
_CLEAR = "\r\x1b[K"


class LiveLine:
    """Progress line on a screen. Call it with a pace; `end()` removes it."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._painted: float | None = None

    def __call__(self, pace: ProgressState) -> None:
        """Paint it, unless that was done just now."""
        now = self._clock()
        if self._painted is not None and now - self._painted < _REPAINT:
            return
        self._painted = now
        # Trap: a line as wide as the screen wraps, and then cannot be removed.
        text = visible(pace.text(self._columns() - 1)).replace("\n", " ")
        self._stream.write(f"{_CLEAR}{text}")
        self._stream.flush()

    def end(self) -> None:
        """Leave the screen as it was."""
        if self._painted is not None:
            self._stream.write(_CLEAR)
            self._stream.flush()

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _COLUMNS
        except (OSError, ValueError):
            return _COLUMNS


class PlainLines:
    """Lines for a log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._written_at, self._step = 0.0, 0

    def __call__(self, pace: ProgressState) -> None:
        """Write a line where one is due."""
        step = int(pace.share * _STEPS)
        if pace.elapsed - self._written_at < _PLAIN or step <= self._step or step >= _STEPS:
            return
        self._written_at, self._step = pace.elapsed, step
        self._stream.write(f"{visible(pace.text())}\n")
        self._stream.flush()

    def end(self) -> None:
        """Nothing is left to remove."""


# --------------------------------------------------------------------------------------------------
# Print results on stdout and everything else on stderr: `--quiet`, `--json`, progress, errors.
#
# With `--json` stdout carries exactly one JSON document. Text from outside is never read as markup,
# and its control characters are escaped, so a tensor name cannot repaint the terminal.

_WIDTH = 100  # columns where the reader is no terminal


@dataclass(frozen=True)
class Environment:
    """Environment variables of the command line, read once."""

    traceback: bool

    @classmethod
    def read(cls) -> Environment:
        """Read them."""
        return cls(traceback=os.environ.get("DEGARBLE_TRACEBACK", "") not in ("", "0"))


@dataclass(frozen=True)
class Terminal:
    """Output of one run of the command line."""

    json_wanted: bool = False
    json_file: Path | None = None
    quiet: bool = False
    cluster: str | None = None

    def out(self) -> Console:
        """Console for results."""
        return _console(sys.stdout)

    def err(self) -> Console:
        """Console for progress and notes."""
        return _console(sys.stderr)

    @property
    def width(self) -> int:
        """Columns of stdout; 100 where it is no terminal."""
        return self.out().width

    @property
    def colour(self) -> bool:
        """Whether stdout takes colours: a terminal, and NO_COLOR is not set (rich reads it)."""
        return self.out().color_system is not None and not self.out().no_color

    def say(self, *lines: RenderableType) -> None:
        """Show results to a person; silent with --json and --quiet."""
        if self.json_wanted or self.quiet:
            return
        console = self.out()
        for line in lines:
            if isinstance(line, str):
                sys.stdout.write(line if line.endswith("\n") else f"{line}\n")
            else:
                console.print(line, markup=False)

    def emit(self, document: Mapping[str, object]) -> None:
        """Write the document of --json to stdout or to its file; without --json nothing."""
        if self.json_wanted:
            sys.stdout.write(json_text(document))
        if self.json_file is not None:
            write_text(self.json_file, json_text(document))

    @contextmanager
    def work(self, doing: str, total: int) -> Iterator[Progress]:
        """Give a counter of `total` bytes, shown on stderr; with --quiet it is not shown."""
        if self.quiet:
            yield Progress(doing, total)
            return
        line = LiveLine(sys.stderr) if sys.stderr.isatty() else PlainLines(sys.stderr)
        try:
            yield Progress(doing, total, line)
        finally:
            line.end()

    @contextmanager
    def progress(self, doing: str, total: int) -> Iterator[Callable[[str], None]]:
        """Give a function to be called after each of `total` steps, with the name of the next."""
        if self.quiet or not sys.stderr.isatty():
            yield lambda _step: None
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415  start-up time

        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.err(), transient=True) as bar:
            task = bar.add_task(doing, total=total)
            yield lambda step: bar.update(task, advance=1, description=f"{doing}: {step}")


def _console(stream: TextIO) -> Console:
    from rich.console import Console  # noqa: PLC0415  start-up time

    width = None if stream.isatty() else _WIDTH
    return Console(file=stream, highlight=False, width=width)


def json_text(document: Mapping[str, object]) -> str:
    """Write a document of this project: schema first, one line a field, a newline at the end."""
    from degarble.harness.report.page import to_plain  # noqa: PLC0415  start-up time

    plain = to_plain({"schema": SCHEMA, **document})
    return json.dumps(plain, allow_nan=False, ensure_ascii=True, indent=1) + "\n"


def refusal_lines(error: DegarbleError) -> list[str]:
    """Format an error: the sentence, then name, value, expectation and remedy."""
    word = Verdict.UNDECIDED if isinstance(error, Undecided) else Verdict.REFUSED
    lines = [f"degarble: {word}: {error.name} = {error.shown_value}"]
    lines += [f"  expected  {error.expectation}", f"  remedy    {error.remedy}"]
    return lines


def tell_refusal(error: DegarbleError, *, json_wanted: bool) -> int:
    """Print a refusal to stderr (and, with --json, as a document to stdout); give exit status 2."""
    first, *rest = refusal_lines(error)
    console = _console(sys.stderr)
    console.print(visible(first), style="bold", markup=False, soft_wrap=True)
    for line in rest:
        console.print(visible(line), markup=False, soft_wrap=True)
    if json_wanted:
        sys.stdout.write(json_text(refusal_document(error)))
    return error.exit_status


def refusal_document(error: DegarbleError) -> dict[str, object]:
    """Give the document that --json prints for a refusal."""
    verdict = Verdict.UNDECIDED if isinstance(error, Undecided) else Verdict.REFUSED
    return {
        "verdict": verdict,
        "error": {
            "class": type(error).__name__,
            "name": error.name,
            "value": error.shown_value,
            "expectation": error.expectation,
            "remedy": error.remedy,
        },
        "origins": [],
        "cosines": [],
    }


# --------------------------------------------------------------------------------------------------
# Show the progress of the first pass over streamed weights, for commands that run a model.
#
# Later passes are not shown: text is printed in their place.


@contextmanager
def first_pass(
    terminal: Terminal, streamed: StreamedWeights | None
) -> Iterator[Callable[[], None]]:
    """Show how far it is; call what is given when it is over. Held weights show nothing."""
    with ExitStack() as stack:
        if streamed is not None:
            progress = stack.enter_context(terminal.work("first pass", streamed.total))
            streamed.on_read = progress.advance
            stack.callback(setattr, streamed, "on_read", None)
        yield stack.close


# --------------------------------------------------------------------------------------------------
# Format the message for an unexpected exception: what happened, where, and how to report it.
#
# The traceback is printed only with DEGARBLE_TRACEBACK=1, because a user cannot act on it.

EXIT_CRASHED = 70  # EX_SOFTWARE of sysexits.h: outside the contract's 0, 1 and 2


def tell_crash(error: Exception, arguments: Sequence[str], environment: Environment) -> int:
    """Print the message to stderr and give the exit status."""
    if environment.traceback:
        sys.stderr.write(masked("".join(traceback.format_exception(error))))
    sys.stderr.write(crash_text(error, arguments))
    return EXIT_CRASHED


def crash_text(error: Exception, arguments: Sequence[str]) -> str:
    """Describe what happened, where, and what to send."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"
    message = masked("".join(c if c.isprintable() else "?" for c in str(error)))[:300]
    command = shlex.join(["degarble", *map(_without_secrets, arguments)])
    return (
        f"degarble: this is a mistake of degarble, not of yours\n"
        f"  what     {type(error).__name__}: {message}\n"
        f"  where    {place}\n"
        f"  command  {command}\n"
        f"  version  degarble {VERSION}, Python {platform.python_version()}, {sys.platform}\n"
        f"  remedy   Report these lines as an issue (CONTRIBUTING.md says where); "
        f"DEGARBLE_TRACEBACK=1 adds the traceback.\n"
    )


def _without_secrets(argument: str) -> str:
    """Leave out who signs in at an address: these lines are made to be sent."""
    shown = masked(argument)
    # Where nobody can tell the password from the rest, all of a mistyped address is hidden.
    return MASK if shown == argument and "@" in argument else shown
