"""HTTP client of a probe: bounded in requests, rate, time and bytes; one host, no redirects.

`http.client` follows no redirect and reads no proxy settings, so nothing but the given host is
ever asked. Every way in which a server can fail is one typed error; a watchdog closes the socket of
a request that drips, so that nothing hangs.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import threading
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from degarble.harness.base.errors import InvalidArgument, UnusableServer, printable
from degarble.harness.base.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LARGEST_BODY = 64 << 20
_PART = 1 << 16
_RETRIES = 3  # of one request that is told to come again
_LONGEST_PAUSE = 10.0  # seconds that a server may ask a client to wait
_SHOWN = 160
_ENDPOINT = re.compile(r"/v1(/chat/completions|/completions|/models)?$")
_LINE_END = re.compile("\r\n|\n|\r")  # of an event stream: texts may hold U+2028 and U+0085


class LimitReached(Exception):
    """The probe's own limit of requests or time is used up; `args[0]` says which."""


@dataclass(frozen=True)
class RequestLimits:
    """What a probe may ask of a server."""

    requests: int = 400
    rate: float = 20.0  # requests a second, over the whole session
    seconds: float = 600.0  # of the session
    request_seconds: float = 60.0
    body_bytes: int = LARGEST_BODY


@dataclass
class Traffic:
    """What was asked so far. `statuses` counts answers, `dropped` those that never came."""

    requests: int = 0
    retried: int = 0
    dropped: int = 0
    statuses: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class Reply:
    """One answer: its status, and its JSON document or the documents of its stream."""

    status: int
    document: dict[str, Any]
    events: tuple[dict[str, Any], ...] = ()
    ended: bool = True  # of a stream: [DONE] arrived

    @property
    def reason(self) -> str:
        """Return why a request was not answered, in the server's words."""
        error = self.document.get("error", self.document)
        message = error.get("message") if isinstance(error, dict) else error
        message = message or self.document.get("detail") or self.document.get("message")
        shown = printable(message if isinstance(message, str) else str(message), _SHOWN)
        return f"status {self.status}: {shown}" if message else f"status {self.status}"


@dataclass(frozen=True)
class Call:
    """One request: a path and, to post, a body."""

    path: str
    body: dict[str, Any] | None = None


