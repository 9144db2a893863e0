"""Import what a worker of `degarble check` needs, once for all workers of a pool."""

from __future__ import annotations

import gc

from degarble.harness.commands.check import check
from degarble.harness.engine.compare import loops

READY = (check.__name__, loops.__name__)

# Frozen objects are never visited by the collector, so forked workers do not copy their pages.
gc.collect()
gc.freeze()
