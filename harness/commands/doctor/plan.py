"""Plan what is done with a target: which commands, about how long, and what is left out, and why.

Durations are estimates from measured rates (docs/figures.md); they decide only what is left out.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from degarble.harness.commands.doctor.target import WEIGHTS, TargetKind
from degarble.harness.report.progress import duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from degarble.harness.commands.doctor.target import DoctorTarget

# Bytes a second, on one core; the references compute in float64.
_AUDITED, _COMPARED, _RUN, _LOADED = 0.4e9, 0.2e9, 10e6, 0.2e9
_BEGIN = 4.0  # seconds to import what a step needs
_ENGINE = 90.0  # seconds until a small vLLM answers
_PROBE = 60.0
NEW_TOKENS, PROMPTS = 4, 3

AUDIT, CAPTURE, CHECK, ENGINE = "audit", "capture", "check", "engine"
PROBE, JUDGE, LOADER, KERNELS = "probe", "judge", "loader", "kernels"
RECORDING = (CAPTURE, ENGINE)  # steps that record the run which CHECK judges


@dataclass(frozen=True)
class DoctorStep:
    """One step: the command that does it, or why it is left out and what it would need."""

    name: str
    does: str
    seconds: float = 0.0
    line: tuple[str, ...] = ()  # after `degarble`; empty where no command does it alone
    left_out: str = ""
    optional: bool = False  # whether its refusal leaves the rest decided

    @property
    def command(self) -> str:
        """Return the command line to paste."""
        return shlex.join(["degarble", *self.line]) if self.line else ""


@dataclass(frozen=True)
class DoctorOptions:
    """What the plan depends on besides the target. `loader`: the map of the engine's loading."""

    out: Path
    reference: Path | None = None
    engine: str | None = None
    loader: str = "vllm"
    url: str = "http://HOST:PORT"  # of the engine
    minutes: float = 15.0
    prompts: Path | None = None  # what is asked; a few of its own where None

    @property
    def what_is_asked(self) -> str:
        """Return how sentences call the prompts."""
        return f"{PROMPTS} prompts" if self.prompts is None else f"the prompts of {self.prompts}"


@dataclass(frozen=True)
class DoctorPlan:
    """The steps in their order."""

    target: DoctorTarget
    steps: tuple[DoctorStep, ...]

    @property
    def done(self) -> tuple[DoctorStep, ...]:
        """Return the steps that are made."""
        return tuple(step for step in self.steps if not step.left_out)

    @property
    def seconds(self) -> float:
        """Return about how long they take together."""
        return sum(step.seconds for step in self.done)

    @property
    def sentence(self) -> str:
        """Say what the target is, what is done, and about how long that takes."""
        what = f"{self.target.name} is {_ARTICLE[self.target.kind]}"
        steps = ", ".join(step.does for step in self.done) or "nothing can be done with it"
        return f"{what}: {steps}. About {duration(self.seconds)}."


_ARTICLE = {
    TargetKind.CHECKPOINT: "a checkpoint",
    TargetKind.CAPTURE: "a recorded run",
    TargetKind.SERVER: "a server",
    TargetKind.KERNEL: "a file of tensors",
}


def plan_for(target: DoctorTarget, options: DoctorOptions) -> DoctorPlan:
    """Return the steps for a target; those that take longer than allowed are left out by name."""
    steps, missing = list[DoctorStep](), ""
    for planned in _STEPS[target.kind](target, options):
        step = _within(planned, options.minutes)
        if step.name == CHECK and missing:
            step = replace(step, left_out=f"It needs the run of the step {missing}.")
        if step.left_out and step.name in RECORDING:
            missing = step.name
        steps.append(step)
    return DoctorPlan(target, tuple(steps))


def _within(step: DoctorStep, minutes: float) -> DoctorStep:
    if step.left_out or step.seconds <= 60 * minutes:
        return step
    took = f"It takes about {duration(step.seconds)}, more than the {minutes:g} minutes allowed."
    alone = f"Run it alone: {step.command}"
    allow = f"Allow it: --minutes {math.ceil(step.seconds / 60)}"
    return replace(step, left_out=f"{took} {alone if step.line else allow}")


def free_folder(folder: Path) -> Path:
    """Return a folder that does not exist: this one, or its name with a number."""
    number, found = 1, folder
    while found.exists():
        number += 1
        found = folder.with_name(f"{folder.name}-{number}")
    return found


def weight_bytes(path: Path) -> int:
    """Return the bytes of a checkpoint's files."""
    return sum(shard.stat().st_size for shard in path.glob(WEIGHTS) if shard.is_file())


def _checkpoint(target: DoctorTarget, options: DoctorOptions) -> list[DoctorStep]:
    compare = [] if options.reference is None else ["--against", str(options.reference)]
    rate = _AUDITED if options.reference is None else _COMPARED
    prove = [] if options.engine is None else ["--loader", options.loader]
    does = "audit its files"
    does += f" against {options.reference.resolve().name}" if options.reference else ""
    does += " and prove how the engine loads them" if options.engine else ""
    line = ("audit", target.text, *compare, *prove, "--report", str(options.out))
    steps = [DoctorStep(AUDIT, does, _BEGIN + target.nbytes / rate, line)]
    if options.engine is not None:
        return steps + _with_engine(target, options)
    need = f'--engine "vllm serve {shlex.quote(target.text)}"'
    steps.append(DoctorStep(LOADER, "", left_out=f"No engine was named: {need}"))
    steps += _with_references(target, options)
    words = f"No kernel was tested: {need}, or degarble check CAPTURE --backend NAME"
    steps.append(DoctorStep(KERNELS, "", left_out=words))
    return steps


