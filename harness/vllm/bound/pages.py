"""View pages of vLLM's caches as operands of our kernels: strided rows of bytes.

vLLM interleaves the pages of all layers of a block, so a layer's pages are far apart and its last
one ends before a whole stride does. No torch tensor may have such rows, so this class describes
them to the kernels, which read and write entries alone and never the gaps.
Shape letters: N pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.base.errors import LayoutMismatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class PagedView:
    """A cache [N, entries, bytes] as [N, stride]: what kernels/runtime/operands.py asks for."""

    def __init__(self, name: str, cache: Tensor) -> None:
        _, entries, nbytes = cache.shape
        if cache.element_size() != 1 or cache.stride()[1:] != (nbytes, 1):
            raise LayoutMismatch(
                f"cache of {name}", f"{cache.dtype}, strides {cache.stride()}",
                f"bytes, entries of {nbytes} close together", "Start with --kv-cache-dtype fp8.",
            )  # fmt: skip
        self._cache = cache
        self.entries = entries
        self.stride_bytes = cache.stride(0)
        self.shape = (cache.shape[0], self.stride_bytes)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the cache."""
        return self._cache.dtype

    @property
    def device(self) -> torch.device:
        """Device of the cache."""
        return self._cache.device

    def stride(self) -> tuple[int, int]:
        """Bytes from page to page, and from byte to byte."""
        return self.stride_bytes, 1

    def is_contiguous(self) -> bool:
        """Return True: a row is a whole stride, the gap after its entries included."""
        return True

    def data_ptr(self) -> int:
        """Return the address of the first page."""
        return self._cache.data_ptr()
