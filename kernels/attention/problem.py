"""Problem, tiling, splits, shared memory and grid of sparse attention. Importable without the DSL.

T tokens of H heads attend to listed cache slots: one list from a window's pages and one from pages
of compressed entries (V3.2: one list). Lists are divided into tiles of 64 keys, tiles into splits.
`tiles_of_split` is also traced in kernels, so it uses only + - * // and scalar_ops' extremes.

The keys of a split depend on the widths of the lists alone, not on the number of tokens or on the
lengths. So a token's bits do not depend on the batch. Tiles beyond both lengths are skipped; they
would change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.kv_problem import EntryFormat, Pages, entry_format

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


# --------------------------------------------------------------------------------------------------
# Problem, tiling, splits, shared memory and grid of sparse attention. Importable without the DSL.

TILE = 64  # keys that are looked at together
HEADS = 64  # of a thread block: the rows of a wgmma
E4M3_BITS = 8
STAGES = 2  # tiles in shared memory
WARPGROUP = 128  # threads
CONSUMERS = 2  # warpgroups, each with half of a tile's keys and half of the output's columns
KEYS = TILE // CONSUMERS  # of a warpgroup's products
COLUMNS = rows.WIDTH // CONSUMERS  # of a warpgroup's output
CONSUMER_THREADS = CONSUMERS * WARPGROUP
REGISTER_FILE = 65_536  # CUDA C++ Programming Guide 13.0, compute capability 9.0
ALIGNMENT = 1024  # of swizzled tiles: eight rows of 128 bytes
MOST_HEADS = 128
MOST_SPLITS = 32
# V3.2: an H200 runs about 28 clusters of four at a time, 14 of eight, 40 of three: the second
# kernel takes less than the wait.
MOST_TOGETHER_OF_V32 = 3
MOST_TOGETHER = 8  # thread blocks of a portable cluster; CUDA C++ Programming Guide 13.0
TILES_OF_SPLIT = 9  # 576 keys: 1024 + 128 are two equal splits, and 64 tokens fill an H200
TILES_OF_SPLIT_OF_V32 = 16  # 2048 keys are two equal splits
TILES_OF_FOUR_SPLITS = 10  # up to 640 keys of few tokens; beyond, splits for another kernel
USUAL_PAGE = 64  # entries
LINE = 128  # bytes of L2
SPLITS_APART = 16
MERGED_AT_ONCE = (4, 8, 16, 24, 32)  # splits that forms of the merge load; last: MOST_SPLITS
HEADS_OF_BLOCKS = (16, 32, 64)  # heads of a thread block; the product's other rows are zeros
FEW_BLOCKS = 72  # thread blocks up to which heads are divided: 64 were faster, 128 slower (H200)
PAIR = 2  # splits of a cluster that give each other half of their sums
MODES = ("prefill", "decode")
SM90A = "sm_90a"
EXPERIMENT = "experiment-nvfp4"  # queries in NVFP4 as well; docs/design-notes/attention_kernel.md
EXPERIMENT_ENTRY = "nvfp4-v41"  # all of a key is NVFP4, its turned values too
ROWS = "bf16"  # the format of rows as kv_read leaves them
MOST_READ = 1 << 26  # bytes of rows to which a prompt's entries with codes are read first
PARTS = 2  # in which a tile comes and goes where warpgroups weigh in turns
PRODUCTS = ("bf16", EXPERIMENT)  # of queries and keys; nothing chooses the second by itself
COUNTS_BYTES = 4 * HEADS * CONSUMERS  # peaks or totals, a float32 each
MOST_AHEAD = 26_880  # bytes in which codes of the next tile wait
BARRIER_BYTES = 8 * 2 * STAGES  # full and empty
ROWS_AHEAD = 4  # of a warp, whose E4M3 codes wait in registers
BATCH = 2  # turns whose codes a warp reads before it writes any of them
GIVEN_PARTS = 4  # of what another thread block gives, each with a barrier of its own
GIVEN_BARRIERS = GIVEN_PARTS + 1  # the last one: it has room for what is given
MASK_BYTES = 2 * TILE // 8 * STAGES  # bits of keys that are present, then of those beyond


@dataclass(frozen=True)
class Family:
    """Attention of a model family: the width of a key, of which the first 512 are the value."""

    name: str
    key: int
    sinks: bool
    lists: int  # at most
    ahead: int  # bytes in which codes of the next tile wait
    together: int  # splits that merge in a cluster, at most


V4 = Family("v4", rows.WIDTH, True, 2, MOST_AHEAD, MOST_TOGETHER)
V32 = Family("v32", rows.WITH_KEY, False, 1, 0, MOST_TOGETHER_OF_V32)
FAMILIES: Mapping[int, Family] = MappingProxyType({family.key: family for family in (V4, V32)})


@dataclass(frozen=True)
class KeyList:
    """A list of slots that each token attends to: `width` numbers a token, of these pages."""

    width: int
    pages: Pages

    def __post_init__(self) -> None:
        rows.require_extent("width of a list of slots", self.width)
        if self.pages.width not in FAMILIES:
            raise ShapeMismatch(
                "width of cache entries",
                self.pages.width,
                f"{' or '.join(map(str, FAMILIES))} values",
                "Narrower rows have no tensor-core form.",
            )

    @property
    def tiles(self) -> int:
        """Return the number of tiles of the list; the last one may be ragged."""
        made: int = ceil_div(self.width, TILE)
        return made


@dataclass(frozen=True)
class AttentionProblem:
    """T tokens of H heads attend to one or two lists of keys; splits = 0 follows the mode."""

    tokens: int
    heads: int
    window: KeyList
    entries: KeyList | None = None
    mode: str = "prefill"
    lengths: bool = False  # how many slots of each list count is given for each token
    splits: int = 0
    scale: float = rows.WIDTH**-0.5  # of V4's logits; V3.2's has to be given
    products: str = PRODUCTS[0]

    def __post_init__(self) -> None:
        rows.require_extent("tokens", self.tokens)
        if not 1 <= self.heads <= MOST_HEADS:
            raise ShapeMismatch(
                "query heads", self.heads, f"1 to {MOST_HEADS}", "Give each rank its own heads."
            )
        if self.mode not in MODES:
            raise InvalidArgument(
                "mode of attention", self.mode, " or ".join(MODES), "It decides the splits."
            )
        if not 0 <= self.splits <= MOST_SPLITS:
            raise InvalidArgument(
                "splits of the keys", self.splits, f"0 to {MOST_SPLITS}", "0 follows the mode."
            )
        if len(self.lists) > self.family.lists:
            raise InvalidArgument(
                "lists of keys",
                len(self.lists),
                f"{self.family.lists} where keys have {self.family.key} values",
                "V3.2 has no window: give one list.",
            )
        if self.products not in PRODUCTS:
            raise UnknownName.among("products of queries and keys", self.products, PRODUCTS)
        formats = {key_list.pages.entry for key_list in self.lists}
        if self.products == EXPERIMENT and formats != {EXPERIMENT_ENTRY}:
            raise InvalidArgument(
                f"entries beside {EXPERIMENT}",
                sorted(formats),
                f"{EXPERIMENT_ENTRY}, of which every value is NVFP4",
                "Leave products out: BF16 loses nothing of any entry.",
            )
        if len(formats) > 1:
            raise InvalidArgument(
                "entry formats of the two caches",
                sorted(formats),
                "the same one in both",
                "Convert one of the caches.",
            )
        # V3.2's scale comes from the model; the default can only be a forgotten argument.
        known = self.family is V4 or self.scale != rows.WIDTH**-0.5
        if not (known and 0 < self.scale < float("inf")):
            raise InvalidArgument(
                "softmax scale",
                self.scale,
                "a positive number, that of the model",
                "V4 has 512**-0.5, V3.2 192**-0.5 times its context extension's factor squared.",
            )

    @property
    def family(self) -> Family:
        """Return the family whose keys these are."""
        return FAMILIES[self.window.pages.width]

    @property
    def lists(self) -> tuple[KeyList, ...]:
        """Return the present lists, the window's first."""
        return (self.window,) if self.entries is None else (self.window, self.entries)

    @property
    def keys(self) -> int:
        """Return the most slots that a token names."""
        return sum(key_list.width for key_list in self.lists)

    @property
    def tiles(self) -> int:
        """Return the number of tiles of all lists; no tile has keys of two lists."""
        return sum(key_list.tiles for key_list in self.lists)

    @property
    def operations(self) -> int:
        """Return multiplications plus additions of both products if all keys count."""
        return 2 * self.tokens * self.heads * self.keys * (self.family.key + rows.WIDTH)

    @property
    def gathered_bytes(self) -> int:
        """Return the bytes of the named entries, each as often as it is named."""
        return sum(
            self.tokens * key_list.width * key_list.pages.format.entry_bytes
            for key_list in self.lists
        )


