"""Read from conversion.json which backend's order a conversion stored the experts in.

Audits need it because our conversion to vLLM's parameters can store stacked experts as one
backend's kernels read them, with rows moved and scales swizzled. The stated order is a claim that
statistics are compared with, not evidence. An unreadable file states nothing here; the structure
audit reports it.
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
    """Return the backend whose order conversion.json states; None for the plain order."""
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
    """Return whether a module is one of those that a backend's order applies to."""
    return module.endswith(_STACKS)
