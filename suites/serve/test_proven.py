"""The start of a container: steps, known answers, and planted faults that stop it."""

from __future__ import annotations

import json
import sys
import threading
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.nightly import codecs as night_codecs
from degarble.harness.serve import smoke as smoking
from degarble.harness.serve.messages import Bounds
from degarble.harness.serve.proven import (
    FAILED,
    READY,
    HealthApp,
    ProvenStart,
    StartOptions,
    StepFailed,
    in_a_process,
    main,
)
from degarble.harness.serve.serving import Listener, bound_socket
from degarble.harness.serve.smoke import Server, SmokeCheck, alike, garbage, smoke
from degarble.harness.serve.smoke import main as smoke_main
from degarble.suites.hang_guard import HANG_SECONDS, until
from degarble.suites.serve import proven_cases as cases
from degarble.suites.serve.serving_cases import running
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.suites.serve.serving_cases import Running


NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("proven")
    made = cases.healthy(folder / "healthy")
    cases.answers(made, folder / "answers.json")
    return made


def how(checkpoint: Path, *command: str, url: str = NOWHERE, **more: Any) -> StartOptions:
    answers = checkpoint.parent / "answers.json"
    return StartOptions(checkpoint, command, url, answers, gpu=False, seconds=HANG_SECONDS, **more)


def health(port: int, path: str = "/health") -> tuple[int, dict[str, Any]]:
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=HANG_SECONDS) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_healthy_checkpoint_is_served_and_ready_only_then(checkpoint: Path) -> None:
    with bound_socket("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
    command = (sys.executable, "-m", "degarble.harness.cli.main", "serve", str(checkpoint))
    lines: list[str] = []
    proven = ProvenStart(
        how(checkpoint, *command, "--port", port, url=f"http://127.0.0.1:{port}"), lines.append
    )
    listener = Listener(HealthApp(proven.progress), Bounds(), lambda: None)
    with bound_socket("127.0.0.1", 0) as listening:
        own = listening.getsockname()[1]
        web = threading.Thread(target=listener.run, kwargs={"sockets": [listening]})
        web.start()
        try:
            until(lambda: listener.started)
            assert health(own)[0] == 503
            assert health(own, "/health/live")[0] == 200
            assert health(own, "/elsewhere")[0] == 404
            run = threading.Thread(target=proven.run)
            run.start()
            until(lambda: proven.progress.status in (READY, FAILED))
            status, found = health(own)
            assert (status, found["status"], found["reason"]) == (200, READY, "")
            names = ["audit", "known answers", "first minute", "serve", "coherence"]
            assert list(found["passed"]) == names
            assert found["passed"]["coherence"] == "8 checks passed"
            process = proven._process
            assert process is not None
            proven.end()
            assert process.poll() == 0
            run.join(HANG_SECONDS)
            assert health(own)[1]["status"] == "ending"
        finally:
            proven.end()
            listener.should_exit = True
            web.join(HANG_SECONDS)
    assert lines[-1] == "ready"


def test_swapped_nibbles_are_never_served(checkpoint: Path, tmp_path: Path) -> None:
    swapped = cases.with_swapped_nibbles(checkpoint, tmp_path / "swapped")
    (tmp_path / "answers.json").write_bytes((checkpoint.parent / "answers.json").read_bytes())
    touched = tmp_path / "started"
    proven = ProvenStart(how(swapped, "touch", str(touched)), lambda _text: None)
    proven.run()
    found = proven.progress.document()
    assert (found["status"], found["ready"], found["step"]) == (FAILED, False, "audit")
    assert f"numbers.nibble_order at {cases.SWAPPED}" in found["reason"]
    assert not touched.exists()


@pytest.fixture
def without_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ProvenStart.steps
    monkeypatch.setattr(
        ProvenStart, "steps", lambda self: [step for step in whole(self) if step.name != "audit"]
    )


@pytest.mark.usefixtures("without_audit")
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ((sys.executable, "-c", "raise SystemExit(7)"), "serve: the server ended with status 7"),
        (("/nowhere/server",), "serve: /nowhere/server cannot be started"),
    ],
)
def test_a_server_that_does_not_start_is_reported(
    checkpoint: Path, command: tuple[str, ...], reason: str
) -> None:
    proven = ProvenStart(how(checkpoint, *command), lambda _text: None)
    proven.run()
    assert proven.progress.status == FAILED
    assert proven.progress.reason.startswith(reason)


