"""The command line of an engine: what is read from it, what is added, what is refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from degarble.harness.base.errors import (
    InvalidArgument,
    MissingDependency,
    UnusableServer,
    WorkerLost,
)
from degarble.harness.inference.processes import free_port
from degarble.harness.vllm import capture as plugin
from degarble.harness.vllm.engine.command import (
    EngineCommand,
    RecordingEngine,
    is_engine_command,
    recording_engine,
)
from degarble.harness.vllm.engine.server import Caller
from degarble.suites.commands.calls import call
from degarble.suites.house.repository import ROOT
from degarble.suites.serve.proven_cases import TINY
from degarble.suites.vllm.engine.stand_in import Server
from degarble.suites.vllm.vllm_served import PLANT


def test_a_command_line_is_read() -> None:
    line = "A=1 /opt/bin/vllm serve ck --port=81 -tp 4 --enable_expert_parallel --host 0.0.0.0"
    command = EngineCommand.from_text(line)
    assert command.variables == {"A": "1"}
    assert (command.model, command.host, command.port) == ("ck", "127.0.0.1", 81)
    assert command.loader == "vllm:tp=4,ep=4"
    plain = EngineCommand.from_text("python -m vllm.entrypoints.openai.api_server --model ck")
    assert (plain.model, plain.port, plain.loader) == ("ck", 8000, "vllm")


def test_what_a_capture_needs_is_added_once() -> None:
    command = EngineCommand.from_text("vllm serve ck --max-model-len 64")
    words = command.recorded()
    assert words[:5] == ["vllm", "serve", "ck", "--max-model-len", "64"]
    assert words[5:] == [
        "--enforce-eager", "--worker-extension-cls", plugin.EXTENSION,
        "--middleware", plugin.SWITCH,
    ]  # fmt: skip
    assert EngineCommand(tuple(words)).recorded() == words


def read_and_record(line: str) -> None:
    command = EngineCommand.from_text(line)
    assert command.model
    assert command.loader
    command.require_startable()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("vllm serve ck | tee log", "without pipes"),
        ("vllm serve 'ck", "No closing quotation"),
        ("python -m sglang.launch_server --model ck", "vllm serve CKPT"),
        ("vllm serve ck -pp 2", "-pp"),
        ("vllm serve --port 1", "the word after `serve`"),
        ("vllm serve ck --port many", "--port"),
        ("vllm serve ck -tp many", "a number of GPUs"),
        ("vllm serve ck --worker-extension-cls mine.Own", "mine.Own"),
    ],
)
def test_lines_that_cannot_be_recorded_are_refused(line: str, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        read_and_record(line)


def test_a_program_that_is_missing_is_refused_before_anything_starts() -> None:
    with pytest.raises(MissingDependency, match="vllm-of-nobody"):
        EngineCommand.from_text("vllm-of-nobody serve ck").require_startable()


@pytest.mark.parametrize(
    ("text", "is_one"), [("vllm serve ck", True), ("ck", False), ("a folder", False)]
)
def test_a_command_line_is_told_from_a_path(text: str, is_one: bool) -> None:
    assert is_engine_command(text) is is_one


def test_an_engine_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    script = tmp_path / "vllm.py"
    script.write_text("raise ValueError('no GPU here')")
    command = EngineCommand.from_text(f"{sys.executable} {script} serve ck --port {free_port()}")
    with (
        pytest.raises(WorkerLost, match="ValueError: no GPU here"),
        recording_engine(command, tmp_path / "captures", tmp_path / "log", lambda _step: None),
    ):
        pytest.fail("it cannot answer")


def test_a_server_without_the_switch_is_refused(tmp_path: Path) -> None:
    with Server() as server:
        engine = RecordingEngine(Caller(server.port), None, "token", tmp_path)
        with pytest.raises(UnusableServer, match="/v1/models"):
            engine.capture(("a",), 1, lambda _step: None)


# --------------------------------------------------------------------------------------------------
# `degarble doctor --engine`, played with the stand-in


def doctored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], port: int, planted: str = ""
) -> tuple[int, dict[str, Any]]:
    served = f"-m degarble.suites.vllm.vllm_served serve {TINY} --port {port} --api-key secret"
    line = f"{PLANT}={planted} PYTHONPATH={ROOT / '.types'} {sys.executable} {served}"
    done = call(capsys, "--json", "doctor", TINY, "--engine", line, "--out", tmp_path / "out")
    return done.status, done.document


@pytest.mark.slow
def test_a_healthy_engine_is_recorded_and_agrees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    status, document = doctored(tmp_path, capsys, port)
    assert (status, document["verdict"], document["headline"]) == (0, "AGREES", "AGREES")
    assert document["kernel_tested"]
    assert Path(str(document["report"])).is_file()
    assert document["next"] == f"degarble probe http://127.0.0.1:{port}"
    log = (tmp_path / "out" / "engine.log").read_text()
    assert "Traceback" not in log, os.linesep + log


@pytest.mark.slow
def test_a_loader_fault_of_an_engine_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, document = doctored(tmp_path, capsys, free_port(), "gate_up_swapped")
    assert (status, document["verdict"]) == (1, "DIFFERS")
    (origin,) = document["origins"]
    assert (origin["layer"], origin["component"]) == (1, "ffn.shared.w13")
    assert origin["fault"] == "M14.swapped"
    assert str(document["next"]).endswith("reproduce.py")
