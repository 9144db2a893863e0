"""Command line of `degarble demo`: a tour in seconds, on a model that the package contains."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from degarble.harness.base.errors import EXIT_AGREES, EXIT_DIFFERS
from degarble.harness.cli.command import command
from degarble.harness.cli.terminal import Terminal
from degarble.harness.report.files import usable_folder
from degarble.harness.report.number_text import visible

if TYPE_CHECKING:
    from degarble.harness.museum.demo import Demonstration
    from degarble.harness.report.page import Page
    from degarble.harness.report.replay_record import ReplayRecord


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


def add(app: typer.Typer) -> None:
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
    from degarble.reports.page_text import page_text  # noqa: PLC0415

    fault = demo_fault(options.fault)
    folder = usable_folder("--out", options.out)
    with terminal.progress("demo", total=STEPS) as step:
        story = run_demo(fault, step)
    chosen = f" --fault {options.fault}" if options.fault else ""
    page, record = demo_result(story, provenance(f"degarble demo{chosen}"))
    path = write_check_page(folder, page, record)
    terminal.say(page_text(page, width=terminal.width, colour=terminal.colour))
    terminal.say(f"Open the report: {visible(str(path))}")
    terminal.emit(_document(story, page, record, path))
    return EXIT_AGREES if story.holds else EXIT_DIFFERS


def _document(
    story: "Demonstration", page: "Page", record: "ReplayRecord", path: Path
) -> dict[str, object]:
    return {
        "verdict": page.verdict,
        "holds": story.holds,
        "healthy": story.healthy.localised.verdict,
        "planted": {"fault": story.planted.fault.id, "component": story.planted.component},
        "origins": [finding.origin for finding in page.findings],
        "cosines": [
            {"site": each.site, "cosine": each.cosines[0], "budgets": each.ratio}
            for each in record.outputs
        ],
        "texts": {
            "twin": ["".join(each) for each in story.twin_said],
            "healthy": ["".join(each) for each in story.healthy.said],
            "planted": ["".join(each) for each in story.sick.said],
        },
        "report": str(path),
    }
