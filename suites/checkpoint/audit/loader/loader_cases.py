"""Maps and checkpoints for the loader proof, and loaders that really move bytes, as its oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from degarble.harness.checkpoint.audit.loader.map_files import loader_map_from_text
from degarble.harness.checkpoint.audit.loader.proof import LoaderProof, prove
from degarble.harness.checkpoint.audit.structure.inventory import Inventory, take_inventory
from degarble.harness.checkpoint.view.view import Checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from degarble.harness.checkpoint.audit.loader.maps import LoaderMap
    from degarble.harness.model.types import Box


# --------------------------------------------------------------------------------------------------
# Loader maps for the suites: vLLM's own, and the first field report's, with room for faults.

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


# --------------------------------------------------------------------------------------------------
# The moves of a loader proof, carried out on numbered elements, for the suites of loading.
#
# Every stored element gets a number of its own. What lies where after the moves, and what is left
# over on either side, is compared with what the proof says.

if TYPE_CHECKING:
    Numbered = NDArray[np.int64]

NOWHERE = -1


def numbered(proof: LoaderProof) -> dict[str, Numbered]:
    """Give every stored element a number."""
    found, first = {}, 0
    for name, entry in proof.entries.items():
        count = int(np.prod(entry.shape, dtype=np.int64))
        found[name] = np.arange(first, first + count).reshape(entry.shape)
        first += count
    return found


def sliced(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*each) for each in box.ranges)


def moved(proof: LoaderProof, stored: dict[str, Numbered]) -> dict[tuple[int, str], Numbered]:
    """Carry out what the proof claims, in its order."""
    found = {}
    for held in proof.rank_parameters():
        for target in held.targets.values():
            memory = np.full(target.shape, NOWHERE)
            for move in proof.fills(target.name, held.rank):
                there = sliced(move.target_box)
                if move.made_from:
                    memory[there] = 0  # computed: it has no number of its own
                else:
                    taken = stored[move.source][sliced(move.source_box)]
                    memory[there] = taken.reshape(memory[there].shape)
            found[held.rank, target.name] = memory
    return found


def painted(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> NDArray[np.bool_]:
    found = np.zeros(shape, dtype=bool)
    for box in boxes:
        found[sliced(box)] = True
    return found


def require_claims(proof: LoaderProof, *, sources: bool = True) -> None:
    """Compare what the moves leave over with what the proof says of it, element by element."""
    stored = numbered(proof)
    memories = moved(proof, stored)
    for key, memory in memories.items():
        claimed = painted(memory.shape, proof.unwritten.get(key, ()))
        np.testing.assert_array_equal(memory == NOWHERE, claimed, err_msg=str(key))
    assert set(proof.unwritten) <= set(memories)
    if not sources:
        return
    arrived = np.zeros(sum(each.size for each in stored.values()), dtype=bool)
    for memory in memories.values():
        arrived[memory[memory >= 0]] = True
    made_from = {
        name
        for rank, target in memories
        for move in proof.fills(target, rank)
        for name in move.made_from
    }
    for name, outcome in proof.outcomes.items():
        here = arrived[stored[name]]
        if outcome == "placed" and name not in made_from:
            claimed = painted(stored[name].shape, proof.unread.get(name, ()))
            np.testing.assert_array_equal(~here, claimed, err_msg=name)
        elif outcome != "converted":
            assert not here[stored[name] > 0].any(), name  # zero stands for what is computed
