"""`degarble` on one rank of several, where every rank loads rank 0's part of one matrix."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from degarble.harness.cli.main import main
from degarble.references import sharded

if TYPE_CHECKING:
    from degarble.harness.formats.weight import Weight

DAMAGED = "layers.1.attn.wq_b"
healthy = sharded.RankWeights.__getitem__


def first_part(weights: sharded.RankWeights, key: str) -> Weight:
    if key != DAMAGED:
        return healthy(weights, key)
    box = weights._plan.box_on(weights._known[key], 0)
    assert box is not None
    return sharded.sliced(weights._whole[key], box, key)


if __name__ == "__main__":
    sharded.RankWeights.__getitem__ = first_part  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
