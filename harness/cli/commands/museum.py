"""`degarble faults`: the faults that can be planted, and whether each is still found."""

from dataclasses import dataclass
from typing import Annotated

import typer

from degarble.harness.cli import values
from degarble.harness.cli.command import Group, command
from degarble.harness.cli.options import JsonFile
from degarble.harness.cli.terminal import Terminal
from degarble.harness.errors import EXIT_AGREES


@dataclass(frozen=True)
class ListOptions:
    """Options of `degarble faults list`."""

    json: JsonFile = None


@dataclass(frozen=True)
class RunOptions:
    """Options of `degarble faults run`."""

    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID", help="Faults or whole families; all where none is given."),
    ] = None
    json: JsonFile = None


def add(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    faults = typer.Typer(
        help="Plant known faults; see whether they are found and named.", cls=Group
    )
    command(faults, "list", ListOptions)(list_faults)
    command(faults, "run", RunOptions)(run_faults)
    app.add_typer(faults, name="faults")


def list_faults(_options: ListOptions, terminal: Terminal) -> int:
    """List the faults that this version can plant, with their ids."""
    from rich.table import Table  # noqa: PLC0415  start-up time

    from degarble.harness.engine.faults.registry import FAULTS  # noqa: PLC0415  imports torch

    rows = [{"id": f.id, "title": f.title, "effect": f.effect} for f in FAULTS.values()]
    table = Table("id", "what is wrong", "what it does", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row.values())
    terminal.say(table)
    terminal.emit({"faults": rows})
    return EXIT_AGREES


def run_faults(options: RunOptions, _terminal: Terminal) -> int:
    """Plant each fault in the embedded model; exit status 1 when one is not found."""
    from degarble.harness.engine.faults.registry import FAULTS  # noqa: PLC0415  imports torch

    families = {fault.family for fault in FAULTS.values()}
    for identity in options.ids or ():
        values.one_of("ID", identity, {*FAULTS, *families})
    raise values.not_built("faults run", "the embedded model")
