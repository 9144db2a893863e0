"""Read many small tensors by position, in file order, instead of through a mapping.

A page fault into a mapping fetches megabytes around itself where the system reads ahead, and a
checkpoint has 140,000 scalar scales. A file shorter than its header promised raises an error.
"""

from __future__ import annotations

import os
from itertools import groupby
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.base.input_files import regular_file
from degarble.harness.checkpoint.read.types import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from degarble.harness.checkpoint.read.types import TensorEntry

# A hint that macOS lacks; without it the result is the same.
_RANDOM = getattr(os, "POSIX_FADV_RANDOM", None)


def read_small(entries: Iterable[TensorEntry]) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of each tensor; meant for tensors of a few bytes."""
    ordered = sorted(entries, key=lambda each: (each.file, each.begin))
    for file, group in groupby(ordered, key=lambda each: each.file):
        with regular_file(file) as (descriptor, _):
            if _RANDOM is not None:
                os.posix_fadvise(descriptor, 0, 0, _RANDOM)
            for entry in group:
                found = os.pread(descriptor, entry.nbytes, entry.begin)
                if len(found) != entry.nbytes:
                    raise UnreadableFile(
                        f"{shown(str(file))}: tensor {shown(entry.name)} at byte {entry.begin}",
                        f"{len(found)} bytes",
                        f"{entry.nbytes} bytes, as its header says",
                        "The file changed meanwhile; open the checkpoint again.",
                    )
                yield entry.name, found
