"""Problems, forms and rules of the paged caches: pooling windows, paged states, lists of slots.

Importable without the DSL; the arithmetic is written once for kernels and tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.primitives import kv_problem as rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


# --------------------------------------------------------------------------------------------------
# Problem, forms, ring layout and arithmetic of pooling windows into compressed entries.
#
# T tokens of B sequences; W windows may close. Two forms: a window of 4 pooled with the one before
# it (8 rows a channel), or a window of 128 by itself. The order of the sums is written once, for
# tensors and kernels: within a part eight rows in turn, by fma, then parts folded; the softmax
# divides at the end.
#
# Carried rows lie in a ring: the token of position p in row p % R, R = 8 or 128, whatever sequence
# or chunk it came in. So nothing is moved when a window closes, and a copied ring continues its
# prefix.
#
# Shape letters: T tokens, B sequences, W windows, E width of an entry, F columns (E, 2 E with
# overlap), R rows of a ring, S rings.

RATIOS = (4, 128)  # DeepSeek-V4 config.json, compress_ratios; 4 overlaps with the window before
ROWS_AT_ONCE = 8  # rows of a part: a thread has all of them in flight
CHANNELS_OF_THREAD = 2  # so that 24 loads are in flight without many registers
SPREAD_WARPS = 4  # of a thread block of PoolForm.spread: 16 parts of 8 channels are 128 threads
NARROW_CHANNELS = 32  # channels of a thread block where rows are parted
FEW_SEQUENCES = 8  # of one token each: up to here more processors share a window's channels
FEW_CHANNELS = {True: 64, False: 8}  # of a block then, by whether there is one part: 1 or 4 warps
NO_PLACE = -1  # a window that does not close, a page or a ring that there is not


@dataclass(frozen=True)
class PoolProblem:
    """T tokens of B sequences; W windows may close; S rings of carried rows."""

    tokens: int
    sequences: int
    windows: int
    rings: int
    ratio: int
    width: int = rows.WIDTH
    page_entries: int = 1  # of the cache whose slots are returned

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
    def spread(self) -> bool:
        """Return whether a thread has one channel: few windows, of several parts."""
        return self.few and self.parts > 1

    @property
    def channels_of_thread(self) -> int:
        """Return the channels of a thread."""
        return 1 if self.spread else CHANNELS_OF_THREAD

    def vectors(self, columns: int) -> int:
        """Return the vectors, of a thread's channels, that so many columns are."""
        return columns // self.channels_of_thread

    def place_of(self, thread: Any) -> tuple[Any, Any]:
        """Return a thread's part, and its chunk of the thread block's channels.

        Where channels are spread, the parts of a warp are SPREAD_WARPS apart, so that its lanes
        add up what the fold adds first.
        """
        of_block = self.vectors(self.channels)
        part, within = thread // of_block, thread % of_block
        if self.spread:
            of_warp = 32 // of_block
            part = part % of_warp * SPREAD_WARPS + part // of_warp
        return part, within

    @property
    def ring_rows(self) -> int:
        """Return the number of rows that a window pools."""
        return rows_of_ring(self.ratio)

    @property
    def parts(self) -> int:
        """Return the number of threads that share the rows of a channel."""
        return self.ring_rows // ROWS_AT_ONCE

    @property
    def columns(self) -> int:
        """Return the number of columns of latents, and of gates."""
        return self.width * (2 if overlaps(self.ratio) else 1)

    @property
    def channels(self) -> int:
        """Return the channels of a thread block."""
        if self.few:
            return FEW_CHANNELS[self.parts == 1]
        return self.width if self.parts == 1 else NARROW_CHANNELS

    @property
    def groups(self) -> int:
        """Return the number of thread blocks that share a window."""
        return self.width // self.channels

    @property
    def blocks(self) -> int:
        """Return the number of thread blocks of a window; of few windows the last pools nothing."""
        return self.groups + self.few

    @property
    def turns_of_row(self) -> int:
        """Return in how many turns the threads of a window's last block keep the token's row.

        0: the blocks that pool keep it. Windows of 4 have twice the columns, for fewer threads.
        """
        return self.width // self.threads if self.spread else 0

    @property
    def threads(self) -> int:
        """Return the number of threads of a thread block."""
        return self.parts * self.vectors(self.channels)


def overlaps(ratio: int) -> bool:
    """Return whether windows of so many tokens pool the one before as well."""
    return ratio == RATIOS[0]


