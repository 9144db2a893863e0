"""The server's paths, in this process: answers, streams, access, memory, metrics, disconnects."""

from __future__ import annotations

import asyncio
import json
import re
import tracemalloc
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from degarble.harness.inference.generation import Limits, Sampling
from degarble.harness.model.config.config import V3_2, V4_FLASH
from degarble.harness.serve.admission import OPEN_PATHS, AccessControl, MemoryBound, bytes_of
from degarble.harness.serve.messages import ApiError, Bounds, SequenceRequest
from degarble.harness.serve.metrics import FAMILIES, Metrics
from degarble.harness.serve.requests import read_completion
from degarble.suites.hang_guard import until
from degarble.suites.serve.serving_cases import BOUNDS, LOCAL, Running, events, running
from degarble.suites.serve.talking_cases import WORDS, write_speaker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from degarble.harness.model.config.config import Config
    from degarble.harness.serve.metrics import Gauges


# --------------------------------------------------------------------------------------------------
# The paths, in this process: answers, streams, refusals, health, metrics, clients that go away.

_LONG = {"model": "words", "prompt": ["w7", "w8"], "max_tokens": 4000}
PATHS = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("serving") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(folder) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{LOCAL}/v1", api_key="none", http_client=server.client, max_retries=0
    )


def test_a_completion_equals_generate(server: Running) -> None:
    answer = server.complete("w7 w8", max_tokens=5)
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0, "text": server.said("w7 w8", 5), "logprobs": None, "finish_reason": "length",
    }  # fmt: skip
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert answer["object"] == "text_completion"
    assert answer["system_fingerprint"] == server.desk.mark
    drawn = server.complete("w7", max_tokens=6, temperature=1, top_p=0.9, seed=11)
    assert drawn["choices"][0]["text"] == server.said("w7", 6, temperature=1, top_p=0.9, seed=11)
    word = server.said("w7 w8", 5).split()[3]
    cut = server.complete("w7 w8", max_tokens=5, stop=f" {word}")["choices"][0]
    assert cut["text"] == server.said("w7 w8", 5, stops=(f" {word}",))
    assert cut["finish_reason"] == "stop"


def test_choices_of_several_prompts_keep_their_places(server: Running) -> None:
    answer = server.complete(["w7", [0, 8]], n=2, max_tokens=4, temperature=1, seed=5)
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2, 3]
    wanted = [(p, seed) for p in ("w7", "w8") for seed in (5, 6)]
    assert [each["text"] for each in answer["choices"]] == [
        server.said(prompt, 4, temperature=1, seed=seed) for prompt, seed in wanted
    ]
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 16, "total_tokens": 20}


