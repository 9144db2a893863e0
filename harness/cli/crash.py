"""Format the message for an unexpected exception: what happened, where, and how to report it.

The traceback is printed only with DEGARBLE_TRACEBACK=1, because a user cannot act on it.
"""

from __future__ import annotations

import platform
import shlex
import sys
import traceback
from typing import TYPE_CHECKING

from degarble.harness.base.errors import MASK, masked
from degarble.harness.base.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from degarble.harness.cli.terminal import Environment

EXIT_CRASHED = 70  # EX_SOFTWARE of sysexits.h: outside the contract's 0, 1 and 2


def tell(error: Exception, arguments: Sequence[str], environment: Environment) -> int:
    """Print the message to stderr and give the exit status."""
    if environment.traceback:
        sys.stderr.write(masked("".join(traceback.format_exception(error))))
    sys.stderr.write(crash_text(error, arguments))
    return EXIT_CRASHED


def crash_text(error: Exception, arguments: Sequence[str]) -> str:
    """Describe what happened, where, and what to send."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"
    message = masked("".join(c if c.isprintable() else "?" for c in str(error)))[:300]
    command = shlex.join(["degarble", *map(_without_secrets, arguments)])
    return (
        f"degarble: this is a mistake of degarble, not of yours\n"
        f"  what     {type(error).__name__}: {message}\n"
        f"  where    {place}\n"
        f"  command  {command}\n"
        f"  version  degarble {VERSION}, Python {platform.python_version()}, {sys.platform}\n"
        f"  remedy   Report these lines as an issue (CONTRIBUTING.md says where); "
        f"DEGARBLE_TRACEBACK=1 adds the traceback.\n"
    )


def _without_secrets(argument: str) -> str:
    """Leave out who signs in at an address: these lines are made to be sent."""
    shown = masked(argument)
    # Where nobody can tell the password from the rest, all of a mistyped address is hidden.
    return MASK if shown == argument and "@" in argument else shown
