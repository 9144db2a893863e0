"""Command line of `degarble capture`, `check` and `compare`: record runs and judge them."""

import os
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from degarble.harness.base.errors import EXIT_AGREES, InvalidArgument
from degarble.harness.cli import values
from degarble.harness.cli.command import command
from degarble.harness.cli.imports import importing
from degarble.harness.cli.terminal import Terminal
from degarble.harness.cli.values import (
    MOST_PROCESSES,
    Backend,
    CapturePath,
    CheckpointPath,
    Convention,
    Faults,
    Partial,
    Prompt,
    Prompts,
    ReportFolder,
    Strict,
    requested_processes,
    settings_here,
)
from degarble.harness.report.files import is_stream, require_folder
from degarble.harness.report.progress import size


@dataclass(frozen=True)
class CaptureOptions:
    """Options of `degarble capture`."""

    checkpoint: CheckpointPath
    out: Annotated[Path, typer.Option(metavar="CAPTURE", help="Where the capture is written.")]
    backend: Backend = "torch"
    strict: Strict = False
    graph: Annotated[
        bool, typer.Option("--graph", help="With vllm or cutedsl: decode inside CUDA graphs.")
    ] = False
    graph_memory: Annotated[
        float, typer.Option(metavar="GIB", help="GPU memory for copies that the graphs make.")
    ] = 1.0
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
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Choose layers and pieces of the run that fit: 10GB."),
    ] = None
    statistics_only: Annotated[
        bool, typer.Option("--statistics-only", help="Keep hashes and ranges, no tensors.")
    ] = False
    amax_only: Annotated[
        bool, typer.Option("--amax-only", help="Keep only the ranges that calibration needs.")
    ] = False
    convention: Convention = None
    patch: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.py", help="Python file with patch(candidate). It is executed: trust it."
        ),
    ] = None
    fault: Annotated[
        str | None,
        typer.Option(
            metavar="ID@COMPONENT",
            help="Plant this fault there, to see it found: M10.nibble_order@layers.1.ffn.w2.",
        ),
    ] = None


@dataclass(frozen=True)
class ImportArguments:
    """Options of `degarble import`."""

    kind: Annotated[str, typer.Argument(metavar="KIND", help="sglang, flashinfer or vllm-states.")]
    path: Annotated[Path, typer.Argument(metavar="PATH", help="What the tool wrote.")]
    model: Annotated[Path, typer.Option(metavar="CKPT", help="Checkpoint that the engine loaded.")]
    out: Annotated[Path, typer.Option(metavar="CAPTURE", help="Where the capture is written.")]
    layers: Annotated[
        str | None, typer.Option(metavar="LIST", help="For vllm-states: layers, such as 1,2,3.")
    ] = None


@dataclass(frozen=True)
class CheckOptions:
    """Options of `degarble check`."""

    capture: CapturePath
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="CKPT",
            help="BF16 or official checkpoint: judges quality.",
            show_default="none, and quality is not judged",
        ),
    ] = None
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="CKPT",
            help="Quantised checkpoint of the twin: judges correctness.",
            show_default="the one that the capture names",
        ),
    ] = None
    backend: Backend = "torch"
    strict: Strict = False
    convention: Convention = None
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="Where twin, reference and backend are computed: cpu, cuda, cuda:1, cuda:0,2,"
            " cuda:all.",
        ),
    ] = "cpu"
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Processes that judge components, each on one thread.",
            show_default="the calling process, or up to eight a GPU",
        ),
    ] = None
    screen: Annotated[
        bool,
        typer.Option(
            "--screen", help="Look at sampled rows first, and at whole components where needed."
        ),
    ] = False
    partial: Partial = False
    faults: Faults = None
    report: ReportFolder = None


@dataclass(frozen=True)
class CompareOptions:
    """Options of `degarble compare`."""

    first: CapturePath
    second: CapturePath
    partial: Partial = False
    report: ReportFolder = None


