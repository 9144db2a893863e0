"""Command line of `degarble doctor`: find out what a target is, and do all that can be done."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from degarble.harness.base.errors import EXIT_AGREES, DegarbleError, InvalidArgument
from degarble.harness.cli import values
from degarble.harness.cli.command import command
from degarble.harness.cli.terminal import Terminal, refusal_document, refusal_lines
from degarble.harness.cli.values import Prompts
from degarble.harness.report.files import require_folder, write_text
from degarble.harness.report.number_text import visible
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from degarble.harness.commands.doctor.plan import DoctorOptions, DoctorStep
    from degarble.harness.commands.doctor.result import DoctorOutcome, DoctorResult
    from degarble.harness.commands.doctor.target import DoctorTarget

_ASKED = ("checkpoint", "server")  # kinds of targets that are asked prompts
_ADDRESS = re.compile(r"[A-Za-z0-9.-]+:[0-9]{1,5}(/\S*)?", re.ASCII)
_SHOWN = 12  # lines of what a step says, unless it found something wrong


@dataclass(frozen=True)
class DoctorArguments:
    """Options of `degarble doctor`."""

    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A checkpoint, a capture, a server's address, a kernel's .safetensors, or the"
            " command line that starts vLLM.",
        ),
    ]
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help='Start this engine, as in "vllm serve CKPT", record and judge three prompts, stop'
            " it.",
        ),
    ] = None
    reference: Annotated[
        Path | None,
        typer.Option(metavar="CKPT", help="BF16 or official checkpoint that it was made from."),
    ] = None
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where page and captures are written.")
    ] = Path("degarble-doctor")
    prompts: Prompts = None
    minutes: Annotated[
        float, typer.Option(metavar="N", help="Leave out a step that takes longer.")
    ] = 15.0


@dataclass(frozen=True)
class _StepTerminal(Terminal):
    """A terminal that keeps what a step says, for a line of the summary."""

    texts: list[str] = field(default_factory=list)
    documents: list[dict[str, Any]] = field(default_factory=list)

    def say(self, *lines: Any) -> None:
        """Keep the lines."""
        self.texts.extend(str(line).rstrip("\n") for line in lines)

    def emit(self, document: Any) -> None:
        """Keep the document."""
        self.documents.append(dict(document))


def add(app: typer.Typer) -> None:
    """Add the command to `app`."""
    command(app, "doctor", DoctorArguments)(doctor)


def doctor(options: DoctorArguments, terminal: Terminal) -> int:
    """Find out what TARGET is, do all that can be done with it, and say what to do next.

    Audits files, proves loading, records and checks a run, or probes a server. What is left out is
    named, with what it needs. Ctrl-C leaves what was done.
    """
    from degarble.harness.commands.doctor.plan import plan_for  # noqa: PLC0415  start-up time
    from degarble.harness.commands.doctor.result import DoctorResult  # noqa: PLC0415  as above

    target, wanted = _recognised(options)
    require_folder("--out", wanted.out)
    plan = plan_for(target, wanted)
    result = DoctorResult(plan, wanted)
    terminal.say(visible(plan.sentence))
    try:
        _Session(result, terminal).run()
    except KeyboardInterrupt:
        _tell(result, terminal, interrupted=True)
        raise
    _tell(result, terminal)
    terminal.emit(result.document())
    return result.verdict.exit_status


def _recognised(options: DoctorArguments) -> tuple["DoctorTarget", "DoctorOptions"]:
    """Return what the arguments name; refuse what does not go together, before any work."""
    from degarble.harness.commands.doctor.plan import DoctorOptions  # noqa: PLC0415
    from degarble.harness.commands.doctor.target import TargetKind, recognise  # noqa: PLC0415
    from degarble.harness.vllm.engine.command import (  # noqa: PLC0415  as above
        EngineCommand,
        is_engine_command,
    )

    values.existing("--reference", options.reference)
    values.existing("--prompts", options.prompts)
    values.within("--minutes", options.minutes, 0.1, 1 << 17)
    text, line = options.target, options.engine
    if line is None and is_engine_command(text):
        line, text = text, EngineCommand.from_text(text).model
    if not text.startswith(("http://", "https://")):
        if _ADDRESS.fullmatch(text) and not Path(text).exists():
            raise InvalidArgument(
                "TARGET",
                text,
                "a server's address with its scheme",
                f"degarble doctor http://{text}",
            )
        values.existing("TARGET", Path(text))
    target = recognise(text)
    if options.prompts is not None and target.kind not in _ASKED:
        raise InvalidArgument(
            "--prompts", f"with a {target.kind}", "a checkpoint or a server, which are asked",
            "Leave --prompts out.",
        )  # fmt: skip
    if options.reference is not None and target.kind is TargetKind.KERNEL:
        raise InvalidArgument(
            "--reference", "with a kernel", "a checkpoint, a capture or a server",
            "Leave --reference out: an output is judged against exact arithmetic on its operands.",
        )  # fmt: skip
    wanted = DoctorOptions(
        options.out, options.reference, line, minutes=options.minutes, prompts=options.prompts
    )
    if line is None:
        return target, wanted
    engine = EngineCommand.from_text(line)
    if target.kind is not TargetKind.CHECKPOINT:
        raise InvalidArgument(
            "--engine", f"with a {target.kind}", "a checkpoint as TARGET",
            f"degarble doctor {engine.model} --engine ...",
        )  # fmt: skip
    if Path(engine.model).resolve() != target.path.resolve():
        raise InvalidArgument(
            "--engine", engine.model, f"the checkpoint that is looked at: {target.text}",
            "Name the same folder in both.",
        )  # fmt: skip
    if options.prompts is not None:
        _prompts(target, options.prompts)
    engine.require_startable()
    url = f"http://{engine.host}:{engine.port}"
    return target, replace(wanted, loader=engine.loader, url=url)


class _Session:
    """Run a plan; the outcomes go into `result`."""

    def __init__(self, result: "DoctorResult", terminal: Terminal) -> None:
        self.result, self.terminal = result, terminal
        self.plan, self.options = result.plan, result.options
        self._capture: Path | None = None  # that an engine wrote

    def run(self) -> None:
        """Take the steps; one that is refused leaves the others."""
        from degarble.harness.commands.doctor import plan as steps  # noqa: PLC0415  start-up time
        from degarble.harness.commands.doctor.result import DoctorOutcome  # noqa: PLC0415

        bodies: dict[str, Callable[[DoctorStep, _StepTerminal], int]] = {
            steps.AUDIT: _audit, steps.CAPTURE: self._record, steps.CHECK: self._check,
            steps.ENGINE: self._engine, steps.PROBE: _probe, steps.JUDGE: self._judge,
        }  # fmt: skip
        missing = ""
        for number, step in enumerate(self.plan.done, 1):
            if step.name == steps.CHECK and missing:
                left_out = DoctorOutcome(step, None, f"Left out, since {missing} was.")
                self.result.outcomes.append(left_out)
                continue
            self._announce(number, step)
            outcome = self._taken(step, bodies[step.name])
            self.result.outcomes.append(outcome)
            if outcome.document.get("error") and step.name in steps.RECORDING:
                missing = step.name

    def _announce(self, number: int, step: "DoctorStep") -> None:
        """Say on stderr which step begins, and about how long the rest takes."""
        if self.terminal.quiet:
            return
        from degarble.harness.report.progress import duration  # noqa: PLC0415  start-up time

        left = sum(other.seconds for other in self.plan.done[number - 1 :])
        line = f"[{number}/{len(self.plan.done)}] {step.does}, about {duration(left)} left"
        sys.stderr.write(f"{visible(line)}\n")
        sys.stderr.flush()

    def _taken(
        self, step: "DoctorStep", body: "Callable[[DoctorStep, _StepTerminal], int]"
    ) -> "DoctorOutcome":
        from degarble.harness.commands.doctor.result import DoctorOutcome  # noqa: PLC0415  as above

        inner = _StepTerminal(quiet=self.terminal.quiet)
        try:
            body(step, inner)
        except DegarbleError as error:
            document = refusal_document(error)
            verdict = None if step.optional else Verdict.UNDECIDED
            return DoctorOutcome(step, verdict, "\n".join(refusal_lines(error)), document=document)
        document = inner.documents[-1] if inner.documents else {}
        stated = document.get("verdict")
        verdict = Verdict(str(stated)) if stated else None
        text = "\n".join(inner.texts)
        return DoctorOutcome(step, verdict, str(document.get("sentence") or ""), text, document)

    # ----------------------------------------------------------------------------------------------
    # Steps, each by the command that does it

    def _record(self, step: "DoctorStep", inner: _StepTerminal) -> int:
        from degarble.harness.cli.commands.judging import CaptureOptions, capture  # noqa: PLC0415
        from degarble.harness.commands.doctor.plan import NEW_TOKENS  # noqa: PLC0415

        out = Path(_option(step, "--out"))
        out.parent.mkdir(parents=True, exist_ok=True)
        prompts = Path(_option(step, "--prompts"))
        if self.options.prompts is None:
            lines = (json.dumps(text) for text in _prompts(self.plan.target))
            write_text(prompts, "".join(f"{line}\n" for line in lines))
        asked = CaptureOptions(
            self.plan.target.path, out, prompts=prompts, max_new_tokens=NEW_TOKENS
        )
        return capture(asked, inner)

    def _check(self, step: "DoctorStep", inner: _StepTerminal) -> int:
        from degarble.harness.cli.commands.judging import CheckOptions, check  # noqa: PLC0415

        checkpoint, reference = _option(step, "--checkpoint"), _option(step, "--reference")
        asked = CheckOptions(
            self._capture or Path(step.line[1]),
            Path(reference) if reference else None,
            Path(checkpoint) if checkpoint else None,
            report=self.options.out,
        )
        return check(asked, inner)

    def _engine(self, step: "DoctorStep", inner: _StepTerminal) -> int:
        from degarble.harness.commands.doctor.plan import NEW_TOKENS  # noqa: PLC0415
        from degarble.harness.vllm.engine.command import (  # noqa: PLC0415  as above
            EngineCommand,
            recording_engine,
        )

        del step
        assert self.options.engine is not None, "the step of an engine"
        started = EngineCommand.from_text(self.options.engine)
        self.options.out.mkdir(parents=True, exist_ok=True)
        log = self.options.out / "engine.log"
        prompts = _prompts(self.plan.target, self.options.prompts)
        with (
            self.terminal.work("engine", 0) as progress,
            recording_engine(started, self.options.out / "captures", log, progress.step) as running,
        ):
            self._capture = running.capture(prompts, NEW_TOKENS, progress.step)
        sentence = f"It answered {len(prompts)} prompts; the run is in {self._capture}."
        inner.emit({"verdict": None, "sentence": sentence, "capture": str(self._capture)})
        return EXIT_AGREES

    def _judge(self, step: "DoctorStep", inner: _StepTerminal) -> int:
        from degarble.harness.commands.doctor.kernel_file import judge_file  # noqa: PLC0415  torch

        del step
        judged = judge_file(self.plan.target.path)
        inner.say(str(judged))
        sentence = str(judged).splitlines()[0].removeprefix(f"{judged.verdict}: ")
        inner.emit(judged.document() | {"sentence": sentence})
        return judged.verdict.exit_status


# --------------------------------------------------------------------------------------------------
# The answer


def _tell(result: "DoctorResult", terminal: Terminal, *, interrupted: bool = False) -> None:
    """Print verdict, steps, page and next command."""
    from degarble.reports.page_text import verdict_line  # noqa: PLC0415  rich

    say = terminal.say
    for outcome in result.wrong:
        lines = outcome.text.splitlines()
        say("", *(line for line in lines if not line.startswith("Open the report:")))
    say("")
    sentence = "Interrupted; this was done." if interrupted else result.sentence
    say(verdict_line(result.verdict, sentence, word=result.headline))
    for outcome in result.outcomes:
        say(*_lines(outcome.step.name, _told(result, outcome)))
    reached = {outcome.step.name for outcome in result.outcomes}
    for step in result.plan.steps:
        if step.left_out:
            say(*_lines(step.name, f"Left out. {step.left_out}"))
        elif step.name not in reached:
            say(*_lines(step.name, f"Not done. {step.command}"))
    if result.report:
        say(f"Open the report: {result.report}")
    if result.next:
        say(f"Next{result.before_next}: {result.next}")


def _told(result: "DoctorResult", outcome: "DoctorOutcome") -> str:
    if outcome in result.wrong and outcome.text:
        return f"{outcome.verdict}, as said above."
    if outcome.document.get("error"):
        return outcome.sentence
    word = outcome.document.get("headline") or outcome.verdict
    sentence = outcome.sentence or outcome.text.rpartition("\n")[2]
    return f"{word}. {sentence}" if word else sentence


def _lines(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(visible_lines(text)[:_SHOWN]):
        yield f"  {name if number == 0 else '':<9} {line}"


def visible_lines(text: str) -> list[str]:
    """Return the lines of a text with control characters escaped."""
    return [visible(line) for line in text.splitlines()]


def _option(step: "DoctorStep", name: str) -> str:
    """Return the value of an option in the command of a step; empty without it."""
    return step.line[step.line.index(name) + 1] if name in step.line else ""


def _prompts(target: "DoctorTarget", given: Path | None = None) -> tuple[str, ...]:
    """Return the given prompts, or three of words that the checkpoint's tokenizer knows."""
    from degarble.harness.generate.generate import prompts_from  # noqa: PLC0415  torch

    if given is not None:
        found = prompts_from(given)
        if not all(isinstance(prompt, str) for prompt in found):
            raise InvalidArgument(
                "--prompts", str(given), "texts: an engine is recorded by completions",
                "Write one text a line.",
            )  # fmt: skip
        return tuple(found)
    from degarble.harness.chat.tokenizer import Tokenizer  # noqa: PLC0415  start-up time
    from degarble.harness.commands.doctor.plan import PROMPTS  # noqa: PLC0415  as above
    from degarble.harness.nightly.steps import PROMPTS as TEXTS  # noqa: PLC0415  torch
    from degarble.harness.nightly.steps import known_prompts  # noqa: PLC0415  as above

    if not target.has_tokenizer:
        return TEXTS[:PROMPTS]
    return known_prompts(Tokenizer.of_checkpoint(target.path, {}, sys.maxsize))[:PROMPTS]


def _audit(step: "DoctorStep", inner: _StepTerminal) -> int:
    from degarble.harness.cli.commands.checkpoints import AuditOptions, audit  # noqa: PLC0415

    against = _option(step, "--against")
    asked = AuditOptions(
        Path(step.line[1]),
        Path(against) if against else None,
        _option(step, "--loader") or None,
        report=Path(_option(step, "--report")),
    )
    return audit(asked, inner)


def _probe(step: "DoctorStep", inner: _StepTerminal) -> int:
    from degarble.harness.cli.commands.probing import ProbeArguments, probe  # noqa: PLC0415

    against = _option(step, "--against") or None
    prompts = _option(step, "--prompts")
    asked = ProbeArguments(
        step.line[1],
        against=against,
        prompts=Path(prompts) if prompts else None,
        report=Path(_option(step, "--report")),
    )
    return probe(asked, inner)
