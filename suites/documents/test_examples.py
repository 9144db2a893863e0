"""Every code block of README and docs runs as it stands, parses, or is listed with a reason."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import typer
import yaml

from degarble.suites.documents.blocks import CodeBlock, blocks, in_language
from degarble.suites.documents.prepared import (
    GIVEN,
    NOT_EXECUTED,
    NOT_RUN,
    PARSED_ONLY,
    UNQUANTISED,
    reason,
)
from degarble.suites.house.pages.command_line import commands, parameters
from degarble.suites.house.repository import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

HANG = 300  # seconds
SMALL = ROOT / "references/tiny/v1/v4"
LANGUAGES = {"", "python", "yaml", "json", "sh"}
ALL = blocks()
USAGE: Any = typer.BadParameter.__base__  # what the parser raises


def named(chosen: Iterable[CodeBlock]) -> dict[str, Any]:
    """Return what parametrises a test by place."""
    found = list(chosen)
    return {"argvalues": found, "ids": [block.place for block in found]}


def lines_to_run(block: CodeBlock) -> list[str]:
    if block.page in PARSED_ONLY:
        return []
    return [line for line in block.commands() if not reason(NOT_RUN, line)]


# --------------------------------------------------------------------------------------------------
# Quick: what a block is, and whether it could run at all


def test_every_block_has_a_known_language() -> None:
    assert len(ALL) > 60
    assert {block.place: block.language for block in ALL if block.language not in LANGUAGES} == {}


def test_every_reason_is_needed() -> None:
    lines = [line for block in ALL for line in block.commands()]
    assert [key for key in NOT_RUN if not any(re.match(key, line) for line in lines)] == []
    texts = [block.text for block in in_language("python")]
    assert [key for key in NOT_EXECUTED if not any(re.match(key, each) for each in texts)] == []
    assert set(GIVEN) <= {block.page for block in in_language("python")}


@pytest.mark.parametrize("block", **named(in_language("json", "yaml")))
def test_data_parses(block: CodeBlock) -> None:
    assert json.loads(block.text) if block.language == "json" else yaml.safe_load(block.text)


@pytest.mark.parametrize("block", **named(in_language("python")))
def test_python_compiles(block: CodeBlock) -> None:
    compile(block.text, block.place, "exec")


@cache
def known() -> dict[str, Any]:
    return dict(commands())


def wrong_options(line: str) -> list[str]:
    """Say which words of a command line the command does not have."""
    words = shlex.split(line, comments=True)
    words = words[words.index("degarble") :]
    while len(words) > 1 and words[1].startswith("--"):  # options before the command
        del words[1 : 2 if "=" in words[1] or words[1] == "--json" else 3]
    name = max((key for key in known() if words[: key.count(" ") + 1] == key.split()), key=len)
    command = known()[name]
    if name == "degarble":
        return [f"no command {words[1:2]}"] if len(words) > 1 else []
    rest = words[name.count(" ") + 1 :]
    if rest[-1:] == ["--json"]:  # without a file: to the terminal
        rest.pop()
    try:
        context = command.make_context(name, [], resilient_parsing=True)
        context.resilient_parsing = False
        command.make_parser(context).parse_args(list(rest))
    except USAGE as error:
        return [str(error)]
    required = [p for p in parameters(name, command) if p.required]
    return [] if rest or not required else [f"{name} needs {required[0].name}"]


def degarble_lines() -> list[tuple[str, str]]:
    return [
        (block.place, line)
        for block in ALL
        if block.page not in PARSED_ONLY
        for line in block.commands()
        if re.match(r"(\w+=\S+ )*degarble ", line)
    ]


def test_every_command_line_has_options_that_exist() -> None:
    found = {place: wrong for place, line in degarble_lines() if (wrong := wrong_options(line))}
    assert found == {}
    assert len(degarble_lines()) > 30


@pytest.mark.parametrize(
    "line", ["degarble audit CKPT --agianst X", "degarble adit CKPT", "degarble audit"]
)
def test_a_planted_line_is_found(line: str) -> None:
    assert wrong_options(line)


# --------------------------------------------------------------------------------------------------
# Slow: each block runs in a folder and a process of its own


def python_blocks() -> list[CodeBlock]:
    return [block for block in in_language("python") if not reason(NOT_EXECUTED, block.text)]


def finished(command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **more}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=HANG,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("block", **named(python_blocks()))
def test_python_runs(block: CodeBlock, tmp_path: Path) -> None:
    given = f"from pathlib import Path\nBLOCK = {block.text!r}\n{GIVEN.get(block.page, '')}"
    (tmp_path / "example.py").write_text(f"{given}\n{block.text}", encoding="utf-8")
    done = finished([sys.executable, "-W", "ignore", "example.py"], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints, captures and files that pages name, under these very names."""
    folder = tmp_path_factory.mktemp("workshop")
    (folder / "bin").mkdir()
    script = f'#!/bin/sh\nexec "{sys.executable}" -m degarble.harness.cli.main "$@"\n'
    (folder / "bin" / "degarble").write_text(script)
    (folder / "bin" / "degarble").chmod(0o755)
    (folder / "bin" / "python").symlink_to(sys.executable)
    for name in ("BF16_CKPT", "SOURCE"):
        (folder / name).symlink_to(SMALL)
    (folder / "references").symlink_to(ROOT / "references")
    for name in ("FILE", "PROMPTS", "prompts.txt"):
        (folder / name).write_text("anna paints blue\nthe old fox sees a tree\n")
    for line in (
        "degarble capture BF16_CKPT --amax-only --prompts PROMPTS --out RANGES",
        "degarble quantise BF16_CKPT CKPT --recipe nvfp4-experts --calibration RANGES",
        'degarble capture CKPT --out CAPTURE --prompt "anna paints blue" --max-new-tokens 2',
        "degarble check CAPTURE --reference CKPT --json check.json",
    ):
        done = run_line(line, folder, folder)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    (folder / "run-capture").symlink_to("CAPTURE")
    return folder


def run_line(line: str, folder: Path, workshop: Path) -> subprocess.CompletedProcess[str]:
    path = f"{workshop / 'bin'}{os.pathsep}{os.environ['PATH']}"
    git = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--absolute-git-dir"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return finished(["bash", "-c", line], folder, PATH=path, GIT_DIR=git.stdout.strip())


@pytest.mark.slow
@pytest.mark.parametrize("block", **named(e for e in ALL if lines_to_run(e)))
def test_command_lines_run(block: CodeBlock, workshop: Path, tmp_path: Path) -> None:
    """A line may find a difference (status 1); it is never refused."""
    lines = "\n".join(lines_to_run(block))
    made = set(re.findall(r"(?:--out|--to|--store|--json|--report|OUT|NEW) (\S+)", lines))
    for path in workshop.iterdir():
        if path.name not in made | {"bin"}:
            (tmp_path / path.name).symlink_to(path)
    if block.page in UNQUANTISED:
        (tmp_path / "CKPT").unlink()
        (tmp_path / "CKPT").symlink_to(SMALL)
    for line in lines_to_run(block):
        done = run_line(line, tmp_path, workshop)
        assert done.returncode in {0, 1}, f"{line}\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
