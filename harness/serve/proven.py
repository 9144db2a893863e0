"""Prove a checkpoint and its kernels, then serve: audit, known answers, first minute, server.

`python -m degarble.harness.serve.proven CKPT ... -- COMMAND...` is the start of a container.
COMMAND starts only when every step before it has passed. The health endpoint reports the steps, and
`ready` only when the server answers and its text agrees with the reference. A failure is reported
by step and reason, with the tensor's name, and stays reported: nothing restarts by itself. A signal
ends the server first, then this process. Missing checkpoints or files and a port that is taken exit
with status 2.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.responses import Response

from degarble.harness.base.errors import EXIT_AGREES, DegarbleError, InvalidArgument, Refused
from degarble.harness.serve.app import json_bytes
from degarble.harness.serve.messages import Bounds
from degarble.harness.serve.serving import Listener, bound_socket, quiet_logs
from degarble.harness.serve.smoke import Server, read_answers, smoke

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.types import Receive, Scope, Send

STARTING, READY, FAILED, ENDING = "starting", "ready", "failed", "ending"
_PROBE_SECONDS = 0.5
_END_SECONDS = 40.0
_MOST_NAMED = 5
_BLACKWELL = 10  # compute capability 10.x
_MINUTE_SECONDS = 600.0
_TOKEN_VARIABLES = ("DEGARBLE_SERVE_TOKEN", "VLLM_API_KEY")  # ours, and vLLM's


class StepFailed(Exception):
    """A step that did not pass; its text is the reason."""


class StartStep(NamedTuple):
    """One step: its name and its function, which returns a sentence or raises Failed."""

    name: str
    run: Callable[[], str]


@dataclass(frozen=True)
class StartOptions:
    """What is proven, and what is served. `gpu`: kernels are proven on it."""

    checkpoint: Path
    command: tuple[str, ...]
    url: str
    answers: Path
    against: Path | None = None
    loader: str | None = None
    numbers: bool = True
    gpu: bool = True
    seconds: float = 3600.0  # until the server answers
    token: str | None = field(default=None, repr=False)


@dataclass
class StartProgress:
    """What the health endpoint reports."""

    status: str = STARTING
    step: str = ""
    reason: str = ""
    passed: dict[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        return {
            "status": self.status, "ready": self.status == READY, "live": True, "step": self.step,
            "reason": self.reason, "passed": self.passed,
        }  # fmt: skip


class ProvenStart:
    """The sequence of steps, run in a thread; the health endpoint answers meanwhile."""

    def __init__(self, start_options: StartOptions, say: Callable[[str], None]) -> None:
        self._options, self._say = start_options, say
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = threading.Event()
        self.progress = StartProgress()

    def steps(self) -> list[StartStep]:
        """Return all steps in order."""
        return [
            StartStep("audit", self._audit),
            StartStep("known answers", _known_answers),
            StartStep("first minute", self._first_minute),
            StartStep("serve", self._serve),
            StartStep("coherence", self._coherence),
        ]

    def run(self) -> None:
        """Run the steps, then watch the server."""
        progress = self.progress
        try:
            for step in self.steps():
                progress.step = step.name
                self._say(f"{step.name}: begins")
                progress.passed[step.name] = message = step.run()
                self._say(f"{step.name}: {message}")
            progress.status, progress.step = READY, ""
            self._say("ready")
            self._watch()
        except Exception as error:  # noqa: BLE001  whatever a step meets, it is never ready
            if self._ending.is_set():
                return
            reason = str(error) if isinstance(error, (StepFailed, DegarbleError)) else repr(error)
            progress.status, progress.reason = FAILED, f"{progress.step}: {reason}"
            self._say(f"FAILED {progress.reason}")
            self._end_server()

    def end(self) -> None:
        """End the server."""
        self._ending.set()
        if self.progress.status != FAILED:
            self.progress.status = ENDING
        self._end_server()

    def _audit(self) -> str:
        from degarble.harness.checkpoint.audit.rules import Level  # noqa: PLC0415  as below
        from degarble.harness.commands.audit.audit import AuditRequest, audit  # noqa: PLC0415  imports torch

        start_options = self._options
        found = audit(
            AuditRequest(
                start_options.checkpoint,
                start_options.numbers,
                start_options.loader,
                start_options.against,
            )
        )
        errors = [finding for finding in found.findings if finding.level is Level.ERROR]
        if not errors:
            return found.sentence
        named = [
            f"{error.rule} at {error.tensor or error.module or 'the checkpoint'}"
            for error in errors[:_MOST_NAMED]
        ]
        raise StepFailed(f"{found.sentence} {'; '.join(named)}")

    def _first_minute(self) -> str:
        """Run this device's kernels on values whose results are known to the byte."""
        if not self._options.gpu:
            return "not requested: --cpu"
        from degarble.harness.nightly.kernels import (  # noqa: PLC0415  imports torch
            NO_SUITES,
            installed_suites,
            kernels,
        )
        from degarble.harness.nightly.night import NightConfig  # noqa: PLC0415  as above
        from degarble.harness.report.verdict import Verdict  # noqa: PLC0415  as below

        suites = installed_suites()
        if suites is None:
            raise StepFailed(NO_SUITES)
        own = self._options.checkpoint
        result = kernels(NightConfig(own, own, own, night="", gpu=True), {})
        if result.verdict is not Verdict.AGREES:
            raise StepFailed(result.sentence)
        import torch  # noqa: PLC0415  as above

        if torch.cuda.get_device_capability()[0] != _BLACKWELL:
            return result.sentence
        return f"{result.sentence} {in_a_process((sys.executable, '-m', suites.first_minute))}"

    def _serve(self) -> str:
        start_options = self._options
        try:
            self._process = subprocess.Popen(  # noqa: S603
                start_options.command, env=_environment(start_options.token)
            )
        except OSError as error:
            raise StepFailed(f"{start_options.command[0]} cannot be started: {error}") from error
        server, begin = Server(start_options.url, seconds=5), time.monotonic()
        while not self._answers(server):
            if time.monotonic() - begin > start_options.seconds:
                raise StepFailed(f"the server did not answer within {start_options.seconds:g} s")
            self._still_runs()
            if self._ending.wait(_PROBE_SECONDS):
                raise StepFailed("ended while it started")
        return f"it answers after {time.monotonic() - begin:.0f} s"

    @staticmethod
    def _answers(server: Server) -> bool:
        try:
            return server.ask("/health")[0] == 200
        except Refused:
            return False

    def _still_runs(self) -> None:
        assert self._process is not None, "the server is watched after its start"
        status = self._process.poll()
        if status is not None:
            raise StepFailed(f"the server ended with status {status}")

    def _coherence(self) -> str:
        checks = list(
            smoke(
                Server(self._options.url, self._options.token), read_answers(self._options.answers)
            )
        )
        wrong = [check.line() for check in checks if check.holds is False]
        if wrong:
            raise StepFailed("; ".join(wrong[:_MOST_NAMED]))
        return f"{sum(check.holds is True for check in checks)} checks passed"

    def _watch(self) -> None:
        self.progress.step = "serve"
        while not self._ending.wait(_PROBE_SECONDS):
            self._still_runs()

    def _end_server(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def in_a_process(command: Sequence[str]) -> str:
    """Run this device's first minute in a process; return its last line, or raise Failed."""
    done = subprocess.run(  # noqa: S603  a module of ours
        command, capture_output=True, text=True, timeout=_MINUTE_SECONDS, check=False
    )
    lines = (done.stdout + done.stderr).strip().splitlines() or ["nothing was said"]
    if done.returncode:
        raise StepFailed(f"{lines[-1]} (status {done.returncode})")
    return lines[-1]


def _environment(token: str | None) -> dict[str, str]:
    """Return the server's environment: a token is passed by variable, never on the command line."""
    named = {} if token is None else dict.fromkeys(_TOKEN_VARIABLES, token)
    return {**os.environ, **named}


def _token(file: Path | None) -> str | None:
    if file is None:
        return next((os.environ[each] for each in _TOKEN_VARIABLES if os.environ.get(each)), None)
    try:
        found = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(
            "--token-file", str(file), f"a file with a token ({type(error).__name__})",
            "Check the path.",
        ) from error  # fmt: skip
    if not found:
        raise InvalidArgument("--token-file", str(file), "a token", "Write one into it.")
    return found


def _known_answers() -> str:
    from degarble.harness.nightly.codecs import count, wrong_codecs  # noqa: PLC0415  torch

    wrong = wrong_codecs()
    if wrong:
        raise StepFailed(f"{len(wrong)} of {count()} differ: {wrong[0]}")
    return f"{count()} answers of the formats are right"


class HealthApp:
    """The health endpoint."""

    def __init__(self, progress: StartProgress) -> None:
        self._progress = progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        known = {"/health", "/health/ready", "/health/live"}
        found = self._progress.document()
        status = 200 if found["ready"] or scope["path"] == "/health/live" else 503
        if scope["path"] not in known:
            status, found = 404, {"status": "unknown path"}
        answer = Response(json_bytes(found), status, media_type="application/json")
        await answer(scope, receive, send)


def prove_and_serve(
    start_options: StartOptions, host: str, port: int, say: Callable[[str], None]
) -> int:
    """Prove, serve, and answer at the health endpoint until a signal arrives."""
    quiet_logs()
    proven = ProvenStart(start_options, say)
    with bound_socket(host, port) as listening:
        thread = threading.Thread(target=proven.run, name="degarble-proven", daemon=True)
        listener = Listener(HealthApp(proven.progress), Bounds(), lambda: None)
        say(f"health at http://{host}:{listening.getsockname()[1]}/health")
        thread.start()
        try:
            listener.run(sockets=[listening])
        finally:
            proven.end()
    return int(proven.progress.status == FAILED)


def read_line(arguments: Sequence[str]) -> tuple[StartOptions, str, int]:
    """Parse the command line; raise before anything runs if something is missing."""
    own, command = list(arguments), list[str]()
    if "--" in own:
        at = own.index("--")
        own, command = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(prog="python -m degarble.harness.serve.proven")
    parser.add_argument("checkpoint", type=Path, metavar="CKPT")
    parser.add_argument("--answers", type=Path, required=True, metavar="FILE", help="see smoke")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where COMMAND answers")
    parser.add_argument("--against", type=Path, metavar="CKPT", help="as degarble audit")
    parser.add_argument("--loader", metavar="MAP", help="as degarble audit")
    parser.add_argument("--structure-only", action="store_true", help="read no numbers")
    parser.add_argument("--cpu", action="store_true", help="no kernel is tested")
    parser.add_argument(
        "--seconds", type=float, default=StartOptions.seconds, help="until COMMAND answers"
    )
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="the API's token")
    parser.add_argument("--health-host", default="127.0.0.1")
    parser.add_argument("--health-port", type=int, default=8001)
    asked = parser.parse_args(own)
    for name in ("checkpoint", "answers", "against"):
        path = getattr(asked, name)
        if path is not None and not path.exists():
            raise InvalidArgument(f"--{name}", str(path), "a path that is there", "Check the path.")
    if not command:
        raise InvalidArgument(
            "COMMAND", "none", "the server's command after --", "Give: -- degarble serve CKPT."
        )
    read_answers(asked.answers)
    start_options = StartOptions(
        asked.checkpoint, tuple(command), asked.url, asked.answers, asked.against, asked.loader,
        not asked.structure_only, not asked.cpu, asked.seconds, _token(asked.token_file),
    )  # fmt: skip
    return start_options, asked.health_host, asked.health_port


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sequence of a container."""

    def say(text: str) -> None:
        sys.stderr.write(f"degarble: {text}\n")
        sys.stderr.flush()

    try:
        start_options, host, port = read_line(sys.argv[1:] if arguments is None else arguments)
        return prove_and_serve(start_options, host, port, say) or EXIT_AGREES
    except Refused as error:
        say(str(error))
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
