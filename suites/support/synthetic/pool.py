"""Pools of rows, one for each K, from which all synthetic matrices of that K are assembled.

A pool has 256 rows of Student's t with outlier channels, each at every gain of the row spread, in
bfloat16 and quantised once by the definition of a producer's dialect. A matrix takes rows by number
and scales them by a power of two. That is exact in bfloat16, keeps the codes of NVFP4 and MX
formats, and moves their scales exactly. So the matrix is, bit for bit, what quantising its bfloat16
values would give, at the speed of copying. In exchange rows repeat, two in a few hundred within one
matrix.

Formats whose blocks span rows (128x128) are not pooled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from degarble.harness.formats.quantise import quantise

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.formats.dialects import Dialect
    from degarble.harness.formats.number_formats import BlockFormat, ScaleDirection
    from degarble.suites.support.synthetic.statistics import Numbers, Statistics

BASE_ROWS = 256
_STORED = ("codes", "block_scale")


class PooledRows(NamedTuple):
    """All rows of a pool in one format: codes and block scales as bytes."""

    codes: Tensor
    block_scale: Tensor
    tensor_scale: Tensor | None
    direction: ScaleDirection | None


class RowPool:
    """All rows of one K, each made at its first use."""

    def __init__(self, numbers: Numbers, statistics: Statistics, columns: int) -> None:
        self.columns = columns
        self.rows = BASE_ROWS * statistics.row_spread
        self._numbers = numbers
        self._statistics = statistics
        self._values: Tensor | None = None
        self._quantised: dict[tuple[str, str], PooledRows] = {}
        self._peak: int | None = None

    @property
    def peak(self) -> int:
        """The row that holds the largest magnitude of the pool."""
        if self._peak is None:
            self._made()
        assert self._peak is not None
        return self._peak

    def values(self, rows: Tensor, exponent: int) -> Tensor:
        """Return the given rows, times 2^exponent, in bfloat16."""
        if self._values is None:
            self._values = self._made()
        return self._values.index_select(0, rows) * 2.0**exponent

    def quantised(self, fmt: BlockFormat, dialect: Dialect) -> PooledRows:
        """Return all rows in a format whose blocks lie within rows; one tensor scale for all."""
        key = fmt.name, dialect.name
        if key not in self._quantised:
            values = self._made() if self._values is None else self._values
            amax = values.abs().max().float() if fmt.tensor_scale else None
            made = [quantise(each, fmt, dialect, amax=amax) for each in values.split(BASE_ROWS)]
            codes, scales = ([getattr(each, name) for each in made] for name in _STORED)
            self._quantised[key] = PooledRows(
                torch.cat(codes).view(torch.uint8),
                torch.cat(scales).view(torch.uint8),
                made[0].tensor_scale,
                made[0].direction,
            )
        return self._quantised[key]

    def _made(self) -> Tensor:
        """Draw the rows; the same ones whenever they are drawn."""
        count, facts = BASE_ROWS * self.columns, self._statistics
        name = f"pool {self.columns}"
        drawn = self._numbers.student(name, count, facts.degrees_of_freedom)
        base = drawn.reshape(BASE_ROWS, self.columns) * self._channel_gains(name)
        halves = np.sqrt(0.5)
        gain, parts = 1.0, []
        for _ in range(facts.row_spread):
            parts.append(torch.from_numpy((base * gain).astype(np.float32)).bfloat16())
            gain *= halves
        made = torch.cat(parts)
        self._peak = int(made[:BASE_ROWS].abs().amax(1).argmax())
        return made

    def _channel_gains(self, name: str) -> NDArray[np.float64]:
        """Return a factor for each column: that of outliers for a share of them, else 1."""
        facts = self._statistics
        limit = 1 << 32
        drawn = self._numbers.below(f"{name} channels", limit, self.columns)
        return np.where(drawn < facts.outlier_share * limit, facts.outlier_gain, 1.0)
