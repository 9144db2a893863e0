"""Command line of `degarble history` and `bisect`: the night and commit that moved a component."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from degarble.harness.base.errors import EXIT_AGREES, EXIT_DIFFERS, EXIT_REFUSED, InvalidArgument
from degarble.harness.cli import values
from degarble.harness.cli.command import Group, command
from degarble.harness.cli.terminal import Terminal
from degarble.harness.cli.values import ReportFolder
from degarble.harness.report.files import require_folder

EXPORT_SUFFIXES = (".parquet",)

Store = Annotated[
    str, typer.Option(metavar="URL", help="The history store: a SQLite file or a postgresql URL.")
]
Component = Annotated[
    str | None,
    typer.Argument(
        metavar="COMPONENT", help="For example layers.23.ffn.experts.w2, or a pattern with *."
    ),
]
Subject = Annotated[
    str | None, typer.Option(metavar="NAME", help="Only the history of this checkpoint.")
]
Machine = Annotated[str | None, typer.Option(metavar="NAME", help="Only runs on this machine.")]
Measure = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Only this: budgets, distance, speed, text or museum."),
]
_STORE = "degarble-history.sqlite"


@dataclass(frozen=True)
class AddOptions:
    """Options of `degarble history add`."""

    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What degarble check --json FILE wrote.")
    ]
    store: Store = _STORE
    subject: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its name. Default: the checkpoint's.")
    ] = None
    machine: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where it ran. Default: this machine.")
    ] = None
    commit: Annotated[
        str, typer.Option(metavar="SHA", help="Commit of the kernels that were judged.")
    ] = ""
    night: Annotated[
        str | None, typer.Option(metavar="DATE", help="Its night. Default: today, UTC.")
    ] = None


@dataclass(frozen=True)
class HistoryListOptions:
    """Options of `degarble history runs`."""

    store: Store = _STORE


@dataclass(frozen=True)
class TrendOptions:
    """Options of `degarble history trends`."""

    component: Component = None
    store: Store = _STORE
    subject: Subject = None
    machine: Machine = None
    measure: Measure = None
    report: ReportFolder = None


@dataclass(frozen=True)
class ChangeOptions:
    """Options of `degarble history changes`."""

    component: Component = None
    store: Store = _STORE
    subject: Subject = None
    machine: Machine = None
    measure: Measure = None


@dataclass(frozen=True)
class RunsOptions:
    """Options of `degarble history compare`."""

    first: Annotated[str, typer.Argument(metavar="RUN", help="A run, by its id or commit.")]
    second: Annotated[str, typer.Argument(metavar="RUN", help="The run to compare it with.")]
    store: Store = _STORE


@dataclass(frozen=True)
class ExportOptions:
    """Options of `degarble history export`."""

    file: Annotated[Path, typer.Argument(metavar="FILE.parquet", help="Where to write.")]
    store: Store = _STORE


@dataclass(frozen=True)
class BisectOptions:
    """Options of `degarble bisect`."""

    words: Annotated[
        list[str],
        typer.Argument(metavar="-- CMD", help="Command to run at each commit, after --."),
    ]
    good: Annotated[
        str | None, typer.Option(metavar="REV", help="A commit before. Default: from the store.")
    ] = None
    bad: Annotated[
        str | None, typer.Option(metavar="REV", help="A commit after. Default: from the store.")
    ] = None
    component: Annotated[
        str | None, typer.Option(metavar="NAME", help="The component that moved.")
    ] = None
    result: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="JSON of a check that CMD writes; without --component its status decides.",
        ),
    ] = "check.json"
    repository: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="The git repository to walk through.",
            show_default="the folder that you are in",
        ),
    ] = Path()
    store: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Store whose latest change gives the two commits."),
    ] = None


def add(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    history = typer.Typer(
        help="Query the store of all runs: trends, changes, two runs side by side.",
        cls=Group,
    )
    command(history, "add", AddOptions)(add_run)
    command(history, "runs", HistoryListOptions)(runs)
    command(history, "trends", TrendOptions)(trends)
    command(history, "changes", ChangeOptions)(changes)
    command(history, "compare", RunsOptions)(compare)
    command(history, "export", ExportOptions)(export)
    app.add_typer(history, name="history")
    command(app, "bisect", BisectOptions)(bisect)


def add_run(options: AddOptions, terminal: Terminal) -> int:
    """Add the result of a check to the store; adding it twice changes nothing."""
    from degarble.harness.history.records import (  # noqa: PLC0415  numpy
        HistoryRun,
        read_check,
        values_of,
    )
    from degarble.harness.history.store import HistoryStore as Opened  # noqa: PLC0415  as above
    from degarble.harness.report.page import machine  # noqa: PLC0415  as above
    from degarble.harness.report.verdict import Verdict  # noqa: PLC0415  as above

    document = read_check(options.file)
    now = datetime.now(UTC)
    facts = {name: str(value) for name, value in dict(document.get("facts") or {}).items()}
    run = HistoryRun(
        subject=options.subject or str(document.get("checkpoint") or options.file.stem),
        night=options.night or str(now.date()),
        machine=options.machine or machine(),
        verdict=Verdict(document["verdict"]),
        values=values_of(document),
        commit=options.commit,
        facts=facts,
    )
    with Opened(options.store, create=True) as store:
        fresh = store.add(run)
    terminal.say(f"{'Added' if fresh else 'Already there'}: {run.id}, {run.subject}, {run.night}")
    terminal.emit({"verdict": Verdict.AGREES, "run": run.id, "added": fresh})
    return EXIT_AGREES


def runs(options: HistoryListOptions, terminal: Terminal) -> int:
    """List every run of the store."""
    from degarble.harness.history.query import runs_document, runs_lines  # noqa: PLC0415  numpy

    with _opened(options.store) as store:
        found = store.runs()
        terminal.say(*runs_lines(found))
        return _answer(store, terminal, runs_document(found))


def trends(options: TrendOptions, terminal: Terminal) -> int:
    """Draw the difference of each component over the nights."""
    from degarble.harness.commands.report_folder import history_pages, history_text  # noqa: PLC0415
    from degarble.harness.history import query as asked  # noqa: PLC0415  numpy

    if options.report is not None:
        require_folder("--report", options.report)
    with _opened(options.store) as store:
        histories = asked.histories(store, _question(options))
        document = asked.trends_document(histories)
        for history in histories:
            terminal.say(history_text(history, width=terminal.width, colour=terminal.colour))
        if options.report is not None:
            document["reports"] = [str(page) for page in history_pages(options.report, histories)]
            for page in document["reports"]:
                terminal.say(f"Open the report: {page}")
        return _answer(store, terminal, document, EXIT_AGREES)


def changes(options: ChangeOptions, terminal: Terminal) -> int:
    """Name the nights and commits that moved a component; exit status 1 when there are any."""
    from degarble.harness.history import query as asked  # noqa: PLC0415  numpy

    with _opened(options.store) as store:
        histories = asked.histories(store, _question(options))
        terminal.say(*asked.changes_lines(histories))
        return _answer(store, terminal, asked.changes_document(histories))


def compare(options: RunsOptions, terminal: Terminal) -> int:
    """Compare two runs of the store."""
    from degarble.harness.history.query import compared  # noqa: PLC0415  numpy

    with _opened(options.store) as store:
        lines, document = compared(store, options.first, options.second)
        terminal.say(*lines)
        return _answer(store, terminal, document)


def export(options: ExportOptions, terminal: Terminal) -> int:
    """Write the whole store as a parquet file."""
    if options.file.suffix not in EXPORT_SUFFIXES:
        raise InvalidArgument(
            "FILE.parquet",
            str(options.file),
            "a file name that ends in .parquet",
            f"Write to {options.file.with_suffix('.parquet').name}.",
        )
    values.writable("FILE.parquet", options.file)
    from degarble.harness.history.store import write_parquet  # noqa: PLC0415  numpy
    from degarble.harness.report.verdict import Verdict  # noqa: PLC0415  as above

    with _opened(options.store) as store:
        rows = write_parquet(store, options.file)
        terminal.say(f"{rows:,} numbers in {options.file}")
        document = {"verdict": Verdict.AGREES, "file": str(options.file), "rows": rows}
        return _answer(store, terminal, document)


def bisect(options: BisectOptions, terminal: Terminal) -> int:
    """Narrow a range of commits to the one that moved a component's difference.

    CMD runs in a work tree of each commit, and writes there, to --result, the JSON of a check.
    """
    from degarble.harness.nightly.bisect import BisectSearch, bisected  # noqa: PLC0415  numpy

    search = BisectSearch(
        command=tuple(options.words),
        repository=options.repository,
        component=options.component,
        result=options.result,
        good=options.good,
        bad=options.bad,
        store=options.store,
    )
    result = bisected(search, terminal.say)
    terminal.say(result.sentence)
    terminal.emit(result.document())
    return EXIT_DIFFERS


@contextmanager
def _opened(url: str) -> Iterator[Any]:
    """Open a store to read it; rows that were skipped are named, also where a question fails."""
    from degarble.harness.history.query import skipped_lines  # noqa: PLC0415  numpy
    from degarble.harness.history.store import HistoryStore as Opened  # noqa: PLC0415  as above

    with Opened(url) as store:
        try:
            yield store
        finally:
            for line in skipped_lines(store):
                sys.stderr.write(f"{line}\n")


def _answer(
    store: Any, terminal: Terminal, document: dict[str, Any], status: int | None = None
) -> int:
    """Write the document; what agrees over a part of the rows is undecided over all of them."""
    from degarble.harness.report.verdict import Verdict  # noqa: PLC0415  start-up time

    document["skipped"] = [asdict(row) for row in store.skipped]
    status = document["verdict"].exit_status if status is None else status
    if store.skipped and document["verdict"] is Verdict.AGREES:
        document["verdict"] = Verdict.UNDECIDED
    if store.skipped and status == EXIT_AGREES:
        status = EXIT_REFUSED
    terminal.emit(document)
    return status


def _question(options: TrendOptions | ChangeOptions) -> Any:
    from degarble.harness.history.query import HistoryQuery  # noqa: PLC0415  numpy

    return HistoryQuery(options.component, options.subject, options.machine, options.measure)
