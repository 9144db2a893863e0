"""Workflows call scripts and targets that exist, with pinned actions and the least permissions."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml

from degarble.harness.plugins.pytest_plugin import OPTIONS
from degarble.suites.house.repository import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FOLDER = ROOT / ".github" / "workflows"
_TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
# In `make` a word with = is a variable of the script, and has to stand there.
_VARIABLE = re.compile(r"^#   ([A-Z]+)  ", re.MULTILINE)
_CALL = re.compile(r"\$\{([A-Z]+)")


def workflows() -> list[Path]:
    return sorted(FOLDER.glob("*.yml"))


def targets() -> set[str]:
    return set(_TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))


def variables() -> set[str]:
    text = (ROOT / ".ci" / "nightly").read_text(encoding="utf-8")
    return set(_VARIABLE.findall(text)) | {"COMMIT"}


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def faults(workflow: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a workflow."""
    if workflow.get("permissions") != {"contents": "read"}:
        yield f"permissions {workflow.get('permissions')}"
    for name, job in workflow["jobs"].items():
        if not isinstance(job.get("timeout-minutes"), int):
            yield f"{name}: no time limit"
        if "permissions" in job:
            yield f"{name}: permissions of its own"
        if "self-hosted" in job["runs-on"]:
            for step in job["steps"]:
                cleans = step.get("with", {}).get("clean") is not False
                if step.get("uses", "").startswith("actions/checkout") and cleans:
                    yield f"{name}: checkout deletes what the machine keeps"
    for step in steps(workflow):
        if "uses" in step and not re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]):
            yield f"action {step['uses']} is not one of GitHub's own, pinned by version"
        keeps_token = step.get("with", {}).get("persist-credentials") is not False
        if step.get("uses", "").startswith("actions/checkout") and keeps_token:
            yield "checkout leaves its token behind"
        if "run" in step:
            yield from _wrong_command(step["run"])


def _wrong_command(command: str) -> Iterator[str]:
    words = shlex.split(command)
    if words[0] == "make":
        for word in words[1:]:
            name, is_variable, _ = word.partition("=")
            known = variables() if is_variable else targets()
            if name not in known:
                yield f"make knows no {name}"
        return
    script = ROOT / words[0]
    if not (script.is_file() and os.access(script, os.X_OK)):
        yield f"{words[0]} is no script of this repository"


@pytest.mark.parametrize("path", workflows(), ids=lambda path: path.name)
def test_a_workflow_calls_what_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert list(faults(yaml.safe_load(text))) == []
    secrets = set(re.findall(r"secrets\W+(\w+)", text))
    assert secrets <= ({"STORE"} if path.name == "nightly.yml" else set())
    assert "vars.STORE" not in text, "variables are printed, and a URL may hold a password"


def test_there_are_the_two_that_docs_name() -> None:
    assert {path.name for path in workflows()} == {"ci.yml", "nightly.yml"}
    nightly = yaml.safe_load((FOLDER / "nightly.yml").read_text(encoding="utf-8"))
    assert nightly["jobs"]["night"]["runs-on"] == ["self-hosted", "blackwell"]
    # What a workflow sets, the script reads.
    read = variables() | {"TORCH_INDEX_URL"}
    assert set(nightly["jobs"]["night"]["env"]) <= read


def test_the_night_keeps_its_artefacts_even_when_red() -> None:
    for path in workflows():
        for step in steps(yaml.safe_load(path.read_text(encoding="utf-8"))):
            if step.get("uses", "").startswith("actions/upload-artifact"):
                assert step["if"] == "always()"
                kinds = {line.rpartition(".")[2] for line in step["with"]["path"].split()}
                assert {"html", "xml", "json", "md"} <= kinds


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("run: .ci/run", "run: .ci/walk", ".ci/walk is no script of this repository"),
        ("make nightly", "make daily", "make knows no daily"),
        ("SUMMARY=", "RESUME=", "make knows no RESUME"),
        ("checkout@v4", "checkout@main", "action actions/checkout@main is not one of GitHub's"),
        ("contents: read", "contents: write", "permissions {'contents': 'write'}"),
        ("timeout-minutes: 20", "name: x", "test: no time limit"),
        ("persist-credentials: false", "fetch-depth: 1", "checkout leaves its token behind"),
    ],
)
def test_a_planted_fault_in_a_workflow_is_found(old: str, new: str, expected: str) -> None:
    text = (FOLDER / "ci.yml").read_text(encoding="utf-8")
    assert old in text
    found = list(faults(yaml.safe_load(text.replace(old, new))))
    assert any(line.startswith(expected) for line in found), found


