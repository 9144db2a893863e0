"""GEMM problem, tactic table, form and derived facts, shared by all architectures.

D = A B^T in BF16 with A [M, K] and B [N, K], both with K along rows. Derived facts: the boxes of a
stage (hence the bytes its barrier expects), stages that fit in shared memory, arrivals at barriers,
threads and registers of each role, grid. Host arithmetic only, no GPU and no DSL. Extents are
passed at launch, so a form is compiled once.

`loads` and `transaction_bytes` hold for every architecture. A new architecture adds rows to
TACTICS, a footprint of its own (from transaction_bytes and stages_that_fit), and a kernel over
the parts in mainloop. Extents that no TMA descriptor can describe raise ShapeMismatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div
from degarble.kernels.runtime.targets import SM90A, SM100A, TARGETS

if TYPE_CHECKING:
    from collections.abc import Mapping

COLUMNS_MULTIPLE = 8  # of N: a row of D is whole 16 bytes, as TMA stores it
LARGEST_EXTENT = 1 << 31
WARP = 32  # threads
WARPGROUP = 128
BARRIER_BYTES = 8  # of an mbarrier
SCALE_TILE_BYTES = 512  # 128 rows x 4 scales, harness.formats.layouts.SWIZZLE_128X4
SCALE_TILE_ROWS = 128
PIECE_ROWS, PIECE_COLUMNS = 64, 64  # what one warpgroup hands to one TMA store
MANY_ROWS = 4 * PIECE_ROWS
SPAN = 64  # numbers of K that NVFP4 is decoded by: nvfp4_stages
PIECE_BYTES = PIECE_ROWS * PIECE_COLUMNS * 2
PIECES_AT_ONCE = 2  # buffers of a warpgroup's pieces
LARGE_CLUSTER = 4  # thread blocks
WHOLE_CARVEOUT = 100  # per cent; CUDA Driver API 13.0, preferred shared memory carveout
RESERVED_BYTES = 1024  # of shared memory in each thread block; CUDA C++ Programming Guide 13.0
TMA_ALIGNMENT = 16  # of addresses and row strides in bytes; PTX ISA 9.1, tensor maps
ALIGNMENT = 1024  # of whatever TMA swizzles; PTX ISA 9.1, 5.5.6
MOST_STAGES = 8
REGISTERS_OF_PROCESSOR = 65_536  # CUDA C++ Programming Guide 13.0, compute capability 9.0 and 10.0
LARGEST_REGISTERS = 240  # of a thread after setmaxnreg, in steps of 8; PTX ISA 9.1, setmaxnreg


@dataclass(frozen=True)
class OperandFormat:
    """An operand format: bits of a code, values per scale, divisor of K, scale formats."""

    name: str
    code_bits: int
    block: int  # along K; 0: no block scales
    inner_multiple: int  # rows are whole 16 bytes, as TMA strides have to be
    scales: tuple[str, ...]  # formats of block scales that a kernel reads


BF16 = OperandFormat("bf16", code_bits=16, block=0, inner_multiple=8, scales=("none",))
NVFP4 = OperandFormat("nvfp4", code_bits=4, block=16, inner_multiple=32, scales=("e4m3",))
FP8_BLOCK = OperandFormat(
    "fp8_block", code_bits=8, block=128, inner_multiple=32, scales=("float32", "ue8m0")
)
OPERANDS: Mapping[str, OperandFormat] = MappingProxyType(
    {operands.name: operands for operands in (BF16, NVFP4, FP8_BLOCK)}
)


@dataclass(frozen=True)
class GemmProblem:
    """M x N numbers, each a sum over K; `scales` is the format of the block scales."""

    rows: int
    columns: int
    inner: int
    operands: str = BF16.name
    scales: str = "none"

    def __post_init__(self) -> None:
        if self.operands not in OPERANDS:
            raise UnknownName.among("operands of a GEMM", self.operands, OPERANDS)
        kind = OPERANDS[self.operands]
        if self.scales not in kind.scales:
            raise InvalidArgument(
                "format of block scales", self.scales, " or ".join(kind.scales), "Convert them."
            )
        extents = (self.rows, self.columns, self.inner)
        in_range = min(extents) >= 0 and max(extents) < LARGEST_EXTENT and self.columns > 0
        whole = self.columns % COLUMNS_MULTIPLE == 0 and self.inner % kind.inner_multiple == 0
        if not in_range or not whole or self.inner == 0:
            raise ShapeMismatch(
                "extents M, N, K of a GEMM",
                extents,
                f"M from 0, N in multiples of {COLUMNS_MULTIPLE}, K in multiples of "
                f"{kind.inner_multiple}, all below 2**31",
                "Pad N and K with zeros.",
            )

    @property
    def operations(self) -> int:
        """Return the floating-point operations, counting a product and a sum as two."""
        return 2 * self.rows * self.columns * self.inner

    @property
    def bytes_moved(self) -> int:
        """Return the fewest bytes moved: both operands, their scales and D once."""
        kind = OPERANDS[self.operands]
        codes = (self.rows + self.columns) * self.inner * kind.code_bits // 8
        return codes + self.scale_bytes + 2 * self.rows * self.columns

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of both operands' block scales, padding included."""
        if self.operands == BF16.name:
            return 0
        blocks: int = ceil_div(self.inner, OPERANDS[self.operands].block)
        # 128x4 order pads rows to 128 and blocks to 4.
        if self.operands == NVFP4.name:
            sizes = (SWIZZLE_128X4.storage_size(m, blocks) for m in (self.rows, self.columns))
            return sum(sizes)
        width = 1 if self.scales == "ue8m0" else 4
        return int(width * blocks * (self.rows + ceil_div(self.columns, 128)))