def rows_of_ring(ratio: int) -> int:
    """Return the carried rows, as many as a window pools."""
    return 2 * ratio if overlaps(ratio) else ratio


def choose_pool_form(problem: PoolProblem, target: str) -> PoolForm:
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


def rows_in_turn(ratio: int, held: int) -> int:
    """Return how many rows of a part lie one after the other where `held` rows lie together.

    A window begins at a multiple of the ratio, so its rows begin at a multiple of this number. All
    of them, or none, come before the sequence's start.
    """
    return math.gcd(min(ratio, ROWS_AT_ONCE), held)


def newest_in_row(last: Any, row: Any, rows: int) -> Any:
    """Return the latest position up to `last` that belongs in a row of a ring, negative for none.

    `%` takes the sign of its left operand in a kernel, so that operand must not be negative.
    """
    return last - (last + rows - row) % rows


def as_references_have_it(ring_RF: Tensor, length: int, ratio: int) -> Tensor:
    """Return a ring after `length` tokens in the references' order, gaps as zeros.

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
    gates = list(gates)
    while len(gates) > 1:
        gates = [
            ops.maximum(*gates[at : at + 2]) if at + 1 < len(gates) else gates[at]
            for at in range(0, len(gates), 2)
        ]
    return gates[0]


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
    weight, total = sums_of_parts(totals, weighted)
    return ops.divide_rn(weight, total)


def sums_of_parts(totals: Sequence[Any], weighted: Sequence[Any]) -> tuple[Any, Any]:
    """Return what a channel's mean divides: the weighted sum, and that of the powers."""
    return rows.folded(weighted), rows.folded(totals)


# --------------------------------------------------------------------------------------------------
# Problem and forms of pooling windows from paged states, vLLM's cache of states.
#
# A state row is float32: latents, then gates with their bias. Position p of a sequence lies in the
# page of entry p // rows of its table. A token's row is written to its slot first; then each token
# that closes a window pools that window's rows from the pages, whatever call wrote them. So a
# cached prefix is continued through its pages, and chunked prefill, batching and preemption change
# no bit. The arithmetic and the shape letters are those above; N pages.

VECTOR_BYTES = 16  # bytes of a load; pages and their rows start at multiples of it
FEW_PAGED_TOKENS = 8  # up to here more processors share a window's channels
TOKENS_WITH_OWN_BLOCKS = (
    256  # tokens up to which each has thread blocks of its own; most of more close nothing
)
TOKENS_OF_BLOCKS = {4: 4, 128: 16}  # tokens that share thread blocks beyond that, by ratio
MOST_KEEPING_THREADS = 128  # of a block that keeps a token's row


@dataclass(frozen=True)
class StatePages:
    """A cache of states: slot s is row s % rows of page s // rows."""

    rows: int  # of a page
    count: int
    columns: int  # of latents, and of gates
    page_bytes: int = 0  # 0: rows close together; else a larger stride, as pools have it

    def __post_init__(self) -> None:
        rows.require_extent("rows of a page of states", self.rows, 1)
        rows.require_extent("columns of states", self.columns, 1)
        rows.require_extent("pages of states", self.count, 1)
        rows.require_extent("slots of states", self.rows * self.count)
        needed = self.rows * self.row_bytes
        if self.page_bytes and (self.page_bytes < needed or self.page_bytes % VECTOR_BYTES):
            raise ShapeMismatch(
                "bytes of a page of states", self.page_bytes,
                f"a multiple of {VECTOR_BYTES} and at least {needed} for {self.rows} rows",
                "Leave it out for rows close together.",
            )  # fmt: skip
        rows.require_extent("bytes of a page of states", self.stride)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a token's latents and gates."""
        return 8 * self.columns

    @property
    def stride(self) -> int:
        """Return the bytes from page to page."""
        return self.page_bytes or self.rows * self.row_bytes

    @property
    def slots(self) -> int:
        """Return the number of rows of all pages."""
        return self.rows * self.count


