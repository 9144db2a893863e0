"""Fingerprint a source checkpoint cheaply: headers, sizes, and samples of every shard's data.

A resumed run compares fingerprints. Of each shard they cover its size, every entry of its header,
and 64 windows of 4 KiB, spread evenly over its data, the first and the last included. Training
steps, seeds and quantisers change bytes everywhere, so another model is detected; a few bytes
edited between two windows are not. Reading all of 881 GB twice would cost more than the conversion;
`degarble convert --prove` compares every byte.
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
    """Return the fingerprint of each shard of a source, and of its config."""
    digests = {shard.file: _begun(shard) for shard in checkpoint.shards}
    for entry in checkpoint.entries.values():
        facts = (entry.name, entry.dtype, entry.shape, entry.begin, entry.end)
        digests[entry.file].update(repr(facts).encode())
    config = json.dumps(dict(checkpoint.config), sort_keys=True).encode()
    found = {file.name: digest.hexdigest() for file, digest in digests.items()}
    return found | {"config.json": hashlib.sha256(config).hexdigest()}


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return one fingerprint of a whole source."""
    told = json.dumps(fingerprints(checkpoint), sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def _begun(shard: Shard) -> hashlib._Hash:
    digest = hashlib.sha256(f"{shard.file_size}\n".encode())
    for window in samples(shard.file, shard.data_begin, shard.file_size):
        digest.update(window)
    return digest


def samples(path: Path, begin: int, end: int) -> list[bytes]:
    """Read the windows of a file's data, or all of it if it is small."""
    room = end - begin - WINDOW_BYTES
    with regular_file(path) as (descriptor, _):
        if room <= WINDOWS * WINDOW_BYTES:
            return [os.pread(descriptor, end - begin, begin)]
        places = [begin + room * index // (WINDOWS - 1) for index in range(WINDOWS)]
        return [os.pread(descriptor, WINDOW_BYTES, place) for place in places]
