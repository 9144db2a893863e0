"""The bound on bytes: what requests hold is counted, refused when too much, and given back."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.inference.generation import Limits, Sampling
from degarble.harness.model.presets import V3_2, V4_FLASH
from degarble.harness.serve.admission import MemoryBound, bytes_of
from degarble.harness.serve.messages import ApiError, Bounds, SequenceRequest
from degarble.harness.serve.requests import read_completion
from degarble.suites.hang_guard import until
from degarble.suites.serve.serving_cases import Running, running
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.model.config.config import Config

WIDE = {"prompt": [[7, 8] * 40] * 8, "n": 2, "max_tokens": 1, "echo": True, "logprobs": 20}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = write_speaker(tmp_path_factory.mktemp("memory") / "model")
    with running(folder, Bounds(memory_bytes=30 << 20), endless=True) as made:
        yield made


def test_shares_of_one_bound() -> None:
    bound = MemoryBound(100)
    with bound.share() as one:
        one.grow(60)
        with bound.share() as two:
            with pytest.raises(ApiError, match="try again") as caught:
                two.grow(50)
            assert (caught.value.status, caught.value.retry_after) == (429, 5)
            with pytest.raises(ApiError, match="all requests together may take") as caught:
                two.grow(101)  # would never fit
            assert caught.value.status == 400
            two.grow(40)
        one.become(10)
        assert bound.taken == 10
        kept = one.handed_on()
    assert bound.taken == 10
    with kept:
        kept.become(100)
        assert bound.taken == 100
    assert bound.taken == 0


@pytest.mark.parametrize("config", [V4_FLASH, V3_2])
def test_each_thing_that_takes_memory_raises_the_estimate(config: Config) -> None:
    def ask(prompt: int = 100, new: int = 10, **more: Any) -> SequenceRequest:
        return SequenceRequest(tuple(range(prompt)), Sampling(), Limits(new), **more)

    plain = bytes_of([ask()], config)
    asks = [ask(200), ask(new=400), ask(top=0), ask(top=20)]
    assert all(bytes_of([each], config) > plain for each in asks)
    told = [bytes_of([ask(top=20, scores_prompt=on)], config) for on in (False, True)]
    assert told[1] - told[0] > 100 * 10_000
    assert bytes_of([ask()] * 40, config) < 40 * plain  # 16 run, the others wait


def test_an_answer_takes_no_more_than_was_estimated(server: Running) -> None:
    """Measured where it is largest: every token of a prompt with its 20 likeliest."""
    asked = read_completion({"model": server.desk.name} | WIDE, server.desk)
    estimated = bytes_of(asked.asks, server.desk.model.config)
    server.complete("w7", max_tokens=1)
    tracemalloc.start()
    try:
        server.complete(**WIDE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < estimated
    assert server.counted("degarble_memory_bytes") == 0


def test_a_request_beyond_the_bound_is_refused_and_gives_everything_back(server: Running) -> None:
    large = server.post("/v1/completions", **(WIDE | {"n": 16, "prompt": [[7] * 500] * 4}))
    assert large.status_code == 400
    assert "--max-memory" in large.json()["error"]["message"]
    assert server.counted("degarble_memory_bytes") == 0
    assert server.post("/v1/completions", prompt="w7", max_tokens=-1).status_code == 400
    assert server.counted("degarble_memory_bytes") == 0


def test_beside_one_in_flight_another_waits_its_turn(server: Running) -> None:
    """A stream holds its share until it ends, and then there is room again."""
    held = server.service._memory.share()
    with held:
        held.grow(29 << 20)
        refused = server.post("/v1/completions", **WIDE)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["code"] == "memory_full"
    fields = {"model": server.desk.name, "prompt": "w7", "stream": True, "max_tokens": 3}
    with server.client.stream("POST", "/v1/completions", json=fields) as answer:
        assert answer.status_code == 200
        answer.read()
    until(lambda: server.counted("degarble_memory_bytes") == 0)


def test_slow_bodies_are_counted_while_they_come(server: Running) -> None:
    async def ask() -> int:
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")],
        }  # fmt: skip
        seen: list[int] = []
        status = 0

        async def receive() -> dict[str, Any]:
            seen.append(server.service._memory.taken)
            return {"type": "http.request", "body": b" " * 1000, "more_body": len(seen) < 4}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)

        await server.app(scope, receive, send)
        assert seen == sorted(seen)
        assert seen[-1] > seen[0]
        return status

    assert asyncio.run(ask()) == 400
    assert server.service._memory.taken == 0