@dataclass(frozen=True)
class PagedPoolProblem:
    """T tokens of B sequences, each with the pages of its states."""

    tokens: int
    sequences: int
    ratio: int
    pages: StatePages
    width: int = rows.WIDTH

    def __post_init__(self) -> None:
        rows.require_extent("tokens", self.tokens)
        rows.require_extent("sequences", self.sequences)
        wanted = PoolProblem(0, 0, 0, 1, self.ratio, self.width).columns
        if self.pages.columns != wanted:
            raise ShapeMismatch(
                "columns of states", self.pages.columns,
                f"{wanted} for windows of {self.ratio} and entries of {self.width}",
                "Build the pages for the compressor's states.",
            )  # fmt: skip
        rows.require_extent("pairs of channels of all tokens", self.tokens * self.width // 2)

    @property
    def columns(self) -> int:
        """Return the number of columns of latents, and of gates."""
        return self.pages.columns


@dataclass(frozen=True)
class PagedForm:
    """Compile-time parameters of the kernels; extents come with the launch."""

    pool: PoolForm
    rows: int  # of a page of states
    span: int  # tokens that a thread block looks at, one after the other

    @property
    def target(self) -> str:
        """Return the GPU architecture."""
        return self.pool.target

    @property
    def keeping_threads(self) -> int:
        """Return the number of threads that store a token's row, four columns each at a time."""
        return min(MOST_KEEPING_THREADS, self.pool.columns * 4 // VECTOR_BYTES)

    @property
    def single_blocks(self) -> int:
        """Return the thread blocks of a launch's only token; of spread channels the last keeps."""
        return self.pool.groups + int(self.pool.spread)


def choose_paged_form(problem: PagedPoolProblem, target: str) -> PagedForm:
    """Return the form for a problem: few, some, and many tokens differ."""
    few = problem.tokens <= FEW_PAGED_TOKENS
    span = 1 if problem.tokens <= TOKENS_WITH_OWN_BLOCKS else TOKENS_OF_BLOCKS[problem.ratio]
    pool = PoolForm(problem.ratio, problem.width, alone=False, target=target, few=few)
    return PagedForm(pool, problem.pages.rows, span)


# --------------------------------------------------------------------------------------------------
# Rules for the cache slots that a decoding token reads and writes.
#
# Token t has position p and an owner, a row of a table of slots. Three kinds of list:
#
# * window: the last W positions, p - W + 1 to p; position n has column n % columns. The slot of the
#   token's own row is returned as well;
# * entries: every entry that the token sees: (p + 1) // ratio of them;
# * chosen: the entries that a row of numbers names, -1 being none.
#
# A slot is -1 before position 0, beyond the visible entries and beyond the table. All slots of a
# token with an owner below 0 are -1, so a row of a batch can be idle. `column_of` is also traced in
# the kernel.

WINDOW, ENTRIES, CHOSEN = KINDS = ("window", "entries", "chosen")
SLOT_THREADS = 128
NO_SLOT = -1


@dataclass(frozen=True)
class SlotsProblem:
    """T tokens get W slots each from a table [B, C]; `ratio` tokens make an entry."""

    tokens: int
    width: int
    kind: str
    sequences: int
    columns: int
    ratio: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownName.among("kind of slots", self.kind, KINDS)
        rows.require_extent("tokens", self.tokens)
        for name in ("width", "sequences", "columns", "ratio"):
            rows.require_extent(f"{name} of slots", getattr(self, name), 1)
        rows.require_extent("numbers of a table of slots", self.sequences * self.columns)
        if self.kind == WINDOW and self.width > self.columns:
            raise InvalidArgument(
                "width of a window", self.width, f"at most the table's {self.columns} columns",
                "Two positions of a window would share a slot.",
            )  # fmt: skip

    @property
    def blocks(self) -> tuple[int, int]:
        """Return the thread blocks: a token, and parts of its list."""
        return self.tokens, ceil_div(self.width, SLOT_THREADS)


@dataclass(frozen=True)
class SlotsForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    kind: str
    target: str


# ---- ints, tensors and kernels -------------------------------------------------------------------


def number_of(kind: str, place: Any, position: Any, width: Any) -> Any:
    """Return the position (window) or entry at a place of a list; chosen ones are read instead."""
    return position - (width - 1) + place if kind == WINDOW else place


def column_of(kind: str, number: Any, columns: Any) -> Any:
    """Return the column of a non-negative number."""
    return number % columns if kind == WINDOW else number


def end_of(kind: str, position: Any, columns: Any, ratio: Any) -> Any:
    """Return the first number that has no slot; windows end with the token itself."""
    if kind == WINDOW:
        return position + 1
    if kind == ENTRIES:
        return ops.minimum((position + 1) // ratio, columns)
    return columns
