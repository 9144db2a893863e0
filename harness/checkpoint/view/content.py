"""Hash what a checkpoint holds: names, dtypes, shapes and bytes of all tensors.

The hash does not depend on shards, and is the one that a manifest.json of ours states.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TYPE_CHECKING

from degarble.harness.base.files import read_span, regular_file
from degarble.harness.checkpoint.view.view import fingerprint
from degarble.harness.checkpoint.write.manifest import MANIFEST, Manifest, content_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from degarble.harness.checkpoint.read.types import TensorEntry
    from degarble.harness.checkpoint.view.view import Checkpoint

_PIECE = 16 << 20
MOST_HASHED = 4 << 30  # bytes that are hashed without being asked for: a few seconds


def source_facts(checkpoint: Checkpoint) -> dict[str, str | None]:
    """Return what identifies a checkpoint in a capture; `content` is None if it is large."""
    content = None
    if (checkpoint.root / MANIFEST).exists():
        content = Manifest.read(checkpoint.root).content
    elif sum(entry.nbytes for entry in checkpoint.entries.values()) <= MOST_HASHED:
        content = content_of(checkpoint)
    return {"fingerprint": fingerprint(checkpoint), "content": content}


def content_of(
    checkpoint: Checkpoint,
    threads: int = 1,
    progress: Callable[[int], None] = lambda _nbytes: None,
) -> str:
    """Read every byte and return the content hash; `progress` is called with bytes read."""
    ordered = sorted(checkpoint.entries.values(), key=lambda entry: (entry.file, entry.begin))
    files = [list(group) for _, group in groupby(ordered, key=lambda entry: entry.file)]
    hashes: dict[str, str] = {}
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for found in pool.map(lambda entries: _hashes(entries, progress), files):
            hashes |= found
    return content_hash(
        (entry.name, entry.dtype, entry.shape, hashes[entry.name]) for entry in ordered
    )


def _hashes(entries: Sequence[TensorEntry], progress: Callable[[int], None]) -> dict[str, str]:
    """Return SHA-256 of each tensor of one file."""
    found = {}
    path = entries[0].file
    with regular_file(path) as (descriptor, _):
        for entry in entries:
            digest = hashlib.sha256()
            for begin in range(entry.begin, entry.end, _PIECE):
                piece = read_span(path, descriptor, min(_PIECE, entry.end - begin), begin)
                digest.update(piece)
                progress(len(piece))
            found[entry.name] = digest.hexdigest()
    return found