@dataclass(frozen=True)
class GemmTactic:
    """Tile shape, cluster shape and tile order of a kernel.

    `inner` is the K extent of a stage. `rows_up_to` is the largest M for which the table chooses
    this tactic. On sm_100a two thread blocks may multiply `together` (cta_group::2): each loads its
    rows of A and half of the tile's B. With `swapped` operands the tile's rows are rows of B, and
    the few rows of A are columns of the instruction.

    The last five are for BF16 and FP8 blocks on sm_90a. With `direct` threads write D themselves:
    its tiles hold too few numbers for pieces of 64 columns. With several `folds` (FP8) a warpgroup
    multiplies so many times 64 rows, one after the other.
    """

    rows_up_to: float
    rows: int
    columns: int
    inner: int
    cluster_rows: int = 1
    cluster_columns: int = 1
    group: int = 8
    together: int = 1
    swapped: bool = False
    blocks: int = 1  # thread blocks of a processor at once, where one leaves it waiting
    most_stages: int = MOST_STAGES
    asked_early: int = 0  # stages of B prefetched to L2 before the previous launch has ended
    direct: bool = False
    columns_up_to: float = float("inf")  # the largest N for which the table chooses this tactic
    folds: int = 1


@dataclass(frozen=True)
class GemmForm:
    """Compile-time parameters; extents, pointers and tensor scales are passed at launch."""

    operands: str
    scales: str
    target: str
    tactic: GemmTactic
    parts: int = 1  # matrices of B that share a tile's columns: 2 for gate and up
    bits_of_a: int = 0  # in memory, where the kernel makes A's codes itself; 0: those of a code

    def __post_init__(self) -> None:
        tactic = self.tactic
        few = tactic.direct or tactic.asked_early > 0 or tactic.folds > 1
        if few and not self._fits_few():
            raise InvalidArgument(
                "tactic",
                tactic,
                f"products of {BF16.name} or {FP8_BLOCK.name} on {SM90A.name}; swapped and of "
                "narrow tiles only direct, B asked for early not shared, several folds only of "
                f"{FP8_BLOCK.name}",
                "Take a tactic of the table.",
            )
        if tactic.together == 1 and (few or not tactic.swapped):
            return
        has_both = self.operands == NVFP4.name and self.target == SM100A.name
        pairs = tactic.together in {1, 2} and tactic.cluster_rows % tactic.together == 0
        if not has_both or not pairs or (tactic.swapped and tactic.together > 1):
            raise InvalidArgument(
                "tactic",
                tactic,
                "two thread blocks together, both in a cluster's rows, or swapped operands, of "
                f"{NVFP4.name} on {SM100A.name}",
                "Take a tactic of the table.",
            )

    def _fits_few(self) -> bool:
        tactic = self.tactic
        plain = self.operands != NVFP4.name and self.target == SM90A.name and tactic.together == 1
        narrow = tactic.swapped or tactic.columns % piece_columns(tactic) > 0
        # B is shared along the other side of a cluster than its own.
        sharers = tactic.cluster_columns if tactic.swapped else tactic.cluster_rows
        asked = not tactic.asked_early or sharers == 1
        # A thread reads one scale of B a stage.
        scaled = self.operands == FP8_BLOCK.name and not tactic.swapped
        one_scale = not scaled or FP8_BLOCK.block % tactic.columns == 0
        folded = self.operands == FP8_BLOCK.name and not tactic.direct
        whole = tactic.folds == 1 or (folded and tactic.rows % (PIECE_ROWS * tactic.folds) == 0)
        return plain and (tactic.direct or not narrow) and asked and one_scale and whole