def test_a_checkout_that_cleans_a_machine_of_our_own_is_found() -> None:
    text = (FOLDER / "nightly.yml").read_text(encoding="utf-8")
    for new in ("fetch-depth: 1", "clean: true"):
        found = list(faults(yaml.safe_load(text.replace("clean: false", new))))
        assert found == ["night: checkout deletes what the machine keeps"]


def test_the_script_reads_the_variables_it_documents_and_passes_options_that_exist() -> None:
    path = ROOT / ".ci" / "nightly"
    text = path.read_text(encoding="utf-8")
    told = set(_VARIABLE.findall(text))
    assert told <= set(_CALL.findall(text)), "told, and not read"
    passed = set(re.findall(r"(--[a-z]+)[ \n]", text.partition("night() {")[2].partition("}\n")[0]))
    own = {"--checkpoint", "--reference", "--captures", "--backend", "--junitxml"}
    assert passed - own - {"--no"} <= set(OPTIONS)
    assert subprocess.run(["sh", "-n", path], check=False).returncode == 0


def nightly(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CHECKPOINT": str(folder), "OUT": str(folder / "out"), **variables}
    return subprocess.run(
        [ROOT / ".ci" / "nightly"], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"REFERENCE": ""}, "CHECKPOINT needs REFERENCE as well"),
        ({"REFERENCE": "there", "DEVICE": "b300"}, "DEVICE is b200, h200 or night, not b300"),
    ],
)
def test_a_wrong_variable_is_refused(variables: dict[str, str], said: str, tmp_path: Path) -> None:
    done = nightly(tmp_path, **variables)
    assert done.returncode == 2
    assert done.stderr == f"nightly: {said}\n"
    assert list(tmp_path.iterdir()) == []


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("within", "limits"), [("2h", ["3300s", "6000s"]), ("soon", ["soon", "soon"]), ("", [])]
)
def test_nights_of_the_embedded_model_share_a_limit(
    within: str, limits: list[str], tmp_path: Path
) -> None:
    """Ten minutes pass whenever the script looks at the clock."""
    script = tmp_path / ".ci" / "nightly"
    program(script, (ROOT / ".ci" / "nightly").read_text(encoding="utf-8"))
    bin_, notes, clock = tmp_path / ".venv" / "bin", tmp_path / "notes", tmp_path / "clock"
    python = f'[ "$1" = -c ] && exec {sys.executable} "$@"; echo "$*" >>{notes}'
    program(bin_ / "python", python)
    program(bin_ / "degarble", "exit 0")
    program(tmp_path / "programs" / "date", f"echo >>{clock}; echo $((600 * $(wc -l <{clock})))")
    environment = {
        **os.environ, "PATH": f"{tmp_path / 'programs'}:{os.environ['PATH']}", "WITHIN": within,
        "DEVICE": "night", "CHECKPOINT": "", "COMMIT": "a", "OUT": str(tmp_path / "out"),
    }  # fmt: skip
    done = subprocess.run([script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    nights = notes.read_text(encoding="utf-8")
    assert nights.count("-m pytest") == 2
    assert re.findall(r"--within (\S+)", nights) == limits


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be a b200: it would begin")
@pytest.mark.skipif(not (ROOT / ".venv/bin/python").exists(), reason="make setup was not run")
def test_a_device_that_is_gone_is_no_night_on_the_cpu(tmp_path: Path) -> None:
    workflow = yaml.safe_load((FOLDER / "nightly.yml").read_text(encoding="utf-8"))
    device = workflow["jobs"]["night"]["env"]["DEVICE"]
    done = nightly(tmp_path, REFERENCE=str(tmp_path), DEVICE=device)
    assert done.returncode == 2, done.stdout
    assert "REFUSED: -m = 'b200': expected a machine with b200" in done.stdout + done.stderr
