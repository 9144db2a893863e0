"""What a source is told apart by, cheaply: heads, sizes, and samples of the data of every shard.

Owns the fingerprint that a resumed run compares: of each shard its size, every entry of its head,
and 64 windows of 4 KiB, spread evenly over its data, the first and the last included. Training
steps, seeds and quantisers change bytes everywhere, so another model is seen; a few bytes edited
between two windows are not, and nothing here promises so. Reading all of 881 GB twice to know
would cost more than the conversion; `degarble convert --prove` compares every byte of it.

Refuses what cannot be read. Kept honest by suites/checkpoint/view/test_fingerprint.py.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING

from degarble.harness.base.input_files import regular_file

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.checkpoint.view.view import Checkpoint, Shard

WINDOWS = 64
WINDOW_BYTES = 4096
TOLD = f"sizes, heads, and {WINDOWS} samples of {WINDOW_BYTES} bytes of each shard"


def fingerprints(checkpoint: Checkpoint) -> dict[str, str]:
    """Tell each shard of a source, and its config."""
    digests = {shard.file: _begun(shard) for shard in checkpoint.shards}
    for entry in checkpoint.entries.values():
        facts = (entry.name, entry.dtype, entry.shape, entry.begin, entry.end)
        digests[entry.file].update(repr(facts).encode())
    config = json.dumps(dict(checkpoint.config), sort_keys=True).encode()
    found = {file.name: digest.hexdigest() for file, digest in digests.items()}
    return found | {"config.json": hashlib.sha256(config).hexdigest()}


def fingerprint(checkpoint: Checkpoint) -> str:
    """Tell a whole source in one hash."""
    told = json.dumps(fingerprints(checkpoint), sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def _begun(shard: Shard) -> hashlib._Hash:
    digest = hashlib.sha256(f"{shard.file_size}\n".encode())
    for window in samples(shard.file, shard.data_begin, shard.file_size):
        digest.update(window)
    return digest


def samples(path: Path, begin: int, end: int) -> list[bytes]:
    """Read the windows of a file's data; of little data, all of it."""
    room = end - begin - WINDOW_BYTES
    with regular_file(path) as (descriptor, _):
        if room <= WINDOWS * WINDOW_BYTES:
            return [os.pread(descriptor, end - begin, begin)]
        places = [begin + room * index // (WINDOWS - 1) for index in range(WINDOWS)]
        return [os.pread(descriptor, WINDOW_BYTES, place) for place in places]