ANY = float("inf")
MOST_OF_FEW = 24  # stages of tiles of few numbers


NARROW = 4224  # columns of an H200's 132 processors in tiles of 32


def _few(operands: OperandFormat, asked: int) -> tuple[GemmTactic, ...]:
    """Return the tactics of up to 128 rows: threads write D themselves, B is prefetched early.

    N of 7168 is 112 tiles of 64; narrow ones take tiles of 32 from 33 rows on, so that more
    processors have work. In clusters of four thread blocks share A, because all of its reads from
    L2 would be as many bytes as those of B. `asked` stages are prefetched in the last tactic.
    """
    inner = 128 * 8 // operands.code_bits  # rows of 128 bytes
    of = partial(GemmTactic, inner=inner, most_stages=MOST_OF_FEW, direct=True)
    swapped = partial(of, rows=64, swapped=True, asked_early=16)
    return (
        swapped(8, columns=8),
        swapped(16, columns=16),
        swapped(32, columns=32, columns_up_to=NARROW),
        swapped(32, columns=32, cluster_rows=4),
        of(64, rows=64, columns=32, asked_early=16, columns_up_to=NARROW),
        of(64, rows=64, columns=64, cluster_columns=4, asked_early=13),
        of(128, rows=128, columns=32, cluster_columns=4, asked_early=10, columns_up_to=NARROW),
        of(128, rows=128, columns=64, cluster_columns=4, asked_early=asked),
    )


# Measured on an H200: docs/design-notes/gemm_kernels.md.
TACTICS: Mapping[tuple[str, str], tuple[GemmTactic, ...]] = {
    (SM90A.name, BF16.name): (
        *_few(BF16, 9),
        GemmTactic(256, rows=128, columns=128, inner=64),
        GemmTactic(
            512,
            rows=128,
            columns=128,
            inner=64,
            cluster_rows=2,
            cluster_columns=2,
            columns_up_to=NARROW,
        ),
        GemmTactic(512, rows=128, columns=224, inner=64, cluster_rows=2),
        GemmTactic(ANY, rows=128, columns=256, inner=64, cluster_rows=2),
    ),
    (SM90A.name, NVFP4.name): (
        GemmTactic(64, rows=64, columns=64, inner=64),
        GemmTactic(256, rows=128, columns=128, inner=64),
        GemmTactic(ANY, rows=128, columns=256, inner=64),
    ),
    (SM90A.name, FP8_BLOCK.name): (
        *_few(FP8_BLOCK, 4),
        GemmTactic(256, rows=128, columns=128, inner=128, cluster_rows=2),
        GemmTactic(1024, rows=128, columns=128, inner=128, cluster_columns=2, columns_up_to=NARROW),
        GemmTactic(ANY, rows=256, columns=128, inner=128, cluster_columns=2, folds=2),
    ),
    # Not measured, for want of a GPU: docs/design-notes/sm100_gemm.md.
    (SM100A.name, BF16.name): (
        GemmTactic(128, rows=128, columns=64, inner=64),
        GemmTactic(512, rows=128, columns=128, inner=64),
        GemmTactic(ANY, rows=128, columns=256, inner=64),
    ),
    (SM100A.name, FP8_BLOCK.name): (
        GemmTactic(256, rows=128, columns=64, inner=128),
        GemmTactic(ANY, rows=128, columns=128, inner=128),
    ),
    (SM100A.name, NVFP4.name): (
        GemmTactic(8, rows=128, columns=8, inner=256, swapped=True),
        GemmTactic(16, rows=128, columns=16, inner=256, swapped=True),
        GemmTactic(32, rows=128, columns=32, inner=256, swapped=True),
        GemmTactic(128, rows=128, columns=64, inner=256),
        GemmTactic(512, rows=128, columns=128, inner=256),
        GemmTactic(2048, rows=128, columns=192, inner=256),
        GemmTactic(ANY, rows=128, columns=256, inner=256),
    ),
}


