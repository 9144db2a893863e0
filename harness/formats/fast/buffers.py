"""Flat views, lookup tables, reused output memory and threads for the compiled loops."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
)
from degarble.harness.formats.codec import decode_array

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.formats.number_formats import NumberFormat


# --------------------------------------------------------------------------------------------------
# Reused memory of large CPU outputs
#
# A fresh 100 MB output costs 25,000 page faults, 5 to 30 times the work of filling it, and reading
# a checkpoint makes many outputs of the same few sizes. So the memory of a large output returns to
# a pool when the last tensor on it dies, and the next output of that size takes it. At most LIMIT
# bytes stay idle; the longest unused are freed first. Contents are never cleared: an empty tensor
# is uninitialised, as torch.empty is.
#
# New memory comes from numpy, which asks Linux for huge pages; torch does not.

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


# --------------------------------------------------------------------------------------------------
# Flat views, lookup tables and threads
#
# Tensors have to be contiguous, on the CPU and of the expected dtype: nothing is copied or cast
# silently. Loops run on plain Python threads, not OpenMP, so they cannot collide with torch's own
# pool and `threads` is the number that runs.

PARTS_A_THREAD = 4

_BITS_OF_SIZE: dict[int, tuple[torch.dtype, type[np.unsignedinteger[Any]]]] = {
    1: (torch.uint8, np.uint8),
    2: (torch.int16, np.uint16),
    4: (torch.int32, np.uint32),
}


def bits_view(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> NDArray[Any]:
    """Return the storage of `tensor` as a flat array of unsigned integers; no copy."""
    if tensor.dtype not in dtypes:
        raise DtypeMismatch(
            name,
            tensor.dtype,
            " or ".join(str(dtype) for dtype in dtypes),
            "Convert or reinterpret it on purpose before the call.",
        )
    if tensor.device.type != "cpu":
        raise InvalidArgument(
            f"device of {name}", str(tensor.device), "cpu", "Move the tensor with .cpu() first."
        )
    if not tensor.is_contiguous():
        raise LayoutMismatch(
            name,
            f"strides {tuple(tensor.stride())} of shape {tuple(tensor.shape)}",
            "a contiguous tensor",
            "Call .contiguous() on purpose: it copies.",
        )
    signed, unsigned = _BITS_OF_SIZE[tensor.element_size()]
    flat: NDArray[Any] = tensor.detach().view(signed).numpy().view(unsigned).reshape(-1)
    return flat


@cache
def values_of(fmt: NumberFormat) -> NDArray[np.float32]:
    """Return the float32 values of all codes of a small format, from the definition."""
    values: NDArray[np.float32] = decode_array(torch.arange(fmt.code_count), fmt).numpy()
    values.flags.writeable = False
    return values


def bits_of(values: NDArray[np.float32], dtype: torch.dtype) -> NDArray[Any]:
    """Return the bits of `values` in float32 or, rounded to nearest even, in bfloat16."""
    bits: NDArray[np.uint32] = values.view(np.uint32)
    if dtype is torch.float32:
        return bits
    half: NDArray[np.uint32] = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half) >> np.uint32(16)).astype(np.uint16)


def output_tensor(out: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return `out` after checking its shape, or a new tensor."""
    if out is None:
        return empty_tensor(shape, dtype)
    if tuple(out.shape) != tuple(shape):
        raise ShapeMismatch(
            "out", tuple(out.shape), f"{tuple(shape)}", "Leave it out to get a new tensor."
        )
    return out


def run_parts(
    work: Callable[[int, int], object], count: int, grain: int, threads: int | None
) -> list[Any]:
    """Call work(start, stop) over contiguous parts of range(count), at least `grain` long each.

    `threads` defaults to torch.get_num_threads(); the calling thread is one of them. There are more
    parts than threads, so that a thread whose core is busy elsewhere leaves work to the others.
    """
    if threads is None:
        threads = torch.get_num_threads()
    if threads < 1:
        raise InvalidArgument("threads", threads, "at least 1", "Leave it out for torch's number.")
    threads = max(1, min(threads, count // grain))
    parts = 1 if threads == 1 else min(threads * PARTS_A_THREAD, count // grain)
    bounds = [part * count // parts for part in range(parts + 1)]
    results: list[Any] = [None] * parts
    pending = deque(range(parts))

    def take_parts() -> None:
        while True:
            try:
                part = pending.popleft()  # atomic, so every part is taken once
            except IndexError:
                return
            results[part] = work(bounds[part], bounds[part + 1])

    if threads == 1:
        take_parts()
        return results
    with ThreadPoolExecutor(threads - 1) as pool:
        helpers = [pool.submit(take_parts) for _ in range(threads - 1)]
        take_parts()
    for helper in helpers:
        helper.result()
    return results