def folded(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Put the chunks of a completion's stream together."""
    made: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            found = made.setdefault(choice.index, {"text": "", "scores": [], "end": None})
            found["text"] += choice.text
            found["end"] = choice.finish_reason or found["end"]
            if choice.logprobs is not None:
                found["scores"] += choice.logprobs.token_logprobs
    return made


def test_an_echo_stands_in_front_of_a_whole_answer(client: openai.OpenAI) -> None:
    how: Any = {"model": "words", "prompt": "w7 w8", "temperature": 0, "max_tokens": 2}
    plain, echoed = (
        client.completions.create(**how, echo=echo).choices[0].text for echo in (False, True)
    )
    assert echoed == f"w7 w8 {plain}"


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_put_together_is_the_whole_answer(client: openai.OpenAI, echo: bool) -> None:
    how: dict[str, Any] = {
        "model": "words", "prompt": ["w7 w8", "w9"], "n": 2, "max_tokens": 6, "seed": 3,
        "logprobs": 2, "echo": echo,
    }  # fmt: skip
    whole = client.completions.create(**how)
    chunks = list(
        client.completions.create(stream=True, stream_options={"include_usage": True}, **how)
    )
    made = folded(chunks)
    for choice in whole.choices:
        assert made[choice.index]["text"] == choice.text
        assert made[choice.index]["end"] == choice.finish_reason
        assert choice.logprobs is not None
        assert made[choice.index]["scores"] == choice.logprobs.token_logprobs
        assert "".join(choice.logprobs.tokens or []) == choice.text
        for token, offset in zip(
            choice.logprobs.tokens or [], choice.logprobs.text_offset or [], strict=True
        ):
            assert choice.text[offset:].startswith(token)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert whole.choices[0].text.startswith("w7 w8 ") == echo
    assert len({chunk.id for chunk in chunks}) == 1


def test_chats_are_answered_whole_and_streamed(client: openai.OpenAI, server: Running) -> None:
    how: dict[str, Any] = {
        "model": "words", "messages": [{"role": "user", "content": "w7"}], "temperature": 0,
        "max_completion_tokens": 6, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = client.chat.completions.create(**how).choices[0]
    chunks = [c.choices[0] for c in client.chat.completions.create(stream=True, **how)]
    assert chunks[0].delta.role == "assistant"
    assert "".join(c.delta.content or "" for c in chunks) == whole.message.content
    assert chunks[-1].finish_reason == whole.finish_reason == "length"
    assert whole.message.role == "assistant"
    assert whole.logprobs is not None
    scores = whole.logprobs.content or []
    assert "".join(score.token for score in scores) == whole.message.content
    assert [c for s in chunks if s.logprobs for c in s.logprobs.content or []] == scores
    assert all(score.logprob == score.top_logprobs[0].logprob for score in scores)  # greedy
    assert bytes(scores[0].bytes or []).decode() == scores[0].token
    asked = "<｜User｜>w7<｜Assistant｜></think>"
    ids = server.desk.tokenizer.encode(f"<｜begin▁of▁sentence｜>{asked}", begin=False)
    plain = server.complete(ids, max_tokens=6)
    assert plain["choices"][0]["text"] == whole.message.content


def test_a_turn_that_leaves_the_encoding_says_so(server: Running) -> None:
    fields = {"messages": [{"role": "user", "content": "w7"}], "thinking": {"type": "enabled"}}
    answer = server.post(PATHS[1], **fields, temperature=0, max_tokens=4).json()["choices"][0]
    assert "an end of thinking" in answer["not_a_message"]
    assert answer["message"]["content"] == ""
    assert answer["message"]["reasoning_content"].split()[0] in WORDS
    text = server.post(PATHS[1], **fields, temperature=0, max_tokens=4, stream=True).text
    last = json.loads(events(text)[-2])["choices"][0]
    assert last["not_a_message"] == answer["not_a_message"]


def test_concurrent_requests_give_the_texts_of_single_ones(server: Running) -> None:
    prompts = [f"w{6 + n} w{6 + 3 * n % 50}" for n in range(18)]

    async def all_together() -> list[str]:
        transport = httpx2.ASGITransport(app=server.app)
        async with httpx2.AsyncClient(transport=transport, base_url=LOCAL) as asking:
            bodies = [
                {"model": "words", "prompt": p, "max_tokens": 2 + n % 3, "temperature": 0}
                for n, p in enumerate(prompts)
            ]
            answers = await asyncio.gather(*(asking.post(PATHS[0], json=b) for b in bodies))
        return [answer.json()["choices"][0]["text"] for answer in answers]

    wanted = [server.said(prompt, 2 + n % 3) for n, prompt in enumerate(prompts)]
    assert asyncio.run(all_together()) == wanted


def test_models_and_health(client: openai.OpenAI, server: Running) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("words", "degarble")
    assert client.models.retrieve("words") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/one")
    assert server.client.get("/health").json() == {"status": "ready", "live": True, "ready": True}
    assert server.client.get("/health/live").status_code == 200


def test_metrics_report_what_was_done_and_what_computes(server: Running) -> None:
    until(lambda: server.counted("degarble_running_sequences") == 0)
    before = server.counted("degarble_new_tokens_total")
    used = server.complete("w7", max_tokens=5)["usage"]["completion_tokens"]
    assert used > 0
    until(lambda: server.counted("degarble_running_sequences") == 0)  # an answer goes out first
    assert server.counted("degarble_new_tokens_total") == before + used
    text = server.client.get("/metrics").text
    assert 'component_info{layer="1",component="attn.wq_a",weights="BF16"' in text
    assert 'degarble_requests_total{path="/v1/completions",status="200"}' in text


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"{", {}, 400, "invalid_json"),
        (b"\xff", {}, 400, "invalid_json"),
        (b"[" * 60_000, {}, 400, "invalid_json"),
        (b"{}", {}, 400, "missing_required_parameter"),
        (b"{}", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        (b"{}", {"content-type": ""}, 415, "unsupported_media_type"),
        (b"{}", {"content-encoding": "gzip"}, 415, "unsupported_media_type"),
        (b" " * 100_001, {}, 413, "body_too_large"),
        (b'{"model": "gpt-4", "prompt": "a", "messages": []}', {}, 404, "model_not_found"),
        (b'{"model": "\\ud800"}', {}, 404, "model_not_found"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_hostile_bodies_are_refused_in_openai_s_form(
    server: Running, path: str, content: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    sent = {"content-type": "application/json"} | headers
    answer = server.client.post(path, content=content, headers=sent)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"


def test_a_body_in_parts_is_bounded_as_well(server: Running) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(3):
            yield b" " * 50_000

    head = {"content-type": "application/json"}
    assert server.client.post(PATHS[0], content=parts(), headers=head).status_code == 413


def test_refusals_reach_openai_s_client_by_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="words", prompt="w7", temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="w7")
    with pytest.raises(openai.BadRequestError, match="top_k"):
        client.completions.create(model="words", prompt="w7", extra_body={"top_k": 4})


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405),
     ("POST", "/v1/completions/", 404), ("GET", "/docs", 404), ("POST", "/v1/files", 404),
     ("OPTIONS", "/v1/completions", 405)],
)  # fmt: skip
def test_unknown_paths_are_refused_in_the_same_form(
    server: Running, method: str, path: str, status: int
) -> None:
    answer = server.client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == "unknown_url"


