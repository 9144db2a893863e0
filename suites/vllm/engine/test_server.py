"""A server's command line, its environment, its life, and what is refused before one is started."""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, distributions
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import MissingDependency, MissingDevice, UnknownName
from degarble.harness.vllm import capture as vllm_capture
from degarble.harness.vllm.engine import plants, server
from degarble.harness.vllm.engine.prove import SERVERS
from degarble.harness.vllm.engine.server import Caller, RunningServer, ServerCase
from degarble.harness.vllm.parts import read_options
from degarble.suites.hang_guard import HANG_SECONDS

if TYPE_CHECKING:
    from pathlib import Path


def value(line: list[str], name: str) -> str:
    return line[line.index(name) + 1]


@pytest.mark.parametrize("asked", SERVERS, ids=lambda each: each.name)
def test_each_line_asks_for_the_plugin_with_options_that_it_reads(
    asked: ServerCase, tmp_path: Path
) -> None:
    line = asked.line(tmp_path / "ck", 8101, tmp_path / "told")
    assert value(line, "--quantization") == "degarble"
    read = read_options(json.loads(value(line, "--additional-config")))
    assert read.parts == asked.parts
    assert read.told == str(tmp_path / "told")
    assert ("--enforce-eager" in line) != asked.graphs
    assert ("--worker-extension-cls" in line) != asked.graphs  # no capture of recorded graphs
    assert ("--enable-expert-parallel" in line) == (asked.ranks > 1)


def test_the_extension_points_that_a_line_names_are_there(tmp_path: Path) -> None:
    line = SERVERS[0].line(tmp_path, 1, tmp_path)
    for option in ("--worker-extension-cls", "--middleware"):
        module, _, name = value(line, option).rpartition(".")
        assert hasattr(importlib.import_module(module), name)


def test_a_plant_is_an_entry_point_of_its_server_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/known")
    for name in ("VLLM_API_KEY", vllm_capture.TOKEN_VARIABLE):
        monkeypatch.setenv(name, "the caller's")
    captures = tmp_path / "captures"
    plain = server.environment(SERVERS[0], captures, tmp_path / "site")
    assert (plain["VLLM_PLUGINS"], plain["PYTHONPATH"]) == ("degarble", "/known")
    assert plain[vllm_capture.FOLDER_VARIABLE] == str(captures)
    assert "the caller's" not in plain.values()
    assert plain["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "0"
    planted = next(case for case in SERVERS if case.plant)
    made = server.environment(planted, captures, tmp_path / "site")
    assert made["VLLM_PLUGINS"].split(",") == ["degarble", plants.NAME]
    assert made[plants.VARIABLE] == planted.plant
    site = made["PYTHONPATH"].split(os.pathsep)[0]
    (found,) = distributions(path=[site])
    (point,) = found.entry_points
    assert point.group == "vllm.general_plugins"
    assert point.load() is plants.register


def test_unknown_plants_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plants.VARIABLE, raising=False)
    plants.register()
    monkeypatch.setenv(plants.VARIABLE, "weeds")
    with pytest.raises(UnknownName, match="weeds"):
        plants.register()
    assert {case.plant for case in SERVERS if case.plant} == set(plants.PLANTS)


def test_without_vllm_and_without_gpus_the_proof_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(_: str) -> str:
        raise PackageNotFoundError

    installed = importlib.import_module("degarble.harness.vllm.installed")
    monkeypatch.setattr(installed, "version", absent)
    with pytest.raises(MissingDependency, match="vllm"):
        server.require_engine()
    monkeypatch.setattr(installed, "version", lambda _: "0.26.0")
    torch = importlib.import_module("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert server.require_engine() == "0.26.0"
    with pytest.raises(MissingDevice, match="GPUs = 1"):
        server.require_engine(2)


SERVE = [sys.executable, "-m", "degarble.suites.vllm.engine.stand_in"]


def test_a_server_is_waited_for_and_ended(tmp_path: Path) -> None:
    with RunningServer([*SERVE, "18457"], os.environ, tmp_path / "log") as running:
        caller = Caller(18457)
        assert running.answers(caller, HANG_SECONDS)
        assert caller.complete([1, 2], 3)["token_ids"] == [16, 15, 9]
        assert list(caller.gauges("vllm:num")) == ["vllm:num_requests_running{}"]
        assert "serving 18457" in running.log_text()
    assert running.process.poll() is not None


def test_the_cause_of_an_end_is_reported_and_not_its_messenger(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with RunningServer([sys.executable, "-c", ""], os.environ, log) as running:
        running.process.wait()
        log.write_text(
            "(Worker) ERROR degarble.harness.base.errors.LayoutMismatch: loader proof = 'x'\n"
            "(API) RuntimeError: Engine core initialization failed. See root cause above.\nwarned\n"
        )
        cause = "degarble.harness.base.errors.LayoutMismatch: loader proof = 'x'"
        assert running.last_words() == cause
        log.write_text("killed")
        assert running.last_words() == "killed"


def test_a_server_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    with RunningServer([sys.executable, "-c", "print('no'); raise SystemExit(3)"], os.environ,
                 tmp_path / "log") as running:  # fmt: skip
        assert not running.answers(Caller(1), HANG_SECONDS)
    assert running.log_text() == "no\n"
