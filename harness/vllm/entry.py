"""The entry point of the group `vllm.general_plugins`, which vLLM calls in each of its processes.

It acts only if VLLM_PLUGINS names it: vLLM loads every installed plugin, and installing a tool must
not change a server. It registers the quantisation method `degarble` and our class for
DeepseekV4ForCausalLM by name, so that nothing heavy is imported early. Calling it twice is safe.
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
