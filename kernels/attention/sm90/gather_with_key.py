"""Producer warps for V3.2's keys: 656-byte entries to rows of 576 BF16 values in shared memory.

An entry holds 512 E4M3 codes, four float32 scales, 64 rotated BF16 values. Tiles of 576 leave no
shared memory for waiting codes, so half of a tile's codes (AHEAD turns, one row a warp and turn)
wait in registers; each decoded turn makes room for the codes of AHEAD turns later. A warp's 64
scales lie in two registers of its lanes: row r, block b in register r // 8, lane 4 (r % 8) + b.
Slots, masks, barriers and addresses are those of sm90/gather.py.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from degarble.kernels.attention import problem as facts
from degarble.kernels.attention.problem import Bringing
from degarble.kernels.attention.sm90 import decoding, gather
from degarble.kernels.attention.sm90 import instructions as ptx
from degarble.kernels.gemm import w4a16_instructions as shared
from degarble.kernels.primitives import attention_rows as rows

WORDS = 4  # of a lane's 16 bytes of codes
AHEAD = 8  # turns of which codes wait in registers
BLOCKS = 4  # scales of an entry
ROWS_OF_REGISTER = rows.LANES // BLOCKS


def with_scales(found: gather.Rows, how: Bringing) -> gather.Rows:
    """Issue the reads of the warp's scales: two a lane, zeros for absent rows."""
    lane, _ = gather.standpoint(how)
    scales = []
    for first in (0, ROWS_OF_REGISTER):
        row = lane // BLOCKS + first
        start = found.cache + Int64(gather.of_row(found.values, row)) * gather.CHUNK
        start = start + how.entry.code_bytes + Int64(lane % BLOCKS) * 4
        scales.append(Uint32(ptx.word_if(start, gather.bit(found.present, row))))
    return found._replace(codes=tuple(scales))


def scale_of_turn(found: gather.Rows, turn: int, chunk: Any) -> Any:
    """Return the bits of the scale of a lane's 16 codes in a turn."""
    words = found.codes[turn // ROWS_OF_REGISTER]
    lane = turn % ROWS_OF_REGISTER * BLOCKS + block_of_chunk(chunk)
    return gather.of_row(words, lane)


def block_of_chunk(chunk: Any) -> Any:
    """Return the index of the scale of a 16-byte chunk of codes."""
    return chunk // (rows.LANES // BLOCKS)


def ask(found: gather.Rows, turn: int, stands: gather.Standing, words: Any, place: int) -> None:
    """Issue the reads of a lane's codes of one turn; zeros for an absent row."""
    source = found.cache + Int64(gather.of_row(found.values, Uint32(turn))) * gather.CHUNK
    source = source + Int64(stands.chunk) * gather.CHUNK
    there = gather.bit(found.present, turn)
    for i, word in enumerate(ptx.words_if(source, there, WORDS)):
        words[place * WORDS + i] = word


def decode(
    found: gather.Rows, turn: int, stands: gather.Standing, words: Any, tile_at: Any
) -> None:
    """Decode a lane's waiting codes of one turn, and write them to the tile."""
    scale = scale_of_turn(found, turn, stands.chunk)
    waiting = [Uint32(words[turn % AHEAD * WORDS + i]) for i in range(WORDS)]
    count = WORDS // len(stands.targets)
    for part, target in enumerate(stands.targets):
        codes = gather.chosen_part(waiting, stands.order ^ part, count)
        to = tile_at + (target ^ turn % 8 * gather.CHUNK) + turn * 128
        shared.store_words(to, decoding.e4m3_scaled(codes, scale))


@cute.jit
def produce(
    lists: tuple[gather.List, gather.List],
    widths: tuple[Any, Any],
    walk: tuple[Any, Any, Any],
    places: gather.Places,
    how: cutlass.Constexpr,
) -> None:
    """Bring every tile of a split, each as soon as its stage is empty."""
    entry = how.entry
    lane, warp = gather.standpoint(how)
    turns = how.turns
    stands = gather.standing_of(places.codes, how)
    words = cute.make_rmem_tensor(AHEAD * WORDS, Uint32)
    words.fill(0)
    tile = gather.tile_of_step(Int32(0), walk, widths)
    slot = gather.slot_of(lists, tile, widths, how)
    found = with_scales(gather.rows_of(slot, lists, tile, widths, how), how)
    slot = gather.slot_of(lists, gather.tile_of_step(Int32(1), walk, widths), widths, how)
    for turn in cutlass.range_constexpr(AHEAD):
        ask(found, turn, stands, words, turn)
    # Parity 1: the first wait for an empty stage returns at once.
    stage, phase = Uint32(0), Uint32(1)
    for step in cutlass.range(Int32(0), walk[2], unroll=1):
        tile = gather.tile_of_step(step + 1, walk, widths)
        following = with_scales(gather.rows_of(slot, lists, tile, widths, how), how)
        following_tile = gather.tile_of_step(step + 2, walk, widths)
        slot = gather.slot_of(lists, following_tile, widths, how)
        shared.await_phase(places.full + facts.STAGES * 8 + stage * 8, phase)
        tile_at = places.tiles + stage * (facts.TILE * entry.width * 2)
        full = places.full + stage * 8
        gather.copy_values(found, tile_at, how)
        ptx.arrive_behind_copies(full)
        for turn in cutlass.range_constexpr(turns):
            decode(found, turn, stands, words, tile_at)
            # The registers just decoded are free: refill them for AHEAD turns later.
            later = turn + AHEAD
            if cutlass.const_expr(later < turns):
                ask(found, later, stands, words, later % AHEAD)
            else:
                ask(following, later - turns, stands, words, later % AHEAD)
        if lane == 0:
            gather.leave_masks(found, places.masks, (stage, warp), how)
        cute.arch.sync_warp()  # what all lanes wrote comes before what the first one says
        shared.arrive(full, lane == 0)
        found = following
        stage, phase = gather.shared_next(stage, phase)
    ptx.end_of_copies()


assert AHEAD % ROWS_OF_REGISTER == 0, "registers of a turn are known while the kernel is traced"