def choose_form(problem: GemmProblem, target: str) -> GemmForm:
    """Return the form that the table gives for a problem; other extents may share it."""
    rows = TACTICS.get((target, problem.operands))
    if rows is None:
        known = sorted(name for name, operands in TACTICS if operands == problem.operands)
        raise UnknownName.among(f"target of a {problem.operands} GEMM", target, known)
    tactic = next(
        tactic
        for tactic in rows
        if problem.rows <= tactic.rows_up_to and problem.columns <= tactic.columns_up_to
    )
    return GemmForm(problem.operands, problem.scales, target, tactic)


# ---- what a stage loads --------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """One TMA box of a stage: rows, and bytes of a row, as they lie in shared memory."""

    name: str
    side: str  # a: walks with the rows of D; b: with its columns
    rows: int
    row_bytes: int
    matrices: int = 1  # stacked in the stage, each with `rows` rows

    @property
    def bytes(self) -> int:
        """Return the bytes that arrive, including zeros for what lies outside the matrix."""
        return self.matrices * self.rows * self.row_bytes


def loads(form: GemmForm) -> tuple[Load, ...]:
    """Return the boxes of one stage in the order in which they are issued."""
    kind, tactic = OPERANDS[form.operands], form.tactic
    row_bytes, part = tactic.inner * kind.code_bits // 8, tactic.columns // form.parts
    codes = part // tactic.together  # rows of B that this thread block brings for both
    # BF16 heads that the kernel quantises itself are wider than their codes.
    bytes_of_a = tactic.inner * (form.bits_of_a or kind.code_bits) // 8
    boxes = [Load("a", "a", tactic.rows, bytes_of_a), Load("b", "b", codes, row_bytes, form.parts)]
    if form.operands == NVFP4.name:
        # A stage of K holds so many tiles of four scales a row.
        tiles = tactic.inner // (4 * NVFP4.block) * SCALE_TILE_BYTES
        for side, rows, count in (("a", tactic.rows, 1), ("b", part, form.parts)):
            held = ceil_div(rows, SCALE_TILE_ROWS)
            # Tiles of 192 begin within a pair of scale tiles: each of the two has a box.
            each = held if rows % SCALE_TILE_ROWS == 0 else 1
            boxes += held // each * [Load(f"scales of {side}", side, each, tiles, count)]
    return tuple(boxes)


def bytes_of(form: GemmForm, name: str) -> int:
    """Return the bytes that a stage holds of an operand or of its scales."""
    return sum(load.bytes for load in loads(form) if load.name == name)


def transaction_bytes(form: GemmForm) -> int:
    """Return the bytes of a stage in one thread block."""
    return sum(load.bytes for load in loads(form))


def expected_bytes(form: GemmForm) -> int:
    """Return the bytes that a stage's barrier expects; of a pair, both at the first block's."""
    return form.tactic.together * transaction_bytes(form)


# ---- what a thread block holds -------------------------------------------------------------------


@dataclass(frozen=True)
class WarpgroupRole:
    """Warpgroups with the same role, and the registers of each of their threads."""

    name: str
    warpgroups: int
    registers: int


def has_few_rows(form: GemmForm) -> bool:
    """Return whether rows of B are wgmma's rows and the few rows of A its columns (sm_90a)."""
    is_nvfp4 = (form.operands, form.target) == (NVFP4.name, SM90A.name)
    return is_nvfp4 and form.tactic.inner > SPAN


def has_many_rows(form: GemmForm) -> bool:
    """Return whether four warpgroups multiply rows of A and share one decoded B."""
    return not has_few_rows(form) and form.tactic.rows >= MANY_ROWS


def consumers(form: GemmForm) -> int:
    """Return the multiplying warpgroups on sm_90a: 64 rows of the tile each, of A or of B."""
    tactic = form.tactic
    return (tactic.columns if has_few_rows(form) else tactic.rows) // PIECE_ROWS // tactic.folds


