"""Provenance of a result: time, command, machine, versions.

It contains nothing that identifies a person: no user, no host name, no path, and no environment
variable is read.
"""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from degarble.harness.base.version import VERSION
from degarble.harness.report.page import Provenance

_PACKAGES = ("torch", "numpy", "numba")
_OF_KERNELS = ("nvidia-cutlass-dsl", "triton", "vllm")  # what compiles kernels, or brings them


def provenance(command: str, now: datetime | None = None) -> Provenance:
    """Return the provenance of this run; `now` is for suites."""
    moment = (now or datetime.now(UTC)).astimezone(UTC)
    packages = [(name, found) for name in _PACKAGES if (found := _version(name))]
    return Provenance(
        created=moment.strftime("%Y-%m-%d %H:%M UTC"),
        command=command,
        machine=machine(),
        versions=(("degarble", VERSION), ("Python", platform.python_version()), *packages),
    )


def kernel_versions() -> dict[str, str]:
    """Return the versions of kernel compilers, because they change the machine code of a source."""
    return {name: found for name in _OF_KERNELS if (found := _version(name))}


def machine() -> str:
    """Return the name of the processor."""
    cores = os.cpu_count() or 1
    name = _processor() or platform.processor() or platform.machine()
    return f"CPU: {name}, {cores} {'core' if cores == 1 else 'cores'}, {platform.system()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
