"""Convert NVFP4, MXFP4 or BF16 to FP8 with one scale for every 128x128 block, fp32 or UE8M0.

Converts what the released model has quantised, or what `only` names; for an unknown model, every
quantised module. Weights that the released model has in BF16 (compressors) and that the source has
quantised are decoded, because engines build them unquantised.

Scales are decode scales: the consumer multiplies codes by them, despite the name
`weight_scale_inv`. FP8 keeps its codes where the other scale format holds its scales exactly. MXFP4
keeps its values exactly where a block spans few exponents. V4's experts always get fp32 scales,
because engines read no others with `expert_dtype` fp8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.checkpoint.transform.convert.recoding import recoding
from degarble.harness.checkpoint.transform.source import chosen, linears
from degarble.harness.formats.block_formats import FP8_128X128_F32, FP8_128X128_UE8M0
from degarble.harness.model.config.config import V4Config
from degarble.harness.model.recipes import BF16, recipe_named

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.checkpoint.transform.names import TargetNames
    from degarble.harness.checkpoint.transform.units import Options, Unit
    from degarble.harness.checkpoint.view.view import Checkpoint

BY_SCALE = {"fp32": FP8_128X128_F32, "ue8m0": FP8_128X128_UE8M0}


def to_fp8_block(checkpoint: Checkpoint, options: Options, names: TargetNames) -> Iterator[Unit]:
    """List one unit for each linear that is not in this format yet."""
    model = checkpoint.model
    released = recipe_named("official", model) if model else None
    for linear in chosen(linears(checkpoint), options.only):
        expert = linear.parameter is not None and linear.parameter.expert is not None
        of_v4 = isinstance(model, V4Config)
        fmt = FP8_128X128_F32 if of_v4 and expert else BY_SCALE[options.scale]
        wanted = bool(options.only) or linear.weight.format is not None
        if not options.only and released is not None and linear.parameter is not None:
            wanted = released.format_of(linear.parameter).weight != BF16
            if not wanted and linear.weight.format is not None:
                yield recoding(names, names.module(linear.module), [linear], None)
        if wanted and linear.weight.format != fmt:
            yield recoding(names, names.module(linear.module), [linear], fmt)
