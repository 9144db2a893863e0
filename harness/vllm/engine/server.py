"""Start one `vllm serve` with the plugin, send requests to it, and end it.

The server is ended by its own process group, never by a name.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from degarble.harness.base.errors import InvalidArgument, MissingDevice
from degarble.harness.vllm import capture as vllm_capture
from degarble.harness.vllm.engine import plants
from degarble.harness.vllm.installed import NAME as PLUGIN
from degarble.harness.vllm.installed import require_vllm

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MODEL = "small"
LOCAL = "127.0.0.1"
CONTEXT, BATCH, SEQUENCES = 2048, 512, 64  # prompts beyond BATCH come in chunks
# Nothing is fetched, told or probed; vLLM's sampler of FlashInfer needs a compiler run of its own.
# Trap: sums over GPUs by NVLink multicast can hang a host whose GPUs are shared.
QUIET = {
    "VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_DEEP_GEMM_WARMUP": "skip", "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "NCCL_NVLS_ENABLE": "0",
}  # fmt: skip
# A server of the proof asks for no key, and is reached from this machine alone.
_OF_THE_CALLER = ("VLLM_API_KEY", vllm_capture.TOKEN_VARIABLE)
_OPEN: set[int] = set()  # groups of servers that run
_ENDS = re.compile(r"(?=\b(?:\w+\.)*\w+(?:Error|Mismatch|Argument|Name|Dependency|Device): )")
_ABOVE = "See root cause above"  # a process that tells of another one
_GRACE = 5.0  # seconds between asking a server to end and ending it


@dataclass(frozen=True)
class ServerCase:
    """A server that the proof starts. `refused`: what its log has to say instead of starting."""

    name: str
    checkpoint: str
    steps: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    graphs: bool = False
    ranks: int = 1
    plant: str = ""
    blamed: tuple[str, str] = ("", "")  # component and cause that check has to name
    dropped: str = ""  # a tensor that the checkpoint is to lack
    refused: str = ""

    def line(self, checkpoint: Path, port: int, told: Path) -> list[str]:
        """Return the command line."""
        own = {"parts": dict(self.parts), "told": str(told)}
        graphs = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 4, 16, 64]}
        return [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint),
            "--served-model-name", MODEL, "--quantization", PLUGIN, "--kv-cache-dtype", "fp8",
            "--block-size", "256", "--tokenizer-mode", "hf", "--max-model-len", str(CONTEXT),
            "--max-num-seqs", str(SEQUENCES), "--max-num-batched-tokens", str(BATCH),
            "--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", "2000000000",
            "--host", "127.0.0.1", "--port", str(port),
            "--additional-config", json.dumps({PLUGIN: own}),
            *(["--compilation-config", json.dumps(graphs)] if self.graphs else [
                "--enforce-eager", "--worker-extension-cls", vllm_capture.EXTENSION,
                "--middleware", vllm_capture.SWITCH]),
            *(["--tensor-parallel-size", str(self.ranks), "--enable-expert-parallel",
               "--disable-custom-all-reduce"] if self.ranks > 1 else []),
        ]  # fmt: skip


class HttpReply(NamedTuple):
    """An answer of HTTP."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Read it."""
        return json.loads(self.body)


@dataclass(frozen=True)
class Caller:
    """Requests to a server, by default one of this machine."""

    port: int
    model: str = MODEL
    host: str = LOCAL
    token: str | None = None

    def call(
        self, path: str, body: object = None, method: str = "", request: str = "", wait: float = 90
    ) -> HttpReply:
        """Ask once. `request`: the id that a capture knows it by."""
        head = {"content-type": "application/json"} | ({"x-request-id": request} if request else {})
        head |= {"authorization": f"Bearer {self.token}"} if self.token else {}
        data = None if body is None else json.dumps(body)
        link = http.client.HTTPConnection(self.host, self.port, timeout=wait)
        try:
            link.request(method or ("GET" if body is None else "POST"), path, data, head)
            answer = link.getresponse()
            return HttpReply(answer.status, answer.read())
        finally:
            link.close()

    def complete(self, prompt: list[int], new: int, request: str = "", **more: Any) -> Any:
        """Return the one choice of a greedy completion, with its token ids."""
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": new, "temperature": 0,
            "return_token_ids": True, **more,
        }  # fmt: skip
        reply = self.call("/v1/completions", body, request=request)
        if reply.status != 200:
            raise ConnectionError(f"{reply.status}: {reply.body[:300]!r}")
        return reply.json()["choices"][0]

    def gauges(self, *names: str) -> dict[str, float]:
        """Return metrics that begin with one of these names, by name and labels."""
        lines = self.call("/metrics").body.decode().splitlines()
        chosen = (line.rpartition(" ") for line in lines if line.startswith(names))
        return {name: float(value) for name, _, value in chosen}


class RunningServer:
    """A started server; a context that ends it."""

    def __init__(self, line: list[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log.open("wb")
        self.path = log
        self.process = subprocess.Popen(  # noqa: S603  our own line, in a group of its own
            line, env=dict(environment), stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        _OPEN.add(self.process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sign)
                self.process.wait(_GRACE)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        _OPEN.discard(self.process.pid)
        self._log.close()

    def answers(self, caller: Caller, seconds: float) -> bool:
        """Return whether it answers; False if it ended, or once the time is up."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if caller.call("/health", wait=5).status == 200:
                    return self.process.poll() is None  # else another server holds the port
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.5)
        return False

    def log_text(self) -> str:
        """Return its log so far."""
        return self.path.read_text(encoding="utf-8", errors="replace")

    def last_words(self) -> str:
        """Return the line of its log that says why it ended."""
        log = self.log_text()
        lines = [each for each in log.splitlines() if _ENDS.search(each) and _ABOVE not in each]
        return _ENDS.split(lines[-1], maxsplit=1)[-1][:300] if lines else log[-300:]


def end_all() -> None:
    """End all servers at once; their contexts do the rest."""
    for group in tuple(_OPEN):
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def require_free(port: int) -> None:
    """Raise if the port is taken: requests would go to another server than ours."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise InvalidArgument(
                "port", port, "one that is free on 127.0.0.1", "End what listens there."
            ) from error


def require_engine(ranks: int = 1) -> str:
    """Return vLLM's version, where it and enough GPUs are; refuse by name elsewhere."""
    found = require_vllm()
    import torch  # noqa: PLC0415  a refusal does without

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < ranks:
        raise MissingDevice(
            "GPUs", count, f"{ranks} that torch sees", "Run it where vLLM can serve: docs/vllm.md."
        )
    return found


def environment(case: ServerCase, captures: Path, site: Path) -> dict[str, str]:
    """Return a server's environment: the plugin by name, captures, and what is planted."""
    named = f"{PLUGIN},{plants.NAME}" if case.plant else PLUGIN
    made = dict(os.environ) | QUIET | {
        "VLLM_PLUGINS": named, vllm_capture.FOLDER_VARIABLE: str(captures),
        plants.VARIABLE: case.plant,
    }  # fmt: skip
    for theirs in _OF_THE_CALLER:
        made.pop(theirs, None)
    if case.plant:
        known = made.get("PYTHONPATH", "")
        made["PYTHONPATH"] = os.pathsep.join(filter(None, (str(plants.entry_point(site)), known)))
    return made
