"""Problems and forms of the indexer's kernels: scores, preparation of queries and keys, top-k.

Host arithmetic that kernels and references share; importable without a GPU and without the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats.layouts import ceil_div, round_up
from degarble.kernels.primitives.e2m1 import SIGN_AND_EXPONENT, WORD_OPERATORS, WordOperations
from degarble.kernels.runtime.targets import SM90A, SM100A, TARGETS

if TYPE_CHECKING:
    from collections.abc import Mapping


# --------------------------------------------------------------------------------------------------
# Problem, form, stages and grid of the lightning indexer's scores. Importable without the DSL.
#
# score[t, w] = sum over heads h of weight[t, h] * relu(q[t, h] . k[w]), and -inf from `visible` on:
# a token at position p sees floor((p + 1) / ratio) entries of its sequence. The columns of a tile
# are the heads of one or four tokens, its rows 64 or 128 keys. `visible_entries` is also traced in
# kernels.
#
# Two arithmetics: `float32`, one sum; `stored`, where the dot product, its product with the weight
# and the sum are rounded to BF16, as DeepSeek-V4's official code does.

WIDTH = 128  # of queries and keys; index_head_dim of every DeepSeek config
ROW_BYTES = 128  # of a row in swizzled shared memory
WARP_LANES = 32
WARPGROUP = 128
CONSUMERS = 2  # the most warpgroups that multiply, 64 keys each
PIECE = 64
KEYS = CONSUMERS * PIECE  # the most of a stage
HEADS_STEP = 8  # columns of wgmma come in eights
# The fewest columns of an instruction; PTX ISA 9.1, wgmma and tcgen05.mma of 128 rows.
LEAST_COLUMNS = {SM90A.name: HEADS_STEP, SM100A.name: 16}
MOST_COLUMNS = 256
ALIGNMENT = 1024  # of what TMA swizzles; PTX ISA 9.1, 5.5.6
TOKENS_AT_ONCE = 4
LARGEST = 1 << 31
SCALE_BYTES = 4
PAGE_ALIGNMENT = 16
MOST_SETS = 2  # of sums in a thread: while one is weighed, the other is multiplied
FEW_COLUMNS = 64  # of one token: so few that two thread blocks share a multiprocessor
RESERVED_BYTES = 1024  # of shared memory, by each thread block; CUDA C++ Programming Guide 13.0
SCALES_APART = 32  # float32 scales from box to box at least: TMA writes to multiples of 128 bytes


@dataclass(frozen=True)
class ScoresTeam:
    """Warpgroups of a thread block, its part of a multiprocessor, and how keys are cut for it."""

    blocks: int  # of a multiprocessor at once
    consumers: int  # warpgroups that multiply; one more loads
    registers: tuple[int, ...]  # of loading and multiplying threads; (): as many for all
    most_stages: int
    stages_at_once: int  # multiplied and weighed without a pause
    one_wave: bool  # of thread blocks, where that fills the places; otherwise two
    fewest_keys: int  # of a chunk: less is all prologue
    asked_early: int = 0  # stages of keys prefetched to L2 before the previous launch has ended


ALONE = ScoresTeam(1, CONSUMERS, (40, 232), 6, 1, False, 512)
# Weighing takes FP8 longer than multiplying: two blocks do one each, and neither waits.
OF_TOKENS = ScoresTeam(2, 1, (32, 224), 9, 4, False, 512)
# A decode is bound by memory, which serves pages in any order the slower the more are under way.
OF_ONE_TOKEN = {
    "bf16": ScoresTeam(1, CONSUMERS, (40, 232), 6, 2, True, 128),
    "fp8": ScoresTeam(2, CONSUMERS, (), 4, 4, True, 128, asked_early=1),
}
FILLED = (9, 10)  # of the places, from which on one wave is better than two
# Where a second wave would fill less than a quarter of the places, keys are cut in four: its chunks
# then take a quarter of the time.
QUARTERS = 4


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
    def operands(self) -> str:
        """Return the number format of queries and keys."""
        return self.pages.operands

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


def team_of(form: ScoresForm) -> ScoresTeam:
    """Return the warpgroups of a form: two thread blocks a multiprocessor if FP8 and they fit."""
    if form.target != SM90A.name:
        return ALONE
    if form.at_once == 1:
        return OF_ONE_TOKEN[form.operands] if form.columns <= FEW_COLUMNS else ALONE
    return OF_TOKENS if form.operands == "fp8" else ALONE


def exchanges_later(form: ScoresForm) -> bool:
    """Return whether a quad exchanges a set's sums beside the next: in `stored` it would spill."""
    return team_of(form) is OF_TOKENS and form.arithmetic == "float32"


