"""Generate quantisation configs, and parse what configs claim for each module."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.checkpoint.view.quantisation_configs import (
    CONFIG,
    FP8_BLOCKS,
    HF_QUANT_CONFIG,
    Promise,
    cache_format,
    config_files,
    quantisation,
    statements,
    weight_family,
)
from degarble.harness.model.config.config import V4_PRO, small_v4, small_v32
from degarble.harness.model.config.json_file import config_from_dict
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.parameters import parameter_named, parameters
from degarble.harness.model.types import Kind
from degarble.suites.checkpoint.structure_cases import V4, V32
from degarble.suites.support.families import LAYOUTS

if TYPE_CHECKING:
    from degarble.harness.model.config.config import Config


CONFIGS: dict[str, Config] = {"v4": small_v4(), "v32": small_v32()}
CASES = [
    (name, layout)
    for name, config in CONFIGS.items()
    for family, layout in LAYOUTS
    if family == config.family
]


def stated(name: str, layout: str) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    config = CONFIGS[name]
    return quantisation(config, layout_named(layout, config))


@pytest.mark.parametrize(
    ("name", "layout", "method", "beside"),
    [
        ("v4", "official", "fp8", None),
        ("v4", "vllm", "fp8", None),
        ("v4", "bf16", None, None),
        ("v4", "transformers", None, None),
        ("v4", "nvfp4-experts", "fp8", "MIXED_PRECISION"),
        ("v4", "nvfp4-full", "modelopt", "NVFP4"),
        ("v4", "compressed-tensors", "compressed-tensors", None),
        ("v32", "official", "fp8", None),
        ("v32", "transformers-saved", None, None),
        ("v32", "nvfp4-experts", "fp8", "MIXED_PRECISION"),
        ("v32", "nvfp4-full", "modelopt", "NVFP4"),
        ("v32", "compressed-tensors", "compressed-tensors", None),
    ],
)
def test_each_kind_of_checkpoint_says_so(
    name: str, layout: str, method: str | None, beside: str | None
) -> None:
    inside, outside = stated(name, layout)
    assert (inside or {}).get("quant_method") == method
    assert (outside or {"quantization": {}})["quantization"].get("quant_algo") == beside


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_what_is_left_alone_is_what_the_recipe_leaves(name: str, layout: str) -> None:
    config = CONFIGS[name]
    placed = layout_named(layout, config)
    inside, outside = stated(name, layout)
    fields = {**(inside or {}), **(outside or {"quantization": {}})["quantization"]}
    patterns = fields.get("ignore", fields.get("exclude_modules"))
    if patterns is None:
        return
    assert set(fields.get("exclude_modules", patterns)) <= set(patterns)  # and what vLLM fuses
    recipe = placed.recipe_for(config)
    for parameter in parameters(config):
        if parameter.kind is Kind.LINEAR and not placed.omits(parameter, config):
            path = placed.path_of(parameter, config)
            ignored = any(fnmatch(path, pattern) for pattern in patterns)
            assert ignored == (recipe.format_of(parameter).weight != "NVFP4"), path


def test_v4_pro_experts_are_described_as_nvidia_describes_them() -> None:
    inside, outside = quantisation(V4_PRO, layout_named("nvfp4-experts", V4_PRO))
    assert inside
    assert outside
    # deepseek.md's facts of NVIDIA's export: fp8 kept, experts by layer, the drafter left alone.
    assert inside["quantized_layers"] == {
        f"layers.{i}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in range(61)
    }
    expected = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "moe_quant_algo": "NVFP4",
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "group_size": 16,
    }
    assert {name: inside[name] for name in expected} == expected
    assert "mtp.0.*" in inside["ignore"]
    assert "head" in inside["ignore"]
    assert "layers.3.attn.wq_a" in inside["ignore"]
    shared = {name: value for name, value in inside.items() if name in outside["quantization"]}
    assert shared == {n: v for n, v in outside["quantization"].items() if n != "exclude_modules"}


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_config_files_read_back_as_the_same_model(name: str, layout: str) -> None:
    config = CONFIGS[name]
    files = config_files(config, layout_named(layout, config))
    inside, outside = stated(name, layout)
    raw = json.loads(files[CONFIG])
    assert config_from_dict(raw) == config
    assert raw.get("quantization_config") == inside
    assert (json.loads(files[HF_QUANT_CONFIG]) if outside else None) == outside
    assert (HF_QUANT_CONFIG in files) == (outside is not None)


ORACLE = """
import json, sys
from compressed_tensors.quantization import QuantizationConfig
for raw in json.load(sys.stdin):
    read = QuantizationConfig.model_validate(raw)
    group = read.config_groups["group_0"]
    weights, inputs = group.weights, group.input_activations
    facts = [weights.num_bits, weights.group_size, weights.strategy, inputs.dynamic]
    told = [getattr(fact, "value", fact) for fact in facts]
    print(json.dumps([read.format, len(read.ignore), *told]))
"""


@pytest.mark.slow
@pytest.mark.needs("compressed_tensors")
def test_compressed_tensors_reads_its_configs() -> None:
    configs = [stated(name, "compressed-tensors")[0] or {} for name in CONFIGS]
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ORACLE],
        input=json.dumps(configs),
        capture_output=True,
        text=True,
        check=True,
    )
    found = [json.loads(line) for line in told.stdout.splitlines()[-2:]]
    assert found == [
        ["nvfp4-pack-quantized", len(config["ignore"]), 4, 16, "tensor_group", "local"]
        for config in configs
    ]


# --------------------------------------------------------------------------------------------------
# What quantisation configs promise, spelling by spelling.

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
        expected = weight_family(recipe.format_of(parameter).weight)
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
def test_a_config_states_whether_activations_have_a_stored_scale(
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
def test_what_cannot_be_judged_is_reported_without_an_exception(raw: dict[str, Any]) -> None:
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
    assert [(block.sizes, block.format) for block in stated.blocks] == [
        ((128,), "NVFP4"),
        ((128, 128), FP8_BLOCKS),
        ((16,), "NVFP4"),
        ((16,), "NVFP4"),
    ]


_CACHES: list[tuple[dict[str, Any], str]] = [
    ({"kv_cache_quant_algo": "FP8"}, "FP8_ROW"),
    ({"kv_cache_quant_algo": "INT8"}, "INT8_ROW"),
    ({"kv_cache_quant_algo": "NVFP4"}, "NVFP4"),
    ({"kv_cache_quant_algo": "NVFP4_AFFINE"}, ""),  # with zero points
    ({"kv_cache_quant_algo": None}, ""),
    ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "FP8_ROW"),
    ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head"}}, "FP8_ROW"),
    ({"kv_cache_scheme": {"num_bits": 8, "type": "int", "strategy": "tensor"}}, "INT8_ROW"),
    ({"kv_cache_scheme": {"num_bits": 8, "type": "int", "symmetric": False}}, ""),
    ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": True}}, ""),
    ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "token"}}, ""),
    ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, ""),
]


@pytest.mark.parametrize(("raw", "form"), _CACHES)
def test_the_format_of_a_cache_is_read_where_its_scales_are_stored(
    raw: dict[str, Any], form: str
) -> None:
    assert cache_format([{}, raw]) == form
