"""Arms of our kernels: operands are drawn as each kernel's descriptor says."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.cli.values import settings_here
from degarble.kernels.runtime.modules import module_of
from degarble.kernels.runtime.targets import target_of_device
from degarble.suites.bench.runner import Arm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEVICE = "cuda"


def module(name: str) -> Any:
    """Return a kernel's module, which needs the DSL."""
    return import_module(module_of(name))


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.randn(shape, device=DEVICE).to(dtype)


def floats(*shape: int) -> Any:
    return normal(*shape, dtype=torch.float32)


def integers(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Any:
    return torch.randint(low, high, shape, dtype=dtype, device=DEVICE)


def octets(*shape: int, low: int = 0x20, high: int = 0x50) -> Any:
    """Bytes that every format reads as numbers."""
    return integers(low, high, shape, torch.uint8)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.empty(shape, device=DEVICE, dtype=dtype)


def drawn(kernel: Any, problem: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all operands of a launch: what is given, outputs, and numbers for the others."""
    tensors = {**kernel.allocate(problem, torch.device(DEVICE)), **given}
    for operand in kernel.operands:
        if operand.name in tensors and tensors[operand.name] is not None:
            continue
        if operand.present.test(problem) and not operand.address_of:
            dtype, shape = operand.stored(problem).dtype, operand.shape(problem)
            if dtype is torch.uint8:
                tensors[operand.name] = octets(*shape)
            else:
                assert dtype.is_floating_point, f"{operand.name} has to be given"
                tensors[operand.name] = normal(*shape, dtype=dtype)
    return tensors


def kernel_arm(
    name: str,
    kernel: str,
    problem: Any,
    given: Callable[[int], Mapping[str, Any]] = lambda _number: {},
    tactic: Any = None,
    **told: Any,
) -> Arm:
    """Launch a kernel by its descriptor, on buffers of their own."""

    def make(number: int) -> Callable[[], object]:
        of = module(kernel).KERNEL
        tensors = drawn(of, problem, given(number))
        if tactic is None:
            return partial(of.run, problem, settings_here(), **tensors)
        of.require(problem, tensors)
        form = of.choose_form(problem, target_of_device().name)
        compiled = of.compile_form(form, settings_here())
        return partial(of.launch, compiled, form, problem, tensors, tactic)

    told.setdefault("moved", getattr(problem, "bytes_moved", 0))
    return Arm(name, make, **told)