def test_a_full_queue_and_a_stop_answer_with_retry_after(
    folder: Path,
) -> None:
    with running(folder, Bounds(new_tokens=4000, sequences=2), endless=True) as small:
        small.engine.submit(read_completion(_LONG, small.desk).sequences, lambda _: None)
        full = small.post(PATHS[0], prompt="w7")
        small.engine.stop()
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        assert full.json()["error"]["type"] == "rate_limit_error"
        small.service.stopping = True
        stopped = small.post(PATHS[0], prompt="w7")
        assert (stopped.status_code, stopped.headers["retry-after"]) == (503, "5")
        assert small.client.get("/health/ready").status_code == 503
        assert small.client.get("/health/live").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_ended(folder: Path, stream: bool) -> None:
    with running(folder, Bounds(new_tokens=4000, seconds=0.2), endless=True) as slow:
        found = slow.post(PATHS[0], prompt="w7", max_tokens=4000, temperature=0, stream=stream)
        error = json.loads(events(found.text)[-1]) if stream else found.json()
        assert error["error"]["code"] == "timeout"
        assert found.status_code == (200 if stream else 504)
        until(lambda: slow.engine.load == (0, 0))


def test_an_internal_error_is_reported_without_its_details(
    server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(server.engine, "submit", broken)
    answer = server.post(PATHS[0], prompt="w7")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    assert "secret detail" in capsys.readouterr().err


def test_a_token_is_required_everywhere_but_at_health(folder: Path) -> None:
    token = "0123456789abcdef"
    with running(folder, token=token) as guarded:
        assert guarded.client.get("/v1/models").status_code == 401
        assert guarded.client.get("/metrics").status_code == 401
        assert guarded.client.get("/nowhere").status_code == 401
        assert guarded.client.get("/health/live").status_code == 200
        known = openai.OpenAI(
            base_url=f"{LOCAL}/v1", api_key=token, http_client=guarded.client, max_retries=0
        )
        assert known.models.list().data[0].id == "words"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_work(folder: Path, stream: bool) -> None:
    """Noticed while the model still computes, whether or not something is being sent."""
    body = {"model": "words", "prompt": "w7", "max_tokens": 4000, "stream": stream}
    sent: list[dict[str, Any]] = []

    async def leave(server: Running) -> None:
        scope = {
            "type": "http", "method": "POST", "path": PATHS[0], "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")],
        }  # fmt: skip
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await asyncio.to_thread(until, lambda: server.engine.load == (1, 0))
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await asyncio.wait_for(server.app(scope, receive, send), 20)

    with running(folder, Bounds(new_tokens=4000), endless=True) as server:
        asyncio.run(leave(server))
        until(lambda: server.engine.load == (0, 0))
        assert server.counted('degarble_sequences_total{end="dropped"}') == 1
    assert [m["type"] for m in sent[:1]] == (["http.response.start"] if stream else [])


