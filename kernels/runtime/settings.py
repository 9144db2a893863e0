"""Environment variables of kernel compilation, read once into a record.

* DEGARBLE_KERNEL_CACHE: folder of compiled kernels; `off` compiles anew in every process. By
  default degarble/kernels under XDG_CACHE_HOME, or under ~/.cache.
* DEGARBLE_KEEP_KERNELS: folder that receives the PTX and the cubin of every kernel.

The DSL's own variables (CUTE_DSL_...) are recorded, because they change kernels. Only an edge (a
command, a plugin, conftest) calls `read_settings`; all other code receives the record.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from degarble.harness.base.files import cache_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

CACHE_VARIABLE = "DEGARBLE_KERNEL_CACHE"
KEEP_VARIABLE = "DEGARBLE_KEEP_KERNELS"
DSL_PREFIX = "CUTE_DSL_"


@dataclass(frozen=True)
class CompileSettings:
    """Folders of the cache and of kept machine code (None: unused); the DSL's variables."""

    cache_folder: Path | None = None
    keep_folder: Path | None = None
    dsl_environment: tuple[str, ...] = ()


def read_settings(environment: Mapping[str, str]) -> CompileSettings:
    """Read the settings from an environment, such as os.environ."""
    keep = environment.get(KEEP_VARIABLE)
    return CompileSettings(
        cache_folder=_cache_folder(environment),
        keep_folder=Path(keep) if keep else None,
        dsl_environment=tuple(
            f"{name}={value}"
            for name, value in sorted(environment.items())
            if name.startswith(DSL_PREFIX)
        ),
    )


def _cache_folder(environment: Mapping[str, str]) -> Path | None:
    named = environment.get(CACHE_VARIABLE)
    if named == "off":
        return None
    if named:
        return Path(named)
    return cache_folder(environment) / "kernels"
