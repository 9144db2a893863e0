"""Check that a supported vLLM is installed, and that it was started with the plugin."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from degarble.harness.base.errors import InvalidArgument, MissingDependency

NAME = "degarble"
# Series whose contract is on record; 0.26 is the newest that fits torch 2.11.
SERIES = ("0.33", "0.26")
VARIABLE = "VLLM_PLUGINS"  # vLLM's own list of plugins to load
_KNOWN = " or ".join(f"{each}.x" for each in SERIES)


def is_named() -> bool:
    """Return whether VLLM_PLUGINS names the plugin in this process."""
    return NAME in os.environ.get(VARIABLE, "").split(",")


def require_vllm() -> str:
    """Return the installed vLLM's version; refuse none, and one without a record."""
    try:
        found = version("vllm")
    except PackageNotFoundError as error:
        raise MissingDependency(
            "vllm",
            "not installed",
            f"vLLM {_KNOWN}",
            "make vllm-env builds an environment with it; or install it with degarble.",
        ) from error
    if not any(found.startswith(f"{each}.") for each in SERIES):
        raise InvalidArgument(
            "vllm",
            found,
            f"{_KNOWN}, whose classes and signatures the plugin was held against",
            f"Install that one, or take {NAME} out of {VARIABLE}.",
        )
    return found


def series_of(found: str) -> str:
    """Return the series of a version that was not refused."""
    return next(each for each in SERIES if found.startswith(f"{each}."))
