"""Reuse the memory of large CPU outputs, because page faults cost more than decoding.

A fresh 100 MB output costs 25,000 page faults, 5 to 30 times the work of filling it, and reading a
checkpoint makes many outputs of the same few sizes. So the memory of a large output returns to a
pool when the last tensor on it dies, and the next output of that size takes it. At most LIMIT bytes
stay idle; the longest unused are freed first. Contents are never cleared: an empty tensor is
uninitialised, as torch.empty is.

New memory comes from numpy, which asks Linux for huge pages; torch does not.
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

ALIGNMENT = 64  # bytes: a cache line, and what torch promises
SMALLEST = 1 << 22  # below this malloc keeps memory by itself
LIMIT = 1 << 28

_lock = threading.RLock()  # a finaliser may run while this thread holds it
_spare: list[NDArray[np.uint8]] = []


def empty_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised contiguous CPU tensor, aligned to ALIGNMENT; resize_ refuses it."""
    size = math.prod(shape) * dtype.itemsize
    memory = _take(size + ALIGNMENT)
    first = -memory.ctypes.data % ALIGNMENT
    window = memory[first : first + size]
    if size >= SMALLEST:
        # torch holds `window` until the storage dies, whoever still looks at it.
        weakref.finalize(window, _give_back, memory).atexit = False
    return torch.from_numpy(window).view(dtype).view(tuple(shape))


def spare_bytes() -> int:
    """Return the number of idle bytes."""
    with _lock:
        return sum(memory.nbytes for memory in _spare)


def drop_spare_memory() -> None:
    """Return all idle memory to the system."""
    with _lock:
        _spare.clear()


def _take(size: int) -> NDArray[np.uint8]:
    with _lock:
        for index in reversed(range(len(_spare))):
            # Newest first; only memory of exactly this size is reused.
            if _spare[index].nbytes == size:
                return _spare.pop(index)
    return np.empty(size, dtype=np.uint8)


def _give_back(memory: NDArray[Any]) -> None:
    with _lock:
        _spare.append(memory)
        while spare_bytes() > LIMIT:
            _spare.pop(0)
