"""Experts as arithmetic: how slots become rows, what fits, and where sm_100a has its pieces."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div, round_up
from degarble.kernels.gemm import problem as gemm
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.gemm.nvfp4_stages import word_of_scales
from degarble.kernels.moe import problem as facts
from degarble.kernels.moe.problem import MoeForm, MoeProblem
from degarble.kernels.runtime.targets import SM100A, TARGETS

# --------------------------------------------------------------------------------------------------
# Experts as arithmetic: how slots become rows, what is enough for any choice; refusals.

FLASH = MoeProblem(8192, 4096, 2048, 256, 6, 256, 10.0)
TILES = facts.TILES["sm_90a"]
TACTICS = tuple(TILES.values())


@pytest.mark.parametrize("tactic", TACTICS, ids=lambda tactic: str(tactic.rows))
def test_there_are_tiles_enough_for_any_choice(tactic: gemm.GemmTactic) -> None:
    drawn = random.Random("tiles")
    for _ in range(300):
        experts, tokens, chosen = drawn.randint(1, 9), drawn.randint(0, 300), drawn.randint(1, 2)
        problem = MoeProblem(tokens, 32, 32, experts, min(chosen, experts), experts)
        favourite = drawn.randint(0, experts - 1)
        counts = [0] * experts
        for _ in range(problem.slots):
            counts[favourite if drawn.random() < 0.5 else drawn.randint(0, experts - 1)] += 1
        needed = sum(-(-count // tactic.rows) for count in counts)
        assert needed <= facts.most_tiles(problem, tactic)
    worst = MoeProblem(7, 32, 32, 7, 1, 7)  # each slot a tile of its own: not one too many
    assert facts.most_tiles(worst, tactic) == 7
    assert facts.most_tiles(replace(worst, tokens=0), tactic) == 1


def test_numbers_of_a_layer() -> None:
    assert FLASH.slots == 49_152
    assert FLASH.operations == 2 * 49_152 * 4096 * 3 * 2048
    first, second = facts.forms_of(FLASH, "sm_90a")
    assert (first.gemm.parts, second.gemm.parts) == (2, 1)
    assert first.gemm.tactic == second.gemm.tactic == TILES[256]
    assert facts.most_rows(FLASH, TILES[128]) == 128 * ((49_152 + 127 * 256) // 128)
    assert facts.columns_of(FLASH, first) == (4096, 4096)
    assert facts.columns_of(FLASH, second) == (4096, 2048)
    assert facts.grid(FLASH, first, 132) == 132
    assert facts.scale_bytes(129, 96) == 256 * 8
    more = facts.choose_tactic(replace(FLASH, tokens=16_384), "sm_90a")
    assert (more.rows, more.rows_up_to) == (128, gemm.ANY)
    one = replace(FLASH, tokens=1)
    assert facts.choose_tactic(one, "sm_90a") == TACTICS[0]
    assert facts.grid(one, facts.forms_of(one, "sm_90a")[0], 10_000) == 6 * 16


def test_where_the_weight_counts_is_part_of_a_form() -> None:
    weighted = [
        facts.forms_of(replace(FLASH, weighting=weighting), "sm_90a")[0].weighted
        for weighting in (facts.BEFORE_W2, facts.AFTER_W2)
    ]
    assert weighted == [True, False]


@pytest.mark.parametrize("tactic", TACTICS, ids=lambda tactic: str(tactic.rows))
def test_a_stage_of_gate_and_up_fits_and_is_counted(tactic: gemm.GemmTactic) -> None:
    first, second = (form.gemm for form in facts.forms_of(FLASH, "sm_90a", tactic))
    for form in (first, second):
        held = gemm.footprint(form)
        each = held.total + gemm.ALIGNMENT + gemm.RESERVED_BYTES
        of_processor = TARGETS["sm_90a"].shared_memory_bytes + gemm.RESERVED_BYTES
        assert each * tactic.blocks <= of_processor
        # Decoders of few rows skip stages, and rely on the second one.
        assert held.stages > (1 if gemm.has_few_rows(form) else gemm.AHEAD)
        assert held.stages >= gemm.decoded_stages(form)
        assert gemm.registers_of_roles(form) <= gemm.registers_at_launch(form) * gemm.threads(form)
        registers = gemm.registers_of_roles(form) * tactic.blocks
        assert registers <= gemm.REGISTERS_OF_PROCESSOR
    boxes = [(load.name, load.rows, load.matrices) for load in gemm.loads(first)]
    half = tactic.columns // 2
    assert boxes[:2] == [("a", tactic.rows, 1), ("b", half, 2)]
    tiles = max(1, tactic.rows // gemm.SCALE_TILE_ROWS)
    assert boxes[2:] == [("scales of a", tiles, 1), ("scales of b", 1, 2)]
    codes = tactic.columns * tactic.inner // 2
    assert [gemm.loads(form)[1].bytes for form in (first, second)] == [codes, codes]


@pytest.mark.parametrize("tactic", TACTICS, ids=lambda tactic: str(tactic.rows))
def test_scales_of_up_lie_in_tiles_of_their_own(tactic: gemm.GemmTactic) -> None:
    form = facts.forms_of(FLASH, "sm_90a", tactic)[0].gemm
    part = tactic.columns // 2
    for first in range(0, 128, part):
        for row in range(tactic.columns):
            matrix, within = divmod(row, part)
            want = 128 * matrix + word_of_scales(first + within)
            # A thread decodes every 128th row, and adds what its first one needs.
            added = facts.first_scale_row(row % 128, first, form)
            assert word_of_scales(row + added) == want


def test_refuses_by_name() -> None:
    for name, wrong in (("hidden", 48), ("width", 0), ("tokens", -1), ("tokens", 1 << 27)):
        with pytest.raises(ShapeMismatch, match="tokens, hidden, width"):
            replace(FLASH, **{name: wrong})  # type: ignore[arg-type]
    wide = replace(FLASH, hidden=(1 << 19) - 1024, tokens=1)
    with pytest.raises(ShapeMismatch, match=r"below 2\*\*31"):  # by tiles of 256 rows, not of 128
        replace(wide, hidden=1 << 19)
    for name, wrong in (("experts", 0), ("experts", 257), ("routed", 1024)):
        with pytest.raises(ShapeMismatch, match="experts held here"):
            replace(FLASH, **{name: wrong})  # type: ignore[arg-type]
    for chosen in (0, 17):
        with pytest.raises(ShapeMismatch, match="experts of a token"):
            replace(FLASH, chosen=chosen)
    with pytest.raises(UnknownName, match="after w2"):
        replace(FLASH, weighting="after w3")
    for limit in (0.0, -1.0, 10.01):
        with pytest.raises(InvalidArgument, match="limit"):
            replace(FLASH, limit=limit)
    with pytest.raises(UnknownName, match="target of a mixture"):
        facts.choose_tactic(FLASH, "sm_80")
    first, second = facts.forms_of(MoeProblem(4, 64, 32, 2, 1, 2), "sm_90a")
    assert replace(first, shown=True).shown
    of_blackwell, _ = facts.forms_of(MoeProblem(4, 64, 32, 2, 1, 2), "sm_100a")
    for form in (second, of_blackwell):
        with pytest.raises(InvalidArgument, match="shows gate and up"):
            replace(form, shown=True)


# --------------------------------------------------------------------------------------------------
# Grouped products on sm_100a as arithmetic: where groups, scales, codes and pieces lie.

PRO = MoeProblem(8192, 7168, 3072, 384, 6, 384, 10.0)
TABLE = facts.TACTICS[SM100A.name]
TENSOR_MEMORY_TACTICS = (*TABLE, *(replace(TABLE[0], columns=columns) for columns in (64, 256)))
FIRST = facts.forms_of(FLASH, SM100A.name)[0]
SECOND = [facts.forms_of(FLASH, SM100A.name, tactic)[1] for tactic in TENSOR_MEMORY_TACTICS]
EDGES = (1, 127, 128, 129, 0, 63, 64, 65)
UNIT = 8  # bytes that TMA counts scales in

each_form = pytest.mark.parametrize(
    "form", [FIRST, *SECOND], ids=lambda form: f"{form.gemm.parts}-{form.gemm.tactic.columns}"
)


def begins_of(counts: tuple[int, ...]) -> list[int]:
    """Return where each group begins, and where the last one ends."""
    begins = [0]
    for count in counts:
        begins.append(begins[-1] + round_up(count, 128))
    return begins


@each_form
def test_a_thread_block_fits_its_processor(form: MoeForm) -> None:
    held = tensor_memory.footprint(form.gemm)
    rest = held.total + tensor_memory.ADDRESS_BYTES + gemm.ALIGNMENT
    assert rest <= SM100A.shared_memory_bytes
    assert tensor_memory.columns_allocated(form.gemm) <= SM100A.tensor_memory_columns
    assert form.gemm.tactic.rows == gemm.SCALE_TILE_ROWS == tensor_memory.LANES


# By parts and columns: stages, bytes of one, of pieces, sums, columns held, copies of scales.
NUMBERS = {
    (2, 256): (4, 55_296, 0, 1, 304, 12),
    (1, 64): (6, 28_672, 32_768, 2, 160, 8),
    (1, 192): (4, 47_104, 32_768, 2, 432, 12),
    (1, 256): (3, 55_296, 32_768, 1, 304, 12),
}


@each_form
def test_numbers_of_every_form(form: MoeForm) -> None:
    held = tensor_memory.footprint(form.gemm)
    found = (
        held.stages,
        held.stage_bytes,
        held.output_bytes,
        tensor_memory.accumulators(form.gemm),
        tensor_memory.columns_held(form.gemm),
        tensor_memory.scale_copies(form.gemm),
    )
    assert found == NUMBERS[form.gemm.parts, form.gemm.tactic.columns]
    pieces = facts.piece_buffers() * facts.WARP_ROWS * gemm.PIECE_COLUMNS * 2
    assert held.output_bytes in {0, pieces}


def test_first_tile_is_gate_next_to_up_whatever_the_tactic() -> None:
    for problem in (PRO, FLASH, replace(PRO, tokens=1)):
        for tactic in TENSOR_MEMORY_TACTICS:
            first, second = facts.forms_of(problem, SM100A.name, tactic)
            assert facts.columns_of_part(first) == gemm.SCALE_TILE_ROWS
            assert facts.blocks_of_tile(first) % facts.BLOCKS_OF_PIECE == 0
            assert (first.gemm.parts, second.gemm.parts) == (2, 1)
            assert second.gemm.tactic == tactic
    boxes = [(load.name, load.rows, load.matrices) for load in gemm.loads(FIRST.gemm)]
    want = [("a", 128, 1), ("b", 128, 2), ("scales of a", 1, 1), ("scales of b", 1, 2)]
    assert boxes == want
    chosen = {
        facts.choose_tactic(replace(PRO, tokens=tokens), SM100A.name) for tokens in (1, 3072, 8192)
    }
    assert chosen == set(TABLE)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2)])
def test_rows_of_a_cluster_have_one_expert(shape: tuple[int, int]) -> None:
    rows, columns = shape
    tactic = replace(TABLE[0], cluster_rows=rows, cluster_columns=columns)
    assert facts.rows_of_one_expert(tactic) == 128 * rows
    for form in facts.forms_of(FLASH, SM100A.name, tactic):
        assert (form.gemm.tactic.cluster_rows, form.gemm.tactic.cluster_columns) == shape
        assert facts.grid(FLASH, form, 148) == 148 // (rows * columns)
        few = replace(FLASH, tokens=1, hidden=192, width=128)  # a tile along columns, six groups
        assert facts.grid(few, form, 148) == 6
    worst = MoeProblem(7, 32, 32, 7, 1, 7)  # each slot a group of its own
    assert facts.most_tiles(worst, tactic) == 7
    assert facts.most_rows(worst, tactic) == 7 * 128 * rows
    drawn = random.Random(f"clusters {shape}")
    for _ in range(100):
        counts = random_counts(drawn)
        problem = MoeProblem(sum(counts), 32, 32, len(counts), 1, len(counts))
        needed = sum(ceil_div(count, facts.rows_of_one_expert(tactic)) for count in counts)
        assert needed <= facts.most_tiles(problem, tactic)


# ---- A: groups in rows ---------------------------------------------------------------------------


def random_counts(drawn: random.Random) -> tuple[int, ...]:
    return tuple(drawn.choice((*EDGES, drawn.randint(0, 400))) for _ in range(drawn.randint(1, 9)))


@pytest.mark.parametrize("blocks", [2, 4, 6, 26])
def test_scales_of_jagged_groups_are_whole_tiles_of_their_own(blocks: int) -> None:
    """What TMA brings of a tile of rows and a step of K is that group's, byte for byte."""
    drawn = random.Random(f"groups {blocks}")
    inner = FIRST.gemm.tactic.inner
    of_step = inner // gemm.NVFP4.block
    for counts in [EDGES, *(random_counts(drawn) for _ in range(20))]:
        begins = begins_of(counts)
        row_bytes = gemm.SCALE_TILE_BYTES * ceil_div(blocks, tensor_memory.SCALES_OF_WORD)
        size = SWIZZLE_128X4.storage_size(begins[-1], blocks)
        assert size == begins[-1] // 128 * row_bytes
        tiles_seen: set[int] = set()
        for count, (first, end) in zip(counts, pairwise(begins), strict=True):
            tiles = [row // 128 for row in range(first, end, 128)]
            assert len(tiles) == ceil_div(count, 128)
            assert tiles_seen.isdisjoint(tiles)
            tiles_seen.update(tiles)
            for tile in tiles:
                require_box(tile, blocks, of_step, row_bytes)


def require_box(tile: int, blocks: int, of_step: int, row_bytes: int) -> None:
    """Compare a tile's boxes with where 128x4 order has its rows."""
    row = torch.arange(128)[:, None]
    for step in range(ceil_div(blocks, of_step)):
        box = tensor_memory.tiles_of_boxes((tile, 0, 3), FIRST.gemm)[2]
        start = box * row_bytes + step * of_step // 4 * gemm.SCALE_TILE_BYTES
        block = torch.arange(step * of_step, min(blocks, (step + 1) * of_step))
        offset = SWIZZLE_128X4.offset_of(row + tile * 128, block, None, blocks)
        # In a stage: words of K one behind the other, rows as the instruction's lanes want them.
        within = block - step * of_step
        lane, column = row % 32, row // 32
        want = within // 4 * gemm.SCALE_TILE_BYTES + 16 * lane + 4 * column + within % 4
        assert torch.equal(offset - start, want)
        assert int(want.max()) < gemm.loads(FIRST.gemm)[2].row_bytes


# ---- B: experts' matrices ------------------------------------------------------------------------


@pytest.mark.parametrize("width", [32, 128, 416, 2048])
def test_scales_of_gate_and_up_lie_as_one_instruction_wants_them(width: int) -> None:
    """Column n of a tile is row n of gate, or n - 128 of up; its lane is n mod 32."""
    blocks, experts, parts = 6, 3, facts.GATE_AND_UP
    tiles = ceil_div(width, 128)
    row_bytes = gemm.SCALE_TILE_BYTES * ceil_div(blocks, 4)
    of_matrix = SWIZZLE_128X4.storage_size(width, blocks)
    assert of_matrix == facts.scale_bytes(width, 16 * blocks) == tiles * row_bytes
    for expert in range(experts):
        for column in range(tiles):
            _, of_codes, _, of_scales = tensor_memory.tiles_of_boxes(
                (0, column, expert), FIRST.gemm
            )
            assert of_codes == of_scales == (column, expert)
            for n in range(256):
                part, row = divmod(n, 128)
                # A box begins at (tile, step, matrices of the expert), and has one tile of each.
                start = (of_scales[1] * parts + part) * of_matrix + of_scales[0] * row_bytes
                offset = (expert * parts + part) * of_matrix + int(
                    SWIZZLE_128X4.offset_of(column * 128 + row, 5, None, blocks)
                )
                # The stage holds gate's words of K, then up's; a copy takes 128 rows of four.
                tensor_column, lane = n // 32, n % 32
                copied = 512 + 16 * lane + 4 * (tensor_column % 4) + 1
                assert offset - start == copied
                assert tensor_column // 4 == part


@pytest.mark.parametrize("form", SECOND, ids=lambda form: str(form.gemm.tactic.columns))
def test_boxes_of_the_second_product_are_those_of_the_plain_one(form: MoeForm) -> None:
    for tile in ((0, 0), (3, 5), (2, 1)):
        plain = tensor_memory.tiles_of_boxes(tile, form.gemm)
        boxes = tensor_memory.tiles_of_boxes((*tile, 7), form.gemm)
        sides = [load.side for load in gemm.loads(form.gemm)]
        for side, box, own in zip(sides, plain, boxes, strict=True):
            assert own == ((box, 7) if side == "b" else box)


# ---- what leaves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [2, 4, 14, 26, 128])
def test_every_code_and_scale_is_written_once(blocks: int) -> None:
    """All tiles along a row, piece by piece, as the storing threads go through them."""
    rows, of_tile = 256, facts.blocks_of_tile(FIRST)
    codes: dict[int, tuple[int, int]] = {}
    scales: dict[int, tuple[int, int]] = {}
    for row in (0, 1, 31, 127, 128, rows - 1):
        for column in range(ceil_div(blocks, of_tile)):
            for piece in range(0, of_tile, facts.BLOCKS_OF_PIECE):
                first = column * of_tile + piece
                for i in range(0, facts.BLOCKS_OF_PIECE, facts.BLOCKS_OF_STORE):
                    if first + i < blocks:
                        at = facts.codes_at(row, first + i, blocks)
                        assert codes.setdefault(at, (row, first + i)) == (row, first + i)
                        assert at * 16 == row * blocks * 8 + (first + i) * 8
                if first < blocks:
                    at = facts.scales_at(row, first, blocks)
                    assert scales.setdefault(at, (row, first)) == (row, first)
                    for i in range(4):
                        assert at * 4 + i == SWIZZLE_128X4.offset_of(row, first + i, None, blocks)
    assert len(codes) == 6 * blocks // 2
    assert len(scales) == 6 * ceil_div(blocks, 4)


def test_a_warp_has_32_rows_and_its_own_barrier() -> None:
    of_warps = [range(w * facts.WARP_ROWS, (w + 1) * facts.WARP_ROWS) for w in range(4)]
    assert [row for rows in of_warps for row in rows] == list(range(tensor_memory.LANES))
    barriers = range(facts.FIRST_BARRIER, facts.FIRST_BARRIER + tensor_memory.STORING_WARPS)
    assert max(barriers) < 16  # PTX ISA 9.1, barrier
    assert facts.words_of_row(FIRST) == 128  # registers of a thread between reading and writing
