"""Start a user's own `vllm serve` command with the capture switch, and record a few requests.

The words are those of the command; what a capture needs is added at its end. No shell reads it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import (
    InvalidArgument,
    MissingDependency,
    UnusableServer,
    WorkerLost,
)
from degarble.harness.vllm import capture as vllm_capture
from degarble.harness.vllm.engine.server import LOCAL, Caller, RunningServer, require_free

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

START_SECONDS = 1800.0
_CLOSE_SECONDS = 600.0
_PORT = 8000  # vLLM's own default
_MODULE = "vllm.entrypoints.openai.api_server"
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.ASCII | re.DOTALL)
_SHELL = {"&&", "||", "|", ";", "&", ">", ">>", "2>&1", "<"}
_ANY_HOST = {"", "0.0.0.0", "::", "localhost", LOCAL}  # noqa: S104  what a server may name


@dataclass(frozen=True)
class EngineCommand:
    """A command line that starts vLLM: its variables, its words, and what requests need of it."""

    words: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_text(cls, text: str) -> EngineCommand:
        """Read a command line; refuse one that a shell would have to run, or that is not vLLM's."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise _unread(text, f"a command line: {error}") from error
        variables: dict[str, str] = {}
        while words and _ASSIGNMENT.fullmatch(words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if not words or _SHELL & set(words):
            raise _unread(text, "one command, without pipes or a second command")
        command = cls(tuple(words), variables)
        if command._after is None:
            raise _unread(text, "vllm serve CKPT ..., as you start it on this machine")
        for option in ("--ssl-keyfile", "--uds", "--pipeline-parallel-size", "-pp"):
            if command.option(option) not in (None, "1"):
                raise InvalidArgument(
                    "--engine", option, "a command without it: such an engine is not captured",
                    "Leave the option out for this run.",
                )  # fmt: skip
        return command

    @property
    def _after(self) -> int | None:
        """Return the place after the words that name the program; None for another program."""
        for place, word in enumerate(self.words):
            if word == _MODULE and self.words[place - 1] == "-m":
                return place + 1
            if word == "serve" and any("vllm" in name for name in self.words[:place]):
                return place + 1
        return None

    def option(self, *names: str) -> str | None:
        """Return the value of an option: empty for a flag, None where it is not given."""
        for place, word in enumerate(self.words):
            name, joined, value = word.partition("=")
            if name.replace("_", "-") in names:
                following = self.words[place + 1 : place + 2]
                alone = joined or not following or following[0].startswith("-")
                return value if alone else following[0]
        return None

    @property
    def model(self) -> str:
        """Return the checkpoint that it serves."""
        assert self._after is not None, "refused where it was read"
        stated = self.option("--model")
        following = self.words[self._after : self._after + 1]
        if stated is None and following and not following[0].startswith("-"):
            stated = following[0]
        if not stated:
            raise InvalidArgument(
                "--engine", " ".join(self.words), "a checkpoint: the word after `serve`",
                "Write it so: vllm serve CKPT ...",
            )  # fmt: skip
        return stated

    @property
    def port(self) -> int:
        """Return the port that it listens at."""
        stated = self.option("--port") or str(_PORT)
        if not stated.isdecimal() or not 0 < int(stated) < 1 << 16:
            raise InvalidArgument("--port", stated, "a port", "Name one from 1 to 65535.")
        return int(stated)

    @property
    def host(self) -> str:
        """Return where this machine reaches it."""
        stated = self.option("--host") or ""
        return LOCAL if stated in _ANY_HOST else stated

    @property
    def loader(self) -> str:
        """Return the map for `audit --loader`: vLLM's, for this command's ranks."""
        stated = self.option("--tensor-parallel-size", "-tp") or "1"
        if not stated.isdecimal() or int(stated) < 1:
            raise InvalidArgument(
                "--tensor-parallel-size", stated, "a number of GPUs", "Write it as a whole number."
            )
        ranks = int(stated)
        if ranks == 1:
            return "vllm"
        expert = self.option("--enable-expert-parallel", "-ep") is not None
        return f"vllm:tp={ranks},ep={ranks}" if expert else f"vllm:tp={ranks}"

    def recorded(self) -> list[str]:
        """Return the words with what a capture needs."""
        words = list(self.words)
        extension = self.option("--worker-extension-cls")
        if extension not in (None, vllm_capture.EXTENSION):
            raise InvalidArgument(
                "--engine", f"--worker-extension-cls {extension}",
                f"no other extension than {vllm_capture.EXTENSION}", "Leave it out for this run.",
            )  # fmt: skip
        if self.option("--enforce-eager") is None:
            words.append("--enforce-eager")
        if extension is None:
            words += ["--worker-extension-cls", vllm_capture.EXTENSION]
        switch = vllm_capture.SWITCH
        return words if switch in words else [*words, "--middleware", switch]

    def require_startable(self) -> None:
        """Refuse a program that is not there, and a port that is taken."""
        self.recorded()
        port = self.port
        if shutil.which(self.words[0], path=self.variables.get("PATH")) is None:
            raise MissingDependency(
                "--engine", self.words[0], "a program on this machine's PATH",
                "Activate the environment that has vLLM, or name the program with its whole path.",
            )  # fmt: skip
        require_free(port)


def is_engine_command(text: str) -> bool:
    """Return whether a text is a command line that starts vLLM."""
    try:
        return len(text.split()) > 1 and EngineCommand.from_text(text)._after is not None  # noqa: SLF001  its own class
    except InvalidArgument:
        return False


@dataclass(frozen=True)
class RecordingEngine:
    """An engine that answers, started with the capture switch."""

    caller: Caller
    key: str | None  # of the engine's own interface
    token: str  # of the capture switch
    captures: Path

    def capture(self, prompts: Sequence[str], new: int, tell: Callable[[str], None]) -> Path:
        """Record requests with these prompts, `new` tokens each; return the capture's folder."""
        models = self._asked("/v1/models", None, self.key)
        model = next((one.get("id") for one in models.get("data") or ()), None)
        if model is None:
            raise UnusableServer(
                "/v1/models", json.dumps(models)[:300], "a model", "Look at the engine's log."
            )
        self._asked(vllm_capture.PATH, {"count": len(prompts)}, self.token)
        for number, prompt in enumerate(prompts, 1):
            tell(f"prompt {number} of {len(prompts)}")
            body = {"model": model, "prompt": prompt, "max_tokens": new, "temperature": 0}
            self._asked("/v1/completions", body, self.key)
        tell("writing the capture")
        closed = self._asked(vllm_capture.PATH, None, self.token, "DELETE")
        return self.captures / Path(str(closed.get("capture"))).name

    def _asked(
        self, path: str, body: object, token: str | None, method: str = ""
    ) -> dict[str, Any]:
        try:
            caller = replace(self.caller, token=token)
            reply = caller.call(path, body, method, wait=_CLOSE_SECONDS)
            found: dict[str, Any] = dict(reply.json())
        except (OSError, HTTPException, ValueError, TypeError) as error:
            raise UnusableServer(
                path, f"{type(error).__name__}: {error}", "an answer of the engine",
                "Look at the engine's log.",
            ) from error  # fmt: skip
        if reply.status != 200:
            raise UnusableServer(
                path, f"status {reply.status}: {json.dumps(found)[:300]}", "status 200",
                "Look at the engine's log.",
            )  # fmt: skip
        return found


@contextmanager
def recording_engine(
    command: EngineCommand, captures: Path, log: Path, tell: Callable[[str], None]
) -> Iterator[RecordingEngine]:
    """Start the command, wait until it answers, and end it with this context."""
    command.require_startable()
    captures.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(16)
    around = dict(os.environ) | command.variables
    key = command.option("--api-key") or around.get("VLLM_API_KEY")
    around[vllm_capture.FOLDER_VARIABLE] = str(captures.resolve())
    around[vllm_capture.TOKEN_VARIABLE] = token
    with RunningServer(command.recorded(), around, log) as server:
        caller = Caller(command.port, host=command.host)
        tell("waiting until it answers")
        if not server.answers(caller, START_SECONDS):
            ended = server.process.poll()
            found = "no answer" if ended is None else f"it ended with status {ended}"
            raise WorkerLost(
                " ".join(command.words[:3]), f"{found}: {server.last_words()}",
                "a server that answers", f"Mend that; the whole log is {log}",
            )  # fmt: skip
        yield RecordingEngine(caller, key, token, captures)


def _unread(text: str, expectation: str) -> InvalidArgument:
    return InvalidArgument(
        "--engine", text, expectation, 'For example --engine "vllm serve CKPT --port 8000".'
    )
