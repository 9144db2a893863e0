"""Problem, layout of rows, tactic table and forms of a mixture of experts.

A slot is one choice of one token: slot t * K + k. An expert's slots are adjacent rows, in the order
of slots, and begin where a tile begins: so a tile has one expert, and its scales are whole tiles.
Rows of zeros fill the last tile. Only the GPU knows the number of rows; the host allocates and
launches by an upper bound. Host arithmetic only, no GPU and no DSL.
Shape letters: T tokens, K chosen, D hidden, F width of an expert, E experts held here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div, round_up
from degarble.harness.formats.scalar_ops import bf16_round
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.gemm.problem import GemmForm, GemmTactic
from degarble.kernels.rows.router_problem import MOST_CHOSEN, MOST_EXPERTS
from degarble.kernels.runtime.targets import SM90A, SM100A

if TYPE_CHECKING:
    from collections.abc import Mapping


# --------------------------------------------------------------------------------------------------
# Problem, layout of rows, tactic table and forms of a mixture of experts.

BEFORE_W2, AFTER_W2 = "before w2", "after w2"
WEIGHTINGS = (BEFORE_W2, AFTER_W2)
MULTIPLE = 32  # of hidden and width: a row of codes is whole 16 bytes, as TMA strides have to be
GATE_AND_UP = 2
NONE = -1  # expert of a slot that is not computed here; row of such a slot; slot of a row of zeros
LARGEST_COUNT = 1 << 31
WALKERS = 8  # thread blocks a processor that quantise rows


@dataclass(frozen=True)
class MoeProblem:
    """T tokens, each with K of `routed` experts, of which E are held here."""

    tokens: int
    hidden: int
    width: int
    experts: int
    chosen: int
    routed: int
    limit: float | None = None  # of the SwiGLU; None clamps nothing
    weighting: str = AFTER_W2  # where a slot's routing weight is multiplied

    def __post_init__(self) -> None:
        if self.weighting not in WEIGHTINGS:
            raise UnknownName.among("weighting", self.weighting, WEIGHTINGS)
        if self.limit is not None and not 0 < self.limit == bf16_round(self.limit):
            raise InvalidArgument("limit", self.limit, "a positive BF16 number", "Round it first.")
        if not 1 <= self.experts <= self.routed <= MOST_EXPERTS:
            raise ShapeMismatch(
                "experts held here, and of the model",
                (self.experts, self.routed),
                f"1 up to all, and no more than {MOST_EXPERTS}",
                "Give each rank its own experts.",
            )
        if not 1 <= self.chosen <= min(MOST_CHOSEN, self.routed):
            raise ShapeMismatch(
                "experts of a token",
                self.chosen,
                f"1 to {MOST_CHOSEN}, and no more than there are",
                "Check num_experts_per_tok.",
            )
        extents, whole = (self.hidden, self.width), (self.hidden | self.width) % MULTIPLE == 0
        if min(extents) < MULTIPLE or not whole or self.tokens < 0 or not self.is_addressable:
            raise ShapeMismatch(
                "tokens, hidden, width",
                (self.tokens, *extents),
                f"multiples of {MULTIPLE} for hidden and width, and rows times blocks below 2**31",
                "Pad with zeros, or take fewer tokens at a time.",
            )

    @property
    def is_addressable(self) -> bool:
        """Return whether kernels can number all blocks of all rows."""
        rows = self.slots + self.experts * MOST_ROWS
        return rows * max(self.hidden, self.width) // facts.NVFP4.block < LARGEST_COUNT

    @property
    def slots(self) -> int:
        """Return the number of choices of all tokens."""
        return self.tokens * self.chosen

    @property
    def operations(self) -> int:
        """Return the floating-point operations of all three products if every slot is held here."""
        return 2 * self.slots * self.hidden * 3 * self.width


@dataclass(frozen=True)
class MoeForm:
    """Compile-time parameters of FC1 or FC2; FC1 has gate next to up, and requantises."""

    gemm: GemmForm
    limit: float | None = None
    weighted: bool = False  # whether the epilogue of FC1 multiplies by routing weights
    shown: bool = False  # whether FC1 stores gate and up as well, for inspection

    @property
    def target(self) -> str:
        """Return the target."""
        return self.gemm.target

    def __post_init__(self) -> None:
        if self.shown and (self.gemm.target, self.gemm.parts) != (SM90A.name, GATE_AND_UP):
            raise InvalidArgument(
                "a product that shows gate and up",
                (self.gemm.target, self.gemm.parts),
                f"FC1 on {SM90A.name}: no other form stores them",
                "Read them one by one, by plain products.",
            )


@dataclass(frozen=True)
class CombineForm:
    """Compile-time parameters of the sum of a token's slots."""

    chosen: int
    weighted: bool  # whether slots are multiplied by their routing weights here
    shared: bool  # whether a BF16 row is added and the sum rounded once; else it stays float32
    target: str


