"""Command line of `degarble audit`: check the files of a checkpoint before any kernel runs."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.cli import values
from degarble.harness.cli.command import command
from degarble.harness.cli.options import CheckpointPath, ReportFolder
from degarble.harness.cli.spread import spread
from degarble.harness.cli.terminal import Terminal
from degarble.harness.report.files import require_folder

ONLY = ("structure",)
LOADER_MAPS = ("vllm",)
SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class AuditOptions:
    """Options of `degarble audit`."""

    checkpoint: CheckpointPath
    against: Annotated[
        Path | None,
        typer.Option(metavar="CKPT", help="Compare weight by weight with this checkpoint."),
    ] = None
    loader: Annotated[
        str | None,
        typer.Option(
            metavar="MAP",
            help="Prove which bytes reach which parameter: vllm, vllm:tp=8,ep=8, or a YAML file.",
        ),
    ] = None
    only: Annotated[
        str | None,
        typer.Option(
            metavar="structure",
            help="Read heads and scalar scales alone: seconds, whatever the size.",
        ),
    ] = None
    report: ReportFolder = None


def add(app: typer.Typer) -> None:
    """Add the command to `app`."""
    command(app, "audit", AuditOptions, spreads=True, json_word=True)(audit)


def audit(options: AuditOptions, terminal: Terminal) -> int:
    """Judge the files of a checkpoint and say what is wrong, before a kernel runs.

    Structure and numbers always; --against and --loader add a comparison and a proof of loading.
    Exit status 1 with any finding of level error.
    """
    _check(options, terminal)
    # Imports torch, which --help and --version do without.
    from degarble.harness.commands.audit import audit as run  # noqa: PLC0415
    from degarble.harness.commands.audit.document import audit_document  # noqa: PLC0415
    from degarble.harness.commands.audit.page import audit_page  # noqa: PLC0415
    from degarble.harness.commands.audit.text import audit_text  # noqa: PLC0415
    from degarble.harness.commands.report_folder import write_page  # noqa: PLC0415
    from degarble.harness.report.page import provenance  # noqa: PLC0415

    wanted = run.AuditRequest(
        options.checkpoint, options.only is None, options.loader, options.against
    )
    with spread(terminal) as workers:
        found = run.audit(wanted, workers, partial(terminal.work, "audit"))
    told = _command(options, found.subject.name)
    terminal.say(audit_text(found, width=terminal.width, colour=terminal.colour))
    document = audit_document(found, told)
    if options.report is not None:
        path = write_page(options.report, audit_page(found, provenance(told)))
        terminal.say(f"Open the report: {path}")
        document["report"] = str(path)
    terminal.emit(document)
    return found.verdict.exit_status


def _check(options: AuditOptions, terminal: Terminal) -> None:
    """Refuse what is wrong before the long walk over the bytes."""
    values.existing("CKPT", options.checkpoint)
    values.existing("--against", options.against)
    values.one_of("--only", options.only, ONLY)
    if options.loader is not None:
        name = options.loader.partition(":")[0] or options.loader
        known = name in LOADER_MAPS
        values.named_or_file("--loader", name if known else options.loader, LOADER_MAPS, SUFFIXES)
    if options.against is not None and options.only is not None:
        raise InvalidArgument(
            "--only and --against",
            options.only,
            "one of them: a comparison reads every number",
            "Leave one of them out.",
        )
    if options.only is not None and terminal.cluster is not None:
        raise InvalidArgument(
            "--only and --cluster",
            options.only,
            "one of them: the structure is read in seconds, on one machine",
            "Leave one of them out.",
        )
    if options.report is not None:
        require_folder("--report", options.report)


def _command(options: AuditOptions, name: str) -> str:
    """Give the command line that makes this result again, without anybody's paths."""
    parts = ["degarble audit", name]
    if options.against is not None:
        parts += ["--against", options.against.resolve().name]
    if options.loader is not None:
        parts += ["--loader", Path(options.loader).name]
    if options.only is not None:
        parts += ["--only", options.only]
    return " ".join(parts)
