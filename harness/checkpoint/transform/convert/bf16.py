"""Convert NVFP4, MXFP4 and FP8 to BF16: codes times scales, rounded once to bfloat16.

Decodes every quantised linear, or those that `only` names. The direction of scales is that of each
module's producer: compressed-tensors' global scales divide, all others multiply. Input scales are
left out and reported, because they apply to activations only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.checkpoint.transform.convert.recoding import recoding
from degarble.harness.checkpoint.transform.source import chosen, linears

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.checkpoint.transform.names import TargetNames
    from degarble.harness.checkpoint.transform.units import Options, Unit
    from degarble.harness.checkpoint.view.view import Checkpoint


def to_bf16(checkpoint: Checkpoint, options: Options, names: TargetNames) -> Iterator[Unit]:
    """List one unit for each quantised linear."""
    for linear in chosen(linears(checkpoint), options.only):
        if linear.weight.format is not None:
            yield recoding(names, names.module(linear.module), [linear], None)
