"""Servers that do not behave: a typed error or what was gathered, always in time."""

from __future__ import annotations

import gzip
import http.client
import json
import signal
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import InvalidArgument, UnknownName, UnusableServer
from degarble.harness.probe.client import Call, Client, LimitReached, RequestLimits
from degarble.harness.probe.server import explore
from degarble.suites.commands.calls import call
from degarble.suites.hang_guard import HANG_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LIMITS = RequestLimits(rate=1e6, request_seconds=0.6, seconds=20, body_bytes=100_000)
TOKEN = "a-token-that-nobody-may-see"
MODELS = {"object": "list", "data": [{"id": "m", "owned_by": "x"}]}


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"content-length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def send_json(handler: BaseHTTPRequestHandler, document: object, status: int = 200) -> None:
    send(handler, status, json.dumps(document).encode(), content_type="application/json")


@contextmanager
def answering(answer: Callable[[Any], None]) -> Iterator[str]:
    """A server whose every request goes to one function."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", "0")))
            answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """The client closes connections of answers that it does not take."""

    server = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(0.01), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def html(handler: Any) -> None:
    send(handler, 200, b"<html><h1>Sign in</h1></html>", content_type="text/html")


def redirect(handler: Any) -> None:
    send(handler, 302, b"", location="https://elsewhere.example/v1/models?secret=1")


def huge(handler: Any) -> None:
    send(handler, 200, b" " * 300_000, content_type="application/json")


def short(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    handler.wfile.write(b"{")
    handler.close_connection = True


def silent(handler: Any) -> None:
    time.sleep(1.5)
    handler.close_connection = True


def dripping(handler: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(30):
        handler.wfile.write(b" ")
        time.sleep(0.05)


def not_an_object(handler: Any) -> None:
    send_json(handler, ["a list"])


def locked(handler: Any) -> None:
    send_json(handler, {"error": {"message": "who are you?\x1b[2J"}}, 401)


def nothing(handler: Any) -> None:
    send_json(handler, {"detail": "Not Found"}, 404)


def loading(handler: Any) -> None:
    send(handler, 503, b'{"error": {"message": "loading"}}', retry_after="60")


def no_model(handler: Any) -> None:
    send_json(handler, {"object": "list", "data": []})


def bomb(handler: Any) -> None:
    packed = gzip.compress(b'{"pad": "' + b" " * 300_000 + b'"}')
    send(handler, 200, packed, content_type="application/json", content_encoding="gzip")


def packed_otherwise(handler: Any) -> None:
    send(handler, 200, b"{}", content_type="application/json", content_encoding="br")


def models_alone(handler: Any) -> None:
    if handler.path == "/v1/models":
        send_json(handler, MODELS)
    else:
        send_json(handler, {"detail": "Not Found"}, 404)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (html, "text/html"),
        (redirect, "redirect (302) to https://elsewhere.example"),
        (huge, "more than 100,000 bytes"),
        (short, "1 of 1000 bytes"),
        (silent, "no whole answer within 0.6 s"),
        (dripping, "no whole answer within 0.6 s"),
        (not_an_object, "a list"),
        (locked, "who are you?"),
        (nothing, "Not Found"),
        (models_alone, "completions: status 404"),
        (loading, "a server that is ready"),
        (no_model, "an empty list"),
        (bomb, "more than 100,000 bytes"),
        (packed_otherwise, "content-encoding br"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_server_that_is_none_is_refused_in_time(answer: Callable[[Any], None], told: str) -> None:
    with answering(answer) as url, pytest.raises(UnusableServer) as caught:
        explore(Client(url, TOKEN, LIMITS), None, ("a text",))
    assert told in str(caught.value)
    assert TOKEN not in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


_TEXT = "a line\u2028of\u0085one text"


def test_a_stream_is_cut_at_its_own_line_ends_alone() -> None:
    event = json.dumps({"choices": [{"text": _TEXT}], "error": None}, ensure_ascii=False)
    raw = f"\ufeff: a comment\r\n\r\ndata: {event}\r\n\r\ndata: [DONE]\r\n\r\n".encode()
    with answering(lambda h: send(h, 200, raw, content_type="text/event-stream")) as url:
        reply = Client(url, None, LIMITS).ask("/v1/completions", {"stream": True})
    assert reply.ended
    assert [event["choices"][0]["text"] for event in reply.events] == [_TEXT]


def test_an_answer_that_a_proxy_compressed_is_read() -> None:
    raw = gzip.compress(json.dumps(MODELS).encode())
    with answering(lambda h: send(h, 200, raw, content_encoding="gzip")) as url:
        assert Client(url, None, LIMITS).ask("/v1/models").document == MODELS


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/models"])
def test_the_address_of_an_endpoint_is_that_of_its_server(path: str) -> None:
    assert Client(f"http://host/openai{path}", None, LIMITS).url == "http://host/openai"


def _refused_otherwise(handler: Any, refusal: Callable[[Any], None]) -> None:
    """Answer chats, and everything else as some servers do what they do not know."""
    if handler.path == "/v1/models":
        send_json(handler, MODELS)
    elif handler.path == "/v1/chat/completions":
        send_json(handler, {"choices": [{"message": {"content": "yes"}}]})
    else:
        refusal(handler)


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        (html, "text/html"),
        (lambda h: send_json(h, {"error": "Unexpected endpoint"}), "Unexpected endpoint"),
        (lambda h: h.connection.shutdown(socket.SHUT_RDWR), "closed connection"),
    ],
    ids=["page", "error with status 200", "dropped"],
)
def test_what_is_not_served_is_left_out_by_name(refusal: Callable[[Any], None], told: str) -> None:
    with answering(lambda handler: _refused_otherwise(handler, refusal)) as url:
        server = explore(Client(url, None, LIMITS), None, ("a text",))
    assert server.chat_only
    assert told in server.lacks["completions"]


def test_nobody_listens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(html) as url:
        pass
    done = call(capsys, "probe", url, f"--json={tmp_path / 'probe.json'}")
    assert (done.status, done.out) == (2, "")
    assert "connection refused" in done.err


def test_requests_are_bounded_and_dropped_ones_are_tried_once_more() -> None:
    seen = []

    def flaky(handler: Any) -> None:
        seen.append(handler.headers.get("authorization"))
        (short if len(seen) == 1 else models_alone)(handler)

    with answering(flaky) as url:
        client = Client(url, TOKEN, RequestLimits(requests=3, rate=1e6, request_seconds=5))
        assert client.ask("/v1/models").document == MODELS
        assert client.traffic.dropped == 1
        client.ask("/v1/models")
        with pytest.raises(LimitReached, match="3 requests"):
            client.ask("/v1/models")
    assert seen == [f"Bearer {TOKEN}"] * 3


def test_a_busy_server_is_waited_for() -> None:
    answers = iter((429, 503, 200))

    def busy(handler: Any) -> None:
        status = next(answers)
        body = json.dumps(MODELS if status == 200 else {}).encode()
        send(handler, status, body, retry_after="0")

    with answering(busy) as url:
        client = Client(url, None, LIMITS)
        assert client.ask("/v1/models").status == 200
    assert (client.traffic.retried, client.traffic.requests) == (2, 3)


def test_the_rate_is_kept() -> None:
    with answering(models_alone) as url:
        client = Client(url, None, RequestLimits(rate=40, request_seconds=5))
        begin = time.monotonic()
        for _ in range(48):  # a burst of one second's share is free
            client.ask("/v1/models")
    assert time.monotonic() - begin > 0.15


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000", "ftp://host", "http://", "http://anna:s3cretword@host", "http://h/?a=1",
        "http://h:99999", "http://h\n.x", "http://h/\N{LATIN SMALL LETTER U WITH DIAERESIS}",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Client(url, None, LIMITS)
    assert "s3cretword" not in str(caught.value)


def test_a_model_that_is_not_served_is_refused() -> None:
    with answering(models_alone) as url, pytest.raises(UnknownName, match="--model"):
        explore(Client(url, None, LIMITS), "other", ("a text",))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["--requests", "3"], "--requests = 3"),
        (["--rate", "0"], "--rate = 0"),
        (["--rounding", "int3"], "--rounding = 'int3'"),
        (["--max-prompt-tokens", "1"], "--max-prompt-tokens = 1"),
        (["--token-file", "nowhere"], "--token-file = 'nowhere'"),
        (["--against", "nowhere"], "--against = 'nowhere'"),
    ],
)
def test_options_are_refused_before_anything_is_asked(
    capsys: pytest.CaptureFixture[str], line: list[str], told: str
) -> None:
    done = call(capsys, "probe", "http://127.0.0.1:1", *line)
    assert done.status == 2
    assert told in done.err


def test_limits_that_end_before_anything_is_known_are_a_refusal() -> None:
    with answering(models_alone) as url, pytest.raises(UnusableServer) as caught:
        explore(Client(url, None, RequestLimits(requests=1, rate=1e6)), None, ("a text",))
    assert "the limit of 1 requests was reached" in str(caught.value)
    assert "--requests N" in str(caught.value)


@pytest.mark.parametrize(("scheme", "port"), [("http", 80), ("https", 443)])
def test_an_ipv6_address_needs_no_port(
    monkeypatch: pytest.MonkeyPatch, scheme: str, port: int
) -> None:
    asked = []

    def connect(address: tuple[str, int], *_: Any) -> socket.socket:
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(UnusableServer, match="connection refused"):
        Client(f"{scheme}://[::1]", None, LIMITS).ask("/v1/models")
    assert asked == [("::1", port)]


def test_a_host_that_nobody_knows_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> socket.socket:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    client = Client("http://nowhere.invalid", None, LIMITS)
    with pytest.raises(UnusableServer, match="Name or service not known"):
        client.ask("/v1/models")
    assert client.traffic.requests == 1


def test_a_server_without_tls_is_refused_with_its_remedy() -> None:
    with answering(models_alone) as url, pytest.raises(UnusableServer) as caught:
        Client(url.replace("http:", "https:"), None, LIMITS).ask("/v1/models")
    assert "a valid TLS connection" in str(caught.value)
    assert "http://" in str(caught.value.remedy)


def test_ctrl_c_ends_a_batch_at_once() -> None:
    ended, lock, seen = threading.Event(), threading.Lock(), []
    main = threading.main_thread().ident
    assert main is not None

    def waiting(_handler: Any) -> None:
        with lock:
            seen.append(1)
            if len(seen) == 3:
                signal.pthread_kill(main, signal.SIGINT)
        ended.wait(HANG_SECONDS)

    limits = RequestLimits(rate=1e6, request_seconds=HANG_SECONDS, seconds=2 * HANG_SECONDS)
    with answering(waiting) as url:
        client = Client(url, None, limits)
        # A shell that starts a command in the background may have it ignore the signal.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                client.together([Call("/v1/models")] * 3)
            still = not ended.is_set()
        finally:
            ended.set()
            signal.signal(signal.SIGINT, before)
        with pytest.raises(LimitReached, match="interrupted"):
            client.ask("/v1/models")
    assert still
    assert len(seen) == 3


def test_a_request_that_is_ended_while_it_connects_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, connect = list[Any](), http.client.HTTPConnection.connect

    def stopped(connection: http.client.HTTPConnection) -> None:
        connect(connection)
        client._stop()

    with answering(seen.append) as url:
        client = Client(url, None, replace(LIMITS, request_seconds=20))
        monkeypatch.setattr(http.client.HTTPConnection, "connect", stopped)
        with pytest.raises(UnusableServer):
            client.ask("/v1/models")
    assert not seen
