"""Faults of loading as data: what is changed in a map or a checkpoint, and which rule that breaks.

The seven faults of the first field report stand first, by their numbers there; where one of them
has two forms, each is a case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.suites.checkpoint.audit.loader.loader_cases import FIELD, Raw
from degarble.suites.checkpoint.structure_cases import V4, V32, zeros

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.model.config.config import Config

    Tensors = dict[str, Tensor]
    Change = Callable[[Tensors], None]

SOURCES: dict[str, tuple[Config, str]] = {
    "field": (V4, "nvfp4-full"),
    "official": (V4, "official"),
    "nvfp4": (V4, "nvfp4-experts"),
    "bf16": (V4, "bf16"),
    "hf": (V4, "transformers-saved"),
    "v32": (V32, "nvfp4-full"),
}
# A list of one parameter leaves the rest of a checkpoint without a place.
LISTED_ALONE = {"loader.dropped", "loader.dropped_scale"}
VLLM: Raw = {"base": "vllm", "tp": 2}
ATTN = "layers.1.attn"
EXPERT = r"\.experts\.(?P<expert>\d+)"


class Case(NamedTuple):
    """A fault: what is changed in the map and in the checkpoint, and what it breaks."""

    source: str
    base: Raw
    rules: Raw
    breaks: str
    change: Change | None = None


def put(name: str, make: Callable[[Tensors], Tensor]) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[name] = make(tensors).contiguous()

    return change


def rename(name: str, to: str) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[to] = tensors.pop(name)

    return change


def converts(**changes: object) -> Raw:
    """Change the field report's conversion of wo_a."""
    first, *rest = FIELD["convert"]
    made = {key: value for key, value in {**first, **changes}.items() if value is not None}
    return {"convert": [made, *rest]}


def o_b_reads(*parts: str) -> Raw:
    """Let the field report's conversion of wo_b read these parts."""
    rule = {"match": r"\.o_b_proj$", "to": "BF16", "reads": list(parts)}
    return {"convert": [rule, *FIELD["convert"]]}


def copy(name: str, to: str) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[to] = tensors[name].clone()

    return change


def drop(*names: str) -> Change:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def skip(*patterns: str) -> Raw:
    return {"skip": list(patterns)}


FAULTS: dict[str, Case] = {
    "1: a 1-D scale where one a block is expected": Case(
        "field", FIELD, converts(block="tensor"), "loader.scale_rank"
    ),
    "1: the same, in the file": Case(
        "official",
        VLLM,
        {},
        "loader.scale_rank",
        put(f"{ATTN}.wo_a.scale", lambda _: zeros((2,), torch.float8_e8m0fnu)),
    ),
    "2: E4M3 block scales where fp32 is expected": Case(
        "field", FIELD, converts(scale="F8_E4M3"), "loader.scale_dtype"
    ),
    "2: E4M3 block scales where UE8M0 is expected": Case(
        "official",
        VLLM,
        {},
        "loader.scale_dtype",
        put(f"{ATTN}.wo_a.scale", lambda t: t[f"{ATTN}.wo_a.scale"].to(torch.float8_e4m3fn)),
    ),
    "3: the block shape missing among the arguments": Case(
        "field", FIELD, converts(block=None), "loader.block_unstated"
    ),
    "4: the indexer's compressor and the main one from each other's prefix": Case(
        "bf16",
        VLLM,
        {
            "rename": [
                {"match": r"\.indexer\.compressor\.", "to": ".other."},
                {"match": r"(s\.1\.attn)\.compressor\.", "to": r"\1.indexer.compressor."},
                {"match": r"\.attn\.other\.", "to": ".attn.compressor."},
            ]
        },
        "loader.prefix",
    ),
    "4: the indexer's compressor from the main prefix, its own lost": Case(
        "bf16",
        VLLM,
        {
            "rename": [
                {"match": r"\.indexer\.compressor\.", "to": ".other."},
                {"match": r"(s\.1\.attn)\.compressor\.", "to": r"\1.indexer.compressor."},
            ]
        },
        "loader.prefix",
    ),
    "5: block scales of all ones": Case(
        "field",
        FIELD,
        {
            "rename": [{"match": r"o_a_proj\.weight_scale_inv$", "to": "o_a_proj.lost"}],
            "fill": [{"match": r"\.wo_a\.weight_scale_inv$", "value": 1.0}],
        },
        "loader.constant_scale",
    ),
    "6: input_scale multiplied into the weights": Case(
        "field",
        FIELD,
        o_b_reads("codes", "block_scale", "tensor_scale", "input_scale"),
        "loader.input_scale_in_weight",
    ),
    "6: input_scale in the place of the tensor scale": Case(
        "nvfp4",
        VLLM,
        {
            "rename": [
                {"match": r"(experts\.\d+\.w2)\.weight_scale_2$", "to": r"\1.lost"},
                {"match": r"(experts\.\d+\.w2)\.input_scale$", "to": r"\1.weight_scale_2"},
            ]
        },
        "loader.input_scale_in_weight",
    ),
    "7: a pattern for fused parameters that also skips scales": Case(
        "official", VLLM, {"skip": [r"\.(wq_b|wo_a|wo_b)\.scale$"]}, "loader.skipped_scale"
    ),
}