def roles(form: GemmForm) -> tuple[WarpgroupRole, ...]:
    """Return the roles on sm_90a in the order of their warpgroups.

    Trap: ptxas serialises wgmma if a thread starts with few registers, whatever setmaxnreg grants
    later. Four consumer warpgroups start with 128, too few for 64 x 256 sums; hence decoders also
    load.
    """
    count = consumers(form)
    first = WarpgroupRole("producer", 1, 40)
    if form.operands == NVFP4.name:  # four that multiply need all that can be spared
        first = WarpgroupRole("decoder", 1, 64 if count >= MANY_ROWS // PIECE_ROWS else 88)
    groups = 1 + count
    whole = REGISTERS_OF_PROCESSOR // form.tactic.blocks // WARPGROUP // groups // 8 * 8 * groups
    left = (whole - first.registers) // count // 8 * 8
    return first, WarpgroupRole("consumer", count, min(left, LARGEST_REGISTERS))


REGISTERS_BESIDE_SUMS = 40  # of a thread that multiplies: scales, addresses, states of rings
DECODED_STAGES = 4  # buffers of decoded numbers at most
MOST_BARRIERS = 2 * (MOST_STAGES + DECODED_STAGES)
FEW_PADDING = 8  # numbers after each row of a tile of few rows, so that rows begin in other banks
AHEAD = 4  # stages that the decoders load before they decode: less than a ring holds


def overlaps(form: GemmForm) -> bool:
    """Return whether stages of FP8 take turns in two sets of sums: registers suffice for them."""
    a_set = form.tactic.columns // 2
    needed = 3 * a_set + REGISTERS_BESIDE_SUMS  # a tile's sums are the third
    return form.tactic.folds == 1 and roles(form)[1].registers >= needed


def threads(form: GemmForm) -> int:
    """Return the threads of a thread block on sm_90a."""
    return WARPGROUP * sum(role.warpgroups for role in roles(form))


def registers_at_launch(form: GemmForm) -> int:
    """Return the registers a thread starts with: an even share, in steps of 8."""
    together = threads(form) * form.tactic.blocks
    return min(255, REGISTERS_OF_PROCESSOR // together // 8 * 8)


def registers_of_roles(form: GemmForm) -> int:
    """Return the registers of all threads after every role has run setmaxnreg."""
    return sum(WARPGROUP * role.warpgroups * role.registers for role in roles(form))


@dataclass(frozen=True)
class Footprint:
    """Shared memory of a thread block in bytes, by use."""

    stages: int
    stage_bytes: int
    decoded_bytes: int
    output_bytes: int
    barriers: int
    factor_bytes: int = 0

    @property
    def total(self) -> int:
        """Return the total; alignment adds at most one ALIGNMENT unit for the barriers."""
        held = self.stages * self.stage_bytes + self.decoded_bytes + self.output_bytes
        return held + self.factor_bytes + self.barriers * BARRIER_BYTES


def footprint(form: GemmForm) -> Footprint:
    """Return a thread block's shared memory on sm_90a, with as many stages as fit."""
    decoded = 0
    if form.operands == NVFP4.name:
        rows = form.tactic.rows if has_few_rows(form) else form.tactic.columns
        decoded = decoded_stages(form) * rows * form.tactic.inner * 2
    piece = PIECE_ROWS * piece_columns(form.tactic) * 2
    output = 0 if form.tactic.direct else consumers(form) * pieces_at_once(form.tactic) * piece
    if has_few_rows(form):
        # A whole tile leaves at once there, in BF16, not piece by piece.
        output = form.tactic.rows * (form.tactic.columns + FEW_PADDING) * 2
    stage, factors = transaction_bytes(form), factor_bytes(form.tactic)
    # As many barriers as there may be, because their number depends on the result.
    most, others = form.tactic.most_stages, shared_memory_of_others(form)
    held = max(MOST_BARRIERS, 2 * (most + DECODED_STAGES)) * BARRIER_BYTES
    beside = decoded + output + factors + held + ALIGNMENT + others
    stages = stages_that_fit(stage, beside, form.target, most)
    barriers = 2 * (stages + (decoded_stages(form) if decoded else 0))
    barriers += 2 * FACTOR_SLOTS if factors else 0
    return Footprint(stages, stage, decoded, output, barriers, factors)


FACTOR_SLOTS, FACTOR_STAGES = 2, 8  # a slot holds the factors of eight stages
FACTOR_WARPS = 2  # that read scales and multiply them
FACTOR_PADDING = 4  # numbers behind a stage's factors, so that eight stages meet no bank twice


def factor_stride(tactic: GemmTactic) -> int:
    """Return the numbers from the factors of a stage's FP8 sums to those of the next."""
    return tactic.rows + FACTOR_PADDING


def factor_bytes(tactic: GemmTactic) -> int:
    """Return the bytes of all factors in shared memory: none where a thread reads its own."""
    return 4 * FACTOR_SLOTS * FACTOR_STAGES * factor_stride(tactic) if tactic.folds > 1 else 0


def decoded_stages(form: GemmForm) -> int:
    """Return the buffers of decoded numbers; one more where three warps decode many rows."""
    return 4 if has_few_rows(form) and form.tactic.rows >= PIECE_ROWS else 3


def shared_memory_of_others(form: GemmForm) -> int:
    """Return the bytes left to other thread blocks of the same multiprocessor."""
    most = TARGETS[form.target].shared_memory_bytes
    return most - (most + RESERVED_BYTES) // form.tactic.blocks + RESERVED_BYTES


def stages_that_fit(
    stage_bytes: int, other_bytes: int, target: str, most: int = MOST_STAGES
) -> int:
    """Return how many stages fit next to `other_bytes`; raise if fewer than two."""
    stages = min(most, (TARGETS[target].shared_memory_bytes - other_bytes) // stage_bytes)
    if stages < 2:
        raise InvalidArgument(
            "bytes of a stage", stage_bytes, "two stages beside the rest", "Use a smaller tile."
        )
    return stages


def release_arrivals(form: GemmForm) -> int:
    """Return the arrivals that empty a stage: one per reading warp of all blocks sharing a load."""
    tactic = form.tactic
    warps = consumers(form) * (WARPGROUP // WARP) + decoding_warps(form)
    # A cluster shares A along its columns and B along its rows; this block counts once.
    return warps * (tactic.cluster_rows + tactic.cluster_columns - 1)


def decoding_warps(form: GemmForm) -> int:
    """Return the warps that decode one stage: four, or with few rows one (stages go round)."""
    if form.operands != NVFP4.name:
        return 0
    return 1 if has_few_rows(form) else WARPGROUP // WARP


def piece_columns(tactic: GemmTactic) -> int:
    """Return the columns of a piece: half as many where the tile's are no whole pieces."""
    return PIECE_COLUMNS if tactic.columns % PIECE_COLUMNS == 0 else PIECE_COLUMNS // 2


def pieces_at_once(tactic: GemmTactic) -> int:
    """Return the buffers of a warpgroup's pieces: of several folds, one for each of a tile."""
    whole = tactic.folds * tactic.columns // piece_columns(tactic)
    return whole if tactic.folds > 1 else PIECES_AT_ONCE


def piece_of(row: Any, column: Any, warpgroup: Any, tactic: GemmTactic) -> tuple[Any, Any]:
    """Return the coordinate of a warpgroup's first piece of a tile, in pieces of D."""
    down, across = tactic.rows // PIECE_ROWS, tactic.columns // piece_columns(tactic)
    return row * down + warpgroup, column * across


def sides(pair: Any, tactic: GemmTactic) -> Any:
    """Return what belongs to A and to B in the order of a tile's rows and columns, or back."""
    return tuple(pair)[::-1] if tactic.swapped else tuple(pair)


# ---- the grid ------------------------------------------------------------------------------------


def cluster_tiles(problem: GemmProblem, tactic: GemmTactic) -> tuple[int, int]:
    """Return the tiles of clusters along M and N (swapped: N and M); the last may exceed D."""
    m, n = sides((problem.rows, problem.columns), tactic)
    rows: int = ceil_div(m, tactic.rows * tactic.cluster_rows)
    columns: int = ceil_div(n, tactic.columns * tactic.cluster_columns)
    return rows, columns


def grid(problem: GemmProblem, tactic: GemmTactic, processors: int) -> tuple[int, int, int]:
    """Return the grid: clusters along z, at most as many as fit on the multiprocessors at once."""
    rows, columns = cluster_tiles(problem, tactic)
    size = tactic.cluster_rows * tactic.cluster_columns
    # A cluster lies within one part of the chip: an H200 runs 28 of four at a time, not 33.
    usable = processors if size < LARGE_CLUSTER else processors * 28 // 33
    at_once = max(1, usable // size)
    return tactic.cluster_rows, tactic.cluster_columns, min(rows * columns, at_once)
