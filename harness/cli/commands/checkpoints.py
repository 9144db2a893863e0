"""Command line of `degarble quantise` and `degarble convert`: rewrite a checkpoint."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from degarble.harness.base.errors import EXIT_AGREES
from degarble.harness.cli import values
from degarble.harness.cli.command import command
from degarble.harness.cli.spread import spread
from degarble.harness.cli.terminal import Terminal
from degarble.harness.model.recipes import RECIPE_NAMES

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

Source = Annotated[Path, typer.Argument(metavar="SRC", help="Checkpoint to read.")]
Destination = Annotated[
    Path, typer.Argument(metavar="DST", help="Directory to write; must be new.")
]


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
        bool, typer.Option("--prove", help="Read the output again; compare values and names.")
    ] = False


def add(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    command(app, "quantise", QuantiseOptions, spreads=True)(quantise)
    command(app, "convert", ConvertOptions, spreads=True)(convert)


def quantise(options: QuantiseOptions, terminal: Terminal) -> int:
    """Quantise a checkpoint by a recipe, streaming, never half-written.

    The same command again finishes what was interrupted. Nothing is judged: audit does that.
    """
    values.existing("SRC", options.source)
    values.named_or_file("--recipe", options.recipe, RECIPE_NAMES, (".yaml", ".yml"))
    values.one_of("--scale-rule", options.scale_rule, SCALE_RULES)
    values.existing("--calibration", options.calibration)
    # Imports torch, which --help and --version do without.
    from degarble.harness.commands import quantise as run  # noqa: PLC0415

    job = run.job_from(options.source, options.recipe, options.scale_rule, options.calibration)
    with job, spread(terminal) as workers:
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
    from degarble.harness.checkpoint.transform.convert.job import job_for  # noqa: PLC0415
    from degarble.harness.commands.convert import convert as run  # noqa: PLC0415

    job = job_for(options.source, options.to)
    listen = partial(terminal.work, "convert")
    with job, spread(terminal) as workers:
        done = run(job, options.destination, workers, listen, proving=options.prove)
    terminal.say(*done.lines())
    terminal.emit(done.document())
    return done.exit_status