def test_the_bounds_of_the_suite_are_those_of_a_server() -> None:
    assert BOUNDS.seconds == Bounds().seconds


# --------------------------------------------------------------------------------------------------
# The gate: a token, or names of this machine.

TOKEN = "0123456789abcdef-secret"


@pytest.mark.parametrize(
    "given",
    ["", "Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}",
     "Bearer é\udcff"],
)  # fmt: skip
def test_a_wrong_token_is_refused_and_never_repeated(given: str) -> None:
    gate = AccessControl.for_host("0.0.0.0", TOKEN, anyone=False)
    with pytest.raises(ApiError) as caught:
        gate.admit("/v1/models", {"authorization": given})
    assert caught.value.status == 401
    assert caught.value.headers() == {"www-authenticate": "Bearer"}
    assert TOKEN not in str(caught.value.document())
    assert TOKEN not in repr(gate)


def test_a_token_opens_whatever_the_host_is_called() -> None:
    gate = AccessControl.for_host("0.0.0.0", TOKEN, anyone=False)
    for scheme in ("Bearer", "bearer"):
        gate.admit("/metrics", {"authorization": f"{scheme} {TOKEN}", "host": "example.org"})
    for path in OPEN_PATHS:
        gate.admit(path, {})


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "[::1]:8000", "LOCALHOST"]
)
def test_without_a_token_this_machine_is_answered(host: str) -> None:
    AccessControl.for_host("127.0.0.1", None, anyone=False).admit("/v1/models", {"host": host})


@pytest.mark.parametrize("host", ["", "example.org", "127.0.0.1.example.org:8000", "[::2]:1"])
def test_a_page_whose_name_was_pointed_here_reads_nothing(host: str) -> None:
    with pytest.raises(ApiError) as caught:
        AccessControl.for_host("127.0.0.1", None, anyone=False).admit("/v1/models", {"host": host})
    assert caught.value.status == 403
    AccessControl.for_host("127.0.0.1", None, anyone=True).admit("/v1/models", {"host": host})


# --------------------------------------------------------------------------------------------------
# The bound on bytes: what requests hold is counted, refused when too much, and given back.

WIDE = {"prompt": [[7, 8] * 40] * 8, "n": 2, "max_tokens": 1, "echo": True, "logprobs": 20}


@pytest.fixture(scope="module")
def memory_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
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
        one.resize(10)
        assert bound.in_use == 10
        kept = one.transfer()
    assert bound.in_use == 10
    with kept:
        kept.resize(100)
        assert bound.in_use == 100
    assert bound.in_use == 0


@pytest.mark.parametrize("config", [V4_FLASH, V3_2])
def test_each_thing_that_takes_memory_raises_the_estimate(config: Config) -> None:
    def ask(prompt: int = 100, new: int = 10, **more: Any) -> SequenceRequest:
        return SequenceRequest(tuple(range(prompt)), Sampling(), Limits(new), **more)

    plain = bytes_of([ask()], config)
    requests = [ask(200), ask(new=400), ask(top=0), ask(top=20)]
    assert all(bytes_of([request], config) > plain for request in requests)
    told = [bytes_of([ask(top=20, scores_prompt=on)], config) for on in (False, True)]
    assert told[1] - told[0] > 100 * 10_000
    assert bytes_of([ask()] * 40, config) < 40 * plain  # 16 run, the others wait