def threads(form: ScoresForm) -> int:
    """Return the threads of a thread block: a warpgroup that loads, then those that multiply."""
    return WARPGROUP * (1 + team_of(form).consumers)


def threads_that_weigh(form: ScoresForm) -> int:
    """Return the number of threads that weigh, after those of the warpgroup that loads."""
    return threads(form) - WARPGROUP


def keys_of_stage(form: ScoresForm) -> int:
    """Return the keys of a stage: 64 of each warpgroup that multiplies."""
    return team_of(form).consumers * PIECE


def stage_bytes(form: ScoresForm) -> int:
    """Return the bytes that a stage's barrier expects: all keys, whether they exist or not."""
    return keys_of_stage(form) * WIDTH * OPERANDS[form.operands].bytes


def query_bytes(form: ScoresForm) -> int:
    """Return the bytes that the barrier of the queries expects."""
    return form.columns * WIDTH * OPERANDS[form.operands].bytes


def boxes_of_stage(form: ScoresForm) -> int:
    """Return the number of TMA boxes of a stage, along keys and along a row."""
    return keys_of_stage(form) // form.box * OPERANDS[form.operands].halves


def boxes_asked(form: ScoresForm) -> int:
    """Return the number of boxes of keys that are prefetched early, by a lane each."""
    return min(WARP_LANES, team_of(form).asked_early * (keys_of_stage(form) // form.box))


def sets(form: ScoresForm) -> int:
    """Return in how many sets Hopper's columns are multiplied: tokens in halves, if several."""
    return min(MOST_SETS, form.at_once)


def columns_of_set(form: ScoresForm) -> int:
    """Return the number of columns of one wgmma on Hopper."""
    return form.columns // sets(form)


def scales_apart(form: ScoresForm) -> int:
    """Return the numbers from the scales of a box to those of the next in shared memory."""
    return max(form.box, SCALES_APART)


def scale_bytes(form: ScoresForm) -> int:
    """Return the bytes of a stage's scales in shared memory, gaps included."""
    scaled = OPERANDS[form.operands].scaled and form.target == SM90A.name
    return scaled * keys_of_stage(form) // form.box * scales_apart(form) * SCALE_BYTES


def expected_bytes(form: ScoresForm) -> int:
    """Return the bytes that Hopper's barrier of a stage expects: keys, and scales if any."""
    scaled = OPERANDS[form.operands].scaled
    return stage_bytes(form) + keys_of_stage(form) * SCALE_BYTES * scaled


def room(form: ScoresForm) -> int:
    """Return the bytes of shared memory that a thread block may take."""
    whole: int = TARGETS[form.target].shared_memory_bytes + RESERVED_BYTES
    return whole // team_of(form).blocks - RESERVED_BYTES


def stages(form: ScoresForm) -> int:
    """Return how many stages of keys fit in shared memory with the queries."""
    # Weights, barriers and the tile's tokens lie behind, and what is aligned leaves gaps.
    beside = query_bytes(form) + 3 * ALIGNMENT
    left = room(form) - beside
    found = min(team_of(form).most_stages, left // (stage_bytes(form) + scale_bytes(form)))
    if found < 2:
        raise InvalidArgument("bytes of the queries", beside, "room for two stages", "Fewer heads.")
    return found


def shared_bytes(form: ScoresForm) -> int:
    """Return the shared memory of a thread block, barriers and the tile's tokens included."""
    barriers = 8 * 2 * (stages(form) + 1)
    held = query_bytes(form) + stages(form) * (stage_bytes(form) + scale_bytes(form))
    return held + barriers + WORD_BYTES * (words_of_weights(form) + 2 * form.at_once)


# ---- the grid, and arithmetic that the kernel shares ---------------------------------------------


def grid(problem: ScoresProblem, form: ScoresForm, processors: int) -> tuple[int, int, int]:
    """Return tiles of tokens, chunks of keys, and the keys of a chunk."""
    tiles = ceil_div(problem.tokens, form.at_once)
    team, count = team_of(form), max(1, tiles)
    places, (filled, of) = team.blocks * processors, FILLED
    one = team.one_wave and of * (places // count * count) >= filled * places
    most = ceil_div(problem.entries, team.fewest_keys)
    wanted = (1 if one else 2) * places // count
    if team.one_wave and most >= QUARTERS and places < count < places + places // QUARTERS:
        wanted = QUARTERS
    chunks = max(1, min(most, wanted))
    keys = round_up(ceil_div(problem.entries, chunks), KEYS)
    return tiles, ceil_div(problem.entries, keys), keys


def visible_entries(position: Any, ratio: Any) -> Any:
    """Return how many entries are complete once the token at a position has been processed."""
    return (position + 1) // ratio


# --------------------------------------------------------------------------------------------------
# Tensor memory, roles and shared memory of the indexer's scores on sm_100a. No GPU and no DSL.
#
# 128 keys are the rows of tensor memory, the heads of one or four tokens its columns. Two sums
# alternate, each with a warpgroup that weighs it. Weights lie in shared memory, because a thread
# weighs all heads of its key. Nothing of it was run: no sm_100a device was available.

LOADING_WARP, MULTIPLYING_WARP = 0, 1  # of the first warpgroup; its others have nothing to do
SUMS = CONSUMERS  # in tensor memory at once: one for each warpgroup that weighs
ALLOCATING_WARP = WARPGROUP // 32  # the first that weighs
INSTRUCTION_BYTES = 32  # of a row in one tcgen05.mma; PTX ISA 9.1, tcgen05.mma shapes
LEAST_ALLOCATED = 32  # columns, a power of two; PTX ISA 9.1, tcgen05.alloc
READ_AT_ONCE = 32  # columns that a thread has in registers of one read
WORD_BYTES, BARRIER_BYTES, ADDRESS_BYTES = 4, 8, 16


def columns_held(form: ScoresForm) -> int:
    """Return the number of columns of tensor memory that the sums take."""
    return SUMS * form.columns


def columns_allocated(form: ScoresForm) -> int:
    """Return the number of columns that are allocated: a power of two."""
    return max(LEAST_ALLOCATED, 1 << (columns_held(form) - 1).bit_length())


def columns_read(form: ScoresForm) -> int:
    """Return the number of columns of one read."""
    return min(READ_AT_ONCE, form.columns)


def reads(form: ScoresForm) -> int:
    """Return the number of reads of a stage's sums."""
    return form.columns // columns_read(form)


def instructions(form: ScoresForm) -> int:
    """Return the number of matrix instructions of a stage: each takes all keys and all columns."""
    return WIDTH * OPERANDS[form.operands].bytes // INSTRUCTION_BYTES


def words_of_weights(form: ScoresForm) -> int:
    """Return the words of shared memory that weights take: a head in float32, two heads in BF16."""
    return form.columns // 2 if form.arithmetic == "stored" else form.columns


def barriers(form: ScoresForm) -> int:
    """Return the number of barriers: full and empty, of key stages, queries and sums."""
    return 2 * (stages(form) + 1 + SUMS)


def sm100_shared_bytes(form: ScoresForm) -> int:
    """Return the shared memory of a thread block, in the order in which it is divided."""
    held = query_bytes(form) + stages(form) * stage_bytes(form)
    words = words_of_weights(form) + 2 * form.at_once
    return held + ADDRESS_BYTES + words * WORD_BYTES + barriers(form) * BARRIER_BYTES


# --------------------------------------------------------------------------------------------------
# Problem, form and row arithmetic of preparing the indexer's queries and keys.
#
# A row has 128 values: optional LayerNorm, stored; optional rotation of 64 of them, stored;
# optional Hadamard transform, stored; then rounding as the sources have it: none, FP8 with one
# scale a row, or MXFP4 with one scale for 32 values. Scales are powers of two, rounded up from
# amax. Stored means rounded to BF16, nearest even. MXFP4's scale and rounding run on tensors as
# well as in kernels.
#
# Eight lanes have a row, 16 adjacent values each. The order of every sum is fixed: LayerNorm's in a
# lane from the first value on, then lanes folded by distance 4, 2, 1; Hadamard's by distance 1, 2,
# 4 up to 64.

LANES = 8  # of a row
OF_LANE = WIDTH // LANES
ROWS_OF_WARP = 32 // LANES
WARPS = 8
ROWS = WARPS * ROWS_OF_WARP  # of a thread block
TURNED = 64  # values of a row
PAIRS = TURNED // 2
TABLE_WIDTH = TURNED  # 32 cosines, 32 sines
PAIRINGS = ("none", "interleaved", "halves")  # V4: the last 64, (2i, 2i + 1); V3.2: the first 64
FORMATS = ("exact", "fp8", "mxfp4")
BLOCKS = {"fp8": WIDTH, "mxfp4": 32}
HADAMARD_FACTOR = WIDTH**-0.5
SMALLEST_MXFP4_AMAX: Final = 6.0 * 2.0**-126
NAN_CODE = 255  # of a UE8M0 scale
NAN_BF16 = 0x7F80  # amax from here on makes its block NaN: infinities as well
_SIGN: Final = 0x8000_0000
_SUMMAND: Final = 2.0**22


@dataclass(frozen=True)
class OperandProblem:
    """T tokens of N rows each; positions are rows of the RoPE table, 0 without rotation."""

    tokens: int
    heads: int
    pairing: str
    format: str
    hadamard: bool = False
    coded: bool = False  # FP8 codes and scales leave, not the BF16 values that they stand for
    normed: bool = False
    positions: int = 0
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if self.pairing not in PAIRINGS:
            raise UnknownName.among("pairing of the indexer", self.pairing, PAIRINGS)
        if self.format not in FORMATS:
            raise UnknownName.among("format of the indexer", self.format, FORMATS)
        if self.coded and self.format != "fp8":
            raise InvalidArgument(
                "coded", self.format, "codes of fp8 alone", "MXFP4 is multiplied as BF16 values."
            )
        if not (self.tokens >= 0 and self.heads >= 1 and self.rows < LARGEST):
            raise ShapeMismatch(
                "tokens, heads", (self.tokens, self.heads), "below 2**31 rows", "Split the launch."
            )
        if (self.positions > 0) is not (self.pairing != "none") or self.positions >= LARGEST:
            raise ShapeMismatch(
                "positions of the table of turns",
                self.positions,
                "a table exactly where rows are turned",
                f"The pairing is {self.pairing}.",
            )
        if not 0 <= self.epsilon < 1:
            raise InvalidArgument("epsilon", self.epsilon, "from 0 up to 1", "Models have 1e-6.")

    @property
    def rows(self) -> int:
        """Return the number of rows of 128 values."""
        return self.tokens * self.heads

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes: rows in, values or codes out, a table's row a token."""
        out = WIDTH + 4 if self.coded else 2 * WIDTH
        turns = (4 * TABLE_WIDTH + 8) * (self.pairing != "none")
        return self.rows * (2 * WIDTH + out) + self.tokens * turns


@dataclass(frozen=True)
class OperandForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    target: str
    pairing: str
    format: str
    hadamard: bool
    coded: bool
    normed: bool


def choose_operand_form(problem: OperandProblem, target: str) -> OperandForm:
    """Return the form for a problem."""
    p = problem
    return OperandForm(target, p.pairing, p.format, p.hadamard, p.coded, p.normed)


def operand_grid(problem: OperandProblem) -> int:
    """Return the number of thread blocks: a warp has four rows."""
    found: int = ceil_div(problem.rows, ROWS)
    return found


# ---- arithmetic of a block -----------------------------------------------------------------------


def mxfp4_scale_code(amax_bits: Any) -> Any:
    """Return the UE8M0 code of a block whose largest magnitude has these BF16 bits."""
    amax = codecs.maximum(codecs.bf16_decode(amax_bits), SMALLEST_MXFP4_AMAX)
    bits = codecs.bits_of(codecs.multiply_rn(amax, codecs.ONE_SIXTH))  # positive and normal
    code = codecs.shift_right(bits + 0x7F_FFFF, 23)
    return codecs.select(amax_bits >= NAN_BF16, NAN_CODE, code)


def mxfp4_number(number: Any, word_operations: WordOperations = WORD_OPERATORS) -> Any:
    """Round a scaled number to the nearest E2M1 value, ties to even, 6 at most, sign kept.

    Adding 2**22 times the number's power of two (at least 1) leaves steps of half that power.
    """
    bounded = word_operations.limited(number)
    sign_and_power = codecs.number_of(
        codecs.bits_of(bounded) & word_operations.constant(SIGN_AND_EXPONENT)
    )
    power = word_operations.at_least_one(sign_and_power)
    rounded = codecs.fma_rn(power, -_SUMMAND, codecs.fma_rn(power, _SUMMAND, bounded))
    return codecs.number_of(
        codecs.bits_of(rounded) | (codecs.bits_of(number) & word_operations.constant(_SIGN))
    )


# --------------------------------------------------------------------------------------------------
# Problem, form and search levels of the indexer's top-k. Importable without the DSL.
#
# Rows of W float32 scores, of which the first `visible` count. The rule: the k largest scores;
# among equal ones the lower entry; -0 equals +0; a NaN lies above every number; -inf is never
# chosen. The result is the chosen entries in ascending order, padded with -1. So it is unique,
# whatever the form.

WARP = 32
MOST_COUNT = 2048
MOST_ENTRIES = 1 << 18  # V4-Pro: 1,048,576 tokens, four an entry
MOST_CLUSTER = 8  # thread blocks of a row; PTX ISA 9.1, clusters: portable up to 8
MOST_THREADS = 1024
VECTOR = 4  # scores of a load
MOST_HELD = 32  # scores that a thread holds at once
KEPT = 8192  # scores of a multiprocessor whose digits registers hold as well
BINS = 4096  # of a first digit: the upper 12 bits of a score in FP16, ordered
LISTED = 256  # keys of a bin that are compared all with all
# Thread blocks of a row and scores of a thread, in the order in which they are preferred.
HOLDING = ((1, 8), (4, 8), (2, 16), (8, 16), (4, 32), (8, 32))
LEVELS = ((21, 2048), (10, 2048), (0, 1024))  # shift and bins: 11, 11 and 10 bits from the top
NEVER = 0x007F_FFFF  # the key of -inf: keys up to here are not chosen
NONE = -1


@dataclass(frozen=True)
class TopkProblem:
    """R rows of W scores; choose k among what a token sees of them, ratio 0: among all."""

    rows: int
    entries: int
    count: int
    ratio: int = 0

    def __post_init__(self) -> None:
        for name, extent, least, most in (
            ("rows of scores", self.rows, 0, LARGEST // MOST_CLUSTER - 1),
            ("entries of a row", self.entries, 1, MOST_ENTRIES),
            ("chosen entries", self.count, 1, MOST_COUNT),
            ("tokens that become one entry", self.ratio, 0, LARGEST - 1),
        ):
            if not least <= extent <= most:
                raise ShapeMismatch(name, extent, f"{least} to {most}", "Split the launch.")

    @property
    def by_four(self) -> bool:
        """Return whether rows begin at whole 16 bytes."""
        return self.entries % 4 == 0

    @property
    def limited(self) -> bool:
        """Return whether positions say how many entries of a row count."""
        return self.ratio > 0

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes: every score once, every chosen entry once."""
        return 4 * self.rows * (self.entries + self.count)


@dataclass(frozen=True)
class TopkForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    target: str
    threads: int
    cluster: int
    each: int  # scores that a thread holds at once
    held: bool  # a row lies in registers as a whole; else its candidates lie in shared memory
    by_four: bool  # rows begin at whole 16 bytes
    limited: bool  # by positions
    blocks: int = 1  # of a multiprocessor at once, at least

    @property
    def warps(self) -> int:
        """Return the number of warps of a thread block."""
        return self.threads // WARP

    @property
    def segment(self) -> int:
        """Return how many scores a thread block holds at once."""
        return self.threads * self.each

    @property
    def kept(self) -> int:
        """Return how many candidates a thread has: the chosen and all of a further chunk."""
        return 0 if self.held else round_up(MOST_COUNT // self.threads + self.each, VECTOR)

    @property
    def capacity(self) -> int:
        """Return for how many candidates there is room."""
        return self.threads * self.kept

    @property
    def listed(self) -> int:
        """Return for how many candidates or listed scores there is room."""
        return self.segment if self.held else self.capacity


def choose_topk_form(problem: TopkProblem, target: str, processors: int = 0) -> TopkForm:
    """Return the form for a problem.

    Registers of a thread block, or of a cluster where all clusters run at once, hold a row;
    longer ones are read chunk by chunk. Rows count as few where processors are to spare.
    """
    few = problem.rows <= processors
    by_four, limited = problem.by_four, problem.limited
    for cluster, each in HOLDING:
        fits = MOST_THREADS * cluster * each >= problem.entries
        at_once = cluster == 1 or problem.rows <= clusters_at_once(cluster, processors)
        # Trap: addresses of 32 single scores would be spilled.
        if fits and at_once and (by_four or each < MOST_HELD):
            blocks = 1 if few else 2
            return TopkForm(target, MOST_THREADS, cluster, each, True, by_four, limited, blocks)
    threads, each, blocks = (MOST_THREADS, 8, 1) if few else (MOST_THREADS // 2, 12, 2)
    return TopkForm(target, threads, 1, each, False, by_four, limited, blocks)


def clusters_at_once(cluster: int, processors: int) -> int:
    """Return how many clusters surely run at once.

    What is left of a GPC has no room for a whole cluster of more than two thread blocks.
    """
    left = processors // 8 if cluster > 2 else 0
    return (processors - left) // cluster


def topk_grid(problem: TopkProblem, form: TopkForm) -> int:
    """Return the number of thread blocks, cluster after cluster."""
    return problem.rows * form.cluster


def topk_shared_bytes(form: TopkForm) -> int:
    """Return the shared memory of a thread block: bins, counts of warps, candidates."""
    notes = (4 + form.cluster) * form.warps + 8 + LISTED + VECTOR + MOST_CLUSTER
    return 4 * (BINS + notes + max(form.capacity, VECTOR) + form.listed)