@pytest.mark.usefixtures("without_audit")
def test_a_spoilt_codec_is_reported(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(night_codecs, "BLOCK_SCALE", 0x39)
    proven = ProvenStart(how(checkpoint, "/nowhere"), lambda _text: None)
    proven.run()
    assert proven.progress.reason.startswith("known answers: 1 of ")


@pytest.mark.usefixtures("without_audit")
def test_without_a_gpu_nothing_is_taken_for_granted(checkpoint: Path) -> None:
    start_options = how(checkpoint, "/nowhere")
    proven = ProvenStart(StartOptions(**(vars(start_options) | {"gpu": True})), lambda _text: None)
    proven.run()
    assert proven.progress.status == FAILED
    assert proven.progress.reason.startswith("first minute: ")


def test_the_last_line_reports_the_first_minute_of_a_device() -> None:
    said = "print('loads'); print('7 steps passed')"
    assert in_a_process((sys.executable, "-c", said)) == "7 steps passed"
    with pytest.raises(StepFailed, match=r"multiply: wrong \(status 1\)"):
        in_a_process((sys.executable, "-c", "print('multiply: wrong'); raise SystemExit(1)"))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["nowhere", "--answers", "nowhere", "--", "true"], "--checkpoint = 'nowhere'"),
        (["{ckpt}", "--answers", "nowhere", "--", "true"], "--answers = 'nowhere'"),
        (["{ckpt}", "--answers", "{ckpt}/config.json", "--", "true"], "known answers"),
        (["{ckpt}", "--answers", "{answers}"], "COMMAND = 'none'"),
        (["{ckpt}", "--answers", "{answers}", "--against", "x", "--", "true"], "--against = 'x'"),
    ],
)
def test_what_is_not_there_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], line: list[str], told: str
) -> None:
    known = {"ckpt": checkpoint, "answers": checkpoint.parent / "answers.json"}
    assert main([each.format(**known) for each in line]) == 2
    assert told in capsys.readouterr().err


def test_a_port_in_use_is_refused(checkpoint: Path) -> None:
    with bound_socket("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        line = [str(checkpoint), "--answers", str(checkpoint.parent / "answers.json")]
        assert main([*line, "--health-port", port, "--", "true"]) == InvalidArgument.exit_status


class InProcess(Server):
    """A server without a socket."""

    def __init__(self, client: Any) -> None:
        super().__init__("http://127.0.0.1")
        self._client = client

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        found = self._client.get(path) if body is None else self._client.post(path, json=body)
        return found.status_code, found.json()


def checks(server: Running, known: dict[str, Any]) -> list[SmokeCheck]:
    return list(smoke(InProcess(server.client), known))


def test_a_healthy_server_is_coherent_and_another_model_is_not(tmp_path: Path) -> None:
    known = cases.answers(cases.TINY, tmp_path / "answers.json")
    assert smoking.read_answers(tmp_path / "answers.json")["answers"] == known["answers"]
    with running(cases.TINY) as server:
        found = checks(server, known)
    assert {check.name: check.holds for check in found} == {
        "models": True, "known answer": True, "text": True, "echo": True, "likelihood": True,
        "chat": None,
    }  # fmt: skip
    spoilt = {"answers": [each | {"mean": 0.0, "answer": "zebra"} for each in known["answers"]]}
    with running(cases.TINY) as server:
        found = checks(server, spoilt)
    wrong = [check.name for check in found if check.holds is False]
    assert wrong == ["known answer", "known answer", "likelihood", "likelihood"]
    assert found[1].line().startswith("FAILED    known answer: 0% of 'zebra'")


def test_a_server_that_refuses_is_reported(tmp_path: Path) -> None:
    known = {"answers": [{"prompt": "no such words", "answer": "a", "mean": -1.0}]}
    with running(write_speaker(tmp_path / "model")) as server:
        found = checks(server, known)
    assert found[1].name == "known answer"
    assert found[1].holds is False
    assert found[1].observed.startswith("400: ")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no text"),
        ("   \n", "no text"),
        ("a tree \ufffd\ufffd stands", "2 of 16 characters are no text"),
        ("a tree \x00\x07 stands", "2 of 16 characters are no text"),
        ("the the the the the the tree the", "'the' is 7 of 8 words"),
        ("one two three four five " * 40, "it repeats itself"),
        ("The old fox sees a tree, and anna paints it blue.", ""),
        ("Ein Fuchs saß am Fluss. 狐は木を見る。", ""),
    ],
)
def test_garbage_is_detected_by_its_form(text: str, told: str) -> None:
    found = garbage(text)
    assert found.startswith(told) if told else not found


def test_answers_are_alike_from_their_beginning() -> None:
    assert alike(" blue . yes", "blue . yes ") == 1
    assert alike("blue . no", "blue . yes") == 0.7
    assert alike("red", "blue") == 0
    assert alike("", "") == 1


def test_addresses_and_files_that_are_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.json").write_text("{}")
    known = tmp_path / "answers.json"
    known.write_text('{"answers": [{"prompt": "a", "answer": "b", "mean": -1}]}')
    for url, file, text in (
        ("ftp://x", known, "URL = 'ftp://x'"),
        ("http://127.0.0.1:9", known, "a server that answers"),
        ("http://127.0.0.1:9", tmp_path / "empty.json", "--answers"),
    ):
        assert smoke_main([url, "--answers", str(file)]) == 2
        assert text in capsys.readouterr().err
