"""Command line of `degarble doctor`: find out what a target is, and do all that can be done."""

import json
import shlex
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
from degarble.harness.report.verdict import NO_ERRORS, SEVERITY, Verdict

if TYPE_CHECKING:
    from degarble.harness.commands.doctor.plan import DoctorOptions, DoctorPlan, DoctorStep
    from degarble.harness.commands.doctor.target import DoctorTarget

_ASKED = ("checkpoint", "server")  # kinds of targets that are asked prompts
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


@dataclass
class _Outcome:
    """What a step gave."""

    step: "DoctorStep"
    verdict: Verdict | None  # None where it judges nothing
    sentence: str
    text: str = ""
    document: dict[str, Any] = field(default_factory=dict)


def add(app: typer.Typer) -> None:
    """Add the command to `app`."""
    command(app, "doctor", DoctorArguments)(doctor)


def doctor(options: DoctorArguments, terminal: Terminal) -> int:
    """Find out what TARGET is, do all that can be done with it, and say what to do next.

    Audits files, proves loading, records and checks a run, or probes a server. What is left out is
    named, with what it needs. Ctrl-C leaves what was done.
    """
    from degarble.harness.commands.doctor.plan import plan_for  # noqa: PLC0415  start-up time

    target, wanted = _recognised(options)
    require_folder("--out", wanted.out)
    plan = plan_for(target, wanted)
    session = _Session(plan, wanted, terminal)
    terminal.say(visible(plan.sentence))
    try:
        session.run()
    except KeyboardInterrupt:
        session.tell(interrupted=True)
        raise
    session.tell()
    terminal.emit(session.document())
    return session.verdict.exit_status