@dataclass(frozen=True)
class AttentionForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    entry: str
    lengths: bool
    together: int  # splits that merge in a cluster; 1: there are none, 0: another kernel merges
    target: str
    width: int = rows.WIDTH  # of a key
    turns: bool = False  # warpgroups weigh in turns: sm90_attention_turns
    reads: bool = False  # entries with codes are read to BF16 rows first
    page: int = 0  # entries of a page; 0: any number, to divide by at run time

    @property
    def format(self) -> EntryFormat:
        """Return the record of the entry's format."""
        return entry_format(self.entry, self.width)

    @property
    def sinks(self) -> bool:
        """Return whether each head has a sink."""
        return FAMILIES[self.width].sinks

    @property
    def stays(self) -> bool:
        """Return whether thread blocks go on to other tokens: prefill in turns, without splits."""
        return self.turns and not self.format.code_bytes

    @property
    def pairs_stay(self) -> bool:
        """Return whether clusters of two splits go on to other tokens: V3.2's decoding from E4M3.

        V4's tiles take 7 % longer then.
        """
        return self.turns and self.together == PAIR


@dataclass(frozen=True)
class MergeProblem:
    """Results of all splits of T tokens of H heads, with V4's sinks or without."""

    tokens: int
    heads: int
    splits: int
    sinks: bool = True

    def __post_init__(self) -> None:
        rows.require_extent("splits", self.splits, 1)
        if self.splits > MOST_SPLITS:
            raise InvalidArgument(
                "splits of a merge", self.splits, f"1 to {MOST_SPLITS}", "Attention has no more."
            )


