"""Import what a worker of `degarble check` needs, and load its loops, once for all of a pool.

torch and its dependents make several hundred thousand objects, none of them garbage: looking for
some would take a fifth of the time. Frozen objects are never visited by the collector, so forked
workers do not copy their pages.
"""

from __future__ import annotations

import gc
import logging
from importlib import import_module

_MODULES = (
    "degarble.harness.commands.check.check",
    "degarble.harness.commands.check.spread",
    "degarble.harness.engine.compare.loops",
)


def _load_loops() -> None:
    """Judge two numbers: too few for torch to start a thread, which a fork would not survive."""
    import torch  # noqa: PLC0415  imported without the collector

    from degarble.harness.engine.budget.budget import Budget, judge  # noqa: PLC0415  as above
    from degarble.harness.formats.number_formats import BF16, FP32  # noqa: PLC0415  as above

    for dtype, output in ((torch.bfloat16, BF16), (torch.float32, FP32)):
        pair = torch.ones(2, 1, 2, dtype=dtype)
        judge(pair[0], pair[1], Budget(output, torch.ones(1), ()))


# Modules of a model follow, and what they import warns of libraries that nothing here uses.
logging.disable(logging.WARNING)
gc.disable()
READY = tuple(import_module(name).__name__ for name in _MODULES)
_load_loops()
gc.freeze()
gc.enable()