# `rows_up_to` bounds the mean of an expert's slots. Measured: docs/design-notes/moe_kernel.md.
TACTICS: Mapping[str, tuple[GemmTactic, ...]] = {
    SM90A.name: (
        GemmTactic(12, rows=16, columns=256, inner=256),
        GemmTactic(28, rows=32, columns=256, inner=256),
        GemmTactic(64, rows=64, columns=256, inner=128),
        GemmTactic(140, rows=128, columns=256, inner=64),
        # Where most experts' rows are three or four times 64; of more, the tiles before again.
        GemmTactic(208, rows=256, columns=128, inner=64),
        GemmTactic(facts.ANY, rows=128, columns=256, inner=64),
    ),
    # Not measured, for want of a GPU: docs/design-notes/sm100_moe.md.
    SM100A.name: (GemmTactic(facts.ANY, rows=128, columns=192, inner=256),),
}
# Each tile of a table once, by its rows; benches and suites go through them.
TILES: Mapping[str, Mapping[int, GemmTactic]] = {
    target: {tactic.rows: tactic for tactic in tactics} for target, tactics in TACTICS.items()
}
MOST_ROWS = max(rows for tiles in TILES.values() for rows in tiles)  # of a tile
# FC1's tile where it is not the tactic's: an instruction finds the scales of its columns side by
# side, so gate and up are a whole tile of scales each.
FIRST_TACTICS: Mapping[str, GemmTactic] = {
    SM100A.name: GemmTactic(
        facts.ANY, rows=128, columns=GATE_AND_UP * facts.SCALE_TILE_ROWS, inner=256
    ),
}


# Where rows are decoded once, in front of both products (sm_90a): a tile multiplies by an
# instruction of as many columns as its rows need.
DECODED = GemmTactic(facts.ANY, rows=256, columns=128, inner=facts.SPAN, group=2)
DECODED_TACTICS = (
    *(each for each in TACTICS[SM90A.name] if each.inner > facts.SPAN),
    GemmTactic(150, rows=192, columns=128, inner=facts.SPAN),
    DECODED,
)
DECODED_TILES = frozenset((each.rows, each.columns, each.inner) for each in DECODED_TACTICS)
GRANULE = 16  # rows of a tile are loaded, multiplied and written in steps of so many
# Columns of the instructions of a tile, by its rows. Each width is a loop of its own in machine
# code, so only the widths that most experts need are narrow steps.
WIDTHS: Mapping[int, tuple[int, ...]] = {
    16: (8, 16),
    32: (8, 16, 24, 32),
    64: (16, 32, 48, 56, 64),
    192: (64, 96, 112, 128, 144, 160, 192),
    256: (64, 128, 160, 176, 192, 208, 256),
}
LOADING_REGISTERS = 32  # of a thread that loads, where all others multiply


