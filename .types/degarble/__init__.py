"""Numerical validation of low-precision inference: judge a kernel, capture and check a model.

    from degarble import capture, check, judge, nvfp4

The names are those of degarble.harness.api, which is loaded when the first one is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from degarble.harness.base.version import VERSION as __version__  # noqa: N811  its usual name

if TYPE_CHECKING:
    from degarble.harness.api import (
        NVFP4,
        Checked,
        CheckedModules,
        DegarbleError,
        JudgedKernel,
        ModulePlace,
        Place,
        QuantisedTensor,
        Setting,
        Twin,
        Verdict,
        Weight,
        capture,
        check,
        dequantise,
        fp8,
        judge,
        mxfp4,
        mxfp8,
        nvfp4,
        quantise,
    )

__all__ = (
    "NVFP4",
    "Checked",
    "CheckedModules",
    "DegarbleError",
    "JudgedKernel",
    "ModulePlace",
    "Place",
    "QuantisedTensor",
    "Setting",
    "Twin",
    "Verdict",
    "Weight",
    "__version__",
    "capture",
    "check",
    "dequantise",
    "fp8",
    "judge",
    "mxfp4",
    "mxfp8",
    "nvfp4",
    "quantise",
)


def __getattr__(name: str) -> Any:
    """Load a name of the surface at its first use."""
    if name not in __all__:
        raise AttributeError(f"module 'degarble' has no attribute {name!r}")
    value = getattr(import_module("degarble.harness.api"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