def test_an_answer_takes_no_more_than_was_estimated(memory_server: Running) -> None:
    """Measured where it is largest: every token of a prompt with its 20 likeliest."""
    request = read_completion({"model": memory_server.desk.name} | WIDE, memory_server.desk)
    estimated = bytes_of(request.sequences, memory_server.desk.model.config)
    memory_server.complete("w7", max_tokens=1)
    tracemalloc.start()
    try:
        memory_server.complete(**WIDE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < estimated
    assert memory_server.counted("degarble_memory_bytes") == 0


def test_a_request_beyond_the_bound_is_refused_and_frees_everything(
    memory_server: Running,
) -> None:
    large = memory_server.post("/v1/completions", **(WIDE | {"n": 16, "prompt": [[7] * 500] * 4}))
    assert large.status_code == 400
    assert "--max-memory" in large.json()["error"]["message"]
    assert memory_server.counted("degarble_memory_bytes") == 0
    assert memory_server.post("/v1/completions", prompt="w7", max_tokens=-1).status_code == 400
    assert memory_server.counted("degarble_memory_bytes") == 0


def test_while_one_is_in_flight_another_waits_its_turn(memory_server: Running) -> None:
    """A stream holds its share until it ends, and then there is room again."""
    held = memory_server.service._memory.share()
    with held:
        held.grow(29 << 20)
        refused = memory_server.post("/v1/completions", **WIDE)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["code"] == "memory_full"
    fields = {"model": memory_server.desk.name, "prompt": "w7", "stream": True, "max_tokens": 3}
    with memory_server.client.stream("POST", "/v1/completions", json=fields) as answer:
        assert answer.status_code == 200
        answer.read()
    until(lambda: memory_server.counted("degarble_memory_bytes") == 0)


def test_slow_bodies_are_counted_while_they_come(memory_server: Running) -> None:
    async def ask() -> int:
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")],
        }  # fmt: skip
        seen: list[int] = []
        status = 0

        async def receive() -> dict[str, Any]:
            seen.append(memory_server.service._memory.in_use)
            return {"type": "http.request", "body": b" " * 1000, "more_body": len(seen) < 4}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)

        await memory_server.app(scope, receive, send)
        assert seen == sorted(seen)
        assert seen[-1] > seen[0]
        return status

    assert asyncio.run(ask()) == 400
    assert memory_server.service._memory.in_use == 0


# --------------------------------------------------------------------------------------------------
# Metrics: what Prometheus reads, and that nothing is counted twice.

LINE = re.compile(r"degarble_[a-z_]+(\{([a-z]+=\"([^\"\\\n]|\\.)*\",?)+\})? -?[0-9.e+-]+")
GAUGES: Gauges = {name: [({}, 1.0)] for name, (kind, *_) in FAMILIES.items() if kind == "gauge"}


def test_counts_and_histograms_are_written() -> None:
    metrics = Metrics()
    metrics.count("requests_total", path="/x", status="200")
    metrics.count("requests_total", 2, path="/x", status="200")
    for seconds in (0.004, 0.005, 0.3, 1000.0):
        metrics.observe("step_seconds", seconds)
    lines = metrics.text(GAUGES).splitlines()
    assert 'degarble_requests_total{path="/x",status="200"} 3' in lines
    assert 'degarble_step_seconds_bucket{le="0.005"} 2' in lines  # a bound belongs to its bucket
    assert 'degarble_step_seconds_bucket{le="300"} 3' in lines
    assert 'degarble_step_seconds_bucket{le="+Inf"} 4' in lines
    assert "degarble_step_seconds_count 4" in lines
    assert "degarble_step_seconds_sum 1000.309" in lines
    assert all(LINE.fullmatch(line) for line in lines if not line.startswith("# "))
    for name, (kind, _, _) in FAMILIES.items():
        assert f"# TYPE degarble_{name} {kind}" in lines


def test_labels_are_escaped() -> None:
    text = Metrics().text({**GAUGES, "info": [({"model": 'a"b\\c\nd'}, 1.0)]})
    assert 'degarble_info{model="a\\"b\\\\c\\nd"} 1' in text.splitlines()
