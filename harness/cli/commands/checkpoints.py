"""Command line of `degarble audit`, `quantise` and `convert`: check or rewrite a checkpoint."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from degarble.harness.base.errors import EXIT_AGREES, InvalidArgument
from degarble.harness.cli import values
from degarble.harness.cli.command import command
from degarble.harness.cli.terminal import Terminal
from degarble.harness.cli.values import CheckpointPath, ReportFolder, spread
from degarble.harness.model.types import RECIPE_NAMES
from degarble.harness.report.files import require_folder

# --------------------------------------------------------------------------------------------------
# Command line of `degarble audit`: check the files of a checkpoint before any kernel runs.

ONLY = ("structure",)
LOADER_MAPS = ("vllm", "transformers")
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
            help="Prove which bytes reach which parameter: vllm, vllm:tp=8,ep=8, transformers,"
            " or a YAML file.",
        ),
    ] = None
    vllm_source: Annotated[
        Path | None,
        typer.Option(
            "--vllm-source",
            metavar="DIR",
            help="Folder with vLLM's Python source, which --loader vllm reads and never runs;"
            " the installed vLLM if left out.",
        ),
    ] = None
    only: Annotated[
        str | None,
        typer.Option(
            metavar="structure",
            help="Read heads and scalar scales alone: seconds, whatever the size.",
        ),
    ] = None
    content_hash: Annotated[
        bool,
        typer.Option(
            "--content-hash",
            help="Hash every weight too; the hash that is always shown is of names and shapes.",
        ),
    ] = False
    report: ReportFolder = None


def add_audit(app: typer.Typer) -> None:
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
        options.checkpoint, options.only is None, options.loader, options.against,
        options.vllm_source, options.content_hash,
    )  # fmt: skip
    with spread(terminal) as workers:
        found = run.audit(wanted, workers, partial(terminal.work, "audit"))
    text = _command(options, found.subject.name)
    terminal.say(audit_text(found, width=terminal.width, colour=terminal.colour))
    document = audit_document(found, text)
    if options.report is not None:
        path = write_page(options.report, audit_page(found, provenance(text)))
        terminal.say(f"Open the report: {path}")
        document["report"] = str(path)
    terminal.emit(document)
    return found.verdict.exit_status


def _check(options: AuditOptions, terminal: Terminal) -> None:
    """Refuse what is wrong before the long walk over the bytes."""
    values.existing("CKPT", options.checkpoint)
    values.existing("--against", options.against)
    values.existing("--vllm-source", options.vllm_source)
    if options.vllm_source is not None and options.loader is None:
        raise InvalidArgument(
            "--vllm-source", str(options.vllm_source), "--loader vllm beside it",
            "Add --loader vllm.",
        )  # fmt: skip
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
    if options.vllm_source is not None:
        parts += ["--vllm-source", options.vllm_source.resolve().name]
    if options.only is not None:
        parts += ["--only", options.only]
    parts += ["--content-hash"] if options.content_hash else []
    return " ".join(parts)


# --------------------------------------------------------------------------------------------------
# Command line of `degarble quantise` and `degarble convert`: rewrite a checkpoint.

SCALE_CHOICES = ("exact", "nearest")
SCALE_RULES = ("amax", "mse", "four-over-six")
TARGETS = (
    "bf16",
    "fp8-block",
    "nvfp4",
    "nvfp4-lossless",
    "awq",
    "gptq",
    "pack-quantized",
    "compressed-tensors",
    "modelopt",
    "finegrained-fp8",
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
    tensor_scales: Annotated[
        str,
        typer.Option(
            metavar="|".join(SCALE_CHOICES),
            help="NVFP4 to compressed-tensors: refuse scales without an exact divisor, or take the"
            " nearest.",
        ),
    ] = "exact"


def add_rewriting(app: typer.Typer) -> None:
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
    from degarble.harness.commands import transform as run  # noqa: PLC0415

    listen = partial(terminal.work, "quantise")
    with _calibration_to_paste(options):
        job = run.job_from(options.source, options.recipe, options.scale_rule, options.calibration)
        with job, spread(terminal) as workers:
            done = run.quantise(job, options.destination, workers, listen)
    terminal.say(*done.lines())
    terminal.emit(done.document())
    return EXIT_AGREES


@contextmanager
def _calibration_to_paste(options: QuantiseOptions) -> Iterator[None]:
    """Let a refusal for want of a calibration end with the two commands that make and use one."""
    try:
        yield
    except InvalidArgument as error:
        if error.name == "calibration" and options.calibration is None:
            source, ranges = quoted(options.source), quoted(f"{options.destination}-ranges")
            same = f"{source} {quoted(options.destination)} --recipe {quoted(options.recipe)}"
            same += "" if options.scale_rule == "amax" else f" --scale-rule {options.scale_rule}"
            error.remedy = (
                "Record the ranges of its inputs on texts of your own, one a line, or quantise its "
                "weights alone (docs/calibration.md). "
                f"degarble capture {source} --amax-only --prompts PROMPTS.txt --out {ranges} && "
                f"degarble quantise {same} --calibration {ranges}"
            )
        raise


def quoted(word: Path | str) -> str:
    """Write a word as a shell takes it."""
    return shlex.quote(str(word))


def convert(options: ConvertOptions, terminal: Terminal) -> int:
    """Bring a checkpoint into the form that a consumer reads; --prove compares the values.

    Exit status 1 where --prove finds a difference; the output is kept for inspection.
    """
    values.existing("SRC", options.source)
    values.one_of("--to", options.to, TARGETS)
    values.one_of("--tensor-scales", options.tensor_scales, SCALE_CHOICES)
    # Imports torch, which --help and --version do without.
    from degarble.harness.checkpoint.transform.convert.job import job_for  # noqa: PLC0415
    from degarble.harness.commands import transform as run  # noqa: PLC0415

    # Passed on where it says something, so that other conversions refuse it by name.
    given = {} if options.tensor_scales == "exact" else {"tensor_scales": options.tensor_scales}
    job = job_for(options.source, options.to, given)
    listen = partial(terminal.work, "convert")
    with job, spread(terminal) as workers:
        done = run.convert(job, options.destination, workers, listen, proving=options.prove)
    terminal.say(*done.lines())
    terminal.emit(done.document())
    return done.exit_status
