"""State of a sequence between calls: cached rows, entries, compressor state, position.

Every number in the buffers was produced by a component. A call needs tokens, one sequence for each
token list, and no sequence twice.
Legend: L latent width, n rows so far, R state rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor


class Rows:
    """Rows appended in order, in one buffer that doubles when it is full; `keep` bounds them.

    They are held in `dtype`, the one in which they will be read; it must represent them exactly.
    """

    def __init__(self, keep: int | None = None, dtype: torch.dtype | None = None) -> None:
        self._buffer: Tensor | None = None
        self._keep = keep
        self._dtype = dtype
        self.count = 0  # rows in the buffer

    def append(self, rows: Tensor) -> None:
        """Add rows at the end; old ones beyond `keep` go when the buffer is full."""
        new = rows.shape[0]
        if self._buffer is None:
            extents = (max(16, 2 * new), *rows.shape[1:])
            self._buffer = rows.new_empty(extents, dtype=self._dtype or rows.dtype)
        if self.count + new > self._buffer.shape[0]:
            kept = self.last(self.count if self._keep is None else self._keep)
            grown = self._buffer.new_empty(2 * (kept.shape[0] + new), *self._buffer.shape[1:])
            grown[: kept.shape[0]] = kept
            self._buffer, self.count = grown, kept.shape[0]
        self._buffer[self.count : self.count + new] = rows
        self.count += new

    def last(self, count: int) -> Tensor:
        """Return the last `count` rows, or all there are."""
        assert self._buffer is not None, "rows are written before they are read"
        return self._buffer[max(0, self.count - count) : self.count]

    def all(self) -> Tensor:
        """Return every row that is kept."""
        return self.last(self.count if self._keep is None else self._keep)

    def copy(self) -> Rows:
        """Make an independent copy."""
        made = Rows(self._keep, self._dtype)
        made.count = self.count
        made._buffer = None if self._buffer is None else self._buffer[: self.count].clone()
        return made


@dataclass
class BlockState:
    """State of one block for one sequence.

    `rows`: V4 the window, V3.2 every cached row; `entries`: V4's compressed rows, V3.2's expanded
    keys and values (naive form); `keys`: the indexer's.
    """

    rows: Rows = field(default_factory=Rows)
    entries: Rows = field(default_factory=Rows)
    keys: Rows = field(default_factory=Rows)
    pool: tuple[Tensor, Tensor] | None = None
    key_pool: tuple[Tensor, Tensor] | None = None

    def copy(self) -> BlockState:
        """Make an independent copy; pools are replaced, never written to."""
        rows, entries, keys = self.rows.copy(), self.entries.copy(), self.keys.copy()
        return replace(self, rows=rows, entries=entries, keys=keys)


@dataclass
class Sequence:
    """State of one sequence: how many tokens it has, and the state of each block."""

    length: int = 0
    blocks: dict[str, BlockState] = field(default_factory=dict)
    drafted: dict[int, int] = field(default_factory=dict)  # tokens that each drafter has seen

    def block(
        self, prefix: str, dtype: torch.dtype | None = None, window: int | None = None
    ) -> BlockState:
        """Return the state of one block, made on first use; rows beyond `window` may go."""
        if prefix not in self.blocks:
            made = (Rows(window, dtype), Rows(dtype=dtype), Rows(dtype=dtype))
            self.blocks[prefix] = BlockState(*made)
        return self.blocks[prefix]

    def copy(self) -> Sequence:
        """Make an independent copy, for trying continuations."""
        blocks = {name: state.copy() for name, state in self.blocks.items()}
        return Sequence(self.length, blocks, dict(self.drafted))


@dataclass(frozen=True)
class Step:
    """The tokens of one call: ids and positions [T], and where each sequence begins [B+1]."""

    tokens: Tensor
    positions: Tensor
    token_offsets: Tensor
    spans: tuple[slice, ...]
    starts: tuple[int, ...]  # first position of each sequence

    @classmethod
    def of(cls, starts: list[int], tokens: list[Tensor]) -> Step:
        """Lay the new tokens of each sequence one after the other."""
        if len(starts) != len(tokens) or not tokens:
            raise InvalidArgument(
                "token lists", len(tokens), f"one for each of {len(starts)} sequences",
                "Leave out sequences that have no new tokens.",
            )  # fmt: skip
        spans, begin = [], 0
        for number, new in enumerate(tokens):
            if new.ndim != 1 or not len(new):
                raise InvalidArgument(
                    f"tokens of sequence {number}", tuple(new.shape), "one id at least, in a row",
                    "Leave out sequences that have no new tokens.",
                )  # fmt: skip
            spans.append(slice(begin, begin + len(new)))
            begin += len(new)
        device, ends = (
            tokens[0].device,
            [start + len(new) for start, new in zip(starts, tokens, strict=True)],
        )
        # Trap: tensors made under inference have no version; tables of such positions go unkept.
        with torch.inference_mode(mode=False):
            parts = [torch.arange(*each, device=device) for each in zip(starts, ends, strict=True)]
            positions = parts[0] if len(parts) == 1 else torch.cat(parts)
            offsets = torch.tensor([0, *(span.stop for span in spans)], device=device)
        ids = torch.cat(tokens).to(torch.int64)
        return cls(ids, positions, offsets, tuple(spans), tuple(starts))
