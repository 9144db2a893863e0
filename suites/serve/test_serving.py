"""`degarble serve` as a command: its refusals, and (-m serve) real runs with a hundred clients."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch

from degarble.harness.cli.commands.inference import TOKEN_VARIABLE
from degarble.harness.inference.model import LogitsModel
from degarble.harness.serve import serving
from degarble.harness.serve.serving import Listener, bound_socket
from degarble.suites.commands.calls import call
from degarble.suites.hang_guard import HANG_SECONDS
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

TINY = Path(__file__).parents[2] / "references" / "tiny" / "v1"
TOKEN = "0123456789abcdef-0123456789"
PROMPT = "recall : anna paints blue . the old fox sees a tree . anna paints"


@pytest.fixture(autouse=True)
def _without_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


def test_a_port_in_use_is_refused_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_speaker(tmp_path / "model")
    with bound_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        done = call(capsys, "serve", folder, "--port", port)
    assert (done.status, done.out) == (2, "")
    assert f"--port = {port}" in done.err
    assert "a free port" in done.err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["--host", "0.0.0.0"], "--host = '0.0.0.0'"),
        (["--host", "::"], "--host = '::'"),
        (["--host", "example.org"], "--host = 'example.org'"),
        (["--port", "65536"], "--port = 65536"),
        (["--port", "-1"], "--port = -1"),
        (["--max-new-tokens", "0"], "--max-new-tokens = 0"),
        (["--max-prompt-tokens", "0"], "--max-prompt-tokens = 0"),
        (["--max-sequences", "0"], "--max-sequences = 0"),
        (["--time-limit", "nan"], "--time-limit = nan"),
        (["--max-memory", "0"], "--max-memory = 0"),
        (["--numerics", "fp8"], "--numerics = 'fp8'"),
        (["--name", ""], "--name = ''"),
        (["--token-file", "nowhere"], "--token-file = 'nowhere'"),
        (["--patch", "x.py"], "--patch"),
    ],
)
def test_options_are_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: list[str], told: str
) -> None:
    done = call(capsys, "serve", tmp_path, *line)
    assert done.status == 2
    assert told in done.err


@pytest.mark.parametrize(
    "token", ["", "short", "x" * 513, "with a space, and long", "unumlaütlich-"]
)
def test_a_bad_token_is_refused_and_never_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], token: str
) -> None:
    (tmp_path / "token").write_text(f"{token}\n", encoding="utf-8")
    done = call(capsys, "serve", tmp_path, "--token-file", tmp_path / "token")
    assert done.status == 2
    assert "--token-file = '" in done.err
    assert not token or token not in done.err


def test_a_token_comes_from_one_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    for more in (["--token-file", tmp_path / "token"], ["--without-token"]):
        done = call(capsys, "serve", tmp_path, *more)
        assert (done.status, TOKEN in done.err) == (2, False)
        assert "given together" in done.err


def test_an_empty_token_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret that was not filled in must not start a server that asks for none."""
    monkeypatch.setenv(TOKEN_VARIABLE, "")
    done = call(capsys, "serve", tmp_path)
    assert done.status == 2
    assert f"{TOKEN_VARIABLE} = '0 characters'" in done.err
    monkeypatch.delenv(TOKEN_VARIABLE)
    (tmp_path / "token").write_text("\n")
    assert "0 characters" in call(capsys, "serve", tmp_path, "--token-file", tmp_path / "token").err


def test_a_model_whose_first_token_cannot_be_chosen_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_speaker(tmp_path / "model")
    monkeypatch.setattr(LogitsModel, "logits", lambda *_: torch.full((1, 64), torch.nan))
    done = call(capsys, "serve", folder, "--port", 0)
    assert done.status == 2
    assert "64 of 64 not finite" in done.err
    assert "Audit the checkpoint" in done.err


def test_it_prints_its_address_and_ends_by_a_signal_with_status_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ending(Listener):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            asyncio.get_running_loop().call_later(0.1, signal.raise_signal, signal.SIGTERM)

    assert threading.current_thread() is threading.main_thread(), "where signals are handled"
    folder = write_speaker(tmp_path / "model")
    monkeypatch.setattr(serving, "Listener", Ending)
    before = signal.getsignal(signal.SIGTERM)
    done = call(capsys, "--json", "serve", folder, "--port", 0, "--name", "it")
    assert signal.getsignal(signal.SIGTERM) is before
    assert (done.status, done.err) == (0, "")
    assert done.document["model"] == "it"
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", done.document["url"])
    open_ = call(capsys, "serve", folder, "--port", 0, "--host", "0.0.0.0", "--without-token")
    assert open_.status == 0
    assert "Ctrl-C ends it" in open_.out
    assert "open beyond this machine, to anybody" in open_.err


