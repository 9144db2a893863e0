"""Detect indexers whose compressor holds the bytes of the main compressor.

Shapes cannot show this where the two compressors have equal shapes, or where the indexer's rows are
the main compressor's first rows, so bytes are compared. A few samples come first: a healthy
checkpoint costs a few pages a layer. Equal samples that are constant (zeros of a sparse file) prove
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.checkpoint.audit import rules
from degarble.harness.checkpoint.audit.findings import FindingLocation, Findings
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.model.storage import Part

if TYPE_CHECKING:
    from degarble.harness.checkpoint.audit.structure.inventory import Found, Inventory
    from degarble.harness.checkpoint.read.types import TensorEntry
    from degarble.harness.checkpoint.view.view import Checkpoint

# Bytes of a sample, and bytes that the full comparison takes at a time.
_SAMPLE = 256
_STEP = 1 << 20


def report_indexer_bytes(checkpoint: Checkpoint, inventory: Inventory, findings: Findings) -> None:
    """Report indexers whose compressor is a copy of the main one."""
    for name, found in inventory.by_name.items():
        if not name.endswith((".attn.indexer.compressor.wkv", ".attn.indexer.compressor.wgate")):
            continue
        main = inventory.by_name.get(name.replace(".indexer.", "."))
        if main is None or found.module in inventory.fused or main.module in inventory.fused:
            continue
        pair = _codes(checkpoint, found), _codes(checkpoint, main)
        if _same_rows(checkpoint, *pair):
            findings.add(
                rules.INDEXER_PREFIX,
                FindingLocation(pair[0].name, found.module, inventory.layer_of(found.parameter)),
                f"{shown(pair[0].name)} has the bytes of {shown(pair[1].name)}.",
                "Read the indexer's compressor from its own prefix and write it again.",
                bytes_compared=min(pair[0].nbytes, pair[1].nbytes),
                copied_from=shown(pair[1].name),
            )


def _codes(checkpoint: Checkpoint, found: Found) -> TensorEntry:
    return checkpoint.table.parts(found.module)[Part.CODES]


def _same_rows(checkpoint: Checkpoint, one: TensorEntry, other: TensorEntry) -> bool:
    """Return whether the shorter tensor is a prefix of the longer one; constant samples: False."""
    if one.dtype != other.dtype or one.shape[1:] != other.shape[1:]:
        return False
    first, second = checkpoint.raw(one.name), checkpoint.raw(other.name)
    length = min(len(first), len(second))
    differs = False
    for begin in (0, length // 2, max(length - _SAMPLE, 0)):
        sample = bytes(first[begin : begin + _SAMPLE])
        if sample != bytes(second[begin : begin + len(sample)]):
            return False
        differs = differs or len(set(sample)) > 1
    # Constant samples (holes of a sparse file) prove nothing.
    if not differs:
        return False
    same = all(
        first[begin : min(begin + _STEP, length)] == second[begin : min(begin + _STEP, length)]
        for begin in range(0, length, _STEP)
    )
    checkpoint.release(one.name)
    checkpoint.release(other.name)
    return same
