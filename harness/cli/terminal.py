"""Print results on stdout and everything else on stderr: `--quiet`, `--json`, progress, errors.

With `--json` stdout carries exactly one JSON document. Text from outside is never read as markup,
and its control characters are escaped, so a tensor name cannot repaint the terminal.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from degarble.harness.base.errors import Undecided
from degarble.harness.cli.live_line import LiveLine, PlainLines
from degarble.harness.report.files import write_text
from degarble.harness.report.number_text import visible
from degarble.harness.report.page import to_plain
from degarble.harness.report.progress import Progress
from degarble.harness.report.verdict import SCHEMA, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from typing import TextIO

    from rich.console import Console, RenderableType

    from degarble.harness.base.errors import DegarbleError


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