def add(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    command(app, "capture", CaptureOptions)(capture)
    command(app, "import", ImportArguments)(import_dump)
    command(app, "check", CheckOptions, spreads=True, json_word=True)(check)
    command(app, "compare", CompareOptions, json_word=True)(compare)


def capture(options: CaptureOptions, terminal: Terminal) -> int:
    """Run a model and record the inputs and outputs of every component.

    With --amax-only it records the ranges that `quantise --calibration` reads, and nothing else;
    the same command again finishes what was interrupted.
    """
    values.existing("CKPT", options.checkpoint)
    values.backend("--backend", options.backend)
    values.at_most_one(prompt=options.prompt, prompts=options.prompts)
    values.existing("--prompts", options.prompts)
    values.existing("--patch", options.patch)
    values.within("--max-new-tokens", options.max_new_tokens, 1, float("inf"))
    for name in ("layers", "components", "tokens", "statistics_only", "max_new_tokens", "budget"):
        values.at_most_one(amax_only=options.amax_only, **{name: getattr(options, name)})
    foreign = options.backend if options.backend != "torch" else None
    values.at_most_one(amax_only=options.amax_only, patch=options.patch)
    values.at_most_one(amax_only=options.amax_only, backend=foreign)
    for name in ("amax_only", "patch", "graph"):
        values.at_most_one(fault=options.fault, **{name: getattr(options, name)})
    values.at_most_one(fault=options.fault, backend=foreign)
    values.strict(options.backend, wanted=options.strict)
    values.exactly_one(prompt=options.prompt, prompts=options.prompts)
    _require_graph(options)
    _require_budget(options)
    # Imports torch, which --help and --version do without.
    from degarble.harness.generate.generate import prompts_from  # noqa: PLC0415

    prompts = [options.prompt] if options.prompts is None else prompts_from(options.prompts)
    from degarble.harness.inference.processes import read_rank_info  # noqa: PLC0415  as above

    place = read_rank_info(os.environ)
    if options.amax_only and not place.alone:
        raise InvalidArgument(
            "--amax-only", f"{place.world} ranks", "one process", "Start it without torchrun."
        )
    record = _ranges if options.amax_only else _tensors
    done = record(options, prompts, terminal)
    if not place.leads:
        return EXIT_AGREES
    terminal.say(*done.lines())
    terminal.emit(done.document())
    return EXIT_AGREES


def _require_graph(options: CaptureOptions) -> None:
    values.within("--graph-memory", options.graph_memory, 0.001, 64)
    if not options.graph:
        return
    if options.backend not in {"vllm", "cutedsl"}:
        raise InvalidArgument(
            "--graph", f"--backend {options.backend}", "--backend vllm or cutedsl, which replay",
            "Name one of them, or leave --graph out.",
        )  # fmt: skip
    for name in ("patch", "statistics_only", "amax_only"):
        values.at_most_one(graph=options.graph, **{name: getattr(options, name)})


def _require_budget(options: CaptureOptions) -> None:
    values.nbytes("--budget", options.budget)
    for name in ("layers", "tokens", "statistics_only"):
        values.at_most_one(budget=options.budget, **{name: getattr(options, name)})
    if options.budget is not None and (options.graph or options.backend == "vllm"):
        how = "--graph" if options.graph else "--backend vllm"
        raise InvalidArgument(
            "--budget", how, "a run whose steps are known before it begins: an engine cuts its own",
            "Leave --budget out, and choose by --layers, --components and --tokens.",
        )  # fmt: skip


def _ranges(options: CaptureOptions, prompts: list[Any], terminal: Terminal) -> Any:
    from degarble.harness.capture.amax import capture_amax  # noqa: PLC0415  as above
    from degarble.harness.cli.terminal import first_pass  # noqa: PLC0415  imports torch

    return capture_amax(options.checkpoint, prompts, options.out, partial(first_pass, terminal))


def _tensors(options: CaptureOptions, prompts: list[Any], terminal: Terminal) -> Any:
    from degarble.harness.capture import capture as run  # noqa: PLC0415  as above
    from degarble.harness.capture.options import CaptureFilter  # noqa: PLC0415  as above
    from degarble.harness.cli.terminal import first_pass  # noqa: PLC0415  imports torch
    from degarble.harness.engine.conventions.registry import read_options  # noqa: PLC0415  as above

    capture_settings = run.CaptureSettings(
        CaptureFilter.from_options(options.layers, options.components, options.tokens),
        options.max_new_tokens or run.NEW_TOKENS,
        values.nbytes("--budget", options.budget),
        statistics_only=options.statistics_only,
        backend=options.backend,
        strict=options.strict,
        settings=settings_here(),
        patch=options.patch,
        plant=_planting(options.fault),
        conventions=read_options(options.convention or ()),
        graph_bytes=int(options.graph_memory * (1 << 30)) if options.graph else 0,
    )

    if options.backend == "vllm":
        from degarble.harness.vllm.capture import from_vllm  # noqa: PLC0415  an engine

        return from_vllm(options.checkpoint, prompts, options.out, capture_settings)
    if options.graph:
        from degarble.harness.capture.decoding import capture_by_layers  # noqa: PLC0415  as above

        return capture_by_layers(options.checkpoint, prompts, options.out, capture_settings)

    def report(nbytes: int) -> None:
        if nbytes and not (terminal.json_wanted or terminal.quiet):
            terminal.err().print(f"About {size(nbytes)} will be written.", markup=False)

    watch = partial(first_pass, terminal)
    record = run.capture
    from degarble.harness.inference.processes import read_rank_info  # noqa: PLC0415  as above

    if not read_rank_info(os.environ).alone:
        from degarble.harness.capture.ranks import capture_over_ranks  # noqa: PLC0415  above

        record = capture_over_ranks
    return record(options.checkpoint, prompts, options.out, watch, capture_settings, report)


def _planting(fault: str | None) -> Any:
    if fault is None:
        return None
    from degarble.harness.commands.plant import planting  # noqa: PLC0415  as above

    return planting(fault)


def import_dump(options: ImportArguments, terminal: Terminal) -> int:
    """Turn a dump of SGLang, FlashInfer or vLLM into a capture, and say what it can decide.

    Pickled tensors are read without unpickling.
    """
    values.existing("PATH", options.path)
    values.existing("--model", options.model)
    layers = _numbers("--layers", options.layers)
    # Imports torch, which --help and --version do without.
    from degarble.harness.capture.imports import importing  # noqa: PLC0415

    done = importing.import_dump(
        importing.ImportOptions(options.kind, options.path, options.model, options.out, layers)
    )
    terminal.say(*done.lines())
    terminal.emit(done.document())
    return EXIT_AGREES


def _numbers(name: str, text: str | None) -> tuple[int, ...]:
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise InvalidArgument(
            name, text, "whole numbers, such as 1,2,3", "Separate them by commas."
        )
    return tuple(int(word) for word in words)


def check(options: CheckOptions, terminal: Terminal) -> int:
    """Judge a captured run: which layer, which component, why, with what evidence.

    With --backend it runs the prompts of CAPTURE again on these kernels, and judges that run.
    The same command again finishes what was interrupted.
    """
    _require_usable(options, terminal)
    if (options.workers or requested_processes() or 1) > 1:
        _begin_workers(terminal)
    with importing():  # torch, which --help and --version do without
        from degarble.harness.commands.check import check as run  # noqa: PLC0415
        from degarble.harness.commands.check.report import (  # noqa: PLC0415
            check_document,
            check_sentence,
            check_text,
        )
        from degarble.harness.commands.check.spread import SpreadCheck  # noqa: PLC0415
        from degarble.harness.engine.adopted.files import searching  # noqa: PLC0415
        from degarble.harness.engine.conventions.registry import read_options  # noqa: PLC0415
        from degarble.harness.inference.devices import CPU, devices_of  # noqa: PLC0415

    devices = devices_of("--device", options.device)
    if devices != (CPU,):
        _begin_workers(terminal)
    wanted = run.CheckSettings(
        options.capture,
        options.reference,
        options.checkpoint,
        device=devices[0],
        partial=options.partial,
        conventions=read_options(options.convention or ()),
        screen=options.screen,
    )
    with ExitStack() as stack:
        stack.enter_context(searching(values.faults_folder(options.faults)))
        if options.backend != "torch":
            wanted = stack.enter_context(_ran_again(wanted, options, terminal))
        opened = stack.enter_context(run.CheckRun(wanted))
        looker = None
        if options.report is not None:
            from degarble.harness.commands.check.output_statistics import StatisticsCollector  # noqa: PLC0415  as above

            looker = StatisticsCollector(opened.model.config, opened.model.store)
        chosen = _spread(options, terminal, devices, (opened, stack))
        elsewhere = SpreadCheck(opened, chosen, looking=looker is not None)
        components = len({call.component for call in opened.capture.calls})
        with terminal.progress("check", components) as report:
            checked = opened.judge(looker, report, _cases(options, terminal), elsewhere)
        sentence = check_sentence(checked)
        terminal.say(check_text(checked, sentence, width=terminal.width, colour=terminal.colour))
        document = check_document(checked, sentence)
        if options.report is not None:
            document["report"] = _report(options, opened, checked, looker)
            terminal.say(f"Open the report: {document['report']}")
        terminal.emit(document)
        elsewhere.close()
    return checked.verdict.exit_status


def _require_usable(options: CheckOptions, terminal: Terminal) -> None:
    """Refuse what is wrong before anything is opened."""
    values.existing("CAPTURE", options.capture)
    values.existing("--reference", options.reference)
    values.existing("--checkpoint", options.checkpoint)
    values.backend("--backend", options.backend)
    values.strict(options.backend, wanted=options.strict)
    values.within("--workers", options.workers, 1, MOST_PROCESSES)
    if terminal.cluster is not None and options.device != "cpu":
        raise InvalidArgument(
            "--device and --cluster", options.device, "one of them: a cluster computes on its CPUs",
            "Leave one of them out.",
        )  # fmt: skip
    if options.report is not None:
        require_folder("--report", options.report)


def _begin_workers(terminal: Terminal) -> None:
    """Have the process that forks workers import torch while this one goes on."""
    if terminal.cluster is None:
        from degarble.harness.checkpoint.write.workers import CHECK_IMPORTS, begin_imports  # noqa: PLC0415  as above

        begin_imports([CHECK_IMPORTS])


def _spread(
    options: CheckOptions, terminal: Terminal, devices: tuple[str, ...], run: tuple[Any, ExitStack]
) -> Any:
    """Choose who judges components, and where finished ones are kept."""
    from degarble.harness.commands.check.spread import SpreadSettings  # noqa: PLC0415  as above
    from degarble.harness.inference.devices import CPU, is_spread, processes_on  # noqa: PLC0415  as above

    opened, stack = run
    workers: Any = options.workers or requested_processes()
    if terminal.cluster is not None:
        workers = stack.enter_context(values.spread(terminal, workers))
    elif workers is None and devices != (CPU,):
        # Whether threads add up alone depends on no memory that is free now: bits and finished
        # components are those of the same command before.
        size = opened.weight_bytes()
        workers = processes_on(devices, size) if is_spread(devices, size) else None
    return SpreadSettings(workers, devices, _unfinished(options, terminal))


def _unfinished(options: CheckOptions, terminal: Terminal) -> Path | None:
    """Where finished components are kept: with the output. The run of a backend starts anew."""
    from degarble.harness.checkpoint.write.manifest import UNFINISHED  # noqa: PLC0415  as above

    if options.backend != "torch":
        return None
    if options.report is not None:
        return options.report / UNFINISHED
    if terminal.json_file is not None and not is_stream(terminal.json_file):
        file = terminal.json_file.resolve()
        return file.with_name(f"{file.stem}-{UNFINISHED}")
    return None


def _ran_again(
    wanted: Any, options: CheckOptions, terminal: Terminal
) -> AbstractContextManager[Any]:
    """Run the prompts of a capture on a backend; what is to be checked is that run."""
    from degarble.harness.backends.registry import AskedBackend  # noqa: PLC0415  as above
    from degarble.harness.cli.terminal import first_pass  # noqa: PLC0415  imports torch
    from degarble.harness.commands.check.check import run_again  # noqa: PLC0415  as above

    backend = AskedBackend(options.backend, options.strict, settings_here())
    return run_again(wanted, backend, partial(first_pass, terminal), terminal.say)


def _cases(options: CheckOptions, terminal: Terminal) -> Path | None:
    """Where reproducers are written: in the report's folder, else beside the JSON file."""
    if options.report is not None:
        return options.report / "reproducers" / options.capture.resolve().name
    if terminal.json_file is not None and not is_stream(terminal.json_file):
        file = terminal.json_file.resolve()
        return file.with_name(f"{file.stem}-reproducers")
    return None


def _report(options: CheckOptions, opened: Any, checked: Any, looker: Any) -> str:
    """Write the page, and JUnit beside it; give the page."""
    from degarble.harness.commands.check.report import write_check_report  # noqa: PLC0415  as above

    assert options.report is not None, "called only with one"
    words = f"degarble check {options.capture.resolve().name}"
    if options.reference is not None:
        words += f" --reference {options.reference.resolve().name}"
    words += f" --backend {options.backend}" if options.backend != "torch" else ""
    words += f" --device {options.device}" if options.device != "cpu" else ""
    words += " --partial" if options.partial else ""
    words += " --screen" if options.screen else ""
    return str(write_check_report(options.report, opened, checked, looker, words))


def compare(options: CompareOptions, terminal: Terminal) -> int:
    """Compare two captures, site by site."""
    values.existing("CAPTURE", options.first)
    values.existing("CAPTURE", options.second)
    if options.report is not None:
        require_folder("--report", options.report)
    # Imports torch, which --help and --version do without.
    from degarble.harness.commands.check import compare_runs as run  # noqa: PLC0415

    comparison = run.compare_runs(options.first, options.second, partial=options.partial)
    terminal.say(*run.compared_lines(comparison))
    document = run.compared_document(comparison)
    if options.report is not None:
        from degarble.harness.commands.report_folder import write_page  # noqa: PLC0415  as above
        from degarble.harness.report.page import provenance  # noqa: PLC0415  as above

        names = " ".join(path.resolve().name for path in (options.first, options.second))
        page = run.compared_page(comparison, provenance(f"degarble compare {names}"))
        document["report"] = str(write_page(options.report, page))
        terminal.say(f"Open the report: {document['report']}")
    terminal.emit(document)
    return comparison.verdict.exit_status
