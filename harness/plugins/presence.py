"""Probe this machine for devices, system programs and optional packages.

The tables serve the markers `b200`, `h200`, `gpu`, `vllm` and `needs(...)`. A probe returns None if
the thing is present, else one sentence with a remedy. No package is imported to find it; torch is
imported only to look for a device.
"""

from __future__ import annotations

import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnknownName

if TYPE_CHECKING:
    from collections.abc import Mapping

# Compute capability, from NVIDIA's table of CUDA GPUs: H100 and H200 are 9.0, B200 is 10.0.
# The kernels are built for sm_90a and sm_100a, which run on exactly that capability.
DEVICES: Mapping[str, tuple[int, int] | None] = {"gpu": None, "h200": (9, 0), "b200": (10, 0)}

# For each name, groups of programs: one of every group has to be found.
PROGRAMS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "chromium": (
        ("chromium", "chromium-browser", "google-chrome"),
        ("chromedriver", "chromium.chromedriver"),
    ),
    "postgres": (("pg_ctl",), ("psql",)),
    "docker": (("docker",),),
}

# Optional package by import name, and the extra that brings it.
PACKAGES: Mapping[str, str] = {
    "cutlass": "gpu",
    "ray": "cluster",
    "psycopg": "postgres",
    "pyarrow": "parquet",
    "starlette": "server",
    "uvicorn": "server",
    "ml_dtypes": "dev",
    "gfloat": "dev",
    "mmasim": "dev",
    "modelopt": "dev",
    "compressed_tensors": "dev",
    "torchao": "dev",
    "transformers": "dev",
    "gguf": "real",
    "selenium": "dev",
}


@cache
def missing_device(marker: str) -> str | None:
    """Return why suites marked `marker` cannot run on this machine's device, or None."""
    wanted = DEVICES[marker]
    if find_spec("torch") is None:
        return "torch is not installed"
    import torch  # noqa: PLC0415  heavy: only a run that meets a device marker pays for it

    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else f" (torch {torch.__version__} is built without CUDA)"
        return f"no CUDA device{built}"
    capability = torch.cuda.get_device_capability()
    if wanted is None or capability == wanted:
        return None
    return f"device is sm_{_joined(capability)}, {marker} needs sm_{_joined(wanted)}"


@cache
def missing_requirement(name: str) -> str | None:
    """Return why `name`, a program or an optional package, is not usable here, or None."""
    if name in PROGRAMS:
        found = dict(zip(PROGRAMS[name], find_programs(name), strict=True))
        missing = [" or ".join(group) for group, path in found.items() if path is None]
        return f"no {' and no '.join(missing)} on PATH; .ci/run installs it" if missing else None
    if name in PACKAGES:
        if find_spec(name):
            return None
        return f'package {name} is not installed; pip install "degarble[{PACKAGES[name]}]"'
    raise UnknownName.among("requirement", name, [*PROGRAMS, *PACKAGES])


def missing_vllm() -> str | None:
    """Return why suites marked `vllm` cannot run in this Python, or None."""
    return None if find_spec("vllm") else "package vllm is not installed; run make vllm-test"


def find_programs(name: str) -> list[str | None]:
    """Find one program of every group of `name`, such as browser and driver of chromium."""
    return [next(filter(None, map(_program, group)), None) for group in PROGRAMS[name]]


def _program(name: str) -> str | None:
    """Find a program; on Debian PostgreSQL's server programs are not on the PATH."""
    found = shutil.which(name)
    if found:
        return found
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(versions[-1]) if versions else None


def _joined(capability: tuple[int, int]) -> str:
    return "".join(map(str, capability))