class Client:
    """Asks one server. Its methods may be called from several threads."""

    def __init__(self, url: str, token: str | None, limits: RequestLimits) -> None:
        self._parts = _address(url)
        self.url = f"{self._parts.scheme}://{self._parts.netloc}{self._base}"
        self._token, self._limits = token, limits
        self.traffic = Traffic()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._open: set[_Exchange] = set()
        self._begun = self._next = time.monotonic()
        self.reached = True  # whether the last request was answered at all
        self.on_request: Callable[[int], None] = lambda _count: None

    @property
    def _base(self) -> str:
        return _ENDPOINT.sub("", str(self._parts.path).rstrip("/"))

    @property
    def seconds(self) -> float:
        """Return the seconds since the session began."""
        return time.monotonic() - self._begun

    @property
    def requests_left(self) -> int:
        """Return how many requests the session may still make."""
        return self._limits.requests - self.traffic.requests

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Reply:
        """Send one request; come again where the server says so, or where it dropped the first."""
        dropped = False
        for attempt in range(_RETRIES + 1):
            self._take_turn()
            try:
                reply, pause = self._exchange(Call(path, body))
            except _Dropped as error:
                self.traffic.dropped += 1
                if dropped or attempt == _RETRIES:
                    self.reached = False
                    raise self._failure(path, str(error), "a whole answer") from error
                dropped = True
                continue
            except UnusableServer:
                self.reached = False
                raise
            self.reached = True
            self.traffic.statuses[reply.status] += 1
            if pause is None or attempt == _RETRIES:
                return reply
            self.traffic.retried += 1
            self._stopped.wait(min(pause, max(0.0, self._limits.seconds - self.seconds)))
        raise AssertionError("the last attempt returns or raises")

    def together(self, calls: Sequence[Call]) -> list[Reply | UnusableServer]:
        """Send several requests at once; a failure takes the place of its answer."""
        barrier = threading.Barrier(len(calls))

        def one(call: Call) -> Reply | UnusableServer:
            with suppress(threading.BrokenBarrierError):
                barrier.wait(self._limits.request_seconds)
            try:
                return self.ask(call.path, call.body)
            except UnusableServer as error:
                return error

        with ThreadPoolExecutor(len(calls)) as pool:
            try:
                return list(pool.map(one, calls))
            except KeyboardInterrupt:
                # Trap: the pool waits for its threads, up to the time of a request.
                barrier.abort()
                self._stop()
                raise

    def _stop(self) -> None:
        """End all requests under way, and allow no more."""
        self._stopped.set()
        with self._lock:
            open_now = list(self._open)
        for exchange in open_now:
            exchange.abort()

    def _take_turn(self) -> None:
        """Count a request and keep to the rate; raise where a limit is reached."""
        with self._lock:
            if self._stopped.is_set():
                raise LimitReached("an interrupted probe")
            if self.requests_left <= 0:
                raise LimitReached(f"{self._limits.requests} requests")
            if self.seconds > self._limits.seconds:
                raise LimitReached(f"{self._limits.seconds:g} s")
            self.traffic.requests += 1
            count, now = self.traffic.requests, time.monotonic()
            # A burst is allowed up to one second's share, and paid for afterwards.
            self._next = max(self._next, now - 1.0) + 1 / self._limits.rate
            wait = self._next - now
        self.on_request(count)
        if wait > 0:
            self._stopped.wait(wait)

    def _exchange(self, call: Call) -> tuple[Reply, float | None]:
        """Send a request once; return the answer, and the pause the server asks for."""
        seconds = min(self._limits.request_seconds, self._limits.seconds - self.seconds)
        data = None if call.body is None else json.dumps(call.body).encode()
        headers = {"content-type": "application/json", "user-agent": f"degarble-probe/{VERSION}"}
        if self._token is not None:
            headers["authorization"] = f"Bearer {self._token}"
        with self._connection(max(seconds, 0.1)) as exchange:
            connection = exchange.connection
            try:
                connection.connect()
                exchange.sockets.append(connection.sock)
                if exchange.late.is_set():  # ended while it connected: there was nothing to shut
                    raise TimeoutError
                connection.request(
                    "GET" if data is None else "POST", self._base + call.path, data, headers
                )
                with connection.getresponse() as answer:
                    self._require_no_redirect(call.path, answer)
                    raw = self._read(call.path, answer)
                if exchange.late.is_set():  # an answer without a length ends where it was cut off
                    raise TimeoutError
            except (OSError, http.client.HTTPException, ValueError) as error:
                if exchange.late.is_set() or isinstance(error, TimeoutError):
                    message = f"no whole answer within {seconds:.3g} s"
                    raise self._failure(call.path, message, "an answer in time") from error
                if isinstance(error, ssl.SSLError):
                    raise self._insecure(call.path, error) from error
                if isinstance(error, ConnectionRefusedError | socket.gaierror):
                    raise self._unreachable(call.path, error) from error
                raise _Dropped(_named(error)) from error
        return self._reply(call, answer, raw), _pause(answer)

    @contextmanager
    def _connection(self, seconds: float) -> Iterator[_Exchange]:
        """Make a connection that is shut when its time is over."""
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        # Trap: without a port, http.client takes the last part of an IPv6 address for one.
        port = self._parts.port or (443 if secure else 80)
        connection = kind(self._parts.hostname or "", port, timeout=seconds)
        exchange = _Exchange(connection)
        timer = threading.Timer(seconds, exchange.abort)
        timer.daemon = True
        timer.start()
        with self._lock:
            self._open.add(exchange)
        if self._stopped.is_set():
            exchange.abort()
        try:
            yield exchange
        finally:
            timer.cancel()
            with self._lock:
                self._open.discard(exchange)
            connection.close()
            for each in exchange.sockets:
                each.close()

    def _unreachable(self, path: str, error: OSError) -> UnusableServer:
        refused = isinstance(error, ConnectionRefusedError)
        return UnusableServer(
            f"{self.url}{path}",
            "connection refused" if refused else printable(str(error.strerror), _SHOWN),
            "a server that listens there" if refused else "a host that this machine can find",
            "Check the address, and that the server has started.",
        )  # fmt: skip

    def _insecure(self, path: str, error: ssl.SSLError) -> UnusableServer:
        """Say what of TLS failed, and what may be done about it."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return UnusableServer(
                f"{self.url}{path}", printable(error.verify_message, _SHOWN),
                "a certificate of an authority that this machine trusts",
                "Name a file with the authority's certificate: SSL_CERT_FILE=ca.pem degarble ...",
            )  # fmt: skip
        return UnusableServer(
            f"{self.url}{path}", _named(error), "a valid TLS connection",
            "A server without TLS has an address that begins with http://.",
        )  # fmt: skip

    def _require_no_redirect(self, path: str, answer: http.client.HTTPResponse) -> None:
        if not 300 <= answer.status < 400:
            return
        target = urlsplit(answer.getheader("location") or "")
        place = printable(f"{target.scheme}://{target.hostname or '?'}", _SHOWN)
        raise UnusableServer(
            f"{self.url}{path}", f"a redirect ({answer.status}) to {place}",
            "an answer; redirects are not followed",
            "Give the address of the server itself.",
        )  # fmt: skip

    def _read(self, path: str, answer: http.client.HTTPResponse) -> bytes:
        parts, size = [], 0
        while part := answer.read1(_PART):
            size += len(part)
            if size > self._limits.body_bytes:
                message = f"more than {self._limits.body_bytes:,} bytes"
                raise self._failure(path, message, "an answer of a bounded size")
            parts.append(part)
        length = answer.getheader("content-length")
        if length is not None and length.isdecimal() and size < int(length):
            raise _Dropped(f"{size} of {length} bytes")
        return self._unpacked(path, answer, b"".join(parts))

    def _unpacked(self, path: str, answer: http.client.HTTPResponse, raw: bytes) -> bytes:
        """Undo what some proxies do to an answer, though nothing but identity was accepted."""
        coding = (answer.getheader("content-encoding") or "identity").strip().lower()
        if coding == "identity":
            return raw
        shown, expectation = printable(coding, _SHOWN), "an answer that is not compressed"
        if coding not in ("gzip", "deflate"):
            raise self._failure(path, f"content-encoding {shown}", expectation)
        most = self._limits.body_bytes
        try:
            found = zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(raw, most + 1)
        except zlib.error as error:
            message = f"content-encoding {shown}: {_named(error)}"
            raise self._failure(path, message, expectation) from error
        if len(found) > most:
            message = f"more than {most:,} bytes"
            raise self._failure(path, message, "an answer of a bounded size")
        return found

    def _reply(self, call: Call, answer: http.client.HTTPResponse, raw: bytes) -> Reply:
        kind = (answer.getheader("content-type") or "").partition(";")[0].strip().lower()
        if kind == "text/event-stream":
            return self._events(call.path, answer.status, raw)
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            if answer.status >= 400:  # a page of a proxy, or a path that is not there
                return Reply(answer.status, {})
            shown = printable(raw[:_SHOWN].decode("utf-8", "replace"), 60)
            message = f"{kind or 'no content type'}: {shown}"
            raise self._failure(call.path, message, "a JSON object")
        return Reply(answer.status, found)

    def _events(self, path: str, status: int, raw: bytes) -> Reply:
        """Read server-sent events; an error event in the middle is the document."""
        found: list[dict[str, Any]] = []
        ended = False
        for line in _LINE_END.split(raw.decode("utf-8-sig", "replace")):
            data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
            if data == "[DONE]":
                ended = True
            elif data:
                try:
                    document = json.loads(data)
                except (ValueError, RecursionError):
                    document = None
                if not isinstance(document, dict):
                    raise self._failure(path, printable(data, 60), "JSON objects as events")
                if document.get("error"):  # null in every event of some servers
                    return Reply(500, document, tuple(found), ended)
                found.append(document)
        return Reply(status, {}, tuple(found), ended)

    def _failure(self, path: str, value: str, expectation: str) -> UnusableServer:
        return UnusableServer(
            f"{self.url}{path}", value, expectation,
            "Look at the server's own log, and probe it again.",
        )  # fmt: skip


@dataclass(eq=False)
class _Exchange:
    """A connection under way: another thread may end it."""

    connection: http.client.HTTPConnection
    # Trap: the connection forgets its socket once an answer says that it will close it.
    sockets: list[socket.socket] = field(default_factory=list)
    late: threading.Event = field(default_factory=threading.Event)

    def abort(self) -> None:
        """End it; whoever waits for the answer gets an error."""
        self.late.set()
        for each in self.sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class _Dropped(Exception):
    """The connection ended before the answer did."""


def _named(error: Exception) -> str:
    return printable(str(error) or type(error).__name__, _SHOWN)


def _pause(answer: http.client.HTTPResponse) -> float | None:
    """Return the seconds after which a server asks to come again; None where it does not."""
    if answer.status not in (429, 503):
        return None
    said = (answer.getheader("retry-after") or "1").strip()
    seconds = float(said) if said.isdecimal() else 1.0
    return seconds if seconds <= _LONGEST_PAUSE else None


def _address(url: str) -> Any:
    """Split an address; refuse what is none, or holds a password."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid, parts = False, urlsplit("")
    valid = valid and url.isprintable() and " " not in url and parts.path.isascii()
    if not valid or parts.query or parts.fragment:
        raise InvalidArgument(
            "URL", url, "the address of a server, as http://HOST:PORT or https://HOST",
            "For example: degarble probe http://localhost:8000",
        )  # fmt: skip
    if parts.username is not None or parts.password is not None:
        raise InvalidArgument(
            "URL", url, "an address without a user or password",
            "Write the token into a file, and give --token-file FILE.",
        )  # fmt: skip
    return parts
