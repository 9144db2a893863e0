"""The order that a conversion says it stored experts in, where one stands beside the shards.

Owns the reading of `conversion.json` for audits: our own conversion to vLLM's parameters can store
stacked experts as one backend's kernels read them, rows moved and scales swizzled on purpose. What
is stated there is a promise that statistics are held against, never a reason to believe it.

Refuses nothing: a file that cannot be read states nothing, and the structure audit tells of it.
Kept honest by suites/checkpoint/transform/convert/test_stated_order.py.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from degarble.harness.base.errors import Refused
from degarble.harness.base.input_files import read_small_file
from degarble.harness.checkpoint.read.types import LARGEST_CONFIG
from degarble.harness.checkpoint.transform.convert.backends import BACKENDS
from degarble.harness.checkpoint.transform.convert.endings import CONVERSION

if TYPE_CHECKING:
    from degarble.harness.checkpoint.transform.convert.backends import Backend
    from degarble.harness.checkpoint.view.view import Checkpoint

_STACKS = (".experts.w13", ".experts.w2")  # of vLLM; nothing else is arranged
_AS_LOADED = "loader"


def stated_backend(checkpoint: Checkpoint) -> Backend | None:
    """Return the backend whose order the experts are said to be in; None for the plain order."""
    path = checkpoint.root / CONVERSION
    if not path.is_file():
        return None
    try:
        told = json.loads(read_small_file(path, LARGEST_CONFIG))
        name = told["options"]["backend"] if told["to"] == "vllm" else _AS_LOADED
        return BACKENDS.get(name) if name != _AS_LOADED else None
    except (Refused, ValueError, KeyError, TypeError):
        return None


def is_arranged(module: str) -> bool:
    """Tell whether a module is one of those that a backend's order is about."""
    return module.endswith(_STACKS)
