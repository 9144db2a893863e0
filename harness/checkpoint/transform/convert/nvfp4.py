"""Convert FP8, MXFP4 or BF16 to weight-only NVFP4 as ModelOpt stores it.

Converts the linears of the recipe `nvfp4-full`, or what `only` names. Partners share one tensor
scale, from the largest magnitude of all of them. No input scale is written: that needs a
calibration, which `degarble quantise` reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.checkpoint.transform.convert.groups import partner_groups
from degarble.harness.checkpoint.transform.convert.recoding import recoding
from degarble.harness.checkpoint.transform.recode import Partners
from degarble.harness.checkpoint.transform.source import chosen, linears, require_model
from degarble.harness.formats.block_formats import NVFP4
from degarble.harness.model.recipes import recipe_named

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.checkpoint.transform.names import TargetNames
    from degarble.harness.checkpoint.transform.units import Options, Unit
    from degarble.harness.checkpoint.view.view import Checkpoint

RECIPE = "nvfp4-full"


def to_nvfp4(checkpoint: Checkpoint, options: Options, names: TargetNames) -> Iterator[Unit]:
    """List one unit for each linear that is not NVFP4 yet."""
    model, _ = require_model(checkpoint, "nvfp4")
    recipe = recipe_named(RECIPE, model)
    taken = [
        each
        for each in chosen(linears(checkpoint), options.only)
        if each.parameter is not None
        and each.weight.format != NVFP4
        and (options.only or recipe.format_of(each.parameter).weight == NVFP4.name)
    ]
    for group in partner_groups(checkpoint, taken):
        partners = Partners([each.weight for each in group])
        for linear in group:
            yield recoding(names, names.module(linear.module), [linear], NVFP4, partners)
