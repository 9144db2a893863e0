"""`degarble demo`: the whole story in a few seconds, on data that it makes itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from degarble.harness.cli.command import command
from degarble.harness.cli.terminal import Terminal
from degarble.harness.errors import EXIT_AGREES, EXIT_DIFFERS
from degarble.harness.record.files import usable_folder
from degarble.harness.record.wording import visible

if TYPE_CHECKING:
    from degarble.harness.record.page import Page
    from degarble.harness.runs.demo import Story


@dataclass(frozen=True)
class DemoOptions:
    """Options of `degarble demo`."""

    fault: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Plant this fault only; degarble faults list shows them.",
            show_default="three of them",
        ),
    ] = None
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the report page is written.")] = (
        Path("degarble-demo")
    )


def add(app: typer.Typer) -> None:
    """Add the command to `app`."""
    command(app, "demo", DemoOptions)(demo)


def demo(options: DemoOptions, terminal: Terminal) -> int:
    """Quantise a weight, plant faults in it, name them, write a report to open.

    Exit status 0 when the healthy copy is clean and every planted fault is named, 1 if not.
    """
    # Imports torch, which --help and --version do without.
    from degarble.harness.runs.demo import demo_faults, tell_story  # noqa: PLC0415
    from degarble.harness.runs.demo_page import demo_page  # noqa: PLC0415
    from degarble.harness.runs.machine import provenance  # noqa: PLC0415
    from degarble.harness.runs.report_folder import write_page  # noqa: PLC0415
    from degarble.reports.page_text import page_text  # noqa: PLC0415

    faults = demo_faults(options.fault)
    folder = usable_folder("--out", options.out)
    with terminal.progress("demo", total=1 + len(faults)) as step:
        story = tell_story(faults, step)
    chosen = f" --fault {options.fault}" if options.fault else ""
    page = demo_page(story, provenance(f"degarble demo{chosen}"))
    path = write_page(folder, page)
    terminal.say(page_text(page, width=terminal.width, colour=terminal.colour))
    terminal.say(f"Open the report: {visible(str(path))}")
    terminal.emit(_document(story, page, path))
    return EXIT_AGREES if story.holds else EXIT_DIFFERS


def _document(story: "Story", page: "Page", path: Path) -> dict[str, object]:
    return {
        "verdict": page.verdict,
        "holds": story.holds,
        "healthy": story.healthy.diagnosis.verdict,
        "origins": [finding.origin for finding in page.findings],
        "cosines": [
            {"copy": copy.name, "cosine": copy.diagnosis.found.cosine} for copy in story.copies
        ],
        "report": str(path),
    }