def choose_tactic(problem: MoeProblem, target: str) -> GemmTactic:
    """Return the tactic of both products, by the table."""
    if target not in TACTICS:
        raise UnknownName.among("target of a mixture of experts", target, TACTICS)
    mean = problem.slots / problem.routed
    return next(tactic for tactic in TACTICS[target] if mean <= tactic.rows_up_to)


def has_whole_scale_tiles(problem: MoeProblem) -> bool:
    """Return whether hidden and width are whole tiles of scales, as decoded rows need."""
    return (problem.hidden | problem.width) % facts.SCALE_TILE_ROWS == 0


def decodes_rows(problem: MoeProblem, target: str) -> bool:
    """Return whether a call decodes its rows once; else every tile decodes them anew."""
    return target == SM90A.name and has_whole_scale_tiles(problem)


def require_decoded(problem: MoeProblem, tactic: GemmTactic) -> None:
    """Raise where the kernels of decoded rows have no form."""
    if not has_whole_scale_tiles(problem):
        raise ShapeMismatch(
            "hidden, width of decoded experts",
            (problem.hidden, problem.width),
            f"multiples of {facts.SCALE_TILE_ROWS}",
            "Call sm90_moe_nvfp4, which takes all sizes.",
        )
    alone = (tactic.cluster_rows, tactic.cluster_columns) == (1, 1)
    if not alone or (tactic.rows, tactic.columns, tactic.inner) not in DECODED_TILES:
        raise InvalidArgument(
            "tactic of decoded experts",
            tactic,
            "a tile of DECODED_TACTICS, without a cluster",
            "Leave it out.",
        )


def choose_decoded_tactic(problem: MoeProblem) -> GemmTactic:
    """Return the tactic of both products of decoded rows, by the table."""
    mean = problem.slots / problem.routed
    return next(tactic for tactic in DECODED_TACTICS if mean <= tactic.rows_up_to)


def decoded_groups(form: GemmForm) -> int:
    """Return the warpgroups that multiply: 64 rows of weights each."""
    return form.tactic.columns // facts.PIECE_ROWS


def decoded_registers(form: GemmForm) -> tuple[int, int]:
    """Return the registers of a thread that loads, and of one that multiplies."""
    groups = decoded_groups(form)
    whole = facts.REGISTERS_OF_PROCESSOR // facts.WARPGROUP // (1 + groups) // 8 * 8 * (1 + groups)
    left = (whole - LOADING_REGISTERS) // groups // 8 * 8
    return LOADING_REGISTERS, min(left, facts.LARGEST_REGISTERS)


