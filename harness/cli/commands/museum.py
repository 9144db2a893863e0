"""Command line of `degarble faults`: list plantable faults, and test that each is found."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from degarble.harness.base.errors import EXIT_AGREES, EXIT_DIFFERS, InvalidArgument
from degarble.harness.cli import values
from degarble.harness.cli.command import Group, command
from degarble.harness.cli.spread import asked_processes
from degarble.harness.cli.terminal import Terminal
from degarble.harness.report.verdict import Verdict

_SHOWN = 3  # roles in a line of the list; the JSON has all of them


@dataclass(frozen=True)
class ListOptions:
    """Options of `degarble faults list`."""


@dataclass(frozen=True)
class RunOptions:
    """Options of `degarble faults run`."""

    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ID",
            help="Faults or whole families, each in several places; every fault once, and healthy "
            "runs, where none is given.",
        ),
    ] = None
    whole: Annotated[
        bool,
        typer.Option("--whole", help="Every fault in several places, and 200 healthy runs."),
    ] = False
    lines: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write what was found of each fault as it is known."),
    ] = None


def add(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    faults = typer.Typer(
        help="Plant known faults; see whether they are found and named.", cls=Group
    )
    command(faults, "list", ListOptions, json_word=True)(list_faults)
    command(faults, "run", RunOptions, json_word=True)(run_faults)
    app.add_typer(faults, name="faults")


def list_faults(_options: ListOptions, terminal: Terminal) -> int:
    """List the faults that this version can plant, with their ids and where each can be."""
    from rich.table import Table  # noqa: PLC0415  start-up time

    from degarble.harness.engine.faults.registry import MODEL_FAULTS  # noqa: PLC0415  imports torch
    from degarble.harness.museum.plants import roles_of  # noqa: PLC0415  imports torch

    rows = []
    table = Table(box=None, pad_edge=False)
    table.add_column("id", no_wrap=True)
    table.add_column("what is wrong", ratio=2)
    table.add_column("where", ratio=1)
    for each in MODEL_FAULTS.values():
        roles = roles_of(each)
        more = f", {len(roles) - _SHOWN} more" if len(roles) > _SHOWN else ""
        table.add_row(each.id, each.title, ", ".join(roles[:_SHOWN]) + more)
        rows.append(
            {
                "id": each.id, "family": each.family, "title": each.title, "effect": each.effect,
                "reach": str(each.reach), "remedy": each.remedy, "components": roles,
            }
        )  # fmt: skip
    terminal.say(table)
    terminal.emit({"faults": rows})
    return EXIT_AGREES


def run_faults(options: RunOptions, terminal: Terminal) -> int:
    """Plant faults in the embedded models; exit status 1 when one is missed."""
    from degarble.harness.engine.faults.registry import MODEL_FAULTS  # noqa: PLC0415  imports torch
    from degarble.harness.inference.processes import workers_for  # noqa: PLC0415  imports torch
    from degarble.harness.museum import museum  # noqa: PLC0415  imports torch
    from degarble.harness.museum import museum as museum_text  # noqa: PLC0415  imports torch
    from degarble.harness.museum.museum import lines_to  # noqa: PLC0415  imports torch

    families = {fault.family for fault in MODEL_FAULTS.values()}
    for identity in options.ids or ():
        values.one_of("ID", identity, {*MODEL_FAULTS, *families})
    if options.ids and options.whole:
        raise InvalidArgument(
            "--whole", " ".join(options.ids), "no ID beside it", "Name faults, or run everything."
        )
    extent = museum.WHOLE if options.whole else museum.CHOSEN if options.ids else museum.PUBLISHED
    faults = museum.chosen(options.ids or ())
    count = len(faults) + extent.healthy
    workers = asked_processes() or workers_for(museum.WORKER_BYTES)
    with terminal.progress("museum", count) as told, lines_to(options.lines) as ended:
        made = museum.run_museum(faults, extent, workers, told, None, ended)
    terminal.say(*museum_text.report_lines(made))
    terminal.emit(made.document())
    return EXIT_AGREES if made.verdict is Verdict.AGREES else EXIT_DIFFERS
