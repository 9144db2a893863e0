"""What quantisation configs promise, spelling by spelling."""

from __future__ import annotations

import time
from typing import Any

import pytest

from degarble.harness.checkpoint.view.quantisation_configs import (
    FP8_BLOCKS,
    Promise,
    family_of,
    quantisation,
    statements,
)
from degarble.harness.model.layouts import LAYOUTS, layout_named
from degarble.harness.model.parameters import parameter_named, parameters
from degarble.harness.model.types import Kind
from degarble.suites.checkpoint.structure_cases import V4, V32

GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
DYNAMIC = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": "local"}


def promised(raw: dict[str, Any], name: str, module: str | None = None) -> Promise:
    (stated,) = statements({"config.json": raw}, V4)
    return stated.promise(parameter_named(V4, name), module or name)


@pytest.mark.parametrize(("family", "name"), LAYOUTS)
def test_every_layouts_own_config_promises_what_the_layout_holds(family: str, name: str) -> None:
    config = V4 if family == V4.family else V32
    layout = layout_named(name, config)
    stated, beside = quantisation(config, layout)
    configs = {"config.json": stated, "hf": beside and beside["quantization"]}
    read = statements({file: raw for file, raw in configs.items() if raw}, config)
    recipe = layout.recipe_for(config)
    for parameter in parameters(config):
        if parameter.kind is not Kind.LINEAR or layout.omits(parameter, config):
            continue
        expected = family_of(recipe.format_of(parameter).weight)
        for statement in read:
            promise = statement.promise(parameter, layout.path_of(parameter, config))
            assert promise.format == expected, (parameter.name, promise)


@pytest.mark.parametrize(
    ("raw", "name", "expected"),
    [
        ({"quant_method": "fp8"}, "layers.1.attn.wq_a", FP8_BLOCKS),
        ({"quant_method": "fp8"}, "layers.1.ffn.experts.0.w1", "MXFP4"),
        ({"quant_method": "fp8"}, "layers.1.attn.compressor.wkv", "BF16"),
        ({"quant_method": "fp8", "moe_quant_algo": "NVFP4"}, "layers.1.ffn.experts.0.w1", "NVFP4"),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["layers.1.attn"]},
            "layers.1.attn.wq_a",
            "BF16",
        ),
        ({"quant_method": "fp8", "ignore": ["*.attn.*"]}, "layers.1.attn.wq_a", FP8_BLOCKS),
        ({"quant_algo": "NVFP4"}, "layers.1.attn.wq_a", "NVFP4"),
        ({"quant_algo": "NVFP4"}, "layers.1.ffn.gate", "BF16"),
        ({"quant_algo": "NVFP4", "exclude_modules": ["*.wq_?"]}, "layers.1.attn.wq_a", "BF16"),
        ({"quant_algo": "NVFP4", "ignore": ["model.layers.1"]}, "layers.1.attn.wq_a", "BF16"),
        ({"quant_algo": "NVFP4", "ignore": ["layers.1"]}, "layers.0.attn.wq_a", "NVFP4"),
        (
            {"quantized_layers": {"layers.1.ffn.experts": {"quant_algo": "MXFP8"}}},
            "layers.1.ffn.experts.0.w1",
            "MXFP8",
        ),
        ({"quant_algo": "ODD"}, "layers.1.attn.wq_a", None),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": GROUP}},
            "layers.1.attn.wq_a",
            "NVFP4",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {**GROUP, "targets": [r"re:.*experts\.\d+\.w1$"]}},
            },
            "layers.1.ffn.experts.3.w1",
            "NVFP4",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": GROUP},
                "ignore": [r"re:.*attn\.wq_[ab]$"],
            },
            "layers.1.attn.wq_a",
            "BF16",
        ),
    ],
)
def test_a_config_promises(raw: dict[str, Any], name: str, expected: str | None) -> None:
    assert promised(raw, name).format == expected


def test_stored_and_logical_names_are_both_meant() -> None:
    raw = {"quant_algo": "NVFP4", "ignore": ["model.layers.1.self_attn.q_a_proj"]}
    name, module = "layers.1.attn.wq_a", "model.layers.1.self_attn.q_a_proj"
    assert promised(raw, name, module).format == "BF16"
    assert promised({**raw, "ignore": [name]}, name, module).format == "BF16"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"quant_algo": "NVFP4"}, True),
        ({"quant_algo": "W4A16_NVFP4"}, False),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": GROUP}}, False),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {**GROUP, "input_activations": DYNAMIC}},
            },
            True,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "g": {**GROUP, "input_activations": {**DYNAMIC, "dynamic": True}}
                },
            },
            False,
        ),
    ],
)
def test_a_config_tells_whether_activations_have_a_stored_scale(
    raw: dict[str, Any], expected: bool
) -> None:
    assert promised(raw, "layers.1.attn.wq_a").activations is expected


@pytest.mark.parametrize(
    "raw",
    [
        {"quant_method": "new"},
        {"ignore": "not a list"},
        {"ignore": [1, 2]},
        {"quantized_layers": ["layers.1"]},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {"num_bits": []}}},
        },
        {"ignore": ["re:(a+)+$"]},
        {"ignore": ["re:("]},
        {"ignore": ["re:" + "a" * 1000]},
        {"ignore": ["re:.*.*.*.*x"]},
        {"moe_quant_algo": {"a": 1}},
    ],
)
def test_what_cannot_be_judged_is_told_and_nothing_is_raised(raw: dict[str, Any]) -> None:
    (stated,) = statements({"config.json": raw}, V4)
    stated.promise(parameter_named(V4, "layers.1.ffn.experts.0.w1"), "m")
    assert stated.unread, raw


def test_a_hostile_list_of_patterns_takes_no_time() -> None:
    raw = {"ignore": ["re:(a|a)*b", *("*a" * 100 for _ in range(5000))]}
    began = time.process_time()
    (stated,) = statements({"config.json": raw}, V4)
    for parameter in parameters(V4):
        stated.promise(parameter, parameter.name)
    assert time.process_time() - began < 5
    assert len(stated.unread) > 4000


def test_block_sizes_are_collected_from_every_place() -> None:
    raw = {
        "quant_algo": "NVFP4",
        "group_size": 128,
        "weight_block_size": [128, 128],
        "config_groups": {"g": GROUP},
        "quantized_layers": {"a": {"quant_algo": "NVFP4", "group_size": 16}},
    }
    (stated,) = statements({"config.json": raw}, V4)
    assert [(each.sizes, each.format) for each in stated.blocks] == [
        ((128,), "NVFP4"),
        ((128, 128), FP8_BLOCKS),
        ((16,), "NVFP4"),
        ((16,), "NVFP4"),
    ]
