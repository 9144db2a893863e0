"""Detect the GPU that a bench of kernels measures, print its line, or exit with the reason.

A machine without a GPU of a known target, or with another target than a bench needs, is an error
with its own exit status. Also sets how a bench prints.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import DegarbleError, MissingDevice
from degarble.kernels.runtime.targets import target_of_device

if TYPE_CHECKING:
    from degarble.kernels.runtime.targets import Target


def refused_here(wanted: Target | None = None, remedy: str = "") -> int:
    """Name the GPU that is measured, and return 0; else say why not, and return the exit status."""
    try:
        found = target_of_device()
        if wanted is not None and found is not wanted:
            raise MissingDevice("target", found.name, wanted.name, remedy)
    except DegarbleError as error:
        print(f"REFUSED: {error}", file=sys.stderr)  # noqa: T201  a script
        return error.exit_status
    say(f"{torch.cuda.get_device_name()} ({found.name}), torch {torch.__version__}")
    return 0


def say(text: Any) -> None:
    """Print a line at once."""
    print(text, flush=True)  # noqa: T201  a script
