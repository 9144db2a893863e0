"""A server of this process for probes: the real serving engine over a small model, with a socket.

Where it is asked to, it also speaks as vLLM does: /tokenize, and tokens as ids.
"""

from __future__ import annotations

import json
import random
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from degarble.harness.inference.model import open_model
from degarble.harness.serve.admission import AccessControl
from degarble.harness.serve.app import Service
from degarble.harness.serve.engine import Engine
from degarble.harness.serve.messages import ApiError, Bounds
from degarble.harness.serve.metrics import Metrics
from degarble.harness.serve.requests import read_chat
from degarble.harness.serve.served_model import ServedModel
from degarble.harness.serve.serving import Listener, bound_socket
from degarble.suites.hang_guard import HANG_SECONDS, until
from degarble.suites.probe.small_model import SmallConfig, SmallModel
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from degarble.harness.inference.model import OpenModel

BOUNDS = Bounds(prompt_tokens=3000, new_tokens=512, sequences=64, drain_seconds=0.2)


@dataclass
class Manner:
    """How a stand-in serves: its model and engine, what its answers go through, what it offers."""

    model: type[SmallModel] = SmallModel
    engine: type[Engine] = Engine
    ids: bool = False  # as vLLM: tokens as ids, and /tokenize
    refused: tuple[str, ...] = ()  # fields that are refused
    tokenizer: bool = True  # False: as vLLM --skip-tokenizer-init, ids in and ids out
    request: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda _path, body: body
    answer: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] = lambda _body, found: found
    tokenized: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: body
    logits: object = field(default=None, repr=False)  # a model in place of the small one


class ScoringEngine(Engine):
    """An engine whose scored prompts read no cache, as in vLLM."""

    def _step(self, active: Any) -> Any:
        scored = {
            id(line.continuation.sequence) for line in active if line.sequence_request.scores_prompt
        }
        vars(self._model)["uncached"] = scored
        return super()._step(active)


