"""Random models of both families: transformers saves them, we read them, the logits are equal.

All fields of a config are drawn, RoPE in each of its spellings, sequences past windows and several
windows of a compressor; a sequence is computed whole, in chunks and by single tokens.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from degarble.harness.model.config.config import V32Config, small_v32
from degarble.harness.model.config.json_file import config_from_dict, config_to_dict
from degarble.references import elementary
from degarble.references.attention import softmax_scale
from degarble.suites.references.random_comparison import disagreement
from degarble.suites.references.random_models import MISSING, MODELS, RandomModel, drawn

if TYPE_CHECKING:
    from pathlib import Path

FEW, MANY, BATCH = 3, 30, 10  # models of a family; those of the slow suite follow the few


@dataclass(frozen=True)
class Answers:
    """What transformers computed for some models, and where it left their checkpoints."""

    models: dict[str, RandomModel]
    folder: Path
    tensors: dict[str, Any]
    ropes: list[Any]

    def disagreements(self, family: str) -> dict[str, tuple[str, RandomModel]]:
        """Compare all models of a family; name those that differ."""
        found = {
            name: (disagreement(model, self.folder / name, self.tensors[name]), model)
            for name, model in self.models.items()
            if model.family == family
        }
        return {name: each for name, each in found.items() if each[0]}


def ask(models: dict[str, RandomModel], folder: Path, ropes: list[Any]) -> Answers:
    """Let transformers build, save and run models in a process of its own."""
    asked = {"models": {name: asdict(model) for name, model in models.items()}, "ropes": ropes}
    (folder / "asked.json").write_text(json.dumps(asked), "utf-8")
    module = "degarble.suites.references.random_oracle"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tensors = {name: load_file(folder / f"{name}.safetensors") for name in models}
    return Answers(models, folder, tensors, json.loads((folder / "ropes.json").read_text("utf-8")))


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Some models of both families, and every combination of YaRN's keys."""
    models = {f"{family}-{n}": drawn(family, n) for family in MODELS for n in range(FEW)}
    return ask(models, tmp_path_factory.mktemp("random"), ROPES)


@pytest.mark.parametrize("family", MODELS)
def test_random_models_compute_what_transformers_does(few: Answers, family: str) -> None:
    assert few.disagreements(family) == {}


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("first", range(FEW, FEW + MANY, BATCH))
def test_many_random_models_compute_what_transformers_does(
    tmp_path: Path, family: str, first: int
) -> None:
    models = {f"{family}-{n}": drawn(family, n) for n in range(first, first + BATCH)}
    assert ask(models, tmp_path, []).disagreements(family) == {}


YARN = {"rope_type": "yarn", "rope_theta": 100.0, "original_max_position_embeddings": 64}
VALUES: dict[str, list[Any]] = {
    "factor": [0.5, 4.0],
    "mscale": [MISSING, None, 0, 0.7, 1.0],
    "mscale_all_dim": [MISSING, None, 0, 0.7, 1.0],
    "attention_factor": [MISSING, None, 0.0, 1.3],
    "truncate": [MISSING, None, True, False],
}
ROPES = [
    YARN | {key: value for key, value in zip(VALUES, chosen, strict=True) if value is not MISSING}
    for chosen in product(*VALUES.values())
]


def test_every_combination_of_yarns_keys_scales_as_in_transformers(few: Answers) -> None:
    raw = config_to_dict(small_v32(qk_rope_head_dim=8), "transformers")
    del raw["rope_theta"]
    for stated, (frequencies, rotation, logits) in zip(ROPES, few.ropes, strict=True):
        config = config_from_dict(raw | {"rope_parameters": stated})
        assert isinstance(config, V32Config)
        rope = config.rope(config.layers[0])
        ours = elementary.frequencies(rope, torch.float64, torch.device("cpu")).tolist()
        assert ours == pytest.approx(frequencies, rel=1e-12), stated
        assert rope.scale == pytest.approx(rotation, rel=1e-12), stated
        scale = softmax_scale(config) * math.sqrt(config.qk_head_dim)
        assert scale == pytest.approx(logits, rel=1e-12), stated
