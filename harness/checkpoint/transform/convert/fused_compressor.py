"""Fuse the compressor's two projections into one BF16 tensor, kv above gate, as vLLM reads them.

Joins `kv_proj` and `gate_proj` (DeepSeek: `wkv`, `wgate`) along rows, for the main compressor and
for the indexer's, each from its own prefix. Trap: in small models both compressors have the same
shape, so only the values reveal a mix-up; `prove` compares them. A checkpoint without compressors,
or with one projection only, raises an error.

Source: vLLM 0.33 models/deepseek_v4, packed_modules_mapping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.base.errors import LayoutMismatch
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.transform.convert.recoding import recoding
from degarble.harness.checkpoint.transform.source import chosen, linears, require_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.checkpoint.transform.names import TargetNames
    from degarble.harness.checkpoint.transform.units import Options, Unit
    from degarble.harness.checkpoint.view.view import Checkpoint

FUSED = "fused_wkv_wgate"
_FIRST, _SECOND = ".compressor.wkv", ".compressor.wgate"


def to_fused_compressor(
    checkpoint: Checkpoint, options: Options, names: TargetNames
) -> Iterator[Unit]:
    """List one unit for each compressor."""
    require_model(checkpoint, "fused-compressor")
    found = {each.name: each for each in linears(checkpoint)}
    starts = [each for each in found.values() if each.name.endswith(_FIRST)]
    gates = {name for name in found if name.endswith(_SECOND)}
    if not starts and not gates:
        raise LayoutMismatch(
            f"compressors of {shown(str(checkpoint.root))}",
            "none",
            "kv_proj and gate_proj of at least one layer",
            "Only V4 has compressors; one that is fused already needs no conversion.",
        )
    ends = {each.name.removesuffix(_FIRST) + _SECOND for each in starts}
    if ends != gates:
        raise LayoutMismatch(
            "compressor projection without its partner",
            sorted(ends ^ gates)[:3],
            "wkv and wgate for each compressor",
            "Look for a shard that is missing.",
        )
    for first in chosen(starts, options.only):
        second = found[first.name.removesuffix(_FIRST) + _SECOND]
        yield recoding(names, names.beside(first.module, FUSED), [first, second], None)