@contextmanager
def process(*line: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, once it says where it is."""
    command = [sys.executable, "-m", "degarble.harness.cli.main", "serve", *line, "--port", "0"]
    with subprocess.Popen(
        command, env=os.environ | environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as running:  # fmt: skip
        try:
            assert running.stdout is not None
            said = running.stdout.readline()
            url = re.search(r"http://\S+/v1", said)
            assert url is not None, (said, running.stderr and running.stderr.read())
            yield running, url[0]
        finally:
            running.kill()


def client_of(url: str, token: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=token, max_retries=3, timeout=HANG_SECONDS)


def ready(url: str) -> None:
    end = time.monotonic() + HANG_SECONDS
    base = openai.OpenAI(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
    while True:
        try:
            base.get("/health/ready", cast_to=object)
        except openai.APIStatusError:
            assert time.monotonic() < end
            time.sleep(0.05)
        else:
            return


def generated(family: str, prompts: list[str], tokens: int, folder: Path) -> list[str]:
    (folder / "prompts.txt").write_text("\n".join(prompts) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "degarble.harness.cli.main", "--json", "generate",
         str(TINY / family), "--prompts", str(folder / "prompts.txt"),
         "--max-new-tokens", str(tokens)],
        capture_output=True, text=True, check=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    return [load["text"] for load in json.loads(done.stdout)["texts"]]


@pytest.mark.serve
@pytest.mark.parametrize("family", ["v4", "v32"])
def test_a_hundred_clients_lose_nothing(family: str, tmp_path: Path) -> None:
    """Half of them stream; ten more go away in the middle; texts equal `degarble generate`'s."""
    words = ["anna", "tom", "emil", "julia", "viktor", "xenia"]
    prompts = [f"{words[n % 6]} {'eats' if n % 2 else 'visits'}" for n in range(12)]
    wanted = dict(zip(prompts, generated(family, prompts, 24, tmp_path), strict=True))
    begin, together, found = threading.Barrier(110), Counter[str](), []

    def one(number: int, url: str) -> None:
        prompt = prompts[number % 12]
        how: dict[str, Any] = {
            "model": family, "prompt": prompt, "max_tokens": 24, "temperature": 0,
        }  # fmt: skip
        with client_of(url) as client:
            begin.wait(HANG_SECONDS)
            if number >= 100:  # reads one piece and leaves
                stream = client.completions.create(stream=True, **how | {"max_tokens": 1000})
                next(iter(stream))
                stream.close()
                together["left"] += 1
                return
            if number % 2:
                chunks = list(client.completions.create(stream=True, **how))
                text = "".join(chunk.choices[0].text for chunk in chunks)
            else:
                text = client.completions.create(**how).choices[0].text
            found.append((prompt, text))

    with process(str(TINY / family)) as (running, url), ThreadPoolExecutor(110) as pool:
        ready(url)
        start = time.perf_counter()
        for each in [pool.submit(one, n, url) for n in range(110)]:
            each.result(HANG_SECONDS)
        seconds = time.perf_counter() - start
        running.send_signal(signal.SIGTERM)
        assert running.wait(HANG_SECONDS) == 0
        assert running.stderr is not None
        assert running.stderr.read() == ""
    assert len(found) == 100
    assert [pair for pair in found if wanted[pair[0]] != pair[1]] == []
    assert together["left"] == 10
    tokens = 24 * 100
    print(f"100 clients: {seconds:.1f} s, {tokens / seconds:.0f} tokens/s")  # noqa: T201  a figure


@pytest.mark.serve
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_status_0(number: int) -> None:
    with process(str(TINY / "v4"), DEGARBLE_SERVE_TOKEN=TOKEN) as (running, url):
        ready(url)
        with pytest.raises(openai.AuthenticationError), client_of(url, "x" * 20) as wrong:
            wrong.models.list()
        with client_of(url, TOKEN) as client:
            assert client.models.list().data[0].id == "v4"
            chunks = client.completions.create(
                model="v4", prompt=PROMPT, max_tokens=40, temperature=0, stream=True
            )
            next(iter(chunks))  # the server is in the middle of the answer
            running.send_signal(number)
            assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
        out, err = running.communicate(timeout=HANG_SECONDS)
        assert running.returncode == 0
        assert TOKEN not in out + err
        assert err == ""
