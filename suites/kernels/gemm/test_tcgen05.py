"""tcgen05 on the host: words of instructions, their reading in PTX, facts of tensor memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats.layouts import offset_128x4
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.gemm.problem import TACTICS, GemmForm, GemmProblem, choose_form
from degarble.kernels.runtime.targets import SM100A
from degarble.suites.kernels import tcgen05_words as code
from degarble.suites.kernels.sm100_model import BASE, Barrier, Matrix, Memories, Undefined

if TYPE_CHECKING:
    from collections.abc import Callable


# --------------------------------------------------------------------------------------------------
# Words of tcgen05: read as PTX ISA 9.1 lays them out, every bit counts, scales lie right.

# By hand: M 128 is 8 at bit 24, N 192 is 24 at bit 17, E2M1 is 1 at bits 7 and 10.
SCALED = 8 << 24 | 24 << 17 | 1 << 10 | 1 << 7
# By hand: M 128, N 256 is 32, BF16 is 1 at bits 7 and 10, float32 sums are 1 at bit 4.
DENSE = 8 << 24 | 32 << 17 | 1 << 10 | 1 << 7 | 1 << 4
# By hand: swizzle of 128 bytes is 2 at bit 61, version 1 at bit 46, cores 1024 bytes apart.
OPERAND = 2 << 61 | 1 << 46 | (1024 >> 4) << 32 | 1 << 16 | (BASE >> 4)
SCALES = 1 << 46 | (128 >> 4) << 32 | 1 << 16 | (BASE >> 4)


def test_an_instruction_by_hand() -> None:
    assert code.block_scaled(SCALED) == code.Instruction(128, 192, 1, 1)
    assert code.block_scaled(SCALED | 2 << 29 | 3 << 4) == code.Instruction(
        128, 192, 1, 1, a_scale_id=2, b_scale_id=3
    )
    assert code.dense(DENSE) == code.Instruction(128, 256, 1, 1)


def read_as(read: Callable[[int], object], word: int) -> object:
    """Return what a word says, or that it is refused."""
    try:
        return read(word)
    except code.WrongWord as error:
        return str(error)


@pytest.mark.parametrize(("read", "word"), [(code.block_scaled, SCALED), (code.dense, DENSE)])
def test_every_bit_of_an_instruction_counts(read: Callable[[int], object], word: int) -> None:
    assert not [bit for bit in range(32) if read_as(read, word ^ 1 << bit) == read(word)]


@pytest.mark.parametrize("word", [OPERAND, SCALES])
def test_every_bit_of_an_operand_counts(word: int) -> None:
    read = code.operand
    assert not [bit for bit in range(64) if read_as(read, word ^ 1 << bit) == read(word)]


def test_an_operand_by_hand() -> None:
    of = code.operand(OPERAND)
    assert (of.start, of.leading, of.stride, of.swizzle) == (BASE, 16, 1024, 128)
    assert of.byte(0, 0) == BASE
    assert of.byte(1, 0) == BASE + 128 + 16  # row 1: atoms exchanged in pairs
    assert of.byte(7, 112) == BASE + 7 * 128
    assert of.byte(8, 5) == BASE + 1024 + 5
    plain = code.operand(SCALES)
    assert [plain.byte(row, 3) - BASE for row in (0, 1, 7, 8, 31)] == [3, 19, 115, 131, 499]


def test_tma_and_a_descriptor_swizzle_alike() -> None:
    """A box of 128 bytes a row lies where the descriptor of its stage looks for it."""
    rows = np.random.default_rng(1).integers(0, 256, (40, 128), np.uint8)
    matrix = Matrix(rows, 4, (40, 32), swizzle=128)
    addresses, of = matrix.addresses(BASE), code.operand(OPERAND)
    assert all(
        addresses[row, byte] == of.byte(row, byte) for row in range(40) for byte in range(128)
    )
    assert len(set(addresses.flatten().tolist())) == addresses.size


def test_scales_reach_the_lane_and_the_byte_that_the_instruction_reads() -> None:
    """Row i of a scale tile: lane i mod 32 of each group, column i div 32, byte by block of K."""
    scales = np.random.default_rng(2).integers(0, 256, (128, 4), np.uint8)
    tile = np.zeros(512, np.uint8)
    for row in range(128):
        for column in range(4):
            tile[offset_128x4(row, column, 4)] = scales[row, column]
    memories = Memories((256, 256))
    memories.shared[BASE : BASE + 512] = tile
    memories.copy_scales(300, SCALES)
    assert (memories.scales(300, 128) == scales).all()
    assert (memories.scales(302, 64) == scales[64:]).all()  # two columns on: 64 rows on
    for lane in (5, 37, 69, 101):
        assert memories.tensor[lane, 303] == scales[96 + 5].view(np.uint32)[0]


def test_what_is_not_there_is_refused() -> None:
    memories = Memories((256, 128))
    with pytest.raises(Undefined, match="columns 380 to 444 of 256 and 128"):
        memories.columns(380, 64)
    with pytest.raises(code.WrongWord, match="names a byte"):
        memories.columns(1 << 30 | 300, 4)
    with pytest.raises(code.WrongWord, match="layout 1"):
        code.operand(SCALES | 1 << 61)
    memories.tensor[40, 300] ^= 1
    with pytest.raises(Undefined, match="different scales"):
        memories.scales(300, 128)


def test_words_are_made_as_they_are_read() -> None:
    assert code.block_scaled_word(128, 192) == SCALED
    assert code.dense_word(128, 256) == DENSE
    assert code.dense(code.dense_word(128, 256, code.E4M3_OF_F8F6F4)).a_format == 0
    assert code.operand_word(BASE, 1024, 128) == OPERAND
    assert code.operand_word(BASE, 128, 0) == SCALES
    for start, stride, swizzle in ((2048, 512, 64), (4096, 256, 32), (16 * 16383, 16, 0)):
        of = code.operand(code.operand_word(start, stride, swizzle))
        assert (of.start, of.stride, of.swizzle) == (start, stride, swizzle)


def test_a_phase_ends_with_the_last_arrival_and_the_last_byte() -> None:
    barrier = Barrier(2)
    assert barrier.passed(1)
    assert not barrier.passed(0)
    barrier.arrive(expected=100)
    barrier.transact(60)
    barrier.arrive()
    assert not barrier.passed(0)
    barrier.transact(40)
    assert barrier.passed(0)
    with pytest.raises(Undefined, match="3 arrivals where 2 are left"):
        barrier.arrive(3)


# --------------------------------------------------------------------------------------------------
# The reading of tcgen05 instructions in a text: by hand, and with other numbers in it.

WORD = code.operand_word(0, 1024, 128)
TEXT = f"""
    or.b64  %rd8, %rd204, {WORD};
    add.s64 %rd9, %rd8, 6;
    add.s64 %rd10, %rd204, {WORD + 1026};
    mov.pred    %p1, 0;
    mov.b32     %r5, 138413200;
    tcgen05.mma.cta_group::1.kind::f16.collector::a::discard [%r33], %rd9, %rd10, %r5, {{%r1}}, %p1;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%r61, %r62}}, [%r7];
    mov.b64 %rd3, {{%r61, %r62}};
    tcgen05.wait::ld.sync.aligned;
    mov.b64 {{%r63, %r64}}, %rd3;
    add.s32 %r65, %r64, %r64;
