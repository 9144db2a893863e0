"""Command line of `degarble faults` and `demo`: plant faults and find them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from degarble.harness.base.errors import EXIT_AGREES, EXIT_DIFFERS, InvalidArgument
from degarble.harness.cli import values
from degarble.harness.cli.command import Group, command
from degarble.harness.cli.terminal import Terminal
from degarble.harness.cli.values import Faults, requested_processes
from degarble.harness.report.files import usable_folder
from degarble.harness.report.number_text import visible
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from degarble.harness.engine.adopted.files import AdoptedFault
    from degarble.harness.engine.faults.model_faults import ModelFault
    from degarble.harness.museum.demo import Demonstration
    from degarble.harness.report.page import Page
    from degarble.harness.report.replay_record import ReplayRecord


# --------------------------------------------------------------------------------------------------
# Command line of `degarble faults`: list plantable faults, and test that each is found.

_ADOPTED = "adopted-faults"  # the folder in which faults are written
_SHOWN = 3  # roles in a line of the list; the JSON has all of them


@dataclass(frozen=True)
class FaultListOptions:
    """Options of `degarble faults list`."""

    pattern: Annotated[
        str | None,
        typer.Argument(
            metavar="PATTERN",
            help="A part of an id, a title or a component, or a pattern such as M1*.scale.",
            show_default="all of them",
        ),
    ] = None
    faults: Faults = None


@dataclass(frozen=True)
class FaultShowOptions:
    """Options of `degarble faults show`."""

    id: Annotated[str, typer.Argument(metavar="ID", help="A fault of the list.")]
    faults: Faults = None


@dataclass(frozen=True)
class AdoptOptions:
    """Options of `degarble faults adopt`."""

    verdict: Annotated[
        Path,
        typer.Argument(
            metavar="VERDICT", help="JSON of a verdict, or the folder of a check's report."
        ),
    ]
    finding: Annotated[
        int | None,
        typer.Option(metavar="K", help="Which finding, from 1.", show_default="the described one"),
    ] = None
    id: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Its id.", show_default="from component and change"),
    ] = None
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where the fault is written.",
            show_default="DEGARBLE_FAULTS, else adopted-faults",
        ),
    ] = None  # fmt: skip
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be written; write nothing.")
    ] = False


@dataclass(frozen=True)
class FaultRunOptions:
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
        typer.Option(metavar="FILE", help="Write the result of each fault as soon as it is known."),
    ] = None
    faults: Faults = None


def add_faults(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    faults = typer.Typer(help="Plant known faults; check that they are found and named.", cls=Group)
    command(faults, "list", FaultListOptions, json_word=True)(list_faults)
    command(faults, "show", FaultShowOptions, json_word=True)(show_fault)
    command(faults, "adopt", AdoptOptions, json_word=True)(adopt)
    command(faults, "run", FaultRunOptions, json_word=True)(run_faults)
    app.add_typer(faults, name="faults")


def list_faults(options: FaultListOptions, terminal: Terminal) -> int:
    """List the faults that this version can plant, with their ids and where each can be."""
    from rich.table import Table  # noqa: PLC0415  start-up time

    from degarble.harness.engine.adopted.files import searching  # noqa: PLC0415  imports torch

    with searching(values.faults_folder(options.faults)) as adopted:
        rows = [_fault_row(fault, adopted) for fault in _plantable().values()]
    if options.pattern is not None:
        rows = _matching(rows, options.pattern)
    table = Table(box=None, pad_edge=False)
    table.add_column("id", no_wrap=True)
    table.add_column("what is wrong", ratio=2)
    table.add_column("where", ratio=1)
    for row in rows:
        roles = row["components"]
        more = f", {len(roles) - _SHOWN} more" if len(roles) > _SHOWN else ""
        table.add_row(row["id"], row["title"], ", ".join(roles[:_SHOWN]) + more)
    terminal.say(table)
    terminal.emit({"faults": rows})
    return EXIT_AGREES


def _matching(rows: Sequence[dict[str, Any]], pattern: str) -> list[dict[str, Any]]:
    """Return the faults that have `pattern` in their id, title or a component."""
    wanted = pattern.casefold()
    found = [
        row
        for row in rows
        if any(
            wanted in text.casefold() or fnmatchcase(text.casefold(), wanted)
            for text in (row["id"], row["title"], *row["components"])
        )
    ]
    if not found:
        raise InvalidArgument(
            "PATTERN", pattern, "a part of a fault's id, title or component",
            "degarble faults list names all of them.",
        )  # fmt: skip
    return found


def _plantable() -> Mapping[str, "ModelFault"]:
    from degarble.harness.engine.faults.registry import plantable_faults  # noqa: PLC0415  above

    return plantable_faults()


def _fault_row(fault: "ModelFault", adopted: Sequence["AdoptedFault"]) -> dict[str, Any]:
    """Return a fault as data, with its origin where it was adopted."""
    from degarble.harness.museum.plants import roles_of  # noqa: PLC0415  imports torch

    own = next((each for each in adopted if each.id == fault.id), None)
    roles = [f"{own.kind} (any)"] if own is not None and own.kind else roles_of(fault)
    found = {
        "id": fault.id,
        "family": fault.family,
        "title": fault.title,
        "effect": fault.effect,
        "reach": str(fault.reach),
        "remedy": fault.remedy,
        "components": roles,
    }
    return found if own is None else {**found, "origin": dict(own.origin)}


def show_fault(options: FaultShowOptions, terminal: Terminal) -> int:
    """Show one fault: what is wrong, where it can be, what to do; of an adopted one its origin."""
    from degarble.harness.commands.adopt import page_of  # noqa: PLC0415  imports torch
    from degarble.harness.engine.adopted.files import searching  # noqa: PLC0415  as above

    with searching(values.faults_folder(options.faults)) as adopted:
        known = _plantable()
        values.one_of("ID", options.id, known)
        row = _fault_row(known[options.id], adopted)
    own = next((each for each in adopted if each.id == options.id), None)
    if own is not None:
        terminal.say(visible(page_of(own)))
        terminal.emit({"fault": own.document()})
        return EXIT_AGREES
    terminal.say(
        f"{row['id']}: {row['title']}", f"  effect  {row['effect']}",
        f"  where   {', '.join(row['components'])}", f"  remedy  {row['remedy']}",
    )  # fmt: skip
    terminal.emit({"fault": row})
    return EXIT_AGREES


def adopt(options: AdoptOptions, terminal: Terminal) -> int:
    """Save what a verdict describes as a fault: its data, its museum case and its page."""
    values.existing("VERDICT", options.verdict)
    values.within("--finding", options.finding, 1, float("inf"))
    from degarble.harness.commands.adopt import adopted_from  # noqa: PLC0415  imports torch

    folder = options.to or values.faults_folder(None) or Path(_ADOPTED)
    made = adopted_from(options.verdict, folder, options.finding, options.id)
    if not options.dry_run:
        made.write()
    word = "Would write" if options.dry_run else "Wrote"
    terminal.say(
        f"{made.fault.id}: {visible(made.fault.title)}.",
        f"{word} {made.data} and {made.page}.",
        f"Search it: degarble check CAPTURE --reference CKPT --faults {folder}",
    )
    terminal.emit({"fault": made.fault.document(), "files": [str(made.data), str(made.page)],
                   "written": not options.dry_run})  # fmt: skip
    return EXIT_AGREES


def run_faults(options: FaultRunOptions, terminal: Terminal) -> int:
    """Plant faults in the embedded models; exit status 1 when one is missed."""
    from degarble.harness.engine.adopted.files import searching  # noqa: PLC0415  imports torch
    from degarble.harness.inference.processes import workers_for  # noqa: PLC0415  imports torch
    from degarble.harness.museum import museum  # noqa: PLC0415  imports torch
    from degarble.harness.museum import museum as museum_text  # noqa: PLC0415  imports torch
    from degarble.harness.museum.museum import lines_to  # noqa: PLC0415  imports torch

    folder = values.faults_folder(options.faults)
    with searching(folder):
        known = _plantable()
        families = {fault.family for fault in known.values()}
        for identity in options.ids or ():
            values.one_of("ID", identity, {*known, *families})
        faults = museum.chosen(options.ids or ())
    if options.ids and options.whole:
        raise InvalidArgument(
            "--whole", " ".join(options.ids), "no ID with it", "Name faults, or run everything."
        )
    extent = museum.WHOLE if options.whole else museum.CHOSEN if options.ids else museum.PUBLISHED
    extent = replace(extent, adopted=folder)
    count = len(faults) + extent.healthy
    workers = requested_processes() or workers_for(museum.WORKER_BYTES)
    with terminal.progress("museum", count) as report, lines_to(options.lines) as ended:
        made = museum.run_museum(faults, extent, workers, report, None, ended)
    terminal.say(*museum_text.report_lines(made))
    terminal.emit(made.document())
    return EXIT_AGREES if made.verdict is Verdict.AGREES else EXIT_DIFFERS


# --------------------------------------------------------------------------------------------------
# Command line of `degarble demo`: a tour in seconds, on a model that the package contains.


@dataclass(frozen=True)
class DemoOptions:
    """Options of `degarble demo`."""

    fault: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Plant this fault; degarble faults list shows them.",
            show_default="M10.nibble_order in one expert",
        ),
    ] = None
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the report page is written.")] = (
        Path("degarble-demo")
    )


STEPS = 4  # that the story tells of


def add_demo(app: typer.Typer) -> None:
    """Add the command to `app`."""
    command(app, "demo", DemoOptions)(demo)


def demo(options: DemoOptions, terminal: Terminal) -> int:
    """Run a small model, plant a fault in it, find and name it, write a report to open.

    Exit status 0 when the healthy run agrees and the planted fault is named, 1 if not.
    """
    # Imports torch, which --help and --version do without.
    from degarble.harness.commands.check.report import write_check_page  # noqa: PLC0415
    from degarble.harness.museum.demo import (  # noqa: PLC0415
        demo_fault,
        demo_result,
        run_demo,
    )
    from degarble.harness.report.page import provenance  # noqa: PLC0415
    from degarble.reports.page_text import page_text, verdict_line  # noqa: PLC0415

    fault = demo_fault(options.fault)
    folder = usable_folder("--out", options.out)
    with terminal.progress("demo", total=STEPS) as step:
        demonstration = run_demo(fault, step)
    chosen = f" --fault {options.fault}" if options.fault else ""
    page, record = demo_result(demonstration, provenance(f"degarble demo{chosen}"))
    path = write_check_page(folder, page, record)
    terminal.say(page_text(page, width=terminal.width, colour=terminal.colour))
    terminal.say(f"Open the report: {visible(str(path))}")
    if demonstration.proves:
        sentence = "The healthy run agrees, and the planted fault is found: that page shows it."
        terminal.say(verdict_line(page.verdict, sentence, page.word))
    terminal.emit(_document(demonstration, page, record, path))
    return EXIT_AGREES if demonstration.holds else EXIT_DIFFERS


def _document(
    demonstration: "Demonstration", page: "Page", record: "ReplayRecord", path: Path
) -> dict[str, object]:
    return {
        "verdict": demonstration.sick.localised.verdict,
        "headline": page.word or page.verdict,
        "holds": demonstration.holds,
        "healthy": demonstration.healthy.localised.verdict,
        "planted": {
            "fault": demonstration.planted.fault.id,
            "component": demonstration.planted.component,
        },
        "origins": [finding.origin for finding in page.findings],
        "cosines": [
            {"site": output.site, "cosine": output.cosines[0], "budgets": output.ratio}
            for output in record.outputs
        ],
        "texts": {
            "twin": ["".join(each) for each in demonstration.twin_answers],
            "healthy": ["".join(each) for each in demonstration.healthy.answers],
            "planted": ["".join(each) for each in demonstration.sick.answers],
        },
        "report": str(path),
    }
