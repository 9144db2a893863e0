"""Names the plugin that owns options, markers and fixtures; see harness/plugins/."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ["degarble.harness.plugins.pytest_plugin"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the cycle collector: modules and items stay until the end anyway."""
    gc.disable()
    try:
        return (yield)
    finally:
        # Trap: frozen objects have no referrers, and Hypothesis warns of a generator without one
        # when it is imported: in the process that only distributes, which happens at the end.
        if "hypothesis" in sys.modules:
            gc.freeze()
        gc.enable()
