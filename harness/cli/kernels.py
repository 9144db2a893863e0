"""Read the environment variables of kernel compilation, for all commands."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from degarble.kernels.runtime.compiling import CompileSettings


def settings_here() -> CompileSettings:
    """Read the settings of this process."""
    from degarble.kernels.runtime.compiling import read_settings  # noqa: PLC0415  only where used

    return read_settings(os.environ)
