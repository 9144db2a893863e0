"""Real sockets of the loopback address: slow, broken, half-closed and many connections; the end."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, repeat
from typing import TYPE_CHECKING

import openai
import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.serve.serving import Listener, bound_socket
from degarble.suites.hang_guard import HANG_SECONDS, until
from degarble.suites.serve.serving_cases import BOUNDS, Running, running
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from degarble.harness.serve.messages import Bounds

QUICK = replace(
    BOUNDS, head_seconds=1.0, body_seconds=1.0, stall_seconds=0.5, connections=4, new_tokens=4000
)


@contextmanager
def listening(folder: Path, bounds: Bounds) -> Iterator[tuple[Running, Listener, int]]:
    """A server with a port, in a thread of this process."""
    with running(folder, bounds, endless=True) as made, bound_socket("127.0.0.1", 0) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # fills up soon

        def stopping() -> None:
            made.service.stopping = True

        listener = Listener(made.app, bounds, stopping)
        listener.give_up = made.engine.stop
        thread = threading.Thread(target=lambda: listener.run(sockets=[taken]), daemon=True)
        port = taken.getsockname()[1]
        thread.start()
        until(lambda: listener.started)
        try:
            yield made, listener, port
        finally:
            listener.force_exit = listener.should_exit = True
            thread.join(HANG_SECONDS)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, int]]:
    folder = write_speaker(tmp_path_factory.mktemp("listening") / "model")
    with listening(folder, QUICK) as (made, _, port):
        yield made, port


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS)


def everything(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    while part := connection.recv(65536):
        found += part
    return found


def request(body: bytes, **headers: str) -> bytes:
    head = {"host": "127.0.0.1", "content-type": "application/json"} | {
        name.replace("_", "-"): text for name, text in headers.items()
    }
    lines = ["POST /v1/completions HTTP/1.1", *(f"{k}: {v}" for k, v in head.items())]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


def asking(**fields: object) -> bytes:
    return json.dumps({"model": "words", "prompt": "w7", "temperature": 0} | fields).encode()


def test_openai_s_client_over_a_real_socket(served: tuple[Running, int]) -> None:
    made, port = served
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    with client:
        how = {"model": "words", "prompt": "w7 w8", "max_tokens": 5, "temperature": 0}
        chunks = list(client.completions.create(stream=True, **how))  # type: ignore[call-overload]
        assert "".join(c.choices[0].text for c in chunks) == made.said("w7 w8", 5)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", 408),
        (b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: ", 408),
        (b"hello\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n", 400),
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", 400),
        (request(b"\x00", connection="close"), 400),
        (request(asking())[:-5], 408),
    ],
    ids=["silent", "slow-head", "no-http", "two-hosts", "length", "huge-head", "zero", "slow-body"],
)
def test_slow_and_broken_requests_are_answered_and_closed(
    served: tuple[Running, int], sent: bytes, status: int
) -> None:
    with connected(served[1]) as connection:
        connection.sendall(sent)
        found = everything(connection)
    assert found.startswith(f"HTTP/1.1 {status} ".encode())
    assert b'"error"' in found


def test_a_head_that_drips_in_does_not_hold_a_connection(served: tuple[Running, int]) -> None:
    """A server that lets it drip on is seen by the hang guard of the session."""
    with connected(served[1]) as connection:
        connection.sendall(request(asking(max_tokens=1)))  # the first request is well-behaved
        found = connection.recv(65536)
        assert found.startswith(b"HTTP/1.1 200 ")
        for letter in chain(b"POST /v1/completions HTTP/1.1\r\nx: ", repeat(ord("y"))):
            try:
                connection.sendall(bytes([letter]))
            except OSError:
                break
            time.sleep(0.1)


def test_a_client_that_closes_its_side_counts_as_gone(served: tuple[Running, int]) -> None:
    made, port = served
    with connected(port) as connection:
        connection.sendall(request(asking(max_tokens=4000, stream=True)))
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        until(lambda: made.engine.load == (1, 0))
        connection.shutdown(socket.SHUT_WR)
        until(lambda: made.engine.load == (0, 0))


def test_a_client_that_takes_nothing_is_let_go(served: tuple[Running, int]) -> None:
    made, port = served
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", port))
        body = asking(max_tokens=4000, stream=True, n=16, logprobs=20)
        connection.sendall(request(body))
        until(lambda: made.engine.load != (0, 0))
        until(lambda: made.engine.load == (0, 0))
    assert made.counted('degarble_sequences_total{end="dropped"}') >= 16


def test_one_connection_too_many_is_sent_away(served: tuple[Running, int]) -> None:
    port = served[1]
    held = [connected(port) for _ in range(QUICK.connections)]
    try:
        with connected(port) as connection:
            assert everything(connection).startswith(b"HTTP/1.1 503 ")
    finally:
        for each in held:
            each.close()


def test_a_refused_body_is_read_to_its_end(served: tuple[Running, int]) -> None:
    """A client that sends everything before it reads hears why."""
    with connected(served[1]) as connection:
        connection.sendall(request(b" " * 3_000_000))
        found = b""
        while not found.endswith(b"}}"):
            found += connection.recv(65536)
        assert found.startswith(b"HTTP/1.1 413 ")


def test_a_signal_lets_what_runs_end(tmp_path: Path) -> None:
    folder = write_speaker(tmp_path / "model")
    with listening(folder, replace(BOUNDS, new_tokens=4000)) as (made, listener, port):
        with connected(port) as connection, connected(port) as idle:
            connection.sendall(request(asking(max_tokens=40)))
            until(lambda: made.engine.load == (1, 0))
            listener.handle_exit(signal.SIGTERM, None)
            assert made.service.stopping
            found = everything(connection)
            assert found.startswith(b"HTTP/1.1 200 ")
            assert b'"finish_reason":"length"' in found
            assert everything(idle) == b""
        until(lambda: not listener.server_state.connections)
        with pytest.raises(OSError, match="refused"):
            connected(port)


def test_a_request_that_does_not_end_in_time_is_reported(tmp_path: Path) -> None:
    folder = write_speaker(tmp_path / "model")
    bounds = replace(BOUNDS, new_tokens=4000, drain_seconds=0.2)
    with listening(folder, bounds) as (made, listener, port), connected(port) as connection:
        connection.sendall(request(asking(max_tokens=4000)))
        until(lambda: made.engine.load == (1, 0))
        listener.handle_exit(signal.SIGINT, None)
        found = everything(connection)
        assert found.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"stopping"' in found


def test_a_port_that_is_taken_and_a_host_that_is_none_are_refused() -> None:
    with bound_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidArgument, match="a free port of 127") as caught:
            bound_socket("127.0.0.1", port)
        assert (caught.value.name, caught.value.value) == ("--port", port)
    for host in ("no.such.host.invalid", "192.0.2.1", "a" * 300, ""):
        with pytest.raises(InvalidArgument) as caught:
            bound_socket(host, 0).close()
        assert caught.value.name == "--host"
