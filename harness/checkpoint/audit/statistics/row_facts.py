"""Digest rows of bytes, find runs of zero rows, and measure the entropy of bytes.

Two digests of a matrix are made from those of its rows: one depends on the order of the rows, the
other does not. Together they tell a matrix from its permuted copy, and both from everything else.
Digests are 64 bits: two different ones of 300,000 agree by chance with a probability of 2e-9. They
are no defence against intent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

_PRIME = np.uint64(0xBF58476D1CE4E5B9)  # an odd number of the splitmix64 finaliser (Steele, 2014)
_STEP = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(31)


def bytes_by_row(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a tensor [..., K] as rows, without a copy if it is contiguous."""
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.ndim else 1).contiguous()
    found: NDArray[np.uint8] = rows.view(torch.uint8).numpy()
    return found


def as_words(data_Mb: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return rows of bytes as 64-bit words, padded with zero bytes."""
    rows, width = data_Mb.shape
    if width % 8 == 0 and data_Mb.flags.c_contiguous and _address(data_Mb) % 8 == 0:
        return data_Mb.view(np.uint64)
    filled = np.zeros((rows, -(-width // 8) * 8), np.uint8)
    filled[:, :width] = data_Mb
    return filled.view(np.uint64)


def _address(array: NDArray[Any]) -> int:
    """Return an array's address; `ctypes.data` takes ten times as long."""
    address: int = array.__array_interface__["data"][0]
    return address


def digests_of(data_Mb: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the digest of each row."""
    return digested(as_words(data_Mb), (1 << 64) - 1)[0]


def digested(words: NDArray[np.uint64], mask: int) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return each row's digest, and whether all of its bits under a repeated mask are zero."""
    from degarble.harness.checkpoint.audit.statistics import loops  # noqa: PLC0415  numba

    digests, zero = np.empty(len(words), np.uint64), np.empty(len(words), np.bool_)
    loops.row_digests(words, np.uint64(mask), digests, zero)
    return digests, zero


def matrix_digest(digests: NDArray[np.uint64], *, ordered: bool) -> int:
    """Combine the digests of rows into one number."""
    mixed = digests.copy()
    # The sum below ignores the order of rows, unless each digest is mixed with its index.
    if ordered:
        mixed ^= np.arange(1, len(digests) + 1, dtype=np.uint64) * _STEP
    for _ in range(2):
        mixed ^= mixed >> _SHIFT
        mixed *= _PRIME
    mixed ^= mixed >> _SHIFT
    return int(mixed.sum(dtype=np.uint64))


def longest_run(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """Return first index and length of the longest run of true flags; (0, 0) without any."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False]))))
    if not len(edges):
        return 0, 0
    begins, ends = edges[::2], edges[1::2]
    longest = int(np.argmax(ends - begins))
    return int(begins[longest]), int(ends[longest] - begins[longest])


def entropy(counts: NDArray[Any]) -> float:
    """Return the entropy of a histogram, in bits."""
    total = counts.sum()
    shares = counts[counts > 0] / max(total, 1)
    return float(-(shares * np.log2(shares)).sum()) if len(shares) else 0.0


def joined(pieces: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    """Concatenate arrays, possibly none."""
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype)
