"""What lies in shards that cannot be read, by the index: one cause, told once.

Owns the question which modules are lost with their shard. These are judged by nobody: a parameter
that is missing because its shard is missing has its finding already, that of the shard.
Without an index nothing is known to be lost, and what is missing is told by its name.

Kept honest by suites/checkpoint/audit/structure/test_lost.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.checkpoint.audit.structure.inventory import Inventory
    from degarble.harness.checkpoint.view.view import Checkpoint


class Lost(NamedTuple):
    """Modules that have a tensor in an unreadable shard, and how many tensors each shard has."""

    modules: frozenset[str]
    tensors: Mapping[str, int]


def lost_modules(checkpoint: Checkpoint) -> Lost:
    """Find what the index places in shards that were not read."""
    index = checkpoint.index
    read = {shard.file.name for shard in checkpoint.shards}
    modules: set[str] = set()
    tensors: dict[str, int] = {}
    for name, shard in (index.weight_map if index is not None else {}).items():
        if shard in read:
            continue
        tensors[shard] = tensors.get(shard, 0) + 1
        # A parameter is a tensor of its own, or a module whose parts end in a word of their own.
        modules.update((name, name.rpartition(".")[0], name.removesuffix("_weight")))
    return Lost(frozenset(modules), tensors)


def without_lost(inventory: Inventory, lost: Lost) -> Inventory:
    """Return what is left to be judged."""
    if not lost.modules:
        return inventory
    return replace(
        inventory,
        found=[each for each in inventory.found if each.module not in lost.modules],
        missing=[each for each in inventory.missing if each[1] not in lost.modules],
        fused={name: all_ for name, all_ in inventory.fused.items() if name not in lost.modules},
    )
