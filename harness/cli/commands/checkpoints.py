"""`degarble audit`, `quantise` and `convert`: what happens to checkpoint files."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from degarble.harness.anatomy.recipes import RECIPE_NAMES
from degarble.harness.cli import values
from degarble.harness.cli.command import command
from degarble.harness.cli.options import CheckpointPath, JsonFile, ReportFolder
from degarble.harness.cli.spread import spread
from degarble.harness.cli.terminal import Terminal
from degarble.harness.errors import EXIT_AGREES
from degarble.harness.record.files import usable_folder

SCALE_RULES = ("amax", "mse", "four-over-six")
TARGETS = (
    "bf16",
    "fp8-block",
    "nvfp4",
    "nvfp4-lossless",
    "deepgemm-wo-a",
    "fused-compressor",
    "vllm",
)
LOADER_MAPS = ("vllm",)

Source = Annotated[Path, typer.Argument(metavar="SRC", help="Checkpoint to read.")]
Destination = Annotated[
    Path, typer.Argument(metavar="DST", help="Directory to write; must be new.")
]


@dataclass(frozen=True)
class AuditOptions:
    """Options of `degarble audit`."""

    checkpoint: CheckpointPath
    against: Annotated[
        Path | None,
        typer.Option(metavar="CKPT", help="Compare tensor by tensor with this checkpoint."),
    ] = None
    loader: Annotated[
        str | None,
        typer.Option(
            metavar="MAP",
            help="Prove which bytes reach which parameter, by a name map: vllm or a YAML file.",
        ),
    ] = None
    report: ReportFolder = None
    json: JsonFile = None


@dataclass(frozen=True)
class QuantiseOptions:
    """Options of `degarble quantise`."""

    source: Source
    destination: Destination
    recipe: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE.yaml",
            help=f"What is quantised, and how: {', '.join(RECIPE_NAMES)}, or a YAML file.",
        ),
    ]
    scale_rule: Annotated[
        str, typer.Option(metavar="|".join(SCALE_RULES), help="How block scales are chosen.")
    ] = "amax"
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="CAPTURE", help="Take input scales from the amax records of a run."),
    ] = None


@dataclass(frozen=True)
class ConvertOptions:
    """Options of `degarble convert`."""

    source: Source
    destination: Destination
    to: Annotated[str, typer.Option("--to", metavar="FORM", help=f"One of {', '.join(TARGETS)}.")]
    prove: Annotated[
        bool, typer.Option("--prove", help="Read the output again and compare its values.")
    ] = False


def add(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    command(app, "audit", AuditOptions, spreads=True)(audit)
    command(app, "quantise", QuantiseOptions, spreads=True)(quantise)
    command(app, "convert", ConvertOptions, spreads=True)(convert)


def audit(options: AuditOptions, terminal: Terminal) -> int:
    """Read the files of a checkpoint and say what is wrong with them, before a kernel runs.

    This version judges the structure: files, names, shapes, dtypes, partners, and what the
    quantisation config promises. Exit status 1 with any finding of level error.
    """
    values.existing("CKPT", options.checkpoint)
    values.existing("--against", options.against)
    if options.loader is not None:
        values.named_or_file("--loader", options.loader, LOADER_MAPS, (".yaml", ".yml", ".json"))
    for name, given in (("--against", options.against), ("--loader", options.loader)):
        if given is not None:
            raise values.not_built(f"audit {name}", "judging values and loaders")
    if terminal.cluster is not None:
        raise values.not_built("audit --cluster", "spreading an audit")
    # Imports torch, which --help and --version do without.
    from degarble.harness.runs.audit import audit as look  # noqa: PLC0415
    from degarble.harness.runs.audit_page import audit_page  # noqa: PLC0415
    from degarble.harness.runs.machine import provenance  # noqa: PLC0415
    from degarble.harness.runs.report_folder import write_page  # noqa: PLC0415
    from degarble.reports.page_text import page_text  # noqa: PLC0415

    folder = None if options.report is None else usable_folder("--report", options.report)
    with terminal.progress("audit", total=1) as step:
        step("reading headers")
        found = look(options.checkpoint)
    page = audit_page(found, provenance(f"degarble audit {found.name}"))
    terminal.say(page_text(page, width=terminal.width, colour=terminal.colour))
    document = found.document()
    if folder is not None:
        path = write_page(folder, page)
        terminal.say(f"Open the report: {path}")
        document["report"] = str(path)
    terminal.emit(document)
    return found.verdict.exit_status


def quantise(options: QuantiseOptions, terminal: Terminal) -> int:
    """Quantise a checkpoint by a recipe, streaming, never half-written.

    The same command again finishes what was interrupted. Nothing is judged: audit does that.
    """
    values.existing("SRC", options.source)
    values.named_or_file("--recipe", options.recipe, RECIPE_NAMES, (".yaml", ".yml"))
    values.one_of("--scale-rule", options.scale_rule, SCALE_RULES)
    values.existing("--calibration", options.calibration)
    # Imports torch, which --help and --version do without.
    from degarble.harness.runs import quantise as run  # noqa: PLC0415

    job = run.job_from(options.source, options.recipe, options.scale_rule, options.calibration)
    with spread(terminal) as workers:
        done = run.quantise(job, options.destination, workers, partial(terminal.work, "quantise"))
    terminal.say(*done.lines())
    terminal.emit(done.document())
    return EXIT_AGREES


def convert(options: ConvertOptions, terminal: Terminal) -> int:
    """Bring a checkpoint into the form that a consumer reads; --prove compares the values.

    Exit status 1 where --prove finds a difference; the output stays, to be looked at.
    """
    values.existing("SRC", options.source)
    values.one_of("--to", options.to, TARGETS)
    # Imports torch, which --help and --version do without.
    from degarble.harness.checkpoint.convert.job import job_for  # noqa: PLC0415
    from degarble.harness.runs.convert import convert as run  # noqa: PLC0415

    job = job_for(options.source, options.to)
    listen = partial(terminal.work, "convert")
    with job.checkpoint, spread(terminal) as workers:
        done = run(job, options.destination, workers, listen, proving=options.prove)
    terminal.say(*done.lines())
    terminal.emit(done.document())
    return done.exit_status
