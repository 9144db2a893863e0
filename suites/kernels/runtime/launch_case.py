"""A launch of a kernel on the CPU: a problem and its operands by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.kernels.runtime.compiling import CompileSettings

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = CompileSettings()
BF16, FP16, FP32, INT32, INT64, BYTES, FP8 = (
    torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.uint8,
    torch.float8_e4m3fn,
)  # fmt: skip


class Given(NamedTuple):
    """An operand of a case."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LaunchCase:
    """A problem of a kernel and the operands that its caller provides."""

    kernel: str
    problem: Any
    given: dict[str, Given]
    target: str = "sm_90a"

    def tensors(self) -> dict[str, Tensor]:
        """Allocate the operands."""
        return {name: torch.zeros(of.shape, dtype=of.dtype) for name, of in self.given.items()}

    @property
    def key(self) -> str:
        """Return the name under which the arguments are kept."""
        return f"{self.kernel} {self.target} {self.problem} with {', '.join(self.given)}"
