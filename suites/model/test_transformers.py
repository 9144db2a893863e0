"""Layouts and name maps against transformers 5.20 itself: names, shapes, dtypes and every element.

Random configs are compared by names and shapes on the meta device. For one model of each family a
checkpoint with DeepSeek's own names is written, transformers loads it, and every element that it
then holds, and every one that it saves again, must lie where our maps say.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from safetensors.torch import load_file, save_file

from degarble.harness.model.config.config import V3_2, V4_FLASH, V4_PRO
from degarble.harness.model.config.json_file import config_from_dict, config_to_dict
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.tensors import name_map, tensors_of
from degarble.harness.model.types import Dtype
from degarble.suites.hang_guard import HANG_SECONDS
from degarble.suites.model.configs import TINY_V4, TINY_V32, configs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.model.tensors import NameMap
    from degarble.suites.support.configs import DeepSeekConfig

TORCH_DTYPES = {Dtype.BF16: torch.bfloat16, Dtype.F32: torch.float32, Dtype.I64: torch.int64}
RANDOM_CONFIGS = 20
LOADED: dict[str, DeepSeekConfig] = {
    "v4": replace(TINY_V4, num_nextn_predict_layers=0),
    "v32": replace(TINY_V32, num_nextn_predict_layers=0),
}


@dataclass(frozen=True)
class Answers:
    """What transformers said about all configs, and where it left what it loaded."""

    configs: list[DeepSeekConfig]
    described: list[dict[str, Any]]
    folders: dict[str, Path]


def random_configs() -> list[DeepSeekConfig]:
    """Draw configs in a fixed order, and put the released geometries before them."""
    drawn: list[DeepSeekConfig] = [V4_PRO, V4_FLASH, V3_2]

    @settings(
        max_examples=RANDOM_CONFIGS,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(configs())
    def draw(config: DeepSeekConfig) -> None:
        drawn.append(config)

    draw()
    return drawn


def write_official(folder: Path, config: DeepSeekConfig, seed: int) -> None:
    """Write a checkpoint of random values under DeepSeek's names, with its config."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for tensor in tensors_of(config, layout_named("bf16", config)):
        if tensor.dtype is Dtype.I64:
            values = torch.randint(0, config.n_routed_experts, tensor.shape, generator=generator)
        else:
            values = torch.randn(tensor.shape, generator=generator)
        # Values of bfloat16 survive any change between it and float32.
        values = values.bfloat16() if values.is_floating_point() else values
        tensors[tensor.name] = values.to(TORCH_DTYPES[tensor.dtype])
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_to_dict(config)), "utf-8")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Ask transformers once."""
    base = tmp_path_factory.mktemp("transformers")
    folders = {name: base / name for name in LOADED}
    for number, (name, config) in enumerate(LOADED.items()):
        write_official(folders[name], config, number)
    drawn = random_configs()
    asked = {
        "configs": [config_to_dict(config) for config in drawn],
        "folders": [str(folder) for folder in folders.values()],
    }
    done = subprocess.run(
        [sys.executable, "-m", "degarble.suites.model.transformers_oracle"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return Answers(drawn, json.loads(done.stdout), folders)


@pytest.mark.slow
def test_names_and_shapes_of_random_configs(answers: Answers) -> None:
    types = set()
    for config, said in zip(answers.configs, answers.described, strict=True):
        ours = {t.name: t.shape for t in tensors_of(config, layout_named("transformers", config))}
        theirs = {name: tuple(shape) for name, shape in said["shapes"].items()}
        assert ours == theirs
        types |= {(block.layer_type, block.mlp_type) for block in config.layers}
    assert len(types) == 8, "three layer types of V4 by two of its MLPs, and V3.2's two"
    assert len(answers.configs) == RANDOM_CONFIGS + 3


def test_a_saved_config_reads_as_the_same_record(answers: Answers) -> None:
    for config, said in zip(answers.configs, answers.described, strict=True):
        read = config_from_dict(said["config"])
        assert read == replace(config, quantisation=None, other={})


@pytest.mark.parametrize("name", LOADED)
def test_what_transformers_holds_lies_where_the_map_says(answers: Answers, name: str) -> None:
    config, folder = LOADED[name], answers.folders[name]
    made = name_map(config, layout_named("bf16", config), layout_named("transformers", config))
    held = load_file(folder / "state.safetensors")
    assert set(held) == set(made.by_target)
    assert misplaced(made, load_file(folder / "model.safetensors"), held) == []


@pytest.mark.parametrize("name", LOADED)
def test_what_transformers_saves_lies_where_the_map_says(answers: Answers, name: str) -> None:
    config, folder = LOADED[name], answers.folders[name]
    saved_layout = layout_named("transformers-saved", config)
    made = name_map(config, layout_named("transformers", config), saved_layout)
    saved = load_file(folder / "saved" / "model.safetensors")
    assert set(saved) == set(made.by_target)
    assert misplaced(made, load_file(folder / "state.safetensors"), saved) == []


@pytest.mark.parametrize("name", LOADED)
def test_dtypes_are_those_that_transformers_holds(answers: Answers, name: str) -> None:
    config = LOADED[name]
    held = load_file(answers.folders[name] / "state.safetensors")
    for tensor in tensors_of(config, layout_named("transformers", config)):
        assert held[tensor.name].dtype == TORCH_DTYPES[tensor.dtype], tensor.name


def test_swapped_halves_are_detected(answers: Answers) -> None:
    config, folder = LOADED["v4"], answers.folders["v4"]
    made = name_map(config, layout_named("bf16", config), layout_named("transformers", config))
    held = load_file(folder / "state.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    held[name] = held[name].flip(1)
    found = misplaced(made, load_file(folder / "model.safetensors"), held)
    assert {parameter.rpartition(".")[2] for parameter in found} == {"w1", "w3"}
    assert {parameter.split(".")[1] for parameter in found} == {"1"}


def misplaced(
    made: NameMap, source: Mapping[str, Tensor], target: Mapping[str, Tensor]
) -> list[str]:
    """Name the parameters that are not where the map says, element by element."""
    found = []
    for move in made.moves:
        ends = ((move.source, source), (move.target, target))
        left, right = (
            tensors[end.tensor][tuple(slice(*one) for one in end.box.ranges)]
            for end, tensors in ends
        )
        if not torch.equal(left.reshape(move.shape).double(), right.reshape(move.shape).double()):
            found.append(move.parameter)
    return found
