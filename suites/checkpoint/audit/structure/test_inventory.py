"""Parameters are paired with modules, and the recipe of a checkpoint is read off them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.harness.checkpoint.audit.structure.inventory import (
    Inventory,
    stored_recipe,
    take_inventory,
)
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.parameters import parameters
from degarble.harness.model.types import Kind
from degarble.suites.checkpoint.audit.structure.test_formats import turned_back
from degarble.suites.checkpoint.structure_cases import V4, V32, replant, write

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.model.config.config import Config

CASES = [
    (V4, "official"),
    (V4, "nvfp4-experts"),
    (V4, "nvfp4-full"),
    (V4, "compressed-tensors"),
    (V4, "vllm"),
    (V32, "official"),
    (V32, "nvfp4-full"),
    (V32, "vllm"),
]


def inventory_of(folder: Path) -> Inventory:
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.names is not None
        return take_inventory(checkpoint.names)


@pytest.mark.parametrize(("config", "name"), CASES)
def test_the_stored_recipe_is_the_one_that_wrote_it(
    tmp_path: Path, config: Config, name: str
) -> None:
    inventory = inventory_of(write(tmp_path / "c", config, name))
    layout = layout_named(name, config)
    written, stored = layout.recipe_for(config), stored_recipe(inventory)
    there = [each for each in parameters(config) if not layout.omits(each, config)]
    assert [each.parameter for each in inventory.found] != []
    assert {each.parameter.name for each in inventory.found} == {each.name for each in there}
    assert inventory.missing == []
    for parameter in there:
        if parameter.kind is Kind.LINEAR:
            assert stored.format_of(parameter).weight == written.format_of(parameter).weight
            if written.format_of(parameter).weight == "NVFP4":
                assert stored.format_of(parameter) == written.format_of(parameter)


def test_a_block_that_differs_has_rules_of_its_own(tmp_path: Path) -> None:
    healthy = write(tmp_path / "a", V4, "nvfp4-full")
    changed = turned_back("model.layers.1.self_attn.o_b_proj")
    recipe = stored_recipe(inventory_of(replant(healthy, tmp_path / "b", changed)))
    found = {
        each.name: recipe.format_of(each).weight
        for each in parameters(V4)
        if each.row.name == "attn.wo_b" and each.block and not each.block.is_drafter
    }
    assert found == {
        "layers.0.attn.wo_b": "NVFP4",
        "layers.1.attn.wo_b": "BF16",
        "layers.2.attn.wo_b": "NVFP4",
    }
    assert len(recipe.rules) < 60


def test_suffixes_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    inventory = inventory_of(write(tmp_path / "c", V32, "compressed-tensors"))
    assert inventory.layout.suffixes == "compressed-tensors"
    assert inventory_of(write(tmp_path / "d", V32, "nvfp4-full")).layout.suffixes == "huggingface"


def test_drafters_are_numbered_behind_the_decoder(tmp_path: Path) -> None:
    inventory = inventory_of(write(tmp_path / "c", V4, "official"))
    layers = {inventory.layer_of(each.parameter) for each in inventory.found}
    assert layers == {None, 0, 1, 2, 3}
    assert inventory.layer_of(inventory.by_name["mtp.0.attn.wq_a"].parameter) == 3
