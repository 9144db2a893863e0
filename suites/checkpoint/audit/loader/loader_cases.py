"""Loader maps for the suites: vLLM's own, and the first field report's, with room for faults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from degarble.harness.checkpoint.audit.loader.map_files import loader_map_from_text
from degarble.harness.checkpoint.audit.loader.proof import LoaderProof, prove
from degarble.harness.checkpoint.audit.structure.inventory import Inventory, take_inventory
from degarble.harness.checkpoint.view.view import Checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.checkpoint.audit.loader.maps import LoaderMap

Raw = dict[str, Any]

# The field report's engine: experts NVFP4, wo_a FP8 with fp32 scales, all else turned back to BF16.
FIELD: Raw = {
    "name": "field report",
    "base": "vllm",
    "tp": 2,
    "ep": 2,
    "parameters": {
        "layout": "vllm",
        "recipe": {
            "name": "field report",
            "rules": [
                {"match": "layers.*.ffn.experts.*", "weight": "NVFP4", "activation": "NVFP4"},
                {
                    "match": "layers.*.attn.wo_a",
                    "weight": "FP8_128X128_F32",
                    "activation": "FP8_1X128_F32",
                },
            ],
        },
    },
    "convert": [
        {"match": r"\.o_a_proj$", "to": "FP8", "block": [128, 128], "scale": "F32"},
        {"match": r"\.self_attn\..*(q_a|q_b|kv|gate|o_b)_proj$", "to": "BF16"},
        {"match": r"\.shared_experts\.(gate|up|down)_proj$", "to": "BF16"},
    ],
}


def inventory_of(checkpoint: Checkpoint) -> Inventory:
    """Take the inventory of a checkpoint that has names."""
    assert checkpoint.names is not None
    return take_inventory(checkpoint.names)


def map_of(checkpoint: Checkpoint, raw: Raw) -> LoaderMap:
    """Read a map from plain data, by way of its text."""
    return loader_map_from_text(yaml.safe_dump(raw), inventory_of(checkpoint))


def proven(folder: Path, raw: Raw) -> LoaderProof:
    """Prove a map over a checkpoint on disk."""
    with Checkpoint.open(folder) as checkpoint:
        return prove(checkpoint, map_of(checkpoint, raw))