def decoded_weight_bytes(form: GemmForm) -> int:
    """Return the bytes of a stage's weights: their codes, and whole tiles of their scales."""
    tactic = form.tactic
    tiles: int = form.parts * ceil_div(tactic.columns // form.parts, facts.SCALE_TILE_ROWS)
    scales = tiles * (tactic.inner // facts.SPAN) * facts.SCALE_TILE_BYTES
    return tactic.columns * tactic.inner // 2 + scales


def decoded_output_bytes(form: GemmForm) -> int:
    """Return the bytes of a tile that leaves.

    Of few rows each warpgroup has 128 bytes a row; of many, it has two buffers of 64 rows.
    """
    rows = form.tactic.rows if facts.has_few_rows(form) else facts.PIECES_AT_ONCE * facts.PIECE_ROWS
    return decoded_groups(form) * rows * 128


def decoded_stages(form: GemmForm) -> int:
    """Return the stages that fit beside the outgoing tile."""
    stage = form.tactic.rows * form.tactic.inner * 2 + decoded_weight_bytes(form)
    beside = (
        decoded_output_bytes(form) + facts.MOST_BARRIERS * facts.BARRIER_BYTES + facts.ALIGNMENT
    )
    return facts.stages_that_fit(stage, beside, form.target)


def forms_of(
    problem: MoeProblem, target: str, tactic: GemmTactic | None = None
) -> tuple[MoeForm, ...]:
    """Return the forms of FC1 and FC2."""
    tactic = tactic or choose_tactic(problem, target)
    of_first = FIRST_TACTICS.get(target, tactic)
    shape = (tactic.cluster_rows, tactic.cluster_columns)
    of_first = replace(of_first, cluster_rows=shape[0], cluster_columns=shape[1])
    first, second = (
        GemmForm(facts.NVFP4.name, "e4m3", target, cut, parts)
        for cut, parts in ((of_first, GATE_AND_UP), (tactic, 1))
    )
    return MoeForm(first, problem.limit, problem.weighting == BEFORE_W2), MoeForm(second)


# ---- rows ----------------------------------------------------------------------------------------


# A plan: rows of all groups, rows of zeros included; slots of each expert here; each tile's expert;
# each row's slot, -1 of rows of zeros; each slot's row, -1 where its expert is not here.
PLANNED = ("rows", "counts", "tiles", "slots", "places")


@dataclass(frozen=True)
class RowsProblem:
    """The rows of a problem in tiles of a tactic, each of one expert."""

    moe: MoeProblem
    tactic: GemmTactic
    mapped: bool = False  # whether experts have other numbers here
    shown: bool = False  # whether FC1 stores gate and up as well, for inspection

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the element counts of a plan, as PLANNED names it."""
        tiles, rows = most_tiles(self.moe, self.tactic), self.rows
        return 1, self.moe.experts, tiles, rows, max(1, self.moe.slots)

    @property
    def rows(self) -> int:
        """Return the rows that any choice needs at most."""
        return most_rows(self.moe, self.tactic)


@dataclass(frozen=True)
class RowsForm:
    """Compile-time parameters of what orders and quantises rows."""

    tile: int  # rows of one expert
    target: str


@dataclass(frozen=True)
class CombineProblem:
    """So many of `rows` are summed to each token."""

    tokens: int
    hidden: int
    chosen: int
    rows: int
    weighted: bool
    shared: bool


def choose_rows_form(problem: RowsProblem, target: str) -> RowsForm:
    """Return the form that orders or quantises rows."""
    return RowsForm(rows_of_one_expert(problem.tactic), target)


def choose_first_form(problem: RowsProblem, target: str) -> MoeForm:
    """Return the form of FC1."""
    return replace(forms_of(problem.moe, target, problem.tactic)[0], shown=problem.shown)


def choose_second_form(problem: RowsProblem, target: str) -> MoeForm:
    """Return the form of FC2."""
    return forms_of(problem.moe, target, problem.tactic)[1]


def choose_combine_form(problem: CombineProblem, target: str) -> CombineForm:
    """Return the form that sums a token's slots."""
    return CombineForm(problem.chosen, problem.weighted, problem.shared, target)


def rows_of_one_expert(tactic: GemmTactic) -> int:
    """Return the rows that belong to one expert: of a tile, or of a cluster's tiles along M."""
    return tactic.rows * tactic.cluster_rows


def most_tiles(problem: MoeProblem, tactic: GemmTactic) -> int:
    """Return the tiles (or clusters) of rows that any choice needs; at least 1, to allocate."""
    # Each expert with a slot pads by at most rows - 1.
    some, rows = min(problem.experts, problem.slots), rows_of_one_expert(tactic)
    return max(1, (problem.slots + (rows - 1) * some) // rows)


def most_rows(problem: MoeProblem, tactic: GemmTactic) -> int:
    """Return the rows that any choice needs at most."""
    return most_tiles(problem, tactic) * rows_of_one_expert(tactic)


def scale_bytes(rows: int, columns: int) -> int:
    """Return the bytes of a matrix's block scales, in 128x4 order."""
    size: int = SWIZZLE_128X4.storage_size(rows, columns // facts.NVFP4.block)
    return size


def columns_of(problem: MoeProblem, form: MoeForm) -> tuple[int, int]:
    """Return N and K of a product; N of FC1 counts gate and up."""
    if form.gemm.parts == GATE_AND_UP:
        return GATE_AND_UP * problem.width, problem.hidden
    return problem.hidden, problem.width


def rows_of_call(
    problem: MoeProblem, target: str, tactic: GemmTactic | None = None, *, mapped: bool = False
) -> RowsProblem:
    """Return the rows of a problem in a tactic's tiles, without one by the table."""
    return RowsProblem(problem, tactic or choose_tactic(problem, target), mapped)


def combined(problem: RowsProblem, *, shared: bool) -> CombineProblem:
    """Return the sum of all rows to tokens."""
    moe = problem.moe
    weighted = moe.weighting == AFTER_W2
    return CombineProblem(moe.tokens, moe.hidden, moe.chosen, problem.rows, weighted, shared)


def grid(problem: MoeProblem, form: MoeForm, processors: int) -> int:
    """Return the clusters of a product: as many as run at once, or as can have a tile."""
    tactic = form.gemm.tactic
    tiles = ceil_div(columns_of(problem, form)[0], tactic.columns * tactic.cluster_columns)
    at_once = processors * tactic.blocks // (tactic.cluster_rows * tactic.cluster_columns)
    return int(min(most_tiles(problem, tactic) * tiles, at_once))


def first_scale_row(row: Any, first: Any, form: GemmForm) -> Any:
    """Return the offset from a row of B to its row of scales.

    Every part begins with a scale tile of its own, `first` rows into it.
    """
    part = form.tactic.columns // form.parts
    return first + row // part * (round_up(part, facts.SCALE_TILE_ROWS) - part)


# --------------------------------------------------------------------------------------------------
# Derived facts of the expert products on sm_100a: a warp's rows, and places of codes and scales.
#
# An expert's slots begin where a tile of 128 rows begins, which is also one tile of scales in 128x4
# order. So groups are padded to 128 rows in codes and scales alike, and TMA brings the scales of a
# tile of rows as one box. A tile of FC1 is 128 columns of gate next to 128 of up, one scale tile
# each; a thread has one row of it, hence whole blocks of 16. Warps store independently; a warp
# whose 32 rows are unused stores nothing.
#
# Host arithmetic that kernels trace as well; no GPU, no DSL. Nothing of it was run: there was no
# sm_100a device.

WARP_ROWS = 32  # lanes of tensor memory that one warp reaches; PTX ISA 9.1, tcgen05.ld
FIRST_BARRIER = 4  # of the warps that store; 0 to 3 belong to the thread block and to probes
BLOCK = facts.NVFP4.block
BLOCKS_OF_PIECE = facts.PIECE_COLUMNS // BLOCK  # 64 columns: a word of four scales
BLOCKS_OF_STORE = 2  # that leave together: 16 bytes of codes
WORDS_OF_BLOCK = BLOCK // 2  # of two BF16


def piece_buffers() -> int:
    """Return the buffers of 32-row pieces: each warp has its own."""
    return facts.PIECES_AT_ONCE * tensor_memory.LANES // WARP_ROWS


def columns_of_part(form: MoeForm) -> int:
    """Return the columns of gate, or of up, in a tile of FC1; of FC2 all of them."""
    return form.gemm.tactic.columns // form.gemm.parts


def blocks_of_tile(form: MoeForm) -> int:
    """Return the blocks of 16 that a row of a tile becomes."""
    return columns_of_part(form) // BLOCK


def words_of_row(form: MoeForm) -> int:
    """Return the words of two BF16 that a thread keeps of its row to release sums early."""
    return form.gemm.tactic.columns // 2


def codes_at(row: Any, block: Any, blocks: Any) -> Any:
    """Return where codes of a pair of blocks begin, counted in 16 bytes."""
    return row * (blocks // BLOCKS_OF_STORE) + block // BLOCKS_OF_STORE


def scales_at(row: Any, block: Any, blocks: Any) -> Any:
    """Return the word of four scales that begins with `block`, a multiple of four."""
    offset = SWIZZLE_128X4.offset_of(row, block, None, blocks)
    return offset // SWIZZLE_128X4.column_tile