def _with_references(target: DoctorTarget, options: DoctorOptions) -> list[DoctorStep]:
    """Run the built-in references on a checkpoint, and check that run."""
    if not target.has_tokenizer:
        why = "It has no tokenizer.json, so no prompt can be asked. Copy it from the source model."
        return [DoctorStep(CAPTURE, "", left_out=why)]
    capture = free_folder(options.out / "captures" / "references")
    run = _BEGIN / 2 + target.nbytes / _RUN
    made = ["capture", target.text, "--prompts", str(prompts_file(options)), "--out", str(capture)]
    made += ["--max-new-tokens", str(NEW_TOKENS)]
    judged = _check_step(capture, target.text, options, run)
    does = f"run the built-in references on {options.what_is_asked}"
    return [
        DoctorStep(CAPTURE, does, run, tuple(made), optional=True),
        replace(judged, does="check that run", optional=True),
    ]


def prompts_file(options: DoctorOptions) -> Path:
    """Return the prompts of a run: the given file, or where three are written."""
    return options.prompts or options.out / "prompts.jsonl"


def _check_step(
    capture: Path, checkpoint: str, options: DoctorOptions, seconds: float
) -> DoctorStep:
    line = ["check", str(capture), *_reference(options)]
    line += ["--checkpoint", checkpoint, "--report", str(options.out)]
    return DoctorStep(CHECK, "check every component", seconds, tuple(line))


def _reference(options: DoctorOptions) -> tuple[str, ...]:
    return () if options.reference is None else ("--reference", str(options.reference))


def _with_engine(target: DoctorTarget, options: DoctorOptions) -> list[DoctorStep]:
    """Run the engine with the capture switch, and check what it computed."""
    start = _ENGINE + target.nbytes / _LOADED
    does = f"start the engine, ask {options.what_is_asked} and stop it"
    capture = free_folder(options.out / "captures" / "engine")
    judged = _check_step(capture, target.text, options, _BEGIN + target.nbytes / _RUN)
    why = "CUDA graphs are off while a run is recorded. Against the server as you run it: "
    why += f"degarble probe {options.url}"
    return [
        DoctorStep(ENGINE, does, start),
        replace(judged, does="check every component of that run"),
        DoctorStep(PROBE, "", left_out=why),
    ]


def _capture(target: DoctorTarget, options: DoctorOptions) -> list[DoctorStep]:
    source = target.source
    if source is None or not Path(source).is_dir():
        moved = "names no checkpoint" if source is None else "names a checkpoint that is not here"
        named = shlex.join(["degarble", "check", target.text, "--checkpoint", "CKPT"])
        why = f"The capture {moved}. Name it: {named}"
        why += "; a capture of a torch model is judged by degarble.harness.api.check(CAPTURE, TWIN)"
        return [DoctorStep(CHECK, "", left_out=why)]
    line = ("check", target.text, *_reference(options), "--report", str(options.out))
    spent = _BEGIN + weight_bytes(Path(source)) / _RUN
    return [DoctorStep(CHECK, "check every component", spent, line)]


def _server(target: DoctorTarget, options: DoctorOptions) -> list[DoctorStep]:
    line = ["probe", target.text, "--report", str(options.out)]
    if options.reference is not None:
        line += ["--against", str(options.reference)]
    if options.prompts is not None:
        line += ["--prompts", str(options.prompts)]
    why = "From outside no component can be named: degarble doctor CKPT --engine "
    why += '"vllm serve CKPT ..." records one run of the engine and names it.'
    return [
        DoctorStep(PROBE, "ask it for the same numbers in several ways", _PROBE, tuple(line)),
        DoctorStep(CHECK, "", left_out=why),
    ]


def _kernel(target: DoctorTarget, options: DoctorOptions) -> list[DoctorStep]:
    del options
    spent = _BEGIN + target.nbytes / _RUN
    return [DoctorStep(JUDGE, "judge the output against exact arithmetic on its operands", spent)]


_STEPS = {
    TargetKind.CHECKPOINT: _checkpoint,
    TargetKind.CAPTURE: _capture,
    TargetKind.SERVER: _server,
    TargetKind.KERNEL: _kernel,
}


def next_command(target: DoctorTarget, options: DoctorOptions, found: Sequence[str]) -> str:
    """Return the command to type next; `found` names the steps that found something wrong."""
    text = shlex.quote(target.text)
    match target.kind:
        case TargetKind.CHECKPOINT if AUDIT in found and options.reference is None:
            return f"degarble audit {text} --against SOURCE"
        case TargetKind.CHECKPOINT if not found and options.engine is None:
            return f'degarble doctor {text} --engine "vllm serve {text}"'
        case TargetKind.CHECKPOINT if not found:
            return f"degarble probe {options.url}"
        case TargetKind.SERVER if found:
            return 'degarble doctor CKPT --engine "vllm serve CKPT"'
        case TargetKind.SERVER if options.reference is None:
            return f"degarble probe {text} --against CKPT"
        case TargetKind.KERNEL if not found:
            return 'degarble doctor CKPT --engine "vllm serve CKPT"'
        case TargetKind.CAPTURE if not found and target.backend in (None, "torch"):
            return f"degarble check {text} --backend NAME"
        case TargetKind.CAPTURE if found and target.source is not None:
            return shlex.join(["degarble", "audit", target.source])
        case TargetKind.CHECKPOINT | TargetKind.KERNEL:
            return same_command(target, options)
    return ""


def same_command(target: DoctorTarget, options: DoctorOptions) -> str:
    """Return the command that is typed again once what was found is mended."""
    given = {
        "--reference": options.reference, "--engine": options.engine, "--prompts": options.prompts,
    }  # fmt: skip
    words = [word for name, value in given.items() if value for word in (name, str(value))]
    return shlex.join(["degarble", "doctor", target.text, *words])
