"""A pretended GPU: launches end before the device, and tensors have shapes but no memory.

Every arm of a bench can be made and called once, at its true size. Operands are checked as ever; a
compiled kernel does nothing, and every call takes a microsecond.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from degarble.kernels.runtime.forms import KernelForm
from degarble.kernels.runtime.kernel import Kernel, place_of
from degarble.kernels.runtime.modules import MODULES, module_of
from degarble.kernels.runtime.targets import TARGETS
from degarble.suites.bench import gpu, runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from degarble.suites.bench.runner import Arm

META = "meta"


def _compiled(*_arguments: Any) -> Any:
    return lambda *_launched: None


def _seconds(arms: Sequence[Arm], rounds: int) -> list[tuple[float, ...]]:
    """Make and call every arm once."""
    for arm in arms:
        arm.make(0)()
    return [(1e-6,) * rounds for _ in arms]


def _unheard(_kernel: Any, _form: Any) -> None:
    """Hear of a form, and keep nothing."""


def noted_in(found: dict[KernelForm, None]) -> Callable[[Any, Any], None]:
    """Return what notes every form that is heard."""

    def heard(kernel: Any, form: Any) -> None:
        place = place_of(kernel)
        assert place, f"no module holds the kernel of {form}"
        found[KernelForm(place, form)] = None

    return heard


@contextmanager
def pretended_gpu(
    target: str = "sm_90a",
    device: str = META,
    heard: Callable[[Any, Any], None] = _unheard,
) -> Iterator[None]:
    """Pretend a GPU of a target to all kernels and benches; `heard` gets kernel and form."""
    for name in MODULES:
        import_module(module_of(name))
    instead: dict[str, Any] = {
        "compile_kernel": _compiled,
        "require_device": lambda _tensors: 0,
        "target_of_device": lambda *_device: TARGETS[target],
        "current_stream": lambda _device: None,
        "processors_of": lambda _device: 132,
    }
    ours = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(("degarble.kernels.", "degarble.suites.bench."))
    ]
    with ExitStack() as stack:
        for module in ours:
            for name, function in instead.items():
                if name in vars(module):
                    stack.enter_context(mock.patch.object(module, name, function))
            # What was compiled in earnest stays so, and nothing pretended is kept.
            fresh = getattr(vars(module).get("compile_form"), "__wrapped__", None)
            if fresh is not None:
                stack.enter_context(mock.patch.dict(vars(module), {"compile_form": fresh}))

        # A property comes before what an instance keeps under its name.
        def compile_form(kernel: Any, form: Any, _settings: Any) -> Any:
            heard(kernel, form)
            return _compiled()

        compiling = property(lambda kernel: partial(compile_form, kernel))
        stack.enter_context(mock.patch.object(Kernel, "compile_form", compiling))
        stack.enter_context(mock.patch.object(gpu, "DEVICE", device))
        stack.enter_context(mock.patch.object(runner, "DEVICE", device))
        stack.enter_context(mock.patch.object(runner, "_gpu_seconds", _seconds))
        stack.enter_context(mock.patch.object(torch.cuda, "_sleep"))
        yield
