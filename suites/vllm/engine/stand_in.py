"""Stand in for `vllm serve`: a server that answers the driver's requests from a table.

It answers the paths of vLLM that the proof uses: completions with token ids, likeliest tokens of a
prompt, streams, metrics, a live capture. A text follows from its prompt alone; `errs` and `leaks`
make it a bad one. Run as `python -m ...stand_in PORT` it is a process of its own.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

from degarble.harness.vllm import capture as vllm_capture
from degarble.harness.vllm.engine.steps import Answers, ReferenceText
from degarble.suites.hang_guard import HANG_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORDS = 50


def following(prompt: list[int], new: int) -> list[int]:
    """The ids behind a prompt."""
    ids = list(prompt)
    for _ in range(new):
        ids.append((ids[-1] * 7 + len(ids)) % WORDS)
    return ids[len(prompt) :]


def text(prompt: list[int], new: int, gap: float = 9.0) -> ReferenceText:
    """What references would say of it; `gap`: of the second token behind the first."""
    ids = following(prompt, new)
    return ReferenceText(prompt, ids, [[each, each + 1] for each in ids], [[gap, 0.0]] * new)


def answers() -> Answers:
    """Ten texts and four questions, one of them long."""
    texts = [text([n, n + 1, n + 2], 8) for n in range(10)]
    questions = [text([n] * length, 1) for n, length in enumerate((5, 9, 17, 600))]
    return Answers(texts, questions, 1.0, 79)


class Server(ThreadingHTTPServer):
    """A table that answers. `errs`: prompts of this length; `leaks`: dropped streams that stay."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int = 0, captured: Path | None = None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.errs: dict[int, int] = {}  # prompts' length to the place that errs
        self.leaks = 0
        self.apart = 3.0  # the second of two likely tokens from the first, nearly
        self.hits = 0
        self.seen: set[str] = set()
        self.captured = captured
        self.port = self.server_address[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """A client that leaves is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        sentence = (
            'degarble_part_info{by="degarble",part="linear"} 1.0\n'
            'degarble_part_info{by="vllm",part="norm"} 1.0\n'
            f"vllm:prefix_cache_hits_total{{}} {self.server.hits}\n"
            f"vllm:num_requests_running{{}} {self.server.leaks}\n"
        )
        self._answer(sentence.encode() if self.path == "/metrics" else b"{}")

    def do_DELETE(self) -> None:
        assert self.server.captured is not None
        self._answer(json.dumps({"capture": self.server.captured.name}).encode())

    def do_POST(self) -> None:
        raw = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == vllm_capture.PATH:
            self._answer(b"{}", 200 if self.server.captured else 400)
        elif raw.get("stream"):
            for piece in self._pieces(raw):
                self.wfile.write(piece)
                self.wfile.flush()
        else:
            self._answer(json.dumps({"choices": [self._choice(raw)]}).encode())

    def _choice(self, raw: dict[str, Any]) -> dict[str, Any]:
        prompt = raw["prompt"]
        key = str(prompt)
        self.server.hits += 16 * (key in self.server.seen)
        self.server.seen.add(key)
        ids = following(prompt, raw["max_tokens"])
        if len(prompt) in self.server.errs:
            place = self.server.errs[len(prompt)]
            ids = [*ids[:place], *(each + 1 for each in ids[place:])]
        near = [
            {f"token_id:{each}": -0.1, f"token_id:{each + 1}": -self.server.apart} for each in ids
        ]
        made: dict[str, Any] = {"token_ids": ids, "logprobs": {"top_logprobs": near}}
        if raw.get("prompt_logprobs"):
            own = [following(prompt[:n], 1)[0] if n else 0 for n in range(len(prompt))]
            made["prompt_logprobs"] = [{str(each): {"logprob": -0.1}} for each in own]
        return made

    def _pieces(self, raw: dict[str, Any]) -> Iterator[bytes]:
        yield b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
        for each in following(raw["prompt"], 40):
            yield f'data: {{"choices": [{{"text": "{each}"}}]}}\n\n'.encode()
            time.sleep(0.001)

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    with Server(int(sys.argv[1])) as server:
        print("serving", server.port, flush=True)  # noqa: T201  its log
        time.sleep(HANG_SECONDS)
