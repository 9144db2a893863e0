from __future__ import annotations

import json
import subprocess
import sys
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.checkpoint.view.quantisation_configs import (
    CONFIG,
    HF_QUANT_CONFIG,
    config_files,
    quantisation,
)
from degarble.harness.model.config.json_file import config_from_dict
from degarble.harness.model.layouts import LAYOUTS, layout_named
from degarble.harness.model.parameters import parameters
from degarble.harness.model.presets import V4_PRO, small_v4, small_v32
from degarble.harness.model.types import Kind

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
    told = {**(inside or {}), **(outside or {"quantization": {}})["quantization"]}
    patterns = told.get("ignore", told.get("exclude_modules"))
    if patterns is None:
        return
    assert set(told.get("exclude_modules", patterns)) <= set(patterns)  # and what vLLM fuses
    recipe = placed.recipe_for(config)
    for parameter in parameters(config):
        if parameter.kind is Kind.LINEAR and not placed.omits(parameter, config):
            path = placed.path_of(parameter, config)
            ignored = any(fnmatch(path, pattern) for pattern in patterns)
            assert ignored == (recipe.format_of(parameter).weight != "NVFP4"), path


def test_v4_pro_experts_are_told_as_nvidia_tells_them() -> None:
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
