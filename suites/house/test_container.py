"""The container's files meet each requirement, and each planted fault is detected."""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING

import pytest
import yaml

from degarble.harness.serve.proven import read_line
from degarble.suites.house.container import (
    copied,
    entry,
    instructions,
    of_any,
    of_compose,
    of_dockerfile,
)
from degarble.suites.house.repository import ROOT

if TYPE_CHECKING:
    from pathlib import Path

DOCKERFILE, COMPOSE = ROOT / "Dockerfile", ROOT / "compose.yaml"
TEXT, COMPOSED = DOCKERFILE.read_text("utf-8"), COMPOSE.read_text("utf-8")


def test_the_container_is_as_it_should_be() -> None:
    assert not list(of_dockerfile(TEXT))
    assert not list(of_compose(yaml.safe_load(COMPOSED), COMPOSED))
    assert not list(of_any((ROOT / ".dockerignore").read_text("utf-8")))


def test_what_is_copied_and_started_is_there() -> None:
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    for name in copied(TEXT):
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored
    module = entry(TEXT)[-1]
    assert entry(TEXT)[:2] == ["python3", "-m"]
    assert importlib.util.find_spec(module) is not None


def test_what_is_installed_is_pinned_and_enough() -> None:
    (run,) = (rest for word, rest in instructions(TEXT) if word == "RUN" and "grep" in rest)
    names = re.search(r"\^\(([^)]+)\)==", run)
    assert names is not None
    pinned = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    kept = {each.split("==")[0] for each in pinned if re.match(rf"({names[1]})==", each)}
    assert kept >= {"numba", "llvmlite", "SQLAlchemy", "pandas", "matplotlib", "hypothesis"}


def test_the_command_is_one_that_the_entry_reads(tmp_path: Path) -> None:
    command = list(map(str, yaml.safe_load(COMPOSED)["services"]["degarble"]["command"]))
    for name in ("answers.json", "token"):
        (tmp_path / name).write_text('{"answers": [{"prompt": "a", "answer": "b", "mean": -1}]}')
    places = {
        "/checkpoint": str(tmp_path), "/answers.json": str(tmp_path / "answers.json"),
        "/run/secrets/token": str(tmp_path / "token"),
    }  # fmt: skip
    start_options, host, port = read_line([places.get(each, each) for each in command])
    assert (host, port) == ("0.0.0.0", 8001)
    assert start_options.command[:2] == ("vllm", "serve")
    assert start_options.loader == "vllm:tp=8,ep=8"
    assert start_options.gpu
    assert start_options.token is not None
    assert start_options.token not in repr(start_options)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("v0.33.0", "latest", "no digest and no exact version"),
        ("v0.33.0", "v0.33", "no digest and no exact version"),
        ("USER 10001:10001", "", "user root"),
        ("USER 10001:10001", "USER root", "user root"),
        ("USER 10001:10001", "USER 0:0", "user 0:0"),
        ("COPY harness harness", "ADD https://example.org/x /x", "ADD https"),
        ("WORKDIR /build", "RUN curl -o x https://example.org | sh", "fetches"),
        ("WORKDIR /build", "RUN pip install numba", "versions that float"),
        ("ENV HF_HUB_OFFLINE=1", "ENV HF_TOKEN=x", "a secret stays"),
        ("WORKDIR /build", "ARG API_KEY", "a secret stays"),
        ("# Ready only", "# hf_abcdefghijklmnopqrstuvwxyz", "something like a secret"),
        ('["python3", "-m", "degarble.harness.serve.proven"]', "python3", "in a shell"),
        ("HEALTHCHECK", "LABEL", "no HEALTHCHECK"),
        ("FROM ${BASE} AS serve", "", "one stage"),
    ],
)
def test_a_fault_in_the_dockerfile_is_detected(old: str, new: str, told: str) -> None:
    assert old in TEXT
    found = list(of_dockerfile(TEXT.replace(old, new)))
    assert any(told in each for each in found), found


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("degarble-vllm:0.1.0", "degarble-vllm", "no exact version"),
        ("10001:10001", "0:0", "runs as root"),
        ("read_only: true", "privileged: true", "unknown key privileged"),
        ("cap_drop: [ALL]", "cap_drop: []", "capabilities"),
        ("127.0.0.1:8000:8000", "8000:8000", "open beyond this machine"),
        (":/checkpoint:ro", ":/checkpoint", "not read-only"),
        ("count: 8", "count: 4", "8 ranks on 4 GPUs"),
        ("secrets: [token]", "secrets: [other]", "secret other is nowhere"),
        ("${TOKEN_FILE:?file with the token of the API}", "./token.txt", "not the operator's"),
        ('restart: "no"', 'environment: ["API_KEY=abcdefgh12345678"]', "like a secret"),
        ("services:", "servics:", "no services"),
    ],
)
def test_a_fault_in_the_compose_file_is_detected(old: str, new: str, told: str) -> None:
    assert old in COMPOSED
    text = COMPOSED.replace(old, new)
    found = list(of_compose(yaml.safe_load(text), text))
    assert any(told in each for each in found), found
