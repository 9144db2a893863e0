"""Words of tcgen05: read as PTX ISA 9.1 lays them out, every bit counts, scales lie right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from degarble.harness.formats.layouts import offset_128x4
from degarble.suites.kernels import tcgen05_words as words
from degarble.suites.kernels.sm100_memories import BASE, Barrier, Matrix, Memories, Undefined

if TYPE_CHECKING:
    from collections.abc import Callable

# By hand: M 128 is 8 at bit 24, N 192 is 24 at bit 17, E2M1 is 1 at bits 7 and 10.
SCALED = 8 << 24 | 24 << 17 | 1 << 10 | 1 << 7
# By hand: M 128, N 256 is 32, BF16 is 1 at bits 7 and 10, float32 sums are 1 at bit 4.
DENSE = 8 << 24 | 32 << 17 | 1 << 10 | 1 << 7 | 1 << 4
# By hand: swizzle of 128 bytes is 2 at bit 61, version 1 at bit 46, cores 1024 bytes apart.
OPERAND = 2 << 61 | 1 << 46 | (1024 >> 4) << 32 | 1 << 16 | (BASE >> 4)
SCALES = 1 << 46 | (128 >> 4) << 32 | 1 << 16 | (BASE >> 4)


def test_an_instruction_by_hand() -> None:
    assert words.block_scaled(SCALED) == words.Instruction(128, 192, 1, 1)
    assert words.block_scaled(SCALED | 2 << 29 | 3 << 4) == words.Instruction(
        128, 192, 1, 1, a_scale_id=2, b_scale_id=3
    )
    assert words.dense(DENSE) == words.Instruction(128, 256, 1, 1)


def read_as(read: Callable[[int], object], word: int) -> object:
    """Return what a word says, or that it is refused."""
    try:
        return read(word)
    except words.WrongWord as error:
        return str(error)


@pytest.mark.parametrize(("read", "word"), [(words.block_scaled, SCALED), (words.dense, DENSE)])
def test_every_bit_of_an_instruction_counts(read: Callable[[int], object], word: int) -> None:
    assert not [bit for bit in range(32) if read_as(read, word ^ 1 << bit) == read(word)]


@pytest.mark.parametrize("word", [OPERAND, SCALES])
def test_every_bit_of_an_operand_counts(word: int) -> None:
    read = words.operand
    assert not [bit for bit in range(64) if read_as(read, word ^ 1 << bit) == read(word)]


def test_an_operand_by_hand() -> None:
    of = words.operand(OPERAND)
    assert (of.start, of.leading, of.stride, of.swizzle) == (BASE, 16, 1024, 128)
    assert of.byte(0, 0) == BASE
    assert of.byte(1, 0) == BASE + 128 + 16  # row 1: atoms exchanged in pairs
    assert of.byte(7, 112) == BASE + 7 * 128
    assert of.byte(8, 5) == BASE + 1024 + 5
    plain = words.operand(SCALES)
    assert [plain.byte(row, 3) - BASE for row in (0, 1, 7, 8, 31)] == [3, 19, 115, 131, 499]


def test_tma_and_a_descriptor_swizzle_alike() -> None:
    """A box of 128 bytes a row lies where the descriptor of its stage looks for it."""
    rows = np.random.default_rng(1).integers(0, 256, (40, 128), np.uint8)
    matrix = Matrix(rows, 4, (40, 32), swizzle=128)
    addresses, of = matrix.addresses(BASE), words.operand(OPERAND)
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
    with pytest.raises(words.WrongWord, match="names a byte"):
        memories.columns(1 << 30 | 300, 4)
    with pytest.raises(words.WrongWord, match="layout 1"):
        words.operand(SCALES | 1 << 61)
    memories.tensor[40, 300] ^= 1
    with pytest.raises(Undefined, match="different scales"):
        memories.scales(300, 128)


def test_words_are_made_as_they_are_read() -> None:
    assert words.block_scaled_word(128, 192) == SCALED
    assert words.dense_word(128, 256) == DENSE
    assert words.dense(words.dense_word(128, 256, words.E4M3_OF_F8F6F4)).a_format == 0
    assert words.operand_word(BASE, 1024, 128) == OPERAND
    assert words.operand_word(BASE, 128, 0) == SCALES
    for start, stride, swizzle in ((2048, 512, 64), (4096, 256, 32), (16 * 16383, 16, 0)):
        of = words.operand(words.operand_word(start, stride, swizzle))
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
