"""Faults of transformers' modules, planted by hand: place and cause are found by kind."""

from __future__ import annotations

import pytest

from degarble.suites.campaigns.traced_plants import MODELS, PLANTS, RUNS, STORED, cases, found

pytestmark = pytest.mark.needs("transformers")

_QUICK = (
    ("llama", "bf16", "head scaled"),
    ("llama", "bf16", "o_proj row copied"),
    ("llama", "bf16", "o_proj zeros"),
    ("llama", "bf16", "o_proj half absent"),
    ("llama", "bf16", "o_proj rows turned"),
    ("llama", "bf16", "gate and up"),
    ("llama", "bf16", "epsilon"),
    ("llama", "bf16", "factor of angles"),
    ("llama", "bf16", "turned back"),
    ("llama", "bf16", "logits scaled"),
    ("llama", "bf16", "activation"),
    ("llama", "bf16", "no residual"),
    ("llama", "fp32", "layer norm"),
    ("llama", "nvfp4", "nibbles swapped"),
    ("llama", "int4", "zero points off by one"),
    ("gpt_oss", "bf16", "no bias"),
    ("gpt_oss", "bf16", "o_proj negated"),
    ("gpt_oss", "bf16", "no sinks"),
    ("qwen3_moe", "bf16", "experts exchanged"),
)
_ALL = [
    pytest.param(*case, marks=() if case in _QUICK else pytest.mark.slow, id="-".join(case))
    for case in cases(MODELS, RUNS)
]


@pytest.mark.parametrize(("model", "run", "name"), _ALL)
def test_place_and_cause_are_found(model: str, run: str, name: str) -> None:
    result = found(model, run, PLANTS[name])
    assert result.localised, (result.origins, result.sentences)
    assert result.first, (result.named, result.sentences)


def test_another_epsilon_of_a_layer_norm_is_named() -> None:
    """An operation of torch computes all of it: its epsilon is an argument."""
    plant = PLANTS["epsilon"]
    assert plant.places == ("layers.2.post_attention_layernorm",)
    result = found("stablelm", "fp32", plant)
    assert result.localised, (result.origins, result.sentences)
    assert result.first, (result.named, result.sentences)


_HEALTHY = {"bf16", "nvfp4", "mxfp4", "fp8_row"}


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, marks=() if run in _HEALTHY else pytest.mark.slow)
        for run in ("bf16", *STORED)
    ],
)
def test_a_healthy_run_has_no_origin(run: str) -> None:
    assert not found("llama", run, None).origins


def test_every_kind_of_plant_is_tried_quickly() -> None:
    """One plant at least of each group of components."""
    kinds = {place.rpartition(".")[2] for *_, name in _QUICK for place in PLANTS[name].places}
    assert {"q_proj", "post_attention_layernorm", "rotary_emb", "rotation", "attention", "act_fn",
            "residual_2", "experts"} <= kinds  # fmt: skip
