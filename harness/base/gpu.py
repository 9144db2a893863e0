"""A GPU that fails or is full: no finding about what it computed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import MissingDevice

if TYPE_CHECKING:
    from collections.abc import Iterator


class GpuLost(BaseException):
    """A GPU that failed or is full. It is no Exception, so that nobody takes it for a finding."""


@contextmanager
def gpu_failures() -> Iterator[None]:
    """Raise GpuLost where a GPU fails or has no memory left."""
    try:
        yield
    except (torch.AcceleratorError, torch.OutOfMemoryError) as error:
        raise GpuLost(str(error).strip().partition("\n")[0]) from error


@contextmanager
def refusing_failures(name: str, device: str) -> Iterator[None]:
    """Refuse a GPU that fails or is full: GpuLost would pass every handler and end the program."""
    try:
        with gpu_failures():
            yield
    except GpuLost as lost:
        raise MissingDevice(
            name, f"{device}: {lost}", "a GPU that answers and has room",
            "Look at nvidia-smi, and leave this GPU out, such as --device cuda:1.",
        ) from lost  # fmt: skip
