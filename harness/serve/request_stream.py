"""Stream one request's results until completion, timeout or disconnect.

Results cross from the computing thread to the event loop of the web side. A disconnect is noticed
while waiting too, not only when something is sent. However the request ends, its sequences are
released.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from degarble.harness.serve.messages import Failed, Piece
from degarble.harness.serve.refusals import late, of_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Receive

    from degarble.harness.serve.completion_request import Asked
    from degarble.harness.serve.engine import Engine
    from degarble.harness.serve.messages import Bounds, Heard


class Gone(Exception):
    """The client disconnected."""


class Quiet:
    """No result arrived for a while."""


QUIET = Quiet()


class Hearing:
    """The results of one request. Use it as a context."""

    def __init__(
        self, asked: Asked, engine: Engine, receive: Receive, bounds: Bounds, request: str = ""
    ) -> None:
        self._bounds, self._receive = bounds, receive
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Heard | Quiet | Exception] = asyncio.Queue()
        self._open = len(asked.asks)
        self._engine = engine
        self._ticket = engine.submit(asked.asks, self._tell, request)

    async def __aenter__(self) -> Self:
        """Begin to watch for a disconnect and the timeout."""
        self._watch = self._loop.create_task(self._until_gone())
        self._late = self._loop.call_later(
            self._bounds.seconds, self._queue.put_nowait, late(self._bounds.seconds)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Release the sequences."""
        self._engine.drop(self._ticket)
        self._late.cancel()
        self._watch.cancel()
        with suppress(asyncio.CancelledError):
            await self._watch

    async def pieces(self) -> AsyncIterator[Piece | Quiet]:
        """Yield pieces until all sequences have ended, and QUIET where none came for a while."""
        while self._open:
            timer = self._loop.call_later(self._bounds.quiet_seconds, self._queue.put_nowait, QUIET)
            heard = await self._queue.get()
            timer.cancel()
            if isinstance(heard, Exception):
                raise heard
            if isinstance(heard, Failed):
                raise of_model(heard.error) from heard.error
            if isinstance(heard, Piece):
                self._open -= heard.finish is not None
            yield heard

    def _tell(self, heard: Heard) -> None:
        """Pass a result from the computing thread to the loop, unless the loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, heard)

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._queue.put_nowait(Gone())