OTHERS: dict[str, Case] = {
    "a weight is skipped": Case("official", VLLM, {"skip": [r"\.wq_b\.weight$"]}, "loader.skipped"),
    "the correction bias under another name": Case(
        "official",
        VLLM,
        {},
        "loader.unwritten",
        rename("layers.1.ffn.gate.bias", "layers.1.ffn.gate.correction"),
    ),
    "a name that the rules lose": Case(
        "official",
        VLLM,
        {"rename": [{"match": r"\.q_norm\.", "to": ".query_norm."}]},
        "loader.dropped",
    ),
    "scales with underscores are not mapped": Case(
        "nvfp4",
        VLLM,
        {"rename": [{"match": r"(experts\.\d+\.w2)\.weight_scale$", "to": r"\1_weight_scale"}]},
        "loader.dropped_scale",
    ),
    "the scale of a fused parameter in its first slot alone": Case(
        "nvfp4",
        VLLM,
        {},
        "loader.slot_unwritten",
        drop(*(f"layers.1.ffn.experts.{e}.w3.weight_scale_2" for e in range(V4.n_routed_experts))),
    ),
    "gate and up exchanged": Case(
        "nvfp4",
        VLLM,
        {
            "stack": [
                {"match": rf"{EXPERT}\.w1\.", "into": ".experts.w13_", "slot": 1},
                {"match": rf"{EXPERT}\.w3\.", "into": ".experts.w13_", "slot": 0},
            ]
        },
        "loader.swapped_partners",
    ),
    "both partners in one slot": Case(
        "official",
        VLLM,
        {"stack": [{"match": r"_experts\.w3\.", "into": "_experts.gate_up_proj.", "slot": 0}]},
        "loader.swapped_partners",
    ),
    "two names that become one": Case(
        "official",
        VLLM,
        {"rename": [{"match": r"\.query_norm\.", "to": ".q_norm."}]},
        "loader.written_twice",
        copy(f"{ATTN}.q_norm.weight", f"{ATTN}.query_norm.weight"),
    ),
    "a slot that is not there": Case(
        "official",
        VLLM,
        {"stack": [{"match": r"\.attn\.wkv\.", "into": ".attn.fused_wqa_wkv.", "slot": 2}]},
        "loader.shape",
    ),
    "rows that no rank takes": Case(
        "official",
        {
            "parameters": {
                "w1": {"dtype": "I8", "shape": [2, 256, 64], "experts": True},
            }
        },
        {"stack": [{"match": rf"layers\.1\..*{EXPERT}\.w1\.weight$", "into": "w1"}]},
        "loader.unread",
    ),
    "the neighbour's layer": Case(
        "official",
        VLLM,
        {
            "rename": [
                {"match": r"^layers\.0\.(attn\.wq_b)", "to": r"layers.9.\1"},
                {"match": r"^layers\.1\.(attn\.wq_b)", "to": r"layers.0.\1"},
                {"match": r"^layers\.9\.(attn\.wq_b)", "to": r"layers.1.\1"},
            ]
        },
        "loader.wrong_parameter",
    ),
    "two experts exchanged, behind others that are right": Case(
        "nvfp4",
        VLLM,
        {
            "rename": [
                {"match": r"^(layers\.1\.ffn\.experts)\.2\.", "to": r"\1.9."},
                {"match": r"^(layers\.1\.ffn\.experts)\.3\.", "to": r"\1.2."},
                {"match": r"^(layers\.1\.ffn\.experts)\.9\.", "to": r"\1.3."},
            ]
        },
        "loader.wrong_parameter",
    ),
    "a tensor scale in the place of an input scale": Case(
        "nvfp4",
        VLLM,
        {
            "rename": [
                {"match": r"(experts\.\d+\.w2)\.input_scale$", "to": r"\1.lost"},
                {"match": r"(experts\.\d+\.w2)\.weight_scale_2$", "to": r"\1.input_scale"},
            ]
        },
        "loader.wrong_part",
    ),
    "rows cut in other multiples than the heads": Case(
        "official",
        VLLM,
        {"split": [{"match": r"\.attn_sink$", "dim": 0, "multiple": 3}]},
        "loader.wrong_rows",
    ),
    "linears in a format that is not built": Case("field", VLLM, {}, "loader.format"),
    "codes into a parameter of values": Case(
        "official",
        {"parameters": {"plain": {"dtype": "BF16", "shape": [1024, 128]}}},
        {"rename": [{"match": r"^layers\.1\.attn\.wq_b\.weight$", "to": "plain"}]},
        "loader.dtype",
    ),
    "a conversion without the second scale": Case(
        "field", FIELD, o_b_reads("codes", "block_scale"), "loader.scale_unread"
    ),
    "partners in two formats": Case(
        "v32",
        {"base": "vllm"},
        {
            "parameters": {
                "layout": "vllm",
                "recipe": {
                    "name": "one of two",
                    "rules": [{"match": "layers.*.ffn.experts.*.w1", "weight": "NVFP4"}],
                },
            }
        },
        "loader.partners_differ",
    ),
}
WARNED: dict[str, Case] = {
    "fp32 norms kept in bf16": Case("hf", {"base": "vllm"}, {}, "loader.narrowed"),
    "a map that is not the engine's own": Case("hf", {"base": "vllm"}, {}, "loader.caveat"),
    "the drafter in another format": Case("nvfp4", VLLM, {}, "loader.drafter_format"),
}
NOTED: dict[str, Case] = {
    "left to another loader": Case("v32", {"base": "vllm"}, {}, "loader.elsewhere"),
    "a rule that matches nothing": Case(
        "official", VLLM, {"skip": ["inv_freq$"]}, "loader.dead_rule"
    ),
    "no tensor of the model": Case(
        "official",
        VLLM,
        {},
        "loader.extra_dropped",
        put("layers.1.attn.rotary_emb.inv_freq", lambda _: zeros((8,), torch.float32)),
    ),
}
