"""Model vLLM 0.33's weight loaders by hand, on numbered elements: the oracle of loader proofs.

A stored name goes through vLLM's mappers, stacked parameters and experts; its elements through the
rows or columns that a rank narrows to. Written from models/deepseek_v4 (nvidia/model.py, mtp.py),
models/deepseek_v32 (nvidia/model.py) and the linear layers' loaders; imports no loader proof, no
layout and no sharding plan. The module `routed_experts` that 0.33 puts around the parameters of
experts is left out, as degarble leaves it out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Numbered = NDArray[np.int64]

BLOCK = 128
_ROWS, _COLUMNS = 0, 1


class Place(NamedTuple):
    """Where a name leads: parameter, number among the fused ones, expert."""

    parameter: str
    slot: int | None = None
    expert: int | None = None


def v4_place(name: str, layers: int, nvfp4: bool) -> Place:
    """Follow a name of DeepSeek-V4 through the main model's loader, or the drafter's."""
    name = _v4_scale(name, nvfp4)
    if name.startswith("mtp."):
        name = _drafter_name(name, layers)
    else:
        for prefix in ("layers.", "embed.", "norm.", "hc_head"):
            if name.startswith(prefix):
                name = f"model.{name}"
                break
        if name.endswith("head.weight"):
            name = name.removesuffix("head.weight") + "lm_head.weight"
        if name.endswith("embed.weight"):
            name = name.removesuffix("embed.weight") + "embed_tokens.weight"
    if name.endswith(".ffn.gate.bias"):
        name = name.removesuffix("bias") + "e_score_correction_bias"
    name = name.replace(".shared_experts.w2", ".shared_experts.down_proj")
    expert = re.search(r"\.experts\.(\d+)\.w([123])\.", name)
    if expert:
        to = ".experts.w2_" if expert[2] == "2" else ".experts.w13_"
        place = name.replace(expert[0], to)
        return Place(place, 1 if expert[2] == "3" else 0, int(expert[1]))
    stacked = (
        ("gate_up_proj", "w1", 0),
        ("gate_up_proj", "w3", 1),
        ("attn.fused_wqa_wkv", "attn.wq_a", 0),
        ("attn.fused_wqa_wkv", "attn.wkv", 1),
        ("compressor.fused_wkv_wgate", "compressor.wkv", 0),
        ("compressor.fused_wkv_wgate", "compressor.wgate", 1),
    )
    for to, part, slot in stacked:
        if part in name:
            return Place(name.replace(part, to), slot)
    return Place(name)


def _v4_scale(name: str, nvfp4: bool) -> str:
    if not name.endswith(".scale"):
        return name
    expert = re.search(r"\.experts\.\d+\.w[123]\.scale$", name)
    assert not (expert and nvfp4 and name.startswith("layers.")), "such experts have no .scale"
    return name.removesuffix(".scale") + (".weight_scale" if expert else ".weight_scale_inv")


def _drafter_name(name: str, layers: int) -> str:
    number = name.split(".")[1]
    block = f"model.layers.{layers + int(number)}"
    name = name.replace(f"mtp.{number}", block, 1).replace(
        ".norm.weight", ".shared_head.norm.weight"
    )
    own = ("enorm", "hnorm", "h_proj", "e_proj", "shared_head", "hc_head_")
    return name if any(each in name for each in own) else name.replace(block, f"{block}.mtp_block")


def v32_place(name: str, layers: int) -> Place | None:
    """Follow a name of DeepSeek-V3.2; None: the drafter's own loader reads it."""
    number = re.search(r"\.layers\.(\d+)\.", name)
    if number and int(number[1]) >= layers:
        return None
    expert = re.search(r"\.experts\.(\d+)\.(gate|up|down)_proj\.", name)
    if expert:
        to = ".experts.w2_" if expert[2] == "down" else ".experts.w13_"
        return Place(name.replace(expert[0], to), int(expert[2] == "up"), int(expert[1]))
    stacked = (
        ("gate_up_proj", "gate_proj", 0),
        ("gate_up_proj", "up_proj", 1),
        ("fused_qkv_a_proj", "q_a_proj", 0),
        ("fused_qkv_a_proj", "kv_a_proj_with_mqa", 1),
        ("indexer.wk_weights_proj.", "indexer.wk.", 0),
        ("indexer.wk_weights_proj.", "indexer.weights_proj.", 1),
    )
    for to, part, slot in stacked:
        if part in name:
            return Place(name.replace(part, to), slot)
    return Place(name)


# Linears by the module in a parameter's name. What is in none is the same on every rank.
_COLUMN_PARALLEL = ("embed_tokens", "lm_head", "q_b_proj", "kv_b_proj", "gate_up_proj", "attn_sink")
_ROW_PARALLEL = ("o_proj", "down_proj")
_V4_COLUMN_PARALLEL = (".attn.wq_b", ".attn.wo_a")
_V4_ROW_PARALLEL = (".attn.wo_b",)


class Rank(NamedTuple):
    """One rank without pipeline stages: its number, and how many share what."""

    rank: int
    tp: int
    ep: int
    experts: int


def piece(stored: Numbered, place: Place, rank: Rank) -> Numbered | None:
    """Narrow a stored tensor to what a rank keeps; None: another rank's expert."""
    tp_rank = rank.rank % rank.tp
    if place.expert is not None:
        if rank.ep > 1:
            here = rank.experts // rank.ep
            return stored if place.expert // here == rank.rank % rank.ep else None
        # w1 and w3 are column parallel, w2 is row parallel; scalars are repeated.
        return _share(stored, _COLUMNS if ".w2_" in place.parameter else _ROWS, rank.tp, tp_rank)
    modules = place.parameter
    v4 = re.search(r"\.shared_experts\.", modules) and ".ffn." in modules
    if any(each in modules for each in (*_ROW_PARALLEL, *_V4_ROW_PARALLEL)):
        stored = _padded(stored, _COLUMNS, modules, rank.tp) if v4 else stored
        return _share(stored, _COLUMNS, rank.tp, tp_rank)
    if any(each in modules for each in (*_COLUMN_PARALLEL, *_V4_COLUMN_PARALLEL)):
        stored = _padded(stored, _ROWS, modules, rank.tp) if v4 else stored
        return _share(stored, _ROWS, rank.tp, tp_rank)
    return stored


def _share(stored: Numbered, dim: int, ranks: int, rank: int) -> Numbered:
    if stored.ndim <= dim:
        return stored
    extent = stored.shape[dim] // ranks
    return stored.take(range(rank * extent, (rank + 1) * extent), axis=dim)


def _padded(stored: Numbered, dim: int, name: str, ranks: int) -> Numbered:
    """Pad a shared expert to whole blocks a rank with -2: elements that no file has."""
    step = ranks * (1 if name.endswith("weight_scale_inv") else BLOCK)
    widths = [(0, 0)] * stored.ndim
    widths[dim] = (0, -stored.shape[dim] % step)
    return np.pad(stored, widths, constant_values=-2)


def loaded(
    tensors: Mapping[str, tuple[Place, Numbered]], rank: Rank
) -> dict[str, dict[tuple[int, int], Numbered]]:
    """Load everything on one rank: parameter to (expert of the rank, slot) to elements."""
    found: dict[str, dict[tuple[int, int], Numbered]] = {}
    here = rank.experts // rank.ep
    for place, stored in tensors.values():
        part = piece(stored, place, rank)
        if part is not None:
            expert = 0 if place.expert is None else place.expert % here
            found.setdefault(place.parameter, {})[expert, place.slot or 0] = part
    return found
