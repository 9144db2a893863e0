"""The capture switch of a live server: what it captures is judged by `check`, others go on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.capture import options as capture_asked
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.writer import CaptureWriter
from degarble.harness.commands.check.check import CheckRun, CheckSettings
from degarble.harness.inference.generation import Limits, Sampling
from degarble.harness.inference.model import open_model
from degarble.harness.report.verdict import Verdict
from degarble.harness.serve.capturing import RequestCapture
from degarble.harness.serve.engine import RunningSequence, Ticket
from degarble.harness.serve.messages import SequenceRequest
from degarble.suites.commands.calls import call
from degarble.suites.serve.proven_cases import TINY
from degarble.suites.serve.serving_cases import running
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.suites.serve.serving_cases import Running

PROMPTS = ("anna paints", "the old fox sees", "petra keeps", "emil visits")
TOKEN = "0123456789abcdef-0123456789"


def ask(server: Running, method: str, **fields: Any) -> dict[str, Any]:
    found = server.client.request(method, "/capture", json=fields if method == "POST" else None)
    assert found.status_code == 200, found.text
    made: dict[str, Any] = found.json()
    return made


def complete(server: Running, prompt: str, request: str) -> dict[str, Any]:
    fields = {"model": "words", "prompt": prompt, "temperature": 0, "max_tokens": 3}
    head = {"x-request-id": request}
    made: dict[str, Any] = server.client.post("/v1/completions", json=fields, headers=head).json()
    return made


def spoil(server: Running) -> None:
    """Gate and up of one layer's shared expert change places, as a wrong loader has it."""
    calls = server.desk.model.logits_model.bound.calls
    own = calls["layers.1.ffn.shared.w13"]

    def swapped(inputs: Any, weights: Any) -> Any:
        out = own(inputs, weights)["out"]
        return {"out": out.roll(out.shape[-1] // 2, -1)}

    calls["layers.1.ffn.shared.w13"] = swapped


@pytest.mark.parametrize("spoilt", [False, True])
def test_one_request_among_others_is_captured_and_judged(tmp_path: Path, spoilt: bool) -> None:
    with running(TINY, captures=tmp_path / "captures") as server:
        if spoilt:
            spoil(server)
        alone = [complete(server, prompt, "")["choices"][0]["text"] for prompt in PROMPTS]
        opened = ask(server, "POST", requests=["mine"])
        assert (opened["state"], opened["capture"]) == ("open", "capture-0001")
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            names = ["mine", "other", "mine-too", "unmined"]
            done = list(
                pool.map(lambda pair: complete(server, *pair), zip(PROMPTS, names, strict=True))
            )
        assert [each["choices"][0]["text"] for each in done] == alone
        assert done[0]["id"] == "cmpl-mine"
        found = ask(server, "DELETE")
        assert sorted(found["requests"]) == ["mine-0", "mine-too-0"]
        assert ask(server, "GET") == {"state": "closed"}
    folder = tmp_path / "captures" / "capture-0001"
    capture = Capture.open(folder)
    assert capture.complete
    ids = {tuple(each["prompt"]) for each in capture.facts["sequences"]}
    assert {tuple(server.desk.tokenizer.encode(PROMPTS[n])) for n in (0, 2)} == ids
    with CheckRun(CheckSettings(folder, TINY)) as run:
        checked = run.judge()
    if not spoilt:
        assert checked.verdict is Verdict.AGREES
        return
    assert checked.verdict is Verdict.DIFFERS
    (origin,) = checked.origins
    assert origin.discrepancy.site.component == "layers.1.ffn.shared.w13"
    assert origin.diagnosed is not None
    assert origin.diagnosed.named[0].fault.id == "M14.swapped"


def test_a_capture_keeps_its_bounds(tmp_path: Path) -> None:
    with running(write_speaker(tmp_path / "model"), captures=tmp_path / "captures") as server:
        ask(server, "POST", count=1, layers="0", components="attn.wq_a", tokens="0-1")
        for name in ("a", "b"):
            complete(server, "w7 w8 w9", name)
        assert ask(server, "GET")["requests"] == ["a-0"]
        found = ask(server, "DELETE")
        capture = Capture.open(tmp_path / "captures" / found["capture"])
        assert {captured_call.component for captured_call in capture.calls} == {
            "layers.0.attn.wq_a"
        }
        ask(server, "POST", max_bytes=50_000)
        complete(server, "w7 w8 w9", "c")
        found = ask(server, "DELETE")
        assert found["ended"] == "bytes"
        assert Capture.open(tmp_path / "captures" / found["capture"]).complete
        assert found["capture"] == "capture-0002"


def test_after_its_end_a_captured_line_shares_steps_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line stands first in the step: it was alone when its capture ended by seconds."""
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(capture_asked, "time", clock)
    with open_model(write_speaker(tmp_path / "model")) as model:
        switch = RequestCapture(tmp_path / "captures", model)
        switch.start({"requests": ["mine"], "seconds": 1})
        mine, other = (
            RunningSequence(
                Ticket(print, name), 0, SequenceRequest((7, 8, 9), Sampling(), Limits(5))
            )
            for name in ("mine", "other")
        )
        assert switch.parted([mine, other]) == [[other], [mine]]
        clock.monotonic = lambda: 1.1
        [both] = switch.parted([mine, other])
        with switch.watching(both, [[1], [2]]):
            pass
        switch.close()


def test_a_disk_that_fails_ends_the_capture_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with running(write_speaker(tmp_path / "model"), captures=tmp_path / "captures") as server:
        ask(server, "POST")
        monkeypatch.setattr(CaptureWriter, "call", full)
        assert complete(server, "w7 w8", "a")["usage"]["completion_tokens"] == 3
        found = ask(server, "DELETE")
        assert found["ended"] == "error"
        assert "No space left" in found["error"]


def test_capture_requests_that_cannot_be_met_are_refused(tmp_path: Path) -> None:
    with running(write_speaker(tmp_path / "model"), captures=tmp_path / "captures") as server:
        client = server.client
        assert client.delete("/capture").json()["error"]["code"] == "capture_closed"
        for fields, text in (({"layers": "99"}, "--layers"), ({"folder": "/x"}, "folder")):
            found = client.post("/capture", json=fields)
            assert found.status_code == 400
            assert text in found.text
        assert client.get("/capture").json() == {"state": "closed"}
        ask(server, "POST")
        assert client.post("/capture", json={}).json()["error"]["code"] == "capture_open"
        assert (
            client.request("GET", "/capture", headers={"host": "evil.example"}).status_code == 403
        )
    with running(write_speaker(tmp_path / "other")) as server:
        assert server.client.get("/capture").status_code == 404
    with running(tmp_path / "other", token=TOKEN, captures=tmp_path / "more") as server:
        assert server.client.get("/capture").status_code == 401
        head = {"authorization": f"Bearer {TOKEN}"}
        assert server.client.get("/capture", headers=head).status_code == 200


def test_captures_beyond_this_machine_need_a_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("--host", "0.0.0.0", "--without-token", "--captures", tmp_path / "captures")
    done = call(capsys, "serve", write_speaker(tmp_path / "model"), *line)
    assert done.status == 2
    assert "--captures" in done.err
    (tmp_path / "file").write_text("x")
    done = call(capsys, "serve", tmp_path / "model", "--captures", tmp_path / "file")
    assert done.status == 2