class VllmLike:
    """The application with vLLM's additions, and what a fault changes of requests and answers."""

    def __init__(self, inner: Any, served: ServedModel, manner: Manner) -> None:
        self._inner, self._served, self._manner = inner, served, manner

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._inner(scope, receive, send)
            return
        raw, message = b"", {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            raw += message.get("body", b"")
        asked = json.loads(raw)
        if scope["path"] == "/tokenize":
            await self._tokenize(asked, send)
            return
        if self._lacks_tokenizer(scope["path"], asked):
            await _send(send, 400, {"error": {"message": "no tokenizer was loaded"}})
            return
        body = self._manner.request(scope["path"], dict(asked))
        wants_ids = (
            bool(body.pop("return_tokens_as_token_ids", False)) if self._manner.ids else False
        )
        for name in self._manner.refused:
            if name in body:
                error = {"error": {"message": f"{name} is not supported here"}}
                await _send(send, 400, error)
                return
        await self._pass_on(scope, receive, send, (asked, body, wants_ids))

    def _lacks_tokenizer(self, path: str, asked: dict[str, Any]) -> bool:
        """Return whether a request needs the tokenizer that is not there."""
        if self._manner.tokenizer:
            return False
        named = asked.get("logprobs") is None or asked.get("return_tokens_as_token_ids")
        return "chat" in path or isinstance(asked.get("prompt"), str) or not named

    async def _pass_on(self, scope: Any, receive: Any, send: Any, request: Any) -> None:
        asked, body, wants_ids = request
        data = json.dumps(body).encode()
        headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        headers.append((b"content-length", str(len(data)).encode()))
        pending: list[Any] = [{"type": "http.request", "body": data, "more_body": False}]
        status, found = 0, b""

        async def replaced() -> Any:
            return pending.pop() if pending else await receive()

        async def caught(message: Any) -> None:
            nonlocal status, found
            status = message.get("status", status)
            found += message.get("body", b"")

        await self._inner(dict(scope, headers=headers), replaced, caught)
        if body.get("stream") and status == 200:
            await self._send_events(send, found, asked, wants_ids)
            return
        document = json.loads(found)
        if status == 200:
            document = self._answered(asked, document)
            document = self._with_ids(document) if wants_ids else document
        await _send(send, status, document)

    async def _send_events(self, send: Any, found: bytes, asked: Any, wants_ids: bool) -> None:
        lines = []
        for line in found.decode().splitlines():
            if line.startswith("data: {"):
                event = self._answered(asked, json.loads(line.removeprefix("data: ")))
                event = self._with_ids(event) if wants_ids else event
                lines.append(f"data: {json.dumps(event)}\n\n")
            elif line.startswith("data:"):
                lines.append(f"{line}\n\n")
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": "".join(lines).encode()})

    def _answered(self, asked: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
        document = self._manner.answer(asked, document)
        if not self._manner.tokenizer:
            for choice in document.get("choices", []):
                choice["text"] = ""
        return document

    async def _tokenize(self, body: dict[str, Any], send: Any) -> None:
        if not (self._manner.ids and self._manner.tokenizer):
            await _send(send, 404, {"error": {"message": "no such path"}})
            return
        body = self._manner.tokenized(body)
        if "messages" in body:
            raw = {"model": body["model"], "messages": body["messages"], "max_tokens": 1}
            try:
                ids = list(read_chat(raw, self._served).sequences[0].prompt)
            except ApiError as error:
                await _send(send, error.status, error.document())
                return
        else:
            ids = self._served.tokenizer.encode(body["prompt"])
        await _send(send, 200, {"count": len(ids), "tokens": ids})

    def _number(self, token: str) -> str:
        (number,) = self._served.tokenizer.encode(token.strip(), begin=False)
        return f"token_id:{number}"

    def _with_ids(self, document: dict[str, Any]) -> dict[str, Any]:
        for choice in document.get("choices", []):
            scores = choice.get("logprobs") or {}
            for entry in scores.get("content") or []:
                for each in (entry, *entry["top_logprobs"]):
                    each["token"] = self._number(each["token"])
            if "tokens" in scores:
                scores["tokens"] = list(map(self._number, scores["tokens"]))
                scores["top_logprobs"] = [
                    top and {self._number(token): value for token, value in top.items()}
                    for top in scores["top_logprobs"]
                ]
        return document


async def _send(send: Any, status: int, document: dict[str, Any]) -> None:
    head = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": json.dumps(document).encode()})


@contextmanager
def opened(folder: Path) -> Iterator[OpenModel]:
    """Open the checkpoint whose words and chat encoding the stand-ins use."""
    with open_model(write_speaker(folder)) as model:
        yield model


@contextmanager
def serving(model: OpenModel, config: SmallConfig, manner: Manner) -> Iterator[str]:
    """Serve a small model at an address of this machine; yield the address."""
    small: Any = manner.logits or manner.model(config)
    small.config = model.config  # words, family, bounds of memory
    served = ServedModel(replace(model, logits_model=small), "small", BOUNDS)
    engine = manner.engine(small, served.tokenizer, BOUNDS.sequences, Metrics())
    gate = AccessControl.for_host("127.0.0.1", None, anyone=False)
    service = Service(served, engine, gate, Metrics())
    app = VllmLike(service.app(), served, manner)
    with bound_socket("127.0.0.1", 0) as taken:
        listener = Listener(app, BOUNDS, lambda: None)
        listener.give_up = engine.stop
        thread = threading.Thread(target=lambda: listener.run(sockets=[taken]), daemon=True)
        engine.start()
        thread.start()
        until(lambda: listener.started and (engine.ready or engine.failure is not None))
        if engine.failure is not None:
            raise engine.failure
        try:
            yield f"http://127.0.0.1:{taken.getsockname()[1]}"
        finally:
            listener.force_exit = listener.should_exit = True
            thread.join(HANG_SECONDS)
            engine.stop()
            engine.join()


def texts(seed: int, count: int = 14, words: int = 40) -> tuple[str, ...]:
    """Texts in the words of the stand-ins."""
    draw = random.Random(seed)
    return tuple(
        " ".join(f"w{draw.randrange(6, 64)}" for _ in range(draw.randrange(words // 2, words)))
        for _ in range(count)
    )
