"""Problem, form, stages and grid of the lightning indexer's scores. Importable without the DSL.

score[t, w] = sum over heads h of weight[t, h] * relu(q[t, h] . k[w]), and -inf from `visible` on: a
token at position p sees floor((p + 1) / ratio) entries of its sequence. The columns of a tile are
the heads of one or four tokens, its rows 128 keys. `visible_entries` is also traced in kernels.

Two arithmetics: `float32`, one sum; `stored`, where the dot product, its product with the weight
and the sum are rounded to BF16, as DeepSeek-V4's official code does.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats.layouts import ceil_div, round_up
from degarble.kernels.runtime.targets import SM90A, SM100A, TARGETS

if TYPE_CHECKING:
    from collections.abc import Mapping

WIDTH = 128  # of queries and keys; index_head_dim of every DeepSeek config
ROW_BYTES = 128  # of a row in swizzled shared memory
WARPGROUP = 128
CONSUMERS = 2  # warpgroups that multiply, 64 keys each
PIECE = 64
KEYS = CONSUMERS * PIECE  # of a stage
HEADS_STEP = 8  # columns of wgmma come in eights
# The fewest columns of an instruction; PTX ISA 9.1, wgmma and tcgen05.mma of 128 rows.
LEAST_COLUMNS = {SM90A.name: HEADS_STEP, SM100A.name: 16}
MOST_COLUMNS = 256
MOST_STAGES = 6
ALIGNMENT = 1024  # of what TMA swizzles; PTX ISA 9.1, 5.5.6
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
TOKENS_AT_ONCE = 4
LARGEST = 1 << 31
SCALE_BYTES = 4
PAGE_ALIGNMENT = 16
FEWEST_KEYS = 512  # of a chunk: less is all prologue
WAVES = 2


@dataclass(frozen=True)
class KeyOperands:
    """Number format of queries and keys, and whether a page has scales after its rows."""

    name: str
    bytes: int
    scaled: bool

    @property
    def halves(self) -> int:
        """Return the number of rows of 128 bytes that a key fills."""
        return WIDTH * self.bytes // ROW_BYTES


OPERANDS: Mapping[str, KeyOperands] = MappingProxyType(
    {
        kind.name: kind
        for kind in (KeyOperands("bf16", 2, scaled=False), KeyOperands("fp8", 1, scaled=True))
    }
)
ARITHMETICS = ("float32", "stored")


@dataclass(frozen=True)
class KeyPages:
    """A paged cache of keys.

    A page holds `entries` rows of 128 numbers, then, for fp8, a float32 scale for each. `stride` is
    the bytes from page to page; `stride_bytes` is 0 where pages are contiguous.
    """

    operands: str
    entries: int
    count: int
    stride_bytes: int = 0

    def __post_init__(self) -> None:
        if self.operands not in OPERANDS:
            raise UnknownName.among("operands of the indexer", self.operands, OPERANDS)
        if self.entries < 8 or self.entries % 8 or not 0 < self.count < LARGEST:
            raise ShapeMismatch(
                "pages of keys (entries, count)",
                (self.entries, self.count),
                "entries in multiples of 8, at least one page, below 2**31 pages",
                "Choose another page size.",
            )
        if self.stride < self.used or self.stride % PAGE_ALIGNMENT:
            raise ShapeMismatch(
                "bytes from page to page",
                self.stride,
                f"at least {self.used}, in multiples of {PAGE_ALIGNMENT}",
                "Pad the pages.",
            )

    @property
    def used(self) -> int:
        """Return the used bytes of a page."""
        kind = OPERANDS[self.operands]
        return self.entries * (WIDTH * kind.bytes + SCALE_BYTES * kind.scaled)

    @property
    def stride(self) -> int:
        """Return the bytes from page to page."""
        return self.stride_bytes or round_up(self.used, PAGE_ALIGNMENT)

    @property
    def box(self) -> int:
        """Return the number of keys of one TMA box: they lie in one page and in one piece of 64."""
        return gcd(self.entries, PIECE)


@dataclass(frozen=True)
class ScoresProblem:
    """T tokens of N heads against up to W entries of their sequence each."""

    tokens: int
    heads: int
    entries: int
    sequences: int
    pages: KeyPages
    ratio: int = 1
    arithmetic: str = "float32"

    def __post_init__(self) -> None:
        if self.arithmetic not in ARITHMETICS:
            raise UnknownName.among("arithmetic of the indexer", self.arithmetic, ARITHMETICS)
        for name, extent, least in (
            ("tokens", self.tokens, 0),
            ("entries of a row of scores", self.entries, 1),
            ("sequences", self.sequences, 1),
            ("tokens that become one entry", self.ratio, 1),
        ):
            if not least <= extent < LARGEST - KEYS:
                raise ShapeMismatch(
                    name, extent, f"from {least} to below 2**31 - {KEYS}", "Split the launch."
                )
        if not 1 <= self.heads <= MOST_COLUMNS:
            raise ShapeMismatch(
                "heads of the indexer", self.heads, f"1 to {MOST_COLUMNS}", "Give ranks their own."
            )

    @property
    def pages_of_sequence(self) -> int:
        """Return the number of columns of the table of pages."""
        found: int = ceil_div(self.entries, self.pages.entries)
        return found

    @property
    def operations(self) -> int:
        """Return the number of floating-point operations of all products, masked ones included."""
        return 2 * self.tokens * self.entries * self.heads * WIDTH

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes: queries, weights and one sequence's keys once, scores once."""
        size = OPERANDS[self.pages.operands].bytes
        rows = self.tokens * self.heads + self.sequences * self.entries
        return rows * WIDTH * size + 4 * self.tokens * (self.heads + self.entries)