@dataclass(frozen=True)
class MergeForm:
    """Compile-time parameters of the merge kernel; up to `at_once` splits are merged."""

    target: str
    sinks: bool = True
    at_once: int = 8  # splits, whose sums are all asked for before anything is known of them


@dataclass(frozen=True)
class SharedMemory:
    """Shared-memory bytes of one thread block, by use."""

    queries: int
    keys: int
    shares: int
    codes: int
    exchanged: int
    others: int

    @property
    def total(self) -> int:
        """Return all bytes; the parts are laid out in order of falling alignment."""
        return self.queries + self.keys + self.shares + self.codes + self.exchanged + self.others


@dataclass(frozen=True)
class GatherPlan:
    """How producers bring tiles: the entry format and the number of warpgroups."""

    entry: EntryFormat
    warpgroups: int
    space: int  # bytes of shared memory in which codes of the next tile may wait
    parts: int = 1  # of a stage, each with barriers of its own
    ahead: int = ROWS_AHEAD  # rows of a warp, whose E4M3 codes wait in registers

    @property
    def threads(self) -> int:
        """Return the number of producer threads."""
        return self.warpgroups * WARPGROUP

    @property
    def warps(self) -> int:
        """Return the number of producer warps."""
        return self.threads // rows.LANES

    @property
    def rows_of_warp(self) -> int:
        """Return the number of rows of a tile that a warp brings."""
        return TILE // self.warps

    @property
    def arrivals(self) -> int:
        """Return the arrivals that fill a stage: each thread's copies, each warp's stores."""
        return self.threads + self.warps

    @property
    def rows_at_once(self) -> int:
        """Return the number of rows that a warp covers with 16 bytes of codes a lane."""
        return rows.LANES * 16 // self.entry.code_bytes if self.entry.code_bytes else 0

    @property
    def turns(self) -> int:
        """Return how many such passes a warp needs for its rows of a tile."""
        return self.rows_of_warp // self.rows_at_once if self.rows_at_once else 0

    @property
    def turn_bytes(self) -> int:
        """Return the bytes of codes of one pass of all warps."""
        return self.warps * self.rows_at_once * self.entry.code_bytes

    @property
    def turns_ahead(self) -> int:
        """Return the passes whose codes wait in shared memory; E4M3's wait in registers alone."""
        if self.entry.code_bits == E4M3_BITS:
            return 0
        return min(self.turns, self.space // self.turn_bytes) if self.turns else 0

    @property
    def ahead_bytes(self) -> int:
        """Return the bytes of shared memory in which codes of the next tile wait."""
        return self.turns_ahead * self.turn_bytes


def gather_plan(entry: EntryFormat) -> GatherPlan:
    """Return how Hopper brings tiles: twice as many warps where codes are decoded."""
    warpgroups = 2 if entry.code_bytes else 1
    return GatherPlan(entry, warpgroups, FAMILIES[entry.width].ahead - exchanged_bytes(entry))


def threads(entry: EntryFormat) -> int:
    """Return the number of threads of a thread block: consumers and producers."""
    return CONSUMER_THREADS + gather_plan(entry).threads


def registers(entry: EntryFormat) -> tuple[int, int]:
    """Return the registers of a consumer thread, and of a producer thread."""
    # setmaxnreg wants multiples of 8; 256 * (200 + 56) and 256 * 208 + 128 * 88 fit the file.
    return (200, 56) if gather_plan(entry).warpgroups > 1 else (208, 88)


def registers_in_turns(plan: GatherPlan) -> tuple[int, int]:
    """Return the same where warpgroups weigh in turns.

    Trap: a thread block has what it was launched with, 384 times 168 registers or 512 times 128.
    224 beside 64 would be within the register file, and be waited for forever.
    """
    return (200, 56) if plan.warpgroups > 1 else (224, 56)


def launched_registers(threads_of_block: int) -> int:
    """Return the registers that a thread block is launched with, and may divide."""
    return REGISTER_FILE // threads_of_block // 8 * 8 * threads_of_block


def columns_at_once(entry: EntryFormat) -> int:
    """Return the columns of an output wgmma: 256 take 158 registers of a thread at the start."""
    return COLUMNS // gather_plan(entry).warpgroups


def halved(entry: EntryFormat) -> bool:
    """Return whether a warpgroup has half of the latent of all keys for the logits.

    Otherwise it has half of the keys, and queries are read twice: keys of 576 leave no shared
    memory in which warpgroups could exchange partial logits.
    """
    return entry.width == rows.WIDTH


def laid_over(entry: EntryFormat) -> bool:
    """Return whether half of the exchanged logits overlay shares: E4M3's, by 1 % the faster way."""
    return halved(entry) and entry.code_bits == 8


def exchanged_bytes(entry: EntryFormat) -> int:
    """Return the bytes of exchanged logits, beyond those that overlay shares."""
    return (2 if laid_over(entry) else 4) * HEADS * TILE if halved(entry) else 0


def shares_over_keys(entry: EntryFormat) -> bool:
    """Return whether shares of a pair's first tile overlay its turned key: V3.2, in turns."""
    return entry.width > rows.WIDTH


def plan_in_turns(entry: EntryFormat) -> GatherPlan:
    """Return how tiles are brought where warpgroups weigh in turns.

    Nothing is exchanged but shares, of which there are two buffers where they do not overlay keys.
    """
    shares = 0 if shares_over_keys(entry) else 2 * HEADS * TILE
    space = max(0, FAMILIES[entry.width].ahead - shares)
    return replace(gather_plan(entry), space=space, parts=PARTS)


def memory_in_turns(entry: EntryFormat) -> SharedMemory:
    """Return the shared memory of a thread block whose warpgroups weigh in turns."""
    held = shared_memory(entry)
    buffers = 1 if shares_over_keys(entry) else 2
    of_parts = BARRIER_BYTES * (PARTS - 1)
    codes = plan_in_turns(entry).ahead_bytes
    return replace(
        held, shares=held.shares * buffers, codes=codes, exchanged=0, others=held.others + of_parts
    )


def plan_of(form: AttentionForm) -> GatherPlan:
    """Return how a form brings tiles on Hopper."""
    plan = (plan_in_turns if form.turns else gather_plan)(form.format)
    # V4's forms with lengths would spill 8 bytes with four rows.
    return replace(plan, ahead=2) if form.lengths and not form.turns else plan


def shared_memory(entry: EntryFormat) -> SharedMemory:
    """Return the shared memory of a thread block: queries, tiles, shares, codes, barriers."""
    return SharedMemory(
        queries=2 * HEADS * entry.width,
        keys=2 * TILE * entry.width * STAGES,
        shares=2 * HEADS * TILE,
        codes=gather_plan(entry).ahead_bytes,
        exchanged=exchanged_bytes(entry),
        others=COUNTS_BYTES + BARRIER_BYTES + 8 * GIVEN_BARRIERS + MASK_BYTES,
    )


def tiles_each(problem: AttentionProblem) -> int:
    """Return the number of tiles of a split; prefill has enough thread blocks without splits."""
    count = problem.splits or 1
    if not problem.splits and problem.mode == "decode":
        most = TILES_OF_SPLIT if problem.family is V4 else TILES_OF_SPLIT_OF_V32
        count = min(MOST_SPLITS, max(1, ceil_div(problem.tiles, most)))
    # Splits of equal length: one that is longer than the others is waited for.
    each: int = ceil_div(problem.tiles, count)
    if decodes_in_turns(problem) and each < problem.tiles:
        each += each % 2  # tiles come in pairs
    return max(1, each)


def few_token_splits(lists: Iterable[KeyList], heads: int, *, most: bool) -> int:
    """Return the splits with which up to 16 tokens are fastest on an H200; `most` for up to 4.

    Many splits keep more multiprocessors busy; beyond a cluster they cost another launch, which
    merges. 16 tokens of V4 with more than 64 heads are 32 clusters: of three thread blocks all
    run at a time, of four 28 do.
    """
    several = tuple(lists)
    tiles: int = sum(key_list.tiles for key_list in several)
    of_v32 = all(key_list.pages.width == V32.key for key_list in several)
    if tiles <= TILES_OF_FOUR_SPLITS:
        count = 4
    elif most:
        count = SPLITS_APART
    elif of_v32:
        count = 4 if heads > HEADS else 8
    else:
        count = 3 if heads > HEADS else 4
    each: int = ceil_div(tiles, count) or 1
    if of_v32 and all(key_list.pages.format.code_bits == E4M3_BITS for key_list in several):
        each += each % 2  # tiles come in pairs
    # None is empty: so many splits have as many tiles each as `count` of them, and the same bits.
    made: int = ceil_div(tiles, each)
    return made


def choose_splits(problem: AttentionProblem) -> int:
    """Return the number of splits of the keys; the last ones may be empty."""
    made: int = problem.splits or max(1, ceil_div(problem.tiles, tiles_each(problem)))
    return made


def merges_apart(problem: AttentionProblem) -> bool:
    """Return whether another kernel merges: more splits than a cluster is to have blocks."""
    return choose_splits(problem) > min(MOST_TOGETHER, problem.family.together)


def decodes_in_turns(problem: AttentionProblem) -> bool:
    """Return whether warpgroups weigh in turns while others decode: V3.2's E4M3, in decoding.

    V4 is faster with logits by halves of the latent, which leave V3.2 no room in shared memory.
    """
    coded = problem.window.pages.format.code_bits == E4M3_BITS
    return problem.mode == "decode" and coded and problem.family is V32


def heads_of_block(problem: AttentionProblem) -> int:
    """Return the heads of a thread block on Hopper: fewer in decoding with few thread blocks.

    It then reads fewer queries and writes fewer sums. A head has the same bits in any.
    """
    if problem.mode == "decode":
        blocks = problem.tokens * choose_splits(problem)
        for heads in HEADS_OF_BLOCKS:
            if blocks * ceil_div(problem.heads, heads) <= FEW_BLOCKS:
                return heads
    return HEADS


def rows_of_pages(pages: Pages) -> Pages:
    """Return the pages of BF16 rows to which a cache's entries are read, slot by slot."""
    return Pages(ROWS, pages.entries, pages.count, width=pages.width)


def in_turns(problem: AttentionProblem) -> bool:
    """Return whether warpgroups weigh in turns on Hopper, if entries are BF16 rows."""
    return problem.mode == "prefill" and choose_splits(problem) == 1


def reads_first(problem: AttentionProblem) -> bool:
    """Return whether all entries are read to BF16 rows before attention: a prompt's, with codes.

    Every entry is named by many tokens, and decoding it for each of them costs more. The size of
    the caches decides, not the number of tokens: a token has the bits that it has alone.
    """
    size = sum(of.pages.slots for of in problem.lists) * 2 * problem.family.key
    coded = problem.window.pages.entry != ROWS
    return coded and in_turns(problem) and size <= MOST_READ


def choose_form(problem: AttentionProblem, target: str) -> AttentionForm:
    """Return the form that solves a problem."""
    entry = problem.window.pages.entry
    together = 0 if merges_apart(problem) else choose_splits(problem)
    form = AttentionForm(entry, problem.lengths, together, target, problem.family.key)
    usual = {of.pages.entries for of in problem.lists} == {USUAL_PAGE}
    if target == SM90A and usual and form.format.code_bytes and problem.mode == "decode":
        form = replace(form, page=USUAL_PAGE)
    if target == SM90A and decodes_in_turns(problem):
        return replace(form, turns=True)
    if target != SM90A or not in_turns(problem):
        return form
    reads = reads_first(problem)
    return replace(form, entry=ROWS if reads else entry, turns=reads or entry == ROWS, reads=reads)


def grid(problem: AttentionProblem, heads: int = HEADS) -> int:
    """Return the number of thread blocks: tokens, groups of heads, splits (fastest)."""
    groups: int = ceil_div(problem.heads, heads)
    return problem.tokens * choose_splits(problem) * groups


def lines(entry: EntryFormat) -> int:
    """Return the lines of L2 in which the bytes of an entry may lie."""
    made: int = ceil_div(entry.step - 1, LINE) + 1
    return made


# ---- ints and kernels ----------------------------------------------------------------------------


def byte_of_line(number: Any, entry: EntryFormat) -> Any:
    """Return a byte of an entry in its line of that number, or in its last one."""
    return ops.minimum(number * LINE, entry.step - 1)


def tiles_of_split(
    split: Any, each: Any, widths: tuple[Any, Any], lengths: tuple[Any, Any]
) -> tuple[Any, Any, Any]:
    """Return a split's first tile, its number of tiles of the window's list, and of both.

    `widths` are the tiles of the lists, `lengths` the tiles that hold slots that count. After the
    window's tiles come those from max(first, widths[0]) on.
    """
    first = split * each
    end = first + each
    near = ops.maximum(ops.minimum(end, lengths[0]) - first, 0)
    begin = ops.maximum(first, widths[0])
    far = ops.maximum(ops.minimum(end, widths[0] + lengths[1]) - begin, 0)
    return first, near, near + far


# --------------------------------------------------------------------------------------------------
# Tensor memory, roles, registers and barriers of sparse attention on sm_100a. No GPU and no DSL.
#
# A thread block has 64 heads, and an instruction of 64 rows takes half of the lanes: 16 of each 32
# (PTX ISA 9.1, data path layout F). So the output's two halves of 256 columns lie in the same
# columns, one in the lower lanes, one in the upper; after them lie the logits of two tiles. A warp
# reads 16 lanes at once, eight columns a repeat; a thread then has what wgmma would have given it.
#
# Nothing of it was run: no sm_100a device was available.

INSTRUCTION_K = 16  # of one tcgen05.mma in BF16; PTX ISA 9.1, tcgen05.mma shapes
LANES_OF_WARP = 32  # that a warp reaches: those of its number in its warpgroup
UPPER_LANES = 16  # where the second 64 rows begin; PTX ISA 9.1, lane alignment 0 or 16
LANE = 1 << 16  # of an address in tensor memory; columns lie below
LEAST_ALLOCATED = 32  # columns, a power of two; PTX ISA 9.1, tcgen05.alloc
LOGITS = 2  # tiles whose logits are in tensor memory at once
REPEAT_COLUMNS, REPEAT_REGISTERS = 8, 4  # of a read of 16 lanes by 256 bits
REPEATS_AT_ONCE = 8  # of the output: 32 registers

# Warpgroups: two weigh, one brings keys, the first warp of the last one multiplies.
GROUPS = CONSUMERS + 2
SM100_THREADS = GROUPS * WARPGROUP
GATHERING_GROUP, MULTIPLYING_GROUP = CONSUMERS, CONSUMERS + 1
MULTIPLYING_WARP = MULTIPLYING_GROUP * (WARPGROUP // rows.LANES)
LAUNCH_REGISTERS = REGISTER_FILE // SM100_THREADS

BARRIERS = LOGITS + 2  # after those of tiles: logits ready, shares ready, sums done
SM100_BARRIER_BYTES, ADDRESS_BYTES = 8, 16


class Registers(NamedTuple):
    """Registers of a thread of each role, after setmaxnreg."""

    weighing: int
    gathering: int
    multiplying: int

    @property
    def total(self) -> int:
        """Return the registers of a thread block."""
        each = CONSUMERS * self.weighing + self.gathering + self.multiplying
        return WARPGROUP * each


# By width of a key: the fewest with which no form spills, as ptxas of CUDA 13.0 divides them.
REGISTERS: Mapping[int, Registers] = MappingProxyType(
    {rows.WIDTH: Registers(184, 88, 56), rows.WITH_KEY: Registers(176, 104, 56)}
)


def first_columns() -> tuple[int, int]:
    """Return the columns where the output and the logits begin."""
    return 0, COLUMNS


def columns_held() -> int:
    """Return the number of columns that output and logits take."""
    return COLUMNS + LOGITS * TILE


def columns_allocated() -> int:
    """Return the number of columns to allocate: a power of two."""
    return max(LEAST_ALLOCATED, 1 << (columns_held() - 1).bit_length())


def repeats(columns: int) -> int:
    """Return the number of repeats of a read of so many columns."""
    return columns // REPEAT_COLUMNS


def instructions(width: int) -> tuple[int, int]:
    """Return the MMA instructions of a tile: for the logits, and for both halves' sums."""
    steps_of_keys = TILE // INSTRUCTION_K
    return width // INSTRUCTION_K, rows.WIDTH // COLUMNS * steps_of_keys


def sm100_gather_plan(entry: EntryFormat) -> GatherPlan:
    """Return how tiles are brought: by one warpgroup, and without an exchange of logits."""
    return GatherPlan(entry, 1, FAMILIES[entry.width].ahead)


def places(entry: EntryFormat) -> dict[str, int]:
    """Return the offset of everything in shared memory, in the order of allocation."""
    held = shared_memory(entry)
    sizes = {
        "queries": held.queries,
        "keys": held.keys,
        "shares": held.shares,
        "counts": COUNTS_BYTES,
        "barriers of tiles": BARRIER_BYTES,
        "masks": MASK_BYTES,
        "barriers of logits": LOGITS * SM100_BARRIER_BYTES,
        "barrier of shares": SM100_BARRIER_BYTES,
        "barrier of sums": SM100_BARRIER_BYTES,
        "address": ADDRESS_BYTES,
        "codes": sm100_gather_plan(entry).ahead_bytes,
    }
    made, at = {}, 0
    for name, size in (*sizes.items(), ("end", 0)):
        made[name] = at
        at += size
    return made


def shared_bytes(entry: EntryFormat) -> int:
    """Return the shared memory of a thread block."""
    return places(entry)["end"]


# --------------------------------------------------------------------------------------------------
# Problem and thread mapping of V3.2's query rows.
#
# A row has 576 values: 512 of the query after its head's key matrix, copied, and the last 64 of
# that head's 192, rotated (RoPE) with one rounding to BF16. A thread has a chunk of 16 bytes. The
# arithmetic of a pair is that of kv_problem.

QUERY_THREADS = 288  # four rows at a time
CHUNKS = rows.WITH_KEY // rows.HALF  # of a query row, 16 bytes each
OF_LATENT = rows.WIDTH // rows.HALF
TURNED = rows.ROTATED // rows.HALF


@dataclass(frozen=True)
class QueryProblem:
    """T tokens of H heads of `width` numbers; positions are rows of the RoPE table."""

    tokens: int
    heads: int
    width: int  # of a head, the last 64 turned: qk_nope_head_dim + 64
    positions: int

    def __post_init__(self) -> None:
        rows.require_extent("tokens", self.tokens)
        rows.require_extent("positions of the table of turns", self.positions, 1)
        fits = self.width >= rows.ROTATED and self.width % rows.HALF == 0
        if not 1 <= self.heads < rows.MOST_HEADS or not fits or self.width >= rows.LARGEST:
            raise ShapeMismatch(
                "query heads and their width",
                (self.heads, self.width),
                f"1 to {rows.MOST_HEADS - 1} heads of a multiple of {rows.HALF} numbers, "
                f"{rows.ROTATED} of them turned",
                "V3.2 has heads of 192.",
            )
        rows.require_extent("chunks of a token", self.heads * CHUNKS)

    @property
    def chunks_of_head(self) -> int:
        """Return the number of chunks of a head as it arrives."""
        return self.width // rows.HALF

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes that have to be read and written."""
        moved = 2 * self.heads * CHUNKS * 16
        return self.tokens * (moved + 8 + 4 * rows.TABLE_WIDTH)


@dataclass(frozen=True)
class QueryForm:
    """Compile-time parameters of a kernel; extents come with the launch."""

    target: str
    few: bool = False  # few tokens: turns are read by guesses of positions


def choose_query_form(problem: QueryProblem, target: str) -> QueryForm:
    """Return the form for a problem."""
    return QueryForm(target, problem.tokens <= rows.TOKENS_GUESSED)


def query_grid(problem: QueryProblem) -> tuple[int, int]:
    """Return the thread blocks: along x tokens, along y chunks of a token."""
    return problem.tokens, ceil_div(problem.heads * CHUNKS, QUERY_THREADS)


def place_of(chunk: Any) -> tuple[Any, Any]:
    """Return the head of a chunk, and its number in the row; for ints and traced values."""
    return chunk // CHUNKS, chunk % CHUNKS
