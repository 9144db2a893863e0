"""What a bench of kernels says first: the GPU that it measures, or why nothing can be measured.

Owns that line and the refusal, with its exit status, and how a bench prints. Refuses a machine
without a GPU of a known target, and another target than a bench is of. Kept honest by the suites of
the benches that call it, each of which is refused without a GPU.
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