def _recognised(options: DoctorArguments) -> tuple["DoctorTarget", "DoctorOptions"]:
    """Return what the arguments name; refuse what does not go together, before any work."""
    from degarble.harness.commands.doctor.plan import DoctorOptions  # noqa: PLC0415  start-up time
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
    """Run a plan, and print its outcomes."""

    def __init__(self, plan: "DoctorPlan", options: "DoctorOptions", terminal: Terminal) -> None:
        self.plan, self.options, self.terminal = plan, options, terminal
        self.outcomes: list[_Outcome] = []
        self._capture: Path | None = None  # that an engine wrote

    def run(self) -> None:
        """Take the steps; one that is refused leaves the others."""
        from degarble.harness.commands.doctor import plan as steps  # noqa: PLC0415  start-up time

        bodies: dict[str, Callable[[DoctorStep, _StepTerminal], int]] = {
            steps.AUDIT: _audit, steps.CAPTURE: self._record, steps.CHECK: self._check,
            steps.ENGINE: self._engine, steps.PROBE: _probe, steps.JUDGE: self._judge,
        }  # fmt: skip
        missing = ""
        for number, step in enumerate(self.plan.done, 1):
            if step.name == steps.CHECK and missing:
                self.outcomes.append(_Outcome(step, None, f"Left out, since {missing} was."))
                continue
            self._announce(number, step)
            outcome = self._taken(step, bodies[step.name])
            self.outcomes.append(outcome)
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
    ) -> _Outcome:
        inner = _StepTerminal(quiet=self.terminal.quiet)
        try:
            body(step, inner)
        except DegarbleError as error:
            document = refusal_document(error)
            verdict = None if step.optional else Verdict.UNDECIDED
            return _Outcome(step, verdict, "\n".join(refusal_lines(error)), document=document)
        document = inner.documents[-1] if inner.documents else {}
        stated = document.get("verdict")
        verdict = Verdict(str(stated)) if stated else None
        text = "\n".join(inner.texts)
        return _Outcome(step, verdict, str(document.get("sentence") or ""), text, document)

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
        from degarble.harness.commands.doctor.plan import NEW_TOKENS  # noqa: PLC0415  as above
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

    # ----------------------------------------------------------------------------------------------
    # The answer

    @property
    def verdict(self) -> Verdict:
        """Return the worst verdict; UNDECIDED where nothing was judged."""
        told = [outcome.verdict for outcome in self.outcomes if outcome.verdict is not None]
        return max(told, key=SEVERITY.index, default=Verdict.UNDECIDED)

    @property
    def wrong(self) -> list[_Outcome]:
        """Return the steps that found something wrong."""
        bad = (Verdict.DIFFERS, Verdict.UNSTABLE)
        return [outcome for outcome in self.outcomes if outcome.verdict in bad]

    @property
    def kernel_tested(self) -> bool:
        """Return whether anything but degarble's own references was run or asked."""
        return any(
            outcome.document.get("kernel_tested", outcome.step.name in ("probe", "judge"))
            for outcome in self.outcomes
            if outcome.verdict is not None
        )

    @property
    def report(self) -> str | None:
        """Return the page that the last step wrote."""
        pages = [outcome.document.get("report") for outcome in self.outcomes]
        return next((page for page in reversed(pages) if page), None)

    @property
    def sentence(self) -> str:
        """Return the verdict in one sentence."""
        if self.wrong:
            first = self.wrong[0]
            return f"{first.step.name}: {first.sentence}"
        if self.verdict is Verdict.UNDECIDED:
            refused = next((o for o in self.outcomes if o.verdict is Verdict.UNDECIDED), None)
            if refused is None:
                return "Nothing was judged."
            return f"{refused.step.name} could not be decided."
        told = [outcome for outcome in self.outcomes if outcome.verdict is not None]
        if len(told) == 1 and told[0].sentence and told[0].step.name != "audit":
            return told[0].sentence
        judged = [outcome.step.name for outcome in told]
        alone = "" if self.kernel_tested else " No kernel was tested."
        return f"Nothing wrong was found by {' and '.join(judged)}.{alone}"

    @property
    def next(self) -> str:
        """Return the command to type next."""
        from degarble.harness.commands.doctor.plan import next_command  # noqa: PLC0415  as above

        for outcome in self.wrong:
            for origin in outcome.document.get("origins") or ():
                run = getattr(origin, "reproducer", None)
                if run and outcome.step.name == "check":
                    return shlex.join(["python", str(run)])
            for cause in outcome.document.get("causes") or ():
                return f"degarble faults show {cause['fault']}"
        names = [outcome.step.name for outcome in self.wrong]
        return next_command(self.plan.target, self.options, names)

    def tell(self, *, interrupted: bool = False) -> None:
        """Print verdict, steps, page and next command."""
        from degarble.reports.page_text import verdict_line  # noqa: PLC0415  rich

        say = self.terminal.say
        for outcome in self.wrong:
            lines = outcome.text.splitlines()
            say("", *(line for line in lines if not line.startswith("Open the report:")))
        say("")
        sentence = "Interrupted; this was done." if interrupted else self.sentence
        say(verdict_line(self.verdict, sentence, word=self.headline))
        for outcome in self.outcomes:
            say(*self._lines(outcome.step.name, self._told(outcome)))
        reached = {outcome.step.name for outcome in self.outcomes}
        for step in self.plan.steps:
            if step.left_out:
                say(*self._lines(step.name, f"Left out. {step.left_out}"))
            elif step.name not in reached:
                say(*self._lines(step.name, f"Not done. {step.command}"))
        if self.report:
            say(f"Open the report: {self.report}")
        if self.next:
            say(f"Next{self._before_next}: {self.next}")

    @property
    def headline(self) -> str:
        """Return the word for the verdict: AGREES only where something foreign was compared."""
        compared = self.kernel_tested or any(
            outcome.document.get("against") for outcome in self.outcomes
        )
        return self.verdict if compared or self.verdict is not Verdict.AGREES else NO_ERRORS

    @property
    def _before_next(self) -> str:
        """Return what the next command needs: an engine that was started here is stopped again."""
        stopped = self.options.engine is not None and self.next.startswith("degarble probe")
        return ", with the server started as you run it" if stopped else ""

    def _told(self, outcome: _Outcome) -> str:
        if outcome in self.wrong and outcome.text:
            return f"{outcome.verdict}, as said above."
        if outcome.document.get("error"):
            return outcome.sentence
        word = outcome.document.get("headline") or outcome.verdict
        sentence = outcome.sentence or outcome.text.rpartition("\n")[2]
        return f"{word}. {sentence}" if word else sentence

    def _lines(self, name: str, text: str) -> Iterator[str]:
        for number, line in enumerate(visible_lines(text)[:_SHOWN]):
            yield f"  {name if number == 0 else '':<9} {line}"

    def document(self) -> dict[str, Any]:
        """Return all of it as a JSON document: the verdict, and the document of each step."""
        steps = [
            {"step": outcome.step.name, "verdict": outcome.verdict, "sentence": outcome.sentence,
             "document": outcome.document}
            for outcome in self.outcomes
        ]  # fmt: skip
        return {
            "verdict": self.verdict,
            "headline": self.headline,
            "origins": [o for step in self.outcomes for o in step.document.get("origins") or ()],
            "cosines": [c for step in self.outcomes for c in step.document.get("cosines") or ()],
            "sentence": self.sentence,
            "target": {"kind": self.plan.target.kind, "name": self.plan.target.name},
            "plan": self.plan.sentence,
            "steps": steps,
            "left_out": {step.name: step.left_out for step in self.plan.steps if step.left_out},
            "kernel_tested": self.kernel_tested,
            "report": self.report,
            "next": self.next,
        }


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
