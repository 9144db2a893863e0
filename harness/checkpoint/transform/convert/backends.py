"""Arrange stacked NVFP4 experts as each MoE backend's kernels read them.

A backend fixes the row order of w13 and w2, the zero padding of their extents, and the layout of
the block scales. No value changes: codes stay packed, rows move, scale bytes are swizzled. Only
NVFP4 is arranged, and extents must be divisible as the backend's order requires.

Sources: FlashInfer utils.py and fused_moe/core.py; vLLM 0.33 flashinfer_fp4_moe.py and
oracle/nvfp4.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from degarble.harness.formats.layouts import LINEAR, SWIZZLE_128X4, round_up, to_layout
from degarble.harness.formats.row_orders import (
    AS_STORED,
    INTERLEAVE_64,
    SHUFFLE_32,
    SWAP_HALVES,
    TRTLLM_GATED,
    RowOrder,
    chain,
    reorder_rows,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from degarble.harness.formats.layouts import ScaleLayout

BLOCK = 16  # elements of one NVFP4 scale


@dataclass(frozen=True)
class Backend:
    """The arrangement that one backend's loader applies to w13 = [w1; w3] and to w2.

    `hidden` and `intermediate`: multiples to which these extents are padded with zeros.
    """

    name: str
    w13: RowOrder
    w2: RowOrder
    scales: ScaleLayout
    hidden: int = 1
    intermediate: int = 1

    def padded(self, shape: tuple[int, int], *, gated: bool) -> tuple[int, int]:
        """Return the extents of one member after padding: w1 and w3 [I, D], w2 [D, I]."""
        multiples = (self.intermediate, self.hidden) if gated else (self.hidden, self.intermediate)
        rows, columns = (round_up(x, m) for x, m in zip(shape, multiples, strict=True))
        return rows, columns

    def codes(self, members: Sequence[Tensor], *, gated: bool) -> Tensor:
        """Arrange packed codes [rows, K/2] of one expert's members."""
        return self._rows(members, 2, gated=gated)

    def block_scales(self, members: Sequence[Tensor], *, gated: bool) -> Tensor:
        """Arrange block scales [rows, K/16]; swizzled storage, as rows of the padded matrix."""
        rows = self._rows(members, BLOCK, gated=gated)
        if self.scales == LINEAR:
            return rows
        return to_layout(rows, self.scales).reshape(self.scale_extents(tuple(rows.shape)))

    def scale_extents(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the extents of the stored scales of a matrix [rows, K/16]."""
        rows, columns = shape
        return round_up(rows, self.scales.row_tile), round_up(columns, self.scales.column_tile)

    def _rows(self, members: Sequence[Tensor], unit: int, *, gated: bool) -> Tensor:
        filled = []
        for member in members:
            rows, columns = member.shape
            high, wide = self.padded((rows, columns * unit), gated=gated)
            filled.append(pad(member, (0, wide // unit - columns, 0, high - rows)))
        return reorder_rows(torch.cat(filled), self.w13 if gated else self.w2)


_CUTEDSL_GATED = chain("cutedsl_gated", SWAP_HALVES, INTERLEAVE_64)

BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        each.name: each
        for each in (
            Backend("loader", AS_STORED, AS_STORED, LINEAR),
            Backend("trtllm", TRTLLM_GATED, SHUFFLE_32, SWIZZLE_128X4, hidden=256, intermediate=64),
            Backend("cutedsl", _CUTEDSL_GATED, AS_STORED, SWIZZLE_128X4),
            Backend("flashinfer-cutlass", SWAP_HALVES, AS_STORED, SWIZZLE_128X4),
            Backend("vllm-cutlass", AS_STORED, AS_STORED, SWIZZLE_128X4),
        )
    }
)