@dataclass(frozen=True)
class ScoresForm:
    """Compile-time parameters of a kernel; extents, tables and pages come with the launch."""

    target: str
    operands: str
    arithmetic: str
    padded: int  # columns of a token: 8, 16, 32, ... for its heads
    at_once: int  # tokens of a tile
    box: int

    @property
    def columns(self) -> int:
        """Return the number of columns of a tile."""
        return self.padded * self.at_once


def choose_form(problem: ScoresProblem, target: str) -> ScoresForm:
    """Return the form for a problem: several tokens a tile where they share keys."""
    if target not in LEAST_COLUMNS:
        raise UnknownName.among("target of the indexer's scores", target, LEAST_COLUMNS)
    # Trap: cute lays out 8, 16, 32, ... rows in swizzled memory; 24 of them abort the process.
    padded = max(HEADS_STEP, 1 << (problem.heads - 1).bit_length())
    shared = problem.tokens > problem.sequences
    at_once = min(TOKENS_AT_ONCE, MOST_COLUMNS // padded) if shared else 1
    padded = max(padded, LEAST_COLUMNS[target] // at_once)
    pages = problem.pages
    return ScoresForm(target, pages.operands, problem.arithmetic, padded, at_once, pages.box)


# ---- what a thread block holds -------------------------------------------------------------------


def threads(form: ScoresForm) -> int:
    """Return the threads of a thread block: a warpgroup that loads, then those that multiply."""
    del form
    return WARPGROUP * (1 + CONSUMERS)


def stage_bytes(form: ScoresForm) -> int:
    """Return the bytes that a stage's barrier expects: 128 keys, whether they exist or not."""
    return KEYS * WIDTH * OPERANDS[form.operands].bytes


def query_bytes(form: ScoresForm) -> int:
    """Return the bytes that the barrier of the queries expects."""
    return form.columns * WIDTH * OPERANDS[form.operands].bytes


def boxes_of_stage(form: ScoresForm) -> int:
    """Return the number of TMA boxes of a stage, along keys and along a row."""
    return KEYS // form.box * OPERANDS[form.operands].halves


def stages(form: ScoresForm) -> int:
    """Return how many stages of keys fit in shared memory with the queries."""
    beside = query_bytes(form) + 2 * ALIGNMENT
    left = TARGETS[form.target].shared_memory_bytes - beside
    found = min(MOST_STAGES, left // stage_bytes(form))
    if found < 2:
        raise InvalidArgument("bytes of the queries", beside, "room for two stages", "Fewer heads.")
    return found


def shared_bytes(form: ScoresForm) -> int:
    """Return the shared memory of a thread block, barriers and the tile's tokens included."""
    barriers = 8 * 2 * (stages(form) + 1)
    held = query_bytes(form) + stages(form) * stage_bytes(form)
    return held + barriers + 2 * 4 * form.at_once


# ---- the grid, and arithmetic that the kernel shares ---------------------------------------------


def grid(problem: ScoresProblem, form: ScoresForm, processors: int) -> tuple[int, int, int]:
    """Return tiles of tokens, chunks of keys, and the keys of a chunk."""
    tiles = ceil_div(problem.tokens, form.at_once)
    most = ceil_div(problem.entries, FEWEST_KEYS)
    chunks = max(1, min(most, WAVES * processors // max(1, tiles)))
    keys = round_up(ceil_div(problem.entries, chunks), KEYS)
    return tiles, ceil_div(problem.entries, keys), keys


def visible_entries(position: Any, ratio: Any) -> Any:
    """Return how many entries are complete once the token at a position has been processed."""
    return (position + 1) // ratio
