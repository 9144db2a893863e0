"""`degarble history` and `bisect`: which night, and which commit, moved a component."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from degarble.harness.cli import values
from degarble.harness.cli.command import NOT_BUILT, Group, command
from degarble.harness.cli.terminal import Terminal
from degarble.harness.errors import InvalidArgument

EXPORT_SUFFIXES = (".parquet",)

Store = Annotated[
    str, typer.Option(metavar="URL", help="The history store: a SQLite file or a postgresql URL.")
]
Component = Annotated[
    str | None,
    typer.Argument(metavar="COMPONENT", help="For example layers.23.ffn.experts.w2."),
]
_STORE = "degarble-history.sqlite"


@dataclass(frozen=True)
class TrendOptions:
    """Options of `degarble history trends` and `changes`."""

    component: Component = None
    store: Store = _STORE


@dataclass(frozen=True)
class RunsOptions:
    """Options of `degarble history compare`."""

    first: Annotated[str, typer.Argument(metavar="RUN", help="A run, by its id or commit.")]
    second: Annotated[str, typer.Argument(metavar="RUN", help="The run to set beside it.")]
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


def add(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    history = typer.Typer(
        help="Ask the store of all runs: trends, changes, two runs side by side.",
        cls=Group,
    )
    command(history, "trends", TrendOptions)(trends)
    command(history, "changes", TrendOptions)(changes)
    command(history, "compare", RunsOptions)(compare)
    command(history, "export", ExportOptions)(export)
    app.add_typer(history, name="history", rich_help_panel=NOT_BUILT)
    command(app, "bisect", BisectOptions, panel=NOT_BUILT)(bisect)


def trends(_options: TrendOptions, _terminal: Terminal) -> int:
    """Draw the difference of each component over the nights."""
    raise values.not_built("history trends", "a store of runs")


def changes(_options: TrendOptions, _terminal: Terminal) -> int:
    """Name the nights and commits that moved a component; exit status 1 when there are any."""
    raise values.not_built("history changes", "a store of runs")


def compare(_options: RunsOptions, _terminal: Terminal) -> int:
    """Set two runs of the store beside each other."""
    raise values.not_built("history compare", "a store of runs")


def export(options: ExportOptions, _terminal: Terminal) -> int:
    """Write the whole store as a parquet file."""
    if options.file.suffix not in EXPORT_SUFFIXES:
        raise InvalidArgument(
            "FILE.parquet",
            str(options.file),
            "a file name that ends in .parquet",
            f"Write to {options.file.with_suffix('.parquet').name}.",
        )
    raise values.not_built("history export", "a store of runs")


def bisect(_options: BisectOptions, _terminal: Terminal) -> int:
    """Narrow a range of commits to the one that moved a component's difference."""
    raise values.not_built("bisect", "a store of runs")
