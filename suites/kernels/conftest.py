"""Hold every kernel that a suite compiles to judge its machine code against the golden set.

Suites compile without the kernel cache, since many change a kernel's code in this process; a test
that changes none may use it (`kernel_cache`).
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.kernels.runtime import kernel
from degarble.kernels.runtime.compiling import read_settings
from degarble.suites.golden import ptx

if TYPE_CHECKING:
    from collections.abc import Iterator


# Suites whose names say so compile our kernels as they are; others plant faults in them, or judge
# the compiler with a kernel of their own.
_JUDGES_CODE = re.compile("compile|machine_code")
_OTHER_KERNELS = re.compile("_faults$|^test_compiling$")
_COMPILES = find_spec("cutlass") is not None
_LARGE = 4 << 30  # bytes of a device


@pytest.fixture(autouse=True)
def _golden_ptx(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test of machine code whose kernel became another one: suites/golden/README.md."""
    test, module = request.node.name.partition("[")[0], request.node.path.stem
    if not _COMPILES or not _JUDGES_CODE.search(test) or _OTHER_KERNELS.search(module):
        yield
        return
    with ptx.compiled_kernels() as kernels:
        yield
    ptx.require_known(kernels, request.node.nodeid)


@pytest.fixture(autouse=True)
def _memory_given_back() -> Iterator[None]:
    """Free large memory of the device after a test: other suites run beside it in a night."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > _LARGE:
        torch.cuda.empty_cache()


@pytest.fixture
def kernel_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take kernels from the cache of DEGARBLE_KERNEL_CACHE, and keep there what is compiled.

    Processes that share a suite then compile a form once. Only for tests of kernels as they are: a
    changed one would stay in the cache.
    """
    changing = {"monkeypatch", "fault"} & set(signature(request.function).parameters)
    assert not changing, f"{request.node.name} may change a kernel's code: {changing}"
    settings = read_settings(os.environ)
    compile_kernel: Any = vars(kernel)["compile_kernel"]

    def kept(entry: Any, arguments: Any, target: Any, _settings: Any, request: Any) -> Any:
        return compile_kernel(entry, arguments, target, settings, request)

    monkeypatch.setattr(kernel, "compile_kernel", kept)
