"""Preload imports and compiled loops in the parent, so that workers of a pool share their pages.

Importing this module does the work. The loops are called once on a few numbers: numba needs 80 MB
to load them, which each worker would otherwise hold for itself.
"""

from __future__ import annotations

import gc

import torch

from degarble.harness.checkpoint.transform.convert import job
from degarble.harness.checkpoint.transform.nvfp4_scales import (
    Errors,
    ScaleRule,
    quantise_rows,
    tensor_scale,
)
from degarble.harness.checkpoint.transform.proof import compare
from degarble.harness.checkpoint.transform.proof.bounds import NO_BOUND, PanelScales
from degarble.harness.formats.fast.nvfp4 import largest_finite
from degarble.harness.formats.number_formats import E4M3

READY = (job.__name__, compare.__name__)


def _load_loops() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        values = torch.ones(32, 32, dtype=dtype)
        scale = tensor_scale(largest_finite(values), ScaleRule.AMAX)
        Errors().add(0, values, quantise_rows(values, scale, ScaleRule.AMAX), scale)
    exact = torch.ones(2, 32, dtype=torch.float64)
    compare.PanelComparison(NO_BOUND).add(exact, exact)
    compare.decoded(torch.zeros(2, 32, dtype=torch.uint8), E4M3, PanelScales(exact, (1, 1)))


_load_loops()
# Frozen objects are never visited by the collector, so forked workers do not copy their pages.
gc.collect()
gc.freeze()
