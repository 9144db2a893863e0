"""Choose workers for `--cluster`, from two environment variables.

RAY_ADDRESS is the address of a cluster, or `auto` for the one that this machine belongs to; if it
is unset, a cluster starts on this machine and ends with the run. DEGARBLE_WORKERS is the number of
processes on this machine; if it is unset, as many as 1 GB of memory allows, and for the museum of
faults one for each core. The cluster that was joined is printed on stderr.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from degarble.harness.base.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.checkpoint.write.workers import Workers
    from degarble.harness.cli.terminal import Terminal

MOST_PROCESSES = 1024
ADDRESS, WORKERS = "RAY_ADDRESS", "DEGARBLE_WORKERS"


@contextmanager
def spread(terminal: Terminal) -> Iterator[Workers]:
    """Yield the workers that the options choose."""
    # Imports torch by way of the runs, which --help and --version do without.
    from degarble.harness.inference.processes import workers_of  # noqa: PLC0415

    address = os.environ.get(ADDRESS) or None
    with workers_of(terminal.cluster, address, asked_processes()) as workers:
        if not isinstance(workers, int) and not terminal.quiet:
            sys.stderr.write(f"degarble: {workers.told}\n")
        yield workers


def asked_processes() -> int | None:
    """Return the number of processes that the environment asks for; None where it asks for none."""
    told = os.environ.get(WORKERS, "")
    if not told:
        return None
    if not (
        told.isascii() and told.isdigit() and len(told) < 5 and 0 < int(told) <= MOST_PROCESSES
    ):
        raise InvalidArgument(
            WORKERS, told, f"a number from 1 to {MOST_PROCESSES}", "Unset it, or name a number."
        )
    return int(told)
