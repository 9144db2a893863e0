"""List the modules in shards that cannot be read, so that none is also reported as missing.

The index says which shard holds a tensor; the unreadable shard has a finding of its own. Without an
index nothing is known to be lost, and each absent parameter is reported by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.checkpoint.audit.structure.inventory import Inventory
    from degarble.harness.checkpoint.view.view import Checkpoint


class Lost(NamedTuple):
    """Modules with a tensor in an unreadable shard, and the tensors of each such shard."""

    modules: frozenset[str]
    tensors: Mapping[str, int]


def lost_modules(checkpoint: Checkpoint) -> Lost:
    """Return what the index places in shards that were not read."""
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
    """Return the inventory without the lost modules."""
    if not lost.modules:
        return inventory
    return replace(
        inventory,
        found=[each for each in inventory.found if each.module not in lost.modules],
        missing=[each for each in inventory.missing if each[1] not in lost.modules],
        fused={name: all_ for name, all_ in inventory.fused.items() if name not in lost.modules},
    )
