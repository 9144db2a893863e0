"""ASGI application of the server: models, completions, chat completions, health, metrics."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import traceback
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router

from degarble.harness.capture.options import REQUEST_ID
from degarble.harness.serve import metrics as metering
from degarble.harness.serve.admission import PARSED, MemoryBound, bytes_of
from degarble.harness.serve.capturing import CAPTURE_PATH
from degarble.harness.serve.messages import (
    ApiError,
    FailedSequence,
    TextPiece,
    model_failure,
    server_stopping,
    timed_out,
)
from degarble.harness.serve.replies import ApiReply
from degarble.harness.serve.requests import read_chat, read_completion, read_object

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from starlette.types import Message, Receive, Scope, Send

    from degarble.harness.serve.admission import AccessControl, MemoryShare
    from degarble.harness.serve.capturing import RequestCapture
    from degarble.harness.serve.engine import Engine
    from degarble.harness.serve.messages import Bounds, SequenceResult
    from degarble.harness.serve.metrics import Metrics
    from degarble.harness.serve.requests import CompletionRequest
    from degarble.harness.serve.served_model import ServedModel


# --------------------------------------------------------------------------------------------------
# One request's results until completion, timeout or disconnect. Results cross from the computing
# thread to the event loop of the web side. A disconnect is noticed while waiting too, not only when
# something is sent. However the request ends, its sequences are released.


class ClientDisconnected(Exception):
    """The client disconnected."""


class NoResultYet:
    """No result arrived for a while."""


NO_RESULT_YET = NoResultYet()


class RequestStream:
    """The results of one request. Use it as a context."""

    def __init__(
        self,
        completion_request: CompletionRequest,
        engine: Engine,
        receive: Receive,
        bounds: Bounds,
        request: str = "",
    ) -> None:
        self._bounds, self._receive = bounds, receive
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[SequenceResult | NoResultYet | Exception] = asyncio.Queue()
        self._open = len(completion_request.sequences)
        self._engine = engine
        self._ticket = engine.submit(completion_request.sequences, self._queue_result, request)

    async def __aenter__(self) -> Self:
        """Begin to watch for a disconnect and the timeout."""
        self._watch = self._loop.create_task(self._until_gone())
        self._late = self._loop.call_later(
            self._bounds.seconds, self._queue.put_nowait, timed_out(self._bounds.seconds)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Release the sequences."""
        self._engine.drop(self._ticket)
        self._late.cancel()
        self._watch.cancel()
        with suppress(asyncio.CancelledError):
            await self._watch

    async def pieces(self) -> AsyncIterator[TextPiece | NoResultYet]:
        """Yield pieces until all sequences ended; NO_RESULT_YET where none came for a while."""
        while self._open:
            timer = self._loop.call_later(
                self._bounds.quiet_seconds, self._queue.put_nowait, NO_RESULT_YET
            )
            heard = await self._queue.get()
            timer.cancel()
            if isinstance(heard, Exception):
                raise heard
            if isinstance(heard, FailedSequence):
                raise model_failure(heard.error) from heard.error
            if isinstance(heard, TextPiece):
                self._open -= heard.finish is not None
            yield heard

    def _queue_result(self, heard: SequenceResult) -> None:
        """Pass a result from the computing thread to the loop, unless the loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, heard)

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._queue.put_nowait(ClientDisconnected())


# --------------------------------------------------------------------------------------------------
# The paths. Request bodies are read within their bounds; answers come in one piece or as server-
# sent events. Every error has one form, those of unknown paths included. No code of a request is
# ever run.

if TYPE_CHECKING:
    Reader = Callable[[dict[str, Any], ServedModel], CompletionRequest]

_JSON = "application/json"
_GONE = 499  # as proxies count a client that went away
_DONE = b"data: [DONE]\n\n"
# A comment line of server-sent events, which clients ignore.
_COMMENT = b": still at work\n\n"
_STREAM_HEAD = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """Write JSON with every character as itself; what UTF-8 cannot hold is escaped."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


