"""What the workers of a pool share: imports, and compiled loops that are loaded already.

Importing this does the work. The loops are called once on a few numbers, because what numba needs
to load them takes 80 MB, which would be each worker's own otherwise. Garbage collection leaves all
of it alone from then on, so that its pages stay shared. Refuses nothing.
Kept honest by suites/checkpoint/transform/convert/test_worker_imports.py, which adds up what all
processes take.
"""

from __future__ import annotations

import gc

import torch

from degarble.harness.checkpoint.transform.convert import prove
from degarble.harness.checkpoint.transform.proof import compare
from degarble.harness.checkpoint.transform.proof.bounds import NO_BOUND, Steps
from degarble.harness.checkpoint.transform.scale_search import (
    Errors,
    ScaleRule,
    quantise_rows,
    tensor_scale,
)
from degarble.harness.formats.element_formats import E4M3
from degarble.harness.formats.fast.modelopt import largest_finite

READY = (prove.__name__, compare.__name__)


def _load_loops() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        values = torch.ones(32, 32, dtype=dtype)
        scale = tensor_scale(largest_finite(values), ScaleRule.AMAX)
        Errors().add(0, values, quantise_rows(values, scale, ScaleRule.AMAX), scale)
    exact = torch.ones(2, 32, dtype=torch.float64)
    compare.Comparison(NO_BOUND).add(exact, exact)
    compare.decoded(torch.zeros(2, 32, dtype=torch.uint8), E4M3, Steps(exact, (1, 1)))


_load_loops()
gc.collect()
gc.freeze()
