from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import (
    InvalidArgument,
    UnknownName,
    UnreadableFile,
    UnwritablePath,
)
from degarble.harness.cli import values

if TYPE_CHECKING:
    from pathlib import Path


def test_paths(tmp_path: Path) -> None:
    values.existing("CKPT", tmp_path)
    values.existing("CKPT", None)
    with pytest.raises(UnreadableFile, match=r"CKPT = '.*none'"):
        values.existing("CKPT", tmp_path / "none")


def test_names() -> None:
    values.one_of("--to", "bf16", ("bf16", "nvfp4"))
    values.one_of("--to", None, ("bf16",))
    with pytest.raises(UnknownName, match="Did you mean nvfp4"):
        values.one_of("--to", "nvpf4", ("bf16", "nvfp4"))


def test_names_or_files(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.touch()
    values.named_or_file("--recipe", str(recipe), ("bf16",), (".yaml",))
    values.named_or_file("--recipe", "bf16", ("bf16",), (".yaml",))
    with pytest.raises(UnreadableFile):
        values.named_or_file("--recipe", "none.yaml", ("bf16",), (".yaml",))
    with pytest.raises(UnknownName):
        values.named_or_file("--recipe", "b16", ("bf16",), (".yaml",))


def test_options_that_exclude_each_other() -> None:
    values.exactly_one(prompt="a", prompts=None, interactive=False)
    values.at_most_one(prompt=None, prompts=None)
    values.exactly_one(prompt="", prompts=None)  # an empty prompt is a prompt
    with pytest.raises(InvalidArgument, match=r"--prompt and --interactive = .*Keep one"):
        values.exactly_one(prompt="a", prompts=None, interactive=True)
    with pytest.raises(InvalidArgument, match="Add one of them"):
        values.exactly_one(prompt=None, prompts=None)
    with pytest.raises(InvalidArgument):
        values.at_most_one(prompt="a", prompts="b")


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
def test_ranges(value: float) -> None:
    values.within("--top-p", 0.5, 0, 1)
    values.within("--top-p", None, 0, 1)
    with pytest.raises(InvalidArgument, match="at least 0 and at most 1"):
        values.within("--top-p", value, 0, 1)


@pytest.mark.parametrize("name", ["torch", "cutedsl", "vllm", "my_kernels:make", "a.b_1:C", None])
def test_backends(name: str | None) -> None:
    values.backend("--backend", name)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("troch", UnknownName),
        ("", UnknownName),
        ("a b:c", InvalidArgument),
        ("a:b:c", InvalidArgument),
        (":c", InvalidArgument),
        ("os;x:y", InvalidArgument),
    ],
)
def test_what_is_no_backend(name: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="--backend"):
        values.backend("--backend", name)


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    values.writable("--json", tmp_path / "found.json")
    assert list(tmp_path.iterdir()) == []
    for wrong in (tmp_path, tmp_path / "nowhere" / "found.json"):
        with pytest.raises(UnwritablePath, match="--json"):
            values.writable("--json", wrong)
    assert list(tmp_path.iterdir()) == []