"""


def test_reads_what_stands_in_the_text() -> None:
    assert code.products(TEXT) == [code.Product("kind::f16", 138_413_200, 6, 1026, adds=False)]
    assert code.operand_words(TEXT) == {WORD}
    assert code.reads(TEXT) == [code.Read("32x32b.x2", 2, 4)]
    assert not code.early_uses(TEXT)


def test_other_text_is_detected() -> None:
    assert code.products(TEXT.replace("%p1, 0", "%p1, -1"))[0].adds is True
    assert code.products(TEXT.replace("mov.pred    %p1, 0;", ""))[0].adds is None
    assert code.products(TEXT.replace("%rd8, 6", "%rd8, 8"))[0].a == 8
    assert code.operand_words(TEXT.replace(str(WORD), str(WORD ^ 1 << 61))) != {WORD}
    for early in ("add.s32 %r3, %r61, 1;", "mov.b64 {%r3, %r4}, %rd3;\nadd.s32 %r5, %r4, 1;"):
        text = TEXT.replace("    tcgen05.wait", f"{early}\n    tcgen05.wait")
        assert len(code.early_uses(text)) == 1
    for damaged in (
        TEXT.replace("cta_group::1", "cta_group::2"),
        TEXT.replace("mov.b32     %r5", "ld.b32      %r5"),
    ):
        with pytest.raises(code.WrongWord):
            code.products(damaged)
    with pytest.raises(code.WrongWord):
        code.reads(TEXT.replace("wait::ld", "wait::st"))


# --------------------------------------------------------------------------------------------------
# A tile on sm_100a as arithmetic: what fits where, how many instructions, refusals.

FORMS = [
    GemmForm(operands, scales, target, tactic)
    for (target, operands), tactics in TACTICS.items()
    for scales in facts.OPERANDS[operands].scales
    for tactic in tactics
    if target == SM100A.name
]
NVFP4 = {form.tactic.columns: form for form in FORMS if form.operands == "nvfp4"}
PAIRS = {tactic.columns: replace(NVFP4[64], tactic=tactic) for tactic in tensor_memory.PAIRS}

each_form = pytest.mark.parametrize(
    "form",
    [*FORMS, *PAIRS.values()],
    ids=lambda form: (
        f"{form.operands}-{form.tactic.rows}x{form.tactic.columns}"
        + "-pair" * (form.tactic.together > 1)
    ),
)


@each_form
def test_a_thread_block_fits_its_processor(form: GemmForm) -> None:
    held = tensor_memory.footprint(form)
    rest = held.total + tensor_memory.ADDRESS_BYTES + facts.ALIGNMENT
    assert rest <= SM100A.shared_memory_bytes
    assert 3 <= held.stages <= facts.MOST_STAGES
    assert held.barriers == 2 * (held.stages + tensor_memory.accumulators(form))
    columns = tensor_memory.columns_allocated(form)
    assert tensor_memory.columns_held(form) <= columns <= SM100A.tensor_memory_columns
    assert columns & (columns - 1) == 0
    assert columns // 2 < tensor_memory.columns_held(form)


# Columns of a tile: sums at once, columns of scales, where these begin, columns allocated, stages,
# copies of scales a stage.
NUMBERS = {
    8: (2, (16, 16), (16, 32), 64, 8, 8),
    16: (2, (16, 16), (32, 48), 64, 8, 8),
    32: (2, (16, 16), (64, 80), 128, 8, 8),
    64: (2, (16, 16), (128, 144), 256, 6, 8),
    128: (2, (16, 16), (256, 272), 512, 5, 8),
    192: (2, (16, 32), (384, 400), 512, 4, 12),
    256: (1, (16, 32), (256, 272), 512, 3, 12),
}


def numbers(form: GemmForm) -> tuple[object, ...]:
    assert tensor_memory.instructions(form) == 4
    return (
        tensor_memory.accumulators(form),
        tensor_memory.scale_columns(form),
        tensor_memory.first_columns(form),
        tensor_memory.columns_allocated(form),
        tensor_memory.footprint(form).stages,
        tensor_memory.scale_copies(form),
    )


@pytest.mark.parametrize("columns", NUMBERS)
def test_numbers_of_every_nvfp4_form(columns: int) -> None:
    assert numbers(NVFP4[columns]) == NUMBERS[columns]


# Columns of a tile: stages, bytes of a stage in one thread block, bytes that the first one expects.
PAIRED = {
    64: (8, 24_576, 49_152),
    128: (6, 28_672, 57_344),
    192: (5, 34_816, 69_632),
    256: (5, 38_912, 77_824),
}


@pytest.mark.parametrize("columns", PAIRED)
def test_two_together_hold_half_of_b_each_and_more_stages(columns: int) -> None:
    form, alone = PAIRS[columns], NVFP4[columns]
    held = tensor_memory.footprint(form)
    assert (held.stages, held.stage_bytes, facts.expected_bytes(form)) == PAIRED[columns]
    assert facts.transaction_bytes(alone) - held.stage_bytes == columns // 2 * 128
    assert facts.expected_bytes(alone) == facts.transaction_bytes(alone)
    if not tensor_memory.overlaps(form):
        # What an instruction finds in tensor memory is what it finds alone.
        assert [*numbers(form)[:4], numbers(form)[5]] == [
            *NUMBERS[columns][:4],
            NUMBERS[columns][5],
        ]
    assert tensor_memory.arrivals_of_sums(form) == 256 == 2 * tensor_memory.arrivals_of_sums(alone)


def test_sums_that_overlap_share_what_the_first_piece_read_holds() -> None:
    assert [columns for columns, form in PAIRS.items() if tensor_memory.overlaps(form)] == [256]
    assert not any(tensor_memory.overlaps(form) for form in FORMS)
    form = PAIRS[256]
    assert (tensor_memory.accumulators(form), tensor_memory.places_of_sums(form)) == (1, 2)
    apart = tensor_memory.columns_apart(form)
    assert (apart, tensor_memory.first_columns(form)) == (208, (464, 480))
    assert tensor_memory.columns_held(form) == tensor_memory.columns_allocated(form) == 512
    shared = range(apart, 256)
    for place in range(2):
        pieces = [tensor_memory.piece_in_turn(i, place, 4) for i in range(4)]
        assert sorted(pieces) == [0, 1, 2, 3]
        first = place * apart + pieces[0] * facts.PIECE_COLUMNS
        assert set(shared) <= set(range(first, first + facts.PIECE_COLUMNS))


def test_who_receives_a_box_and_who_releases_it() -> None:
    """Codes of A, of B, scales of A, of B."""
    found = {}
    for rows, columns in ((2, 1), (2, 2), (4, 1)):
        tactic = replace(PAIRS[256].tactic, cluster_rows=rows, cluster_columns=columns)
        form = replace(PAIRS[256], tactic=tactic)
        found[rows, columns] = (tensor_memory.sharers(form), tensor_memory.arrivals_of_stage(form))
    assert found == {
        (2, 1): ((1, 1, 1, 2), 1),
        (2, 2): ((2, 1, 2, 2), 2),
        (4, 1): ((1, 2, 1, 4), 2),
    }
    alone = replace(NVFP4[256], tactic=replace(NVFP4[256].tactic, cluster_rows=2))
    assert (tensor_memory.sharers(alone), tensor_memory.arrivals_of_stage(alone)) == (
        (1, 2, 1, 2),
        2,
    )


def test_each_of_two_takes_its_half_of_b_and_the_same_scales() -> None:
    boxes = [tensor_memory.tiles_of_boxes((row, 3), PAIRS[192]) for row in (6, 7)]
    assert boxes == [(6, 6, 6, 4, 5), (7, 7, 7, 4, 5)]
    assert tensor_memory.tiles_of_boxes((6, 3), NVFP4[192]) == (6, 3, 6, 4, 5)


def test_a_swapped_tile_walks_along_n_and_takes_few_rows() -> None:
    problem = GemmProblem(7, 7168, 512, "nvfp4", "e4m3")
    assert facts.cluster_tiles(problem, NVFP4[8].tactic) == (56, 1)
    assert tensor_memory.stores(NVFP4[8]) == 1
    assert tensor_memory.output_bytes(NVFP4[8]) == 2 * 8 * 256
    assert facts.transaction_bytes(NVFP4[8]) == 136 * 128 + 2 * 2048
    assert [tensor_memory.columns_skipped(column, NVFP4[32]) for column in range(5)] == [
        0,
        1,
        2,
        3,
        0,
    ]
    tensor_memory.require_extents(problem, NVFP4[8])
    tensor_memory.require_extents(replace(problem, rows=300), NVFP4[32])
    with pytest.raises(InvalidArgument, match="M of a GEMM = 9"):
        tensor_memory.require_extents(replace(problem, rows=9), NVFP4[8])


def test_every_tile_of_scales_has_a_box_where_a_tile_begins_within_a_pair() -> None:
    loads = {columns: [load.rows for load in facts.loads(form)] for columns, form in NVFP4.items()}
    assert loads == {
        **{columns: [128, columns, 1, 1] for columns in (8, 16, 32)},
        64: [128, 64, 1, 1],
        128: [128, 128, 1, 1],
        192: [128, 192, 1, 1, 1],
        256: [128, 256, 1, 2],
    }
    assert facts.transaction_bytes(NVFP4[192]) == 128 * (128 + 192) + 3 * 2048


def test_the_table_answers_by_rows() -> None:
    chosen = [
        choose_form(GemmProblem(rows, 512, 64, "nvfp4", "e4m3"), SM100A.name).tactic.columns
        for rows in (1, 8, 9, 16, 17, 32, 33, 128, 129, 512, 2048, 2049)
    ]
    assert chosen == [8, 8, 16, 16, 32, 32, 64, 64, 128, 128, 192, 256]
    pairs = [
        tensor_memory.choose_pair(GemmProblem(rows, 512, 64, "nvfp4", "e4m3")).tactic.columns
        for rows in (1, 256, 257, 2048, 2049)
    ]
    assert pairs == [64, 64, 128, 192, 256]


def test_threads_by_role() -> None:
    assert tensor_memory.threads() == 192
    assert tensor_memory.threads_that_store() == tensor_memory.LANES
    assert {tensor_memory.MULTIPLYING_WARP, tensor_memory.LOADING_WARP} == {4, 5}


def test_tactics_that_no_kernel_has_are_refused() -> None:
    pair, swapped = PAIRS[256].tactic, NVFP4[8].tactic
    for form, tactic in (
        (NVFP4[256], replace(pair, cluster_rows=1)),
        (NVFP4[256], replace(pair, cluster_rows=3)),
        (NVFP4[256], replace(pair, together=4, cluster_rows=4)),
        (NVFP4[256], replace(swapped, together=2, cluster_rows=2)),
        (NVFP4[256], replace(pair, together=0)),
        (FORMS[0], pair),
    ):
        with pytest.raises(InvalidArgument, match="two thread blocks together"):
            replace(form, tactic=tactic)
    for tactic in (pair, swapped):
        with pytest.raises(InvalidArgument, match="nvfp4 on sm_100a"):
            replace(NVFP4[256], target="sm_90a", tactic=tactic)


def test_tiles_that_do_not_fit_are_refused() -> None:
    form = NVFP4[256]
    wide = replace(form, tactic=replace(form.tactic, columns=512))
    with pytest.raises(InvalidArgument, match="columns of a tile"):
        tensor_memory.accumulators(wide)
    thin = replace(form, tactic=replace(form.tactic, inner=128))
    with pytest.raises(InvalidArgument, match="bytes of a row in a stage"):
        tensor_memory.footprint(thin)
