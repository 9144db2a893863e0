"""docs/loader-maps.md: its examples are maps that load, and its table has every key."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from degarble.harness.checkpoint.audit.loader.map_files import loader_map_from_text
from degarble.harness.checkpoint.audit.loader.maps import (
    LONGEST_NAME,
    Convert,
    Elsewhere,
    Fill,
    ListedParameter,
    LoaderMap,
    Rename,
    Split,
    Stack,
)
from degarble.harness.checkpoint.audit.loader.proof import LoaderProof, prove
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.suites.checkpoint.audit.loader.loader_cases import inventory_of
from degarble.suites.checkpoint.audit.loader.loader_moves import require_claims
from degarble.suites.checkpoint.structure_cases import V4, errors, write

PAGE = (Path(__file__).parents[4] / "docs" / "loader-maps.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
ROWS = dict(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", PAGE, flags=re.MULTILINE))


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("page") / "c", V4, "official")


def proof_of(folder: Path, text: str) -> LoaderProof:
    with Checkpoint.open(folder) as checkpoint:
        return prove(checkpoint, loader_map_from_text(text, inventory_of(checkpoint)))


def test_there_are_two_examples() -> None:
    assert [text.splitlines()[0] for text in EXAMPLES] == [
        "name: vLLM with our patch",
        "name: my engine",
    ]


def test_the_first_example_loads(official: Path) -> None:
    small = EXAMPLES[0].replace("tp: 8", "tp: 2").replace("ep: 8", "ep: 2")
    proof = proof_of(official, small)
    assert errors(proof.findings) == set()
    assert {each.rule for each in proof.findings} == {"loader.dead_rule"}


def test_the_second_example_loads_every_element(official: Path) -> None:
    proof = proof_of(official, EXAMPLES[1])
    assert errors(proof.findings) == set()
    assert proof.summary()["elements unwritten"] == 0
    assert proof.summary()["tensors placed"] == 5 + V4.n_routed_experts
    require_claims(proof)


def test_the_table_has_every_key() -> None:
    keys = {key for row in ROWS for key in re.findall(r"\w+", row)}
    assert keys == {each.name for each in fields(LoaderMap)} | {"base"}


@pytest.mark.parametrize("made", [Convert, Elsewhere, Rename, Stack, Split, Fill])
def test_each_row_names_every_field(made: type) -> None:
    told = ROWS[f"`{made.__name__.lower()}`"]
    assert [each.name for each in fields(made) if f"`{each.name}`" not in told] == []


def test_the_fields_of_a_parameter_are_named() -> None:
    told = PAGE.split("A parameter has", 1)[1].split("\n\n", 1)[0]
    for each in fields(ListedParameter)[1:]:
        assert f"`{each.name}" in told


def test_the_limits_are_those_of_the_code() -> None:
    assert f"beyond {LONGEST_NAME} signs" in " ".join(PAGE.split())