class Service:
    """The handlers and what they need."""

    def __init__(
        self,
        served: ServedModel,
        engine: Engine,
        gate: AccessControl,
        metrics: Metrics,
        switch: RequestCapture | None = None,
    ) -> None:
        self._served, self._engine, self._gate, self._metrics = served, engine, gate, metrics
        self._switch = switch
        self._memory = MemoryBound(served.bounds.memory_bytes)
        self.stopping = False

    @property
    def ready(self) -> bool:
        """Return whether requests are accepted."""
        return self._engine.ready and not self.stopping

    def app(self) -> CountingApp:
        """Return the ASGI application."""
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
            Route("/health", self._health_ready),
            Route("/health/ready", self._health_ready),
            Route("/health/live", self._health_live),
            Route("/metrics", self._metrics_text),
        ]
        if self._switch is not None:
            routes.append(Route(CAPTURE_PATH, self._capture, methods=["GET", "POST", "DELETE"]))
        known = {route.path for route in routes}
        return CountingApp(Router(routes, redirect_slashes=False), self._gate, self._metrics, known)

    async def _models(self, _request: Request) -> Response:
        return _answer({"object": "list", "data": [self._served.card()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._served.name:
            raise ApiError(404, "this model is not served here", "model", "model_not_found")
        return _answer(self._served.card())

    async def _health_live(self, _request: Request) -> Response:
        return _answer({"status": "live"})

    async def _health_ready(self, _request: Request) -> Response:
        message = "ready" if self.ready else "stopping" if self.stopping else "starting"
        status = 200 if self.ready else 503
        return _answer({"status": message, "live": True, "ready": self.ready}, status)

    async def _metrics_text(self, _request: Request) -> Response:
        running, waiting = self._engine.load
        gauges: metering.Gauges = {
            "running_sequences": [({}, float(running))],
            "waiting_sequences": [({}, float(waiting))],
            "memory_bytes": [({}, float(self._memory.in_use))],
            "ready": [({}, float(self.ready))],
            "info": [(self._served.info(), 1.0)],
            "component_info": [(row, 1.0) for row in self._served.computed],
        }
        return Response(self._metrics.text(gauges), media_type=metering.MEDIA_TYPE)

    async def _capture(self, request: Request) -> Response:
        switch = self._switch
        assert switch is not None, "the path is there only with its switch"
        if request.method == "GET":
            return _answer(switch.state())
        if request.method == "DELETE":
            return _answer(await run_in_threadpool(switch.stop))
        with self._memory.share() as share:
            body = await _body(request, self._served, share)
            return _answer(await run_in_threadpool(lambda: switch.start(read_object(body))))

    async def _completions(self, request: Request) -> Response:
        return await self._speak(request, read_completion)

    async def _chat_completions(self, request: Request) -> Response:
        return await self._speak(request, read_chat)

    async def _speak(self, request: Request, reader: Reader) -> Response:
        with self._memory.share() as share:
            return await self._answered(request, reader, share)

    async def _answered(self, request: Request, reader: Reader, share: MemoryShare) -> Response:
        body = await _body(request, self._served, share)
        if self.stopping:
            raise server_stopping()
        if not self._engine.ready:
            message = "the model is starting; try again"
            raise ApiError(503, message, None, "starting", retry_after=1)
        completion_request = await run_in_threadpool(
            lambda: reader(read_object(body), self._served)
        )
        share.resize(bytes_of(completion_request.sequences, self._served.model.config))
        name = _request_id(request)
        reply = ApiReply(completion_request, self._served, name)
        hearing = RequestStream(
            completion_request, self._engine, request.receive, self._served.bounds, name
        )
        if completion_request.stream:
            return _Stream(hearing, reply, share.transfer())
        reply.begin()  # the beginning of a stream is part of the whole as well
        async with hearing:
            async for piece in hearing.pieces():
                if not isinstance(piece, NoResultYet):
                    reply.add(piece)
        return _answer(reply.complete())


def _request_id(request: Request) -> str:
    """Return the client's own id of a request if it is valid, else a new one."""
    said = request.headers.get("x-request-id", "")
    return said if REQUEST_ID.fullmatch(said) else uuid.uuid4().hex


async def _body(request: Request, served: ServedModel, share: MemoryShare) -> bytes:
    """Read the body within its limits of size and time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != _JSON:
        raise ApiError(415, f"content-type: {_JSON} is expected", None, "unsupported_media_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        message = "content-encoding: only identity is read"
        raise ApiError(415, message, None, "unsupported_media_type")
    most, parts, size = served.bounds.body_bytes, [], 0
    too_large = ApiError(413, f"body: at most {most} bytes are read", None, "body_too_large")
    stated = request.headers.get("content-length", "0")
    if stated.isdecimal() and int(stated[:20]) > most:
        raise too_large
    try:
        async with asyncio.timeout(served.bounds.body_seconds):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large
                share.grow(PARSED * len(part))
                parts.append(part)
    except TimeoutError as error:
        message = f"body: not complete within {served.bounds.body_seconds:g} s"
        raise ApiError(408, message, None, "timeout") from error
    return b"".join(parts)


class _Stream(Response):
    """An answer that is sent while it is computed."""

    def __init__(self, hearing: RequestStream, reply: ApiReply, share: MemoryShare) -> None:
        super().__init__(headers=_STREAM_HEAD)
        del self.headers["content-length"]
        self._hearing, self._reply, self._share = hearing, reply, share

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send it; an error on the way is the stream's last event."""
        with self._share:
            await self._send_all(send)

    async def _send_all(self, send: Send) -> None:
        async with self._hearing:
            head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(head)
            async for part in self._parts():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _parts(self) -> AsyncIterator[bytes]:
        reply = self._reply
        try:
            for chunk in reply.begin():
                yield _event(chunk)
            async for piece in self._hearing.pieces():
                if isinstance(piece, NoResultYet):
                    yield _COMMENT
                else:
                    yield b"".join(map(_event, reply.add(piece)))
            for chunk in reply.end():
                yield _event(chunk)
        except ClientDisconnected:
            return
        except ApiError as error:
            yield _event(error.document())
            return
        yield _DONE


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + json_bytes(document) + b"\n\n"


def _answer(
    document: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(json_bytes(document), status, headers, media_type=_JSON)


def _api_error_of(error: Exception, scope: Scope) -> ApiError:
    """Turn whatever ended a request into an API error, unknown paths and methods included."""
    if isinstance(error, HTTPException):
        message = f"{scope['method']} {scope['path'][:200]}: {error.detail}"
        return ApiError(error.status_code, message, None, "unknown_url")
    if not isinstance(error, ApiError):
        traceback.print_exception(error, file=sys.stderr)
    return model_failure(error)


class CountingApp:
    """The application after its access check; counts answers and gives every error one form."""

    def __init__(
        self, inner: Router, gate: AccessControl, metrics: Metrics, known: set[str]
    ) -> None:
        self._inner, self._gate, self._metrics, self._known = inner, gate, metrics, known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        begin, status = time.perf_counter(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        scope["app"] = self  # for which starlette raises what it does not know, instead of text
        try:
            self._gate.admit(scope["path"], Request(scope).headers)
            await self._inner(scope, receive, noting)
        except (ClientDisconnected, ClientDisconnect):
            status = status or _GONE
        except Exception as error:  # noqa: BLE001  every failure is answered in one form
            api_error = _api_error_of(error, scope)
            if not status:
                answer = _answer(api_error.document(), api_error.status, api_error.headers())
                await answer(scope, receive, noting)
        finally:
            path = scope["path"] if scope["path"] in self._known else "other"
            self._metrics.count("requests_total", path=path, status=str(status))
            self._metrics.observe("request_seconds", time.perf_counter() - begin)
