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
from degarble.suites.hang_guard import HANG_SECONDS, until
from degarble.suites.serve import proven_cases as cases

if TYPE_CHECKING:
    from pathlib import Path

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
    told: list[str] = []
    proven = ProvenStart(
        how(checkpoint, *command, "--port", port, url=f"http://127.0.0.1:{port}"), told.append
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
    assert told[-1] == "ready"


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
        ProvenStart, "steps", lambda self: [each for each in whole(self) if each.name != "audit"]
    )


@pytest.mark.usefixtures("without_audit")
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ((sys.executable, "-c", "raise SystemExit(7)"), "serve: the server ended with status 7"),
        (("/nowhere/server",), "serve: /nowhere/server cannot be started"),
    ],
)
def test_a_server_that_does_not_come_up_is_told(
    checkpoint: Path, command: tuple[str, ...], reason: str
) -> None:
    proven = ProvenStart(how(checkpoint, *command), lambda _text: None)
    proven.run()
    assert proven.progress.status == FAILED
    assert proven.progress.reason.startswith(reason)


@pytest.mark.usefixtures("without_audit")
def test_a_spoilt_codec_is_told(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(night_codecs, "BLOCK_SCALE", 0x39)
    proven = ProvenStart(how(checkpoint, "/nowhere"), lambda _text: None)
    proven.run()
    assert proven.progress.reason.startswith("known answers: 1 of ")


@pytest.mark.usefixtures("without_audit")
def test_without_a_gpu_nothing_is_taken_for_granted(checkpoint: Path) -> None:
    asked = how(checkpoint, "/nowhere")
    proven = ProvenStart(StartOptions(**(vars(asked) | {"gpu": True})), lambda _text: None)
    proven.run()
    assert proven.progress.status == FAILED
    assert proven.progress.reason.startswith("first minute: ")


def test_the_first_minute_of_a_device_is_told_by_its_last_line() -> None:
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
