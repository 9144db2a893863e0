"""Run `degarble serve`: sockets and connections, model, computing thread, web side, shutdown."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import h11
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.inference.model import open_model
from degarble.harness.serve.admission import AccessControl
from degarble.harness.serve.app import Service, json_bytes
from degarble.harness.serve.capturing import RequestCapture
from degarble.harness.serve.engine import Engine
from degarble.harness.serve.messages import ApiError, Bounds
from degarble.harness.serve.metrics import Metrics
from degarble.harness.serve.served_model import ServedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from starlette.types import ASGIApp


# --------------------------------------------------------------------------------------------------
# Sockets and connections: listening, timeouts, limits, shutdown; what uvicorn leaves open.
#
# It adds timeouts for a request's head and for a client that reads nothing, a bound of connections,
# errors for broken HTTP in the form of all others, and signals that end the server with status 0. A
# signal lets running requests end within their time; a second one does not wait. A client that
# closes its side counts as disconnected.

_PHRASES = {400: "Bad Request", 408: "Request Timeout", 503: "Service Unavailable"}
_HEAD_BYTES = 32 << 10
_GRACE_SECONDS = 5  # for answers that are being written when the time to drain is over


def bound_socket(host: str, port: int) -> socket.socket:
    """Listen on a port of this machine, or raise with the option's name."""
    try:
        kind, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(kind, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(
            "--host", host, f"a host of this machine ({error})", "Give 127.0.0.1, or its address."
        ) from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(place)
        # Trap: two sockets that do not listen yet may share a port under SO_REUSEADDR.
        made.listen(128)
    except OSError as error:
        made.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise InvalidArgument(
                "--port", port, f"a free port of {host} ({os.strerror(error.errno)})",
                "Give another one; 0 chooses a free port.",
            ) from error  # fmt: skip
        raise InvalidArgument(
            "--host", host, f"an address of this machine ({error.strerror})",
            "Give 127.0.0.1, or one of its addresses.",
        ) from error  # fmt: skip
    return made


class Connection(H11Protocol):
    """One connection with timeouts."""

    bounds: Bounds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head; reject one connection too many."""
        super().connection_made(transport)
        self._head: asyncio.TimerHandle | None = None
        self._tail: asyncio.TimerHandle | None = None  # rest of a body answered early
        self._stall: asyncio.TimerHandle | None = None
        if len(self.connections) > self.bounds.connections:
            message = f"{self.bounds.connections} connections are open"
            self._refuse(ApiError(503, message, None, "connections", retry_after=1))
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        for timer in (self._head, self._tail, self._stall):
            _off(timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Time how long a head takes."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_head()
        else:
            self._head = _off(self._head)
        if self.conn.their_state is not h11.SEND_BODY:
            self._tail = _off(self._tail)

    def on_response_complete(self) -> None:
        """Read a rejected request's body to its end, within a time, so that its sender gets why."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and self._tail is None:
            self._tail = self.loop.call_later(self.bounds.body_seconds, self.transport.abort)

    def pause_writing(self) -> None:
        """Start the timer of a client that reads nothing."""
        super().pause_writing()
        self._stall = self._stall or self.loop.call_later(
            self.bounds.stall_seconds, self.transport.abort
        )

    def resume_writing(self) -> None:
        """Stop the timer: the client has read."""
        self._stall = _off(self._stall)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse broken HTTP in the form of all refusals."""
        self._refuse(ApiError(400, msg, None, "invalid_http"))

    def handle_websocket_upgrade(self, _event: h11.Request) -> None:
        """Answer an upgrade to web sockets with status 400."""
        self._refuse(ApiError(400, "no upgrade is known here", None, "invalid_http"))

    def _await_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(self.bounds.head_seconds, self._no_head)

    def _no_head(self) -> None:
        message = f"the request's head was not complete within {self.bounds.head_seconds:g} s"
        self._refuse(ApiError(408, message, None, "timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Write a whole error answer and close."""
        if self.transport.is_closing():
            return
        body = json_bytes(error.document())
        head = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **error.headers(),
        }
        lines = [f"HTTP/1.1 {error.status} {_PHRASES[error.status]}"]
        lines += [f"{name}: {value}" for name, value in head.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()


def _off(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Stop a timer; return its replacement, None."""
    if timer is not None:
        timer.cancel()
    return None


class Listener(Server):
    """Uvicorn's server, ended by signals with status 0; `stopping` is called when it begins to."""

    def __init__(self, app: ASGIApp, bounds: Bounds, stopping: Callable[[], None]) -> None:
        protocol = type("BoundedConnection", (Connection,), {"bounds": bounds})
        config = Config(
            app, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, h11_max_incomplete_event_size=_HEAD_BYTES,
            timeout_graceful_shutdown=int(bounds.drain_seconds) + _GRACE_SECONDS,
        )  # fmt: skip
        super().__init__(config)
        self._bounds, self._tell_stopping = bounds, stopping
        self.give_up: Callable[[], None] = lambda: None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM while the server runs, then restore the old handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wanted = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:  # noqa: ARG002  signal's own call
        """Begin to end; end at once the second time."""
        if self.should_exit:
            self.force_exit = True
            self.give_up()
        self.should_exit = True
        self._tell_stopping()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests end within their time."""
        self._tell_stopping()
        timer = asyncio.get_running_loop().call_later(self._bounds.drain_seconds, self.give_up)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def quiet_logs() -> None:
    """Broken requests are answered, and no line each is written to stderr for them."""
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


# --------------------------------------------------------------------------------------------------
# The run. The port is taken first, so that a server that cannot listen loads nothing. Readiness
# comes with the first token; an error there ends the server with that error. Whatever ends the web
# side also ends the thread before files are released.


@dataclass(frozen=True)
class Serving:
    """Where and how a checkpoint is served. `anyone`: without a token, under any name."""

    checkpoint: Path
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    token: str | None = field(default=None, repr=False)
    anyone: bool = False
    numerics: str | None = None
    bounds: Bounds = field(default_factory=Bounds)
    captures: Path | None = None  # the folder that the capture switch writes to


def serve(serving: Serving, say: Callable[[dict[str, str]], None]) -> None:
    """Serve until a signal arrives; `say` receives what is served and where, once."""
    quiet_logs()
    with (
        bound_socket(serving.host, serving.port) as listening,
        open_model(serving.checkpoint, serving.numerics) as model,
    ):
        served = ServedModel(
            model, serving.name or serving.checkpoint.resolve().name, serving.bounds
        )
        metrics = Metrics()
        switch = None if serving.captures is None else RequestCapture(serving.captures, model)
        engine = Engine(
            model.logits_model, served.tokenizer, serving.bounds.sequences, metrics, switch
        )
        gate = AccessControl.for_host(serving.host, serving.token, anyone=serving.anyone)
        service = Service(served, engine, gate, metrics, switch)

        def stopping() -> None:
            service.stopping = True

        listener = Listener(service.app(), serving.bounds, stopping)
        listener.give_up = engine.stop
        place = listening.getsockname()
        host = f"[{place[0]}]" if ":" in place[0] else place[0]
        say({"model": served.name, "mark": served.mark, "url": f"http://{host}:{place[1]}/v1"})

        def ended() -> None:
            listener.should_exit = True

        engine.start(ended)
        try:
            listener.run(sockets=[listening])
        finally:
            engine.stop()
            engine.join()
            if switch is not None:
                switch.close()
    if engine.failure is not None:
        raise engine.failure
