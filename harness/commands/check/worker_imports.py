"""Import what a worker of `degarble check` needs, once for all workers of a pool.

torch and its dependents make several hundred thousand objects, none of them garbage: looking for
some would take a fifth of the time. Frozen objects are never visited by the collector, so forked
workers do not copy their pages.
"""

from __future__ import annotations

import gc
from importlib import import_module

_MODULES = (
    "degarble.harness.commands.check.check",
    "degarble.harness.commands.check.spread",
    "degarble.harness.engine.compare.loops",
)

gc.disable()
READY = tuple(import_module(name).__name__ for name in _MODULES)
gc.freeze()
gc.enable()
