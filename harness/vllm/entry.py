"""The entry point of vLLM's group `vllm.general_plugins`: what vLLM calls in each of its processes.

Owns when the plugin acts: only where VLLM_PLUGINS names it, because vLLM loads every plugin that is
installed, and an installed tool must not change a server that did not ask. It then registers the
quantisation method `degarble` and our class for DeepseekV4ForCausalLM, by name, so that nothing
heavy is imported before it is needed. Calling it again changes nothing.

Kept honest by suites/vllm/test_entry.py and bound/test_model.py.
"""

from __future__ import annotations

import logging
from importlib import import_module

from degarble.harness.vllm.installed import NAME, VARIABLE, is_named, require_vllm

ARCHITECTURE = "DeepseekV4ForCausalLM"
MODEL = "degarble.harness.vllm.bound.model:DegarbleDeepseekV4"

_log = logging.getLogger("vllm.degarble")


def register() -> None:
    """Make vLLM know our quantisation method and model, if it was started with the plugin."""
    if not is_named():
        _log.debug("%s is installed and not in %s: it changes nothing", NAME, VARIABLE)
        return
    require_vllm()
    import_module("degarble.harness.vllm.bound.config").register(ARCHITECTURE, MODEL)
