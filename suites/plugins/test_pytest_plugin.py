"""The pytest plugin: what it selects, refuses and summarises, and the options of a night."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.plugins import presence, pytest_plugin
from degarble.harness.plugins.pytest_plugin import NightOptions, night_options
from degarble.suites.hang_guard import HANG_SECONDS
from degarble.suites.house.repository import ROOT

# --------------------------------------------------------------------------------------------------
# The plugin leaves out what cannot run, lists it, and never counts an omission as a pass.

pytest_plugins = ["pytester"]

PLUGIN = "degarble.harness.plugins.pytest_plugin"

SUITE = """
import pytest

@pytest.mark.b200
def test_device():
    pass

@pytest.mark.slow
@pytest.mark.faults
def test_museum():
    pass

@pytest.mark.needs("chromium")
def test_browser():
    pass

@pytest.mark.needs("--checkpoint")
def test_checkpoint(run_options):
    assert run_options.checkpoint.name == "ckpt"

def test_plain():
    pass
"""


class House:
    """A project that the plugin takes for its own, on a machine that has what is named."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester = pytester
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(pytest_plugin, "HOUSE", pytester.path)
        monkeypatch.delenv("CI", raising=False)
        self.has()

    def has(self, *names: str) -> None:
        present = {"gpu": "no CUDA device", "h200": "no CUDA device", "b200": "device is sm_90"}
        self.monkeypatch.setattr(
            pytest_plugin, "missing_device", lambda m: None if m in names else present[m]
        )
        self.monkeypatch.setattr(
            pytest_plugin, "missing_requirement", lambda n: None if n in names else f"no {n}"
        )

    def run(self, text: str, *arguments: str) -> tuple[int, str]:
        self.pytester.makepyfile(test_planted=text)
        result = self.pytester.runpytest_inprocess("-p", PLUGIN, "-rA", *arguments)
        return int(result.ret), "\n".join([*result.outlines, *result.errlines])


