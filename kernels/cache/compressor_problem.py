"""Problem, forms, ring layout and arithmetic of pooling windows into compressed entries.

T tokens of B sequences; W windows may close. Two forms: a window of 4 pooled with the one before it
(8 rows a channel), or a window of 128 by itself. The order of the sums is written once, for tensors
and kernels: within a part eight rows in turn, by fma, then parts folded; the softmax divides at the
end.

Carried rows lie in a ring: the token of position p in row p % R, R = 8 or 128, whatever sequence or
chunk it came in. So nothing is moved when a window closes, and a copied ring continues its prefix.

Shape letters: T tokens, B sequences, W windows, E width of an entry, F columns (E, 2 E with
overlap), R rows of a ring, S rings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.primitives import attention_rows as rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

RATIOS = (4, 128)  # DeepSeek-V4 config.json, compress_ratios; 4 overlaps with the window before
AT_ONCE = 8  # rows of a part: a thread has all of them in flight
CHANNELS = 2  # of a thread, so that 24 loads are in flight without many registers
NARROW = 32  # channels of a thread block where rows are parted
FEW_SEQUENCES = 8  # of one token each: up to here more processors share a window's channels
FEW_CHANNELS = {True: 64, False: 8}  # of a thread block then: a warp or two; by one part or more
NOTHING = -1  # a window that does not close, a page or a ring that there is not


@dataclass(frozen=True)
class PoolProblem:
    """T tokens of B sequences; W windows may close; S rings of carried rows."""

    tokens: int
    sequences: int
    windows: int
    rings: int
    ratio: int
    width: int = rows.WIDTH

    def __post_init__(self) -> None:
        if self.ratio not in RATIOS:
            raise InvalidArgument(
                "compress ratio", self.ratio, " or ".join(map(str, RATIOS)), "V4 has no other."
            )
        rows.geometry(self.width)
        for name in ("tokens", "sequences", "windows", "rings"):
            rows.require_extent(name, getattr(self, name), int(name == "rings"))
        rows.require_extent("rows of all rings", self.rings * self.ring_rows)
        rows.require_extent("pairs of channels of all windows", self.windows * self.width // 2)
        if self.tokens < self.sequences:
            raise ShapeMismatch(
                "tokens", self.tokens, f"one at least of {self.sequences} sequences",
                "Leave out sequences that have no new tokens.",
            )  # fmt: skip

    @property
    def overlap(self) -> bool:
        """Return whether a window pools the one before it as well."""
        return overlaps(self.ratio)

    @property
    def ring_rows(self) -> int:
        """Return the number of rows of a ring."""
        return rows_of_ring(self.ratio)

    @property
    def columns(self) -> int:
        """Return the number of columns of latents, and of gates."""
        return self.width * (2 if self.overlap else 1)

    @property
    def alone(self) -> bool:
        """Return whether every sequence has one token: then one kernel pools and keeps."""
        return self.tokens == self.sequences == self.windows

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes: projections read once, carried rows written, entries stored."""
        kept = min(self.tokens, self.sequences * self.ring_rows)
        return 8 * self.columns * (self.tokens + kept) + self.windows * (2 * self.width + 16)


@dataclass(frozen=True)
class PoolForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    ratio: int
    width: int
    alone: bool
    target: str
    few: bool = False

    @property
    def ring_rows(self) -> int:
        """Return the number of rows that a window pools."""
        return rows_of_ring(self.ratio)

    @property
    def parts(self) -> int:
        """Return the number of threads that share the rows of a channel."""
        return self.ring_rows // AT_ONCE

    @property
    def columns(self) -> int:
        """Return the number of columns of latents, and of gates."""
        return self.width * (2 if overlaps(self.ratio) else 1)

    @property
    def channels(self) -> int:
        """Return the channels of a thread block."""
        if self.few:
            return FEW_CHANNELS[self.parts == 1]
        return self.width if self.parts == 1 else NARROW

    @property
    def groups(self) -> int:
        """Return the number of thread blocks that share a window."""
        return self.width // self.channels

    @property
    def threads(self) -> int:
        """Return the number of threads of a thread block."""
        return self.parts * self.channels // CHANNELS


def overlaps(ratio: int) -> bool:
    """Return whether windows of so many tokens pool the one before as well."""
    return ratio == RATIOS[0]


def rows_of_ring(ratio: int) -> int:
    """Return the carried rows, as many as a window pools."""
    return 2 * ratio if overlaps(ratio) else ratio


def choose_form(problem: PoolProblem, target: str) -> PoolForm:
    """Return the form for a problem: by tokens a sequence, and by few or many sequences."""
    few = problem.alone and problem.sequences <= FEW_SEQUENCES
    return PoolForm(problem.ratio, problem.width, problem.alone, target, few)


def windows_of(starts: Sequence[int], counts: Sequence[int], ratio: int) -> tuple[Tensor, Tensor]:
    """Return the tokens that close windows [W], numbered over all sequences, and their sequences.

    Sequence b has `counts[b]` new tokens from position `starts[b]` on.
    """
    closing: list[int] = []
    owners: list[int] = []
    begin = 0
    for number, (start, count) in enumerate(zip(starts, counts, strict=True)):
        first = begin + (ratio - 1 - start) % ratio
        found = range(first, begin + count, ratio)
        closing += found
        owners += [number] * len(found)
        begin += count
    return torch.tensor(closing, dtype=torch.int32), torch.tensor(owners, dtype=torch.int32)


def as_references_have_it(ring_RF: Tensor, length: int, ratio: int) -> Tensor:
    """Return a ring after `length` tokens in the order of references.compressor, gaps as zeros.

    With overlap rows 0 to 3 are the last whole window and 4 to 7 the tokens after it.
    """
    made = torch.zeros_like(ring_RF)
    whole = length // ratio * ratio
    base = ratio if overlaps(ratio) else 0
    first = max(0, whole - base)
    for position in range(first, length):
        made[base + position - whole] = ring_RF[position % rows_of_ring(ratio)]
    return made


# ---- the arithmetic of a channel: tensors and kernels --------------------------------------------


def peak_of(gates: Sequence[Any]) -> Any:
    """Return the largest gate; a NaN is ignored here, and makes its own power NaN."""
    peak = gates[0]
    for gate in gates[1:]:
        peak = ops.maximum(peak, gate)
    return peak


def part_sums(
    gates: Sequence[Any], latents: Sequence[Any], peak: Any, exponential: Callable[[Any], Any]
) -> tuple[Any, Any]:
    """Return the sums of eight powers and of powers times latents, from the first row on."""
    total = weighted = None
    for gate, latent in zip(gates, latents, strict=True):
        power = exponential(ops.subtract_rn(gate, peak))
        total = power if total is None else ops.add_rn(total, power)
        first = weighted is None
        weighted = ops.multiply_rn(power, latent) if first else ops.fma_rn(power, latent, weighted)
    return total, weighted


def pooled(totals: Sequence[Any], weighted: Sequence[Any]) -> Any:
    """Return the mean of a channel from the sums of its parts, before it is rounded to BF16."""
    return ops.divide_rn(rows.folded(weighted), rows.folded(totals))
