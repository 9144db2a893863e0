"""`degarble capture`, `check` and `compare`: record a run, judge it, set two beside each other."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from degarble.harness.cli import values
from degarble.harness.cli.command import NOT_BUILT, command
from degarble.harness.cli.options import (
    Backend,
    CapturePath,
    CheckpointPath,
    JsonFile,
    Prompt,
    Prompts,
    ReportFolder,
)
from degarble.harness.cli.terminal import Terminal
from degarble.harness.errors import EXIT_AGREES
from degarble.harness.record.progress import size

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class CaptureOptions:
    """Options of `degarble capture`."""

    checkpoint: CheckpointPath
    out: Annotated[Path, typer.Option(metavar="CAPTURE", help="Where the capture is written.")]
    backend: Backend = "torch"
    prompt: Prompt = None
    prompts: Prompts = None
    max_new_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="New tokens: one from the prompt, the rest by decoding."),
    ] = None
    layers: Annotated[str | None, typer.Option(metavar="LIST", help="Only these: 0-3,17,ends.")] = (
        None
    )
    components: Annotated[
        str | None, typer.Option(metavar="LIST", help="Only these: attn.*,ffn.gate.")
    ] = None
    tokens: Annotated[
        str | None, typer.Option(metavar="LIST", help="Only these positions: 0-15,100.")
    ] = None
    statistics_only: Annotated[
        bool, typer.Option("--statistics-only", help="Keep hashes and ranges, no tensors.")
    ] = False
    amax_only: Annotated[
        bool, typer.Option("--amax-only", help="Keep only the ranges that calibration needs.")
    ] = False
    patch: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.py", help="Python file with patch(candidate). It is executed: trust it."
        ),
    ] = None


@dataclass(frozen=True)
class CheckOptions:
    """Options of `degarble check`."""

    capture: CapturePath
    reference: Annotated[
        Path, typer.Option(metavar="CKPT", help="BF16 or official checkpoint: judges quality.")
    ]
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="CKPT",
            help="Quantised checkpoint of the twin: judges correctness.",
            show_default="the one that the capture names",
        ),
    ] = None
    backend: Backend = "torch"
    device: Annotated[
        str, typer.Option(metavar="|".join(DEVICES), help="Where the twin is computed.")
    ] = "cpu"
    report: ReportFolder = None
    json: JsonFile = None


@dataclass(frozen=True)
class CompareOptions:
    """Options of `degarble compare`."""

    first: CapturePath
    second: CapturePath
    report: ReportFolder = None
    json: JsonFile = None


def add(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    command(app, "capture", CaptureOptions)(capture)
    command(app, "check", CheckOptions, panel=NOT_BUILT)(check)
    command(app, "compare", CompareOptions, panel=NOT_BUILT)(compare)


def capture(options: CaptureOptions, terminal: Terminal) -> int:
    """Run a model and record what goes into and comes out of every component.

    With --amax-only it records the ranges that `quantise --calibration` reads, and nothing else.
    """
    values.existing("CKPT", options.checkpoint)
    values.backend("--backend", options.backend)
    values.at_most_one(prompt=options.prompt, prompts=options.prompts)
    values.existing("--prompts", options.prompts)
    values.existing("--patch", options.patch)
    values.within("--max-new-tokens", options.max_new_tokens, 1, float("inf"))
    for name in ("layers", "components", "tokens", "statistics_only", "max_new_tokens"):
        values.at_most_one(amax_only=options.amax_only, **{name: getattr(options, name)})
    foreign = options.backend if options.backend != "torch" else None
    values.at_most_one(amax_only=options.amax_only, patch=options.patch)
    values.at_most_one(amax_only=options.amax_only, backend=foreign)
    values.exactly_one(prompt=options.prompt, prompts=options.prompts)
    # Imports torch, which --help and --version do without.
    from degarble.harness.runs.generate import prompts_from  # noqa: PLC0415

    prompts = [options.prompt] if options.prompts is None else prompts_from(options.prompts)
    record = _ranges if options.amax_only else _tensors
    done = record(options, prompts, terminal)
    terminal.say(*done.lines())
    terminal.emit(done.document())
    return EXIT_AGREES


def _ranges(options: CaptureOptions, prompts: list[Any], terminal: Terminal) -> Any:
    from degarble.harness.cli.first_pass import first_pass  # noqa: PLC0415  imports torch
    from degarble.harness.runs.capture_amax import capture_amax  # noqa: PLC0415  as above

    return capture_amax(options.checkpoint, prompts, options.out, partial(first_pass, terminal))


def _tensors(options: CaptureOptions, prompts: list[Any], terminal: Terminal) -> Any:
    from degarble.harness.cli.first_pass import first_pass  # noqa: PLC0415  imports torch
    from degarble.harness.runs import capture as run  # noqa: PLC0415  as above
    from degarble.harness.runs.capture_filter import Wanted  # noqa: PLC0415  as above

    how = run.How(
        Wanted.of(options.layers, options.components, options.tokens),
        options.max_new_tokens or run.NEW_TOKENS,
        statistics_only=options.statistics_only,
        backend=options.backend,
        patch=options.patch,
    )

    def told(nbytes: int) -> None:
        if nbytes and not (terminal.json_wanted or terminal.quiet):
            terminal.err().print(f"About {size(nbytes)} will be written.", markup=False)

    watch = partial(first_pass, terminal)
    return run.capture(options.checkpoint, prompts, options.out, watch, how, told)


def check(options: CheckOptions, _terminal: Terminal) -> int:
    """Judge a captured run: which layer, which component, why, with what evidence."""
    values.existing("CAPTURE", options.capture)
    values.existing("--reference", options.reference)
    values.existing("--checkpoint", options.checkpoint)
    values.backend("--backend", options.backend)
    values.one_of("--device", options.device, DEVICES)
    raise values.not_built("check", "judging a capture")


def compare(options: CompareOptions, _terminal: Terminal) -> int:
    """Set two captures beside each other, site by site."""
    values.existing("CAPTURE", options.first)
    values.existing("CAPTURE", options.second)
    raise values.not_built("compare", "judging a capture")