@pytest.fixture
def house(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> House:
    return House(pytester, monkeypatch)


def test_what_cannot_run_is_left_out_by_name_and_reason(house: House) -> None:
    status, text = house.run(SUITE)
    assert status == 0
    assert "PASSED test_planted.py::test_plain" in text
    assert "b200: 1 in test_planted.py: device is sm_90" in text
    assert "slow: 1 in test_planted.py: run with -m slow" in text
    assert "chromium: 1 in test_planted.py: no chromium" in text
    assert "--checkpoint: 1 in test_planted.py: not given" in text
    assert "1 passed, 4 deselected" in text


def test_what_can_run_runs(house: House) -> None:
    house.has("b200", "chromium")
    (house.pytester.path / "ckpt").mkdir()
    status, text = house.run(SUITE, "--checkpoint", "ckpt")
    assert status == 0
    assert "4 passed, 1 deselected" in text


def test_a_suite_of_two_devices_runs_on_either(house: House) -> None:
    text = "import pytest\n@pytest.mark.h200\n@pytest.mark.b200\ndef test_both(): pass\n"
    status, sentence = house.run(text + "def test_plain(): pass\n")
    assert status == 0
    assert "h200 or b200: 1 in test_planted.py: device is sm_90" in sentence
    for device in ("h200", "b200"):
        house.has(device)
        assert "1 passed" in house.run(text)[1]
        assert "1 passed" in house.run(text, "-m", device)[1]


def test_asking_for_an_absent_device_ends_with_status_2(house: House) -> None:
    status, text = house.run(SUITE, "-m", "b200")
    assert status == 2
    assert "REFUSED: -m = 'b200': expected a machine with b200. Device is sm_90." in text
    assert "passed" not in text


def test_a_summary_without_a_folder_ends_with_status_2_before_the_night(house: House) -> None:
    status, text = house.run(SUITE, "--summary", "nowhere/summary.md")
    assert status == 2
    assert "nowhere/summary.md': expected a file in a folder that exists. Make " in text
    assert "passed" not in text


def test_vllm_is_left_out_by_name_and_asking_without_it_ends_with_status_2(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import pytest\n@pytest.mark.vllm\ndef test_it(): pass\n"
    monkeypatch.setattr(pytest_plugin, "missing_vllm", lambda: "no vllm here")
    status, sentence = house.run(text + "def test_plain(): pass\n")
    assert status == 0
    assert "vllm: 1 in test_planted.py: no vllm here" in sentence
    status, sentence = house.run(text, "-m", "vllm")
    assert status == 2
    assert "expected a Python with vLLM. Here no vllm here." in sentence
    monkeypatch.setattr(pytest_plugin, "missing_vllm", lambda: None)
    assert house.run(text, "-m", "vllm")[0] == 0


def test_asking_for_everything_but_a_device_is_no_request(house: House) -> None:
    status, text = house.run(SUITE, "-m", "not b200")
    assert status == 0
    assert "1 passed" in text


def test_opt_in_suites_run_when_every_marker_is_requested(house: House) -> None:
    assert "1 passed" in house.run(SUITE, "-m", "slow and faults")[1]
    assert "faults: 1 in test_planted.py: run with -m faults" in house.run(SUITE, "-m", "slow")[1]


def test_ci_fails_where_a_requirement_is_missing(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    status, text = house.run(SUITE)
    assert status == 1
    assert "must: chromium: no chromium; CI must bring it" in text
    assert "--checkpoint: 1 in test_planted.py: not given" in text


@pytest.mark.parametrize(
    "body",
    [
        "@pytest.mark.strict\ndef test_s(): pytest.skip('no time')",
        "@pytest.mark.strict\n@pytest.mark.needs('chromium')\ndef test_s(): pass",
        "@pytest.mark.strict\n@pytest.mark.b200\ndef test_s(): pass",
    ],
)
def test_strict_suites_are_never_left_out(house: House, body: str) -> None:
    status, text = house.run(f"import pytest\n{body}\n")
    assert status == 1
    assert "FAILED test_planted.py::test_s" in text or "ERROR test_planted.py::test_s" in text


def test_unknown_requirement_is_refused(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest_plugin, "missing_requirement", presence.missing_requirement)
    text = "import pytest\n@pytest.mark.needs('{}')\ndef test_s(): pass\n"
    for name, near in [("chromum", "chromium"), ("--chekpoint", "--checkpoint")]:
        status, output = house.run(text.format(name))
        assert status != 0
        assert f"Did you mean {near}" in output


def test_other_projects_are_left_alone(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest_plugin, "HOUSE", house.pytester.path / "elsewhere")
    status, text = house.run(SUITE.replace("run_options.checkpoint.name == 'ckpt'", "True"))
    assert "deselected" not in text
    assert "PASSED test_planted.py::test_museum" in text
    assert status == 1  # the checkpoint suite runs, and has none


def test_an_option_that_names_nothing_ends_with_status_2(house: House) -> None:
    status, text = house.run(SUITE, "--captures", "nowhere")
    assert status == 2
    assert "nowhere': expected an existing path. Check the spelling." in text


def test_seed_comes_from_the_node_id(house: House) -> None:
    suite = "import pytest\n@pytest.mark.parametrize('x', 'ab')\ndef test_s(x, seed): print(seed)\n"
    expected = [
        int.from_bytes(hashlib.sha256(f"test_planted.py::test_s[{x}]".encode()).digest()[:4], "big")
        for x in "ab"
    ]
    alone = house.run(suite, "-k", "b")[1].splitlines()
    together = house.run("def test_first(): pass\n" + suite)[1].splitlines()
    assert str(expected[1]) in alone
    assert [line for line in together if line in map(str, expected)] == list(map(str, expected))


@pytest.mark.parametrize(
    ("expression", "asked"),
    [
        ("", set()),
        ("b200", {"b200"}),
        ("not b200", set()),
        ("b200 and not slow", {"b200"}),
        ("not (slow or not h200)", {"h200"}),
        ("needs(chromium=1) or faults", {"needs", "faults"}),
        ("b200 and", set()),
    ],
)
def test_requested_markers(expression: str, asked: set[str]) -> None:
    assert pytest_plugin.requested_markers(expression) == asked


def test_hypothesis_is_deterministic() -> None:
    assert settings.default is not None
    assert settings.default.derandomize
    assert settings.default.database is None


def test_what_several_workers_omit_is_counted_once(house: House) -> None:
    conftest = f"""
        from types import SimpleNamespace
        from {PLUGIN.rpartition(".")[0]} import pytest_plugin

        def pytest_sessionfinish(session):
            omitted = [["b200", "no device", ["a.py::test_x", "b.py::test_y"]]]
            output = {{"degarble_omitted": omitted}}
            for _ in range(2):
                node = SimpleNamespace(config=session.config, workeroutput=output)
                pytest_plugin.pytest_testnodedown(node)
    """
    house.pytester.makeconftest(conftest)
    assert "b200: 2 in a.py, b.py: no device" in house.run("def test_plain(): pass")[1]


def test_a_worker_reports_its_omissions(tmp_path: Path) -> None:
    """In real processes, with the plugin's files lying as a wheel lays them."""
    bytecode = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "harness", tmp_path / "degarble" / "harness", ignore=bytecode)
    (tmp_path / "pytest.ini").touch()
    suite = tmp_path / "degarble" / "suites" / "test_planted.py"
    suite.parent.mkdir()
    suite.write_text(
        "import pytest\n"
        "@pytest.mark.b200\ndef test_b(): pass\n"  # no machine is both
        "@pytest.mark.h200\ndef test_h(): pass\n"
        "def test_plain(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-n", "1", str(suite)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    omitted = [line for line in done.stdout.splitlines() if "00: 1 in" in line]
    assert omitted, done.stdout
    assert all("degarble/suites/test_planted.py" in line for line in omitted)
    assert len(omitted) == len(set(omitted)) <= 2


def test_the_fixture_judge_reports_everything_about_a_wrong_kernel(house: House) -> None:
    house.pytester.makepyfile(
        """
import torch

x, w = torch.arange(512.).reshape(8, 64).sin(), torch.arange(1024.).reshape(16, 64).cos()

def test_right(judge):
    judge("gemm", x, w, x @ w.T).require()

def test_wrong(judge):
    judge("gemm", x, w, (x @ w.T) * 2).require()
"""
    )
    result = house.pytester.runpytest_inprocess("-p", PLUGIN)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*128 of 128 elements are each beyond their budget*"])
    result.stdout.fnmatch_lines(["*cause: M43.whole: a gain of 2.000*"])


@pytest.mark.parametrize(
    ("rank", "night", "written"),
    [("1", True, False), ("0", True, True), ("1", False, True), ("", False, True)],
)
def test_of_a_night_over_ranks_the_first_writes_the_results(
    house: House, rank: str, night: bool, written: bool
) -> None:
    house.monkeypatch.setenv("WORLD_SIZE", "2")
    house.monkeypatch.setenv("RANK", rank)
    (house.pytester.path / "ckpt").mkdir()
    more = ("--checkpoint", "ckpt") if night else ()
    status, text = house.run("def test_plain(): pass", "--junitxml", "out.xml", *more)
    assert status == 0, text
    assert (house.pytester.path / "out.xml").exists() == written


def test_a_night_of_a_rank_that_is_none_is_refused(house: House) -> None:
    house.monkeypatch.setenv("WORLD_SIZE", "2")
    house.monkeypatch.setenv("RANK", "")
    (house.pytester.path / "ckpt").mkdir()
    with pytest.raises(pytest.exit.Exception, match="RANK of WORLD_SIZE"):
        house.pytester.parseconfigure("-p", PLUGIN, "--checkpoint", "ckpt")


# --------------------------------------------------------------------------------------------------
# The night's options on the command line, and what they refuse.


def said(**given: str) -> NightOptions:
    found: Any = SimpleNamespace(getoption=lambda name: given.get(name.removeprefix("--")))
    return night_options(found)


def test_no_option_is_the_default() -> None:
    assert said() == NightOptions()


def test_options_are_read() -> None:
    found = said(repeats="2", museum="whole", store="h.sqlite", ledger="known.yaml", commit="abc")
    assert (found.repeats, found.museum, found.store, found.commit) == (
        2,
        "whole",
        "h.sqlite",
        "abc",
    )
    assert found.ledger == Path("known.yaml").absolute()


@pytest.mark.parametrize("repeats", ["1", "0", "-4", "four", "65", "", "99999999999999999999"])
def test_repeats_that_are_none_are_refused(repeats: str) -> None:
    with pytest.raises(InvalidArgument, match="--repeats"):
        said(repeats=repeats)


def test_an_unknown_extent_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="--museum = 'all'"):
        said(museum="all")
