"""Whether vLLM is there, which one, and whether it was started with the plugin.

Owns the plugin's name and the series whose contract is on record. Refuses another vLLM and a Python
without one. Kept honest by suites/plugins/vllm/test_installed.py.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from degarble.harness.errors import InvalidArgument, MissingDependency

NAME = "degarble"
SERIES = "0.33."
VARIABLE = "VLLM_PLUGINS"  # vLLM's own list of plugins to load


def is_named() -> bool:
    """Tell whether this process of vLLM was started with the plugin by name."""
    return NAME in os.environ.get(VARIABLE, "").split(",")


def require_vllm() -> str:
    """Return the installed vLLM's version; refuse none, and one without a record."""
    try:
        found = version("vllm")
    except PackageNotFoundError as error:
        raise MissingDependency(
            "vllm",
            "not installed",
            f"vLLM {SERIES}x",
            "make vllm-env builds an environment with it; or install it beside degarble.",
        ) from error
    if not found.startswith(SERIES):
        raise InvalidArgument(
            "vllm",
            found,
            f"{SERIES}x, whose classes and signatures the plugin was held against",
            f"Install that one, or take {NAME} out of {VARIABLE}.",
        )
    return found
