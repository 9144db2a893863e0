"""Generate the quantisation entries of config.json and hf_quant_config.json for a layout.

There are four kinds: FP8 as DeepSeek releases it, NVFP4 experts with FP8 linears (ModelOpt's mixed
precision), NVFP4 with BF16 (ModelOpt), and compressed-tensors. The list of unquantised modules
follows from the recipe.

ModelOpt's own exports of V3.2 have no `quantization_config`, but ours do: vLLM 0.33 accepts
hf_quant_config.json only from the producer "modelopt", and otherwise builds every weight
unquantised.

Sources: config.json of DeepSeek-V4-Pro; NVIDIA's V4 NVFP4 exports and Model-Optimizer
examples/deepseek; compressed-tensors 0.20 quantization/quant_config.py.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from degarble.harness.base.version import VERSION
from degarble.harness.model.config.config import Config, V4Config
from degarble.harness.model.config.json_file import config_to_dict
from degarble.harness.model.layouts import Spelling, layout_named
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import BF16
from degarble.harness.model.types import Kind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from degarble.harness.model.layouts import Layout
    from degarble.harness.model.parameters import Parameter

CONFIG = "config.json"
HF_QUANT_CONFIG = "hf_quant_config.json"

_NVFP4 = "NVFP4"
_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
_FOUR_BITS = {"num_bits": 4, "type": "float", "group_size": 16}
_MODELOPT_GROUP = {
    "weights": {**_FOUR_BITS, "dynamic": False},
    "input_activations": {**_FOUR_BITS, "dynamic": False},
    "targets": ["Linear"],
}
_PACKED_GROUP = {
    "format": "nvfp4-pack-quantized",
    "targets": ["Linear"],
    "weights": {**_FOUR_BITS, "strategy": "tensor_group", "symmetric": True, "dynamic": False},
    "input_activations": {
        **_FOUR_BITS,
        "strategy": "tensor_group",
        "symmetric": True,
        "dynamic": "local",
    },
}


def config_files(config: Config, layout: Layout) -> dict[str, bytes]:
    """Write the config files of a checkpoint in this layout."""
    saved = layout.name.startswith("transformers")
    renamed = isinstance(config, V4Config) and layout.spelling is Spelling.HUGGINGFACE
    raw = config_to_dict(config, "transformers" if saved or renamed else "released")
    raw.pop("quantization_config", None)
    stated, beside = quantisation(config, layout)
    files = {CONFIG: raw | ({"quantization_config": stated} if stated else {})}
    if beside:
        files[HF_QUANT_CONFIG] = beside
    return {
        name: (json.dumps(each, ensure_ascii=False, indent=2) + "\n").encode()
        for name, each in files.items()
    }


def quantisation(
    config: Config, layout: Layout
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return `quantization_config` and hf_quant_config.json's content; None where there is none.

    An engine reads the first, ModelOpt's own tools the second.
    """
    formats = {weight for _, weight in _linears(config, layout)}
    if _NVFP4 not in formats:
        return (None if formats <= {BF16} else dict(_FP8)), None
    if layout.suffixes == "compressed-tensors":
        return _compressed(config, layout), None
    kept = formats - {_NVFP4, BF16}
    ignored = _left_alone(config, layout)
    groups = {"group_0": _MODELOPT_GROUP}
    if kept:
        told = {
            "moe_quant_algo": _NVFP4,
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "config_groups": groups,
            "quantized_layers": _listed(config, layout),
        }
        return {**_FP8, **told, "ignore": ignored}, _beside({**told, "exclude_modules": ignored})
    told = {"quant_algo": _NVFP4, "kv_cache_quant_algo": None, "group_size": 16}
    beside = _beside({**told, "exclude_modules": ignored})
    stated = {"quant_method": "modelopt", **told}
    if isinstance(config, V4Config):
        return {**stated, "config_groups": groups, "ignore": ignored}, beside
    return {**stated, "ignore": [*ignored, *fused_in_vllm(config, ignored)]}, beside


def fused_in_vllm(config: Config, ignored: Collection[str]) -> list[str]:
    """Return vLLM's fused names of ignored linears: it looks these up, not the members."""
    layout, names = layout_named("vllm", config), set(ignored)
    fusion_of = {row: each for each in layout.fusions for row in each.members}
    found: dict[str, list[bool]] = defaultdict(list)
    for parameter in parameters(config):
        fusion = fusion_of.get(parameter.row.name)
        if fusion is not None and parameter.expert is None and not layout.omits(parameter, config):
            path = layout.path_of(parameter, config, fusion.target)
            found[path].append(layout.path_of(parameter, config) in names)
    return [path for path, members in found.items() if all(members)]


def _beside(told: dict[str, Any]) -> dict[str, Any]:
    return {"producer": {"name": "degarble", "version": VERSION}, "quantization": told}


def _compressed(config: Config, layout: Layout) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {"group_0": _PACKED_GROUP},
        "ignore": _left_alone(config, layout),
    }


def _linears(config: Config, layout: Layout) -> Iterator[tuple[Parameter, str]]:
    """Yield every linear that the layout stores, one expert for all, with its weight's format."""
    recipe = layout.recipe_for(config)
    for parameter in parameters(config):
        if parameter.kind is not Kind.LINEAR or parameter.expert not in (None, 0):
            continue
        if not layout.omits(parameter, config):
            yield parameter, recipe.format_of(parameter).weight


def _left_alone(config: Config, layout: Layout) -> list[str]:
    """Return the linears that are not NVFP4; a drafter without any becomes one pattern."""
    names: list[str] = []
    drafters: dict[str, list[str]] = defaultdict(list)
    with_nvfp4 = set()
    for parameter, weight in _linears(config, layout):
        path = layout.path_of(parameter, config)
        drafts = parameter.block is not None and parameter.block.is_drafter
        prefix = _prefix(path, parameter) if drafts else ""
        if weight == _NVFP4:
            with_nvfp4.add(prefix)
        elif parameter.expert is None or drafts:
            stack = path.partition(".experts.")[0] + ".experts"
            told = path if parameter.expert is None else stack
            (drafters[prefix] if drafts else names).append(told)
    for prefix, found in sorted(drafters.items()):
        names += dict.fromkeys(found) if prefix in with_nvfp4 else [f"{prefix}.*"]
    return names


def _listed(config: Config, layout: Layout) -> dict[str, Any]:
    """Return what is NVFP4: stacks of experts, and linears outside of them."""
    found: dict[str, Any] = {}
    for parameter, weight in _linears(config, layout):
        if weight == _NVFP4:
            path = layout.path_of(parameter, config)
            stack = path.partition(".experts.")[0] + ".experts"
            told = path if parameter.expert is None else stack
            found[told] = {"quant_algo": _NVFP4, "group_size": 16}
    return found


def _prefix(path: str, parameter: Parameter) -> str:
    """Cut a path after the number of its block: `model.layers.61`, `mtp.0`."""
    assert parameter.block is not None
    parts = path.split(".")
    number = next(index for index, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[: number + 1])
