"""`--cluster` made into workers, with the address that the environment names.

Owns RAY_ADDRESS: the address of a cluster, or `auto` for the one that this machine belongs to;
unset, a cluster is started on this machine and ends with the run. Says on stderr what was joined.
What keeps it honest: suites/runs/test_quantise.py and test_convert.py.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.checkpoint.worker_pool import Workers
    from degarble.harness.cli.terminal import Terminal

ADDRESS = "RAY_ADDRESS"


@contextmanager
def spread(terminal: Terminal) -> Iterator[Workers]:
    """Give the workers that a command was told to use."""
    # Imports torch by way of the runs, which --help and --version do without.
    from degarble.harness.runs.workers import workers_of  # noqa: PLC0415

    with workers_of(terminal.cluster, os.environ.get(ADDRESS) or None) as workers:
        if not isinstance(workers, int) and not terminal.quiet:
            sys.stderr.write(f"degarble: {workers.told}\n")
        yield workers
