"""Faults of transformers' modules, planted by hand: place and cause are found by kind."""

from __future__ import annotations

import pytest

from degarble.suites.campaigns.traced_plants import MODELS, PLANTS, RUNS, found

pytestmark = pytest.mark.needs("transformers")

_QUICK = (
    ("llama", "head scaled"),
    ("llama", "o_proj row copied"),
    ("llama", "gate and up"),
    ("llama", "epsilon"),
    ("llama", "factor of angles"),
    ("llama", "turned back"),
    ("llama", "logits scaled"),
    ("llama", "activation"),
    ("llama", "no residual"),
    ("gpt_oss", "no bias"),
    ("gpt_oss", "no sinks"),
    ("gpt_oss", "up before gate"),
)
_ALL = [
    pytest.param(
        model, run, name,
        marks=() if run == "bf16" and (model, name) in _QUICK else pytest.mark.slow,
        id=f"{model}-{run}-{name}",
    )
    for model in MODELS
    for run in RUNS
    for name, plant in PLANTS.items()
    # transformers has no SDPA of attention with sinks.
    if model in plant.models and (model, run) != ("gpt_oss", "sdpa")
]  # fmt: skip


@pytest.mark.parametrize(("model", "run", "name"), _ALL)
def test_place_and_cause_are_found(model: str, run: str, name: str) -> None:
    result = found(model, run, PLANTS[name])
    assert result.localised, (result.origins, result.sentences)
    assert result.first, (result.named, result.sentences)


def test_a_healthy_run_has_no_origin() -> None:
    assert not found("llama", "bf16", None).origins


def test_every_kind_of_plant_is_tried_quickly() -> None:
    """One plant at least of each group of components."""
    kinds = {place.rpartition(".")[2] for _, name in _QUICK for place in PLANTS[name].places}
    assert {"q_proj", "post_attention_layernorm", "rotary_emb", "rotation", "attention", "act_fn",
            "residual_2", "experts"} <= kinds  # fmt: skip
